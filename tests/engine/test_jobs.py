"""Forwards without sampling: what they measure, and that they disturb nobody while they run beside requests."""

import json
import math

import numpy as np
import pytest
import tiny_model
from fake_engine import VOCAB as COUNTED
from fake_engine import make_engine
from tiny_engines import TinyEngines, prompt
from tiny_model import CONTEXT, HIDDEN, NAN_TOKEN, VOCAB

from zse.engine.messages import Ask
from zse.errors import RequestError
from zse.sampling.fields import checked
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions


@pytest.fixture(params=[False, True], ids=["in step", "ahead"])
def engine_of(model, request):
    with TinyEngines(model, ahead=request.param) as engines:
        yield engines


def drain(engine):
    """{id: Job}, {id: tokens}"""
    jobs, tokens = {}, {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.id, []).extend(output.tokens)
        jobs |= {job.id: job for job in engine.take_completed()}
        assert engine.scheduler.check_integrity() == [] and engine.feature("jobs").check_integrity() == []
    assert engine.scheduler.cache.allocator.num_free == engine.scheduler.cache.allocator.num_pages
    return jobs, tokens


def measure(engine, *asked):
    for id, (ids, ask) in enumerate(asked):
        engine.submit(id, ids, ask)
    jobs, _ = drain(engine)
    return [jobs[id].result for id in range(len(asked))]


def vector(result):
    return np.frombuffer(result.vector, "<f4")


def reference(engine, ids):
    """logits float64 [len(ids), VOCAB] by teacher forcing."""
    return np.concatenate(
        [np.array(logits, np.float64).reshape(-1, VOCAB) for *_, logits in engine.feature("jobs").score(ids)]
    )


def test_prompt_logprobs_and_targets_agree_with_the_logits(engine_of):
    engine = engine_of(max_tokens_per_step=37)
    ids = prompt(90)
    logits = reference(engine, ids)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    plain, top, targets = measure(
        engine, (ids, Ask("logprobs")), (ids, Ask("logprobs", top=3)), (ids, Ask("targets", targets=(5, 9, 5)))
    )
    assert plain.num_tokens == 90 and plain.logprobs[0] is None is top.logprobs[0] and len(top.logprobs) == 90
    for place in range(1, 90):
        line = logprobs[place - 1]
        entry = top.logprobs[place]
        assert entry.logprob == pytest.approx(line[ids[place]], abs=1e-5)
        assert plain.logprobs[place].logprob == entry.logprob and plain.logprobs[place].top == []
        assert [id for id, _ in entry.top] == np.argsort(-line, kind="stable")[:3].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(line)[:-4:-1], abs=1e-5)
        assert dict(entry.top).get(ids[place], entry.logprob) == entry.logprob
    assert [entry.logprob for entry in targets.logprobs] == pytest.approx(logprobs[-1, [5, 9, 5]], abs=1e-5)
    firsts = (1, 36, 37, 38, 74, 89)  # chunks end before 37 and 74
    parts = measure(engine, *((ids, Ask("logprobs", first=first)) for first in firsts))
    for first, part in zip(firsts, parts, strict=True):
        assert [entry.logprob for entry in part.logprobs] == pytest.approx(
            [entry.logprob for entry in plain.logprobs[first:]], abs=1e-5
        )


def test_hidden_states_give_the_logits(engine_of, model):
    """The head's matrix times the last hidden state are the logits; the mean is that of every token's."""
    engine = engine_of(max_tokens_per_step=19, max_rows=2)
    ids = prompt(50)
    logits = reference(engine, ids)
    results = measure(
        engine,
        *((ids[:end], Ask("last")) for end in range(1, 51)),
        (ids, Ask("mean")),
        (ids, Ask("mean", normalize=True)),
    )
    states = np.array([vector(result) for result in results[:50]])
    assert states.shape == (50, HIDDEN)
    data = (model / "model.safetensors").read_bytes()
    header = int.from_bytes(data[:8], "little")
    place = json.loads(data[8 : 8 + header])["lm_head.weight"]["data_offsets"]
    head = np.frombuffer(data[8 + header + place[0] : 8 + header + place[1]], np.float32).reshape(VOCAB, HIDDEN)
    np.testing.assert_allclose(states.astype(np.float64) @ head.T, logits, atol=1e-3)
    np.testing.assert_allclose(vector(results[50]), states.mean(axis=0), atol=1e-3)  # f16 KV
    unit = vector(results[51])
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(unit * np.linalg.norm(vector(results[50])), vector(results[50]), atol=1e-5)


