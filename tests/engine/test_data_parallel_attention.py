"""--data-parallel-attention: ranks with requests of their own have the replies of one process, and several times its pages."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rank_threads import ThreadedRanks
from test_engine_adapters import replies_of
from test_memory_plan import counted
from tiny_engines import TinyEngines, prompt

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("models", "structured")]
import tiny_families  # noqa: E402
import tiny_mtp  # noqa: E402
import tiny_text  # noqa: E402

from zse import LLM, BeamParams, SamplingParams  # noqa: E402
from zse.cache.layout import KVCache  # noqa: E402
from zse.engine.config import EngineConfig  # noqa: E402
from zse.engine.divided import RankMover  # noqa: E402
from zse.errors import ConfigError, UnsupportedError  # noqa: E402
from zse.formats.opening import open_model  # noqa: E402
from zse.models import shares  # noqa: E402
from zse.models.load import plan_model  # noqa: E402
from zse.runtime.cpu import CPUDevice  # noqa: E402
from zse.runtime.opening import open_device  # noqa: E402
from zse.tensor import Tensor  # noqa: E402

OPTIONS = dict(kv_dtype="f32", activations="f32", max_rows=6, max_context=96, max_tokens_per_step=32, page_size=16)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ASKED = [(prompt(length, seed), "") for seed, length in enumerate((40, 7, 25, 33, 16, 50, 3, 64))]


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v2_lite", "minicpm3"])
def latent(request, tmp_path_factory):
    """V3: experts in groups and a product of queries in two; V2 Lite: one, interleaved; MiniCPM3: no experts."""
    with pytest.MonkeyPatch.context() as patch:
        config = tiny_families.CONFIGS[request.param]
        changes = dict(vocab_size=384, intermediate_size=192) | (
            dict(moe_intermediate_size=96) if "moe_intermediate_size" in config else {}
        )
        patch.setitem(tiny_families.CONFIGS, request.param, config | changes)
        path = tiny_families.write(request.param, tmp_path_factory.mktemp(request.param))
        tiny_text.write(path, letters="".join(map(chr, range(0x4E00, 0x4E00 + 384 - 124))))
        yield path


def ranks_of(model, **options) -> ThreadedRanks:
    options = OPTIONS | dict(model=str(model), device="cpu", tensor_parallel_size=2) | options
    return ThreadedRanks(lambda rank: open_device("cpu", threads=1), data_parallel_attention=True, **options)


@pytest.mark.each()
@pytest.mark.parametrize(
    "size, ahead, experts", [(2, False, False), (3, True, False), (2, True, True), (3, True, "sent")]
)
def test_replies_are_those_of_one_process(size, ahead, experts, latent, monkeypatch):
    """Prompts in chunks beside replies, more requests than rows; then conversations that go on from what their rank has cached. sent: rows
    only to ranks that have one of their experts."""
    with TinyEngines(latent, **OPTIONS) as made:
        plain = made(prefix_cache=False, speculation="none")
        wanted = replies_of(plain, ASKED, GREEDY)
        longer = [(ids + wanted[number] + prompt(5, 9), "") for number, (ids, _) in enumerate(ASKED[:4])]
        after = replies_of(plain, longer, GREEDY)
    if experts and "minicpm3" in str(latent):
        experts = False
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    if experts == "sent":
        monkeypatch.setattr(shares, "DISPATCH_RANKS", 2)
    with ranks_of(latent, tensor_parallel_size=size, expert_parallel=bool(experts)) as found:
        engine = found.engine
        assert engine.runner.model.share.dispatches == (experts == "sent")
        assert replies_of(engine, ASKED, GREEDY) == wanted
        before = engine.counters()
        assert replies_of(engine, longer, GREEDY) == after
        assert engine.counters()["prefix_hit_tokens"] - before["prefix_hit_tokens"] > 100
        cache = engine.scheduler.cache
        assert all(part.allocator.num_pages == engine.runner.config.num_pages for part in cache.parts)
        assert all(part.prefix.num_nodes for part in cache.parts) and len(cache.parts) == size
        assert engine.scheduler.check_integrity() == []


def test_each_rank_has_pages_of_its_own(latent):
    """Two requests need four pages each, of six: two ranks run them together, and preempt within a rank alone."""
    tight = dict(num_pages=6, reserve_output=False, speculation="none", prefix_cache=False)
    asked = [(prompt(40, seed), "") for seed in range(6)]
    with TinyEngines(latent, **OPTIONS) as made:
        wanted = replies_of(made(speculation="none"), asked, GREEDY)
        one = made(**tight)
        assert replies_of(one, asked, GREEDY) == wanted
        alone = one.scheduler.totals.steps
    with ranks_of(latent, **tight) as found:
        engine, together = found.engine, set()
        run = engine.runner.submit
        engine.runner.submit = lambda batch, *masks: (
            together.add(tuple(sorted((entry.rank, entry.request.id) for entry in batch.entries))),
            run(batch, *masks),
        )[1]
        assert replies_of(engine, asked, GREEDY) == wanted
        assert engine.scheduler.totals.steps < 0.7 * alone
        assert {rank for batch in together for rank, _ in batch} == {0, 1}
        assert max(map(len, together)) == 2 and engine.scheduler.check_integrity() == []
    many = [(prompt(20, seed), "") for seed in range(8)]
    with TinyEngines(latent, **OPTIONS) as made:
        wanted = replies_of(
            made(speculation="none"), many, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        )
    with ranks_of(latent, max_rows=8, **tight | dict(prefix_cache=True)) as found:
        engine, preempted = found.engine, []
        preempt = engine.scheduler.life.preempt
        ranks = engine.scheduler.cache.rank_of

        def seen(request):
            full = [rank for rank, part in enumerate(engine.scheduler.cache.parts) if not part.allocator.num_free]
            preempted.append(ranks[request.id] in full)
            preempt(request)

        engine.scheduler.life.preempt = seen
        got = replies_of(engine, many, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
        assert got == wanted and preempted and all(preempted)
        assert engine.scheduler.check_integrity() == []


@pytest.mark.each()
@pytest.mark.parametrize("ahead", [False, True])
def test_pages_leave_a_rank_for_its_host_memory(ahead, latent, monkeypatch):
    """Of requests that are swapped, and of prompts that others push out: each comes back on the rank where it was."""
    tight = dict(num_pages=6, reserve_output=False, speculation="none", cache_host_memory=1 << 24, max_rows=8)
    asked, long = (
        [(prompt(20, seed), "") for seed in range(8)],
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    )
    with TinyEngines(latent, **OPTIONS) as made:
        plain = made(speculation="none", prefix_cache=False)
        wanted = replies_of(plain, asked, long)
        longer = [(ids + wanted[number] + prompt(5, 9), "") for number, (ids, _) in enumerate(asked)]
        after = replies_of(plain, longer, GREEDY)
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    with ranks_of(latent, preemption="swap", **tight) as found:
        engine, moves = found.engine, set()
        tell = engine.runner.ranks.move
        engine.runner.pages._told = lambda transfers: (moves.update(kind for kind, *_ in transfers), tell(transfers))
        assert replies_of(engine, asked, long) == wanted
        assert engine.scheduler.check_integrity() == []
        counters = engine.counters()
        assert counters["swapped_out_pages"] and counters["swapped_in_pages"]
        assert {"out@0", "out@1", "in@0", "in@1"} <= moves
        assert replies_of(engine, longer, GREEDY) == after
        assert engine.scheduler.check_integrity() == []
        after_all = engine.counters()
        assert after_all["prefix_onloaded_pages"] > counters["prefix_onloaded_pages"]
        for id, (ids, _) in enumerate(asked):  # clients that leave while they are swapped
            engine.submit(id, ids, long)
        while engine.has_work:
            engine.step()
            for id in list(engine.scheduler.cache.swapped):
                assert engine.cancel(id)
            assert engine.scheduler.check_integrity() == []
        assert engine.counters()["cancelled"] > 0 and not engine.scheduler.cache.swapped


def test_the_history_of_tokens_moves_on_every_rank():
    """As on a GPU: a page of rank 1 takes its line of the history along on rank 0 too, to a slot of rank 1's."""
    with_history = []
    for rank in (0, 1):
        device = open_device("cpu", threads=1)
        kv = SimpleNamespace(
            buffer=device.alloc(4 * 64, "test"), page_nbytes=64, num_pages=4, num_blocks=4, blocks_per_page=1
        )
        kv.map_to = lambda page: None
        history = Tensor(device.alloc(8 * 64, "test"), (8, 16), "i32")
        mover = RankMover(device, kv, history, None, None, 3, 0)
        mover.rank = rank
        keys, tokens = (np.frombuffer(each.view(), np.uint8).reshape(-1, 64) for each in (kv.buffer, history.buffer))
        keys[:], tokens[:] = np.arange(4)[:, None] + 10 * rank, np.arange(8)[:, None]
        mover.run([("out@1", 2, 1), ("out@0", 2, 1), ("copy@1", 0, 2), ("in@1", 1, 3), ("copy@0", 1, 0)])
        with_history.append((keys[:, 0].tolist(), tokens[:, 0].tolist()))
        mover.fill_history(1, 2, np.arange(5, dtype=np.int32).tobytes())  # keys of slot 2 on rank 1 came from a file
        mover.slot_view(2)[:] = bytes(64)
        mover.run([("in@1", 2, 0)])
        assert tokens.view(np.int32)[4, :5].tolist() == list(range(5)) and keys[0, 0] == (0 if rank else 1)
        assert mover.read_page(0) == mover.read_slot(2) if rank else len(mover.read_page(0)) == mover.page_nbytes == 64
        mover.close()
    history = [1, 1, 2, 3, 4, 5, 4, 6]
    assert with_history == [([1, 1, 2, 3], history), ([10, 11, 10, 12], history)]


