"""What engines of one device can, on several ranks: adapters, a draft model beside rank 0, states of recurrent layers."""

import sys
from pathlib import Path

import pytest
from rank_threads import ThreadedRanks
from test_engine_adapters import FAMILY, GREEDY, expected, folders, prompts, replies_of  # noqa: F401
from tiny_engines import TinyEngines, prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import tiny_eagle3  # noqa: E402
import tiny_families  # noqa: E402
import tiny_mtp  # noqa: E402

from zse.errors import RequestError  # noqa: E402
from zse.runtime.cpu import CPUDevice  # noqa: E402
from zse.runtime.opening import open_device  # noqa: E402
from zse.sampling.params import SamplingParams  # noqa: E402
from zse.scheduler.options import RequestOptions  # noqa: E402

OPTIONS = dict(kv_dtype="f32", activations="f32", max_rows=4, max_context=96, max_tokens_per_step=32)


def ranks_of(model, **options) -> ThreadedRanks:
    options = OPTIONS | dict(model=str(model), device="cpu", tensor_parallel_size=2) | options
    return ThreadedRanks(lambda rank: open_device("cpu", threads=1), **options)


@pytest.mark.each()
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("slots, ahead", [(3, False), (1, False), (2, True)])
def test_adapters(size, slots, ahead, folders, expected, monkeypatch):  # noqa: F811
    """Every adapter and none with every prompt, of which four run at once; replies are those of merged models. Three ranks have
    two KV heads: one of them, and its rows of B, is on two ranks."""
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    with ranks_of(folders["base"], tensor_parallel_size=size, adapter_slots=slots, speculation="none") as found:
        store = found.engine.feature("adapters")
        ids = ["", *(store.load(str(folders[number])).id for number in (1, 2, 3))]
        asked = [(number, index) for index in range(4) for number in range(4)]
        got = replies_of(found.engine, [(prompts()[index], ids[number]) for number, index in asked])
        for id, (number, index) in enumerate(asked):
            assert got[id] == expected[number, index], f"prompt {index} with adapter {number}"
        store.unload(ids[1])
        with pytest.raises(RequestError, match="not loaded here any more"):
            found.engine.submit(99, prompts()[0], GREEDY, RequestOptions(adapter=ids[1]))
        ids[1] = store.load(str(folders[1])).id
        assert replies_of(found.engine, [(prompts()[0], ids[1])])[0] == expected[1, 0]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_model_runs_beside_rank_0(ahead, model, monkeypatch):
    """The model drafts for itself: nearly all is accepted, and the replies are those without drafts."""
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    asked = [(prompt(40), ""), (prompt(7, 1), ""), (prompt(25, 2), "")]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with ranks_of(model, speculation="none") as found:
        wanted = replies_of(found.engine, asked, params)
    with ranks_of(model, draft_model=str(model), draft_tokens=3) as found:
        speculator = found.engine.feature("speculation")
        speculator.room = lambda rows, most: most
        speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(3, each.room) for each in candidates]
        assert replies_of(found.engine, asked, params) == wanted
        counters = found.engine.counters()
        assert counters["accepted_tokens"] > 0.8 * counters["drafted_tokens"] > 20


@pytest.fixture(
    scope="module", params=["qwen3_5", "tied qwen3_5", "glm4_moe", "deepseek_v3", "eagle3 llama", "eagle3 qwen3"]
)
def drafting(request, tmp_path_factory) -> tuple[Path, dict]:
    """A model, and options with which what thinks mostly as it does drafts behind its states."""
    kind, _, family = request.param.rpartition(" ")
    folder = tmp_path_factory.mktemp(family)
    if kind == "eagle3":
        path, head = tiny_eagle3.write(folder, family, agrees=True)
        return path, dict(speculation="eagle3", draft_model=str(head))
    changes = {"tie_word_embeddings": True} if kind else {}
    config = tiny_families.CONFIGS[family]
    if "moe_intermediate_size" in config:
        changes["moe_intermediate_size"] = 96  # that can be cut in three
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_families.CONFIGS, family, config | changes)
        return tiny_mtp.write(family, folder, agrees=True), dict(speculation="mtp")


