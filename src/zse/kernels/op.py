"""What every operation is made of: kernels with their variants, a checked launcher, a reference, cases and a cost.

Tests, `zse bench` and the build all read these objects; nothing here imports NumPy, because the package's
build imports it in an environment that has none (references and cases import NumPy themselves).
"""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from zse.kernel import Variant
from zse.kernel.language import Record
from zse.lazy import numpy as np
from zse.quant import pack
from zse.tensor import SUM_COLUMNS, sum_width

TYPE_CHECKING = False
if TYPE_CHECKING:
    import numpy


class Cost(Record):
    """What one launch must move and compute: bytes read and written at least once, floating-point operations."""

    bytes: int
    flops: int


class Tolerance(Record):
    """|got - expected| <= absolute + relative * |expected|. `cause` says which rounding the figures stand for."""

    absolute: float
    relative: float
    cause: str


EXACT = Tolerance(0.0, 0.0, "integers or copies: no rounding")


class HostActivation(Record):
    """An Activation on the host. As an output, `q` and the others are None and only the shape is used.

    q: i8 [M, K] rounded values, scale: f32 [M, K/32], sum: f32 [M, K/32] = scale * sum of q. low: i8 [M, K], of an
    int16 one: what rounding to q left, in steps of scale / 256."""

    shape: tuple[int, int]
    q: "numpy.ndarray | None" = None
    scale: "numpy.ndarray | None" = None
    sum: "numpy.ndarray | None" = None
    low: "numpy.ndarray | None" = None

    @classmethod
    def quantize(cls, x: "numpy.ndarray", kind: str = "int8") -> "HostActivation":
        """f32 [M, K] as the kernels quantize it: scale = absmax / 127 per 32 values, nearest even. kind: "int8",
        "int16"."""
        groups = x.reshape(x.shape[0], -1, 32).astype(np.float32)
        scale = np.abs(groups).max(axis=2) / np.float32(127)
        steps = groups / np.where(scale == 0, np.float32(1), scale)[:, :, None]
        q = np.rint(steps).astype(np.int8)
        if kind == "int8":
            total = (scale * q.sum(axis=2, dtype=np.int32)).astype(np.float32)
            return cls(x.shape, q.reshape(x.shape), scale, total)
        low = np.clip(np.rint((steps - q) * 256), -127, 127).astype(np.int8)
        total = (scale * (q.sum(axis=2, dtype=np.int32) + low.sum(axis=2, dtype=np.int32) / 256)).astype(np.float32)
        return cls(x.shape, q.reshape(x.shape), scale, total, low.reshape(x.shape))

    def dequantize(self) -> "numpy.ndarray":
        """float64 [M, K]."""
        steps = self.q.astype("float64") + (0 if self.low is None else self.low.astype("float64") / 256)
        return steps * self.scale.astype("float64").repeat(32, axis=1)