def test_a_step_without_a_rank(latent):
    """One request is on one rank: the other has no token of any step, and its experts all the same."""
    with TinyEngines(latent, **OPTIONS) as made:
        wanted = replies_of(made(speculation="none"), ASKED[:1], GREEDY)
    with ranks_of(latent, tensor_parallel_size=3) as found:
        assert replies_of(found.engine, ASKED[:1], GREEDY) == wanted


def test_the_memory_of_idle_pages_goes_on_every_rank(latent, monkeypatch):
    given, discard = [], KVCache.discard
    monkeypatch.setattr(KVCache, "discard", lambda kv, *run: (given.append((kv, *run)), discard(kv, *run))[1])
    with ranks_of(latent, cache_idle_memory=0) as found:
        engine = found.engine
        wanted = replies_of(engine, ASKED, GREEDY)
        idle = engine.feature("idle memory")
        idle.idle(0.0)
        while idle.idle(1000.0):
            pass
        pages = engine.scheduler.cache.allocator
        assert pages.num_empty == pages.num_pages == 2 * engine.runner.config.num_pages
        assert replies_of(engine, ASKED, GREEDY) == wanted  # after what the other rank was told
        assert {kv.first_page for kv, *_ in given} == {0, engine.runner.config.num_pages}
        assert sum(count for kv, _, count in given if kv.first_page) == pages.num_pages


