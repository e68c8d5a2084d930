"""An engine of several ranks, each in a process of its own: replies, jobs and pages of one process; ranks that end."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import tiny_model
from rank_threads import ThreadedRanks

sys.path.insert(0, str(Path(__file__).parents[1] / "structured"))
import tiny_text

from zse import LLM, BeamParams, SamplingParams
from zse.cache.layout import KVCache
from zse.engine import idle_memory, ranks
from zse.engine.config import EngineConfig
from zse.errors import ConfigError, GroupError, UnsupportedError, ZSEError
from zse.parallel.group import RankGroup
from zse.runtime.cpu import CPUDevice
from zse.runtime.opening import open_device

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2, ignore_eos=True)
MASKED = SamplingParams(max_tokens=12, temperature=0.0, allowed_token_ids=tuple(range(20, 40)), ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny_model.NAN_TOKEN, length).tolist()


PROMPTS = [prompt(40), prompt(7, 1), prompt(90, 2)]


def engine(model, size: int, **options) -> LLM:
    return LLM(
        str(model), device="cpu", threads=size, activations="f32", kv_dtype="f32", tensor_parallel_size=size, **options
    )


def pids(llm: LLM) -> list[int]:
    """Of the ranks beside rank 0."""
    return [peer.process.pid for peer in llm._engine.feature("ranks")._ranks._peers]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def model(model):
    tiny_text.write(model, letters="".join(map(chr, range(0xC0, 0xC0 + tiny_model.VOCAB - 124))))
    return model


@pytest.fixture(scope="module")
def one(model):
    with engine(model, 1, max_rows=4) as llm:
        yield llm


@pytest.fixture(scope="module", params=[2, 3])
def several(request, model):
    """Three ranks have two KV heads: one of them on two ranks."""
    with engine(model, request.param, max_rows=4) as llm:
        yield llm


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, MASKED], ids=["greedy", "sampled", "masked"])
def test_replies(params, one, several):
    found = several.generate(PROMPTS, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in one.generate(PROMPTS, params)]
    assert several._engine.scheduler.check_integrity() == [] and not several._engine.has_work


def test_log_probabilities(one, several):
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=2)
    found, wanted = several.generate(PROMPTS[:1], params)[0], one.generate(PROMPTS[:1], params)[0]
    assert [entry.logprob for entry in found.logprobs] == pytest.approx(
        [entry.logprob for entry in wanted.logprobs], abs=1e-4
    )
    of_prompt = [[entry.logprob for entry in output.prompt_logprobs[1:]] for output in (found, wanted)]
    assert of_prompt[0] == pytest.approx(of_prompt[1], abs=1e-4)


def test_jobs_and_beams(one, several):
    np.testing.assert_allclose(several.embed(PROMPTS), one.embed(PROMPTS), atol=1e-5)
    np.testing.assert_allclose(several.score(PROMPTS, [5, 9]), one.score(PROMPTS, [5, 9]), rtol=1e-4)
    beams = BeamParams(beam_width=3, max_tokens=8)
    found, wanted = several.beam_search(PROMPTS[1], beams)[0], one.beam_search(PROMPTS[1], beams)[0]
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in wanted]


def test_the_model_is_told_whole(one, several):
    assert several.model_config == one.model_config


def test_pages_move_alike_on_all_ranks(model, one):
    """Requests that are swapped out and come back; a cached prompt of more pages than a step's inputs have room for."""
    tight = dict(
        max_rows=3, max_tokens_per_step=16, num_pages=14, page_size=16, reserve_output=False, preemption="swap"
    )
    with engine(model, 2, cache_host_memory=1 << 24, **tight) as llm:
        wanted = [output.token_ids for output in one.generate(PROMPTS, GREEDY)]
        moves, written, runner = [], [], llm._engine.runner
        tell, write = runner.ranks.move, runner.ranks.write_table
        runner.pages._told = lambda transfers: (moves.extend(transfers), tell(transfers))
        runner._table._told = lambda *entries: (written.append(entries), write(*entries))
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
        longer = [PROMPTS[2] + wanted[2][:-1]]
        assert llm.generate(longer, GREEDY)[0].token_ids == one.generate(longer, GREEDY)[0].token_ids
        moved = any(kind == "out" for kind, _, _ in moves)
        assert moved and written, llm.metrics()


