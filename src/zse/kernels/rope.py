"""Rotary position embedding (Su et al. 2021): the cosines and sines of a batch's positions, made once a step."""

from zse import kernel as zl
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.lazy import numpy as np
from zse.runtime.args import Args

LANES = 8  # half a rotary dimension is a multiple of 8 in every supported model
# 2 pi in three parts of 24, 24 and 24 bits (Cody and Waite): with fused multiply-adds the reduction is exact to f32.
TWO_PI = (6.2831854820251465, -1.7484555314695172e-07, -6.8604980400235275e-15)


class RopeTable(zl.Record):
    """Parameters of rope_table."""

    positions: zl.Ptr[zl.i32, "const"]
    inv_freq: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    pairs: zl.index
    mscale: zl.f32
    beta: zl.f32
    length: zl.i32


@zl.kernel
def rope_table_row(p: RopeTable):
    """One block is one token. The angle is the f32 product that the models were trained with; it is brought into
    [-pi, pi] before sin and cos."""
    position = zl.f32(p.positions[zl.block_index(0)])
    factor = p.mscale * (1.0 + p.beta * zl.log(zl.f32(1 + p.positions[zl.block_index(0)] // p.length)))
    row = p.out + zl.block_index(0) * 2 * p.pairs
    for i in range(0, p.pairs, LANES):
        angle = zl.load(p.inv_freq + i, LANES) * position
        turns = zl.round_even(angle * (1 / 6.283185307179586)) * -1.0
        reduced = zl.fma(turns, TWO_PI[2], zl.fma(turns, TWO_PI[1], zl.fma(turns, TWO_PI[0], angle)))
        zl.store(row + i, zl.cos(reduced) * factor)
        zl.store(row + p.pairs + i, zl.sin(reduced) * factor)


def rope_table(recorder, positions, inv_freq, out, mscale: float = 1.0, temperature: tuple = (0.0, 1)) -> None:
    """positions i32 [M], inv_freq f32 [R/2] radians a position → out f32 [M, R]: factor * cos, then factor * sin.

    Args:
        out: R (the rotary dimension) is a multiple of 16; scalings of the frequencies are in inv_freq.
        mscale: the factor at position 0.
        temperature: (beta, length): factor = mscale * (1 + beta * ln(1 + position // length)), for queries that sharpen
            with their position (Ministral 3, after Llama 4).
    """
    (half,) = inv_freq.shape
    rows = out.shape[0]
    check("rope_table positions", positions, "i32", rows)
    check("rope_table inv_freq", inv_freq, "f32", half)
    check("rope_table out", out, "f32", rows, 2 * half)
    require(half % LANES == 0, f"rope_table: rotary dimension {2 * half} is not a multiple of {2 * LANES}")
    beta, length = temperature
    require(length > 0, f"rope_table: temperature length {length} is not positive")
    args = Args(positions=positions, inv_freq=inv_freq, out=out, pairs=half, length=length)
    recorder.launch("rope_table", Args(**args, mscale=float(mscale), beta=float(beta)), (rows,))


def _reference(positions, inv_freq, mscale=1.0, temperature=(0.0, 1), out=None):
    angle = (positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)).astype(np.float64)
    beta, length = temperature
    factor = mscale * (1 + beta * np.log1p(positions // length))[:, None]
    return {"out": np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * factor}


def _cases(rng, family="cpu"):
    near = Tolerance(5e-7, 5e-7, "one f32 rounding of the reduced angle, sin and cos within 2 ulp")
    for rotary, base in ((64, 1e4), (16, 1e6), (256, 1e6), (80, 1e4)):
        positions = np.concatenate([[0, 1, 131071], rng.integers(0, 131072, 6)]).astype(np.int32)
        inv_freq = (base ** -(np.arange(0, rotary, 2) / rotary)).astype(np.float32)
        yield Case(
            f"rotary {rotary}",
            {"positions": positions, "inv_freq": inv_freq},
            {"out": OutputSpec((len(positions), rotary), "float32", near)},
            {"mscale": 1.25 if rotary == 80 else 1.0, "temperature": (0.1, 16384) if rotary == 256 else (0.0, 1)},
        )


def _cost(case: Case) -> Cost:
    rows, rotary = case.outputs["out"].shape
    return Cost(rows * rotary * 4 + rotary * 2, rows * rotary * 20)


ROPE_TABLE = Op(
    "rope_table",
    lambda target: [zl.Variant("rope_table", rope_table_row)],
    rope_table,
    _reference,
    _cases,
    _cost,
    later("gpu.step", "rope_variants"),
)
