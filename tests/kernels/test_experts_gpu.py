"""Experts on a GPU with Metal's features, in the emulator with every access checked. NVIDIA's are with all operations' in
test_emulated_ops.py, HIP's in tests/kernel/test_hip.py."""

import numpy as np
import pytest
from gpu.harness import check_cases, made_by

from zse.kernel import cache
from zse.kernels.combine import COMBINE
from zse.kernels.experts import EXPERTS
from zse.kernels.route import ROUTE
from zse_emulator import EmulateDevice


@pytest.mark.parametrize("op", [ROUTE, COMBINE, EXPERTS], ids=lambda op: op.name)
def test_reference(op, kept_kernels):
    seed = int(np.random.default_rng().integers(2**32))
    cases = made_by(op, seed)
    with EmulateDevice(
        "metal3.1", cache.package_variants("metal3.1"), seed=seed, initialised=op is not EXPERTS
    ) as device:
        check_cases(op, device, seed, cases, 6)
