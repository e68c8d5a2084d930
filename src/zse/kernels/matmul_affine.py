"""Products of a CPU with affine weights: int8, int16 or f32 activations, one token or many.

int8 activations: the four bytes of a 32-bit lane are four consecutive k of one row. With VNNI one instruction multiplies and adds
them into i32. Without, maddubs gives i16 pairs; their range allows 8 (4 bits), 4 (5 bits) or 2 (6 bits) steps before they are widened,
and 8-bit weights go through |w| * sign(a, w), because u8 * s8 pairs would overflow i16. Per 32 values of k:
out += scale_w * scale_a * dot + offset_w * (scale_a * sum of a's q).

int16 activations are two bytes, a = scale_a * (q + low / 256), multiplied apart and added as 256 * dot(q) + dot(low): as exact as f32
beside weights of 4 to 8 bits, for twice the multiply-adds of int8 (f32 takes four times, and unpacks every weight into f32).
"""

from itertools import product
from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.matmul_tile import TILE, block_tokens, store_tile, tile_for
from zse.quant.scheme import BITS, AffineScheme

LOW = 0x0F0F0F0F
HIGH_WORDS = {4: 0, 5: TILE, 6: 2 * TILE, 8: 0}  # i32 of `high` in a block of a tile, by bits
# Tokens that share one pass over the weights. With int16 activations a token has two sums: those of eight do not fit the registers.
# With f32 a weight is dequantized once per tile.
TILES = {"int8": (1, 8), "int16": (1, 4), "f32": (1, 8)}


class Planes(NamedTuple):
    """Pointers at a tile's part of a weight's planes."""

    q: Any
    high: Any
    scale: Any
    offset: Any


class Int8Product(zl.Record):
    """Parameters of matmul_int8. a_low: the second byte of int16 activations, which WIDE says they are. blocks: K / 32. GROUP: 16,
    32, or 0 for any multiple of 32 (group_blocks * 32). PARTS: register parts of a tile computed in one pass over k. TOKENS: of
    a pass."""

    q: zl.Ptr[zl.i32, "const"]
    high: zl.Ptr[zl.i32, "const"]
    scale: zl.Ptr[zl.f16, "const"]
    offset: zl.Ptr[zl.f16, "const"]
    aq: zl.Ptr[zl.i8, "const"]
    a_low: zl.Ptr[zl.i8, "const"]
    a_scale: zl.Ptr[zl.f32, "const"]
    a_sum: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    tokens: zl.i64
    rows: zl.i64
    blocks: zl.i64
    group_blocks: zl.i64
    has_bias: zl.i64
    BITS: zl.static
    SYMMETRIC: zl.static
    GROUP: zl.static
    PARTS: zl.static
    TOKENS: zl.static
    WIDE: zl.static


@zl.inline
def tile_planes(p, tile, groups):
    return Planes(
        p.q + tile * p.blocks * (128 if p.BITS == 8 else 64),
        p.high + tile * p.blocks * HIGH_WORDS[p.BITS],
        p.scale + tile * groups * TILE,
        p.offset + tile * groups * TILE,
    )


@zl.inline
def unpack(planes, block, part, BITS):
    """The 8 steps of one 32-wide block as byte vectors (values 0 .. 2**BITS - 1) for a register of rows, the tile's `part`th."""
    lanes = zl.target.lanes
    row = part * lanes
    if BITS == 8:
        return [zl.load(planes.q + block * 128 + (s * TILE + row), lanes) for s in zl.static(range(8))]
    packed = [zl.load(planes.q + block * 64 + (j * TILE + row), lanes) for j in zl.static(range(4))]
    w = [packed[s] & LOW if s < 4 else (packed[s - 4] >> 4) & LOW for s in zl.static(range(8))]
    if BITS == 5:
        bits = zl.load(planes.high + block * TILE + row, lanes)
        w = [w[s] | ((bits << (4 - s) if s <= 4 else bits >> (s - 4)) & 0x10101010) for s in zl.static(range(8))]
    if BITS == 6:
        pairs = [zl.load(planes.high + block * (2 * TILE) + (half * TILE + row), lanes) for half in zl.static(range(2))]
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
def load_scales(p, planes, group, part):
    """(scale, what multiplies scale_a * sum(q_a)) of a group, f32. The dot product above is of q, or of q - 128 for BITS 8 without VNNI;
    of int16 activations it is 256 times as large, and the scale as much smaller."""
    lanes = zl.target.lanes
    s = zl.convert(zl.load(planes.scale + group * TILE + part * lanes, lanes), zl.f32)
    unit = s * (1 / 256) if p.WIDE else s
    centered = p.BITS == 8 and not zl.target.has("vnni")
    if p.SYMMETRIC:
        return unit, None if centered else s * float(-(2 ** (p.BITS - 1)))
    o = zl.convert(zl.load(planes.offset + group * TILE + part * lanes, lanes), zl.f32)
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


