"""Adapters in an engine: whose replies are the merged model's, which have slots, and what is kept apart."""

import sys
from pathlib import Path

import pytest
from tiny_engines import TinyEngines

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import tiny  # noqa: E402
import tiny_adapters  # noqa: E402

from zse.engine.llm import LLM  # noqa: E402
from zse.engine.messages import Ask  # noqa: E402
from zse.errors import FormatError, RequestError, UnsupportedError  # noqa: E402
from zse.sampling.params import SamplingParams  # noqa: E402
from zse.scheduler.options import RequestOptions  # noqa: E402

FAMILY = "llama"
OPTIONS = dict(kv_dtype="f32", max_rows=4, max_context=96, max_tokens_per_step=32, speculation="none")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The base model, three adapters of ranks 4, 8 and 9, and the three merged models."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {"base": tiny_adapters.base(FAMILY, folder / "base")}
    for seed, rank in ((1, 4), (2, 8), (3, 9)):
        adapter = tiny_adapters.adapter(FAMILY, seed, rank, only=None if seed != 2 else ("q_proj", "v_proj"))
        found[seed] = tiny_adapters.write(adapter, folder / f"a{seed}", rank)
        found["merged", seed] = tiny_adapters.merged(FAMILY, adapter, folder / f"m{seed}")
    return found


@pytest.fixture
def engines(folders):
    with TinyEngines(folders["base"], **OPTIONS) as made:
        yield made


def prompts():
    ids = tiny.tokens(FAMILY).tolist()
    return [ids[:30], ids[3:20], ids[10:35], ids[:9]]


def collect(engine, replies, cached=None, preempts=False):
    while engine.has_work:
        if preempts and engine.scheduler.totals.steps % 5 == 4 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0].id)
        for output in engine.step():
            assert output.finish != "error", output.error
            replies.setdefault(output.id, []).extend(output.tokens)
            if cached is not None:
                cached[output.id] = cached.get(output.id, 0) + output.cached_tokens
    return replies


def replies_of(engine, asked, params=GREEDY, preempts=False):
    """asked: (prompt, adapter or "")."""
    for id, (prompt, adapter) in enumerate(asked):
        engine.submit(id, prompt, params, RequestOptions(adapter=adapter))
    return collect(engine, {}, preempts=preempts)


@pytest.fixture(scope="module")
def expected(folders):
    """The replies of the merged models and of the base (0) to each prompt."""
    found = {}
    for number in (0, 1, 2, 3):
        with TinyEngines(folders["merged", number] if number else folders["base"], **OPTIONS) as made:
            replies = replies_of(made(), [(prompt, "") for prompt in prompts()])
            found |= {(number, index): reply for index, reply in replies.items()}
    return found


@pytest.mark.parametrize(
    "options",
    [
        dict(adapter_slots=3),
        dict(adapter_slots=1),
        dict(adapter_slots=2, ahead=True),
        dict(adapter_slots=2, preempts=True),
        dict(adapter_slots=3, speculation="ngram"),
        dict(adapter_slots=2, prefix_cache=False, max_tokens_per_step=8),
    ],
    ids=["slots for all", "one slot", "two slots, ahead", "preempted", "drafts", "short steps"],
)
def test_replies_are_those_of_merged_models(options, engines, folders, expected):
    """Every adapter and none with every prompt, of which four run at once."""
    preempts = options.get("preempts", False)
    engine = engines(**{name: value for name, value in options.items() if name != "preempts"})
    store = engine.feature("adapters")
    ids = ["", *(store.load(str(folders[number])).id for number in (1, 2, 3))]
    asked = [(number, index) for index in range(4) for number in range(4)]
    got = replies_of(engine, [(prompts()[index], ids[number]) for number, index in asked], preempts=preempts)
    for id, (number, index) in enumerate(asked):
        assert got[id] == expected[number, index], f"prompt {index} with adapter {number}"
    assert any(expected[number, 0] != expected[0, 0] for number in (1, 2, 3))
    assert not engine.scheduler.check_integrity()
    assert not engine.scheduler.life.adapters.rows
    assert (engine.scheduler.counters.preemptions > 5) == preempts
    assert engine.counters()["adapter_loads"] >= 3
    assert engine.counters()["adapters_resident"] == min(options["adapter_slots"], 3)


def test_a_step_without_an_adapter_has_no_launch_more(engines, folders):
    engine = engines(adapter_slots=2)
    adapter = engine.feature("adapters").load(str(folders[1])).id
    replies_of(engine, [(prompts()[0], "")])
    assert not [key for key in engine.runner._graphs if "adapted" in key[0]]
    replies_of(engine, [(prompts()[0], adapter)])
    assert [key for key in engine.runner._graphs if "adapted" in key[0]]


