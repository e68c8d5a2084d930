"""Weights of any scheme as bf16 [N, K]: what a product multiplies when no kernel takes the weight as it is stored.

The matrix is made in pieces that stay in the L2 cache until they are multiplied (gemm_portable, gemm_wgmma). Bound by
memory: an int4 weight of 0.5 bytes is read, 2 bytes are written.
"""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.gpu import r16
from zse.quant.scheme import FP8_BLOCK, TILE_ROWS
from zse.runtime.args import Args
from zse.tensor import Tensor

THREADS = 256
WARP_BLOCKS = 4  # blocks of 32 columns that a warp makes: enough loads in flight
ROW_COLUMNS = THREADS * 8
INPUTS = {"f16": zl.f16, "f32": zl.f32, "e4m3": zl.e4m3}


class Destination(NamedTuple):
    """What the kernels for integers make, and the groups that it has."""

    out: Any
    first_tile: Any
    rows: Any
    blocks: Any
    groups: Any
    group_blocks: Any
    half_step: Any


class Lut4Rows(zl.Record):
    """The parameters of dequantize_lut4: as of dequantize_r16; table0 .. 3: its 16 numbers."""

    q: zl.Ptr[zl.u32, "const"]
    high: zl.Ptr[zl.u32, "const"]
    scale: zl.Ptr[zl.f16, "const"]
    offset: zl.Ptr[zl.f16, "const"]
    out: zl.Ptr[zl.bf16]
    first_tile: zl.i32
    rows: zl.i32
    blocks: zl.i32
    groups: zl.i32
    group_blocks: zl.i32
    half_step: zl.i32
    has_offset: zl.i32
    center: zl.f32
    table0: zl.u32
    table1: zl.u32
    table2: zl.u32
    table3: zl.u32


@zl.kernel
def dequantize_r16(
    q: zl.Ptr[zl.u32, "const"],
    high: zl.Ptr[zl.u32, "const"],
    scale: zl.Ptr[zl.f16, "const"],
    offset: zl.Ptr[zl.f16, "const"],
    out: zl.Ptr[zl.bf16],
    first_tile: zl.i32,
    rows: zl.i32,
    blocks: zl.i32,
    groups: zl.i32,
    group_blocks: zl.i32,
    half_step: zl.i32,
    has_offset: zl.i32,
    center: zl.f32,
    BITS: zl.static,
):
    """Grid (groups of WARP_BLOCKS * warps blocks, tiles): rows from 16 * first_tile, `rows` of them."""
    made = Destination(out, first_tile, rows, blocks, groups, group_blocks, half_step)
    make_rows(q, high, scale, offset, has_offset, center, made, BITS, None)


@zl.kernel
def dequantize_lut4(p: Lut4Rows):
    """Likewise, of lut4 weights: once looked up, 8-bit ones."""
    made = Destination(p.out, p.first_tile, p.rows, p.blocks, p.groups, p.group_blocks, p.half_step)
    make_rows(p.q, p.high, p.scale, p.offset, p.has_offset, p.center, made, 4, r16.table_of(p))


