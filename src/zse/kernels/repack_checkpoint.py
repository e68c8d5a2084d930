"""Weights of other people's checkpoints, and plain ones that are quantized on load, on the CPU: into layout r16, by the
loader's threads on pieces of the file. zse.kernels.repack_pieces says which piece goes to which kernel.

Bit-equal to the NumPy of zse.formats.quantized_rows and zse.quant.quantize: the same operations of f32, each rounded by
itself, and sums in the order of the columns. A block of the grid makes a tile of 16 rows, which are the lanes of
vectors."""

from zse import kernel as zl
from zse.kernels import quantize_group as rounding
from zse.quant.scheme import TILE_ROWS as TILE

MAX_GROUP = 256  # columns
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # where a word of AWQ has row n of its eight
HALF = TILE // 2


class WordPacking(zl.Record):
    """q: of the piece's first tile; the piece has blocks [first_block, + blocks) of the all_blocks of 32 columns.
    "words4", "words8": 8 or 4 columns of row n in word src[n * row_stride + i * word_stride], lowest bits first;
    "int8": as "words8", in two's complement; "awq4": column k of rows 8n .. 8n + 7 in src[k * word_stride + n], in
    AWQ's order. Rows from `rows` on are padding."""

    src: zl.Ptr[zl.u32, "const"]
    q: zl.Ptr[zl.u32]
    rows: zl.index
    row_stride: zl.i64
    word_stride: zl.i64
    first_block: zl.index
    blocks: zl.index
    all_blocks: zl.index
    FORM: zl.static


