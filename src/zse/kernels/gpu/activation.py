"""Gated activations on the GPU: by columns for bf16, by rows where a row's scale is needed (fp8)."""

from zse.kernel import (
    Ptr,
    Variant,
    bf16,
    bitcast,
    block_index,
    convert,
    e4m3,
    exp,
    f32,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    inline,
    kernel,
    load,
    reciprocal,
    shared_array,
    static,
    store,
    target,
    thread_index,
)
from zse.kernels.gpu.rows import block_max, fp8_scales, largest_bits, magnitude_bits

COLUMN_THREADS = 256
ROW_THREADS = 1024
CHUNK = COLUMN_THREADS * 4  # columns of one block: a single row of 18,944 is spread over 19 blocks
VECTORS = (2, 5, 0)  # f32x4 per thread kept in registers: up to 8,192 and 20,480 columns; 0: computed twice
KINDS = ("silu", "gelu_tanh")
INPUTS = {"f32": f32, "bf16": bf16}


@inline
def activated(gate, up, KIND):
    """act(gate) * up; see zse.kernels.activation for the formulas."""
    exponent = (
        gate * -1.0
        if KIND == "silu"
        else gate * (gate * gate * (-2 * 0.7978845608028654 * 0.044715) + -2 * 0.7978845608028654)
    )
    return gate * reciprocal(1.0 + exp(exponent)) * up


@kernel
def gated_columns(
    gates: Ptr["IN", "const"],
    ups: Ptr["IN", "const"],
    stride: i32,
    out: Ptr[bf16],
    width: i32,
    KIND: static,
    IN: static,
):
    """Grid (chunks of columns, rows); width a multiple of 8."""
    grid_launch_dependents()
    grid_wait()
    k = block_index(0) * CHUNK + thread_index() * 4
    row = i64(block_index(1))
    if k < width:
        gate = convert(load(gates + row * stride + k, 4), f32)
        up = convert(load(ups + row * stride + k, 4), f32)
        store(out + row * width + k, convert(activated(gate, up, KIND), bf16))


@kernel
def gated_row(
    gates: Ptr["IN", "const"],
    ups: Ptr["IN", "const"],
    stride: i32,
    q: Ptr[e4m3],
    scale: Ptr[f32],
    width: i32,
    KIND: static,
    IN: static,
    V: static,
):
    """Grid (rows); width a multiple of 16."""
    grid_launch_dependents()
    grid_wait()
    t = thread_index()
    row = i64(block_index(0))
    gate = gates + row * stride
    up = ups + row * stride
    out = q + row * width
    top = i32(0)
    scratch = shared_array(i32, target.threads // target.warp)
    if V > 0:
        values = [f32.x(4)(0) for v in static(range(V))]
        for v in static(range(V)):
            k = (t + v * target.threads) * 4
            if k < width:
                values[v] = activated(convert(load(gate + k, 4), f32), convert(load(up + k, 4), f32), KIND)
                top = max(top, largest_bits(magnitude_bits(values[v])))
        unit, factor = fp8_scales(bitcast(block_max(top, scratch), f32))
        for v in static(range(V)):
            k = (t + v * target.threads) * 4
            if k < width:
                store(out + k, convert(values[v] * factor, e4m3))
        if t == 0:
            scale[row] = unit
    else:
        for k in range(t * 4, width, target.threads * 4):
            value = activated(convert(load(gate + k, 4), f32), convert(load(up + k, 4), f32), KIND)
            top = max(top, largest_bits(magnitude_bits(value)))
        unit, factor = fp8_scales(bitcast(block_max(top, scratch), f32))
        for k in range(t * 4, width, target.threads * 4):
            value = activated(convert(load(gate + k, 4), f32), convert(load(up + k, 4), f32), KIND)
            store(out + k, convert(value * factor, e4m3))
        if t == 0:
            scale[row] = unit


def row_vectors(width: int) -> int:
    """The V of VECTORS for rows of `width` values."""
    return next((v for v in VECTORS[:-1] if width <= v * 4 * ROW_THREADS), 0)


def gated_variants(target):
    """Every form of gated on a GPU."""
    return [
        Variant(f"gated_{kind}_{name}_bf16", gated_columns, {"KIND": kind, "IN": dtype}, threads=COLUMN_THREADS)
        for kind in KINDS
        for name, dtype in INPUTS.items()
    ] + [
        Variant(
            f"gated_{kind}_{name}_fp8_v{vectors}",
            gated_row,
            {"KIND": kind, "IN": dtype, "V": vectors},
            threads=ROW_THREADS,
        )
        for kind in KINDS
        for name, dtype in INPUTS.items()
        for vectors in VECTORS
    ]
