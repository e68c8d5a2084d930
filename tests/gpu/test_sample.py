"""The GPU sampler's kept sets, distribution, independence of rows; the same draws as the CPU's."""

import numpy as np
import pytest
from kernels.harness import host_isas
from kernels.harness import run_case as run_on_cpu

from gpu.harness import device, run_case
from zse.kernels.sample import SAMPLE
from zse.kernels.sample_cases import add_lists, draw, kept_set, make_parameters, make_sample_case, settle
from zse.runtime.emulate import EmulateDevice

GPU, REASON = device()
needs_gpu = pytest.mark.skipif(GPU is None, reason=REASON)

LIMITS = [
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_k": 200, "top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 7, "top_p": 0.999},
    {"top_p": 0.05},
    {"min_p": 0.01, "top_k": 900, "top_p": 0.9},
    {"top_k": 3000},
    {"top_p": 0.9999},
    {},
]
KINDS = ["smooth", "ties", "flat", "peaked", "bf16", "two values", "masked"]


def sampled(logits, params, gpu=None):
    return run_case(SAMPLE, make_sample_case("test", logits, params, np.random.default_rng(0)), gpu or GPU)


def logits_of(kind, rng, vocab):
    x = rng.standard_normal(vocab).astype(np.float32) * np.float32({"flat": 0.01, "peaked": 12}.get(kind, 3))
    if kind == "ties":
        x = np.round(x * 2) / 2
    if kind == "bf16":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    if kind == "two values":
        x = np.where(x > 0, np.float32(1.25), np.float32(-0.5))
    if kind == "masked":
        x[rng.random(vocab) < 0.9] = -np.inf
    return x


@needs_gpu
@pytest.mark.parametrize("values", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_sets_are_exact(values, kind):
    """Every kept token is reachable and no other is: rows that share the logits draw at the edges of the kept set.
    More than 512 equal or near logits, and chunks without any, take their own ways through the kernel."""
    check_kept_sets(values, kind, GPU, 24, 30000)


@pytest.mark.parametrize("number", range(14))
def test_kept_sets_are_exact_in_the_emulator(number, request, monkeypatch):
    """A fifth of the same, in small."""
    monkeypatch.setenv("ZSE_HOME", str(request.config.cache.mkdir("zse_home")))
    with EmulateDevice() as gpu:
        check_kept_sets(LIMITS[(number * 5 + number // 2) % len(LIMITS)], KINDS[number % len(KINDS)], gpu, 3, 9000)


def check_kept_sets(values, kind, gpu, rows, most):
    rng = np.random.default_rng()
    vocab = int(rng.integers(1000, most))
    x = logits_of(kind, rng, vocab)
    logits = np.tile(x, (rows, 1))
    params = make_parameters(rows, temperature=rng.choice([0.5, 1.0, 1.7], rows), **values)
    settle(rng, logits, params, 1e-5)
    got = sampled(logits, params, gpu)["tokens"]
    np.testing.assert_array_equal(got, [draw(x, r, params)[0] for r in range(rows)])


@needs_gpu
def test_draws_follow_the_kept_distribution():
    """4,000 draws from one row: chi-square, nothing outside the kept set."""
    rng = np.random.default_rng()
    x = (rng.standard_normal(5000) * 3).astype(np.float32)
    x[1000:1040] += 8
    draws = 4000
    params = make_parameters(draws, temperature=0.8, top_k=30, top_p=0.97, min_p=0.001, seed=rng.integers(2**63))
    params["counter"] = np.arange(draws, dtype=np.int64)
    got = sampled(np.tile(x, (draws, 1)), params)["tokens"]
    ids, p, _ = kept_set(x, np.float32(0.8), 30, np.float32(0.97), np.float32(0.001))
    counts = np.bincount(got, minlength=len(x))
    assert counts[np.setdiff1d(np.arange(len(x)), ids)].sum() == 0
    expected = p * draws
    assert ((counts[ids] - expected) ** 2 / expected).sum() < 40 + 2 * len(ids)


@needs_gpu
def test_a_row_depends_on_itself_only():
    rng = np.random.default_rng()
    rows, vocab = 6, 9001
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    params = make_parameters(
        rows,
        temperature=1.2,
        top_p=[1, 0.9, 1, 0.5, 1, 1],
        top_k=[0, 0, 9, 20, 0, 0],
        num_logprobs=3,
        repetition=1.1,
        seed=np.arange(rows),
        counter=7,
    )
    together = sampled(logits, params)
    for r in range(rows):
        alone = {name: value[r : r + 1] for name, value in params.items() if len(value) == rows}
        single = sampled(logits[r : r + 1], make_parameters(1) | alone)
        for name in ("tokens", "logprob", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(single[name][0], together[name][r])


@needs_gpu
def test_broken_neighbours_change_nothing():
    rng = np.random.default_rng()
    logits = (rng.standard_normal((3, 20000)) * 3).astype(np.float32)
    params = make_parameters(3, temperature=[1, 0, 1], num_logprobs=2, seed=5, counter=[1, 2, 3])
    clean = sampled(logits, params)
    logits[1, 7777] = np.nan
    broken = sampled(logits, params)
    assert broken["status"].tolist() == [0, 1, 0]
    assert 0 <= broken["tokens"][1] < 20000
    for name in ("tokens", "logprob", "top_ids"):
        np.testing.assert_array_equal(clean[name][[0, 2]], broken[name][[0, 2]])


@needs_gpu
def test_penalties_and_biases_reach_the_choice():
    rng = np.random.default_rng()
    rows, vocab = 8, 15000
    logits = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
    params = make_parameters(rows, repetition=1.5, presence=1.0, frequency=0.5, num_logprobs=0)
    add_lists(rng, params, rows, vocab, set(range(rows)))
    params["bias_values"][::5] = 100.0  # each row's first bias wins whatever the rest says
    got = sampled(logits, params)
    np.testing.assert_array_equal(got["tokens"], params["bias_ids"][::5])


@needs_gpu
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
    on_cpu = run_on_cpu(SAMPLE, make_sample_case("test", logits, params), host_isas()[0])
    np.testing.assert_array_equal(sampled(logits, params)["tokens"], on_cpu["tokens"])
