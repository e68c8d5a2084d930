"""Runs Ops on host arrays: every kernel compiled for one ISA level, every launch executed at once, block by block."""

import ctypes
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from kernel.compiled import host_isas

from zse import trust
from zse.build import build
from zse.kernels.op import HostActivation, HostArray
from zse.runtime import native
from zse.runtime.args import Args, slots_of
from zse.runtime.cpu import CPUDevice
from zse.tensor import Activation, Tensor, Weight

DTYPES = {
    "float32": "f32",
    "float16": "f16",
    "int32": "i32",
    "int8": "i8",
    "uint8": "u8",
    "uint16": "bf16",
    "int64": "i64",
    "uint64": "u64",
    "uint32": "u32",
    "float64": "f64",
}


def each_isa() -> list:
    """Parameters of a test of every level that this machine can run: kernels of its best one, which are those that it serves with, are
    built before; those of the others, a minute of two cores, are left to `make test-rest`."""
    *others, best = host_isas() or [None]
    return [pytest.param(name, marks=pytest.mark.exhaustive("kernels of lower CPU levels")) for name in others] + [
        best
    ] * bool(best)


@cache
def library(isa: str) -> tuple[Path, dict]:
    """(file, manifest) of an ISA level's kernel library as the package's build makes it. The best level is compiled first if it is
    stale; another one by tests/prepare.py alone: in a test of `make test` it was compiled unseen, 129 s beside two other processes."""
    folder = Path(native.native_dir())
    if isa in host_isas()[-1:]:
        folder = build(isas=[isa], quiet=True)
    else:
        is_made = (folder / f"{isa}.json").exists() and not trust.has_newer_sources(str(folder / f"{isa}.json"))
        assert is_made, f"the kernels of {isa} are not compiled, or old: run `python tests/prepare.py --rest`"
    return folder / f"libzse_kernels_{isa}.so", json.loads((folder / f"{isa}.json").read_text())["kernels"]


@cache
def cpu_device(isa: str) -> CPUDevice:
    """The real device with two threads and one ISA level's kernels."""
    path, manifest = library(isa)
    return CPUDevice(threads=2, library=str(path), manifest=manifest)


class HostBuffer:
    """An array as a device buffer."""

    freed = False

    def pin(self, count: int) -> None:
        pass

    def __init__(self, array: np.ndarray):
        self.array, self.address, self.nbytes = array, array.ctypes.data, array.nbytes


class DirectRecorder:
    """Stands for a Recorder: launches run at once, their blocks in `order` (a permutation shows hidden
    dependencies)."""

    def __init__(self, isa: str, rng=None):
        path, self.manifest = library(isa)
        self.library, self.rng, self.device = ctypes.CDLL(str(path)), rng, cpu_device(isa)

    def launch(self, symbol, args, grid, independent=False):
        params = self.manifest[symbol]["params"]
        assert isinstance(args, Args)
        for name, kind in params:
            assert kind != "ptr" or not isinstance(args[name], int) or args[name] == 0, f"{symbol}: {name} is a number"
        slots = (ctypes.c_uint64 * len(args))(*slots_of(symbol, params, args)[0])
        dims = (ctypes.c_int64 * 3)(*(list(grid) + [1, 1])[:3])
        function = getattr(self.library, symbol)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        function.restype = None
        blocks = int(np.prod(list(dims)))
        if self.rng is None:
            function(slots, dims, 0, blocks)
        else:
            for block in self.rng.permutation(blocks):
                function(slots, dims, int(block), int(block) + 1)


