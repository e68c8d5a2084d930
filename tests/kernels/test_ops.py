"""Every operation against its float64 reference, on every kernel library that this machine can run."""

import numpy as np
import pytest

from tests.kernels.harness import check_case, host_isas, run_case
from zse.kernel.targets.cpu import ISAS
from zse.kernels.table import all_ops, all_variants


def test_this_machine_runs_some_kernels():
    assert host_isas(), "no kernel library fits this CPU: the kernels below were not tested"


@pytest.mark.parametrize("isa", host_isas())
@pytest.mark.parametrize("op", all_ops(), ids=lambda op: op.name)
@pytest.mark.parametrize("threads", [False, True], ids=["direct", "graph"])
def test_reference(op, isa, threads):
    """direct: blocks one by one in random order; graph: recorded and replayed by the pool's two threads."""
    rng = np.random.default_rng()          # fresh inputs in every run; the seed is in the failure's message
    seed = int(rng.integers(2**32))
    count = 0
    for case in op.cases(np.random.default_rng(seed)):
        got = run_case(op, case, isa, np.random.default_rng(seed), threads)
        try:
            check_case(op, case, got)
        except AssertionError as error:
            raise AssertionError(f"{op.name}, {isa}, seed {seed}: {error}") from None
        cost = op.cost(case)
        assert cost.bytes > 0 and cost.flops >= 0
        count += 1
    assert count


@pytest.mark.parametrize("isa", sorted(ISAS))
def test_symbols_are_unique_and_launchable(isa):
    symbols = [variant.symbol for variant in all_variants(ISAS[isa])]
    assert len(symbols) == len(set(symbols)) and symbols == sorted(symbols)
