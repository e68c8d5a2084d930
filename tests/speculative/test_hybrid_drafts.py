"""Drafts of models with recurrent layers: what was wrong is taken back from states, which the next step may have to build again."""

import random

import pytest
import tiny_families
from oracle import Oracle
from test_draft_model import always
from test_verify import params
from tiny_engines import TinyEngines

from zse.scheduler.batch import MOST_AGAIN

COUNT = 4
FAMILIES = ("lfm2", "qwen3_next", "qwen3_5", "granite_hybrid", "nemotron_h")
CONTEXT = 128


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family → the folder of a tiny model."""
    return {family: tiny_families.write(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture
def engines(folders, request):
    options = dict(max_context=CONTEXT, max_rows=4, draft_tokens=COUNT, kv_dtype="f32", state_interval=24)
    with TinyEngines(folders[request.param], **options) as make:
        yield make


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, 150), k=length)


def run(engine, requests, replies=None, right=None):
    """Tokens of requests that are submitted together, with drafts where what they will say is known."""
    if replies is None:
        engine.use("speculation", None)
    else:
        known = {tuple(ids): reply for (ids, _), reply in zip(requests, replies, strict=True)}
        engine.use("speculation", Oracle(engine.scheduler, known, COUNT, right, 150))
    for id, (ids, some) in enumerate(requests):
        engine.submit(id, ids, some)
    found = [[] for _ in requests]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.id] += output.tokens
        assert engine.scheduler.check_integrity() == []
    return found


@pytest.mark.parametrize("engines", FAMILIES, indirect=True)
def test_replies_are_the_same(engines):
    """Greedy and sampled, in a batch, with every accepted length at every border of a page."""
    sampled = dict(temperature=0.9, seed=3), dict(temperature=1.0, seed=4, top_p=0.9, repetition_penalty=1.3)
    requests = [
        (prompt(length), params(32, **more)) for length, more in ((1, {}), (15, {}), (33, sampled[0]), (40, sampled[1]))
    ]
    told = run(engines(prefix_cache=False, speculation="none"), requests)
    engine, rng = engines(), random.Random(1)
    for right in (*range(COUNT + 1), lambda: rng.randint(0, COUNT)):
        assert run(engine, requests, told, right if callable(right) else lambda right=right: right) == told, right
    counters = engine.scheduler.snapshot()
    assert 0 < counters["accepted_tokens"] < counters["drafted_tokens"]
    assert engine.scheduler.snapshot()["state_slots_live"] == 0


@pytest.mark.parametrize("engines", ["lfm2", "qwen3_5"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        dict(ahead=True),
        dict(num_pages=12, max_tokens_per_step=24, reserve_output=False),
        dict(max_rows=2, max_tokens_per_step=8, state_memory=0),
        dict(prefix_cache=False, page_size=64),
    ],
    ids=["ahead", "preempted", "small steps", "no cache"],
)
def test_in_other_orders(engines, options):
    requests = [(prompt(length, 2), params(40)) for length in (5, 16, 30, 61, 9)]
    told = run(engines(prefix_cache=False, speculation="none"), requests)
    engine, rng = engines(**options), random.Random(2)
    for _ in range(2):  # the second time prompts and replies are cached
        assert run(engine, requests, told, lambda: rng.randint(0, COUNT)) == told
    counters = engine.scheduler.snapshot()
    assert counters["accepted_tokens"] > 20 and (counters["preemptions"] > 0) == ("num_pages" in options)
    assert "prefix_cache" in options or counters["state_taken"] > 4


@pytest.mark.parametrize("engines", ["qwen3_next"], indirect=True)
def test_no_run_grows_without_end(engines):
    """Drafts that are always half right: what runs again beside them is bounded, and then runs alone."""
    engine, longest = engines(max_rows=1), 0
    told = run(engines(speculation="none"), [(prompt(20), params(60))])
    schedule = engine.scheduler.schedule

    def watch(now=0.0):
        nonlocal longest
        batch = schedule(now)
        if batch is not None and batch.num_again:
            longest = max(longest, batch.num_tokens)
        return batch

    engine.scheduler.schedule = watch
    assert run(engine, [(prompt(20), params(60))], told, lambda: 2) == told
    assert MOST_AGAIN < longest <= MOST_AGAIN + 1 + COUNT


@pytest.mark.parametrize("engines", ["lfm2"], indirect=True)
def test_prompt_lookup_finds_repetitions(engines):
    """By the proposer that a server has, which learns what pays."""
    ids = prompt(6) * 8
    engine, plain = engines(max_rows=1, speculation="ngram"), engines(speculation="none")
    for made in (plain, engine):
        made.submit(0, ids, params(60, logit_bias={token: 60.0 for token in ids[:6]}))
    found = [[], []]
    always(engine.feature("speculation"))
    for tokens, made in zip(found, (plain, engine), strict=True):
        while made.has_work:
            for output in made.step():
                tokens += output.tokens
    assert found[0] == found[1] and engine.scheduler.counters.drafted_tokens > 0