def tokens_of(engine, prompts, params) -> list[list[int]]:
    found = [[] for _ in prompts]
    for id, ids in enumerate(prompts):
        engine.submit(id, ids, params)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.id] += output.tokens
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_devices_that_run_ahead(size, model, monkeypatch, one):
    """As GPUs do: ids that the host has not read yet come to the other ranks within the recording."""
    monkeypatch.setattr(CPUDevice, "runs_ahead", True)
    options = dict(model=str(model), device="cpu", activations="f32", kv_dtype="f32", max_rows=4, speculation="none")
    with ThreadedRanks(lambda rank: open_device("cpu", threads=1), tensor_parallel_size=size, **options) as found:
        assert found.engine.runner.runs_ahead
        wanted = [output.token_ids for output in one.generate(PROMPTS, GREEDY)]
        assert tokens_of(found.engine, PROMPTS, GREEDY) == wanted


def test_idle_ranks_give_memory_back(model, monkeypatch):
    """Pages that nobody has, on every rank."""
    monkeypatch.setattr(idle_memory, "IDLE_S", 0.0)
    given: dict[int, list[int]] = {}
    discard = KVCache.discard
    monkeypatch.setattr(
        KVCache, "discard", lambda kv, *pages: (given.setdefault(id(kv), []).append(pages), discard(kv, *pages))
    )
    options = dict(model=str(model), device="cpu", activations="f32", max_rows=2, prefix_cache=False)
    with ThreadedRanks(lambda rank: open_device("cpu", threads=1), tensor_parallel_size=2, **options) as found:
        first = tokens_of(found.engine, PROMPTS[:1], GREEDY)
        while found.engine.use_idle_time():
            pass
        assert tokens_of(found.engine, PROMPTS[:1], GREEDY) == first
    assert len(given) == 2 and len({tuple(pages) for pages in given.values()}) == 1


def test_a_rank_that_is_killed_ends_the_group(model):
    with engine(model, 3) as llm:
        first, second = pids(llm)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(GroupError, match=rf"rank 1 \(process {first}\) was killed by signal 9") as ended:
            llm.generate(PROMPTS, GREEDY)
        assert ended.value.exit_code == 75
        with pytest.raises(GroupError):
            llm.generate(PROMPTS, GREEDY)
    assert is_gone(first) and is_gone(second)


def test_an_idle_engine_sees_that_a_rank_ended(model):
    with engine(model, 2) as llm:
        (pid,) = pids(llm)
        while llm._engine.use_idle_time():
            pass
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(GroupError, match=f"rank 1 .process {pid}. was killed by signal 15"):
            for _ in range(100):
                llm._engine.use_idle_time()
                time.sleep(0.02)


def test_a_rank_that_is_silent_is_given_up(model, monkeypatch):
    monkeypatch.setenv("ZSE_GROUP_TIMEOUT_S", "5")  # the start waits for as long, on a busy machine too
    with engine(model, 2) as llm:
        (pid,) = pids(llm)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(GroupError, match="waited 5 s for rank 1"):
            llm.generate(PROMPTS, GREEDY)
    assert is_gone(pid)


def test_what_a_rank_cannot_load_is_told_with_its_number(model, monkeypatch):
    """The options of rank 1 say more memory than any machine has."""
    of_rank = ranks.of_rank

    def greedy(config, device, rank):
        return (
            of_rank(config, device, rank)
            if not rank
            else msgspec.structs.replace(of_rank(config, device, rank), max_memory=1000)
        )

    monkeypatch.setattr(ranks, "of_rank", greedy)
    with pytest.raises(
        GroupError, match=r"rank 1: needs \d+ MiB of memory .* over the 0 MiB of --max-memory"
    ) as refused:
        engine(model, 2)
    assert (refused.value.exit_code, refused.value.code) == (2, "out_of_memory")


