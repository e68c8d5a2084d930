"""The engine over the CPU device with a tiny model: what it says must not depend on how it was batched."""

import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import tiny_model
from tiny_engines import TinyEngines, prompt
from tiny_model import CONTEXT, EOS, NAN_TOKEN, VOCAB

from zse.engine import step as steps
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import ConfigError, RequestError
from zse.plan import record
from zse.sampling.params import SamplingParams


@pytest.fixture
def engine_of(model):
    with TinyEngines(model) as engines:
        yield engines


def drain(engine):
    """{id: (tokens, logprobs, finish)}"""
    replies = {}
    while engine.has_work:
        for output in engine.step():
            tokens, logprobs, _ = replies.get(output.id, ([], [], None))
            replies[output.id] = (tokens + output.tokens, logprobs + (output.logprobs or []), output.finish)
        assert engine.scheduler.check_integrity() == []
    return replies


def run(engine, **requests):
    """{name: (tokens, logprobs, finish)} of requests that are submitted together: name=(prompt, params)."""
    for id, (ids, params) in enumerate(requests.values()):
        engine.submit(id, ids, params)
    replies = drain(engine)
    return {name: replies[id] for id, name in enumerate(requests)}


def greedy(max_tokens=12, **changes):
    return SamplingParams(**dict(max_tokens=max_tokens, temperature=0.0, ignore_eos=True) | changes)


def sampled(seed, max_tokens=12, **changes):
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True, **changes)


MANY = {
    "short": (prompt(1, 1), greedy()),
    "page": (prompt(16, 2), greedy()),
    "over": (prompt(17, 3), sampled(1)),
    "long": (prompt(90, 4), greedy(30)),
    "top_k": (prompt(5, 5), sampled(2, top_k=5)),
    "top_p": (prompt(9, 6), sampled(3, top_p=0.8)),
    "min_p": (prompt(12, 7), sampled(4, min_p=0.05)),
    "top_n_sigma": (prompt(12, 7), sampled(4, top_n_sigma=1.5)),
    "penalties": (prompt(20, 8), sampled(5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3)),
    "bias": (prompt(7, 9), sampled(6, logit_bias={5: 3.0, 9: -50.0})),
    "same seed": (prompt(17, 3), sampled(1)),
}


def alone(engine_of, names=MANY, **options):
    engine = engine_of(**options)
    return {name: run(engine, **{name: MANY[name]})[name] for name in names}


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_batch_gives_what_each_request_gives_alone(engine_of, quantize):
    options = dict(max_rows=4, quantize=quantize, activations="int8" if quantize else "f32")
    solo, together = alone(engine_of, **options), run(engine_of(**options), **MANY)
    assert {name: reply[0] for name, reply in together.items()} == {name: reply[0] for name, reply in solo.items()}
    assert together["over"] == together["same seed"]
    assert all(reply[2] == "length" for reply in together.values())


@pytest.mark.parametrize("chunk", [4, 5, 16, 17, 33])
def test_chunked_prefill_gives_what_whole_prefill_gives(engine_of, chunk):
    names = ("page", "over", "long", "penalties")
    whole = alone(engine_of, names, max_rows=4, max_tokens_per_step=256)
    chunked = alone(engine_of, names, max_rows=4, max_tokens_per_step=chunk)
    assert {name: reply[0] for name, reply in chunked.items()} == {name: reply[0] for name, reply in whole.items()}


def test_preemption_does_not_change_tokens(engine_of):
    names = ("over", "penalties", "page", "top_p")
    requests = {name: (MANY[name][0], sampled(11, 40, presence_penalty=0.4)) for name in names}
    roomy = run(engine_of(max_rows=4), **requests)
    engine = engine_of(max_rows=4, num_pages=9, reserve_output=False)
    tight = run(engine, **requests)
    assert engine.scheduler.counters.preemptions > 0
    assert {name: reply[0] for name, reply in tight.items()} == {name: reply[0] for name, reply in roomy.items()}


@pytest.mark.parametrize("options", [{}, {"num_pages": 9, "max_tokens_per_step": 24}], ids=["roomy", "tight"])
def test_running_ahead_says_the_same(engine_of, options):
    """With preemption, chunked prompts, stop ids that are found a step late, and sampled rows."""
    names = [name for name in MANY if name != "penalties"]
    requests = {name: (MANY[name][0], msgspec.structs.replace(MANY[name][1], max_tokens=40)) for name in names}
    told = run(engine_of(max_rows=4), **requests)
    stop = told["long"][0][7]
    requests["long"] = (MANY["long"][0], greedy(40, stop_token_ids=(stop,)))
    told["long"] = told["long"][0][: told["long"][0].index(stop) + 1], [], "stop"
    engine = engine_of(ahead=True, max_rows=4, reserve_output=False, **options)
    assert run(engine, **requests) == told
    assert engine.scheduler.counters.late_results > 0
    assert (engine.scheduler.counters.preemptions > 0) == ("num_pages" in options)
    assert engine.scheduler.cache.allocator.num_free == engine.scheduler.cache.allocator.num_pages


