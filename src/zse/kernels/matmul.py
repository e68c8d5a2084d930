"""out[m, n] = sum_k a[m, k] * w[n, k] + bias[n]: every weight scheme; int8, int16 or f32 activations, one token or many.

Weights are in the r16 layout (docs/design/0001-cpu-engine.md): a register's lanes are rows, so nothing is added across lanes, and one
broadcast of activations serves all rows of a tile. A block computes one tile of 16 rows for up to TOKENS_PER_BLOCK tokens.

int8 activations: the four bytes of a 32-bit lane are four consecutive k of one row. With VNNI one instruction multiplies and adds
them into i32. Without, maddubs gives i16 pairs; their range allows 8 (4 bits), 4 (5 bits) or 2 (6 bits) steps before they are widened,
and 8-bit weights go through |w| * sign(a, w), because u8 * s8 pairs would overflow i16. Per 32 values of k:
out += scale_w * scale_a * dot + offset_w * (scale_a * sum of a's q).

int16 activations are two bytes, a = scale_a * (q + low / 256), multiplied apart and added as 256 * dot(q) + dot(low): as exact as f32
beside weights of 4 to 8 bits, for twice the multiply-adds of int8 (f32 takes four times, and unpacks every weight into f32).
"""

from collections.abc import Iterator

from zse import kernel as zl
from zse.kernels import activation, gpu, host
from zse.kernels.op import (
    Case,
    Cost,
    HostActivation,
    HostArray,
    HostFp8Activation,
    Op,
    Output,
    Tolerance,
    check,
    later,
    on_gpu,
    require,
)
from zse.lazy import numpy as np
from zse.quant.scheme import AffineScheme, DenseScheme
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div

TILE = 16  # rows of a tile, the r16 layout's
TOKENS_PER_BLOCK = 64  # 64 tokens * 2,048 bytes of int8 activations stay in a 256 KiB L2 while a column of tiles passes
LOW = 0x0F0F0F0F


