"""A product's inputs in the order of its weight's columns (GPTQ's act-order, zse.formats.column_order), in the form
that the product takes."""

from zse import kernel as zl
from zse.kernels.op import EXACT, Case, Cost, HostArray, Op, OutputSpec, Tolerance, check, later, launcher, require
from zse.kernels.quantize import CHUNK, GROUP, int8_output, quantize_group
from zse.lazy import numpy as np
from zse.quant import pack
from zse.runtime.args import Args

FORMS = ("f32", "int8", "int16")
GPU_COLUMNS = 1024  # of one thread block


@zl.kernel
def reorder_columns(
    x: zl.Ptr[zl.f32, "const"],
    order: zl.Ptr[zl.i32, "const"],
    out: zl.Ptr["OUT"],
    low: zl.Ptr[zl.i8],
    scale: zl.Ptr[zl.f32],
    total: zl.Ptr[zl.f32],
    width: zl.i64,
    stride: zl.i64,
    FORM: zl.static,
    OUT: zl.static,
):
    """Grid (chunks of CHUNK columns, rows)."""
    row = zl.block_index(1)
    source = x + row * stride
    first = zl.block_index(0) * CHUNK
    found = zl.local_array(zl.f32, GROUP)
    for k in range(first, min(first + CHUNK, width), GROUP):
        for i in range(GROUP):
            found[i] = source[zl.i64(order[k + i])]
        values = [zl.load(found + i, zl.target.lanes) for i in zl.static(range(0, GROUP, zl.target.lanes))]
        at = row * width + k
        if FORM == "f32":
            for i, value in enumerate(values):
                zl.store(out + (at + i * zl.target.lanes), value)
        elif FORM == "int8":
            quantize_group(values, out + at, scale + at // GROUP, total + at // GROUP)
        else:
            quantize_group(values, out + at, scale + at // GROUP, total + at // GROUP, low + at)


@zl.kernel
def reorder_columns_gpu(
    x: zl.Ptr["IN", "const"],
    order: zl.Ptr[zl.i32, "const"],
    out: zl.Ptr[zl.bf16],
    width: zl.i32,
    stride: zl.i32,
    IN: zl.static,
):
    """Grid (chunks of GPU_COLUMNS columns, rows); four columns a thread."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    source = x + zl.i64(zl.block_index(1)) * stride
    destination = out + zl.i64(zl.block_index(1)) * width
    k = zl.block_index(0) * GPU_COLUMNS + zl.thread_index() * 4
    if k < width:
        for i in zl.static(range(4)):
            destination[k + i] = zl.convert(zl.convert(source[order[k + i]], zl.f32), zl.bf16)


def _on_cpu(recorder, x, order, out) -> None:
    """x f32 [M, K], order i32 [N] → out [M, N], f32 or int8, int16 Activation: out[m, n] = x[m, order[n]]; N a multiple
    of 32, 0 <= order < K."""
    rows, stride = x.shape
    (width,) = order.shape
    check("reorder x", x, "f32", rows, stride)
    check("reorder order", order, "i32", width)
    check("reorder out", out, FORMS, rows, width)
    require(width % GROUP == 0, f"reorder: width {width} is not a multiple of {GROUP}")
    parts = dict(out=out, low=None, scale=None, total=None)
    if out.dtype != "f32":
        parts = dict(out=out.q, low=out.low, scale=out.scale, total=out.sum)
    args = Args(x=x, order=order, width=width, stride=stride, **parts)
    recorder.launch(f"reorder_{out.dtype}", args, (-(-width // CHUNK), rows))


def _on_gpu(recorder, x, order, out) -> None:
    """x bf16 or f32 [M, K], order i32 [N] → out bf16 [M, N]; N a multiple of 32."""
    rows, stride = x.shape
    (width,) = order.shape
    check("reorder x", x, ("bf16", "f32"), rows, stride)
    check("reorder order", order, "i32", width)
    check("reorder out", out, "bf16", rows, width)
    require(width % GROUP == 0, f"reorder: width {width} is not a multiple of {GROUP}")
    args = Args(x=x, order=order, out=out, width=width, stride=stride)
    recorder.launch(f"reorder_{x.dtype}", args, (-(-width // GPU_COLUMNS), rows))


reorder = launcher(cpu=_on_cpu, gpu=_on_gpu)


def _reference(x, order, out=None):
    return {"out": (x.wide() if isinstance(x, HostArray) else x)[:, order]}


def _cases(rng, family="cpu"):
    for form in FORMS if family == "cpu" else ("bf16", "f32"):
        # Of one rank's columns: fewer than there are inputs.
        for rows, width, inputs in ((1, 32, 32), (3, 1056, 1056), (2, 4128, 4128), (3, 1056, 2113)):
            x = rng.standard_normal((rows, inputs)).astype(np.float32)
            order = rng.permutation(inputs)[:width].astype(np.int32)
            out = OutputSpec((rows, width), "float32", EXACT)
            if family == "gpu":
                out = OutputSpec((rows, width), "bf16", Tolerance(0.0, 1e-9, "copies, compared by value"))
                bits = pack.f32_to_bf16(x)
                x = HostArray("bf16", bits) if form == "bf16" else pack.bf16_to_f32(bits)
            elif form != "f32":
                out = int8_output(rows, width, dtype=form)
            yield Case(f"{form} {rows} x {width} of {inputs}", {"x": x, "order": order}, {"out": out})


def _cost(case: Case) -> Cost:
    rows, width = case.outputs["out"].shape
    return Cost(rows * width * 8 + width * 4, 0)


def _variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"reorder_{form}", reorder_columns, {"FORM": form, "OUT": zl.f32 if form == "f32" else zl.i8})
        for form in FORMS
    ]


REORDER = Op("reorder", _variants, reorder, _reference, _cases, _cost, later("reorder", "gpu_variants"))


def gpu_variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"reorder_{name}", reorder_columns_gpu, {"IN": dtype}, threads=GPU_COLUMNS // 4)
        for name, dtype in (("bf16", zl.bf16), ("f32", zl.f32))
    ]
