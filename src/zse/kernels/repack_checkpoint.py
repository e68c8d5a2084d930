"""Weights of other people's checkpoints, and plain ones that are quantized on load, on the CPU: into layout r16, by the loader's
threads on pieces of the file. zse.kernels.repack_pieces says which piece goes to which kernel.

Bit-equal to the NumPy of zse.formats.quantized_rows and zse.quant.quantize: the same operations of f32, each rounded by
itself, and sums in the order of the columns. A block of the grid makes a tile of 16 rows, which are the lanes of vectors.
"""

from zse import kernel as zl
from zse.kernels.quantize_group import (
    BAD_OFFSET,
    BAD_SCALE,
    F16_MAX,
    F16_MAX_BITS,
    INPUTS,
    quantized,
    quotient,
    searched_range,
    spread,
    symmetric_range,
)
from zse.quant.scheme import TILE_ROWS as TILE

MAX_GROUP = 256  # columns
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # where a word of AWQ has row n of its eight
HALF = TILE // 2


@zl.kernel
def repack_words(
    src: zl.Ptr[zl.u32, "const"],
    q: zl.Ptr[zl.u32],
    rows: zl.i64,
    row_stride: zl.i64,
    word_stride: zl.i64,
    first_block: zl.i64,
    blocks: zl.i64,
    all_blocks: zl.i64,
    FORM: zl.static,
):
    """Grid (tiles). As of zse.kernels.gpu.repack."""
    tile = zl.block_index(0)
    words = 8 if FORM in ("words8", "int8") else 4
    out = q + (tile * all_blocks + first_block) * (words * TILE)
    here = rows - tile * TILE
    tile_src = src + tile * (2 if FORM == "awq4" else TILE * row_stride)
    if FORM == "awq4":
        shifts = zl.make_vector(*[zl.u32(shift) for shift in AWQ_SHIFTS])
        for block in range(blocks):
            at = tile_src + block * 32 * word_stride
            for half in zl.static(range(2)):
                for j in zl.static(range(4)):
                    made = zl.u32.x(HALF)(0)
                    if half * HALF < here:
                        for c in zl.static(range(4)):
                            low = zl.splat(at[(4 * j + c) * word_stride + half], HALF) >> shifts
                            high = zl.splat(at[(4 * j + c + 16) * word_stride + half], HALF) >> shifts
                            made = made | ((low & 15) | ((high & 15) << 4)) << (8 * c)
                    zl.store(out + (block * (4 * TILE) + (j * TILE + half * HALF)), made)
    else:
        found = zl.local_array(zl.u32, words * TILE)
        for block in range(blocks):
            for i in zl.static(range(words)):
                at = (block * words + i) * word_stride
                if row_stride == 1 and here >= TILE and FORM != "int8":
                    for half in zl.static(range(2)):
                        zl.store(found + (i * TILE + half * HALF), zl.load(tile_src + (at + half * HALF), HALF))
                else:
                    for r in range(TILE):
                        if r < here:
                            found[i * TILE + r] = tile_src[r * row_stride + at] ^ (0x80808080 if FORM == "int8" else 0)
                        else:
                            found[i * TILE + r] = 0
            for half in zl.static(range(2)):
                for j in zl.static(range(words)):
                    if words == 8:
                        made = zl.load(found + (j * TILE + half * HALF), HALF)
                    else:
                        low = zl.load(found + (j // 2 * TILE + half * HALF), HALF)
                        high = zl.load(found + ((2 + j // 2) * TILE + half * HALF), HALF)
                        made = spread((low >> (16 * (j % 2))) & 0xFFFF) | (
                            spread((high >> (16 * (j % 2))) & 0xFFFF) << 4
                        )
                    zl.store(out + (block * (words * TILE) + (j * TILE + half * HALF)), made)


@zl.inline
def ordered_field(tile_src, k, first, here, row_stride, word_stride, found, BITS, LANES):
    """Column k of LANES rows."""
    at = tile_src + (k // (32 // BITS) * word_stride + first * row_stride)
    words = zl.u32.x(LANES)(0)
    if row_stride == 1 and here >= TILE:
        words = zl.load(at, LANES)
    else:
        for r in range(LANES):
            found[r] = 0
            if first + r < here:
                found[r] = at[r * row_stride]
        words = zl.load(found, LANES)
    return (words >> zl.u32(k % (32 // BITS) * BITS)) & ((1 << BITS) - 1)


@zl.kernel
def repack_ordered(
    src: zl.Ptr[zl.u32, "const"],
    q: zl.Ptr[zl.u32],
    columns: zl.Ptr[zl.i32, "const"],
    places: zl.Ptr[zl.i32, "const"],
    rows: zl.i64,
    first_row: zl.i64,
    row_stride: zl.i64,
    word_stride: zl.i64,
    blocks: zl.i64,
    has_columns: zl.i64,
    has_places: zl.i64,
    BITS: zl.static,
):
    """Grid (tiles). As of zse.kernels.gpu.repack."""
    tile = zl.block_index(0)
    lanes = min(zl.target.lanes, TILE)
    words = 8 if BITS == 8 else 4
    here = min(rows - tile * TILE, zl.i64(TILE))
    tile_src = src + tile * TILE * row_stride
    found, out, at = zl.local_array(zl.u32, TILE), zl.local_array(zl.i64, TILE), zl.local_array(zl.i64, 32)
    for r in range(TILE):
        place = first_row + tile * TILE + r
        if has_places != 0 and r < here:
            place = zl.i64(places[place])
        out[r] = place // TILE * blocks * (words * TILE) + place % TILE
    for block in range(blocks):
        for column in range(32):
            at[column] = block * 32 + column
            if has_columns != 0:
                at[column] = zl.i64(columns[block * 32 + column])
        for first in zl.static(range(0, TILE, lanes)):
            for j in zl.static(range(words)):
                made = zl.u32.x(lanes)(0)
                for c in zl.static(range(4)):
                    for upper in zl.static(range(2 if BITS == 4 else 1)):
                        k = at[4 * j + c + 16 * upper]
                        field = ordered_field(tile_src, k, first, here, row_stride, word_stride, found, BITS, lanes)
                        made = made | field << (8 * c + 4 * upper)
                if has_places == 0:
                    zl.store(q + (out[first] + (block * words + j) * TILE), made)
                else:
                    zl.store(found, made)
                    for r in zl.static(range(lanes)):
                        q[out[first + r] + (block * words + j) * TILE] = found[r]


@zl.kernel
def repack_scales(
    src: zl.Ptr["IN", "const"],
    zero: zl.Ptr[zl.u32, "const"],
    scale: zl.Ptr[zl.f16],
    offset: zl.Ptr[zl.f16],
    bad: zl.Ptr[zl.i32],
    places: zl.Ptr[zl.i32, "const"],
    rows: zl.i64,
    row_stride: zl.i64,
    group_stride: zl.i64,
    word_stride: zl.i64,
    zero_stride: zl.i64,
    first_group: zl.i64,
    groups: zl.i64,
    all_groups: zl.i64,
    bits: zl.i64,
    has_zero: zl.i64,
    plus: zl.i64,
    awq: zl.i64,
    first_row: zl.i64,
    has_places: zl.i64,
    IN: zl.static,
):
    """Grid (tiles). As of zse.kernels.gpu.repack."""
    tile = zl.block_index(0)
    per_word = 32 // bits
    mask = (zl.u32(1) << zl.u32(bits)) - 1
    for group in range(groups):
        for r in range(TILE):
            row = tile * TILE + r
            place = first_row + row
            if has_places != 0 and row < rows:
                place = zl.i64(places[place])
            out = (place // TILE * all_groups + (first_group + group)) * TILE + place % TILE
            factor, shift = zl.f32(0), zl.f32(0)
            if row < rows:
                factor = zl.convert(src[row * row_stride + group * group_stride], zl.f32)
                if abs(factor) > F16_MAX:
                    bad[0] = max(bad[0], zl.i32(BAD_SCALE))
                factor = zl.convert(zl.convert(factor, zl.f16), zl.f32)
                if has_zero != 0:
                    field = row % per_word
                    if awq != 0:
                        field = field // 2 + field % 2 * 4
                    word = zero[row // per_word * word_stride + group * zero_stride]
                    stored = ((word >> zl.u32(field * bits)) & mask) + zl.u32(plus)
                    point = zl.f32(zl.i32(stored & mask))
                    shift = zl.convert(zl.convert(-point * factor, zl.f16), zl.f32)
                    if not (abs(shift) <= F16_MAX):
                        bad[0] = max(bad[0], zl.i32(BAD_OFFSET))
            scale[out] = zl.convert(factor, zl.f16)
            if has_zero != 0:
                offset[out] = zl.convert(shift, zl.f16)


@zl.inline
def columns(group, k, LANES):
    """Four columns of LANES rows."""
    return [zl.load(group + (k + i) * TILE, LANES) for i in zl.static(range(4))]


@zl.inline
def quantize_lanes(group, size, out, scale, offset, bad, BITS, LANES):
    """LANES rows of a group: f32 [size, 16] → dwords, scales, offsets of layout r16."""
    words = 8 if BITS == 8 else 4
    v = zl.load(group, LANES)
    high, low, top = v, v, zl.bitcast(v, zl.i32) & 0x7FFFFFFF
    for k in range(1, size):
        v = zl.load(group + k * TILE, LANES)
        high, low = zl.maximum(high, v), zl.minimum(low, v)
        top = zl.maximum(top, zl.bitcast(v, zl.i32) & 0x7FFFFFFF)
    largest = zl.reduce_max(top)
    if largest > F16_MAX_BITS:
        bad[0] = largest
    high, low = high + 0.0, low + 0.0
    if BITS == 8:
        factor, base = symmetric_range(high, low)
    else:
        factor, base = searched_range(columns, group, size, high, low, 4, LANES)
    zl.store(scale, zl.convert(factor, zl.f16))
    if BITS != 8:
        zl.store(offset, zl.convert(base, zl.f16))
    inverse = quotient(1.0, factor)
    for block in range(size // 32):
        for j in zl.static(range(words)):
            made = zl.i32.x(LANES)(0)
            for c in zl.static(range(4)):
                at = group + (block * 32 + (4 * j + c)) * TILE
                made = made | zl.convert(quantized(zl.load(at, LANES), base, inverse, BITS), zl.i32) << (8 * c)
                if BITS == 4:
                    upper = quantized(zl.load(at + 16 * TILE, LANES), base, inverse, BITS)
                    made = made | zl.convert(upper, zl.i32) << (8 * c + 4)
            zl.store(out + (block * words + j) * TILE, made)


@zl.kernel
def quantize_groups(
    src: zl.Ptr["IN", "const"],
    q: zl.Ptr[zl.i32],
    scale: zl.Ptr[zl.f16],
    offset: zl.Ptr[zl.f16],
    order: zl.Ptr[zl.i32, "const"],
    bad: zl.Ptr[zl.i32],
    rows: zl.i64,
    width: zl.i64,
    group: zl.i64,
    has_order: zl.i64,
    unit: zl.i64,
    BITS: zl.static,
    IN: zl.static,
):
    """Grid (tiles). As of zse.kernels.gpu.repack; group: at most MAX_GROUP."""
    tile = zl.block_index(0)
    lanes = min(zl.target.lanes, TILE)
    words = 8 if BITS == 8 else 4
    groups = width // group
    values = zl.local_array(zl.f32, MAX_GROUP * TILE)  # [column, row]: what follows has rows in its lanes
    rows_at = zl.local_array(zl.i64, TILE)
    for r in range(TILE):
        place = tile * TILE + r
        row = place
        if has_order != 0:
            row = place // unit * unit + zl.i64(order[place % unit])
        rows_at[r] = row * width
    here = min(rows - tile * TILE, zl.i64(TILE))
    for r in range(here, TILE):
        for k in range(group):
            values[k * TILE + r] = 0.0
    for g in range(groups):
        for r in range(here):
            row_src = src + (rows_at[r] + g * group)
            for k in range(0, group, 8):
                v = zl.convert(zl.load(row_src + k, 8), zl.f32)
                for e in zl.static(range(8)):
                    values[(k + e) * TILE + r] = v[e]
        line = tile * groups + g
        out = q + line * (group // 32) * (words * TILE)
        for first in range(0, TILE, lanes):
            quantize_lanes(
                values + first,
                group,
                out + first,
                scale + (line * TILE + first),
                offset + (line * TILE + first),
                bad,
                BITS,
                lanes,
            )


def variants(target) -> list[zl.Variant]:
    """Every packing kernel of the CPU beside those of GGUF."""
    found = [
        zl.Variant(f"repack_{form}", repack_words, {"FORM": form}) for form in ("words4", "words8", "awq4", "int8")
    ]
    found += [zl.Variant(f"repack_ordered{bits}", repack_ordered, {"BITS": bits}) for bits in (4, 8)]
    for name, dtype in INPUTS.items():
        found += [zl.Variant(f"repack_scales_{name}", repack_scales, {"IN": dtype})]
        found += [
            zl.Variant(f"quantize_int{bits}_{name}", quantize_groups, {"BITS": bits, "IN": dtype}) for bits in (4, 8)
        ]
    return found