@pytest.mark.each()
@pytest.mark.parametrize("size, ahead", [(2, False), (3, True), (2, True), (3, False)])
def test_drafts_behind_the_models_states(size, ahead, drafting, monkeypatch):
    """On rank 0 alone: greedy and sampled replies are those of one process without drafts. The drafts are one process's, which has as
    much of the head as rank 0: its rows of one that is cut. Those that no host has read reach all ranks."""
    path, options = drafting
    asked = [(prompt(40), ""), (prompt(7, 1), ""), (prompt(25, 2), "")]
    told = [
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.4, seed=3, logit_bias={9: 1.0, 150: 2.0}, ignore_eos=True),
    ]
    options = options | dict(draft_tokens=3)

    def run(engine) -> tuple[list, int, int]:
        """Replies, tokens that were drafted, and of these accepted."""
        speculator = engine.feature("speculation")
        speculator.room = lambda rows, most: most
        speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(3, each.room) for each in candidates]
        replies, counters = [replies_of(engine, asked, params) for params in told], engine.counters()
        return replies, counters["drafted_tokens"], counters["accepted_tokens"]

    with monkeypatch.context() as patch:
        patch.setattr(CPUDevice, "runs_ahead", ahead)
        with ranks_of(path, tensor_parallel_size=size, **options) as found:
            speculator, fed = found.engine.feature("speculation"), []
            read, num_ids = speculator._read_drafts, speculator.runner.num_ids
            speculator._read_drafts = lambda batch: (fed.append(batch), read(batch))
            replies, drafted, accepted = run(found.engine)
            assert bool(fed) == ahead and found.engine.scheduler.check_integrity() == []
    is_part = num_ids < found.loaded.model_config.vocab_size
    assert is_part == (options["speculation"] == "mtp" and not found.loaded.model_config.tied_head)
    with TinyEngines(path, **OPTIONS) as made:
        assert replies == [replies_of(made(speculation="none", draft_model=None), asked, params) for params in told]
        same, others, right = run(made(**options, **(dict(draft_vocabulary=num_ids) if is_part else {})))
    assert replies == same and accepted > 0.05 * drafted and drafted > 50
    if not ahead:  # a draft between two that are as likely may be the other: sums of ranks are rounded otherwise
        assert abs(drafted - others) <= 0.02 * others and abs(accepted - right) <= 0.1 * right


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5", "granite_hybrid", "nemotron_h"])
def hybrid(request, tmp_path_factory):
    return tiny_families.write(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.each()
@pytest.mark.parametrize("ahead", [False, True])
def test_states_are_on_all_ranks(ahead, hybrid, monkeypatch):
    """Recurrent layers: conversations that go on from snapshots, also those that were in host memory, and drafts whose tokens are
    taken back. Replies are those of one process that caches nothing."""
    options = OPTIONS | dict(max_context=256)
    asked = [(prompt(70, 1), ""), (prompt(33, 2), ""), ([3, 4, 5, 6] * 20, "")]
    with TinyEngines(hybrid, **options) as made:
        plain = made(prefix_cache=False, speculation="none")
        wanted = replies_of(plain, asked)
        longer = [(ids + wanted[number] + prompt(9, 7), "") for number, (ids, _) in enumerate(asked)]
        after = replies_of(plain, longer)
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    options |= dict(cache_host_memory=1 << 24, state_memory=0, state_interval=32, speculation="ngram")
    with ranks_of(hybrid, **options) as found:
        moves, runner = [], found.engine.runner
        tell = runner.ranks.move
        runner.pages._told = lambda transfers: (moves.extend(transfers), tell(transfers))
        assert replies_of(found.engine, asked) == wanted
        replies_of(found.engine, [(prompt(40 + number, 20 + number), "") for number in range(8)])
        before = found.engine.scheduler.counters.scheduled_tokens
        assert replies_of(found.engine, longer) == after
        computed = found.engine.scheduler.counters.scheduled_tokens - before
        assert found.engine.scheduler.check_integrity() == []
    assert {"state", "state out", "state in"} <= {kind for kind, _, _ in moves}
    assert computed < sum(len(ids) for ids, _ in longer)


@pytest.mark.parametrize("ahead", [False, True])
def test_whole_experts(ahead, tmp_path, monkeypatch):
    """--expert-parallel: four experts on three ranks."""
    options = OPTIONS | dict(speculation="none")
    changes = dict(num_attention_heads=6, num_key_value_heads=3, vocab_size=384, intermediate_size=192)
    monkeypatch.setitem(tiny_families.CONFIGS, "mixtral", tiny_families.CONFIGS["mixtral"] | changes)
    path, asked = tiny_families.write("mixtral", tmp_path), [(prompt(40), ""), (prompt(7, 1), ""), (prompt(25, 2), "")]
    with TinyEngines(path, **options) as made:
        wanted = replies_of(made(), asked)
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    with ranks_of(path, tensor_parallel_size=3, expert_parallel=True, **options) as found:
        assert replies_of(found.engine, asked) == wanted
