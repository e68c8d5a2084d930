"""f32 rows to int8 rows: one f32 scale per 32 values (the form that the CPU's integer matmuls read). GPU: bf16 rows to
fp8 rows, one scale a row."""

from zse import kernel as zl
from zse.kernels import gpu
from zse.kernels.op import Case, Cost, HostArray, Op, OutputSpec, Tolerance, cases_of, check, later, launcher, require
from zse.lazy import numpy as np
from zse.quant import pack
from zse.runtime.args import Args
from zse.runtime.symbol import most_of

GROUP = 32  # values that share a scale
MANY_ROWS = 128  # rows of a GPU's recording from which on these kernels of rows have fewer threads
HAVE_MANY = ("quantize_fp8_v1", "add_rmsnorm_none_fp8_v2")
CHUNK = 1024  # columns of one block: two threads share even a single row of a wide model


@zl.inline
def quantize_group(values, q, scale, total, low=None):
    """Write 32 f32 values (register vectors of target.lanes) as int8, their scale and scale * sum. low: where what
    rounding left goes, in steps of scale / 256, of int16 activations.

    The largest magnitude is found on bit patterns: there NaN ranks above infinity and both survive into the scale, so
    that a broken row shows in its logits instead of becoming plausible integers."""
    top = zl.i32.x(zl.target.lanes)(0)
    for value in values:
        top = max(top, zl.bitcast(value, zl.i32) & 0x7FFFFFFF)
    peak = zl.bitcast(zl.reduce_max(top), zl.f32)
    inverse = zl.where(peak > 1e-30, 127.0 / peak, 0.0)  # smaller peaks would overflow 127 / peak; they become zeros
    count = zl.i32.x(zl.target.lanes)(0)
    rest = zl.i32.x(zl.target.lanes)(0)
    for i, value in enumerate(values):
        nearest = zl.round_even(value * inverse)
        rounded = zl.convert(nearest, zl.i32)
        count += rounded
        zl.store(q + i * zl.target.lanes, zl.narrow_s8(rounded))
        if low is not None:
            # From -127 as q: abs_s8 and sign_s8, which products without VNNI use, have no +128.
            left = zl.convert(zl.round_even(min(max(zl.fma(value, inverse, -nearest) * 256.0, -127.0), 127.0)), zl.i32)
            rest += left
            zl.store(low + i * zl.target.lanes, zl.narrow_s8(left))
    unit = peak / 127.0
    scale[0] = unit
    if low is None:
        total[0] = unit * zl.f32(zl.reduce_add(count))
    else:
        total[0] = unit * (zl.f32(zl.reduce_add((count << 8) + rest)) * 0.00390625)


