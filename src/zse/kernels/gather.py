"""Copies the rows whose logits are wanted out of the flat batch."""

from zse import kernel as zl
from zse.kernels.op import EXACT, Case, Cost, Op, OutputSpec, check, later
from zse.lazy import numpy as np
from zse.runtime.args import Args


@zl.kernel
def gather_rows_f32(x: zl.Ptr[zl.f32, "const"], rows: zl.Ptr[zl.i32, "const"], out: zl.Ptr[zl.f32], words: zl.i64):
    """One block copies one row of `words` values."""
    L = zl.target.lanes
    source = x + zl.i64(rows[zl.block_index(0)]) * words
    destination = out + zl.block_index(0) * words
    whole = words // L * L
    for k in range(0, whole, L):
        zl.store(destination + k, zl.load(source + k, L))
    for k in range(whole, words):
        destination[k] = source[k]


def gather_rows(recorder, x, rows, out) -> None:
    """out f32 [R, K] = x f32 [M, K] at rows i32 [R]; the caller guarantees 0 <= rows < M."""
    count, width = out.shape
    check("gather_rows x", x, "f32", None, width)
    check("gather_rows rows", rows, "i32", count)
    check("gather_rows out", out, "f32", count, width)
    recorder.launch("gather_rows", Args(x=x, rows=rows, out=out, words=width), (count,))


def _reference(x, rows, out=None):
    return {"out": x[rows]}


def _cases(rng, family="cpu"):
    for count, total, width in ((1, 5, 576), (4, 9, 37), (3, 5, 3584)):
        x = rng.standard_normal((total, width)).astype(np.float32)
        rows = rng.integers(0, total, count).astype(np.int32)
        yield Case(f"{count} of {total}", {"x": x, "rows": rows}, {"out": OutputSpec((count, width), "float32", EXACT)})


def _cost(case: Case) -> Cost:
    rows, width = case.outputs["out"].shape
    return Cost(rows * width * 8 + rows * 4, 0)


GATHER_ROWS = Op(
    "gather_rows",
    lambda target: [zl.Variant("gather_rows", gather_rows_f32)],
    gather_rows,
    _reference,
    _cases,
    _cost,
    later("gpu.step", "gather_variants"),
)
