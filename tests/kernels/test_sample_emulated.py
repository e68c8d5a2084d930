"""The GPU sampler's kept sets in the emulator: a fifth of what tests/gpu/test_sample.py checks on a GPU, in small."""

import pytest

from kernels.kept_sets import KINDS, LIMITS, check_kept_sets
from zse_emulator import EmulateDevice


@pytest.mark.parametrize("number", range(14))
def test_kept_sets_are_exact(number, kept_kernels):
    with EmulateDevice() as gpu:
        check_kept_sets(LIMITS[(number * 5 + number // 2) % len(LIMITS)], KINDS[number % len(KINDS)], gpu, 3, 9000)
