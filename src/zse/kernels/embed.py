"""Embedding rows out of a weight table of any scheme, straight from the r16 layout."""

from zse import kernel as zl
from zse.kernels import host
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.lazy import numpy as np
from zse.quant.lut4 import CODES
from zse.quant.scheme import FP8_SCALINGS, LUT4_SCHEMES, AffineScheme, DenseScheme, Fp8Scheme, Scheme, memory_layout
from zse.quant.superblock import SUPERBLOCK_SCHEMES
from zse.runtime.args import Args

TILE = 16
DENSE = {"f32": zl.f32, "f16": zl.f16, "bf16": zl.bf16}
BITS = (4, 5, 6, 8)


@zl.inline
def token_row(ids, shift, rows):
    """The row of this block's token, inside the table whatever it holds: the host checks ids, this keeps memory
    safe."""
    return min(max(zl.i64(ids[zl.block_index(0)]) + shift, 0), rows - 1)


class DenseEmbedding(zl.Record):
    """Parameters of embed() of 16- and 32-bit tables."""

    ids: zl.Ptr[zl.i32, "const"]
    w: zl.Ptr[zl.u8, "const"]
    out: zl.Ptr[zl.f32]
    rows: zl.index
    width: zl.index
    factor: zl.f32
    shift: zl.index
    DTYPE: zl.static
    ADD: zl.static


@zl.kernel
def embed_dense(p: DenseEmbedding):
    """One block is one token. A row of w [T, K, 16] has stride 16."""
    row = token_row(p.ids, p.shift, p.rows)
    source = zl.cast_ptr(p.w, p.DTYPE) + row // TILE * p.width * TILE + row % TILE
    destination = p.out + zl.block_index(0) * p.width
    for k in range(p.width):
        value = zl.f32(source[k * TILE]) * p.factor
        destination[k] = destination[k] + value if p.ADD else value


