"""Drafts of models with recurrent layers: a run leaves a state behind each token at which its drafts may end, so that no token
runs again."""

import random

import pytest
import tiny_families
from oracle import Oracle
from test_draft_model import always
from test_verify import params
from tiny_engines import TinyEngines

from zse.cache.states import LEAST_KEPT
from zse.tensor import SHORT_RUN

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


def said(engine, requests):
    """Tokens of requests that are submitted together."""
    for id, (ids, some) in enumerate(requests):
        engine.submit(id, ids, some)
    found = [[] for _ in requests]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.id] += output.tokens
        assert engine.scheduler.check_integrity() == []
    return found


def run(engine, requests, replies=None, right=None):
    """As said(), with drafts where what they will say is known."""
    if replies is None:
        engine.use("speculation", None)
    else:
        known = {tuple(ids): reply for (ids, _), reply in zip(requests, replies, strict=True)}
        engine.use("speculation", Oracle(engine.scheduler, known, COUNT, right, 150))
    return said(engine, requests)


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
        dict(num_pages=9, max_tokens_per_step=24, reserve_output=False),
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


@pytest.mark.parametrize("engines", ["lfm2", "qwen3_next"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        dict(max_rows=1),
        dict(),
        dict(ahead=True),
        dict(num_pages=9, max_tokens_per_step=24, reserve_output=False),
        dict(max_rows=2, state_memory=0),
    ],
    ids=["alone", "rows", "ahead", "preempted", "few slots"],
)
def test_no_token_runs_again(engines, options):
    """What ran are the tokens of prompts and replies, once, the drafts that were wrong, and what preemptions threw away."""
    requests = [(prompt(length, 3), params(40)) for length in (5, 16, 30, 61, 9)]
    told = run(engines(prefix_cache=False, speculation="none"), requests)
    engine, rng = engines(prefix_cache=False, **options), random.Random(5)
    if options.get("ahead"):  # what was submitted ahead of an end is dropped
        requests = [(ids, params(40, ignore_eos=True)) for ids, _ in requests]
    assert run(engine, requests, told, lambda: rng.randint(0, COUNT)) == told
    counters = engine.scheduler.counters
    new = sum(len(ids) + len(reply) - 1 for (ids, _), reply in zip(requests, told, strict=True))
    wrong = counters.drafted_tokens - counters.accepted_tokens
    assert counters.accepted_tokens > 20 and wrong > 20
    ran = new + wrong + counters.recomputed_tokens
    if options.get("ahead"):
        assert ran <= counters.scheduled_tokens <= ran + len(requests)
    else:
        assert counters.scheduled_tokens == ran
    assert (counters.preemptions > 0) == ("num_pages" in options)


@pytest.mark.parametrize("engines", ["qwen3_5"], indirect=True)
def test_as_many_drafts_as_slots(engines):
    """One request always has some; of more requests than slots some have fewer, and nobody that begins waits for them."""
    for rows, known in ((1, 1), (4, 4)):
        engine = engines(max_rows=rows, state_memory=0)
        states, requests = engine.scheduler.cache.states, [(prompt(9, row), params(20)) for row in range(known)]
        assert states.most_kept == states.num_slots - rows == LEAST_KEPT
        told, batches = run(engine, requests), []
        schedule = engine.scheduler.schedule

        def watch(now=0.0, schedule=schedule, batches=batches):
            batch = schedule(now)
            batches.append([] if batch is None else [len(entry.drafts) for entry in batch.entries])
            return batch

        engine.scheduler.schedule = watch
        assert run(engine, requests, told, lambda: COUNT) == told
        assert max(map(sum, batches)) == LEAST_KEPT and max(map(max, filter(None, batches))) == LEAST_KEPT
    assert COUNT < SHORT_RUN


@pytest.mark.parametrize("engines", ["lfm2"], indirect=True)
def test_a_run_whose_first_line_is_not_finite(engines):
    """It wrote over the state before it: the request is computed again, without drafts, and goes on."""
    requests = [(prompt(30, 6), params(20)), (prompt(7, 6), params(20))]
    engine = engines()
    told, commit, spoilt = run(engine, requests), engine.scheduler.commit, []

    def spoil(batch, sampled, seconds=0.0):
        at = 0
        for entry in batch.entries:
            if entry.drafts and entry.request.id == 1 and not spoilt:
                sampled = [*sampled]
                sampled[at] = (-1, None)
                spoilt.append(entry)
            at += entry.samples
        return commit(batch, sampled, seconds)

    engine.scheduler.commit = spoil
    assert run(engine, requests, told, lambda: COUNT) == told
    counters = engine.scheduler.counters
    assert spoilt and counters.preemptions == 1 and counters.failed == 0


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