def test_scoring_and_cancelling_beside_steps_in_flight(engine_of):
    quiet = engine_of(max_rows=2)
    expected = run(quiet, a=MANY["long"])["a"][0]
    scores = [value for _, some, _, _ in quiet.feature("jobs").score(prompt(40)) for value in some]
    engine = engine_of(ahead=True, max_rows=2)
    engine.submit(1, *MANY["long"])
    engine.submit(2, *MANY["page"])
    got, scored = [], []
    for number, (_, some, _, _) in enumerate(engine.feature("jobs").score(prompt(40))):
        scored += some
        got += [token for output in engine.step() if output.id == 1 for token in output.tokens]
        if number == 1:
            assert engine.cancel(2)
    assert engine.scheduler.check_integrity() == []
    assert got + drain(engine)[1][0] == expected and scored == scores


def test_log_probabilities(engine_of):
    engine = engine_of()
    ids = prompt(20)
    reply, logprobs, _ = run(engine, a=(ids, greedy(10, logprobs=5)))["a"]
    for token, entry in zip(reply, logprobs, strict=True):
        assert entry.top[0] == (token, pytest.approx(entry.logprob)) and len(entry.top) == 5
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
    # Teacher forcing over prompt and reply says the same of each sampled token.
    scores = [value for _, some, _, _ in engine.feature("jobs").score(ids + reply) for value in some][len(ids) - 1 : -1]
    assert [entry.logprob for entry in logprobs] == pytest.approx(scores, abs=2e-4)  # f16 KV, other kernels
    everything = run(engine, a=(ids, greedy(1, logprobs=20)))["a"][1][0].top
    assert 0 < sum(math.exp(value) for _, value in everything) <= 1.0001


def test_scores_agree_with_the_logits(engine_of):
    engine = engine_of()
    ids = prompt(50)
    at = 0
    for start, logprobs, top1, logits in engine.feature("jobs").score(ids):
        lines = np.array(logits, dtype=np.float64).reshape(-1, VOCAB)
        assert start == at and len(lines) == len(logprobs) == len(top1)
        at += len(lines)
        assert top1 == lines.argmax(axis=1).tolist()
        following = ids[start + 1 : start + 1 + len(lines)]
        total = np.log(np.exp(lines).sum(axis=1))
        for line, token in enumerate(following):
            assert logprobs[line] == pytest.approx(lines[line, token] - total[line], abs=1e-5)
    assert at == 50 and engine.scheduler.cache.allocator.num_free == engine.scheduler.cache.allocator.num_pages
    assert engine.scheduler.check_integrity() == []


def test_scoring_beside_running_requests_disturbs_nobody(engine_of):
    engine = engine_of(max_rows=2)
    expected = run(engine, a=MANY["long"])["a"][0]
    quiet = [value for _, some, _, _ in engine.feature("jobs").score(prompt(40)) for value in some]
    engine.submit(1, *MANY["long"])
    got, scores = [], []
    for _, some, _, _ in engine.feature("jobs").score(prompt(40)):
        scores += some
        got += [token for output in engine.step() for token in output.tokens]
    assert engine.scheduler.check_integrity() == []
    got += drain(engine)[1][0]
    assert got == expected and scores == quiet


def test_a_row_that_is_not_finite_fails_alone(engine_of, tmp_path):
    engine = engine_of(model=str(tiny_model.write(tmp_path / "nan", nan=True)), max_rows=4)
    expected = run(engine, a=MANY["page"], b=MANY["top_k"])
    got = run(engine, a=MANY["page"], bad=([5, NAN_TOKEN, 6], greedy()), b=MANY["top_k"])
    assert got["bad"] == ([], [], "error")
    assert got["a"] == expected["a"] and got["b"] == expected["b"]
    # Pages that held NaN are used again by the next request; nothing of it may show.
    assert run(engine, a=MANY["page"])["a"] == expected["a"]


def test_rows_are_used_again(engine_of):
    engine = engine_of(max_rows=1)
    first = alone(lambda **options: engine)
    assert alone(lambda **options: engine, reversed(list(MANY))) == first


def test_bias_and_penalties_do_what_they_say(engine_of):
    engine = engine_of()
    forced = run(engine, a=(prompt(5), sampled(1, logit_bias={77: 100.0})))["a"][0]
    assert forced == [77] * 12
    banned = run(engine, a=(prompt(5), greedy(1)))["a"][0][0]
    assert run(engine, a=(prompt(5), greedy(1, logit_bias={banned: -100.0})))["a"][0] != [banned]
    # Two favourites 30 apart (logits themselves differ by less): every 77 makes the next 2 dearer until 78 wins.
    bias = {77: 100.0, 78: 70.0}
    assert set(run(engine, a=(prompt(5), greedy(40, logit_bias=bias)))["a"][0]) == {77}
    penalties = dict(frequency_penalty=2.0, presence_penalty=2.0)
    assert set(run(engine, a=(prompt(5), greedy(40, logit_bias=bias, **penalties)))["a"][0]) == {77, 78}
    # Those two count the reply only; repetition looks at the prompt too, and divides a logit above 0.
    ids = [77] * 5
    assert run(engine, a=(ids, greedy(1, logit_bias=bias, **penalties)))["a"][0] == [77]
    assert run(engine, a=(ids, greedy(1, logit_bias=bias, repetition_penalty=2.0)))["a"][0] == [78]


