"""Embedding rows out of a weight of any scheme: one block is one token, 16-byte accesses to the hidden state."""

from zse import kernel as zl
from zse.kernels.embed import AffineEmbedding, DenseEmbedding
from zse.kernels.gpu.matmul_simple import number_of

TILE = 16
THREADS = 256
DENSE = {"f32": zl.f32, "f16": zl.f16, "bf16": zl.bf16}
BITS = (4, 5, 6, 8)
FP8_BLOCK = 128


@zl.inline
def token_row(ids, shift, rows):
    """The row of this block's token, inside the table whatever it holds."""
    return zl.i64(min(max(ids[zl.block_index(0)] + shift, 0), rows - 1))


@zl.inline
def start():
    """In this order: what starts after an embedding may rely on all before it (attention reads its plan early)."""
    zl.grid_wait()
    zl.grid_launch_dependents()


@zl.kernel
def embed_rows(p: DenseEmbedding):
    """w [rows, width]; width a multiple of 8."""
    start()
    source = zl.cast_ptr(p.w, p.DTYPE) + token_row(p.ids, p.shift, p.rows) * p.width
    destination = p.out + zl.i64(zl.block_index(0)) * p.width
    for k in range(zl.thread_index() * 4, p.width, zl.target.threads * 4):
        value = zl.convert(zl.load(source + k, 4), zl.f32) * p.factor
        if p.ADD:
            value = value + zl.load(destination + k, 4)
        zl.store(destination + k, value)


@zl.kernel
def embed_fp8(
    ids: zl.Ptr[zl.i32, "const"],
    w: zl.Ptr[zl.e4m3, "const"],
    scale: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.f32],
    rows: zl.i32,
    width: zl.i32,
    factor: zl.f32,
    SCALING: zl.static,
):
    """w [rows, width] in e4m3; width a multiple of 16."""
    start()
    row = token_row(ids, 0, rows)
    source = w + row * width
    destination = out + zl.i64(zl.block_index(0)) * width
    for k in range(zl.thread_index() * 4, width, zl.target.threads * 4):
        if SCALING == "row":
            unit = scale[row]
        elif SCALING == "tensor":
            unit = scale[0]
        else:
            unit = scale[row // FP8_BLOCK * ((width + FP8_BLOCK - 1) // FP8_BLOCK) + k // FP8_BLOCK]
        zl.store(destination + k, zl.convert(zl.load(source + k, 4), zl.f32) * unit * factor)


@zl.inline
def bytes_of(word):
    """The four bytes of a u32 as i32, lowest first."""
    return [zl.i32((word >> shift) & 255) for shift in zl.static((0, 8, 16, 24))]


@zl.kernel
def embed_affine(p: AffineEmbedding):
    """Layout r16, width a multiple of 32; group is in columns (the width for one group a row). A thread takes a word of
    the row: four columns (8 bits), or four and the four that are 16 further (less)."""
    start()
    row = token_row(p.ids, 0, p.rows)
    tile = row // TILE
    r = row % TILE
    blocks = zl.i64(p.width // 32)
    groups = zl.i64(p.width // p.group)
    words = 8 if p.BITS == 8 else 4
    q_words = zl.cast_ptr(p.q, zl.u32) + (tile * blocks * words * TILE + r)
    high_words = zl.cast_ptr(p.high, zl.u32)
    destination = p.out + zl.i64(zl.block_index(0)) * p.width
    for at in range(zl.thread_index(), p.width // 32 * words, zl.target.threads):
        block = at // words
        j = at % words
        word = q_words[at * TILE]
        values = bytes_of(word)
        halves = [values] if p.BITS == 8 else [[v & 15 for v in values], [v >> 4 for v in values]]
        for half, quarter in enumerate(halves):
            s = j + half * 4
            column = block * 32 + s * 4
            if p.BITS == 5:
                bits = bytes_of(high_words[(tile * blocks + block) * TILE + r])
                quarter = [v | (((bit >> s) & 1) << 4) for v, bit in zip(quarter, bits, strict=True)]
            if p.BITS == 6:
                bits = bytes_of(high_words[((tile * blocks + block) * 2 + half) * TILE + r])
                quarter = [v | (((bit >> (j * 2)) & 3) << 4) for v, bit in zip(quarter, bits, strict=True)]
            place = (tile * groups + column // p.group) * TILE + r
            step = zl.f32(p.scale[place])
            base = step * float(-(1 << (p.BITS - 1))) if p.SYMMETRIC else zl.f32(p.offset[place])
            pairs = [
                concat2(
                    (zl.f32(quarter[c]) * step + base) * p.factor, (zl.f32(quarter[c + 1]) * step + base) * p.factor
                )
                for c in zl.static((0, 2))
            ]
            zl.store(destination + column, zl.concat(pairs[0], pairs[1]))


class NarrowEmbedding(zl.Record):
    """table0 .. 3: the 16 numbers of lut4 weights (zse.quant.lut4)."""

    ids: zl.Ptr[zl.i32, "const"]
    q: zl.Ptr[zl.u32, "const"]
    scale: zl.Ptr[zl.f16, "const"]
    out: zl.Ptr[zl.f32]
    rows: zl.i32
    width: zl.i32
    group: zl.i32
    factor: zl.f32
    table0: zl.u32
    table1: zl.u32
    table2: zl.u32
    table3: zl.u32


@zl.kernel
def embed_lut4(p: NarrowEmbedding):
    """As embed_affine of 4 bits."""
    start()
    row = token_row(p.ids, 0, p.rows)
    tile = row // TILE
    r = row % TILE
    blocks = zl.i64(p.width // 32)
    q_words = p.q + (tile * blocks * 4 * TILE + r)
    destination = p.out + zl.i64(zl.block_index(0)) * p.width
    for at in range(zl.thread_index(), p.width // 32 * 4, zl.target.threads):
        word = q_words[at * TILE]
        for half in zl.static(range(2)):
            column = at // 4 * 32 + (at % 4 + half * 4) * 4
            place = (tile * zl.i64(p.width // p.group) + column // p.group) * TILE + r
            step = zl.f32(p.scale[place])
            indices = [word >> (8 * c + 4 * half) & 15 for c in zl.static(range(4))]
            four = [(zl.f32(number_of(index, p)) - 128.0) * step * p.factor for index in indices]
            zl.store(destination + column, zl.make_vector(four[0], four[1], four[2], four[3]))


@zl.inline
def concat2(a, b):
    """Two scalars as a vector."""
    return zl.concat(zl.f32.x(1)(a), zl.f32.x(1)(b))


def embed_variants(target):
    """Every form of embed on a GPU."""
    return (
        [
            zl.Variant(
                f"embed_{name}_rows{'_add' if add else ''}", embed_rows, {"DTYPE": dtype, "ADD": add}, threads=THREADS
            )
            for name, dtype in DENSE.items()
            for add in (False, True)
        ]
        + [
            zl.Variant(f"embed_fp8_{scaling}", embed_fp8, {"SCALING": scaling}, threads=THREADS)
            for scaling in ("row", "tensor", "block")
        ]
        + [
            zl.Variant(
                f"embed_int{bits}_{form}", embed_affine, {"BITS": bits, "SYMMETRIC": form == "sym"}, threads=THREADS
            )
            for bits in BITS
            for form in ("sym", "asym")
        ]
        + [zl.Variant("embed_lut4_rows", embed_lut4, {}, threads=THREADS)]
    )
