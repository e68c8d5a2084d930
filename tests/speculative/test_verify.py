"""Verifying drafts does not change what is said: every accepted length, every border, every kind of sampling."""

import random

import pytest
import tiny_model
from msgspec import structs
from oracle import Oracle
from tiny_engines import TinyEngines
from tiny_model import CONTEXT, NAN_TOKEN, VOCAB

from zse.sampling.params import SamplingParams

COUNT = 4  # drafts of a request in a step


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def engine_of(model):
    with TinyEngines(model, max_rows=4, draft_tokens=COUNT, speculation="ngram") as engines:

        def make(**options):
            engine = engines(**options)
            engine.use("speculation", None)
            return engine

        yield make


def prompt(length, seed=0):
    return [random.Random(seed * 1000 + length).randrange(3, NAN_TOKEN) for _ in range(length)]


def params(max_tokens=24, **changes):
    return SamplingParams(**dict(max_tokens=max_tokens, temperature=0.0, ignore_eos=True) | changes)


MANY = [
    (prompt(1), params()),
    (prompt(16), params(30, temperature=1.0, seed=1)),
    (prompt(33), params(temperature=0.8, seed=2, top_p=0.9, top_k=40, min_p=0.01)),
    (prompt(15), params(temperature=1.0, seed=3, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4)),
    (prompt(70), params(repetition_penalty=1.2, logit_bias={5: 4.0, 9: -50.0})),
    (prompt(20), params(temperature=1.2, seed=4, logprobs=3)),
    (prompt(9), params(logprobs=0, frequency_penalty=1.0)),
]


def run(engine, requests):
    """[(tokens, logprobs, finish)] of requests that are submitted together."""
    for id, (ids, some) in enumerate(requests):
        engine.submit(id, ids, some)
    replies = {}
    while engine.has_work:
        for output in engine.step():
            tokens, logprobs, finish = replies.get(output.id, ([], [], None))
            assert finish is None and (output.logprobs is None or len(output.logprobs) == len(output.tokens))
            replies[output.id] = (tokens + output.tokens, logprobs + (output.logprobs or []), output.finish)
        assert engine.scheduler.check_integrity() == []
    assert engine.scheduler.cache.allocator.num_free == engine.scheduler.cache.allocator.num_pages
    return [replies[id] for id in range(len(requests))]


def speculate(engine, requests, told, right, count=COUNT):
    replies = {tuple(ids): reply[0] for (ids, _), reply in zip(requests, told, strict=True)}
    engine.use("speculation", Oracle(engine.scheduler, replies, count, right, VOCAB))
    return run(engine, requests)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_pages": 9, "max_tokens_per_step": 24}, {"activations": "int8", "quantize": "int8"}],
    ids=["roomy", "tight", "int8"],
)
def test_a_batch_says_the_same_with_drafts(engine_of, options, ahead):
    """In a batch with chunked prompts, preemption, penalties and log-probabilities, to the last bit."""
    # A CPU's penalties do not see a token that is in flight: see Runner.
    requests = [
        item for item in MANY if not ahead or item[1].repetition_penalty == 1.0 and item[1].frequency_penalty == 0.0
    ]
    requests = [(ids, structs.replace(some, max_tokens=50)) for ids, some in requests]
    told = run(engine_of(**options), requests)
    rng = random.Random(7)
    engine = engine_of(ahead=ahead, reserve_output=False, **options)
    assert speculate(engine, requests, told, lambda: rng.randint(0, COUNT)) == told
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert (counters.preemptions > 0) == ("num_pages" in options)


@pytest.mark.parametrize("right", range(COUNT + 1))
@pytest.mark.parametrize("seed", [None, 5])
def test_every_accepted_length_at_every_border(engine_of, right, seed):
    """Prompts that end before, at and behind a page, a chunk, and the context's end."""
    chunk = 24
    engine = engine_of(max_tokens_per_step=chunk, max_rows=3)
    temperature = {} if seed is None else {"temperature": 1.0, "seed": seed}
    lengths = (1, 15, 16, 17, chunk - 1, chunk, chunk + 1, 2 * chunk, CONTEXT - 3, CONTEXT - 2, CONTEXT - 1)
    requests = [(prompt(length), params(min(20, CONTEXT - length), **temperature)) for length in lengths]
    told = run(engine, requests)
    assert speculate(engine, requests, told, lambda: right) == told
    counters = engine.scheduler.counters
    assert counters.accepted_tokens == 0 if right == 0 else counters.accepted_tokens >= right * 20


def test_the_end_inside_an_accepted_run(engine_of):
    """Stop ids and max_tokens end the reply at their token, and nothing that was accepted behind it is said."""
    engine = engine_of()
    ids = prompt(20)
    ((reply, _, _),) = told = run(engine, [(ids, params(16))])
    for last in range(1, 12):
        finish = params(last)
        assert speculate(engine, [(ids, finish)], told, lambda: COUNT) == [(reply[:last], [], "length")]
        stop = params(16, stop_token_ids=(reply[last],))
        end = reply.index(reply[last]) + 1
        assert speculate(engine, [(ids, stop)], told, lambda: COUNT) == [(reply[:end], [], "stop")]


def test_a_draft_whose_logits_are_not_finite_ends_nobody(engine_of, tmp_path):
    """A wrong draft can poison its own line and those behind it: they are not taken. A token that was sampled can, too:
    then its request alone ends, behind the tokens that it has."""
    engine = engine_of(model=str(tiny_model.write(tmp_path / "nan", nan=True)))
    requests = [(prompt(20), params(12)), (prompt(21), params(12))]
    told = run(engine, requests)
    speculator = Oracle(
        engine.scheduler,
        {tuple(ids): reply[0] for (ids, _), reply in zip(requests, told, strict=True)},
        COUNT,
        lambda: COUNT,
        VOCAB,
    )
    engine.use("speculation", speculator)
    drafts = speculator.drafts

    def poisoned(request):
        some = drafts(request)
        if len(some) > 2 and request.id == 0:
            some[2] = NAN_TOKEN
        return some

    speculator.drafts = poisoned
    assert run(engine, requests) == told
    assert engine.scheduler.counters.accepted_tokens > 0
    # Now the model says the poisoned token itself.
    bias = params(12, logit_bias={NAN_TOKEN: 100.0})
    speculator.drafts = lambda request: [NAN_TOKEN] * 2 if request.id == 0 else drafts(request)
    got = run(engine, [(requests[0][0], bias), requests[1]])
    assert got == [([NAN_TOKEN], [], "error"), told[1]]


def test_a_cancelled_request_leaves_from_within_a_run(engine_of):
    engine = engine_of(ahead=True)
    requests = [(prompt(20), params(30)), (prompt(21), params(30))]
    told = run(engine, requests)
    oracle = Oracle(
        engine.scheduler,
        {tuple(ids): reply[0] for (ids, _), reply in zip(requests, told, strict=True)},
        COUNT,
        lambda: 2,
        VOCAB,
    )
    engine.use("speculation", oracle)
    for id, (ids, some) in enumerate(requests):
        engine.submit(id, ids, some)
    for _ in range(3):
        engine.step()
    assert engine._start() and engine._flights[0].batch.num_drafts
    assert engine.scheduler.schedule() is None  # nobody knows where they go on
    assert engine.cancel(0)
    said = []
    while engine.has_work:
        for output in engine.step():
            assert output.id == 1
            said += output.tokens
    assert engine.scheduler.check_integrity() == [] and said == told[1][0][-len(said) :]
    assert engine.scheduler.cache.allocator.num_free == engine.scheduler.cache.allocator.num_pages
