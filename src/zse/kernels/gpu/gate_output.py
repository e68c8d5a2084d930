"""What attention gives, times the sigmoid of a gate, on a GPU: four columns of a token a thread."""

from zse import kernel as zl
from zse.kernels.gate_output import checked
from zse.kernels.gpu.state import sigmoid
from zse.kernels.op import check, require
from zse.runtime.args import Args

THREADS = 256
INPUTS = {"f32": zl.f32, "bf16": zl.bf16}


@zl.kernel
def gate_output_gpu(
    x: zl.Ptr["X", "const"],
    gate: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.bf16],
    gate_stride: zl.i32,
    width: zl.i32,
    part: zl.i32,
    gap: zl.i32,
    X: zl.static,
):
    """Grid (width / THREADS / 4, tokens). The gate of column c is number c + c // part * gap of its row."""
    zl.grid_launch_dependents()
    column = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * 4
    token = zl.i64(zl.block_index(1))
    zl.grid_wait()
    if column < width:
        z = zl.load(gate + (token * gate_stride + (column + column // part * gap)), 4)
        value = zl.convert(zl.load(x + (token * width + column), 4), zl.f32) * sigmoid(z)
        zl.store(out + (token * width + column), zl.convert(value, zl.bf16))


def record(recorder, x, gate, out, heads: int = 0) -> None:
    """gate_output() on a GPU."""
    tokens, width = out.shape
    args = checked(x, gate, out, heads, tuple(INPUTS))
    check("gate_output out", out, "bf16", tokens, width)
    aligned = args["gate_stride"] % 4 == 0 and args["gate"].offset % 16 == 0
    require(width % 4 == 0 and aligned, f"gate_output on a GPU: gates of {width} columns are not aligned to 16 bytes")
    recorder.launch(f"gate_output_{x.dtype}", Args(**args, out=out), (-(-width // (4 * THREADS)), tokens))


def variants(target) -> list[zl.Variant]:
    """Types of x."""
    return [zl.Variant(f"gate_output_{name}", gate_output_gpu, {"X": X}, threads=THREADS) for name, X in INPUTS.items()]
