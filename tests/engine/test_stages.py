"""An engine whose layers are on several ranks, one behind the other: the tokens and log-probabilities of one process, bit for bit."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_model
from rank_threads import ThreadedRanks

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("structured", "models")]
import tiny
import tiny_families
import tiny_text

from zse import LLM, BeamParams, SamplingParams
from zse.engine import stages
from zse.engine.config import EngineConfig
from zse.engine.messages import Ask
from zse.engine.ranks import Leader
from zse.errors import ConfigError, GroupError, UnsupportedError
from zse.formats.opening import open_model
from zse.models.load import plan_model
from zse.models.stages import spans_of
from zse.runtime.cpu import CPUDevice
from zse.runtime.opening import open_device

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2, ignore_eos=True)
MASKED = SamplingParams(max_tokens=12, temperature=0.0, allowed_token_ids=tuple(range(20, 40)), ignore_eos=True)


def prompt(length: int, seed: int = 0, most: int = 100) -> list[int]:
    return np.random.default_rng(seed).integers(3, most, length).tolist()


PROMPTS = [prompt(40), prompt(7, 1), prompt(90, 2)]


def engine(model, size: int, **options) -> LLM:
    options = dict(activations="f32", kv_dtype="f32", max_rows=4) | options
    return LLM(str(model), device="cpu", threads=size, pipeline_parallel_size=size, **options)


@pytest.fixture(scope="module")
def model(model):
    tiny_text.write(model, letters="".join(map(chr, range(0xC0, 0xC0 + tiny_model.VOCAB - 124))))
    return model


def replies(llm, params=GREEDY, prompts=PROMPTS):
    return [(output.token_ids, output.logprobs) for output in llm.generate(prompts, params)]


def test_replies_jobs_and_beams(model):
    """In steps of 16 tokens, so that chunks of prompts follow each other through the ranks."""
    with engine(model, 1, max_tokens_per_step=16) as one, engine(model, 2, max_tokens_per_step=16) as two:
        for params in (GREEDY, SAMPLED, MASKED):
            assert replies(two, params) == replies(one, params)
        np.testing.assert_array_equal(two.embed(PROMPTS), one.embed(PROMPTS))
        assert two.logprobs_of(PROMPTS[2]).logprobs == one.logprobs_of(PROMPTS[2]).logprobs
        beams = BeamParams(beam_width=3, max_tokens=8)
        found, wanted = (llm.beam_search(PROMPTS[1], beams)[0] for llm in (two, one))
        assert [beam.token_ids for beam in found] == [beam.token_ids for beam in wanted]
        assert two.model_config == one.model_config
        assert two._engine.scheduler.check_integrity() == [] and not two._engine.has_work


def test_pages_move_on_all_ranks(model):
    tight = dict(
        max_rows=3, max_tokens_per_step=16, num_pages=14, page_size=16, reserve_output=False, preemption="swap"
    )
    with engine(model, 1) as one, engine(model, 2, cache_host_memory=1 << 24, **tight) as two:
        wanted = replies(one)
        assert [ids for ids, _ in replies(two)] == [ids for ids, _ in wanted]
        longer = [PROMPTS[2] + wanted[2][0][:-1]]
        assert replies(two, prompts=longer)[0][0] == replies(one, prompts=longer)[0][0]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Of five layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "LAYERS", 5)
        path = tiny_model.write(tmp_path_factory.mktemp("deep"))
    tiny_text.write(path, letters="".join(map(chr, range(0xC0, 0xC0 + tiny_model.VOCAB - 124))))
    return path


def threaded(model, size: int, **options) -> ThreadedRanks:
    options = dict(activations="f32", kv_dtype="f32", max_rows=4, speculation="none", max_tokens_per_step=16) | options
    options |= dict(model=str(model), device="cpu", pipeline_parallel_size=size)
    return ThreadedRanks(lambda rank: open_device("cpu", threads=1), **options)


def drained(engine, got=None) -> dict[int, list[int]]:
    """The tokens of all requests."""
    got = {} if got is None else got
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            got.setdefault(output.id, []).extend(output.tokens)
    assert engine.scheduler.check_integrity() == []
    return got


@pytest.fixture(scope="module")
def expected(deep):
    """Replies of one process to six prompts."""
    prompts = [*PROMPTS, prompt(3, 3), prompt(33, 4), prompt(20, 5)]
    with engine(deep, 1, max_rows=6) as one:
        return prompts, [ids for ids, _ in replies(one, prompts=prompts)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_micro_batches_are_under_way_together(size, ahead, deep, expected, monkeypatch):
    """More requests than rows, with ranks of CPUs, and of devices that are fed the tokens of the oldest as GPUs are."""
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    prompts, wanted = expected
    with threaded(deep, size) as found:
        most, start = 0, type(found.engine)._start

        def counted(self):
            nonlocal most
            started = start(self)
            most = max(most, len(self._flights))
            return started

        monkeypatch.setattr(type(found.engine), "_start", counted)
        for id, ids in enumerate(prompts):
            found.engine.submit(id, ids, GREEDY)
        got = drained(found.engine)
    assert [got[id] for id in range(len(prompts))] == wanted and most == size + ahead


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_something_to_do(size, deep, monkeypatch):
    """One request for each rank: before the stream of one comes back, that of the next was sent, and the rank behind told of it.
    Chunks of a prompt are all sent before anything of it comes back."""
    said, ids = [], {}
    replay, receive, submit = Leader.replay, stages.HalvedTicket.receive, stages.StageRunner.submit

    def named(runner, batch, *masks):
        ids["now"] = tuple(entry.request.id for entry in batch.entries)
        return submit(runner, batch, *masks)

    def told(self, key, *more):
        said.append(("told", ids["now"]))
        replay(self, key, *more)

    def received(ticket):
        said.append(("received", tuple(request.id for request in ticket.requests)))
        receive(ticket)

    monkeypatch.setattr(Leader, "replay", told)
    monkeypatch.setattr(stages.HalvedTicket, "receive", received)
    monkeypatch.setattr(stages.StageRunner, "submit", named)
    with threaded(deep, size) as found:
        found.engine.submit(9, prompt(64), GREEDY)
        while not any(what == "received" for what, _ in said):
            found.engine.step()
        assert said == [("told", (9,))] * 4 + [("received", (9,))]
        found.engine.cancel(9)
        drained(found.engine)
        for id in range(size):
            found.engine.submit(id, prompt(5, id), GREEDY)
        while found.engine.scheduler.totals.sampled_tokens < 4 * size:
            found.engine.step()
        del said[:]
        for _ in range(3 * size):
            found.engine.step()
        drained(found.engine)
    place = next(place for place, (what, _) in enumerate(said) if what == "received")
    turns = said[place : place + 4 * size]
    assert [what for what, _ in turns] == ["received", "told"] * (2 * size)
    rows = [who for what, who in turns if what == "told"]
    assert rows == rows[:size] * 2 and sorted(rows[:size]) == [(id,) for id in range(size)]
    # Who comes back was sent longest ago: the others are with other ranks.
    assert [who for what, who in turns if what == "received"] == rows


@pytest.mark.parametrize("ahead", [False, True])
def test_jobs_and_cancelling_beside_micro_batches(ahead, deep, expected, monkeypatch):
    """A job between steps gets its own stream, not that of a request under way."""
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    prompts, wanted = expected
    with engine(deep, 1) as one:
        vectors = one.embed(prompts[:3])
    with threaded(deep, 2) as found:
        for id in range(4):
            found.engine.submit(id, prompts[id], GREEDY)
        got: dict[int, list[int]] = {}
        for step in range(40):
            if step in (12, 15, 18):
                assert found.engine._flights
                found.engine.submit(10 + step, prompts[(step - 12) // 3], Ask("last", normalize=True))
            if step == 16:
                assert found.engine.cancel(1)
            for output in found.engine.step():
                got.setdefault(output.id, []).extend(output.tokens)
        drained(found.engine, got)
        done = {job.id: job.result for job in found.engine.take_completed()}
    assert [got[id] for id in (0, 2, 3)] == [wanted[id] for id in (0, 2, 3)] and wanted[1][: len(got[1])] == got[1]
    for step, vector in zip((12, 15, 18), vectors, strict=True):
        np.testing.assert_array_equal(np.frombuffer(done[10 + step].vector, np.float32), np.asarray(vector, np.float32))


def test_grammars_and_drafts_beside_micro_batches(deep):
    """Masks of two micro-batches are asked for one after the other; where there are drafts steps wait for tokens."""
    sampled = SamplingParams(max_tokens=16, temperature=0.8, seed=3)
    asked = (
        (PROMPTS * 2, sampled, {"regex": "[a-f]{4,12}"}),
        (PROMPTS, sampled, {"json": {"type": "integer"}}),
        ([[5, 6, 7, 8] * 8, *PROMPTS], GREEDY, None),
    )
    found = []
    for size in (1, 2):
        with engine(deep, size, speculation="ngram") as llm:
            speculator = llm._engine.feature("speculation")
            speculator.room = lambda rows, most: most
            speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(3, each.room) for each in candidates]
            for prompts, params, form in asked:
                found.append([output.token_ids for output in llm.generate(prompts, params, structure=form)])
            assert llm._engine.counters()["drafted_tokens"] > 0 and llm._engine.scheduler.check_integrity() == []
    assert found[:3] == found[3:]


FAMILIES = ["llama", "qwen2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v2_lite", "minicpm3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    """Tied heads, windows in groups of pages, experts, latents."""
    module = tiny if family in tiny.CONFIGS else tiny_families
    path = module.write(family, tmp_path)
    tiny_text.write(path, letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    prompts = [prompt(60, 3, 50), prompt(9, 4, 50)]
    with engine(path, 1, max_tokens_per_step=32) as one, engine(path, 2, max_tokens_per_step=32) as two:
        assert replies(two, prompts=prompts) == replies(one, prompts=prompts)


def test_a_rank_that_is_killed_ends_the_group(model):
    with engine(model, 2) as llm:
        pid = llm._engine.feature("ranks")._ranks._peers[0].process.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GroupError, match=rf"rank 1 \(process {pid}\) was killed by signal 9"):
            llm.generate(PROMPTS, GREEDY)


def test_a_rank_that_is_silent_is_given_up(model, monkeypatch):
    monkeypatch.setenv("ZSE_GROUP_TIMEOUT_S", "2")
    with engine(model, 2) as llm:
        pid = llm._engine.feature("ranks")._ranks._peers[0].process.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(GroupError, match="waited 2 s for rank 1"):
            llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("options", [dict(tensor_parallel_size=2), dict(adapter_slots=1), dict(resident_layers=0)])
def test_options_that_do_not_go_together(options):
    with pytest.raises(ConfigError, match="is not possible with --pipeline-parallel-size 2 yet"):
        EngineConfig(model="x", pipeline_parallel_size=2, **options)


def test_more_ranks_than_layers(model):
    with pytest.raises((UnsupportedError, GroupError), match="--pipeline-parallel-size 9: layers"):
        LLM(str(model), device="cpu", pipeline_parallel_size=9)


def test_spans_go_by_time_or_by_memory(tmp_path, monkeypatch):
    """A head as large as six layers, beside which keys and values of many tokens are larger."""
    monkeypatch.setattr(tiny_model, "LAYERS", 5)
    monkeypatch.setattr(tiny_model, "VOCAB", 16_000)
    with open_model(str(tiny_model.write(tmp_path))) as source:
        for family, wanted in (("cpu", [(0, 1), (1, 5)]), ("gpu", [(0, 2), (2, 5)])):
            plan = plan_model(source, family=family, rank=0, ranks=2, pipeline=True)
            assert plan.share.spans == wanted


def test_spans_are_even():
    assert spans_of([1] * 8, 0, 2) == [(0, 4), (4, 8)]
    assert spans_of([1] * 8, 4, 2) == [(0, 2), (2, 8)]
    assert spans_of([5, 1, 1, 1], 0, 3) == [(0, 1), (1, 3), (3, 4)]
    assert spans_of([1, 1], 100, 2) == [(0, 1), (1, 2)]
    rng = np.random.default_rng(0)
    for _ in range(50):
        costs, size = rng.integers(1, 9, 9).tolist(), int(rng.integers(1, 5))
        found = spans_of(costs, 3, size)
        assert found[0][0] == 0 and found[-1][1] == 9 and all(a < b for a, b in found)
        assert all(end == start for (_, end), (start, _) in zip(found, found[1:], strict=False))
