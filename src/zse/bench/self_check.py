"""Compiled kernels against their NumPy references, once, when a build has made them: those of a CPU by `python -m
zse.bench.self_check` with ZSE_NATIVE_DIR and ZSE_ISA, a GPU's by `zse kernels build` and `zse kernels check` (compare).

A compiler that miscompiles is found before the library is installed (zse.build), in parts as in the whole; a start
checks nothing, and `zse doctor` checks what came in a wheel. Every operation runs those of its cases whose kernels are
there until SECONDS_AN_OP are over, the first in any case; outputs are poisoned before. Cases that write quantized
activations are left out: their numbers and scales are compared by the tests. A GPU's operations run all of their cases
whose kernels are compiled, for GPU_SECONDS_AN_OP; what came of it is kept beside the cubins by their hash
(kernel/cache.py: compared)."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from zse.bench import kernels
from zse.errors import CompileError, DeviceError, DeviceLost, DeviceMemoryError
from zse.kernel.targets.cpu import ISAS
from zse.kernels.table import all_ops, all_variants
from zse.lazy import numpy as np
from zse.runtime.cpu import CPUDevice

SECONDS_AN_OP = 0.3
GPU_SECONDS_AN_OP = 0.3
OTHERS = 16  # seeds that are looked through for a case
LOOKING_S = 2.0  # for a case that a part's kernels can run
WRONG = 4  # exit code


def problems(device: CPUDevice, seed: int) -> Iterator[tuple[str, str]]:
    """("operation, case", what is wrong) of each case that is."""
    target, compiled = ISAS[device.isa], device._manifest
    lacks = any(variant.symbol not in compiled for variant in all_variants(target))
    for op in all_ops():
        # An operation without kernels of its own uses those of others.
        if lacks and all(variant.symbol not in compiled for variant in op.variants_for(target)):
            continue
        start, num_run = time.monotonic(), 0
        for case in kernels.cases_of(op, device, np.random.default_rng(seed)):
            if any(output.int8 or output.fp8 for output in case.outputs.values()):
                continue
            try:
                reason = kernels.problem(device, op, case)
                num_run += 1
            except DeviceError:  # it takes a kernel of another part
                if not lacks:
                    raise
                reason = ""
            if reason:
                yield f"{op.name}, {case.name}", reason
                break
            if time.monotonic() - start > (SECONDS_AN_OP if num_run else LOOKING_S):
                break


class Compared(NamedTuple):
    """A case that ran. symbols: its kernels; reason: what is wrong with its results, "" for nothing."""

    op: str
    case: str
    symbols: frozenset[str]
    reason: str


def compare(device: Any, ops: Iterable[Any], seed: int) -> Iterator[Compared]:
    """The operations' cases on a GPU. A wrong one runs again with other inputs, and counts where it is wrong again.
    Ends after a kernel that the driver does not recover from; DeviceMemoryError where memory is short."""
    for op in ops:
        start = time.monotonic()
        for case in kernels.cases_of(op, device, np.random.default_rng(seed)):
            if any(output.int8 or output.fp8 for output in case.outputs.values()):
                continue
            launched: set[str] = set()
            reason = _reason(device, op, case, launched)
            if reason and not reason.startswith(DeviceLost.__name__):
                reason = _reason(device, op, _with_other_inputs(device, op, case, seed), launched)
            if launched:
                yield Compared(op.name, case.name, frozenset(launched), reason)
            if reason.startswith(DeviceLost.__name__):
                return
            if time.monotonic() - start > GPU_SECONDS_AN_OP:
                break


def _with_other_inputs(device: Any, op: Any, case: Any, seed: int) -> Any:
    """The case of this name with other numbers: the shapes that name it are drawn, too, and come again in some of OTHERS
    seeds; itself where they do not."""
    for other in range(seed + 1, seed + 1 + OTHERS):
        for one in kernels.cases_of(op, device, np.random.default_rng(other)):
            if one.name == case.name:
                return one
    return case


def _reason(device: Any, op: Any, case: Any, launched: set[str]) -> str:
    """launched stays empty where the case cannot run: a kernel of it is not compiled, or needs more than this GPU
    has."""
    try:
        return kernels.problem(device, op, case, launched=launched)
    except CompileError:
        return ""
    except DeviceMemoryError:
        raise
    except DeviceError as error:
        return f"{type(error).__name__}: {error}" if launched else ""


def main() -> int:
    """The exit code: WRONG after a line for each operation that is."""
    found = list(problems(CPUDevice(1), 1))
    for where, reason in found:
        print(f"{where}: {reason}")
    return WRONG if found else 0


if __name__ == "__main__":
    sys.exit(main())
