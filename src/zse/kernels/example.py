"""out = x / (1 + e**-x), row by row: a kernel of one's own, for CPUs and GPUs, with what checks and times it.

`zse kernels new FILE.py` writes this file; change it into the operation that you need.

    zse kernels check FILE.py       every form that can run here against the NumPy reference
    zse kernels bench FILE.py       how long it takes, beside what the machine's memory allows

docs/kernel-language.md describes the language. A model's own operations are files of the same form (zse/kernels/*.py).
"""

import numpy as np

from zse import kernel as zl
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, require
from zse.runtime.args import Args


@zl.kernel
def swish_rows(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], width: zl.i64, UNROLL: zl.static):
    """On a CPU: one block is one row; width is a multiple of UNROLL registers."""
    row, L = zl.block_index(0), zl.target.lanes
    for i in range(0, width, L * UNROLL):
        for u in zl.static(range(UNROLL)):
            at = row * width + i + u * L
            v = zl.load(x + at, L)
            zl.store(out + at, v / (1.0 + zl.exp(-v)))


@zl.kernel
def swish_rows_gpu(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], width: zl.i32):
    """On a GPU: this code is one thread; a block of them has one row, and each takes four values (16 bytes) at a
    time."""
    row = zl.block_index(0) * width
    zl.grid_launch_dependents()
    zl.grid_wait()  # what earlier kernels wrote is there
    for i in range(zl.thread_index() * 4, width, zl.target.threads * 4):
        v = zl.load(x + row + i, 4)
        for k in zl.static(range(4)):
            out[row + i + k] = v[k] / (1.0 + zl.exp(-v[k]))


def swish(recorder, x, out) -> None:
    """out f32 [M, K] = x / (1 + e**-x) of x f32 [M, K], K a multiple of 32. What does not fit is refused here: a kernel
    checks nothing."""
    rows, width = x.shape
    check("swish x", x, "f32", rows, width)
    check("swish out", out, "f32", rows, width)
    require(width % 32 == 0, f"swish: width {width} is not a multiple of 32")
    recorder.launch("swish_rows", Args(x=x, out=out, width=width), (rows,))


def reference(x):
    """float64, written for the reader, not for speed."""
    wide = x.astype(np.float64)
    return {"out": wide / (1 + np.exp(-wide))}


ROUNDING = Tolerance(1e-30, 1e-6, "f32: exp within 2 ulp, a sum and a quotient of half an ulp each")


def cases(rng, family="cpu"):
    """Fresh random inputs, odd numbers of rows among them; the largest is what bench times."""
    for rows, width in ((1, 32), (7, 96), (1024, 4096)):
        x = rng.normal(0, 5, (rows, width)).astype(np.float32)
        yield Case(f"{rows} x {width}", {"x": x}, {"out": OutputSpec((rows, width), "float32", ROUNDING)})


def cost(case):
    """Bytes that must be read and written, operations that must be done."""
    return Cost(2 * case.inputs["x"].nbytes, 4 * case.inputs["x"].size)


SWISH = Op(
    "swish",
    lambda target: [zl.Variant("swish_rows", swish_rows, {"UNROLL": 2})],
    swish,
    reference,
    cases,
    cost,
    lambda target: [zl.Variant("swish_rows", swish_rows_gpu, threads=256)],
)