@zl.inline
def quarter(q, high, block, r, s, BITS):
    """q of row r at columns 4 s .. 4 s + 3 of a 32-column block, as four i32."""
    if BITS == 8:
        return zl.convert(zl.load(q + ((block * 8 + s) * TILE + r) * 4, 4), zl.i32)
    packed = zl.convert(zl.load(q + ((block * 4 + s % 4) * TILE + r) * 4, 4), zl.i32)
    nibble = packed & 15 if s < 4 else packed >> 4
    if BITS == 5:
        bits = zl.convert(zl.load(high + (block * TILE + r) * 4, 4), zl.i32)
        return nibble | (((bits >> s) & 1) << 4)
    if BITS == 6:
        bits = zl.convert(zl.load(high + ((block * 2 + s // 4) * TILE + r) * 4, 4), zl.i32)
        return nibble | (((bits >> (s % 4 * 2)) & 3) << 4)
    return nibble


class AffineEmbedding(zl.Record):
    """Parameters of embed() of affine tables in layout r16; group: in columns, the width for one group a row."""

    ids: zl.Ptr[zl.i32, "const"]
    q: zl.Ptr[zl.u8, "const"]
    high: zl.Ptr[zl.u8, "const"]
    scale: zl.Ptr[zl.f16, "const"]
    offset: zl.Ptr[zl.f16, "const"]
    out: zl.Ptr[zl.f32]
    rows: zl.index
    width: zl.index
    group: zl.index
    factor: zl.f32
    BITS: zl.static
    SYMMETRIC: zl.static


@zl.kernel
def embed_affine(p: AffineEmbedding):
    """One block is one token; group is in columns (the width for one group a row)."""
    row = token_row(p.ids, 0, p.rows)
    tile = row // TILE
    r = row % TILE
    blocks = p.width // 32
    groups = p.width // p.group
    destination = p.out + zl.block_index(0) * p.width
    for block in range(blocks):
        at = tile * blocks + block
        for half in zl.static(range(2)):
            place = (tile * groups + (block * 32 + half * 16) // p.group) * TILE + r
            step = zl.f32(p.scale[place])
            base = step * float(-(1 << (p.BITS - 1))) if p.SYMMETRIC else zl.f32(p.offset[place])
            for s in zl.static(range(half * 4, half * 4 + 4)):
                value = zl.convert(quarter(p.q, p.high, at, r, s, p.BITS), zl.f32) * step + base
                zl.store(destination + block * 32 + s * 4, value * p.factor)


class SuperblockEmbedding(zl.Record):
    """Parameters of embed() of tables whose scales are integers (zse.quant.superblock); scale_factor: their factors."""

    ids: zl.Ptr[zl.i32, "const"]
    q: zl.Ptr[zl.u8, "const"]
    high: zl.Ptr[zl.u8, "const"]
    scale: zl.Ptr[zl.u8, "const"]
    scale_factor: zl.Ptr[zl.f16, "const"]
    out: zl.Ptr[zl.f32]
    rows: zl.i64
    width: zl.i64
    factor: zl.f32
    BITS: zl.static


@zl.inline
def superblock_step(p, at, group, r):
    """(scale, offset) of a group (compile time) of super-block `at`, row r."""
    if p.BITS == 6:
        code = zl.i32(zl.cast_ptr(p.scale, zl.i8)[(at * 16 + group) * TILE + r])
        step = zl.f32(code) * zl.f32(p.scale_factor[at * TILE + r])
        return step, step * -32.0
    words = [zl.cast_ptr(p.scale, zl.i32)[(at * 3 + j) * TILE + r] for j in zl.static(range(3))]
    fields = [
        (words[field // 5] >> (6 * (field % 5))) & 63
        if field < 15
        else ((words[0] >> 30) & 3) | ((words[1] >> 28) & 12) | ((words[2] >> 26) & 48)
        for field in (group, 8 + group)
    ]
    factors = [zl.f32(p.scale_factor[(at * 2 + i) * TILE + r]) for i in zl.static(range(2))]
    return zl.f32(fields[0]) * factors[0], zl.f32(fields[1]) * factors[1] * -1.0


@zl.kernel
def embed_superblock(p: SuperblockEmbedding):
    """One block is one token."""
    row = token_row(p.ids, 0, p.rows)
    tile = row // TILE
    r = row % TILE
    count = p.width // 256
    destination = p.out + zl.block_index(0) * p.width
    for number in range(count):
        at = tile * count + number
        for block in zl.static(range(8)):
            for half in zl.static(range(2)):
                if half == 0 or p.BITS == 6:
                    step, base = superblock_step(p, at, block * 2 + half if p.BITS == 6 else block, r)
                for s in zl.static(range(half * 4, half * 4 + 4)):
                    value = zl.convert(quarter(p.q, p.high, at * 8 + block, r, s, p.BITS), zl.f32) * step + base
                    zl.store(destination + number * 256 + (block * 32 + s * 4), value * p.factor)


@zl.inline
def table_step(scale, factor, code, unit, tile, block, half, r, blocks, group):
    """What multiplies the table's numbers for row r of a tile, in half a block of 32 columns."""
    place = (tile * (blocks * 32 // group) + (block * 32 + half * 16) // group) * TILE + r
    if code == "f16":
        return zl.f32(zl.cast_ptr(scale, zl.f16)[place])
    if code == "i8":
        wide = zl.f32(zl.cast_ptr(factor, zl.f16)[(tile * (blocks // 8) + block // 8) * TILE + r]) * unit
        return zl.f32(zl.i32(zl.cast_ptr(scale, zl.i8)[place])) * wide
    if code == "e8m0":
        return zl.bitcast(zl.i32(scale[place]) << 23, zl.f32) * unit
    value = zl.bitcast((zl.i32(scale[place]) & 127) << 20, zl.f32) * 2.0**120
    return value * (zl.cast_ptr(factor, zl.f32)[tile * TILE + r] * unit)


class Lut4Embedding(zl.Record):
    """table0 .. 3: the 16 numbers as bytes; unit: what multiplies them (zse.quant.lut4)."""

    ids: zl.Ptr[zl.i32, "const"]
    q: zl.Ptr[zl.u8, "const"]
    scale: zl.Ptr[zl.u8, "const"]
    scale_factor: zl.Ptr[zl.u8, "const"]
    out: zl.Ptr[zl.f32]
    rows: zl.i64
    width: zl.i64
    group: zl.i64
    factor: zl.f32
    table0: zl.i32
    table1: zl.i32
    table2: zl.i32
    table3: zl.i32
    unit: zl.f32
    CODE: zl.static


@zl.kernel
def embed_lut4(p: Lut4Embedding):
    """One block is one token."""
    row = token_row(p.ids, 0, p.rows)
    tile = row // TILE
    r = row % TILE
    blocks = p.width // 32
    table = zl.make_vector(p.table0, p.table1, p.table2, p.table3) ^ -2139062144  # 0x80808080: plus 128
    destination = p.out + zl.block_index(0) * p.width
    for block in range(blocks):
        for half in zl.static(range(2)):
            step = table_step(p.scale, p.scale_factor, p.CODE, p.unit, tile, block, half, r, blocks, p.group)
            for s in zl.static(range(half * 4, half * 4 + 4)):
                index = quarter(p.q, p.q, tile * blocks + block, r, s, 4)
                value = zl.convert((zl.lookup_s8(table, index) & 255) - 128, zl.f32) * step
                zl.store(destination + block * 32 + s * 4, value * p.factor)


def embed(recorder, ids, table, out, scale: float = 1.0, add: bool = False, first: int = 0) -> None:
    """ids i32 [M], table Weight [N, K] of any scheme → out f32 [M, K] = scale * row ids[m]. GPU: K a multiple of 8.

    add: out += that, and first: row first + ids[m]; both of dense tables (learned positions, token types)."""
    count = ids.shape[0]
    rows, width = table.shape
    check("embed ids", ids, "i32", count)
    check("embed out", out, "f32", count, width)
    key = recorder.device.kernels, table.scheme.kind
    require(key in TABLES, f"embed: no kernel of the {key[0].upper()} reads {table.scheme}")
    symbol, planes = TABLES[key](table.scheme, table.planes, width, table.layout)
    if key[1] == "dense":
        planes["shift"] = first
    require(key[1] == "dense" or not (add or first), f"embed: {table.scheme} rows are not added")
    args = Args(ids=ids, out=out, rows=rows, width=width, factor=float(scale), **planes)
    recorder.launch(f"{symbol}_add" if add else symbol, args, (count,))


def _tiles(scheme, planes, width: int, layout: str) -> tuple[str, dict]:
    return f"embed_{scheme.name}", {"w": planes["w"]}


def _rows(scheme, planes, width: int, layout: str) -> tuple[str, dict]:
    require(width % 8 == 0, f"embed: {width} columns are not a multiple of 8")
    require(layout == "rows", f"embed: {scheme.name} in layout {layout}, a GPU reads rows")
    return f"embed_{scheme.name}_rows", {"w": planes["w"]}


def _scaled_rows(scheme, planes, width: int, layout: str) -> tuple[str, dict]:
    _rows(scheme, planes, width, layout)
    return f"embed_fp8_{scheme.scaling}", {"w": planes["w"], "scale": planes["scale"]}


def _groups(scheme, planes, width: int, layout: str) -> tuple[str, dict]:
    require(scheme.fits(width), f"embed: {scheme.name} does not fit {width} columns")
    args = {"q": planes["q"], "high": planes.get("high"), "scale": planes["scale"], "offset": planes.get("offset")}
    return f"embed_int{scheme.bits}_{'sym' if scheme.symmetric else 'asym'}", args | {"group": scheme.group or width}


def _superblocks(scheme, planes, width: int, layout: str) -> tuple[str, dict]:
    require(scheme.fits(width), f"embed: {scheme.name} does not fit {width} columns")
    args = {"q": planes["q"], "high": planes.get("high"), "scale": planes["scale"], "scale_factor": planes["factor"]}
    return f"embed_int{scheme.bits}_{scheme.code}", args


def _tables(scheme, planes, width: int, layout: str) -> tuple[str, dict]:
    require(scheme.fits(width), f"embed: {scheme.name} does not fit {width} columns")
    args = {"q": planes["q"], "scale": planes["scale"], "scale_factor": planes.get("factor"), "group": scheme.group}
    return f"embed_lut4_{scheme.code}", args | scheme.table_args(signed=True) | {"unit": scheme.unit}


def _narrow_tables(scheme, planes, width: int, layout: str) -> tuple[str, dict]:
    require(scheme.fits(width), f"embed: {scheme.name} does not fit {width} columns")
    args = {"q": planes["q"], "scale": planes["scale"], "group": scheme.group}
    return "embed_lut4_rows", args | scheme.table_args()


# By kind of device and of scheme: (scheme, planes, width, layout) → the kernel, and the arguments that only it takes.
TABLES = {
    ("cpu", "dense"): _tiles,
    ("cpu", "affine"): _groups,
    ("cpu", "lut4"): _tables,
    ("cpu", "superblock"): _superblocks,
    ("gpu", "dense"): _rows,
    ("gpu", "fp8"): _scaled_rows,
    ("gpu", "affine"): _groups,
    ("gpu", "lut4"): _narrow_tables,
}


def _reference(ids, table, scale=1.0, add=False, first=0, out=None):
    rows = table.dequantize()[ids + first].astype(np.float64) * scale
    return {"out": rows + out if add else rows}


def _cases(rng, family="cpu"):
    near = Tolerance(1e-7, 3e-7, "two f32 roundings, and a third by the factor")
    schemes: list[Scheme] = [DenseScheme(dtype) for dtype in DENSE]
    schemes += [Fp8Scheme(scaling) for scaling in FP8_SCALINGS]
    schemes += [
        AffineScheme(bits, group, symmetric)
        for bits, group in zip((4, 5, 6, 8), (32, 64, 16, 0), strict=True)
        for symmetric in (False, True)
    ]
    for scheme in (*schemes, *LUT4_SCHEMES, *SUPERBLOCK_SCHEMES):
        if (family, scheme.kind) not in TABLES or scheme.loaded(family) != scheme:
            continue
        rows, width, count = (300, 208, 5) if scheme.numbers == "w" else (37, max(128, 2 * scheme.step), 5)
        ids = np.concatenate([[0, rows - 1], rng.integers(0, rows, count - 2)]).astype(np.int32)
        yield Case(
            scheme.name,
            {"ids": ids, "table": host.random_weight(rng, rows, width, scheme, memory_layout(scheme, family))},
            {"out": OutputSpec((count, width), "float32", near)},
            {"scale": 1.0 if scheme.numbers == "q" else 25.25},
        )
        if scheme.kind == "dense":
            before = rng.standard_normal((count, width)).astype(np.float32)
            yield Case(
                f"{scheme.name} added",
                {
                    "ids": np.maximum(ids - 2, 0),
                    "table": host.random_weight(rng, rows, width, scheme, memory_layout(scheme, family)),
                },
                {"out": OutputSpec((count, width), "float32", near, inout=before)},
                {"add": True, "first": 2},
            )


def _cost(case: Case) -> Cost:
    rows, width = case.outputs["out"].shape
    scheme = case.inputs["table"].scheme
    stored = scheme.bits // 8 if scheme.numbers == "q" else 4
    return Cost(rows * width * (4 + stored), rows * width * 3)


def _variants(target):
    return (
        [
            zl.Variant(f"embed_{name}{'_add' if add else ''}", embed_dense, {"DTYPE": dtype, "ADD": add})
            for name, dtype in DENSE.items()
            for add in (False, True)
        ]
        + [
            zl.Variant(f"embed_int{bits}_{form}", embed_affine, {"BITS": bits, "SYMMETRIC": form == "sym"})
            for bits in BITS
            for form in ("sym", "asym")
        ]
        + [zl.Variant(f"embed_lut4_{code}", embed_lut4, {"CODE": code}) for code in CODES]
        + [
            zl.Variant(f"embed_int{scheme.bits}_{scheme.code}", embed_superblock, {"BITS": scheme.bits})
            for scheme in SUPERBLOCK_SCHEMES
        ]
    )


EMBED = Op("embed", _variants, embed, _reference, _cases, _cost, later("gpu.embed", "embed_variants"))