def test_stop_ids_eos_and_the_context_end_a_reply(engine_of):
    engine = engine_of()
    tokens = run(engine, a=(prompt(9), greedy(20)))["a"][0]
    stop = tokens[4]
    cut, _, finish = run(engine, a=(prompt(9), greedy(20, stop_token_ids=(stop,))))["a"]
    assert finish == "stop" and cut == tokens[: tokens.index(stop) + 1]
    eos = SamplingParams(max_tokens=5, temperature=0.0, logit_bias={EOS: 100.0})
    assert run(engine, a=(prompt(9), eos))["a"] == ([EOS], [], "stop")
    full, _, finish = run(engine, a=(prompt(CONTEXT - 3), SamplingParams(temperature=0.0, ignore_eos=True)))["a"]
    assert (len(full), finish) == (3, "length")
    with pytest.raises(RequestError, match="context is 256 tokens"):
        engine.submit(1, prompt(CONTEXT), greedy(1))
    with pytest.raises(RequestError, match="more than the context"):
        list(engine.feature("jobs").score(prompt(CONTEXT + 1)))
    with pytest.raises(RequestError, match="token id 160 is outside"):
        list(engine.feature("jobs").score([VOCAB]))
    assert engine.scheduler.check_integrity() == []


def test_cancel_in_the_middle_leaves_the_others_alone(engine_of):
    engine = engine_of(max_rows=4, max_tokens_per_step=16)
    expected = run(engine, a=MANY["page"], b=MANY["top_p"])
    engine.submit(0, *MANY["page"])
    engine.submit(1, *MANY["top_p"])
    engine.submit(2, *MANY["long"])
    engine.submit(3, *MANY["over"])
    outputs = [*engine.step(), *engine.step()]
    assert engine.cancel(2) and engine.cancel(3)
    outputs += [output for _ in range(40) for output in engine.step()]
    got = {id: [token for output in outputs if output.id == id for token in output.tokens] for id in (0, 1)}
    assert got == {0: expected["a"][0], 1: expected["b"][0]} and not engine.has_work


def test_memory_limits_are_kept(model):
    limit = 2_000_000
    loaded = load_engine(EngineConfig(model=str(model), max_memory=limit, max_rows=8, threads=1), Phases(lambda: 0.0))
    assert limit * 0.9 < sum(loaded.memory_bytes.values()) <= limit and loaded.config.max_context == CONTEXT
    assert loaded.config.num_pages < 8 * CONTEXT // 16
    loaded.engine.close()
    loaded.source.close()
    with pytest.raises(ConfigError, match="MiB of memory"):
        load_engine(EngineConfig(model=str(model), max_memory=1000), Phases(lambda: 0.0))


def test_a_step_says_how_many_sequences_it_has(engine_of, monkeypatch):
    """By which attention of a few tokens is divided between threads."""
    engine = engine_of()
    told, real = [], record.Planner.symbols

    def symbols(planner, tokens, rows, context, *, runs=0):
        told.append((tokens, runs))
        return real(planner, tokens, rows, context, runs=runs)

    # From here on: while weights come, a load records graphs for which there is time, and asks of one token.
    monkeypatch.setattr(record.Planner, "symbols", symbols)
    run(engine, one=(prompt(12, 1), greedy(3)), two=(prompt(5, 2), greedy(3)))
    assert told == [(17, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("sets", [1, 2])
def test_a_first_requests_recordings_come_first(sets):
    """Of a device that runs ahead: a short prompt's, those of its next tokens, a prompt's of a few words; then the others, each once."""
    sizes = [1, 4, 8, 16, 64, 128, 256]
    config = SimpleNamespace(max_tokens_per_step=256, max_rows=8, max_lines=8, max_drafts=0)
    runner = SimpleNamespace(
        config=config,
        planner=SimpleNamespace(sizes=sizes),
        model=SimpleNamespace(config=SimpleNamespace(causal=True)),
        runs_ahead=True,
        num_sets=sets,
        size_for=lambda kind, tokens: next(size for size in sizes if size >= tokens),
    )
    found = steps.first_recordings(runner)
    decodes = [("decode", 1, number) for number in reversed(range(sets))]
    assert found[: 2 + sets] == [("mixed", 64, 0), *decodes, ("mixed", 16, 0)]
    assert len(found) == len(set(found)) and ("mixed", 128, 0) in found
