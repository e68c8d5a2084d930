"""Products of a CPU with affine weights: int8, int16 or f32 activations, one token or many.

int8 activations: the four bytes of a 32-bit lane are four consecutive k of one row. With VNNI one instruction
multiplies and adds them into i32. Without, maddubs gives i16 pairs; their range allows 8 (4 bits), 4 (5 bits) or 2 (6
bits) steps before they are widened, and 8-bit weights go through |w| * sign(a, w), because u8 * s8 pairs would overflow
i16; several tokens are matmul_affine_i16's. Per 32 values of k: out += scale_w * scale_a * dot + offset_w * (scale_a * sum of a's q). Scales that are integers of 6 or
8 bits with factors for 256 columns (zse.quant.superblock) are multiplied by these when the columns are reached: a token
alone reads 4.5 bits a weight instead of 5.

int16 activations are two bytes, a = scale_a * (q + low / 256), multiplied apart and added as 256 * dot(q) + dot(low):
as exact as f32 beside weights of 4 to 8 bits, for twice the multiply-adds of int8 (f32 takes four times, and unpacks
every weight into f32)."""

from itertools import product

from zse import kernel as zl
from zse.kernels.matmul_affine_i16 import multiply_few_i16, widens
from zse.kernels.matmul_affine_many import matmul_int8_many
from zse.kernels.matmul_affine_parts import (
    BLOCK_TILES,
    LUT,
    SUPER,
    Int8Product,
    activations_at,
    coded,
    dot_bits,
    group_scales,
    half_sum,
    in_units,
    is_coded,
    joined_dots,
    load_scales,
    middle,
    num_groups,
    prefetch_block,
    prefetch_lines,
    prefetch_scales,
    super_block,
    tile_planes,
    token_dots,
    unpack,
    widen_if_first,
)
from zse.kernels.matmul_affine_super import in_integers, multiply_token
from zse.kernels.matmul_tile import (
    TILE,
    adds_i16,
    asks_ahead,
    block_tokens,
    source_row,
    stacked_tile,
    store_tile,
    tile_for,
)
from zse.quant.scheme import BITS, AffineScheme
from zse.quant.superblock import SUPERBLOCK_SCHEMES

# Tokens that share one pass over the weights. With f32 a weight is dequantized once per tile.
TILES = {"int8": (1, 8), "int16": (1,), "f32": (1, 8)}
# Blocks of 32 columns between what several tokens are multiplied with and what is brought near: some 5 KiB of 4 bits, 1
# to 2 µs. Without, a core multiplies and then waits; one token alone leaves it time to run ahead.
AHEAD = 16
# The same for one token's scales of groups of 32: the processor runs ahead in q but not in planes where a line lasts two
# blocks. 13 % less time for int4 with offsets, 18 % for int8, from memory; of groups of 16 2 % more.
NEAR = 4
# What TILES has nothing for goes to matmul_int8_many: more than FEW tokens, and several of int16 or with groups of 16.
# Few tokens wait for memory, which one tile after the other reads best.
FEW = 16


@zl.inline
def accumulate(acc, first, w, scales, a, block, p):
    """acc[first + t] += one 32-wide block of a part of the rows, for every token t of the Activations a."""
    tokens = len(a.q)
    q = [zl.cast_ptr(row + block * 32, zl.i32) for row in a.q]
    low = [zl.cast_ptr(row + block * 32, zl.i32) for row in a.low]
    if p.GROUP == 16:
        left, right = scales
        lefts, rights = joined_dots(w, q, low, 0, 4, dot_bits(p)), joined_dots(w, q, low, 4, 4, dot_bits(p))
        for t in zl.static(range(tokens)):
            i, unit = first + t, a.scale[t][block]
            acc[i] = zl.fma(zl.convert(lefts[t], zl.f32), left[0] * unit, acc[i])
            acc[i] = zl.fma(zl.convert(rights[t], zl.f32), right[0] * unit, acc[i])
            if left[1] is not None:
                # The sum of activations is per 32 values; the groups here are 16.
                half = half_sum(a, t, block)
                acc[i] = zl.fma(left[1], half, acc[i])
                acc[i] = zl.fma(right[1], a.sum[t][block] - half, acc[i])
    else:
        totals = joined_dots(w, q, low, 0, 8, dot_bits(p))
        for t in zl.static(range(tokens)):
            i = first + t
            acc[i] = zl.fma(zl.convert(totals[t], zl.f32), scales[0] * a.scale[t][block], acc[i])
            if scales[1] is not None:
                acc[i] = zl.fma(scales[1], a.sum[t][block], acc[i])


