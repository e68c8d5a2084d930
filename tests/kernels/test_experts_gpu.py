"""Experts on GPUs without matrix instructions in the language (HIP, Metal), in the emulator. NVIDIA's are with all operations' in
test_emulated_ops.py."""

import numpy as np
import pytest
from gpu.harness import check_cases

from zse.kernel import cache
from zse.kernels.combine import COMBINE
from zse.kernels.experts import EXPERTS
from zse.kernels.route import ROUTE
from zse_emulator import EmulateDevice


@pytest.mark.parametrize("like", ["gfx90a", "metal3.1"])
@pytest.mark.parametrize("op", [ROUTE, COMBINE, EXPERTS], ids=lambda op: op.name)
def test_reference(op, like, kept_kernels):
    seed = int(np.random.default_rng().integers(2**32))
    cases = list(op.cases(np.random.default_rng(seed), "gpu"))
    with EmulateDevice(like, cache.package_variants(like), seed=seed, initialised=op is not EXPERTS) as device:
        check_cases(op, device, seed, cases, 6)
