"""From the bytes of a model file to layout r16: one kernel per source format, run by the loader on pieces of the file
as they arrive.

A piece holds whole source rows; a block of the grid makes one tile of 16 rows. Bit layouts of the source blocks: the
GGUF specification (ggml, MIT). The truth they are tested against is zse.formats.gguf's NumPy mapping with
quant/affine.py. Everything is moved bit for bit, but for
scales of Q4_K, Q5_K and Q6_K where a GPU wants them multiplied: they are rounded to f16 then."""

from collections.abc import Iterator

from zse import kernel as zl
from zse.quant.scheme import LAYOUT, rows_per_line
from zse.quant.scheme import TILE_ROWS as TILE
from zse.runtime.load import LoadJob
from zse.tensor import Tensor

LOW, HIGH = 0x0F0F0F0F, -252645136  # 0xF0F0F0F0 as i32
PIECE_BYTES = 1 << 20  # a piece: large enough for the disk, small enough for a core's L2


@zl.inline
def store_dword(plane, index, row, value):
    """The 4 bytes of one row at dword `index` of a tile's plane, i32 pointer."""
    plane[index * TILE + row] = value


@zl.inline
def compress_bits(word, c):
    """Bits c, c + 4, c + 8, ... of a u32 as the low 8 bits."""
    x = (word >> c) & 0x11111111
    x = (x | (x >> 3)) & 0x03030303
    x = (x | (x >> 6)) & 0x000F000F
    return (x | (x >> 12)) & 0xFF


@zl.inline
def legacy_block(src, q, high, scale, offset, block, row, KIND):
    """Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: 32 values with an f16 scale and, for _1, an f16 minimum."""
    nbytes = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}[KIND]
    p = src + block * nbytes
    halves = zl.cast_ptr(p, zl.u16)
    scale[block * TILE + row] = halves[0]
    at = 2
    if KIND in ("Q4_1", "Q5_1"):
        offset[block * TILE + row] = halves[1]
        at = 4
    if KIND in ("Q5_0", "Q5_1"):
        bits = zl.load(zl.cast_ptr(p + at, zl.u32), 1)
        packed = compress_bits(bits, 0)
        for c in zl.static(range(1, 4)):
            packed = packed | (compress_bits(bits, c) << (8 * c))
        store_dword(high, block, row, zl.i32(packed))
        at += 4
    if KIND == "Q8_0":
        for part in zl.static(range(2)):
            v = zl.load(zl.cast_ptr(p + (at + part * 16), zl.i32), 4) ^ -2139062144  # 0x80808080: q + 128
            for j in zl.static(range(4)):
                store_dword(q, block * 8 + (part * 4 + j), row, v[j])
    else:
        v = zl.load(zl.cast_ptr(p + at, zl.i32), 4)
        for j in zl.static(range(4)):
            store_dword(q, block * 4 + j, row, v[j])


@zl.inline
def k_scales(scales, sub):
    """(scale, min) of sub-block `sub` (compile time) from the 12 packed bytes of Q4_K and Q5_K, as f32."""
    if sub < 4:
        return zl.f32(zl.i32(scales[sub] & 63)), zl.f32(zl.i32(scales[sub + 4] & 63))
    low = zl.f32(zl.i32((scales[sub + 4] & 15) | ((scales[sub - 4] >> 6) << 4)))
    return low, zl.f32(zl.i32((scales[sub + 4] >> 4) | ((scales[sub] >> 6) << 4)))


@zl.inline
def k_fields(scales):
    """The 12 packed bytes of Q4_K and Q5_K → three words of fields of 6 bits: 8 scales, 8 minima (zse.quant.superblock)."""
    bytes_ = [zl.i32(scales[i]) for i in zl.static(range(12))]
    fields = [bytes_[i] & 63 for i in range(4)]
    fields = fields + [(bytes_[i + 8] & 15) | ((bytes_[i] >> 6) << 4) for i in range(4)]
    fields = fields + [bytes_[i + 4] & 63 for i in range(4)]
    fields = fields + [(bytes_[i + 8] >> 4) | ((bytes_[i + 4] >> 6) << 4) for i in range(4)]
    return [
        fields[5 * j]
        | (fields[5 * j + 1] << 6)
        | (fields[5 * j + 2] << 12)
        | (fields[5 * j + 3] << 18)
        | (fields[5 * j + 4] << 24)
        | (((fields[15] >> (2 * j)) & 3) << 30)
        for j in zl.static(range(3))
    ]