@zl.kernel
def quantize_rows(
    x: zl.Ptr[zl.f32, "const"],
    q: zl.Ptr[zl.i8],
    scale: zl.Ptr[zl.f32],
    total: zl.Ptr[zl.f32],
    width: zl.i64,
    chunk: zl.i64,
):
    """Grid (chunks of columns, rows)."""
    row = zl.block_index(1)
    first = zl.block_index(0) * chunk
    for k in range(first, min(first + chunk, width), GROUP):
        at = row * width + k
        values = [zl.load(x + at + i, zl.target.lanes) for i in zl.static(range(0, GROUP, zl.target.lanes))]
        quantize_group(values, q + at, scale + at // GROUP, total + at // GROUP)


def _to_int8(recorder, x, out) -> None:
    """x f32 [M, K] → out int8 Activation [M, K]; K a multiple of 32."""
    rows, width = x.shape
    check("quantize x", x, "f32", rows, width)
    require(width % GROUP == 0, f"quantize: width {width} is not a multiple of {GROUP}")
    require(
        out.dtype == "int8", f"quantize: out is {out.dtype}, whose low half is left as it is (add_rmsnorm fills it)"
    )
    require(tuple(out.shape) == (rows, width), f"quantize: out has shape {tuple(out.shape)}, x {(rows, width)}")
    chunks = -(-width // CHUNK)
    args = Args(x=x, q=out.q, scale=out.scale, total=out.sum, width=width, chunk=CHUNK)
    recorder.launch("quantize", args, (chunks, rows))


def of_rows(recorder, symbol: str, rows) -> str:
    """The symbol, or its form for recordings of so many rows that multiprocessors have several each."""
    is_many = symbol in HAVE_MANY and most_of(rows, recorder.maxima) >= MANY_ROWS
    return f"{symbol}_many" if is_many else symbol


def fp8_args(out) -> dict:
    """A kernel's arguments for an Fp8Activation that it writes."""
    return out._asdict() | {"has_sums": int(out.sums is not None)}


def _to_fp8(recorder, x, out) -> None:
    """x bf16 [M, K] → Fp8Activation [M, K], with sums or without; K a multiple of 16."""
    rows, width = x.shape
    check("quantize x", x, "bf16", rows, width)
    check("quantize out", out, "fp8", rows, width)
    require(width % 16 == 0, f"quantize: width {width} is not a multiple of 16")
    args = Args(x=x, **fp8_args(out), width=width)
    recorder.launch(of_rows(recorder, f"quantize_fp8_v{gpu.quantize.row_vectors(width)}", rows), args, (rows,))


quantize = launcher(cpu=_to_int8, gpu=_to_fp8)


def int8_output(
    rows: int, width: int, relative: float = 2e-6, cause: str = "f32 arithmetic before rounding", dtype: str = "int8"
) -> OutputSpec:
    """An int8 (or int16) output; `relative` bounds the error of the values before they are rounded, as a part of the
    group's scale * 127."""
    return OutputSpec((rows, width), dtype, Tolerance(0.0, relative, cause), int8=True)


def fp8_output(
    rows: int, width: int, relative: float = 2e-6, cause: str = "f32 arithmetic before rounding"
) -> OutputSpec:
    """An fp8 output; `relative` bounds the error of the values before they are rounded, as a part of the row's largest
    magnitude."""
    return OutputSpec((rows, width), "e4m3", Tolerance(0.0, relative, cause), fp8=True)


def _reference(x, out=None):
    return {"out": x.wide() if isinstance(x, HostArray) else x}


def _gpu_cases(rng):
    for name, rows, width, spread in (
        ("one row", 1, 3584, 1.0),
        ("odd rows", 7, 96, 100.0),
        ("many rows", MANY_ROWS + 1, 144, 10.0),
        ("wide", 2, 8192, 1e-3),
        ("wider", 3, 18944, 30.0),
        ("widest", 2, 20496, 1.0),
    ):
        x = (rng.standard_normal((rows, width)) * spread).astype(np.float32)
        x[-1, ::3] = 0
        if rows > 1:
            x[0] = 0  # an empty row has scale 0
        yield Case(name, {"x": HostArray("bf16", pack.f32_to_bf16(x))}, {"out": fp8_output(rows, width)})


def _cpu_cases(rng):
    for name, rows, width, spread in (
        ("one row", 1, 576, 1.0),
        ("odd rows", 7, 96, 100.0),
        ("two chunks", 2, 2080, 1e-3),
    ):
        x = (rng.standard_normal((rows, width)) * spread).astype(np.float32)
        x[0, :GROUP] = 0  # an empty group has scale 0
        yield Case(name, {"x": x}, {"out": int8_output(rows, width)})


def _cost(case: Case) -> Cost:
    rows, width = case.outputs["out"].shape
    if case.outputs["out"].fp8:
        return Cost(rows * width * 3 + rows * 4, rows * width * 2)
    return Cost(rows * width * 5 + rows * width // GROUP * 8, rows * width * 3)


QUANTIZE = Op(
    "quantize",
    lambda target: [zl.Variant("quantize", quantize_rows)],
    quantize,
    _reference,
    cases_of(cpu=_cpu_cases, gpu=_gpu_cases),
    _cost,
    later("gpu.quantize", "quantize_variants"),
)
