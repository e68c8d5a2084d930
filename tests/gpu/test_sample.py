"""The GPU sampler's kept sets, distribution, independence of rows; the same draws as the CPU's."""

from functools import partial

import numpy as np
import pytest
from kernels.harness import host_isas
from kernels.harness import run_case as run_on_cpu
from kernels.kept_sets import KINDS, LIMITS, check_kept_sets, sampled_on
from kernels.sample_rows import check_a_row_depends_on_itself_only, check_broken_neighbours_change_nothing

from gpu.harness import device
from zse.kernels.sample import SAMPLE
from zse.kernels.sample_cases import add_lists, kept_set, make_parameters, make_sample_case, settle

GPU = device()
sampled = partial(sampled_on, GPU)


@pytest.mark.parametrize("values", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_sets_are_exact(values, kind):
    """Every kept token is reachable and no other is: rows that share the logits draw at the edges of the kept set.
    More than 512 equal or near logits, and chunks without any, take their own ways through the kernel."""
    check_kept_sets(values, kind, GPU, 24, 30000)


def test_draws_follow_the_kept_distribution():
    """4,000 draws from one row: chi-square, nothing outside the kept set."""
    rng = np.random.default_rng()
    x = (rng.standard_normal(5000) * 3).astype(np.float32)
    x[1000:1040] += 8
    draws = 4000
    params = make_parameters(draws, temperature=0.8, top_k=30, top_p=0.97, min_p=0.001, seed=rng.integers(2**63))
    params["counter"] = np.arange(draws, dtype=np.int64)
    got = sampled(np.tile(x, (draws, 1)), params)["tokens"]
    ids, p, _ = kept_set(x, np.float32(0.8), top_k=30, top_p=np.float32(0.97), min_p=np.float32(0.001))
    counts = np.bincount(got, minlength=len(x))
    assert counts[np.setdiff1d(np.arange(len(x)), ids)].sum() == 0
    expected = p * draws
    assert ((counts[ids] - expected) ** 2 / expected).sum() < 40 + 2 * len(ids)


def test_a_row_depends_on_itself_only():
    check_a_row_depends_on_itself_only(sampled)


def test_broken_neighbours_change_nothing():
    check_broken_neighbours_change_nothing(sampled, 20000)


def test_penalties_and_biases_reach_the_choice():
    rng = np.random.default_rng()
    rows, vocab = 8, 15000
    logits = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
    params = make_parameters(rows, repetition=1.5, presence=1.0, frequency=0.5, num_logprobs=0)
    add_lists(rng, params, rows, vocab, set(range(rows)))
    params["bias_values"][::5] = 100.0  # each row's first bias wins whatever the rest says
    got = sampled(logits, params)
    np.testing.assert_array_equal(got["tokens"], params["bias_ids"][::5])


@pytest.mark.skipif(not host_isas(), reason="no CPU kernels for this machine")
def test_same_draws_as_the_cpu():
    rng = np.random.default_rng()
    rows, vocab = 40, 12000
    logits = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
    params = make_parameters(
        rows,
        temperature=rng.choice([0.0, 0.7, 1.0], rows),
        top_k=rng.choice([0, 5, 500], rows),
        top_p=rng.choice([1, 0.9], rows),
        min_p=rng.choice([0, 0.01], rows),
    )
    settle(rng, logits, params, 1e-5)
    on_cpu = run_on_cpu(SAMPLE, make_sample_case("test", logits, params), host_isas()[-1])
    np.testing.assert_array_equal(sampled(logits, params)["tokens"], on_cpu["tokens"])