@zl.inline
def takes_turns(p):
    """Whether the parts of a token alone take turns step by step, so that a broadcast serves all."""
    return adds_i16() and dot_bits(p) not in (8, LUT)


@zl.inline
def accumulate_token(acc, w, scales, a, block, p):
    """accumulate() of a token alone for all its parts of the rows at once."""
    halves, unit = 2 if p.GROUP == 16 else 1, a.scale[0][block]
    for half in zl.static(range(halves)):
        totals = token_dots(p, w, a, block, half * 4, 8 // halves)
        for n in zl.static(range(len(w))):
            scale = scales[n][half][0] if halves == 2 else scales[n][0]
            acc[n] = zl.fma(zl.convert(totals[n], zl.f32), scale * unit, acc[n])
    for n in zl.static(range(len(w))):
        if halves == 2 and scales[n][0][1] is not None:
            left = half_sum(a, 0, block)
            acc[n] = zl.fma(scales[n][0][1], left, acc[n])
            acc[n] = zl.fma(scales[n][1][1], a.sum[0][block] - left, acc[n])
        if halves == 1 and scales[n][1] is not None:
            acc[n] = zl.fma(scales[n][1], a.sum[0][block], acc[n])


@zl.inline
def multiply_super_block(acc, p, planes, parts, a, first):
    """acc += the blocks from `first` on that share factors, of one token: their scales stay in registers."""
    blocks = [super_block(p, planes, first, part) for part in parts]
    for i in zl.static(range(SUPER)):
        if asks_ahead():
            prefetch_lines(p, planes, first + i)
        if takes_turns(p):
            w = [unpack(planes, first + i, part, p.BITS) for part in parts]
            if p.GROUP == 16:
                scales = [[in_units(p, *coded(p, of, i * 2 + half)) for half in range(2)] for of in blocks]
            else:
                scales = [in_units(p, *coded(p, of, i)) for of in blocks]
            accumulate_token(acc, w, scales, a, first + i, p)
        else:
            for n, part in enumerate(parts):
                w = unpack(planes, first + i, part, p.BITS)
                if p.GROUP == 16:
                    scales = [in_units(p, *coded(p, blocks[n], i * 2 + half)) for half in zl.static(range(2))]
                else:
                    scales = in_units(p, *coded(p, blocks[n], i))
                accumulate(acc, n, w, scales, a, first + i, p)


@zl.inline
def multiply_pass(p, planes, tile, expert, first_part, groups, token, token_last, TOKENS):
    """Parts first_part .. first_part + PARTS - 1 of a tile's rows for tokens token .. token + TOKENS - 1; those from
    token_last on are computed as the one before and dropped."""
    parts = [first_part + i for i in zl.static(range(p.PARTS))]
    at = [min(token + t, token_last - 1) for t in zl.static(range(TOKENS))]
    a = activations_at(p, at)
    acc = [zl.f32.x(zl.target.lanes)(0) for _ in zl.static(range(p.PARTS * TOKENS))]
    if p.GROUP == 0:
        for group in range(groups):
            scales = [load_scales(p, planes, group, part) for part in zl.static(parts)]
            for block in range(group * p.group_blocks, (group + 1) * p.group_blocks):
                if TOKENS > 1:
                    prefetch_block(p, planes, block + AHEAD)
                elif asks_ahead():
                    prefetch_lines(p, planes, block)
                if TOKENS == 1 and takes_turns(p):
                    accumulate_token(acc, [unpack(planes, block, part, p.BITS) for part in parts], scales, a, block, p)
                else:
                    for i, part in enumerate(parts):
                        accumulate(acc, i * TOKENS, unpack(planes, block, part, p.BITS), scales[i], a, block, p)
    elif is_coded(p) and TOKENS == 1:
        for first in range(0, p.blocks, SUPER):
            if in_integers(p):
                multiply_token(acc, p, planes, parts, a, first)
            else:
                multiply_super_block(acc, p, planes, parts, a, first)
    else:
        for block in range(p.blocks):
            if TOKENS > 1:
                prefetch_block(p, planes, block + AHEAD)
            elif asks_ahead():
                prefetch_lines(p, planes, block)
            elif p.GROUP == 32 and p.BITS != LUT:
                prefetch_scales(p, planes, block + NEAR, zl.prefetch)
            widen_if_first(p, planes, block, parts)
            if TOKENS == 1 and takes_turns(p):
                w = [unpack(planes, block, part, p.BITS) for part in parts]
                if p.GROUP == 16:
                    scales = [[load_scales(p, planes, block * 2 + half, part) for half in range(2)] for part in parts]
                else:
                    scales = [load_scales(p, planes, block, part) for part in parts]
                accumulate_token(acc, w, scales, a, block, p)
            else:
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
                store_tile(p, at[t], acc[i * TOKENS + t], tile, part, expert)


@zl.kernel
def matmul_int8(p: Int8Product):
    """A grid block is (tile, group of TOKENS_PER_BLOCK tokens). Tokens that are left take passes of half as many where
    they fit."""
    multiply_tile(p)


@zl.inline
def multiply_tile(p):
    """The body of a kernel."""
    if not (adds_i16() and p.TOKENS > 1) or widens(p):
        multiply_passes(p, p.TOKENS)
    else:
        multiply_few_i16(p)


@zl.inline
def multiply_passes(p, TOKENS):
    """TOKENS share an unpacked weight. Those that are left take passes of half as many where they fit."""
    tile = zl.block_index(0)
    expert, token_first, token_last = block_tokens(p)
    groups = num_groups(p)
    planes = tile_planes(p, stacked_tile(p, expert, tile), groups)
    for first_part in range(0, TILE // zl.target.lanes, p.PARTS):
        for token in range(token_first, token_last, TOKENS):
            if TOKENS > 1 and token_last - token <= TOKENS // 2:
                multiply_pass(p, planes, tile, expert, first_part, groups, token, token_last, max(TOKENS // 2, 1))
            else:
                multiply_pass(p, planes, tile, expert, first_part, groups, token, token_last, TOKENS)


class F32Product(zl.Record):
    """Parameters of matmul_f32. HALVES: groups of 16 have two scales a block; wider groups repeat theirs group_blocks
    blocks. offset, CODE: as of Int8Product."""

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
    tasks: zl.Ptr[zl.i32, "const"]
    source: zl.Ptr[zl.i32, "const"]
    experts: zl.i64
    BITS: zl.static
    SYMMETRIC: zl.static
    HALVES: zl.static
    TOKENS: zl.static
    CODE: zl.static


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
        if p.BITS == LUT:
            value = zl.lookup_s8(planes.table, value) & 255
    return zl.fma(zl.convert(value, zl.f32), scales[0], scales[1])


@zl.inline
def f32_scales(p, planes, group, part):
    """(scale, offset) of a group, f32."""
    s, o = group_scales(p, planes, group, part)
    return s, s * -middle(p) if p.SYMMETRIC else o


@zl.kernel
def matmul_f32(p: F32Product):
    """f32 activations: every weight is dequantized once per TOKENS tokens, then multiplied in f32. A grid block is as
    matmul_int8's."""
    multiply_tile_f32(p)


@zl.inline
def multiply_tile_f32(p):
    """The body of a kernel."""
    lanes, TOKENS = zl.target.lanes, p.TOKENS
    tile = zl.block_index(0)
    expert, token_first, token_last = block_tokens(p)
    groups = p.blocks * 2 if p.HALVES == 2 else p.blocks // p.group_blocks
    planes = tile_planes(p, stacked_tile(p, expert, tile), groups)
    # Independent sums hide the latency of a multiply-add where one token gives one chain only: two over k (even, odd)
    # where a register is a tile, else the tile's parts side by side. How many sums over k there are must not depend on
    # TOKENS: a token's result is the same alone and in a batch.
    chains = 2 if lanes == TILE else 1
    parts_at_once = TILE // lanes if TOKENS == 1 else 1
    for first_part in range(0, TILE // lanes, parts_at_once):
        parts = [first_part + i for i in zl.static(range(parts_at_once))]
        for token in range(token_first, token_last, TOKENS):
            at = [min(token + t, token_last - 1) for t in zl.static(range(TOKENS))]
            a_rows = [p.a + source_row(p, at[t]) * (p.blocks * 32) for t in zl.static(range(TOKENS))]
            acc = [zl.f32.x(lanes)(0) for _ in zl.static(range(parts_at_once * TOKENS * chains))]
            for block in range(p.blocks):
                widen_if_first(p, planes, block, parts)
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
                        store_tile(p, at[t], total, tile, part, expert)


def symbol_of(scheme, form: str, tokens: str) -> str:
    """The variant for a weight scheme, a form of activations ("int8", "int16", "f32") and tokens ("t1", "t8", "many").
    Groups of 16 and 32 have their own loops with integers, everything wider shares one."""
    groups = f"g{scheme.group}" if scheme.group == 16 or scheme.group == 32 and form != "f32" else "wide"
    groups = groups if scheme.kind == "affine" else f"g{scheme.group}_{scheme.code}"
    return f"matmul_{form}_int{scheme.bits}{'s' if scheme.symmetric else 'a'}_{groups}_{tokens}"


def launch_of(weight, a, max_tokens: int) -> tuple[str, dict, int]:
    """(variant, the arguments that only these kernels take, tiles of a block) for activations a."""
    scheme, planes, width = weight.scheme, weight.planes, weight.shape[1]
    inputs = {"a": a} if a.dtype == "f32" else {"aq": a.q, "a_low": a.low, "a_scale": a.scale, "a_sum": a.sum}
    blocks = {"blocks": width // 32, "group_blocks": (scheme.group or width) // 32 or 1}
    args = {name: planes.get(name) for name in ("q", "high", "scale", "offset")} | inputs | blocks
    args["offset"] = planes.get("factor", args["offset"])
    few = 1 if scheme.group == 16 or a.dtype == "int16" else FEW
    if a.dtype != "f32" and max_tokens > few:
        return symbol_of(scheme, a.dtype, "many"), args, BLOCK_TILES
    return symbol_of(scheme, a.dtype, f"t{tile_for(max_tokens, TILES[a.dtype])}"), args, 1


def variants(target) -> list[zl.Variant]:
    made = []
    schemes = [AffineScheme(bits, *more) for bits, *more in product(BITS, (16, 32, 0), (False, True))]
    for scheme in (*schemes, *SUPERBLOCK_SCHEMES):
        group, is_affine = scheme.group, scheme.kind == "affine"
        statics = {"BITS": scheme.bits, "SYMMETRIC": scheme.symmetric, "CODE": "f16" if is_affine else scheme.code}
        for form in ("int8", "int16"):
            more = {"GROUP": group, "WIDE": form == "int16"}
            for tokens in TILES[form][: 1 if group == 16 else None]:
                parts = TILE // target.lanes if tokens == 1 else 1  # decode reads each line of weights once
                one = statics | more | {"PARTS": parts, "TOKENS": tokens}
                made.append(zl.Variant(symbol_of(scheme, form, f"t{tokens}"), matmul_int8, one))
            many = statics | more | {"PARTS": 1, "TOKENS": 4}
            made.append(zl.Variant(symbol_of(scheme, form, "many"), matmul_int8_many, many))
        for tokens in TILES["f32"] if group != 32 or not is_affine else ():
            more = {"HALVES": 2 if group == 16 else 1, "TOKENS": tokens}
            made.append(zl.Variant(symbol_of(scheme, "f32", f"t{tokens}"), matmul_f32, statics | more))
    return made