@zl.inline
def unpack(q, high, block, part, lanes, BITS):
    """The 8 steps of one 32-wide block as byte vectors (values 0 .. 2**BITS - 1) for `lanes` rows from row `part` * lanes."""
    if BITS == 8:
        return [zl.load(q + block * 128 + (s * TILE + part * lanes), lanes) for s in zl.static(range(8))]
    packed = [zl.load(q + block * 64 + (j * TILE + part * lanes), lanes) for j in zl.static(range(4))]
    w = [packed[s] & LOW if s < 4 else (packed[s - 4] >> 4) & LOW for s in zl.static(range(8))]
    if BITS == 5:
        bits = zl.load(high + block * TILE + part * lanes, lanes)
        w = [w[s] | ((bits << (4 - s) if s <= 4 else bits >> (s - 4)) & 0x10101010) for s in zl.static(range(8))]
    if BITS == 6:
        pairs = [
            zl.load(high + block * (2 * TILE) + (half * TILE + part * lanes), lanes) for half in zl.static(range(2))
        ]
        w = [
            w[s] | ((pairs[s // 4] << (4 - 2 * (s % 4)) if s % 4 <= 2 else pairs[s // 4] >> 2) & 0x30303030)
            for s in zl.static(range(8))
        ]
    return w


@zl.inline
def dots(w, a, first, count, BITS):
    """For every token's activations in `a` (i32 pointers): i32 lanes, the sum over steps first .. first + count - 1 of weights times
    the broadcast activations. Steps outside, tokens inside: the tokens' sums are independent chains that hide the latency of a
    multiply-add."""
    lanes = zl.target.lanes
    totals = [zl.i32.x(lanes)(0) for _ in a]
    if zl.target.has("vnni"):
        for s in zl.static(range(first, first + count)):
            for t, at in enumerate(a):
                totals[t] = zl.dot4_u8s8(totals[t], w[s], zl.splat(at[s], lanes))
    elif BITS == 8:
        for s in zl.static(range(first, first + count)):
            weights = w[s] ^ zl.i32.x(lanes)(-2139062144)  # 0x80808080: q - 128 as a signed byte
            size = zl.abs_s8(weights)
            for t, at in enumerate(a):
                totals[t] += zl.pairs_i16(zl.pairs_u8s8(size, zl.sign_s8(zl.splat(at[s], lanes), weights)))
    else:
        run = {4: 8, 5: 4, 6: 2}[BITS]  # steps whose i16 sums cannot overflow: run * 2 * (2**BITS - 1) * 127 < 32768
        for start in zl.static(range(first, first + count, run)):
            sums = [zl.pairs_u8s8(w[start], zl.splat(at[start], lanes)) for at in a]
            for s in zl.static(range(start + 1, min(start + run, first + count))):
                for t, at in enumerate(a):
                    sums[t] = zl.add_i16(sums[t], zl.pairs_u8s8(w[s], zl.splat(at[s], lanes)))
            for t in zl.static(range(len(a))):
                totals[t] += zl.pairs_i16(sums[t])
    return totals


@zl.inline
def load_scales(scale, offset, group, part, lanes, BITS, SYMMETRIC, WIDE):
    """(scale, what multiplies scale_a * sum(q_a)) of a group, f32. The dot product above is of q, or of q - 128 for BITS 8 without VNNI;
    of int16 activations it is 256 times as large, and the scale as much smaller."""
    s = zl.convert(zl.load(scale + group * TILE + part * lanes, lanes), zl.f32)
    unit = s * (1 / 256) if WIDE else s
    centered = BITS == 8 and not zl.target.has("vnni")
    if SYMMETRIC:
        return unit, None if centered else s * float(-(2 ** (BITS - 1)))
    o = zl.convert(zl.load(offset + group * TILE + part * lanes, lanes), zl.f32)
    return unit, zl.fma(s, 128.0, o) if centered else o


@zl.inline
def sum16(a):
    """The sum of 16 int8 values at a (i32 pointer), as i32: u8 * s8 products with ones, then across four lanes."""
    ones, bytes_ = zl.i32.x(4)(0x01010101), zl.load(a, 4)
    return zl.reduce_add(
        zl.dot4_u8s8(zl.i32.x(4)(0), ones, bytes_)
        if zl.target.has("vnni")
        else zl.pairs_i16(zl.pairs_u8s8(ones, bytes_))
    )


@zl.inline
def joined_dots(w, a, low, first, count, BITS):
    """dots() of int8 activations, or 256 * dots() of a + dots() of low: at most 2**28, which i32 holds."""
    totals = dots(w, a + low, first, count, BITS)
    tokens = len(a)
    return [(totals[t] << 8) + totals[tokens + t] for t in range(tokens)] if low else totals


@zl.inline
def accumulate(acc, p, w, scales, a_rows, low_rows, sa_rows, su_rows, block, BITS, GROUP):
    """acc[p * tokens + t] += one 32-wide block, for part p of the rows and every token t (the row pointers of the tokens; low_rows: [] of
    int8 activations)."""
    tokens = len(a_rows)
    a = [zl.cast_ptr(row + block * 32, zl.i32) for row in a_rows]
    low = [zl.cast_ptr(row + block * 32, zl.i32) for row in low_rows]
    if GROUP == 16:
        first, second = scales
        firsts, seconds = joined_dots(w, a, low, 0, 4, BITS), joined_dots(w, a, low, 4, 4, BITS)
        for t in zl.static(range(tokens)):
            i, sa = p * tokens + t, sa_rows[t][block]
            acc[i] = zl.fma(zl.convert(firsts[t], zl.f32), first[0] * sa, acc[i])
            acc[i] = zl.fma(zl.convert(seconds[t], zl.f32), second[0] * sa, acc[i])
            if first[1] is not None:
                # a_sum is per 32 values; the groups here are 16.
                half = (zl.f32((sum16(a[t]) << 8) + sum16(low[t])) * (1 / 256) if low else zl.f32(sum16(a[t]))) * sa
                acc[i] = zl.fma(first[1], half, acc[i])
                acc[i] = zl.fma(second[1], su_rows[t][block] - half, acc[i])
    else:
        totals = joined_dots(w, a, low, 0, 8, BITS)
        for t in zl.static(range(tokens)):
            i = p * tokens + t
            acc[i] = zl.fma(zl.convert(totals[t], zl.f32), scales[0] * sa_rows[t][block], acc[i])
            if scales[1] is not None:
                acc[i] = zl.fma(scales[1], su_rows[t][block], acc[i])


@zl.inline
def store_tile(out, bias, has_bias, acc, tile, part, rows, lanes):
    """Write one part of a tile's rows for one token; out points at the token's row; the last tile may be partial."""
    row = tile * TILE + part * lanes
    total = acc
    if has_bias != 0:
        if row + lanes <= rows:
            total = total + zl.load(bias + row, lanes)
    if row + lanes <= rows:
        zl.store(out + row, total)
    else:
        spill = zl.local_array(zl.f32, 16)
        zl.store(spill, total)
        for r in range(row, rows):
            if has_bias != 0:
                out[r] = spill[r - row] + bias[r]
            else:
                out[r] = spill[r - row]


@zl.inline
def multiply_pass(
    planes,
    inputs,
    bias,
    out,
    token,
    token_last,
    tile,
    first_part,
    rows,
    blocks,
    groups,
    group_blocks,
    has_bias,
    BITS,
    SYMMETRIC,
    GROUP,
    PARTS,
    TOKENS,
    WIDE,
):
    """Parts first_part .. first_part + PARTS - 1 of a tile's rows for tokens token .. token + TOKENS - 1; those from
    token_last on are computed as the one before and dropped. planes, inputs: the pointers of the tile's weights, and of
    the activations."""
    q, high, scale, offset = planes
    aq, a_low, a_scale, a_sum = inputs
    lanes = zl.target.lanes
    parts = [first_part + p for p in zl.static(range(PARTS))]
    at = [min(token + t, token_last - 1) for t in zl.static(range(TOKENS))]
    a_rows = [aq + at[t] * (blocks * 32) for t in zl.static(range(TOKENS))]
    low_rows = [a_low + at[t] * (blocks * 32) for t in zl.static(range(TOKENS if WIDE else 0))]
    sa_rows = [a_scale + at[t] * blocks for t in zl.static(range(TOKENS))]
    su_rows = [a_sum + at[t] * blocks for t in zl.static(range(TOKENS))]
    acc = [zl.f32.x(lanes)(0) for _ in zl.static(range(PARTS * TOKENS))]
    if GROUP == 0:
        for group in range(groups):
            scales = [
                load_scales(scale, offset, group, part, lanes, BITS, SYMMETRIC, WIDE) for part in zl.static(parts)
            ]
            for block in range(group * group_blocks, (group + 1) * group_blocks):
                for p, part in enumerate(parts):
                    w = unpack(q, high, block, part, lanes, BITS)
                    accumulate(acc, p, w, scales[p], a_rows, low_rows, sa_rows, su_rows, block, BITS, GROUP)
    else:
        for block in range(blocks):
            for p, part in enumerate(parts):
                w = unpack(q, high, block, part, lanes, BITS)
                if GROUP == 16:
                    scales = [
                        load_scales(scale, offset, block * 2 + half, part, lanes, BITS, SYMMETRIC, WIDE)
                        for half in zl.static(range(2))
                    ]
                else:
                    scales = load_scales(scale, offset, block, part, lanes, BITS, SYMMETRIC, WIDE)
                accumulate(acc, p, w, scales, a_rows, low_rows, sa_rows, su_rows, block, BITS, GROUP)
    for t in zl.static(range(TOKENS)):
        if token + t < token_last:
            for p, part in enumerate(parts):
                store_tile(out + at[t] * rows, bias, has_bias, acc[p * TOKENS + t], tile, part, rows, lanes)


@zl.kernel
def matmul_int8(
    q: zl.Ptr[zl.i32, "const"],
    high: zl.Ptr[zl.i32, "const"],
    scale: zl.Ptr[zl.f16, "const"],
    offset: zl.Ptr[zl.f16, "const"],
    aq: zl.Ptr[zl.i8, "const"],
    a_low: zl.Ptr[zl.i8, "const"],
    a_scale: zl.Ptr[zl.f32, "const"],
    a_sum: zl.Ptr[zl.f32, "const"],
    bias: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.f32],
    tokens: zl.i64,
    rows: zl.i64,
    blocks: zl.i64,
    group_blocks: zl.i64,
    has_bias: zl.i64,
    BITS: zl.static,
    SYMMETRIC: zl.static,
    GROUP: zl.static,
    PARTS: zl.static,
    TOKENS: zl.static,
    WIDE: zl.static,
):
    """WIDE: int16 activations, whose second byte is in a_low. GROUP: 16, 32, or 0 for any multiple of 32 (group_blocks * 32). PARTS: register parts of a tile computed in one pass over k.
    TOKENS: of a pass; what is left takes half as many where they fit. blocks = K / 32. A grid block is (tile, group of
    TOKENS_PER_BLOCK tokens)."""
    tile = zl.block_index(0)
    token_first = zl.block_index(1) * TOKENS_PER_BLOCK
    token_last = min(token_first + TOKENS_PER_BLOCK, tokens)
    groups = blocks * 2 if GROUP == 16 else blocks if GROUP == 32 else blocks // group_blocks
    planes = [
        q + tile * blocks * (128 if BITS == 8 else 64),
        high + tile * blocks * {4: 0, 5: TILE, 6: 2 * TILE, 8: 0}[BITS],
        scale + tile * groups * TILE,
        offset + tile * groups * TILE,
    ]
    inputs = [aq, a_low, a_scale, a_sum]
    for first_part in range(0, TILE // zl.target.lanes, PARTS):
        for token in range(token_first, token_last, TOKENS):
            if TOKENS > 1 and token_last - token <= TOKENS // 2:
                multiply_pass(
                    planes,
                    inputs,
                    bias,
                    out,
                    token,
                    token_last,
                    tile,
                    first_part,
                    rows,
                    blocks,
                    groups,
                    group_blocks,
                    has_bias,
                    BITS,
                    SYMMETRIC,
                    GROUP,
                    PARTS,
                    max(TOKENS // 2, 1),
                    WIDE,
                )
            else:
                multiply_pass(
                    planes,
                    inputs,
                    bias,
                    out,
                    token,
                    token_last,
                    tile,
                    first_part,
                    rows,
                    blocks,
                    groups,
                    group_blocks,
                    has_bias,
                    BITS,
                    SYMMETRIC,
                    GROUP,
                    PARTS,
                    TOKENS,
                    WIDE,
                )


@zl.inline
def weight_f32(q, high, scales, block, k, part, lanes, BITS):
    """Column k (0 .. 31, compile time) of a block as f32 weights: scale * q + offset."""
    s, byte = k // 4, k % 4
    if BITS == 8:
        word = zl.load(q + block * 128 + (s * TILE + part * lanes), lanes)
        value = (word >> (8 * byte)) & 255
    else:
        word = zl.load(q + block * 64 + ((s % 4) * TILE + part * lanes), lanes)
        value = (word >> (8 * byte + (4 if s >= 4 else 0))) & 15
        if BITS == 5:
            bits = zl.load(high + block * TILE + part * lanes, lanes)
            value = value | (((bits >> (8 * byte + s)) & 1) << 4)
        if BITS == 6:
            pairs = zl.load(high + block * (2 * TILE) + ((s // 4) * TILE + part * lanes), lanes)
            value = value | (((pairs >> (8 * byte + 2 * (s % 4))) & 3) << 4)
    return zl.fma(zl.convert(value, zl.f32), scales[0], scales[1])


@zl.kernel
def matmul_f32(
    q: zl.Ptr[zl.i32, "const"],
    high: zl.Ptr[zl.i32, "const"],
    scale: zl.Ptr[zl.f16, "const"],
    offset: zl.Ptr[zl.f16, "const"],
    a: zl.Ptr[zl.f32, "const"],
    bias: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.f32],
    tokens: zl.i64,
    rows: zl.i64,
    blocks: zl.i64,
    group_blocks: zl.i64,
    has_bias: zl.i64,
    BITS: zl.static,
    SYMMETRIC: zl.static,
    HALVES: zl.static,
    TOKENS: zl.static,
):
    """Quantized weights with f32 activations: every weight is dequantized once per TOKENS tokens, then multiplied in f32.
    HALVES: groups of 16 have two scales a block; wider groups repeat theirs group_blocks blocks."""
    lanes = zl.target.lanes
    tile = zl.block_index(0)
    token_first = zl.block_index(1) * TOKENS_PER_BLOCK
    token_last = min(token_first + TOKENS_PER_BLOCK, tokens)
    q_tile = q + tile * blocks * (128 if BITS == 8 else 64)
    high_tile = high + tile * blocks * {4: 0, 5: TILE, 6: 2 * TILE, 8: 0}[BITS]
    groups = blocks * 2 if HALVES == 2 else blocks // group_blocks
    scale_tile = scale + tile * groups * TILE
    offset_tile = offset + tile * groups * TILE
    # Independent sums hide the latency of a multiply-add where one token gives one chain only: two over k (even, odd) where a
    # register is a tile, else the tile's parts side by side. How many sums over k there are must not depend on TOKENS: a
    # token's result is the same alone and in a batch.
    chains = 2 if lanes == TILE else 1
    parts_at_once = TILE // lanes if TOKENS == 1 else 1
    for first_part in range(0, TILE // lanes, parts_at_once):
        parts = [first_part + p for p in zl.static(range(parts_at_once))]
        for token in range(token_first, token_last, TOKENS):
            at = [min(token + t, token_last - 1) for t in zl.static(range(TOKENS))]
            a_rows = [a + at[t] * (blocks * 32) for t in zl.static(range(TOKENS))]
            acc = [zl.f32.x(lanes)(0) for _ in zl.static(range(parts_at_once * TOKENS * chains))]
            for block in range(blocks):
                for half in zl.static(range(2)):
                    group = block * 2 + half if HALVES == 2 else block // group_blocks
                    for p, part in enumerate(parts):
                        s = zl.convert(zl.load(scale_tile + group * TILE + part * lanes, lanes), zl.f32)
                        if SYMMETRIC:
                            o = s * float(-(2 ** (BITS - 1)))
                        else:
                            o = zl.convert(zl.load(offset_tile + group * TILE + part * lanes, lanes), zl.f32)
                        for k in zl.static(range(half * 16, half * 16 + 16)):
                            w = weight_f32(q_tile, high_tile, (s, o), block, k, part, lanes, BITS)
                            for t in zl.static(range(TOKENS)):
                                i = (p * TOKENS + t) * chains + k % chains
                                acc[i] = zl.fma(w, zl.f32.x(lanes)(a_rows[t][block * 32 + k]), acc[i])
            for t in zl.static(range(TOKENS)):
                if token + t < token_last:
                    for p, part in enumerate(parts):
                        first = (p * TOKENS + t) * chains
                        total = acc[first] + acc[first + 1] if chains == 2 else acc[first]
                        store_tile(out + at[t] * rows, bias, has_bias, total, tile, part, rows, lanes)


@zl.kernel
def matmul_dense(
    w: zl.Ptr["W", "const"],
    a: zl.Ptr[zl.f32, "const"],
    bias: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.f32],
    tokens: zl.i64,
    rows: zl.i64,
    width: zl.i64,
    has_bias: zl.i64,
    W: zl.static,
    TOKENS: zl.static,
    UNROLL: zl.static,
):
    """f32, f16 or bf16 weights [T, K, 16] with f32 activations; width = K. UNROLL independent sums over k hide the latency of
    a multiply-add (4 cycles)."""
    lanes = zl.target.lanes
    tile = zl.block_index(0)
    token_first = zl.block_index(1) * TOKENS_PER_BLOCK
    token_last = min(token_first + TOKENS_PER_BLOCK, tokens)
    w_tile = w + tile * width * TILE
    for part in range(TILE // lanes):
        for token in range(token_first, token_last, TOKENS):
            at = [min(token + t, token_last - 1) for t in zl.static(range(TOKENS))]
            a_rows = [a + at[t] * width for t in zl.static(range(TOKENS))]
            acc = [zl.f32.x(lanes)(0) for _ in zl.static(range(UNROLL * TOKENS))]
            main = width // UNROLL * UNROLL
            for k in range(0, main, UNROLL):
                for u in zl.static(range(UNROLL)):
                    column = zl.convert(zl.load(w_tile + (k + u) * TILE + part * lanes, lanes), zl.f32)
                    for t in zl.static(range(TOKENS)):
                        i = u * TOKENS + t
                        acc[i] = zl.fma(column, zl.f32.x(lanes)(a_rows[t][k + u]), acc[i])
            for k in range(main, width):
                column = zl.convert(zl.load(w_tile + k * TILE + part * lanes, lanes), zl.f32)
                for t in zl.static(range(TOKENS)):
                    acc[t] = zl.fma(column, zl.f32.x(lanes)(a_rows[t][k]), acc[t])
            for t in zl.static(range(TOKENS)):
                if token + t < token_last:
                    total = acc[t]
                    for u in zl.static(range(1, UNROLL)):
                        total = total + acc[u * TOKENS + t]
                    store_tile(out + at[t] * rows, bias, has_bias, total, tile, part, rows, lanes)


# Tokens that share one pass over the weights; the smallest that covers a batch is taken. With int16 activations a token has two sums:
# those of eight do not fit the registers. With f32 a weight is dequantized once per tile.
TILES = {"int8": (1, 8), "int16": (1, 4), "f32": (1, 8)}
DENSE_TILES = {1: 2, 4: 2}  # tokens -> UNROLL: one for all, or a token's sum would depend on its batch
DTYPES = {"f32": zl.f32, "f16": zl.f16, "bf16": zl.bf16}


def group_class(scheme) -> int:
    """The GROUP static for a scheme: 16 and 32 have their own loops, everything wider shares one."""
    return scheme.group if scheme.group in (16, 32) else 0


def symbol_of(scheme, kind: str, tokens: int) -> str:
    """The variant for a weight scheme, an activation kind ("int8", "int16", "f32") and a tile of tokens."""
    if scheme.numbers == "w":
        return f"matmul_{scheme.element}_t{tokens}"
    name = f"matmul_{kind}_int{scheme.bits}{'s' if scheme.symmetric else 'a'}"
    if kind == "f32":
        return f"{name}_{'g16' if scheme.group == 16 else 'wide'}_t{tokens}"
    return f"{name}_{ {16: 'g16', 32: 'g32', 0: 'wide'}[group_class(scheme)] }_t{tokens}"


def _tile(tokens: int, tiles) -> int:
    return next((tile for tile in tiles if tile >= tokens), max(tiles))


def matmul(
    recorder,
    a,
    weight,
    out,
    bias=None,
    *,
    independent: bool = False,
    max_tokens: int = TOKENS_PER_BLOCK,
    accumulate: bool = False,
) -> None:
    """out [M, N] = a [M, K] @ weight [N, K].T + bias f32 [N]; accumulate: out += (GPU only).

    CPU: a f32 Tensor, int8 or int16 Activation (dense weights take f32 only), out f32. GPU: a bf16 (above 64 tokens fp8 weights take an
    Fp8Activation), out f32 or bf16. max_tokens: the most tokens this
    recording will run with; it picks the kernel and how many tokens share a pass over the weights. independent: may overlap with the
    launch just before.
    """
    if on_gpu(recorder):
        gpu.matmul.record(recorder, a, weight, out, bias, max_tokens, accumulate=accumulate)
        return
    require(not accumulate, "matmul: accumulate is the GPU's; add_rmsnorm adds on the CPU")
    rows, width = weight.shape
    tokens = out.shape[0]
    check("matmul out", out, "f32", tokens, rows)
    check("matmul a", a, ("f32", "int8", "int16"), tokens, width)
    if bias is not None:
        check("matmul bias", bias, "f32", rows)
    scheme, planes = weight.scheme, weight.planes
    grid = (-(-rows // TILE), ceil_div(tokens, TOKENS_PER_BLOCK))
    common = {"bias": bias, "out": out, "tokens": tokens, "rows": rows, "has_bias": int(bias is not None)}
    require(scheme.fits(width), f"matmul: {width} columns do not fit {scheme}")
    require(
        a.dtype in scheme.forms,
        f"matmul: {scheme.kind} weights take {' or '.join(scheme.forms) or 'no'} activations on a CPU",
    )
    tile, args = ARGUMENTS[scheme.kind](scheme, planes, a, width)
    symbol = symbol_of(scheme, a.dtype, _tile(max_tokens, tile))
    recorder.launch(symbol, Args(**args, **common), grid, independent=independent)


def _dense_arguments(scheme, planes, a, width: int) -> tuple[tuple, dict]:
    return DENSE_TILES, {"w": planes["w"], "a": a, "width": width}


def _affine_arguments(scheme, planes, a, width: int) -> tuple[tuple, dict]:
    inputs = {"a": a} if a.dtype == "f32" else {"aq": a.q, "a_low": a.low, "a_scale": a.scale, "a_sum": a.sum}
    return TILES[a.dtype], {
        "q": planes["q"],
        "high": planes.get("high"),
        "scale": planes["scale"],
        "offset": planes.get("offset"),
        **inputs,
        "blocks": width // 32,
        "group_blocks": (scheme.group or width) // 32 or 1,
    }


# By a scheme's kind: the tiles of tokens that there are variants for, and the arguments that only its kernels take.
ARGUMENTS = {"dense": _dense_arguments, "affine": _affine_arguments}


def matmul_gated(recorder, a, weight, out, kind: str, *, max_tokens: int = TOKENS_PER_BLOCK) -> None:
    """out bf16 [M, N] = act(a @ gate.T) * (a @ up.T) for weight [2N, K], gate rows first, N a multiple of 16. GPU only: on the CPU
    record matmul and gated. kind: "silu" or "gelu_tanh". a and max_tokens: as in matmul."""
    require(on_gpu(recorder), "matmul_gated: GPU only; on the CPU record matmul and gated")

    gpu.matmul.record(recorder, a, weight, out, None, max_tokens, gate=kind)


def _launch(recorder, a, weight, out, bias=None, gate=None, kernel=None, **options) -> None:
    """Both launchers, for the cases; kernel: one that a case is about."""
    if kernel is not None:
        gpu.matmul.record(recorder, a, weight, out, bias, gate=gate, kernel=kernel, **options)
    elif gate is None:
        matmul(recorder, a, weight, out, bias, **options)
    else:
        matmul_gated(recorder, a, weight, out, gate, **options)


def _variants(target) -> list[zl.Variant]:
    variants = []
    for bits in (4, 5, 6, 8):
        for symmetric in (False, True):
            for group in (16, 32, 0):
                scheme = AffineScheme(bits, group, symmetric)
                for kind, tokens in ((form, size) for form in ("int8", "int16") for size in TILES[form]):
                    parts = TILE // target.lanes if tokens == 1 else 1  # decode reads each line of weights once
                    variants.append(
                        zl.Variant(
                            symbol_of(scheme, kind, tokens),
                            matmul_int8,
                            {
                                "BITS": bits,
                                "SYMMETRIC": symmetric,
                                "GROUP": group,
                                "PARTS": parts,
                                "TOKENS": tokens,
                                "WIDE": kind == "int16",
                            },
                        )
                    )
                if group != 32:
                    variants += [
                        zl.Variant(
                            symbol_of(scheme, "f32", tokens),
                            matmul_f32,
                            {"BITS": bits, "SYMMETRIC": symmetric, "HALVES": 2 if group == 16 else 1, "TOKENS": tokens},
                        )
                        for tokens in TILES["f32"]
                    ]
    for name, dtype in DTYPES.items():
        variants += [
            zl.Variant(f"matmul_{name}_t{tokens}", matmul_dense, {"W": dtype, "TOKENS": tokens, "UNROLL": unroll})
            for tokens, unroll in DENSE_TILES.items()
        ]
    return variants


def _reference(a, weight, bias=None, out=None, gate=None, accumulate=False, max_tokens=None, kernel=None):

    x = (
        a.dequantize()
        if isinstance(a, HostActivation | HostFp8Activation)
        else np.asarray(a.wide() if isinstance(a, HostArray) else a, np.float64)
    )
    y = x @ weight.dequantize().astype(np.float64).T
    if bias is not None:
        y = y + bias.astype(np.float64)
    if gate is not None:
        return activation.GATED.reference(y, gate)
    return {"out": y + out if accumulate else y}


def _cases(rng, family="cpu") -> Iterator[Case]:
    if family == "gpu":
        yield from gpu.matmul_cases.cases(rng)
        return

    schemes = [
        AffineScheme(bits, group, symmetric)
        for bits in (4, 5, 6, 8)
        for group in (16, 32, 64, 0)
        for symmetric in (False, True)
    ]
    shapes = [(1, 32, 64), (3, 40, 128), (8, 16, 192), (67, 24, 64), (1, 1, 256), (5, 33, 320)]
    for scheme in [*schemes, *(DenseScheme(dtype) for dtype in DTYPES)]:
        for kind in sorted(scheme.forms):
            tokens, rows, width = shapes[int(rng.integers(len(shapes)))]
            weight = host.random_weight(rng, rows, width, scheme)
            a = rng.standard_normal((tokens, width)).astype(np.float32)
            if kind != "f32":
                a = HostActivation.quantize(a, kind)
            bias = rng.standard_normal(rows).astype(np.float32) if rng.integers(2) else None
            size = float(np.abs(weight.dequantize()).max()) * width
            near = Tolerance(size * 4e-6, 1e-5, f"f32 sums over {width} products in another order than float64")
            yield Case(
                f"{scheme} {kind} {tokens}x{rows}x{width}",
                {"a": a, "weight": weight, "bias": bias},
                {"out": Output((tokens, rows), "float32", near)},
                {"max_tokens": tokens},
            )


def _cost(case: Case) -> Cost:
    tokens, width = case.outputs["out"].shape[0], case.inputs["weight"].shape[1]
    a, out, weight = case.inputs["a"], case.outputs["out"], case.inputs["weight"]
    moved = weight.nbytes + tokens * width * (
        2 if isinstance(a, HostArray) else 1 if isinstance(a, HostFp8Activation) else 4
    )
    moved += 0 if getattr(a, "low", None) is None else tokens * width
    moved += out.shape[0] * out.shape[1] * (2 if out.dtype == "bf16" else 8 if out.inout is not None else 4)
    return Cost(moved, 2 * tokens * weight.shape[0] * width)


MATMUL = Op(
    "matmul",
    _variants,
    _launch,
    _reference,
    _cases,
    _cost,
    later("gpu.matmul", "variants"),
    later("gpu.matmul_sizes", "sizes"),
)