@zl.kernel
def repack_words(p: WordPacking):
    """Grid (tiles)."""
    tile = zl.block_index(0)
    words = 8 if p.FORM in ("words8", "int8") else 4
    out = p.q + (tile * p.all_blocks + p.first_block) * (words * TILE)
    here = p.rows - tile * TILE
    tile_src = p.src + tile * (2 if p.FORM == "awq4" else TILE * p.row_stride)
    if p.FORM == "awq4":
        shifts = zl.make_vector(*[zl.u32(shift) for shift in AWQ_SHIFTS])
        for block in range(p.blocks):
            at = tile_src + block * 32 * p.word_stride
            for half in zl.static(range(2)):
                for j in zl.static(range(4)):
                    made = zl.u32.x(HALF)(0)
                    if half * HALF < here:
                        for c in zl.static(range(4)):
                            low = zl.splat(at[(4 * j + c) * p.word_stride + half], HALF) >> shifts
                            high = zl.splat(at[(4 * j + c + 16) * p.word_stride + half], HALF) >> shifts
                            made = made | ((low & 15) | ((high & 15) << 4)) << (8 * c)
                    zl.store(out + (block * (4 * TILE) + (j * TILE + half * HALF)), made)
    else:
        found = zl.local_array(zl.u32, words * TILE)
        for block in range(p.blocks):
            for i in zl.static(range(words)):
                at = (block * words + i) * p.word_stride
                if p.row_stride == 1 and here >= TILE and p.FORM != "int8":
                    for half in zl.static(range(2)):
                        zl.store(found + (i * TILE + half * HALF), zl.load(tile_src + (at + half * HALF), HALF))
                else:
                    for r in range(TILE):
                        if r < here:
                            found[i * TILE + r] = tile_src[r * p.row_stride + at] ^ (
                                0x80808080 if p.FORM == "int8" else 0
                            )
                        else:
                            found[i * TILE + r] = 0
            for half in zl.static(range(2)):
                for j in zl.static(range(words)):
                    if words == 8:
                        made = zl.load(found + (j * TILE + half * HALF), HALF)
                    else:
                        low = zl.load(found + (j // 2 * TILE + half * HALF), HALF)
                        high = zl.load(found + ((2 + j // 2) * TILE + half * HALF), HALF)
                        made = rounding.spread((low >> (16 * (j % 2))) & 0xFFFF) | (
                            rounding.spread((high >> (16 * (j % 2))) & 0xFFFF) << 4
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


class OrderedPacking(zl.Record):
    """Words of all columns of rows [first_row, + rows) of a tensor, lowest bits first; q: of its first tile. Column k
    in memory is the stored column columns[k], stored row n becomes row places[n]; without, they stay."""

    src: zl.Ptr[zl.u32, "const"]
    q: zl.Ptr[zl.u32]
    columns: zl.Ptr[zl.i32, "const"]
    places: zl.Ptr[zl.i32, "const"]
    rows: zl.index
    first_row: zl.index
    row_stride: zl.i64
    word_stride: zl.i64
    blocks: zl.index
    has_columns: zl.index
    has_places: zl.index
    BITS: zl.static


@zl.kernel
def repack_ordered(p: OrderedPacking):
    """Grid (tiles)."""
    tile = zl.block_index(0)
    lanes = min(zl.target.lanes, TILE)
    words = 8 if p.BITS == 8 else 4
    here = min(p.rows - tile * TILE, zl.i64(TILE))
    tile_src = p.src + tile * TILE * p.row_stride
    found, out, at = zl.local_array(zl.u32, TILE), zl.local_array(zl.i64, TILE), zl.local_array(zl.i64, 32)
    for r in range(TILE):
        place = p.first_row + tile * TILE + r
        if p.has_places != 0 and r < here:
            place = zl.i64(p.places[place])
        out[r] = place // TILE * p.blocks * (words * TILE) + place % TILE
    for block in range(p.blocks):
        for column in range(32):
            at[column] = block * 32 + column
            if p.has_columns != 0:
                at[column] = zl.i64(p.columns[block * 32 + column])
        for first in zl.static(range(0, TILE, lanes)):
            for j in zl.static(range(words)):
                made = zl.u32.x(lanes)(0)
                for c in zl.static(range(4)):
                    for upper in zl.static(range(2 if p.BITS == 4 else 1)):
                        k = at[4 * j + c + 16 * upper]
                        field = ordered_field(
                            tile_src, k, first, here, p.row_stride, p.word_stride, found, p.BITS, lanes
                        )
                        made = made | field << (8 * c + 4 * upper)
                if p.has_places == 0:
                    zl.store(p.q + (out[first] + (block * words + j) * TILE), made)
                else:
                    zl.store(found, made)
                    for r in zl.static(range(lanes)):
                        p.q[out[first + r] + (block * words + j) * TILE] = found[r]


class ScalePacking(zl.Record):
    """Row n's scale of group g is src[n * row_stride + g * group_stride]; its zero point a field of zero[n / (32 /
    bits) * word_stride + g * zero_stride], to which `plus` is added within its bits. scale, offset: of the piece's
    first tile. With places, the piece's rows are a tensor's from `first_row` on, whose row n becomes row places[n]
    behind scale and offset. bad: gets a code where a scale or an offset is beyond f16."""

    src: zl.Ptr["IN", "const"]
    zero: zl.Ptr[zl.u32, "const"]
    scale: zl.Ptr[zl.f16]
    offset: zl.Ptr[zl.f16]
    bad: zl.Ptr[zl.i32]
    places: zl.Ptr[zl.i32, "const"]
    rows: zl.index
    row_stride: zl.i64
    group_stride: zl.i64
    word_stride: zl.i64
    zero_stride: zl.i64
    first_group: zl.index
    groups: zl.index
    all_groups: zl.index
    bits: zl.index
    has_zero: zl.index
    plus: zl.index
    awq: zl.index
    first_row: zl.index
    has_places: zl.index
    IN: zl.static


@zl.kernel
def repack_scales(p: ScalePacking):
    """Grid (tiles)."""
    tile = zl.block_index(0)
    per_word = 32 // p.bits
    mask = (zl.u32(1) << zl.u32(p.bits)) - 1
    for group in range(p.groups):
        for r in range(TILE):
            row = tile * TILE + r
            place = p.first_row + row
            if p.has_places != 0 and row < p.rows:
                place = zl.i64(p.places[place])
            out = (place // TILE * p.all_groups + (p.first_group + group)) * TILE + place % TILE
            factor, shift = zl.f32(0), zl.f32(0)
            if row < p.rows:
                factor = zl.convert(p.src[row * p.row_stride + group * p.group_stride], zl.f32)
                if abs(factor) > rounding.F16_MAX:
                    p.bad[0] = max(p.bad[0], zl.i32(rounding.BAD_SCALE))
                factor = zl.convert(zl.convert(factor, zl.f16), zl.f32)
                if p.has_zero != 0:
                    field = row % per_word
                    if p.awq != 0:
                        field = field // 2 + field % 2 * 4
                    word = p.zero[row // per_word * p.word_stride + group * p.zero_stride]
                    stored = ((word >> zl.u32(field * p.bits)) & mask) + zl.u32(p.plus)
                    point = zl.f32(zl.i32(stored & mask))
                    shift = zl.convert(zl.convert(-point * factor, zl.f16), zl.f32)
                    if not (abs(shift) <= rounding.F16_MAX):
                        p.bad[0] = max(p.bad[0], zl.i32(rounding.BAD_OFFSET))
            p.scale[out] = zl.convert(factor, zl.f16)
            if p.has_zero != 0:
                p.offset[out] = zl.convert(shift, zl.f16)


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
    if largest > rounding.F16_MAX_BITS:
        bad[0] = largest
    high, low = high + 0.0, low + 0.0
    if BITS == 8:
        factor, base = rounding.symmetric_range(high, low)
    else:
        factor, base = rounding.searched_range(columns, group, size, high, low, 4, LANES)
    zl.store(scale, zl.convert(factor, zl.f16))
    if BITS != 8:
        zl.store(offset, zl.convert(base, zl.f16))
    inverse = rounding.quotient(1.0, factor)
    for block in range(size // 32):
        for j in zl.static(range(words)):
            made = zl.i32.x(LANES)(0)
            for c in zl.static(range(4)):
                at = group + (block * 32 + (4 * j + c)) * TILE
                made = made | zl.convert(rounding.quantized(zl.load(at, LANES), base, inverse, BITS), zl.i32) << (8 * c)
                if BITS == 4:
                    upper = rounding.quantized(zl.load(at + 16 * TILE, LANES), base, inverse, BITS)
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
    stride: zl.i64,
    first_column: zl.i64,
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
        rows_at[r] = row * stride + first_column
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
    for name, dtype in rounding.INPUTS.items():
        found += [zl.Variant(f"repack_scales_{name}", repack_scales, {"IN": dtype})]
        found += [
            zl.Variant(f"quantize_int{bits}_{name}", quantize_groups, {"BITS": bits, "IN": dtype}) for bits in (4, 8)
        ]
    return found