@zl.inline
def make_rows(q, high, scale, offset, has_offset, center, to, BITS, table):
    """A lane has a row's columns 8p .. 8p + 7 and 16 + 8p .., p = lane % 2, of each block: 16 bytes of out each. BITS:
    as stored; with a table they become 8."""
    out, first_tile, rows, blocks, groups, group_blocks, half_step = to
    zl.grid_launch_dependents()
    zl.grid_wait()
    lane = zl.lane_index()
    p = lane % 2
    r = lane // 2
    tile = zl.i64(first_tile + zl.block_index(1))
    row = zl.block_index(1) * 16 + r
    begin = (zl.block_index(0) * (THREADS // 32) + zl.warp_index()) * WARP_BLOCKS
    q_words = r16.q_bytes(BITS) // 4
    high_words = r16.HIGH_BYTES[BITS] // 4
    # All loads of the warp's blocks come first: their latencies overlap.
    words, highs, scales, offsets = [], [], [], []
    for i in zl.static(range(WARP_BLOCKS)):
        block = min(begin + i, blocks - 1)
        at = q + ((tile * blocks + block) * q_words + p * 32 + r)
        words += [
            [zl.load(at + w % 2 * 16 + w // 2 * 64, 1, "stream") for w in zl.static(range(4 if BITS == 8 else 2))]
        ]
        high_at = high + ((tile * blocks + block) * high_words + r)
        highs += [[zl.load(high_at + h * 16, 1, "stream") for h in zl.static(range({5: 1, 6: 2}.get(BITS, 0)))]]
        group = (block // group_blocks) * (1 + half_step // 16)
        found = r16.read_scales(scale, offset, [(tile * groups + group) * 16 + r], has_offset, half_step, 2)
        scales += [found[0]]
        offsets += [found[1]]
    WIDE = 8 if table is not None else BITS
    picks = [r16.selector(zl.u32(0), WIDE), r16.selector(zl.u32(2), WIDE)]
    for i in zl.static(range(WARP_BLOCKS)):
        if begin + i < blocks:
            factor, shift = r16.factors(scales[i], offsets[i], center, WIDE)
            for half in zl.static(range(2)):
                pairs = []
                for w in zl.static(range(2)):
                    word = words[i][2 + w if BITS == 8 and half == 1 else w]
                    if table is not None:
                        word = r16.looked_up(word, half == 1, table)
                    extra = highs[i][half if BITS == 6 else 0] if BITS in (5, 6) else None
                    pairs += [
                        r16.pair_bf16(word, extra, zl.u32(p * 2 + w), half == 1, pick, factor[half], shift[half], WIDE)
                        for pick in picks
                    ]
                if row < rows:
                    zl.store(
                        zl.cast_ptr(out + (zl.i64(row) * (blocks * 32) + (begin + i) * 32 + half * 16 + p * 8), zl.u32),
                        zl.make_vector(pairs[0], pairs[1], pairs[2], pairs[3]),
                    )


@zl.kernel
def dequantize_rows(
    w: zl.Ptr["IN", "const"],
    scale: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.bf16],
    first_row: zl.i32,
    width: zl.i32,
    scaling: zl.i32,
    IN: zl.static,
):
    """Grid (groups of ROW_COLUMNS columns, rows). scaling: of e4m3, a scheme's scale_code; width: a multiple of 8."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    k = zl.block_index(0) * ROW_COLUMNS + zl.thread_index() * 8
    row = first_row + zl.block_index(1)
    if k < width:
        values = zl.convert(zl.load(w + (zl.i64(row) * width + k), 8), zl.f32)
        if IN == zl.e4m3:
            at = row if scaling == 0 else 0
            if scaling == 2:
                at = row // FP8_BLOCK * ((width + (FP8_BLOCK - 1)) // FP8_BLOCK) + k // FP8_BLOCK
            values = values * scale[at]
        zl.store(out + (zl.i64(zl.block_index(1)) * width + k), zl.convert(values, zl.bf16))


def variants(target) -> list[zl.Variant]:
    made = [
        zl.Variant(f"dequantize_int{bits}", dequantize_r16, {"BITS": bits}, threads=THREADS) for bits in (4, 5, 6, 8)
    ]
    made.append(zl.Variant("dequantize_lut4", dequantize_lut4, {}, threads=THREADS))
    made += [
        zl.Variant(f"dequantize_{name}", dequantize_rows, {"IN": dtype}, threads=THREADS)
        for name, dtype in INPUTS.items()
    ]
    return made


def launch(recorder, weight, first_row: int, rows: int, out: Tensor) -> None:
    """Record: `rows` rows of the weight from first_row (integers: a multiple of 16), to out bf16 [rows, K]."""
    args, grid = LAUNCHES[weight.scheme.kind](weight, first_row, rows)
    recorder.launch(f"dequantize_{weight.scheme.element}", Args(**args, out=out), grid)


def _of_groups(weight, first_row: int, rows: int) -> tuple[dict, tuple[int, int]]:
    planes, width = weight.planes, weight.shape[1]
    args = r16.arguments(weight) | dict(
        q=planes["q"], high=planes.get("high"), first_tile=first_row // TILE_ROWS, rows=rows
    )
    return args, (-(-(width // 32) // (WARP_BLOCKS * THREADS // 32)), -(-rows // TILE_ROWS))


def _of_rows(weight, first_row: int, rows: int) -> tuple[dict, tuple[int, int]]:
    planes, width, scaling = weight.planes, weight.shape[1], weight.scheme.scale_code
    args = dict(w=planes["w"], scale=planes.get("scale"), first_row=first_row, width=width, scaling=scaling)
    return args, (-(-width // ROW_COLUMNS), rows)


def _of_tables(weight, first_row: int, rows: int) -> tuple[dict, tuple[int, int]]:
    args, grid = _of_groups(weight, first_row, rows)
    return args | weight.scheme.table_args(), grid


# By a scheme's kind: (weight, first row, rows) → the kernel's arguments but `out`, and the grid.
LAUNCHES = {"affine": _of_groups, "dense": _of_rows, "fp8": _of_rows, "lut4": _of_tables}
