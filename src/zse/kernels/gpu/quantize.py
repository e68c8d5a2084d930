"""bf16 rows to fp8 rows with one scale each: one block is one row."""

from zse import kernel as zl
from zse.kernels.gpu.rows import block_max, fp8_scales, largest_bits, magnitude_bits, store_fp8
from zse.kernels.quantize import HAVE_MANY

THREADS = 512
VECTORS = (1, 2, 5, 0)  # bf16x8 per thread kept in registers: up to 4,096, 8,192, 20,480 columns; 0: read twice


@zl.kernel
def quantize_row(
    x: zl.Ptr[zl.bf16, "const"],
    q: zl.Ptr[zl.e4m3],
    scale: zl.Ptr[zl.f32],
    sums: zl.Ptr[zl.f16],
    has_sums: zl.i32,
    width: zl.i64,
    V: zl.static,
):
    """Grid (rows); width a multiple of 16."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    t = zl.thread_index()
    row = zl.i64(zl.block_index(0))
    source = x + row * width
    top = zl.i32(0)
    scratch = zl.shared_array(zl.i32, zl.target.threads // zl.target.warp)
    if V > 0:
        values = [zl.f32.x(8)(0) for v in zl.static(range(V))]
        for v in zl.static(range(V)):
            k = (t + v * zl.target.threads) * 8
            if k < width:
                values[v] = zl.convert(zl.load(source + k, 8), zl.f32)
        for v in zl.static(range(V)):
            top = max(top, largest_bits(magnitude_bits(values[v])))
        unit, factor = fp8_scales(zl.bitcast(block_max(top, scratch), zl.f32))
        for v in zl.static(range(V)):
            store_fp8(values[v] * factor, q, sums, has_sums, row, (t + v * zl.target.threads) * 8, width)
        if t == 0:
            scale[row] = unit
    else:
        for k in range(t * 8, width, zl.target.threads * 8):
            top = max(top, largest_bits(magnitude_bits(zl.convert(zl.load(source + k, 8), zl.f32))))
        unit, factor = fp8_scales(zl.bitcast(block_max(top, scratch), zl.f32))
        for base in range(0, width, zl.target.threads * 8):
            k = base + t * 8
            value = zl.f32.x(8)(0)
            if k < width:
                value = zl.convert(zl.load(source + k, 8), zl.f32) * factor
            store_fp8(value, q, sums, has_sums, row, k, width)
        if t == 0:
            scale[row] = unit


def row_vectors(width: int) -> int:
    """The V of VECTORS for rows of `width` values."""
    return next((v for v in VECTORS[:-1] if width <= v * 8 * THREADS), 0)


def quantize_variants(target):
    """Every form of quantize on a GPU."""
    variants = [
        zl.Variant(f"quantize_fp8_v{vectors}", quantize_row, {"V": vectors}, threads=THREADS, min_blocks=2)
        for vectors in VECTORS
    ]
    # A fifth of the instructions less, as there are half the threads that find a row's scale.
    return [*variants, zl.Variant(f"{HAVE_MANY[0]}_many", quantize_row, {"V": 2}, threads=THREADS // 2, min_blocks=8)]