class Activations(NamedTuple):
    """Pointers at each token's row of activations; low: [] of int8."""

    q: Any
    low: Any
    scale: Any
    sum: Any


@zl.inline
def accumulate(acc, first, w, scales, a, block, p):
    """acc[first + t] += one 32-wide block of a part of the rows, for every token t of the Activations a."""
    tokens = len(a.q)
    q = [zl.cast_ptr(row + block * 32, zl.i32) for row in a.q]
    low = [zl.cast_ptr(row + block * 32, zl.i32) for row in a.low]
    if p.GROUP == 16:
        left, right = scales
        lefts, rights = joined_dots(w, q, low, 0, 4, p.BITS), joined_dots(w, q, low, 4, 4, p.BITS)
        for t in zl.static(range(tokens)):
            i, unit = first + t, a.scale[t][block]
            acc[i] = zl.fma(zl.convert(lefts[t], zl.f32), left[0] * unit, acc[i])
            acc[i] = zl.fma(zl.convert(rights[t], zl.f32), right[0] * unit, acc[i])
            if left[1] is not None:
                # The sum of activations is per 32 values; the groups here are 16.
                half = (zl.f32((sum16(q[t]) << 8) + sum16(low[t])) * (1 / 256) if low else zl.f32(sum16(q[t]))) * unit
                acc[i] = zl.fma(left[1], half, acc[i])
                acc[i] = zl.fma(right[1], a.sum[t][block] - half, acc[i])
    else:
        totals = joined_dots(w, q, low, 0, 8, p.BITS)
        for t in zl.static(range(tokens)):
            i = first + t
            acc[i] = zl.fma(zl.convert(totals[t], zl.f32), scales[0] * a.scale[t][block], acc[i])
            if scales[1] is not None:
                acc[i] = zl.fma(scales[1], a.sum[t][block], acc[i])


@zl.inline
def multiply_pass(p, planes, tile, first_part, groups, token, token_last, TOKENS):
    """Parts first_part .. first_part + PARTS - 1 of a tile's rows for tokens token .. token + TOKENS - 1; those from
    token_last on are computed as the one before and dropped."""
    parts = [first_part + i for i in zl.static(range(p.PARTS))]
    at = [min(token + t, token_last - 1) for t in zl.static(range(TOKENS))]
    a = Activations(
        [p.aq + at[t] * (p.blocks * 32) for t in zl.static(range(TOKENS))],
        [p.a_low + at[t] * (p.blocks * 32) for t in zl.static(range(TOKENS if p.WIDE else 0))],
        [p.a_scale + at[t] * p.blocks for t in zl.static(range(TOKENS))],
        [p.a_sum + at[t] * p.blocks for t in zl.static(range(TOKENS))],
    )
    acc = [zl.f32.x(zl.target.lanes)(0) for _ in zl.static(range(p.PARTS * TOKENS))]
    if p.GROUP == 0:
        for group in range(groups):
            scales = [load_scales(p, planes, group, part) for part in zl.static(parts)]
            for block in range(group * p.group_blocks, (group + 1) * p.group_blocks):
                for i, part in enumerate(parts):
                    accumulate(acc, i * TOKENS, unpack(planes, block, part, p.BITS), scales[i], a, block, p)
    else:
        for block in range(p.blocks):
            for i, part in enumerate(parts):
                w = unpack(planes, block, part, p.BITS)
                if p.GROUP == 16:
                    scales = [load_scales(p, planes, block * 2 + half, part) for half in zl.static(range(2))]
                else:
                    scales = load_scales(p, planes, block, part)
                accumulate(acc, i * TOKENS, w, scales, a, block, p)
    for t in zl.static(range(TOKENS)):
        if token + t < token_last:
            for i, part in enumerate(parts):
                store_tile(p, at[t], acc[i * TOKENS + t], tile, part)


