"""The sampler's kept sets, distribution and independence of rows."""

from functools import partial

import numpy as np
import pytest

from kernels.harness import each_isa, run_case
from kernels.sample_rows import check_a_row_depends_on_itself_only, check_broken_neighbours_change_nothing
from zse.kernels.sample import SAMPLE
from zse.kernels.sample_cases import add_lists, draw, kept_set, make_parameters, make_sample_case, philox, settle


def tokens_of(logits, params, isa):
    return run_case(SAMPLE, make_sample_case("test", logits, params), isa)


def test_philox_known_answers():
    # Random123's known-answer vectors for philox4x32-10 with counter and key zero: 6627e8d5 e169c58d …
    assert philox(0, 0) == (0xE169C58D6627E8D5 >> 11) * 2.0**-53


@pytest.mark.parametrize("isa", each_isa())
def test_draws_follow_the_kept_distribution(isa):
    """20,000 draws from one row: chi-square of 30 tokens below 70 (99.99 % of fair samplers), nothing outside the
    kept set."""
    rng = np.random.default_rng()
    x = (rng.standard_normal(300) * 3).astype(np.float32)
    x[10:40] += 4
    draws = 20000
    params = make_parameters(draws, temperature=0.8, top_k=30, top_p=0.97, min_p=0.001, seed=rng.integers(2**63))
    params["counter"] = np.arange(draws, dtype=np.int64)
    got = tokens_of(np.tile(x, (draws, 1)), params, isa)["tokens"]
    ids, p, _ = kept_set(x, np.float32(0.8), top_k=30, top_p=np.float32(0.97), min_p=np.float32(0.001))
    counts = np.bincount(got, minlength=300)
    assert counts[np.setdiff1d(np.arange(300), ids)].sum() == 0
    expected = p * draws
    assert ((counts[ids] - expected) ** 2 / expected).sum() < 40 + 2 * len(ids)


@pytest.mark.parametrize("isa", each_isa())
@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_k": 200, "top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 7, "top_p": 0.999},
        {"top_p": 0.05},
        {"top_n_sigma": 1.5},
        {"top_n_sigma": 3.0, "top_k": 40, "min_p": 0.001},
        {},
    ],
)
@pytest.mark.parametrize("kind", ["smooth", "ties", "flat", "peaked", "bf16"])
def test_kept_sets_are_exact(isa, values, kind):
    """Every kept token is reachable and no other is: rows that share the logits draw at the edges of the kept set."""
    rng = np.random.default_rng()
    vocab = int(rng.integers(1000, 9000))
    x = rng.standard_normal(vocab).astype(np.float32) * np.float32({"flat": 0.01, "peaked": 12}.get(kind, 3))
    if kind == "ties":
        x = np.round(x * 2) / 2
    if kind == "bf16":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    rows = 24
    logits = np.tile(x, (rows, 1))
    params = make_parameters(rows, temperature=rng.choice([0.5, 1.0, 1.7], rows), **values)
    settle(rng, logits, params)
    got = tokens_of(logits, params, isa)["tokens"]
    np.testing.assert_array_equal(got, [draw(x, r, params)[0] for r in range(rows)])


@pytest.mark.parametrize("isa", each_isa())
def test_the_deviation_of_top_n_sigma_is_that_of_the_tokens_that_are_possible(isa):
    """Masked tokens do not count: with them the deviation would be no number."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(3000) * 3).astype(np.float32)
    x[rng.random(3000) < 0.9] = -np.inf
    params = make_parameters(400, temperature=4.0, top_n_sigma=1.0, counter=np.arange(400))
    got = set(tokens_of(np.tile(x, (400, 1)), params, isa)["tokens"].tolist())
    finite = x[np.isfinite(x)]
    assert got <= set(np.flatnonzero(x >= x.max() - finite.std()).tolist()) and len(got) > 3


@pytest.mark.parametrize("isa", each_isa())
def test_a_row_depends_on_itself_only(isa):
    check_a_row_depends_on_itself_only(partial(tokens_of, isa=isa))


@pytest.mark.parametrize("isa", each_isa())
def test_broken_neighbours_change_nothing(isa):
    check_broken_neighbours_change_nothing(partial(tokens_of, isa=isa), 2000)


@pytest.mark.parametrize("isa", each_isa())
def test_penalties_and_biases_reach_the_choice(isa):
    rng = np.random.default_rng()
    rows, vocab = 8, 1500
    logits = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
    params = make_parameters(rows, repetition=1.5, presence=1.0, frequency=0.5, num_logprobs=0)
    add_lists(rng, params, rows, vocab, set(range(rows)))
    params["bias_values"][::5] = 100.0  # each row's first bias wins whatever the rest says
    got = tokens_of(logits, params, isa)
    np.testing.assert_array_equal(got["tokens"], params["bias_ids"][::5])
    np.testing.assert_array_equal(got["logits"], logits)  # restored bit for bit
