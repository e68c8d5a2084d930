"""Every operation's GPU form in the emulator: against the float64 reference, in a random order of threads, with every access checked.

The cases of a run are a random choice that fits the time; ZSE_EMULATE_SECONDS (for each operation and architecture) takes more."""

import os
import time

import numpy as np
import pytest
from gpu.harness import check_case, gpu_ops, run_case

from zse import kernel as zl
from zse.kernel import cache
from zse.runtime.args import Args
from zse.runtime.device import Recorder
from zse_emulator import EmulateDevice

SECONDS = float(os.environ.get("ZSE_EMULATE_SECONDS", "4"))
# Operations that read shared memory which nothing has written, and do not use what they read: a used value would be NaN.
UNUSED_READS = {"matmul": "the offsets that symmetric weights do not have"}


# Kernels whose results a later one reads before its grid_wait(), because in a model others stand between the two.
BEFORE_OTHERS = ("attention_plan",)


@zl.kernel
def bystander():
    zl.grid_wait()
    zl.grid_launch_dependents()


class Spaced(EmulateDevice):
    """With a kernel after each of BEFORE_OTHERS, as in a model's graph."""

    def __init__(self, like: str, **options):
        super().__init__(
            like,
            cache.package_variants(like) | {"bystander": zl.Variant("bystander", bystander, threads=32)},
            **options,
        )

    def record(self) -> Recorder:
        recorder = super().record()
        plain = recorder.launch

        def launch(symbol, *args, **options):
            plain(symbol, *args, **options)
            if symbol in BEFORE_OTHERS:
                plain("bystander", Args(), 1)

        recorder.launch = launch
        return recorder


@pytest.mark.parametrize("like", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("op", gpu_ops(), ids=lambda op: op.name)
def test_reference(op, like, kept_kernels):
    seed = int(np.random.default_rng().integers(2**32))
    rng = np.random.default_rng(seed)
    with Spaced(like, seed=seed, initialised=op.name not in UNUSED_READS) as device:
        cases = list(op.cases(np.random.default_rng(seed), "gpu"))
        end = time.monotonic() + SECONDS
        for count, number in enumerate(rng.permutation(len(cases))):
            if count >= 2 and time.monotonic() > end:
                break
            try:
                check_case(op, cases[number], run_case(op, cases[number], device))
            except Exception as error:
                raise AssertionError(
                    f"{op.name}, {like}, seed {seed}, {cases[number].name}: {type(error).__name__}: {error}"
                ) from error


def test_more_tiles_than_multiprocessors_have_counters(kept_kernels):
    """Parts of tiles among the last of many: counted within the counters' memory."""
    from zse.kernels.gpu.gemm_cases import MANY_TILES, make_case
    from zse.kernels.table import all_ops
    from zse.quant.scheme import DenseScheme

    matmul = next(op for op in all_ops() if op.name == "matmul")
    with EmulateDevice("sm_90a", cache.package_variants("sm_90a"), initialised=False) as device:
        case = make_case(np.random.default_rng(), DenseScheme("bf16"), "store", *MANY_TILES)
        check_case(matmul, case, run_case(matmul, case, device))