def to_tensor(value, place=np.ascontiguousarray):
    """A host value of a Case as the launcher's argument. place: array → the one that kernels are given."""
    if isinstance(value, np.ndarray):
        array = place(value)
        return Tensor(HostBuffer(array), array.shape, DTYPES[str(array.dtype)])
    if isinstance(value, HostArray):
        return to_tensor(value.array, place)._replace(dtype=value.dtype)
    if isinstance(value, HostActivation):
        return Activation(
            to_tensor(value.q, place),
            to_tensor(value.scale, place),
            to_tensor(value.sum, place),
            None if value.low is None else to_tensor(value.low, place),
        )
    if hasattr(value, "planes"):
        return Weight(
            value.shape, value.scheme, {name: to_tensor(plane, place) for name, plane in value.planes.items()}
        )
    if isinstance(value, tuple):
        parts = [to_tensor(part, place) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def join_fields(tensors: dict) -> dict:
    """Arguments where an output called "history.tokens" is the field `tokens` of the argument `history`."""
    joined = {name: value for name, value in tensors.items() if "." not in name}
    for name in tensors.keys() - joined.keys():
        owner, field = name.split(".")
        joined[owner] = joined[owner]._replace(**{field: tensors[name]})
    return joined


def poisoned(shape, dtype):
    array = np.empty(shape, dtype)
    array.fill(np.nan if np.issubdtype(array.dtype, np.floating) else np.iinfo(array.dtype).min)
    return array


def poisoned_outputs(case, place=np.ascontiguousarray) -> dict:
    """Outputs by name: arrays, or HostActivations of int8 outputs."""
    results = {}
    for name, output in case.outputs.items():
        if output.int8:
            rows, width = output.shape
            results[name] = HostActivation(
                output.shape,
                place(poisoned((rows, width), np.int8)),
                *(place(poisoned((rows, width // 32), np.float32)) for _ in range(2)),
                place(poisoned((rows, width), np.int8)) if output.dtype == "int16" else None,
            )
        else:
            results[name] = place(poisoned(output.shape, output.dtype) if output.inout is None else output.inout.copy())
    return results


def output_tensors(case, results: dict, place=np.ascontiguousarray) -> dict:
    """The results as the launcher's arguments."""
    tensors = {name: to_tensor(value, place) for name, value in results.items()}
    for name, output in case.outputs.items():
        if output.dtype == "e4m3":
            tensors[name] = tensors[name]._replace(dtype="e4m3")
    return tensors


def run_case(op, case, isa, rng=None, threads: bool = False) -> dict:
    """Launch once; outputs by name: arrays, or HostActivations of int8 outputs. threads: on the real device, as a
    graph."""
    results = poisoned_outputs(case)
    tensors = {name: to_tensor(value) for name, value in case.inputs.items()}
    tensors = join_fields(tensors | output_tensors(case, results))
    if threads:
        cpu_device(isa).run(lambda recorder: op.launch(recorder, **tensors, **case.options))
    else:
        op.launch(DirectRecorder(isa, rng), **tensors, **case.options)
    return results


def check_case(op, case, got: dict) -> None:
    """Compare with the reference within every output's tolerance."""
    initial = {name: output.inout for name, output in case.outputs.items() if "." not in name}
    expected = op.reference(
        **case.inputs,
        **{name: value for name, value in initial.items() if value is not None},
        **{name: value for name, value in case.options.items() if name not in case.outputs},
    )
    for name, output in case.outputs.items():
        if output.int8:
            check_int8(
                got[name], np.asarray(expected[name], np.float64), output.tolerance.relative, f"{case.name}: {name}"
            )
            continue
        wanted = np.asarray(expected[name])
        if output.error:
            problem = output.error(got[name], wanted=wanted)
            assert not problem, f"{case.name}: {name}: {problem}"
        elif output.tolerance.absolute == output.tolerance.relative == 0:
            np.testing.assert_array_equal(got[name], wanted, err_msg=f"{case.name}: {name}")
        else:
            np.testing.assert_allclose(
                got[name].astype(np.float64),
                wanted,
                rtol=output.tolerance.relative,
                atol=output.tolerance.absolute,
                err_msg=f"{case.name}: {name}",
            )


def check_int8(got, values, slack, what) -> None:
    """scale = largest magnitude / 127, q within half a step (+ slack * 127 steps) of value / scale, sum = scale * sum
    of q. int16: what q leaves within a step of scale / 256 (a half, but for the ends), and in the sum."""
    groups = values.reshape(len(values), -1, 32)
    peak = np.abs(groups).max(axis=2)
    np.testing.assert_allclose(got.scale, peak / 127, rtol=slack * 4 + 1e-6, atol=1e-38, err_msg=f"{what}: scale")
    q = got.q.reshape(groups.shape).astype(np.float64)
    scale = got.scale.astype(np.float64)[:, :, None]
    assert (np.abs(q * scale - groups) <= scale * (0.5 + 127 * slack * 4) + 1e-38).all(), f"{what}: q"
    assert np.abs(q).max() <= 127, f"{what}: q = -128"
    if got.low is not None:
        assert got.low.min() >= -127, f"{what}: low = -128"
        q = q + got.low.reshape(groups.shape).astype(np.float64) / 256
        assert (np.abs(q * scale - groups) <= scale * (1 / 256 + 127 * slack * 4) + 1e-38).all(), f"{what}: low"
    np.testing.assert_allclose(
        got.sum, (scale * q.sum(axis=2, keepdims=True))[:, :, 0], rtol=1e-6, atol=1e-38, err_msg=f"{what}: sum"
    )
