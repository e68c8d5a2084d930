"""Embedding rows out of a weight of any scheme: one block is one token, 16-byte accesses to the hidden state."""

from zse.kernel import (
    Ptr,
    Variant,
    bf16,
    block_index,
    cast_ptr,
    concat,
    convert,
    e4m3,
    f16,
    f32,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    inline,
    kernel,
    load,
    static,
    store,
    target,
    thread_index,
    u8,
    u32,
)

TILE = 16
THREADS = 256
DENSE = {"f32": f32, "f16": f16, "bf16": bf16}
BITS = (4, 5, 6, 8)
FP8_BLOCK = 128


@inline
def token_row(ids, rows):
    """The id of this block's token, inside the table whatever it holds."""
    return i64(min(max(ids[block_index(0)], 0), rows - 1))


@kernel
def embed_rows(
    ids: Ptr[i32, "const"], w: Ptr[u8, "const"], out: Ptr[f32], rows: i32, width: i32, factor: f32, DTYPE: static
):
    """w [rows, width]; width a multiple of 8."""
    grid_launch_dependents()
    grid_wait()
    source = cast_ptr(w, DTYPE) + token_row(ids, rows) * width
    destination = out + i64(block_index(0)) * width
    for k in range(thread_index() * 4, width, target.threads * 4):
        store(destination + k, convert(load(source + k, 4), f32) * factor)


@kernel
def embed_fp8(
    ids: Ptr[i32, "const"],
    w: Ptr[e4m3, "const"],
    scale: Ptr[f32, "const"],
    out: Ptr[f32],
    rows: i32,
    width: i32,
    factor: f32,
    SCALING: static,
):
    """w [rows, width] in e4m3; width a multiple of 16."""
    grid_launch_dependents()
    grid_wait()
    row = token_row(ids, rows)
    source = w + row * width
    destination = out + i64(block_index(0)) * width
    for k in range(thread_index() * 4, width, target.threads * 4):
        if SCALING == "row":
            unit = scale[row]
        elif SCALING == "tensor":
            unit = scale[0]
        else:
            unit = scale[row // FP8_BLOCK * ((width + FP8_BLOCK - 1) // FP8_BLOCK) + k // FP8_BLOCK]
        store(destination + k, convert(load(source + k, 4), f32) * unit * factor)


@inline
def bytes_of(word):
    """The four bytes of a u32 as i32, lowest first."""
    return [i32((word >> shift) & 255) for shift in static((0, 8, 16, 24))]


@kernel
def embed_affine(
    ids: Ptr[i32, "const"],
    q: Ptr[u8, "const"],
    high: Ptr[u8, "const"],
    scale: Ptr[f16, "const"],
    offset: Ptr[f16, "const"],
    out: Ptr[f32],
    rows: i32,
    width: i32,
    group: i32,
    factor: f32,
    BITS: static,
    SYMMETRIC: static,
):
    """Layout r16, width a multiple of 32; group is in columns (the width for one group a row). A thread takes a word of
    the row: four columns (8 bits), or four and the four that are 16 further (less)."""
    grid_launch_dependents()
    grid_wait()
    row = token_row(ids, rows)
    tile = row // TILE
    r = row % TILE
    blocks = i64(width // 32)
    groups = i64(width // group)
    words = 8 if BITS == 8 else 4
    q_words = cast_ptr(q, u32) + (tile * blocks * words * TILE + r)
    high_words = cast_ptr(high, u32)
    destination = out + i64(block_index(0)) * width
    for at in range(thread_index(), width // 32 * words, target.threads):
        block = at // words
        j = at % words
        word = q_words[at * TILE]
        values = bytes_of(word)
        halves = [values] if BITS == 8 else [[v & 15 for v in values], [v >> 4 for v in values]]
        for half, quarter in enumerate(halves):
            s = j + half * 4
            column = block * 32 + s * 4
            if BITS == 5:
                bits = bytes_of(high_words[(tile * blocks + block) * TILE + r])
                quarter = [v | (((bit >> s) & 1) << 4) for v, bit in zip(quarter, bits, strict=True)]
            if BITS == 6:
                bits = bytes_of(high_words[((tile * blocks + block) * 2 + half) * TILE + r])
                quarter = [v | (((bit >> (j * 2)) & 3) << 4) for v, bit in zip(quarter, bits, strict=True)]
            place = (tile * groups + column // group) * TILE + r
            step = f32(scale[place])
            base = step * float(-(1 << (BITS - 1))) if SYMMETRIC else f32(offset[place])
            pairs = [
                concat2((f32(quarter[c]) * step + base) * factor, (f32(quarter[c + 1]) * step + base) * factor)
                for c in static((0, 2))
            ]
            store(destination + column, concat(pairs[0], pairs[1]))


@inline
def concat2(a, b):
    """Two scalars as a vector."""
    return concat(f32.x(1)(a), f32.x(1)(b))


def embed_variants(target):
    """Every form of embed on a GPU."""
    return (
        [Variant(f"embed_{name}_rows", embed_rows, {"DTYPE": dtype}, threads=THREADS) for name, dtype in DENSE.items()]
        + [
            Variant(f"embed_fp8_{scaling}", embed_fp8, {"SCALING": scaling}, threads=THREADS)
            for scaling in ("row", "tensor", "block")
        ]
        + [
            Variant(
                f"embed_int{bits}_{form}", embed_affine, {"BITS": bits, "SYMMETRIC": form == "sym"}, threads=THREADS
            )
            for bits in BITS
            for form in ("sym", "asym")
        ]
    )