@zl.kernel
def matmul_int8(p: Int8Product):
    """A grid block is (tile, group of TOKENS_PER_BLOCK tokens). Tokens that are left take passes of half as many where they fit."""
    tile = zl.block_index(0)
    token_first, token_last = block_tokens(p.tokens)
    groups = p.blocks * 2 if p.GROUP == 16 else p.blocks if p.GROUP == 32 else p.blocks // p.group_blocks
    planes = tile_planes(p, tile, groups)
    for first_part in range(0, TILE // zl.target.lanes, p.PARTS):
        for token in range(token_first, token_last, p.TOKENS):
            if p.TOKENS > 1 and token_last - token <= p.TOKENS // 2:
                multiply_pass(p, planes, tile, first_part, groups, token, token_last, max(p.TOKENS // 2, 1))
            else:
                multiply_pass(p, planes, tile, first_part, groups, token, token_last, p.TOKENS)


class F32Product(zl.Record):
    """Parameters of matmul_f32. HALVES: groups of 16 have two scales a block; wider groups repeat theirs group_blocks blocks."""

    q: zl.Ptr[zl.i32, "const"]
    high: zl.Ptr[zl.i32, "const"]
    scale: zl.Ptr[zl.f16, "const"]
    offset: zl.Ptr[zl.f16, "const"]
    a: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    tokens: zl.i64
    rows: zl.i64
    blocks: zl.i64
    group_blocks: zl.i64
    has_bias: zl.i64
    BITS: zl.static
    SYMMETRIC: zl.static
    HALVES: zl.static
    TOKENS: zl.static


@zl.inline
def weight_f32(p, planes, scales, block, k, part):
    """Column k (0 .. 31, compile time) of a block as f32 weights: scale * q + offset."""
    lanes = zl.target.lanes
    row = part * lanes
    s, byte = k // 4, k % 4
    if p.BITS == 8:
        word = zl.load(planes.q + block * 128 + (s * TILE + row), lanes)
        value = (word >> (8 * byte)) & 255
    else:
        word = zl.load(planes.q + block * 64 + ((s % 4) * TILE + row), lanes)
        value = (word >> (8 * byte + (4 if s >= 4 else 0))) & 15
        if p.BITS == 5:
            bits = zl.load(planes.high + block * TILE + row, lanes)
            value = value | (((bits >> (8 * byte + s)) & 1) << 4)
        if p.BITS == 6:
            pairs = zl.load(planes.high + block * (2 * TILE) + ((s // 4) * TILE + row), lanes)
            value = value | (((pairs >> (8 * byte + 2 * (s % 4))) & 3) << 4)
    return zl.fma(zl.convert(value, zl.f32), scales[0], scales[1])


@zl.inline
def f32_scales(p, planes, group, part):
    """(scale, offset) of a group, f32."""
    lanes = zl.target.lanes
    s = zl.convert(zl.load(planes.scale + group * TILE + part * lanes, lanes), zl.f32)
    if p.SYMMETRIC:
        return s, s * float(-(2 ** (p.BITS - 1)))
    return s, zl.convert(zl.load(planes.offset + group * TILE + part * lanes, lanes), zl.f32)


@zl.kernel
def matmul_f32(p: F32Product):
    """f32 activations: every weight is dequantized once per TOKENS tokens, then multiplied in f32. A grid block is as matmul_int8's."""
    lanes, TOKENS = zl.target.lanes, p.TOKENS
    tile = zl.block_index(0)
    token_first, token_last = block_tokens(p.tokens)
    planes = tile_planes(p, tile, p.blocks * 2 if p.HALVES == 2 else p.blocks // p.group_blocks)
    # Independent sums hide the latency of a multiply-add where one token gives one chain only: two over k (even, odd) where a
    # register is a tile, else the tile's parts side by side. How many sums over k there are must not depend on TOKENS: a
    # token's result is the same alone and in a batch.
    chains = 2 if lanes == TILE else 1
    parts_at_once = TILE // lanes if TOKENS == 1 else 1
    for first_part in range(0, TILE // lanes, parts_at_once):
        parts = [first_part + i for i in zl.static(range(parts_at_once))]
        for token in range(token_first, token_last, TOKENS):
            at = [min(token + t, token_last - 1) for t in zl.static(range(TOKENS))]
            a_rows = [p.a + at[t] * (p.blocks * 32) for t in zl.static(range(TOKENS))]
            acc = [zl.f32.x(lanes)(0) for _ in zl.static(range(parts_at_once * TOKENS * chains))]
            for block in range(p.blocks):
                for half in zl.static(range(2)):
                    group = block * 2 + half if p.HALVES == 2 else block // p.group_blocks
                    for place, part in enumerate(parts):
                        scales = f32_scales(p, planes, group, part)
                        for k in zl.static(range(half * 16, half * 16 + 16)):
                            w = weight_f32(p, planes, scales, block, k, part)
                            for t in zl.static(range(TOKENS)):
                                i = (place * TOKENS + t) * chains + k % chains
                                acc[i] = zl.fma(w, zl.f32.x(lanes)(a_rows[t][block * 32 + k]), acc[i])
            for t in zl.static(range(TOKENS)):
                if token + t < token_last:
                    for place, part in enumerate(parts):
                        first = (place * TOKENS + t) * chains
                        total = acc[first] + acc[first + 1] if chains == 2 else acc[first]
                        store_tile(p, at[t], total, tile, part)


def symbol_of(scheme, form: str, tokens: int) -> str:
    """The variant for a weight scheme, a form of activations ("int8", "int16", "f32") and a tile of tokens. Groups of 16 and 32
    have their own loops with integers, everything wider shares one."""
    groups = f"g{scheme.group}" if scheme.group == 16 or scheme.group == 32 and form != "f32" else "wide"
    return f"matmul_{form}_int{scheme.bits}{'s' if scheme.symmetric else 'a'}_{groups}_t{tokens}"


def launch_of(weight, a, max_tokens: int) -> tuple[str, dict]:
    """(variant, the arguments that only these kernels take) for activations a."""
    scheme, planes, width = weight.scheme, weight.planes, weight.shape[1]
    inputs = {"a": a} if a.dtype == "f32" else {"aq": a.q, "a_low": a.low, "a_scale": a.scale, "a_sum": a.sum}
    blocks = {"blocks": width // 32, "group_blocks": (scheme.group or width) // 32 or 1}
    symbol = symbol_of(scheme, a.dtype, tile_for(max_tokens, TILES[a.dtype]))
    return symbol, {name: planes.get(name) for name in Planes._fields} | inputs | blocks


def variants(target) -> list[zl.Variant]:
    made = []
    for bits, symmetric, group in product(BITS, (False, True), (16, 32, 0)):
        scheme = AffineScheme(bits, group, symmetric)
        statics = {"BITS": bits, "SYMMETRIC": symmetric}
        for form, tokens in ((name, size) for name in ("int8", "int16") for size in TILES[name]):
            parts = TILE // target.lanes if tokens == 1 else 1  # decode reads each line of weights once
            more = {"GROUP": group, "PARTS": parts, "TOKENS": tokens, "WIDE": form == "int16"}
            made.append(zl.Variant(symbol_of(scheme, form, tokens), matmul_int8, statics | more))
        for tokens in TILES["f32"] if group != 32 else ():
            more = {"HALVES": 2 if group == 16 else 1, "TOKENS": tokens}
            made.append(zl.Variant(symbol_of(scheme, "f32", tokens), matmul_f32, statics | more))
    return made