class HostFp8Activation(Record):
    """An Fp8Activation on the host. As an output, only the shape is used.

    q: u8 [M, K] bit patterns of e4m3, scale: f32 [M], sums: f16 [M, sum_width(K)]."""

    shape: tuple[int, int]
    q: "numpy.ndarray | None" = None
    scale: "numpy.ndarray | None" = None
    sums: "numpy.ndarray | None" = None

    @classmethod
    def quantize(cls, x: "numpy.ndarray") -> "HostFp8Activation":
        """f32 [M, K] as the kernels quantize it: scale = absmax / 448 of a row, nearest even."""
        peak = np.abs(x).max(axis=1).astype(np.float32)
        factor = np.divide(np.float32(448), peak, out=np.zeros_like(peak), where=peak > 1e-30)
        q = pack.f32_to_e4m3(x.astype(np.float32) * factor[:, None])
        return cls(x.shape, q, peak / np.float32(448), cls.sums_of(q))

    @staticmethod
    def sums_of(q: "numpy.ndarray") -> "numpy.ndarray":
        """What the sums of q are, f16; what nobody reads is NaN."""
        rows, width = q.shape
        numbers = np.zeros((rows, width + -width % SUM_COLUMNS), np.float32)
        numbers[:, :width] = pack.e4m3_to_f32(q)
        sums = np.full((rows, sum_width(width)), np.nan, np.float16)
        sums[:, : numbers.shape[1] // SUM_COLUMNS] = numbers.reshape(rows, -1, SUM_COLUMNS).sum(axis=2)
        return sums

    def dequantize(self) -> "numpy.ndarray":
        """float64 [M, K]."""
        return pack.e4m3_to_f32(self.q).astype("float64") * self.scale.astype("float64")[:, None]


class HostArray(Record):
    """An array of a type that NumPy does not have, as bit patterns: dtype "bf16" as u16, "e4m3" as u8."""

    dtype: str
    array: "numpy.ndarray"

    def wide(self) -> "numpy.ndarray":
        """The values, f32."""
        return pack.bf16_to_f32(self.array) if self.dtype == "bf16" else pack.e4m3_to_f32(self.array)


class OutputSpec(Record):
    """A tensor that the launcher fills: NumPy dtype name, shape, and what a fresh result may differ by. dtype "bf16" or
    "e4m3": bit patterns as in HostArray, compared by value.

    It is allocated poisoned (NaN, or the smallest integer) so that an element nobody writes shows. `inout`: the initial
    content for a tensor that is read and changed (the residual stream, KV pages). `error`: (result as stored, what the
    reference gives) → what is wrong, "" for nothing, where a tolerance cannot say it."""

    shape: tuple[int, ...]
    dtype: str
    tolerance: Tolerance
    inout: "numpy.ndarray | None" = None
    int8: bool = False  # an int8 Activation of this shape (int16 where dtype is "int16"); dtype is ignored
    fp8: bool = False  # an Fp8Activation of this shape; dtype is ignored
    error: "Callable[[numpy.ndarray, Any], str] | None" = None


class Case(Record):
    """One concrete call: arrays (and quantized weights) by the launcher's parameter names, other arguments, outputs."""

    name: str
    inputs: dict[str, Any]
    outputs: dict[str, OutputSpec]
    options: dict[str, Any] = {}


class Cases:
    """Cases whose inputs are made when one is asked for: those of hundreds take seconds, and a test may want six.

    makes: functions that give a Case each. Iterated, all of them in this order."""

    def __init__(self, makes: "Iterable[Callable[[], Case]]"):
        self._makes = list(makes)

    def __len__(self) -> int:
        return len(self._makes)

    def __getitem__(self, number: int) -> Case:
        return self._makes[number]()

    def __iter__(self) -> Iterator[Case]:
        return (make() for make in self._makes)


class Op(Record):
    """One operation.

    variants: CPU target → the variants to compile for it; gpu_variants: likewise for a GPU target (target.arch,
    target.warp, target.has), None while the op has no GPU form. launch(recorder, **tensors, **options): checks shapes
    and dtypes, raises ValueError or TypeError, and records; a launcher() where kinds of devices differ.
    reference(**arrays, **options) → output name → float64 (or integer) array; inputs that the op changes are given as
    their initial content and must not be modified. cases(rng) → fresh random Cases, odd sizes among them, an iterator or
    a Cases; with a GPU form cases(rng, family) takes "cpu" or "gpu". cost(case) → Cost. sizes(rng, family) → for timing: Cases of real models' sizes,
    each with a function that gives, by output name, (index, expected values) of the part that is
    compared; None: the largest of the cases."""

    name: str
    variants: Callable[[Any], list[Variant]]
    launch: Callable[..., None]
    reference: Callable[..., dict[str, Any]]
    cases: Callable[..., Iterable[Case]]
    cost: Callable[[Case], Cost]
    gpu_variants: Callable[[Any], list[Variant]] | None = None
    sizes: Callable[[Any], Iterator[tuple[Case, Callable[[], dict[str, Any]]]]] | None = None

    def variants_for(self, target: Any) -> list[Variant]:
        """The variants to compile for a target of a kind of device; none where the op has no form for it."""
        of_target = {"cpu": self.variants, "gpu": self.gpu_variants}[target.kernels]
        return of_target(target) if of_target else []


def later(module: str, name: str) -> Callable[..., Any]:
    """Function `name` of zse.kernels.MODULE, imported when it is called: what an engine's start does not need, cases
    and references, the kernels of the other kind of device."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"zse.kernels.{module}"), name)(*args, **options)

    return call


def launcher(**launchers: Callable[..., None]) -> Callable[..., None]:
    """A launcher that differs by kind of device: the one of launchers that is called as the recorder's
    `Device.kernels`."""

    def launch(recorder: Any, *args: Any, **options: Any) -> None:
        launchers[recorder.device.kernels](recorder, *args, **options)

    return launch


def cases_of(**cases: Callable[[Any], Iterable[Case]]) -> Callable[..., Iterable[Case]]:
    """Cases that differ by kind of device: (rng, `Device.kernels`) → those of its name."""
    return lambda rng, family="cpu": cases[family](rng)


def require(condition: bool, message: str) -> None:
    """Launchers' argument check: ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def check(name: str, tensor: Any, dtype: str | tuple[str, ...], *shape: Any) -> None:
    """TypeError or ValueError unless `tensor` has one of the dtypes and the shape (None matches any size)."""
    if tensor.dtype != dtype and (isinstance(dtype, str) or tensor.dtype not in dtype):
        allowed = (dtype,) if isinstance(dtype, str) else dtype
        raise TypeError(f"{name}: dtype {tensor.dtype}, expected {' or '.join(allowed)}")
    got = tensor.shape
    if len(got) == len(shape):
        for have, want in zip(got, shape, strict=True):
            # `is`: most are the same symbol, and comparing two costs as much as all the rest.
            if have is not want and want is not None and have != want:
                break
        else:
            return
    raise ValueError(f"{name}: shape {tuple(got)}, expected {shape}")