def test_cached_prompts_are_not_shared_between_adapters(engines, folders):
    engine = engines(adapter_slots=2)
    first, second = (engine.feature("adapters").load(str(folders[number])).id for number in (1, 2))
    prompt, cached = tiny.tokens(FAMILY).tolist(), {}
    for id, adapter in enumerate((first, second, "", first, "", second)):
        engine.submit(id, prompt, GREEDY, RequestOptions(adapter=adapter))
        collect(engine, {}, cached)
    assert [cached[id] for id in range(3)] == [0, 0, 0]
    assert all(cached[id] >= 32 for id in (3, 4, 5))


def test_the_same_content_is_one_adapter_and_another_is_not(engines, folders, tmp_path):
    store = engines(adapter_slots=2).feature("adapters")
    adapter = tiny_adapters.adapter(FAMILY, 1)
    same, other = (tiny_adapters.write(adapter, tmp_path / str(alpha), alpha=alpha) for alpha in (6.0, 7.0))
    found = [store.load(str(path)).id for path in (folders[1], same, other)]
    assert found[0] == found[1] != found[2]


def test_unloading_while_a_request_runs(engines, folders, expected):
    engine = engines(adapter_slots=2)
    store = engine.feature("adapters")
    adapter = store.load(str(folders[1])).id
    engine.submit(0, prompts()[0], GREEDY, RequestOptions(adapter=adapter))
    replies = {0: [token for output in engine.step() for token in output.tokens]}
    store.unload(adapter)
    with pytest.raises(RequestError, match="not loaded here any more") as refused:
        engine.submit(1, prompts()[0], GREEDY, RequestOptions(adapter=adapter))
    assert refused.value.status == 404
    assert collect(engine, replies)[0] == expected[1, 0]
    assert engine.counters()["adapters_loaded"] == engine.counters()["adapters_resident"] == 0
    again = store.load(str(folders[1])).id
    assert again == adapter and replies_of(engine, [(prompts()[0], again)])[0] == expected[1, 0]


def test_what_is_refused(engines, folders, tmp_path):
    engine = engines(adapter_slots=1, adapter_rank=8)
    store = engine.feature("adapters")
    adapter = store.load(str(folders[1])).id
    with pytest.raises(UnsupportedError, match=r"rank 9 is not supported; supported: up to 8 \(--adapter-rank\)"):
        store.load(str(folders[3]))
    with pytest.raises(RequestError, match="adapters write replies"):
        engine.submit(0, [5, 6], Ask("mean"), RequestOptions(adapter=adapter))
    with pytest.raises(RequestError, match="not loaded"):
        engine.submit(0, [5, 6], GREEDY, RequestOptions(adapter="0" * 32))
    with pytest.raises(FormatError, match="adapter_config.json: is missing"):
        store.load(str(tmp_path))
    with pytest.raises(RequestError, match="no slots for adapters"):
        engines().feature("adapters").load(str(folders[1]))


def test_loads_beside_steps(engines, folders):
    """begin() reads in a thread, and what it cannot use is told of the load alone."""
    engine = engines(adapter_slots=1)
    store = engine.feature("adapters")
    store.begin(7, str(folders[1]))
    store.begin(8, str(folders["base"]))
    told = []
    while len(told) < 2:
        store.idle(0.0)
        told += engine.take_completed()
    found = {completed.id: completed for completed in told}
    assert found[7].result.rank == 4 and found[7].result.adapter in engine.runner.adapters.images
    assert found[8].error.status == 422 and "adapter_config.json: is missing" in found[8].error.message


def test_many_cancelled_and_ended_leave_nothing(engines, folders):
    """Requests of three adapters over two slots, a third of them cancelled on the way."""
    engine = engines(adapter_slots=2, ahead=True)
    ids = [engine.feature("adapters").load(str(folders[number])).id for number in (1, 2, 3)]
    for id in range(30):
        engine.submit(id, prompts()[id % 4], GREEDY, RequestOptions(adapter=(ids + [""])[id % 4]))
        engine.step()
        if id % 3 == 0:
            engine.cancel(id - 2)
        assert len(engine.scheduler.life.adapters.rows) <= 2
        assert not engine.scheduler.check_integrity()
    collect(engine, {})
    assert not engine.scheduler.life.adapters.rows and not engine.scheduler.check_integrity()


def test_an_llm_measures_no_prompt_with_an_adapter(folders):
    """Log-probabilities of a prompt are the base model's, which the reply is not."""
    with LLM(folders["base"], device="cpu", threads=1, **OPTIONS, adapter_slots=1) as llm:
        adapter, params = llm.load_adapter(folders[1]), SamplingParams(max_tokens=2, prompt_logprobs=0)
        with pytest.raises(RequestError, match="log-probabilities of prompts and embeddings are the base model's"):
            llm.generate([[5, 6]], params, adapter=adapter)
        assert not llm._engine.has_work
