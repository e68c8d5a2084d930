"""Every operation's GPU form in the emulator: against the float64 reference, in a random order of threads, with every access checked.

Where an operation has many cases, a run of `make test` is a random choice of them, and `make test-all` runs them all."""

import itertools

import numpy as np
import pytest
from gpu.harness import PARTS, SOME, check_case, check_cases, gpu_ops, made_by, run_case

from zse import kernel as zl
from zse.kernel import cache
from zse.kernel.emit import gpu_target
from zse.kernels.op import HostFp8Activation
from zse.runtime.args import Args
from zse.runtime.device import Recorder
from zse_emulator import EmulateDevice

MANY = (
    "add_rmsnorm",
    "attention",
    "conv",
    "delta",
    "experts",
    "latent_attention",
    "matmul",
    "one_token",
)  # of which `make test` runs SOME cases
LIKE = "sm_90a", "sm_80"
# Operations that read shared memory which nothing has written, and do not use what they read: a used value would be NaN.
UNUSED_READS = dict.fromkeys(("matmul", "experts", "one_token"), "the offsets that symmetric weights do not have")


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


def has_own_kernels(op, like: str) -> bool:
    """Whether the operation has kernels for an architecture that the first one has not."""
    first, own = ({variant.symbol for variant in op.gpu_variants(gpu_target(arch))} for arch in (LIKE[0], like))
    return like == LIKE[0] or not own <= first


def parts_of():
    """Operation, architecture, how many cases by chance (0: all), part of them. Of a second architecture `make test` runs the operations that
    have kernels of their own there; an operation without kernels for it, as `chain` has for Hopper alone, has no test of it."""
    for op, like in itertools.product(gpu_ops(), LIKE):
        if not op.gpu_variants(gpu_target(like)):
            continue
        if has_own_kernels(op, like):
            some, marks = (SOME, pytest.mark.long) if op.name in MANY else (0, ())
            yield pytest.param(op, like, some, (0, 1), id=f"{op.name}-{like}", marks=marks)
        elif op.name not in MANY:
            marks = pytest.mark.exhaustive("kernels of a second architecture")
            yield pytest.param(op, like, 0, (0, 1), id=f"{op.name}-{like}", marks=marks)
        parts = PARTS.get(op.name, 1) if op.name in MANY else 0
        for number in range(parts):
            marks = pytest.mark.exhaustive, pytest.mark.long
            yield pytest.param(op, like, 0, (number, parts), id=f"{op.name}-all-{number}-{like}", marks=marks)


@pytest.mark.parametrize(("op", "like", "most", "part"), list(parts_of()))
def test_reference(op, like, most, part, kept_kernels):
    seed = int(np.random.default_rng().integers(2**32))
    cases = made_by(op, seed)
    assert op.name not in MANY or len(cases) > 2 * SOME
    with Spaced(like, seed=seed, initialised=op.name not in UNUSED_READS) as device:
        # Other architectures have no tensor cores for fp8 activations: a planner never makes them there.
        check_cases(
            op,
            device,
            seed,
            cases,
            most,
            part,
            lambda case: like == "sm_90a" or not isinstance(case.inputs.get("a"), HostFp8Activation),
        )


def test_more_tiles_than_multiprocessors_have_counters(kept_kernels):
    """Parts of tiles among the last of many: counted within the counters' memory."""
    from zse.kernels.gpu.matmul_cases import MANY_TILES, make_case
    from zse.kernels.table import all_ops
    from zse.quant.scheme import DenseScheme

    matmul = next(op for op in all_ops() if op.name == "matmul")
    with EmulateDevice("sm_90a", cache.package_variants("sm_90a"), initialised=False) as device:
        case = make_case(np.random.default_rng(), DenseScheme("bf16"), "store", *MANY_TILES)
        check_case(matmul, case, run_case(matmul, case, device))
