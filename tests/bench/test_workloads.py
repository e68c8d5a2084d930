"""The table of workloads: who asks for what, and when, follows from the seed alone."""

import random

import pytest

from zse.bench import workloads
from zse.bench.workloads import WORKLOADS, make_requests, runs, select
from zse.errors import ConfigError, UnsupportedError

PLAIN = [name for name, workload in WORKLOADS.items() if not workload.rates]


@pytest.mark.parametrize("name", PLAIN)
def test_equal_seeds_give_equal_requests(name):
    first, again = make_requests(WORKLOADS[name], 7), make_requests(WORKLOADS[name], 7)
    assert first == again
    assert len(first[0]) == WORKLOADS[name].warm_up and len(first[1]) == WORKLOADS[name].requests
    other = make_requests(WORKLOADS[name], 8)
    assert [each.prompt for each in first[1]] != [each.prompt for each in other[1]]
    prompts = [each.prompt for each in first[0] + first[1]]
    assert len(set(prompts)) == len(prompts), "equal prompts would share the prefix cache"


def test_lengths_and_arrivals_are_infers():
    """Their generators, written out: one stream of seed 42, the first two requests are the warm-up."""
    rng = random.Random(42)
    want = [(rng.randint(64, 512), rng.randint(64, 256), rng.randint(0, 2**31))[:2] for _ in range(34)]
    warm_up, got = make_requests(WORKLOADS["continuous_batching"])
    assert [(each.prompt_tokens, each.output_tokens) for each in warm_up + got] == want
    assert [each.at_s for each in got] == pytest.approx([index / 4 for index in range(32)])

    rng, times, now = random.Random(42), [], 0.0
    for _ in range(50):
        times.append(now)
        now += rng.expovariate(6.0)
    want = []
    for _ in range(50):
        prompt = rng.randint(1024, 2048) if rng.random() < 0.75 else rng.randint(64, 128)
        want.append((prompt, rng.randint(64, 256), rng.randint(0, 2**31))[:2])
    warm_up, got = make_requests(WORKLOADS["chunked_prefill"])
    assert [(each.prompt_tokens, each.output_tokens) for each in warm_up + got] == want
    assert [each.at_s for each in got] == pytest.approx([time - times[2] for time in times[2:]])

    rng = random.Random(42)
    want = [1024 + (rng.randint(32, 128), rng.randint(0, 2**31))[0] for _ in range(50)]
    warm_up, got = make_requests(WORKLOADS["prefix_caching"])
    assert [each.prompt_tokens for each in warm_up + got] == want and {each.output_tokens for each in got} == {256}
    assert got[9].at_s == pytest.approx(9 / 8)


def test_sequential_and_burst():
    baseline = make_requests(WORKLOADS["baseline"])[1]
    assert {(each.at_s, each.prompt_tokens, each.output_tokens) for each in baseline} == {(None, 256, 256)}
    burst = make_requests(WORKLOADS["paged_attention"])[1]
    assert {each.at_s for each in burst} == {0.0} and len(burst) == 48
    shapes = [(each.requests, each.prompt[0], each.output[0]) for each in workloads.ZEDINFER[:5]]
    assert shapes == [(5, 32, 256), (5, 128, 128), (5, 512, 64), (3, 2048, 128), (10, 16, 32)]


def test_poisson_arrivals_have_their_rate():
    workload = runs(WORKLOADS["qps_sweep"], [50.0])[0]
    times = workloads.arrivals(workload, 20001, random.Random(1))
    gaps = [after - before for before, after in zip(times, times[1:])]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)  # 3 standard errors are 0.021
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.06)


def test_the_share_of_long_prompts():
    tokens = [each.prompt_tokens for seed in range(40) for each in make_requests(WORKLOADS["chunked_prefill"], seed)[1]]
    long = sum(count >= 1024 for count in tokens) / len(tokens)
    assert 0.71 < long < 0.79 and all(64 <= count <= 128 or 1024 <= count <= 2048 for count in tokens)


def test_prompts_have_their_length_and_the_shared_prefix():
    _, text = make_requests(WORKLOADS["prefix_caching"])
    assert [len(each.prompt.split()) for each in text] == [each.prompt_tokens for each in text]
    heads = {" ".join(each.prompt.split()[:1024]) for each in text}
    assert len(heads) == 1 and len({each.prompt.split()[1024] for each in text}) > 1
    _, ids = make_requests(WORKLOADS["prefix_caching"], vocab_size=2000)
    assert [each.prompt_tokens for each in ids] == [len(each.prompt) for each in ids]
    assert len({tuple(each.prompt[:1024]) for each in ids}) == 1
    assert all(100 <= token < 2000 for each in ids for token in each.prompt)
    assert [each.at_s for each in ids] == [each.at_s for each in text]


def test_scale_multiplies_counts_and_lengths_and_leaves_the_rate():
    _, whole = make_requests(WORKLOADS["chunked_prefill"])
    _, part = make_requests(WORKLOADS["chunked_prefill"], scale=0.25)
    assert len(part) == 12
    for small, large in zip(part, whole):
        assert small.prompt_tokens == round(large.prompt_tokens / 4) == len(small.prompt.split())
        assert small.output_tokens == round(large.output_tokens / 4) and small.at_s == large.at_s
    least = make_requests(WORKLOADS["zedinfer_e"], scale=0.01)[1]
    assert len(least) == 2 and least[0].prompt_tokens == least[0].output_tokens == 4


def test_names_groups_and_sweeps():
    assert [each.name for each in select(["infer", "baseline", "zedinfer_e"])] == [
        *workloads.GROUPS["infer"],
        "zedinfer_e",
    ]
    assert len(select(["all"])) == len(WORKLOADS) == 16
    with pytest.raises(UnsupportedError, match="'basline' is not supported; supported: infer, zedinfer, all, baseline"):
        select(["basline"])
    assert [(each.name, each.rate) for each in runs(WORKLOADS["qps_sweep"])][:2] == [
        ("qps_sweep@1", 1),
        ("qps_sweep@2", 2),
    ]
    assert [each.name for each in runs(WORKLOADS["qps_sweep"], [0.5])] == ["qps_sweep@0.5"]
    with pytest.raises(ConfigError, match="is a sweep"):
        make_requests(WORKLOADS["qps_sweep"])
    with pytest.raises(ConfigError, match="too small"):
        make_requests(WORKLOADS["baseline"], vocab_size=150)