def test_jobs_beside_requests_disturb_nobody(engine_of):
    options = dict(max_rows=3, num_pages=20, max_context=160, max_tokens_per_step=32)
    params = SamplingParams(max_tokens=25, temperature=0.9, seed=3, ignore_eos=True)
    requests = {100 + seed: prompt(30 + seed, seed) for seed in range(4)}
    asked = [
        (prompt(70, 10), Ask("logprobs", top=2)),
        (prompt(33, 11), Ask("mean")),
        (prompt(5, 12), Ask("last")),
        (prompt(140, 13), Ask("targets", targets=(7, 8))),
    ]
    alone = engine_of(**options)
    for id, ids in requests.items():
        alone.submit(id, ids, params)
    _, expected = drain(alone)
    expected_results = measure(alone, *asked)
    engine = engine_of(**options)
    for id, ids in requests.items():
        engine.submit(id, ids, params)
    for id, (ids, ask) in enumerate(asked):
        engine.submit(id, ids, ask)
    engine.submit(50, prompt(60), Ask("mean"))
    for _ in range(3):
        engine.step()
    assert engine.cancel(50) and not engine.cancel(50)
    # The first tokens of the requests are in the steps above: compare the ends.
    jobs, tokens = drain(engine)
    assert {id: said[-15:] for id, said in tokens.items()} == {id: said[-15:] for id, said in expected.items()}
    assert [jobs[id].result for id in range(4)] == expected_results


def test_a_job_waits_for_pages_and_later_requests_wait_for_it(engine_of):
    engine = engine_of(max_rows=4, num_pages=10, max_context=160)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    engine.submit(1, prompt(60), params)
    engine.step()
    engine.submit(2, prompt(140), Ask("last"))
    engine.step()
    order = []
    for number in range(200):
        engine.submit(10 + number, prompt(20), SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0))
        order += [output.id for output in engine.step() if output.finish]
        order += [job.id for job in engine.take_completed()]
        assert engine.scheduler.check_integrity() == []
        if 2 in order:
            break
    assert order == [1, 2]


def test_a_job_that_gives_numbers_that_are_not_finite_fails_alone(engine_of, tmp_path):
    engine = engine_of(model=str(tiny_model.write(tmp_path / "nan", nan=True)))
    good = prompt(20)
    bad = [*good[:5], NAN_TOKEN, *good[5:]]
    for id, (ids, ask) in enumerate(
        [
            (good, Ask("logprobs", top=1)),
            (bad, Ask("logprobs")),
            (bad, Ask("mean")),
            (bad, Ask("targets", targets=(1,))),
            (good, Ask("mean")),
        ]
    ):
        engine.submit(id, ids, ask)
    jobs, _ = drain(engine)
    assert [job.error.code if job.error else None for _, job in sorted(jobs.items())] == [
        None,
        "numerical_error",
        "numerical_error",
        "numerical_error",
        None,
    ]
    assert all(math.isfinite(entry.logprob) for entry in jobs[0].result.logprobs[1:])
    assert np.isfinite(vector(jobs[4].result)).all()


