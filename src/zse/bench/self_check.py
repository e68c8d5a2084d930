"""Compiled CPU kernels against their NumPy references, once, when a build has made them: `python -m zse.bench.self_check` with
ZSE_NATIVE_DIR and ZSE_ISA.

A compiler that miscompiles is found before the library is installed (zse.build), in parts as in the whole; a start checks nothing, and
`zse doctor` checks what came in a wheel. Every operation runs those of its cases whose kernels are there until SECONDS_AN_OP are over, the
first in any case; outputs are poisoned before. Cases that write
quantized activations are left out: their numbers and scales are compared by the tests.
"""

import sys
import time
from collections.abc import Iterator

from zse.bench import kernels
from zse.errors import DeviceError
from zse.kernel.targets.cpu import ISAS
from zse.kernels.table import all_ops, all_variants
from zse.lazy import numpy as np
from zse.runtime.cpu import CPUDevice

SECONDS_AN_OP = 0.3
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


def main() -> int:
    """The exit code: WRONG after a line for each operation that is."""
    found = list(problems(CPUDevice(1), 1))
    for where, reason in found:
        print(f"{where}: {reason}")
    return WRONG if found else 0


if __name__ == "__main__":
    sys.exit(main())
