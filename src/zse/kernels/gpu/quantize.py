"""bf16 rows to fp8 rows with one scale each: one block is one row."""

from zse.kernel import (
    Ptr,
    Variant,
    bf16,
    bitcast,
    block_index,
    convert,
    e4m3,
    f32,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    kernel,
    load,
    shared_array,
    static,
    store,
    target,
    thread_index,
)
from zse.kernels.gpu.rows import block_max, fp8_scales, largest_bits, magnitude_bits

THREADS = 512
VECTORS = (1, 2, 5, 0)  # bf16x8 per thread kept in registers: up to 4,096, 8,192, 20,480 columns; 0: read twice


@kernel
def quantize_row(x: Ptr[bf16, "const"], q: Ptr[e4m3], scale: Ptr[f32], width: i32, V: static):
    """Grid (rows); width a multiple of 16."""
    grid_launch_dependents()
    grid_wait()
    t = thread_index()
    row = i64(block_index(0))
    source = x + row * width
    out = q + row * width
    top = i32(0)
    scratch = shared_array(i32, target.threads // target.warp)
    if V > 0:
        values = [f32.x(8)(0) for v in static(range(V))]
        for v in static(range(V)):
            k = (t + v * target.threads) * 8
            if k < width:
                values[v] = convert(load(source + k, 8), f32)
        for v in static(range(V)):
            top = max(top, largest_bits(magnitude_bits(values[v])))
        unit, factor = fp8_scales(bitcast(block_max(top, scratch), f32))
        for v in static(range(V)):
            k = (t + v * target.threads) * 8
            if k < width:
                store(out + k, convert(values[v] * factor, e4m3))
        if t == 0:
            scale[row] = unit
    else:
        for k in range(t * 8, width, target.threads * 8):
            top = max(top, largest_bits(magnitude_bits(convert(load(source + k, 8), f32))))
        unit, factor = fp8_scales(bitcast(block_max(top, scratch), f32))
        for k in range(t * 8, width, target.threads * 8):
            store(out + k, convert(convert(load(source + k, 8), f32) * factor, e4m3))
        if t == 0:
            scale[row] = unit


def row_vectors(width: int) -> int:
    """The V of VECTORS for rows of `width` values."""
    return next((v for v in VECTORS[:-1] if width <= v * 8 * THREADS), 0)


def quantize_variants(target):
    """Every form of quantize on a GPU."""
    return [Variant(f"quantize_fp8_v{vectors}", quantize_row, {"V": vectors}, threads=THREADS) for vectors in VECTORS]