def test_refusals():
    engine = make_engine(max_waiting=2)
    engine.scheduler.life.admit_job = lambda count, job: None
    for ids, ask, code in (
        ([], Ask("mean"), "invalid_value"),
        ([COUNTED], Ask("mean"), "invalid_token_id"),
        ([1] * 257, Ask("mean"), "context_length_exceeded"),
        ([1], Ask("targets", targets=(-1,)), "invalid_token_id"),
        ([1], Ask("targets", targets=(1,) * 2000), "array_above_max_length"),
        ([1], Ask("logprobs", top=21), "out_of_range"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.submit(1, ids, checked(ask))
        assert caught.value.code == code
    engine.submit(1, [1], Ask("mean"))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(1, [1], Ask("mean"))
    engine.submit(2, [1], Ask("mean"), RequestOptions(priority=1))
    assert [job.id for job in engine.feature("jobs")._waiting] == [2, 1]
    with pytest.raises(RequestError, match="2 requests are waiting"):
        engine.submit(3, [1], Ask("mean"))
    assert engine.feature("jobs").counters()["jobs_refused"] == 5
    engine.close()
    assert not engine.feature("jobs").has_work


def test_a_deadline_that_passes_in_the_queue():
    now = [0.0]
    engine = make_engine()
    engine.clock = lambda: now[0]
    engine.scheduler.life.admit_job = lambda count, job: None
    engine.submit(1, [1], Ask("mean"), RequestOptions(deadline_ms=100))
    engine.step()
    assert engine.take_completed() == []
    now[0] = 0.2
    engine.step()
    (job,) = engine.take_completed()
    assert job.error.code == "timeout" and job.error.status == 504 and not engine.has_work


def test_the_longest_sequence_and_more_jobs_than_rows(engine_of):
    engine = engine_of(max_rows=1)
    ids = prompt(CONTEXT)
    results = measure(engine, (ids, Ask("last")), *((ids[: 9 + end], Ask("mean")) for end in range(20)))
    assert len(results) == 21 and all(np.isfinite(vector(result)).all() for result in results)


def test_a_flood_of_one_tenant_does_not_keep_back_anothers_job(engine_of):
    engine = engine_of()
    for id in range(30):
        engine.submit(id, prompt(40, id), Ask("mean"), RequestOptions(tenant="a", priority=10))
    engine.submit(30, prompt(40), Ask("mean"), RequestOptions(tenant="b"))
    order = []
    while engine.has_work:
        engine.step()
        order += [job.id for job in engine.take_completed()]
        assert engine.feature("jobs").check_integrity() == []
    assert sorted(order) == list(range(31)) and order.index(30) < 12
    assert not engine.scheduler.queue.tenants


def test_a_long_job_leaves_room_in_a_chunk_for_another_tenant():
    engine = make_engine(max_tokens=32)
    jobs = engine.feature("jobs")
    long, short = (
        jobs.submit(id, [1] * length, Ask("mean"), RequestOptions(tenant=tenant), 0.0)
        for id, length, tenant in ((1, 200, "a"), (2, 5, "b"))
    )
    assert jobs._share_out([long], 32) == [32]
    assert jobs._share_out([long, short], 32) == [27, 5]
    short.tokens *= 20
    assert jobs._share_out([long, short], 32) == [16, 16]
    third = jobs.submit(3, [1] * 50, Ask("mean"), RequestOptions(tenant="b", weight=3.0), 0.0)
    assert jobs._share_out([long, short, third], 32) == [8, 24, 0]
    assert jobs._share_out([long, third], 1) == [1, 0]


def test_a_prompt_with_log_probabilities_is_computed_once(engine_of):
    engine = engine_of()
    ids = prompt(50)
    engine.submit(1, ids, Ask("logprobs", top=2))
    drain(engine)
    cached = {}
    for id, options in ((2, RequestOptions()), (3, RequestOptions(cache_salt="other"))):
        engine.submit(id, ids, SamplingParams(max_tokens=8, temperature=0.0), options)
        replies = []
        while engine.has_work:
            for output in engine.step():
                cached[id] = cached.get(id, 0) + output.cached_tokens
                replies += output.tokens
        cached[id] = cached[id], replies
    assert cached[2][0] == len(ids) - 1 and cached[3][0] == 0
    assert cached[2][1] == cached[3][1] and engine.scheduler.check_integrity() == []


@pytest.mark.parametrize("ask", [Ask("mean"), Ask("logprobs", first=20), Ask("last")], ids=lambda ask: ask.what)
def test_what_is_not_known_to_be_finite_is_not_cached(engine_of, ask):
    engine = engine_of()
    measure(engine, (prompt(50), ask))
    assert engine.scheduler.cache.prefix.num_nodes == 0


def test_pages_that_jobs_hold_count_as_their_tenants(engine_of):
    """Two tenants have half of the cache each: what the jobs of one take goes from its own half (tests/reliability/test_cache_quota.py)."""
    engine = engine_of(num_pages=44, max_context=CONTEXT)
    greedy = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    prompts = {id: prompt(160, id) for id in range(4)}
    for id, tokens in prompts.items():
        engine.submit(id, tokens, greedy, RequestOptions(tenant="ab"[id % 2]))
        drain(engine)
    for id in range(10, 50):
        engine.submit(id, prompt(32, id), Ask("mean"), RequestOptions(tenant="a"))
    jobs, _ = drain(engine)
    assert len(jobs) == 40 and all(job.result is not None for job in jobs.values())
    found = 0
    for id in (1, 3):
        engine.submit(id, [*prompts[id], 5], greedy, RequestOptions(tenant="b"))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        found += outputs[0].cached_tokens
    assert found >= 320 - 16
