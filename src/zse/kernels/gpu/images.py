"""The kernels of zse.kernels.images on a GPU."""

from zse import kernel as zl
from zse.kernels.images import GPU_CHUNK, RopeSections
from zse.kernels.rope import TWO_PI

THREADS = 256


@zl.kernel
def place_rows_gpu(
    source: zl.Ptr[zl.f32, "const"], rows: zl.Ptr[zl.i32, "const"], x: zl.Ptr[zl.f32], width: zl.i32, ADD: zl.static
):
    """Grid (tokens)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    row = zl.i64(rows[zl.block_index(0)])
    if row >= 0:
        mine = x + zl.i64(zl.block_index(0)) * width
        for k in range(zl.thread_index(), width, zl.target.threads):
            value = source[row * width + k]
            mine[k] = value + mine[k] if ADD else value


@zl.kernel
def mean_rows_gpu(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], count: zl.i32, width: zl.i32):
    """Grid (rows of the result)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    mine = x + zl.i64(zl.block_index(0)) * count * width
    to = out + zl.i64(zl.block_index(0)) * width
    for k in range(zl.thread_index(), width, zl.target.threads):
        total = zl.f32(0)
        for row in range(count):
            total += mine[row * width + k]
        to[k] = total / zl.f32(count)


@zl.kernel
def rope_sections_gpu(p: RopeSections):
    """Grid (tokens)."""
    zl.grid_wait()
    zl.grid_launch_dependents()
    token = zl.i64(zl.block_index(0))
    row = p.out + token * 2 * p.pairs
    for i in range(zl.thread_index(), p.pairs, zl.target.threads):
        angle = p.inv_freq[i] * zl.f32(p.positions[zl.i64(p.section[i]) * p.tokens + token])
        turns = zl.round_even(angle * (1 / 6.283185307179586)) * -1.0
        reduced = zl.fma(turns, TWO_PI[2], zl.fma(turns, TWO_PI[1], zl.fma(turns, TWO_PI[0], angle)))
        row[i] = zl.cos(reduced) * p.mscale
        row[p.pairs + i] = zl.sin(reduced) * p.mscale


@zl.kernel
def clamp_gpu(
    x: zl.Ptr["IN", "const"],
    bounds: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr["OUT"],
    lower: zl.i32,
    width: zl.i32,
    IN: zl.static,
    OUT: zl.static,
):
    """Grid (chunks of columns, rows); four columns a thread."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    k = zl.block_index(0) * GPU_CHUNK + zl.thread_index() * 4
    if k < width:
        at = zl.i64(zl.block_index(1)) * width + k
        value = zl.convert(zl.load(x + at, 4), zl.f32)
        zl.store(out + at, zl.convert(min(max(value, bounds[lower] + 0.0), bounds[lower + 1] + 0.0), OUT))


@zl.kernel
def standardize_gpu(x: zl.Ptr[zl.f32], bias: zl.Ptr[zl.f32, "const"], scale: zl.Ptr[zl.f32, "const"], width: zl.i32):
    """Grid (rows)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    mine = x + zl.i64(zl.block_index(0)) * width
    for k in range(zl.thread_index(), width, zl.target.threads):
        mine[k] = (mine[k] - bias[k]) * scale[k]


def clamp_variants(target):
    types = {"f32": zl.f32, "bf16": zl.bf16}
    return [
        zl.Variant(f"clamp_{source}_{out}", clamp_gpu, {"IN": types[source], "OUT": types[out]}, threads=THREADS)
        for source in types
        for out in types
    ]


def standardize_variants(target):
    return [zl.Variant("standardize_rows", standardize_gpu, threads=THREADS)]


def place_variants(target):
    return [
        zl.Variant("place_rows_add" if add else "place_rows", place_rows_gpu, {"ADD": add}, threads=THREADS)
        for add in (False, True)
    ]


def mean_variants(target):
    return [zl.Variant("mean_rows", mean_rows_gpu, threads=THREADS)]


def section_variants(target):
    return [zl.Variant("rope_sections", rope_sections_gpu, threads=64)]
