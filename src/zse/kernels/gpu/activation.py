"""Activations on the GPU, by columns."""

from zse import kernel as zl
from zse.kernels.activation import ALPHA, CLAMPED, FORMS, LIMIT, exponent_of

COLUMN_THREADS = 256
CHUNK = COLUMN_THREADS * 4  # columns of one block: a single row of 18,944 is spread over 19 blocks
INPUTS = {"f32": zl.f32, "bf16": zl.bf16}


@zl.inline
def activate(gate, KIND):
    """act(gate); see zse.kernels.activation for the formulas."""
    if KIND == "gelu":
        size = abs(gate)
        t = zl.reciprocal(1.0 + size * (0.3275911 * 0.7071067811865476))
        p = t * (t * (t * (t * (t * 1.061405429 + -1.453152027) + 1.421413741) + -0.284496736) + 0.254829592)
        return max(gate, 0.0) - size * p * zl.exp(gate * gate * -0.5) * 0.5
    if KIND == "relu":
        return max(gate, 0.0)
    if KIND == "relu2":
        return max(gate, 0.0) * max(gate, 0.0)
    if KIND == "tanh":
        return zl.tanh(gate)
    exponent = exponent_of(gate, KIND)
    return gate * zl.reciprocal(1.0 + zl.exp(exponent))


@zl.inline
def activated_at(gate, up, k, KIND, GATED):
    """act(gate) of four columns from k on, times `up` where it is gated."""
    x = zl.convert(zl.load(gate + k, 4), zl.f32)
    if KIND == CLAMPED:
        low = min(x, LIMIT)
        high = min(max(zl.convert(zl.load(up + k, 4), zl.f32), -LIMIT), LIMIT)
        return low * zl.reciprocal(1.0 + zl.exp(low * -ALPHA)) * (high + 1.0)
    value = activate(x, KIND)
    if GATED:
        return value * zl.convert(zl.load(up + k, 4), zl.f32)
    return value


@zl.kernel
def gated_columns(
    gates: zl.Ptr["IN", "const"],
    ups: zl.Ptr["IN", "const"],
    stride: zl.i32,
    out: zl.Ptr[zl.bf16],
    width: zl.i32,
    KIND: zl.static,
    GATED: zl.static,
    IN: zl.static,
):
    """Grid (chunks of columns, rows); width a multiple of 8."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    k = zl.block_index(0) * CHUNK + zl.thread_index() * 4
    row = zl.i64(zl.block_index(1))
    if k < width:
        value = activated_at(gates + row * stride, ups + row * stride if GATED else ups, k, KIND, GATED)
        zl.store(out + row * width + k, zl.convert(value, zl.bf16))


def gated_variants(target):
    """Every form of gated on a GPU."""
    fixed = [
        (f"{symbol}_{name}", {"KIND": kind, "GATED": is_gated, "IN": dtype})
        for symbol, kind, is_gated in FORMS
        for name, dtype in INPUTS.items()
    ]
    return [zl.Variant(f"{name}_bf16", gated_columns, each, threads=COLUMN_THREADS) for name, each in fixed]
