"""zse kernels check and bench: every operation's time beside what its bytes and operations allow, its results checked
in the same run.

A launch is timed as one of many in a captured graph, as a model replays it; its inputs are copies that together
exceed the caches twice. The ceiling is what a kernel that only reads reaches on the same machine, measured first.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zse.errors import ConfigError
from zse.kernels import op as kernels_op
from zse.kernels import table
from zse.lazy import numpy as np
from zse.runtime.args import Args
from zse.tensor import Activation, Fp8Activation, Tensor, Weight, sum_width

COPIES_BYTES = 3  # times the L2 cache: how much the copies of a launch's inputs are together
TARGET_S = 0.004  # of one replay
REPEATS = 5
CEILING_BYTES = 1 << 30  # that the ceiling is read from


class Timing(NamedTuple):
    """One timed case. microseconds: of one launch; bytes and flops: op.cost; checked: whether the result is right."""

    op: str
    case: str
    microseconds: float
    bytes: int
    flops: int
    checked: bool

    @property
    def gigabytes(self) -> float:
        """GB/s."""
        return self.bytes / self.microseconds / 1e3


def upload(device, array, dtype: str | None = None):
    """A NumPy array in device memory. dtype: where it is not the array's own; u16 stands for bf16."""
    data = np.ascontiguousarray(array)
    own = "bf16" if data.dtype == np.uint16 else f"{data.dtype.kind}{8 * data.dtype.itemsize}"
    tensor = Tensor(device.alloc(max(data.nbytes, 1), label="bench"), data.shape, dtype or own)
    if data.nbytes:
        device.write(tensor, data.tobytes())
    return tensor