def test_pages_are_the_least_that_any_rank_has(model, monkeypatch):
    of_rank = ranks.of_rank

    def tight(config, device, rank):
        found = of_rank(config, device, rank)
        return msgspec.structs.replace(found, max_memory=(16 - 13 * rank) << 20)

    monkeypatch.setattr(ranks, "of_rank", tight)
    with engine(model, 2, max_rows=16) as llm, engine(model, 1, max_rows=16) as wide:
        assert llm.config.num_pages < wide.config.num_pages
        assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == wide.generate(PROMPTS[:1], GREEDY)[0].token_ids


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("version", "0.0.1", "rank 1 has another version of zse than rank 0: 0.0.1, not"),
        ("files", [(1, 2)], r"rank 1 has another model than rank 0: \[\(1, 2\)\], not"),
        ("device", "cuda", "rank 1 has another kind of device than rank 0: cuda, not cpu"),
        ("kv_dtype", "int8", "rank 1 computes with f32 and int8, rank 0 does not"),
    ],
)
def test_ranks_that_differ_refuse_each_other(field, value, message):
    group = RankGroup.create(2)
    used = SimpleNamespace(
        **dict.fromkeys(ranks.LEAST, 64),
        **dict.fromkeys(ranks.SLOTS, 0),
        num_pages=4,
        kv_dtype="f16",
        activations="f32",
    )
    source, device = SimpleNamespace(files=[]), SimpleNamespace(name="cpu")

    def exchange(data: bytes) -> list[bytes]:
        other = msgspec.structs.replace(msgspec.msgpack.decode(data, type=ranks.Hello), **{field: value})
        return [data, msgspec.msgpack.encode(other)]

    group.exchange, group.connect = exchange, lambda device: None
    place = ranks.Ranks(group, EngineConfig(model="x"))
    with pytest.raises(GroupError, match=message):
        place.agree(device, source, SimpleNamespace(config=used), None)
    group.close()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(resident_layers=0), "--resident-layers is not possible with --tensor-parallel-size 2 yet"),
        (dict(expert_memory=1), "--expert-memory is not possible"),
        (dict(lazy_experts=True), "--lazy-experts is not possible"),
        (dict(speculation="mtp", tensor_parallel_size=1, pipeline_parallel_size=2), "mtp is not possible with --pipe"),
        (dict(device="metal"), "is for CPUs and NVIDIA GPUs, not for --device metal"),
        (dict(tensor_parallel_size=1, expert_parallel=True), "--expert-parallel divides experts among ranks: give"),
        (dict(tensor_parallel_size=65), "tensor_parallel_size 65 is not a whole number from 1 to 64"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**dict(model="x", tensor_parallel_size=2) | options)


def test_more_ranks_than_there_is_to_share(model):
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="--threads 2 for 3 ranks: each needs one"):
        LLM(str(model), device="cpu", threads=2, tensor_parallel_size=3)
    assert len(os.listdir("/proc/self/fd")) <= opened
    with pytest.raises(
        (UnsupportedError, GroupError), match="--tensor-parallel-size 5: attention heads 4 is not supported"
    ) as refused:
        LLM(str(model), device="cpu", tensor_parallel_size=5)
    assert isinstance(refused.value, ZSEError) and refused.value.exit_code == 2


def test_options_reach_the_ranks_as_they_are():
    config = EngineConfig(model="a b", threads=3, lazy_masks=False, mixed_ratio=2.5, tensor_parallel_size=4)
    assert EngineConfig.from_arguments(config.to_arguments()) == config
    cards = [ranks.of_rank(config, "cuda:1", rank).device for rank in range(4)]
    assert cards == ["cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    shares = [
        ranks.of_rank(msgspec.structs.replace(config, threads=10, max_memory=400), "cpu", rank) for rank in range(4)
    ]
    assert [share.threads for share in shares] == [2, 3, 2, 3] and {share.max_memory for share in shares} == {100}
