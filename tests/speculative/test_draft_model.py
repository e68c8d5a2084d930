"""A draft model beside the model: the same replies, whatever it thinks; its pages and its memory."""

import shutil
import sys
from pathlib import Path

import pytest
import tiny_model
from test_verify import MANY, engine_of, model, params, prompt, run  # noqa: F401

sys.path.append(str(Path(__file__).parents[1] / "structured"))
import tiny_text  # noqa: E402

from zse.engine.config import EngineConfig  # noqa: E402
from zse.engine.load import load_engine  # noqa: E402
from zse.engine.metrics import Phases  # noqa: E402
from zse.engine.runner import Runner  # noqa: E402
from zse.errors import ConfigError  # noqa: E402


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of the same vocabulary that thinks otherwise."""
    return tiny_model.write(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture
def drafting(model):  # noqa: F811
    loaded = []

    def make(draft, ahead=False, **options):
        options = (
            dict(
                model=str(model),
                threads=2,
                activations="f32",
                device="cpu",
                max_rows=4,
                draft_model=str(draft),
                draft_tokens=3,
            )
            | options
        )
        item = load_engine(EngineConfig(**options), Phases(lambda: 0.0))
        engine = item.engine
        loaded.append((item, engine.runner))
        if ahead:
            engine.runner = Runner(item.device, engine.runner.model, item.config, runs_ahead=True)
            engine.feature("speculation").runs_ahead = True
        always(engine.feature("speculation"))
        return engine

    yield make
    for item, first in loaded:
        if first is not item.engine.runner:
            first.drop_graphs()
        item.engine.close()
        item.source.close()


def always(speculator) -> None:
    """Drafts whether they pay or not: what pays here is noise, tiny models run for microseconds."""
    speculator.room = lambda rows, most: most
    speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(3, item.room) for item in candidates]


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("options", [{}, {"num_pages": 10, "max_tokens_per_step": 24}], ids=["roomy", "tight"])
def test_replies_are_the_same(engine_of, drafting, model, other, options, ahead):  # noqa: F811
    requests = [
        item for item in MANY if not ahead or item[1].repetition_penalty == 1.0 and item[1].frequency_penalty == 0.0
    ]
    told = run(engine_of(**options), requests)
    rates = {}
    for draft in (model, other):
        engine = drafting(draft, ahead, **options)
        assert run(engine, requests) == told
        counters = engine.scheduler.counters
        rates[draft] = counters.accepted_tokens / counters.drafted_tokens
        engine.feature("speculation").before_schedule(0.0)  # forgets what has ended
        assert (
            engine.feature("speculation").cache.allocator.num_free
            == engine.feature("speculation").cache.allocator.num_pages
        )
    # The model itself as its draft model is right but for what its drafts' history of penalties lacks, and at the end.
    assert rates[model] > 0.9 > rates[other]


def test_sampled_drafts_are_drawn_with_the_same_noise(drafting, model):  # noqa: F811
    """The same distribution and the same random number: the same token."""
    engine = drafting(model)
    run(engine, [(prompt(20), params(40, temperature=1.0, seed=seed)) for seed in range(4)])
    counters = engine.scheduler.counters
    assert counters.accepted_tokens == counters.drafted_tokens


def test_a_long_prompt_is_computed_in_chunks_beside(drafting, model):  # noqa: F811
    engine = drafting(model, max_tokens_per_step=48)
    run(engine, [(prompt(200), params(30)), (prompt(3), params(30))])
    assert engine.scheduler.counters.accepted_tokens > 30


def test_its_memory_is_planned(model, other):  # noqa: F811
    options = dict(model=str(model), threads=2, device="cpu", max_rows=2, max_context=64)
    with_draft, alone = (
        load_engine(EngineConfig(**options, **more), Phases(lambda: 0.0))
        for more in ({"draft_model": str(other)}, {"speculation": "none"})
    )
    for item in (with_draft, alone):
        item.engine.close()
        item.source.close()
    assert with_draft.memory_bytes["draft model"] > 0 and "draft model" not in alone.memory_bytes
    assert with_draft.memory_bytes["kv cache"] == 2 * alone.memory_bytes["kv cache"]


def test_another_vocabulary_is_refused(model, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(tiny_model, "VOCAB", 152)
    small = tiny_model.write(tmp_path / "small")
    with pytest.raises(ConfigError, match="has 152 token ids, the model 160; a draft model must have the same"):
        load_engine(EngineConfig(model=str(model), device="cpu", draft_model=str(small)), Phases(lambda: 0.0))


def test_a_head_is_padded_beyond_the_tokenizer(model, other, tmp_path):  # noqa: F811
    """As those of most folders: tokenizer.json has fewer tokens than config.json says."""
    paths = [shutil.copytree(path, tmp_path / name) for name, path in (("model", model), ("draft", other))]
    for path in paths:
        tiny_text.write(path)
    options = dict(model=str(paths[0]), device="cpu", max_rows=2, max_context=64, draft_model=str(paths[1]))
    loaded = load_engine(EngineConfig(**options), Phases(lambda: 0.0))
    loaded.engine.close()
    loaded.source.close()
    text = (paths[1] / "tokenizer.json").read_text()
    (paths[1] / "tokenizer.json").write_text(text.replace('"A"', '"é"'))
    with pytest.raises(ConfigError, match="token [0-9]+ is .*; a draft model must have the same vocabulary"):
        load_engine(EngineConfig(**options), Phases(lambda: 0.0))


def test_options_that_contradict():
    with pytest.raises(ConfigError, match="needs a draft_model"):
        EngineConfig(model="m", speculation="draft")
    with pytest.raises(ConfigError, match="not used with speculation ngram"):
        EngineConfig(model="m", speculation="ngram", draft_model="d")
