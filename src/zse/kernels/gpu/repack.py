"""Weights of other people's checkpoints, and plain ones that are quantized on load, on a GPU: from the words of the
file, which the loader has copied to device memory, to the planes of layout r16 (e4m3: of rows).
zse.kernels.repack_pieces says which piece goes to which kernel.

Bit-equal to the NumPy of zse.formats.quantized_rows, zse.quant.quantize and zse.quant.fp8: the same operations of f32,
each rounded by itself, and sums in the order of the columns. A thread makes 32 columns or a group of one row; 16
neighbours are the rows of a tile, so that they store 64 bytes together. Bound by the bus that brings the words (50
GB/s)."""

from zse import kernel as zl
from zse.kernels import quantize_group as rounding
from zse.kernels.gpu.rows import block_max, largest_bits, magnitude_bits
from zse.kernels.repack_checkpoint import OrderedPacking, ScalePacking, WordPacking
from zse.quant.scheme import TILE_ROWS

THREADS = 128
ROW_THREADS = 256
LINES = THREADS // TILE_ROWS  # blocks of 32 columns, or groups, of a tile that a thread block makes
INFINITY_BITS = 0x7F800000


@zl.kernel
def repack_words(p: WordPacking):
    """Grid (groups of LINES blocks, tiles)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    r = zl.thread_index() % TILE_ROWS
    block = zl.block_index(0) * LINES + zl.thread_index() // TILE_ROWS
    row = zl.block_index(1) * TILE_ROWS + r
    if block < p.blocks:
        words = 8 if p.FORM in ("words8", "int8") else 4
        made = [zl.u32(0) for _ in zl.static(range(words))]
        if row < p.rows:
            if p.FORM == "awq4":
                at = p.src + (zl.i64(block) * 32 * p.word_stride + row // 8)
                shift = zl.u32((row % 8 // 2 + row % 2 * 4) * 4)
                for j in zl.static(range(4)):
                    for c in zl.static(range(4)):
                        low = (at[(4 * j + c) * p.word_stride] >> shift) & 15
                        high = (at[(4 * j + c + 16) * p.word_stride] >> shift) & 15
                        made[j] = made[j] | (low | (high << 4)) << (8 * c)
            else:
                at = p.src + (row * p.row_stride + zl.i64(block) * words * p.word_stride)
                if words == 8:
                    for s in zl.static(range(8)):
                        made[s] = at[s * p.word_stride] ^ (0x80808080 if p.FORM == "int8" else 0)
                else:
                    word = [at[i * p.word_stride] for i in zl.static(range(4))]
                    for j in zl.static(range(4)):
                        low = (word[j // 2] >> (16 * (j % 2))) & 0xFFFF
                        high = (word[2 + j // 2] >> (16 * (j % 2))) & 0xFFFF
                        made[j] = rounding.spread(low) | (rounding.spread(high) << 4)
        out = p.q + ((zl.i64(zl.block_index(1)) * p.all_blocks + (p.first_block + block)) * (words * TILE_ROWS) + r)
        for j in zl.static(range(words)):
            out[j * TILE_ROWS] = made[j]


@zl.kernel
def repack_ordered(p: OrderedPacking):
    """Grid (groups of LINES blocks, tiles)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    r = zl.thread_index() % TILE_ROWS
    block = zl.block_index(0) * LINES + zl.thread_index() // TILE_ROWS
    row = zl.block_index(1) * TILE_ROWS + r
    if block < p.blocks:
        words, per_word = 8 if p.BITS == 8 else 4, 32 // p.BITS
        place = p.first_row + row
        at = p.src + row * p.row_stride
        made = [zl.u32(0) for _ in zl.static(range(words))]
        if row < p.rows:
            if p.has_places != 0:
                place = p.places[place]
            for column in zl.static(range(32)):
                k = block * 32 + column
                if p.has_columns != 0:
                    k = p.columns[k]
                field = (at[k // per_word * p.word_stride] >> zl.u32(k % per_word * p.BITS)) & ((1 << p.BITS) - 1)
                shift = column % 4 * 8 + (column // 16 * 4 if p.BITS == 4 else 0)
                made[column // 4 % words] = made[column // 4 % words] | field << shift
        out = p.q + ((zl.i64(place // TILE_ROWS) * p.blocks + block) * (words * TILE_ROWS) + place % TILE_ROWS)
        for j in zl.static(range(words)):
            out[j * TILE_ROWS] = made[j]


@zl.kernel
def repack_scales(p: ScalePacking):
    """Grid (groups of LINES groups, tiles)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    r = zl.thread_index() % TILE_ROWS
    group = zl.block_index(0) * LINES + zl.thread_index() // TILE_ROWS
    row = zl.block_index(1) * TILE_ROWS + r
    if group < p.groups:
        place = p.first_row + row
        if p.has_places != 0 and row < p.rows:
            place = p.places[place]
        out = (zl.i64(place // TILE_ROWS) * p.all_groups + (p.first_group + group)) * TILE_ROWS + place % TILE_ROWS
        factor, shift = zl.f32(0), zl.f32(0)
        if row < p.rows:
            factor = zl.convert(p.src[row * p.row_stride + group * p.group_stride], zl.f32)
            if abs(factor) > rounding.F16_MAX:
                zl.atomic_max(p.bad, zl.i32(rounding.BAD_SCALE))
            factor = zl.convert(zl.convert(factor, zl.f16), zl.f32)
            if p.has_zero != 0:
                per_word = 32 // p.bits
                field = row % per_word
                if p.awq != 0:
                    field = field // 2 + field % 2 * 4
                word = p.zero[row // per_word * p.word_stride + group * p.zero_stride]
                mask = (zl.u32(1) << zl.u32(p.bits)) - 1
                point = zl.convert(zl.i32((((word >> zl.u32(field * p.bits)) & mask) + zl.u32(p.plus)) & mask), zl.f32)
                shift = zl.convert(zl.convert(-point * factor, zl.f16), zl.f32)
                if not (abs(shift) <= rounding.F16_MAX):
                    zl.atomic_max(p.bad, zl.i32(rounding.BAD_OFFSET))
        p.scale[out] = zl.convert(factor, zl.f16)
        if p.has_zero != 0:
            p.offset[out] = zl.convert(shift, zl.f16)


@zl.inline
def read_eight(row_src, k):
    """Eight columns as f32."""
    return zl.convert(zl.load(row_src + k, 8), zl.f32)


@zl.inline
def columns(row_src, k, LANES):
    """The same as a list."""
    v = read_eight(row_src, k)
    return [v[e] for e in zl.static(range(LANES))]


@zl.inline
def store_block(row_src, k, out, base, inverse, BITS):
    """32 columns as the dwords of a row in layout r16."""
    words = 8 if BITS == 8 else 4
    made = [zl.u32(0) for _ in zl.static(range(words))]
    for i in zl.static(range(4)):
        v = read_eight(row_src, k + 8 * i)
        for e in zl.static(range(8)):
            column = 8 * i + e
            q = zl.u32(zl.convert(rounding.quantized(v[e], base, inverse, BITS), zl.i32))
            made[column // 4 % words] = made[column // 4 % words] | q << (
                column % 4 * 8 + (column // 16 * 4 if BITS == 4 else 0)
            )
    for j in zl.static(range(words)):
        out[j * TILE_ROWS] = made[j]


@zl.kernel
def quantize_groups(
    src: zl.Ptr["IN", "const"],
    q: zl.Ptr[zl.u32],
    scale: zl.Ptr[zl.f16],
    offset: zl.Ptr[zl.f16],
    order: zl.Ptr[zl.i32, "const"],
    bad: zl.Ptr[zl.i32],
    rows: zl.i32,
    stride: zl.i32,
    first_column: zl.i32,
    width: zl.i32,
    group: zl.i32,
    has_order: zl.i32,
    unit: zl.i32,
    BITS: zl.static,
    IN: zl.static,
):
    """Grid (groups of LINES groups, tiles): rows of numbers as int4 with offsets or symmetric int8, `group` columns a
    scale, a multiple of 32. Of the `stride` columns of a stored row those [first_column, first_column + width) are taken.
    Inside every unit of rows, row i is the source's row order[i]. Rows from `rows` on are padding. bad: gets the bits of the largest magnitude that f16 cannot hold."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    r = zl.thread_index() % TILE_ROWS
    index = zl.block_index(0) * LINES + zl.thread_index() // TILE_ROWS
    place = zl.block_index(1) * TILE_ROWS + r
    groups = width // group
    words = 8 if BITS == 8 else 4
    if index < groups:
        line = zl.i64(zl.block_index(1)) * groups + index
        out = q + (line * (group // 32) * (words * TILE_ROWS) + r)
        if place < rows:
            row = place
            if has_order != 0:
                row = place // unit * unit + order[place % unit]
            row_src = src + (zl.i64(row) * stride + first_column)
            first = index * group
            high, low, top = zl.f32(-3.4e38), zl.f32(3.4e38), zl.i32(0)
            for k in range(0, group, 8):
                v = read_eight(row_src, first + k)
                top = max(top, largest_bits(magnitude_bits(v)))
                for e in zl.static(range(8)):
                    high, low = max(high, v[e]), min(low, v[e])
            if top > rounding.F16_MAX_BITS:
                zl.atomic_max(bad, top)
            high, low = high + 0.0, low + 0.0
            if BITS == 8:
                factor, base = rounding.symmetric_range(high, low)
            else:
                factor, base = rounding.searched_range(columns, row_src + first, group, high, low, 8, 8)
            scale[line * TILE_ROWS + r] = zl.convert(factor, zl.f16)
            if BITS != 8:
                offset[line * TILE_ROWS + r] = zl.convert(base, zl.f16)
            inverse = rounding.quotient(1.0, factor)
            for k in range(0, group, 32):
                store_block(row_src, first + k, out + k // 32 * (words * TILE_ROWS), base, inverse, BITS)
        else:
            scale[line * TILE_ROWS + r] = zl.f16(0)
            if BITS != 8:
                offset[line * TILE_ROWS + r] = zl.f16(0)
            for j in range(group // 32 * words):
                out[j * TILE_ROWS] = zl.u32(0)


@zl.kernel
def quantize_rows(
    src: zl.Ptr["IN", "const"],
    w: zl.Ptr[zl.e4m3],
    scale: zl.Ptr[zl.f32],
    order: zl.Ptr[zl.i32, "const"],
    bad: zl.Ptr[zl.i32],
    stride: zl.i32,
    first_column: zl.i32,
    width: zl.i32,
    has_order: zl.i32,
    unit: zl.i32,
    IN: zl.static,
):
    """Grid (rows): e4m3 with one scale a row, the largest magnitude of all its columns becomes 448. stride, first_column,
    width (multiples of 16), order: as above. bad: gets the bits of infinity or NaN."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    scratch = zl.shared_array(zl.i32, zl.target.threads // zl.target.warp)
    place = zl.block_index(0)
    row = place
    if has_order != 0:
        row = place // unit * unit + order[place % unit]
    row_src = src + zl.i64(row) * stride
    out = w + zl.i64(place) * width
    top = zl.i32(0)
    for k in range(zl.thread_index() * 8, stride, zl.target.threads * 8):
        top = max(top, largest_bits(magnitude_bits(read_eight(row_src, k))))
    top = block_max(top, scratch)
    # A row of zeros takes any scale; the smallest normal one keeps the division finite.
    factor = max(zl.bitcast(top, zl.f32) / 448.0, zl.f32(2.0**-126))
    if zl.thread_index() == 0:
        scale[place] = factor
        if top >= INFINITY_BITS:
            zl.atomic_max(bad, top)
    for k in range(zl.thread_index() * 8, width, zl.target.threads * 8):
        zl.store(out + k, zl.convert(read_eight(row_src + first_column, k) / factor, zl.e4m3))


def variants(target) -> list[zl.Variant]:
    """Every packing kernel of a GPU."""
    found = [
        zl.Variant(f"repack_{form}", repack_words, {"FORM": form}, threads=THREADS)
        for form in ("words4", "words8", "awq4", "int8")
    ]
    found += [zl.Variant(f"repack_ordered{bits}", repack_ordered, {"BITS": bits}, threads=THREADS) for bits in (4, 8)]
    for name, dtype in rounding.INPUTS.items():
        found += [zl.Variant(f"repack_scales_{name}", repack_scales, {"IN": dtype}, threads=THREADS)]
        found += [
            zl.Variant(f"quantize_int{bits}_{name}", quantize_groups, {"BITS": bits, "IN": dtype}, threads=THREADS)
            for bits in (4, 8)
        ]
        found += [zl.Variant(f"quantize_e4m3_{name}", quantize_rows, {"IN": dtype}, threads=ROW_THREADS)]
    return found