@pytest.mark.parametrize("size, experts", [(2, False), (3, True)])
def test_a_rank_allocates_what_was_planned(size, experts, latent, monkeypatch):
    monkeypatch.setattr(shares, "DISPATCH_RANKS", 2)
    experts = experts and "minicpm3" not in str(latent)
    with ranks_of(latent, tensor_parallel_size=size, speculation="none", expert_parallel=experts) as found:
        loaded, runner = found.loaded, found.engine.runner
        while runner.record_ahead():
            pass
        runner.masking.reserve(range(len(runner._sets)))
        runner.forwards.reserve()
        runner.pages.reserve()
        engine = found.engine
        replies_of(engine, ASKED, GREEDY)
        assert runner.planner.divided.form == "stream"
        assert loaded.device.memory() == counted(loaded.plan.parts)


def llm_of(model, size: int, **options) -> LLM:
    options |= dict(device="cpu", threads=size, tensor_parallel_size=size, data_parallel_attention=size > 1)
    return LLM(str(model), **OPTIONS | options)


def test_processes(latent):
    """Jobs, beams, log-probabilities and seeds."""
    prompts = [ids for ids, _ in ASKED[:4]]
    told = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=2)
    drawn = SamplingParams(max_tokens=12, temperature=0.9, seed=7, repetition_penalty=1.2, ignore_eos=True)
    beams = BeamParams(beam_width=3, max_tokens=8)
    with llm_of(latent, 1) as one, llm_of(latent, 2) as two:
        wanted, found = one.generate(prompts, told), two.generate(prompts, told)
        for some, others in zip(found, wanted, strict=True):
            assert some.token_ids == others.token_ids
            for name, first in (("logprobs", 0), ("prompt_logprobs", 1)):
                mine, theirs = ([entry.logprob for entry in getattr(each, name)[first:]] for each in (some, others))
                assert mine == pytest.approx(theirs, abs=1e-4)
        assert [each.token_ids for each in two.generate(prompts, drawn)] == [
            each.token_ids for each in one.generate(prompts, drawn)
        ]
        np.testing.assert_allclose(two.embed(prompts), one.embed(prompts), atol=1e-5)
        np.testing.assert_allclose(two.score(prompts, [5, 9]), one.score(prompts, [5, 9]), rtol=1e-4)
        searched = [[beam.token_ids for beam in llm.beam_search(prompts[1], beams)[0]] for llm in (one, two)]
        assert searched[0] == searched[1]
        assert two._engine.scheduler.check_integrity() == [] and not two._engine.has_work


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tensor_parallel_size=1), "--data-parallel-attention divides requests among ranks: give"),
        (dict(adapter_slots=1), "--adapter-slots is not possible with --data-parallel-attention yet"),
        (
            dict(tensor_parallel_size=1, pipeline_parallel_size=2),
            "--data-parallel-attention is not possible with --pipe",
        ),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**dict(model="x", tensor_parallel_size=2, data_parallel_attention=True) | options)