def place(device, value: Any) -> Any:
    """A host value of a Case as the launcher's argument."""
    if isinstance(value, np.ndarray):
        return upload(device, value)
    if isinstance(value, kernels_op.HostArray):
        return upload(device, value.array, value.dtype)
    if isinstance(value, kernels_op.HostActivation):
        low = None if value.low is None else upload(device, value.low)
        return Activation(upload(device, value.q), upload(device, value.scale), upload(device, value.sum), low)
    if isinstance(value, kernels_op.HostFp8Activation):
        return Fp8Activation(upload(device, value.q, "e4m3"), upload(device, value.scale), upload(device, value.sums))
    if hasattr(value, "planes"):
        kinds = {plane.name: plane.dtype for plane in value.scheme.planes(*value.shape, value.layout)}
        return Weight(
            value.shape,
            value.scheme,
            {name: upload(device, plane, kinds[name]) for name, plane in value.planes.items()},
            value.layout,
        )
    if isinstance(value, tuple):
        made = [place(device, part) for part in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


def outputs(device, case) -> dict[str, Any]:
    """The outputs' tensors, poisoned or with their initial content."""
    found: dict[str, Any] = {}
    for name, output in case.outputs.items():
        rows, width = output.shape[0], output.shape[-1]
        if output.fp8:
            found[name] = Fp8Activation(
                upload(device, np.full(output.shape, 0x7F, np.uint8), "e4m3"),
                upload(device, np.full(rows, np.nan, np.float32)),
                upload(device, np.full((rows, sum_width(width)), np.nan, np.float16)),
            )
        elif output.int8:
            found[name] = Activation(
                upload(device, np.full(output.shape, -128, np.int8)),
                *(upload(device, np.full((rows, width // 32), np.nan, np.float32)) for _ in range(2)),
            )
        elif output.inout is not None:
            found[name] = upload(device, output.inout, output.dtype if output.dtype in ("bf16", "e4m3") else None)
        elif output.dtype in ("bf16", "e4m3"):
            nan, kind = (0x7FFF, np.uint16) if output.dtype == "bf16" else (0x7F, np.uint8)
            found[name] = upload(device, np.full(output.shape, nan, kind), output.dtype)
        else:
            array = np.empty(output.shape, output.dtype)
            array.fill(np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).min)
            found[name] = upload(device, array)
    return found


def joined(arguments: dict[str, Any]) -> dict[str, Any]:
    """`field.name` outputs (parts of one argument) under their launcher's name."""
    plain = {name: value for name, value in arguments.items() if "." not in name}
    for name, value in arguments.items():
        if "." in name:
            whole, part = name.split(".", 1)
            plain[whole] = plain[whole]._replace(**{part: value})
    return plain


def release(value: Any) -> None:
    """Give the buffers behind arguments back."""
    if hasattr(value, "buffer"):
        if not value.buffer.freed:
            value.buffer.free()
    elif isinstance(value, dict):
        release(tuple(value.values()))
    elif hasattr(value, "planes"):
        release(value.planes)
    elif isinstance(value, tuple | list):
        for part in value:
            release(part)


def read(device, tensor, output):
    """A result as float64, or integers as they are."""
    dtype = {"bf16": "uint16", "e4m3": "uint8"}.get(output.dtype, output.dtype)
    got = np.frombuffer(device.read(tensor), dtype).reshape(tensor.shape)
    if output.error:
        return got
    if output.dtype in ("bf16", "e4m3"):
        got = kernels_op.HostArray(output.dtype, got).wide()
    return got.astype(np.float64) if got.dtype.kind == "f" else got


def difference(got, wanted, output) -> str:
    """What is wrong with a result, "" for nothing; NaN is always wrong, unless it is expected."""
    wanted, tolerance = np.asarray(wanted), output.tolerance
    if output.error:
        return output.error(got, wanted=wanted)
    if got.shape != wanted.shape:
        return f"shape {got.shape}, the reference gives {wanted.shape}"
    if tolerance.absolute == tolerance.relative == 0:
        right = (got == wanted) | ((got != got) & (wanted != wanted))
    else:
        wide = wanted.astype(np.float64)
        right = np.isclose(got, wide, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True)
    if right.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~right)[0])
    return f"{(~right).sum()} of {right.size} values are wrong, first {at}: {got[at]}, expected {wanted[at]}"


def problem(device, op, case, expected=None, launched: "set[str] | None" = None) -> str:
    """Launch once and compare what can be read as numbers: what is wrong, "" for nothing. expected: name → (index,
    array) of the parts that are compared; default: all of the reference. launched: takes the kernels' names before they
    run."""
    arguments: Any = {}
    found: Any = {}
    graph = None
    try:
        arguments |= {name: place(device, value) for name, value in case.inputs.items()}
        found |= outputs(device, case)
        recorder = device.record()
        op.launch(recorder, **joined({**arguments, **found}), **case.options)
        graph = recorder.finish()
        if launched is not None:
            launched.update(launch.symbol for launch in graph.launches)
        graph.run()
        if expected is None:
            initial = {
                name: output.inout
                for name, output in case.outputs.items()
                if output.inout is not None and "." not in name
            }
            wanted = op.reference(
                **case.inputs, **initial, **{k: v for k, v in case.options.items() if k not in case.outputs}
            )
            expected = {
                name: (..., wanted[name]) for name, output in case.outputs.items() if not (output.fp8 or output.int8)
            }
        for name, (index, array) in expected.items():
            wrong = difference(read(device, found[name], case.outputs[name])[index], array, case.outputs[name])
            if wrong:
                return f"{name}: {wrong}"
        return ""
    finally:
        if graph is not None:
            graph.close()
        release(arguments)
        release(found)


def check(device, op, case, expected=None) -> bool:
    """Whether a launch of the case gives what problem() expects."""
    return not problem(device, op, case, expected)


def measure(device, launch, copies: int, guess_us: float) -> float:
    """Microseconds of one launch. launch(recorder, i) records number i of `copies` alternatives."""
    count = max(copies, min(4000, int(TARGET_S * 1e6 / guess_us)))
    recorder = device.record()
    for i in range(count):
        launch(recorder, i % copies)
    graph = recorder.finish()
    try:
        for _ in range(3):  # walked, captured, replayed
            graph.run()
        best = float("inf")
        for _ in range(REPEATS):
            start = time.perf_counter()
            graph.run()
            best = min(best, time.perf_counter() - start)
    finally:
        graph.close()
    return best / count * 1e6


def time_case(device, op, case) -> float:
    """Microseconds of one launch of a case, with inputs that the caches do not hold."""
    cost = op.cost(case)
    cache = device.l2_bytes or 128 << 20  # a server's L3
    copies = max(2, min(32, -(-COPIES_BYTES * cache // max(cost.bytes, 1))))
    sets = []
    try:
        for _ in range(copies):
            sets.append(
                {**{name: place(device, value) for name, value in case.inputs.items()}, **outputs(device, case)}
            )
        calls = [joined(each) for each in sets]
        return measure(
            device,
            lambda recorder, i: op.launch(recorder, **calls[i], **case.options),
            copies,
            (cost.bytes / 2e6 + cost.flops / 3e8 + 3) * CEILINGS[device.kernels].slowness,
        )
    finally:
        release(sets)


def _read(device) -> tuple[Any, tuple, int]:
    source, out = device.alloc(CEILING_BYTES, label="bench"), device.alloc(256, label="bench")
    args = Args(src=source, out=out, count=CEILING_BYTES // 4)
    return ("probe_read", args, (device.num_sms * 4,)), (source, out), CEILING_BYTES


def _copy(device) -> tuple[Any, tuple, int]:
    nbytes = CEILING_BYTES // 4
    source, out = device.alloc(nbytes, label="bench"), device.alloc(nbytes, label="bench")
    rows = upload(device, np.arange(nbytes >> 16, dtype=np.int32))
    args = Args(x=source, rows=rows, out=out, words=1 << 14)
    return ("gather_rows", args, (nbytes >> 16,)), (source, out, rows), 2 * nbytes


class Ceiling(NamedTuple):
    """How fast a kind of device moves memory. moved: what is done; launch: device → what does it, its memory, bytes
    that it reads and writes; slowness: how much longer launches take than an H200's, which many are to be timed at
    once."""

    moved: str
    launch: Callable[[Any], tuple[Any, tuple, int]]
    slowness: int


CEILINGS = {"cpu": Ceiling("copied", _copy, 100), "gpu": Ceiling("read", _read, 1)}


def read_ceiling(device) -> float:
    """GB/s: on a GPU of reading CEILING_BYTES of memory, on a CPU of copying a quarter as much, read
    and written bytes counted."""
    ceiling = CEILINGS[device.kernels]
    launch, memory, nbytes = ceiling.launch(device)
    try:
        us = measure(device, lambda recorder, i: recorder.launch(*launch), 1, nbytes / 4e6 * ceiling.slowness)
    finally:
        release(memory)
    return nbytes / us / 1e3


def cases_of(op, device, rng) -> Iterator[Any]:
    """The operation's cases for this kind of device."""
    return op.cases(rng, device.kernels) if op.gpu_variants else op.cases(rng)


def package_ops(names: list[str]) -> list[Any]:
    """The package's operations that have GPU kernels, of these names (none: all). ConfigError for an unknown one."""
    known = {op.name: op for op in table.all_ops() if op.gpu_variants}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no operation {unknown[0]!r} with GPU kernels; there are {', '.join(sorted(known))}")
    return [known[name] for name in names or sorted(known)]


def time_ops(device, ops, report, only: list[str] | None = None, seed: int | None = None) -> tuple[float, list[Timing]]:
    """(ceiling in GB/s, lines); report(line, ceiling) is called as they come. Every operation is first held to its
    reference with its own cases. only: texts that the timed cases' names contain."""
    ceiling = read_ceiling(device)
    lines = []
    for op in ops:
        rng = np.random.default_rng(seed)
        checked = all([check(device, op, case) for case in cases_of(op, device, rng)])
        timed: Any
        if op.sizes:
            timed = ((case, expected) for case, expected in op.sizes(rng, device.kernels))
        else:
            timed = ((case, None) for case in [max(cases_of(op, device, rng), key=lambda case: op.cost(case).bytes)])
        for case, expected in timed:
            if not all(text in case.name for text in only or ()):
                continue
            right = checked and (expected is None or check(device, op, case, expected()))
            cost = op.cost(case)
            line = Timing(op.name, case.name, time_case(device, op, case), cost.bytes, cost.flops, right)
            lines.append(line)
            report(line, ceiling)
    return ceiling, lines
