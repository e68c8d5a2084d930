"""Weights as files of others store them, and what NumPy makes of them: fresh random numbers for the packing kernels of every
device. check() loads one the way a model is loaded and compares every bit."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from zse.formats.file import ModelFile
from zse.formats.matrix import Rows, planes_of_rows, prepare
from zse.formats.source import TensorInfo
from zse.models import repack_load
from zse.models.shares import ShareCut
from zse.quant.pack import f32_to_bf16
from zse.quant.scheme import AffineScheme, Fp8Scheme, Scheme
from zse.runtime.args import Args
from zse.runtime.load import LoadJob
from zse.tensor import Tensor, Weight

FILLER = 0xA5


class Case(NamedTuple):
    """layout: of the file. dtype: of its scales, or of plain numbers. order: rows of a head, or 0. step_bytes: of a piece. orders:
    which of "columns", "rows" change places. cut: the columns that are taken, of a rank's share."""

    layout: str
    shape: tuple[int, int]
    scheme: Scheme
    dtype: str = "F16"
    head: int = 0
    step_bytes: int = 1 << 14
    first: int = 0
    orders: tuple[str, ...] = ()
    cut: tuple[int, int] | None = None

    def __str__(self) -> str:
        n, k = self.shape
        return (
            f"{self.layout}-{self.dtype}-{n}x{k}-{self.scheme}"
            + (f"-heads of {self.head}" if self.head else "")
            + "".join(f"-{role}" for role in self.orders)
            + (f"-columns {self.cut[0]} to {self.cut[1]}" if self.cut else "")
        )


INT4, SYM4, INT8, SYM8 = (
    AffineScheme(bits, 32, symmetric) for bits, symmetric in ((4, False), (4, True), (8, False), (8, True))
)
CASES = [
    Case("awq", (72, 320), INT4),
    Case("awq", (24, 256), AffineScheme(4, 128, False), "BF16", first=48),
    Case("awq", (160, 96), AffineScheme(4, 0, False)),
    Case("gptq", (40, 192), SYM4),
    Case("gptq+1", (72, 256), AffineScheme(4, 64, False)),
    Case("gptq", (36, 128), SYM8, "F32"),
    Case("gptq+1", (20, 160), INT8),
    Case("packed", (72, 320), SYM4, "BF16"),
    Case("packed", (40, 256), AffineScheme(4, 16, False)),
    Case("packed", (36, 192), AffineScheme(8, 64, True), "F32", first=32),
    Case("int8", (52, 192), AffineScheme(8, 0, True), "BF16", first=16),
    Case("int8", (36, 192), AffineScheme(8, 64, True), "F32"),
    Case("gptq", (152, 192), SYM4, step_bytes=1 << 10, orders=("columns",)),
    Case("gptq+1", (72, 256), AffineScheme(4, 64, False), first=32, step_bytes=1 << 10, orders=("columns", "rows")),
    Case("gptq+1", (36, 160), INT8, orders=("rows",)),
    Case("gptq", (48, 128), AffineScheme(8, 64, True), orders=("columns", "rows")),
    Case("packed", (72, 320), INT4, "BF16", first=16, step_bytes=1 << 12, orders=("columns", "rows")),
    Case("packed", (36, 192), AffineScheme(8, 64, True), "F32", orders=("columns",)),
    Case("rows", (37, 256), AffineScheme(4, 128, False), "BF16"),
    Case("rows", (50, 96), INT4, "F16", first=16),
    Case("rows", (33, 64), AffineScheme(4, 64, False), "F32"),
    Case("rows", (64, 128), INT4, "BF16", head=32),
    Case("rows", (37, 256), AffineScheme(8, 128, True), "BF16"),
    Case("rows", (19, 96), SYM8, "F32"),
    Case("rows", (48, 64), SYM8, "F16", head=16),
    Case("rows", (37, 320), AffineScheme(4, 64, False), "BF16", step_bytes=1 << 12, cut=(128, 320)),
    Case("rows", (50, 192), SYM8, "F32", first=16, cut=(0, 96)),
]
GPU_CASES = [
    *CASES,
    Case("rows", (37, 272), Fp8Scheme("row"), "BF16", first=16),
    Case("rows", (5, 2064), Fp8Scheme("row"), "F16"),
    Case("rows", (64, 48), Fp8Scheme("row"), "F32", head=32),
    Case("rows", (37, 272), Fp8Scheme("row"), "BF16", first=16, cut=(32, 160)),
]