def test_attention_with_heads_of_its_own_is_refused(model):
    with open_model(str(model)) as source, pytest.raises(UnsupportedError, match="with keys and values of heads"):
        plan_model(source, rank=0, ranks=2, whole_attention=True)


@pytest.fixture(scope="module")
def with_block(tmp_path_factory):
    """A model with a next-token block that mostly thinks as it does."""
    with pytest.MonkeyPatch.context() as patch:
        changes = dict(vocab_size=384, intermediate_size=192, moe_intermediate_size=96)
        patch.setitem(tiny_families.CONFIGS, "deepseek_v3", tiny_families.CONFIGS["deepseek_v3"] | changes)
        return tiny_mtp.write("deepseek_v3", tmp_path_factory.mktemp("block"), agrees=True)


@pytest.mark.each()
@pytest.mark.parametrize("size, ahead", [(2, False), (3, True), (2, True)])
@pytest.mark.parametrize("kind", ["mtp", "draft"])
def test_what_drafts_has_pages_for_requests_of_all_ranks(kind, size, ahead, with_block, monkeypatch):
    """It is on rank 0 with all of its attention; each rank verifies what was drafted for its requests."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with TinyEngines(with_block, **OPTIONS) as made:
        wanted = replies_of(made(prefix_cache=False, speculation="none"), ASKED, params)
    options = dict(speculation=kind, draft_model=str(with_block) if kind == "draft" else None, draft_tokens=3)
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    with ranks_of(with_block, tensor_parallel_size=size, num_pages=24, **options) as found:
        engine, verified = found.engine, set()
        speculator, run = engine.feature("speculation"), engine.runner.submit
        speculator.room = lambda rows, most: most
        speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(3, each.room) for each in candidates]
        engine.runner.submit = lambda batch, *masks: (
            verified.update(entry.rank for entry in batch.entries if entry.drafts),
            run(batch, *masks),
        )[1]
        assert speculator.cache.allocator.num_pages == speculator.runner.kv.num_pages == size * 24
        assert replies_of(engine, ASKED, params) == wanted
        counters = engine.counters()
        drafted, accepted = (counters[f"{what}_tokens"] for what in ("drafted", "accepted"))
        assert drafted > 20 and accepted > (0.05 if kind == "mtp" else 0.8) * drafted
        assert verified == set(range(size)) and engine.scheduler.check_integrity() == []


def test_inputs_of_8_bits(latent):
    """Products whose inputs are rounded before them: what steps of numbers on an edge make is as with heads cut; of f32 there is none."""
    prompts, told = [ids for ids, _ in ASKED[:4]], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def told_of(size: int, own: bool, activations: str) -> np.ndarray:
        options = dict(activations=activations, quantize="int8", data_parallel_attention=own)
        with LLM(str(latent), device="cpu", threads=size, tensor_parallel_size=size, **OPTIONS | options) as llm:
            found = llm.generate(prompts, told)
            return np.array([entry.logprob for each in found for entry in each.prompt_logprobs[1:]])

    np.testing.assert_allclose(told_of(2, True, "f32"), told_of(1, False, "f32"), atol=1e-3, rtol=1e-5)
    one, cut, own = told_of(1, False, "int8"), told_of(2, False, "int8"), told_of(2, True, "int8")
    assert np.abs(own - one).mean() < 2 * np.abs(cut - one).mean() < 0.05 * np.abs(one).mean()