@zl.inline
def k_block(src, q, high, scale, offset, factor, block, row, KIND, CODED):
    """Q4_K, Q5_K: 256 values in 8 sub-blocks of 32, scale = d * sc, offset = -dmin * m; CODED: these as they are."""
    p = src + block * (144 if KIND == "Q4_K" else 176)
    halves = zl.cast_ptr(p, zl.f16)
    d, dmin = zl.f32(halves[0]), zl.f32(halves[1])
    if CODED:
        for i in zl.static(range(2)):
            factor[(block * 2 + i) * TILE + row] = zl.cast_ptr(p, zl.u16)[i]
        words = k_fields(p + 4)
        for j in zl.static(range(3)):
            store_dword(zl.cast_ptr(scale, zl.i32), block * 3 + j, row, words[j])
    scales, qs = p + 4, zl.cast_ptr(p + (16 if KIND == "Q4_K" else 48), zl.i32)
    if KIND == "Q5_K":
        bits = [zl.load(zl.cast_ptr(p + (16 + 16 * part), zl.i32), 4) for part in zl.static(range(2))]
    for sub in zl.static(range(8)):
        out = block * 8 + sub
        if not CODED:
            sc, m = k_scales(scales, sub)
            scale[out * TILE + row] = zl.f16(d * sc)
            offset[out * TILE + row] = zl.f16(-(dmin * m))
        first, second = zl.load(qs + (sub // 2) * 8, 4), zl.load(qs + ((sub // 2) * 8 + 4), 4)
        if sub % 2 == 0:
            v = (first & LOW) | ((second & LOW) << 4)
        else:
            v = ((first >> 4) & LOW) | (second & HIGH)
        for j in zl.static(range(4)):
            store_dword(q, out * 4 + j, row, v[j])
        if KIND == "Q5_K":
            packed = zl.i32(0)
            for s in zl.static(range(8)):
                packed = packed | (((bits[s // 4][s % 4] >> sub) & 0x01010101) << s)
            store_dword(high, out, row, packed)


@zl.inline
def q6_block(src, q, high, scale, factor, block, row, CODED):
    """Q6_K: 256 values, 16 signed 8-bit scales times an f16; CODED: these as they are."""
    p = src + block * 210
    d = zl.f32(zl.cast_ptr(p + 208, zl.f16)[0])
    scales = zl.cast_ptr(p + 192, zl.i8)
    if CODED:
        factor[block * TILE + row] = zl.cast_ptr(p + 208, zl.u16)[0]
    for g in zl.static(range(16)):
        if CODED:
            scale[(block * 16 + g) * TILE + row] = p[192 + g]
        else:
            scale[(block * 16 + g) * TILE + row] = zl.f16(d * zl.f32(zl.i32(scales[g])))
    for half in zl.static(range(2)):
        lows = [zl.load(zl.cast_ptr(p + (64 * half + 16 * i), zl.i32), 4) for i in zl.static(range(4))]
        tops = [zl.load(zl.cast_ptr(p + (128 + 32 * half + 16 * i), zl.i32), 4) for i in zl.static(range(2))]
        for sub in zl.static(range(4)):
            out, shift = block * 8 + (4 * half + sub), 4 * (sub // 2)
            first, second = lows[2 * (sub % 2)] >> shift, lows[2 * (sub % 2) + 1] >> shift
            v = (first & LOW) | ((second & LOW) << 4)
            for j in zl.static(range(4)):
                store_dword(q, out * 4 + j, row, v[j])
            for h in zl.static(range(2)):
                packed = zl.i32(0)
                for i in zl.static(range(4)):
                    packed = packed | (((tops[h][i] >> (2 * sub)) & 0x03030303) << (2 * i))
                store_dword(high, out * 2 + h, row, packed)


@zl.inline
def zero_block(q, high, scale, offset, factor, block, blocks, row, KIND, CODED):
    """A padding row: all planes zero. blocks: of the row."""
    bits, group, symmetric = FORMATS[KIND][2:]
    for s in zl.static(range(8 if bits == 8 else 4)):
        store_dword(q, block * (8 if bits == 8 else 4) + s, row, zl.i32(0))
    for s in zl.static(range({4: 0, 5: 1, 6: 2, 8: 0}[bits])):
        store_dword(high, block * {5: 1, 6: 2}[bits] + s, row, zl.i32(0))
    if CODED:
        if block < blocks // 8 * (1 if symmetric else 2):
            factor[block * TILE + row] = 0
        if not symmetric:
            if block < blocks // 8 * 3:
                store_dword(zl.cast_ptr(scale, zl.i32), block, row, zl.i32(0))
    for g in zl.static(range(32 // group)):
        if symmetric or not CODED:
            scale[(block * (32 // group) + g) * TILE + row] = 0
        if not symmetric and not CODED:
            offset[(block * (32 // group) + g) * TILE + row] = 0


@zl.kernel
def repack_affine(
    src: zl.Ptr[zl.u8, "const"],
    q: zl.Ptr[zl.i32],
    high: zl.Ptr[zl.i32],
    scale: zl.Ptr["SCALE"],
    offset: zl.Ptr["SCALE"],
    factor: zl.Ptr[zl.u16],
    order: zl.Ptr[zl.i32, "const"],
    row_bytes: zl.i64,
    rows: zl.i64,
    blocks: zl.i64,
    has_order: zl.i64,
    unit: zl.i64,
    KIND: zl.static,
    SCALE: zl.static,
    CODED: zl.static,
):
    """Block t makes tile t of the piece; inside every unit of rows, row i is the source's row order[i] (or i without an
    order); rows past `rows` are padding. Planes point at the piece's first tile; blocks = K / 32. CODED: scales as zse.quant.superblock has them."""
    source_block, _, bits, group, symmetric = FORMATS[KIND]
    tile = zl.block_index(0)
    q_tile = q + tile * blocks * (TILE * (8 if bits == 8 else 4))
    high_tile = high + tile * blocks * (TILE * {4: 0, 5: 1, 6: 2, 8: 0}[bits])
    scale_tile = scale + tile * blocks * (TILE * 12 // 8 if CODED and not symmetric else TILE * (32 // group))
    factor_tile = factor + tile * (blocks // 8) * (TILE if symmetric else 2 * TILE)
    offset_tile = offset + tile * blocks * (TILE * (32 // group))
    for r in range(TILE):
        place = tile * TILE + r
        if place < rows:
            row = place
            if has_order != 0:
                row = place // unit * unit + zl.i64(order[place % unit])
            row_src = src + row * row_bytes
            for block in range(blocks // (source_block // 32)):
                if KIND in ("Q4_K", "Q5_K"):
                    k_block(row_src, q_tile, high_tile, scale_tile, offset_tile, factor_tile, block, r, KIND, CODED)
                elif KIND == "Q6_K":
                    q6_block(row_src, q_tile, high_tile, scale_tile, factor_tile, block, r, CODED)
                else:
                    legacy_block(row_src, q_tile, high_tile, scale_tile, offset_tile, block, r, KIND)
        else:
            for block in range(blocks):
                zero_block(q_tile, high_tile, scale_tile, offset_tile, factor_tile, block, blocks, r, KIND, CODED)


@zl.kernel
def repack_dense(
    src: zl.Ptr["W", "const"],
    w: zl.Ptr["W"],
    order: zl.Ptr[zl.i32, "const"],
    rows: zl.i64,
    width: zl.i64,
    has_order: zl.i64,
    unit: zl.i64,
    W: zl.static,
):
    """Row-major 2- or 4-byte elements to [T, K, 16]; the bits are moved as integers."""
    tile = zl.block_index(0)
    w_tile = w + tile * width * TILE
    for r in range(TILE):
        place = tile * TILE + r
        if place < rows:
            row = place
            if has_order != 0:
                row = place // unit * unit + zl.i64(order[place % unit])
            for k in range(width):
                w_tile[k * TILE + r] = src[row * width + k]
        else:
            for k in range(width):
                w_tile[k * TILE + r] = 0


@zl.kernel
def copy_words(src: zl.Ptr[zl.u32, "const"], out: zl.Ptr[zl.u32], count: zl.i64):
    """A piece as it is: of runs of a file, which come together in it. One block."""
    for i in range(count):
        out[i] = src[i]


@zl.kernel
def convert_vector(
    src: zl.Ptr["W", "const"],
    out: zl.Ptr[zl.f32],
    order: zl.Ptr[zl.i32, "const"],
    count: zl.i64,
    factor: zl.f32,
    add: zl.f32,
    has_order: zl.i64,
    unit: zl.i64,
    W: zl.static,
):
    """out[i] = src[order[i] or i] * factor + add as f32: norm weights and biases. One block."""
    for i in range(count):
        place = i
        if has_order != 0:
            place = i // unit * unit + zl.i64(order[i % unit])
        out[i] = zl.convert(src[place], zl.f32) * factor + add


# source format -> (values of a source block, its bytes, bits, group, symmetric)
FORMATS = {
    "Q4_0": (32, 18, 4, 32, True),
    "Q4_1": (32, 20, 4, 32, False),
    "Q5_0": (32, 22, 5, 32, True),
    "Q5_1": (32, 24, 5, 32, False),
    "Q8_0": (32, 34, 8, 32, True),
    "Q4_K": (256, 144, 4, 32, False),
    "Q5_K": (256, 176, 5, 32, False),
    "Q6_K": (256, 210, 6, 16, True),
}
K_FORMATS = ("Q4_K", "Q5_K", "Q6_K")
CODED_END = "_coded"  # of the kernels that leave the scales of these as they are
DENSE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def variants(target) -> list[zl.Variant]:
    """Every repacking kernel."""
    kinds = [(kind, "", zl.f16 if kind in K_FORMATS else zl.u16) for kind in FORMATS]
    kinds += [(kind, CODED_END, zl.u8) for kind in K_FORMATS]
    found = [
        zl.Variant(f"repack_{kind.lower()}{end}", repack_affine, {"KIND": kind, "SCALE": scale, "CODED": bool(end)})
        for kind, end, scale in kinds
    ]
    found += [
        zl.Variant(f"repack_dense_{bits}", repack_dense, {"W": dtype}) for bits, dtype in ((16, zl.u16), (32, zl.u32))
    ]
    found += [
        zl.Variant(f"convert_{name}", convert_vector, {"W": dtype})
        for name, dtype in (("f32", zl.f32), ("f16", zl.f16), ("bf16", zl.bf16))
    ]
    return [*found, zl.Variant("copy_words", copy_words, {})]


def takes(info, scheme) -> bool:
    """Whether a kernel makes `scheme` of a tensor of a file (TensorInfo)."""
    if info.layout == "ggml":
        return info.type in FORMATS and scheme in (info.scheme, info.scheme.loaded("gpu"))
    return info.is_dense and info.scheme == scheme


def takes_part(part, matrix) -> bool:
    """Whether kernels make a part (models.weight_plan.FileTensor) of a MatrixPlan: all of a tensor, or columns of it, which are read
    as runs of the file."""
    info, cut = part.info, part.cut
    if cut is None:
        return matrix.layout == LAYOUT and takes(info, matrix.scheme)
    if cut.rows != (0, info.shape[0]):
        return False
    if (info.layout, info.scheme) == (matrix.layout, matrix.scheme):
        return info.parts is None
    unit = FORMATS[info.type][0] if info.type in FORMATS else 1
    return matrix.layout == LAYOUT and takes(info, matrix.scheme) and not any(end % unit for end in cut.columns)


def part_jobs(part, matrix, weight, **order) -> Iterator[LoadJob]:
    """The jobs of a part that takes_part(). order: as of weight_jobs()."""
    info, cut = part.info, part.cut
    if cut is None:
        yield from weight_jobs(info, weight, first_row=part.first, **order)
    elif (info.layout, info.scheme) == (matrix.layout, matrix.scheme):
        for plane, file, offset in info.placed():
            yield from _cut_plane(part, matrix, weight, plane, file, offset)
    else:
        (n, k), (start, stop) = info.shape, cut.columns
        row_bytes, nbytes = info.nbytes // n, info.nbytes // n * (stop - start) // k
        first = info.offset + row_bytes * start // k
        mine = info._replace(shape=(n, stop - start), offset=0, nbytes=n * nbytes)
        for job in weight_jobs(mine, weight, first_row=part.first):
            rows, row = job.nbytes // nbytes, job.offset // nbytes
            yield job._replace(offset=first + row * row_bytes, runs=(rows, row_bytes))


def _cut_plane(part, matrix, weight, plane, file, offset: int) -> Iterator[LoadJob]:
    """Columns of a stored plane [lines, what the columns have, ...]; all of one that has no columns."""
    (n, k), (start, stop), lines = part.info.shape, part.cut.columns, plane.shape[0]
    line_bytes, groups = plane.nbytes // lines, plane.shape[1] if len(plane.shape) > 1 else 1
    begin, end = 0, line_bytes
    if groups > 1:
        per = -(-k // groups)
        begin, end = (line_bytes // groups * count for count in (start // per, -(-stop // per)))
    nbytes, out = end - begin, weight.planes[plane.name]
    at = out.offset + part.first // rows_per_line(plane, matrix.layout, n) * nbytes
    step = max(1, PIECE_BYTES // nbytes)
    for line in range(0, lines, step):
        count = min(step, lines - line)
        to = Tensor(out.buffer, (count * nbytes,), "u8", at + line * nbytes)
        args, place = {"out": to, "count": count * nbytes // 4}, offset + line * line_bytes + begin
        runs = (count, line_bytes) if count > 1 else (1, 0)
        yield LoadJob(
            file.fd, place, count * nbytes, "copy_words", args, path=file.path, field=part.info.name, runs=runs
        )


def weight_jobs(info, weight, *, first_row: int = 0, order=None, unit: int = TILE) -> Iterator[LoadJob]:
    """Jobs that fill rows [first_row, first_row + info's rows) of `weight` from one tensor of a file.

    info: TensorInfo (type, shape, fd, offset, nbytes, layout "ggml" or "rows"). first_row is a multiple of 16. order:
    i32 Tensor [unit]: row i of every unit of `unit` rows (a head; a multiple of 16) is the source's row order[i] of
    that unit."""
    rows, width = info.shape
    if first_row % TILE:
        raise ValueError(f"{info.name}: row {first_row} does not start a tile")
    row_bytes = info.nbytes // rows
    step = max(unit, PIECE_BYTES // row_bytes // unit * unit)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        tiles = -(-count // TILE)
        planes = {name: _tiles(plane, (first_row + start) // TILE, tiles) for name, plane in weight.planes.items()}
        args = planes | {"order": order, "has_order": int(order is not None), "unit": unit, "rows": count}
        if info.layout == "ggml":
            symbol = f"repack_{info.type.lower()}{CODED_END if weight.scheme.kind == 'superblock' else ''}"
            args = (
                {"high": None, "offset": None, "factor": None} | args | {"row_bytes": row_bytes, "blocks": width // 32}
            )
        else:
            symbol = f"repack_dense_{8 * DENSE_BYTES[info.type]}"
            args["width"] = width
        place = info.offset + start * row_bytes, count * row_bytes
        yield LoadJob(info.fd, *place, symbol, args, (tiles,), field=info.name)


def _tiles(plane, first: int, count: int):
    """`count` tiles of a plane [T, ...] as a Tensor: exactly the bytes that a job writes."""
    tile_bytes = plane.nbytes // plane.shape[0]
    return Tensor(plane.buffer, (count * tile_bytes,), "u8", plane.offset + first * tile_bytes)


def vector_job(info, out, add: float = 0.0, order=None, unit: int = 1, factor: float = 1.0) -> LoadJob:
    """The job that loads a dense tensor as f32 into `out`, every element times `factor` with `add` on it."""
    args = {"out": out, "count": info.num_elements, "factor": float(factor), "add": float(add)}
    args |= {"order": order, "has_order": int(order is not None), "unit": unit}
    return LoadJob(info.fd, info.offset, info.nbytes, f"convert_{info.type.lower()}", args, field=info.name)