def stored(case: Case, rng) -> dict[str, tuple[str, np.ndarray]]:
    """Role → (type, array) of what the file holds."""
    (n, k), scheme = case.shape, case.scheme
    if case.layout == "rows":
        values = rng.standard_normal((n, k)).astype(np.float32) * np.float32(2.0 ** rng.integers(-8, 8))
        values *= np.exp2(rng.integers(-6, 3, (n, 1))).astype(np.float32)
        values[rng.integers(n), :] = 0
        values[rng.integers(n), : k // 2] = np.float32(-0.0)
        values[rng.integers(n), rng.integers(k)] = 60000
        values[rng.integers(n), :32] = values[0, 0]
        values[rng.integers(n), :] *= np.float32(2.0**-20)
        return {"w": (case.dtype, as_type(values, case.dtype))}
    per_word, groups = 32 // scheme.bits, scheme.groups(k)

    def words(*shape):
        return "I32", rng.integers(0, 1 << 32, shape, np.uint32)

    scale = rng.standard_normal((n, groups)).astype(np.float32) * 0.01
    scale[rng.integers(n), 0] = 0
    found = {}
    by_column = case.layout not in ("packed", "int8")
    shapes = {"awq": (k, n // per_word), "packed": (n, k // per_word)}
    if case.layout == "int8":
        found["q"] = "I8", rng.integers(-128, 128, (n, k), np.int8)
    else:
        found["q"] = words(*shapes.get(case.layout, (k // per_word, n)))
    found["scale"] = case.dtype, as_type(np.ascontiguousarray(scale.T if by_column else scale), case.dtype)
    if not scheme.symmetric:
        found["zero"] = words(groups, n // per_word) if by_column else words(n // per_word, groups)
    # Groups of each column; of rows those of another weight.
    for role in case.orders:
        size, count = (k, groups) if role == "columns" else (n, n // 4)
        found[role] = "I32", rng.permutation(np.arange(size, dtype=np.int32) // (size // count))
    return found


def as_type(values, dtype: str) -> np.ndarray:
    return {"BF16": f32_to_bf16, "F16": np.float16, "F32": np.float32}[dtype](values)


class Source:
    """The part of a ModelSource that is read here."""

    interleaved_rope = False

    def __init__(self, path, arrays: dict[str, tuple[str, np.ndarray]]):
        self.path, at, places = str(path), 24, {}
        data = bytearray(at)
        for role, (type, array) in arrays.items():
            places[role] = (type, array.shape, len(data), array.nbytes)
            data += array.tobytes() + bytes(8)
        path.write_bytes(data)
        self.file = ModelFile(path)
        self.parts = {
            role: TensorInfo(
                *(role, type, shape, self.file, offset, nbytes), "g_idx" if role in ("columns", "rows") else "rows"
            )
            for role, (type, shape, offset, nbytes) in places.items()
        }

    def read(self, info, offset=0, nbytes=None):
        return self.file.read(info.offset + offset, info.nbytes - offset if nbytes is None else nbytes)

    def info(self, case: Case) -> TensorInfo:
        if case.layout == "rows":
            return self.parts["w"]._replace(name="weight")
        q = self.parts["q"]
        return TensorInfo(
            "weight", case.scheme.name, case.shape, self.file, q.offset, q.nbytes, case.layout, parts=self.parts
        )


def prepared(case: Case, path, rng, arrays=None):
    """(plan of one matrix with the weight in its last rows, the order of a head's rows or None, source)."""
    source = Source(path, arrays or stored(case, rng))
    info = source.info(case)
    cut = case.cut and ShareCut((0, case.shape[0]), case.cut)
    part = SimpleNamespace(info=info, first=case.first, cut=cut, role=SimpleNamespace(heads=case.head))
    shape = (case.first + case.shape[0], case.cut[1] - case.cut[0] if case.cut else case.shape[1])
    layout = "rows" if case.scheme.kind == "fp8" else "r16"
    matrix = SimpleNamespace(name="m", shape=shape, scheme=case.scheme, layout=layout, parts=(part,))
    config = SimpleNamespace(head_dim=case.head or 16)
    return SimpleNamespace(matrices=(matrix,), source=source, config=config, family=""), source


def reference(case: Case, source, order) -> dict[str, np.ndarray]:
    info, (n, _) = source.info(case), case.shape
    rows = None if order is None else [row // case.head * case.head + order[row % case.head] for row in range(n)]
    layout = "rows" if case.scheme.kind == "fp8" else "r16"
    taken = Rows(source, info, 0, n, rows, case.head or 1)
    planes = planes_of_rows(taken, case.scheme, layout, prepared=prepare(source, info))
    if case.cut is None:
        return planes
    return {
        name: np.ascontiguousarray(plane) for name, plane in case.scheme.cut(planes, info.shape[1], *case.cut).items()
    }


def load(case: Case, device, path, rng, run, arrays=None) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(planes that `device` made, planes that NumPy makes) of a case, from the part's first line on. run(jobs): load them."""
    plan, source = prepared(case, path, rng, arrays)
    plan.family = device.kernels
    matrix = plan.matrices[0]
    order = list(rng.permutation(case.head)) if case.head else None
    table = None
    if order is not None:
        from zse.runtime.cpu import CPUDevice

        table = Tensor(CPUDevice(1).alloc(4 * case.head), (case.head,), "i32")
        table.view()[:] = memoryview(np.array(order, np.int32)).cast("B").cast("i")
    planes = {}
    for plane in case.scheme.planes(*matrix.shape, matrix.layout):
        tensor = Tensor(device.alloc(plane.nbytes, "weights"), plane.shape, plane.dtype)
        device.write(tensor, bytes([FILLER]) * plane.nbytes)
        planes[plane.name] = tensor
    weight = Weight(matrix.shape, case.scheme, planes, matrix.layout)
    repacking = repack_load.Repacking(device, plan, table)
    assert repacking.takes(matrix.parts[0])
    parts = [(matrix.parts[0], weight)]
    run(list(repacking.jobs(*parts[0])) if device.kernels == "cpu" else repacking.steps(parts))
    repacking.finish()
    wanted = reference(case, source, order)
    got = {}
    for name, array in wanted.items():
        data, lines = np.frombuffer(device.read(planes[name]), np.uint8), len(array)
        before = len(data) - array.nbytes
        assert (data[:before] == FILLER).all(), f"{name}: rows of another part"
        got[name] = data[before:].view(array.dtype).reshape(lines, *array.shape[1:])
    return got, wanted


def check(case: Case, device, path, rng, run) -> None:
    got, wanted = load(case, device, path, rng, run)
    for name, array in wanted.items():
        np.testing.assert_array_equal(bits_of(got[name]), bits_of(array), err_msg=f"{case}: {name}")


def bits_of(array: np.ndarray) -> np.ndarray:
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])


def run_steps(device, jobs: list[LoadJob]) -> None:
    """What the loader does with steps, on a device without a loader (the emulator)."""
    import os

    left = list(jobs)
    while left:
        step = left[0].step
        while left and left[0].step is step:
            job = left.pop(0)
            data = os.pread(job.fd, job.nbytes, job.offset)
            assert len(data) == job.nbytes
            device.write(job.args["destination"], data)
        recorder = device.record()
        recorder.launch(step.symbol, Args(step.args), step.grid)
        recorder.finish().run()
