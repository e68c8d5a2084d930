"""Models of which some layers see a window only: their old pages are given back, and nothing that is said changes.

Pages that were given back are filled with NaN at once: whoever still reads one says so.
"""

import numpy as np
import pytest
import tiny
import tiny_families

from zse.bench.speed import greedy
from zse.cache import groups
from zse.cache.grouped import GroupedCacheManager
from zse.engine.config import EngineConfig
from zse.engine.core import Engine
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.engine.runner import Runner
from zse.errors import ConfigError
from zse.sampling.params import SamplingParams

WINDOW = 8


@pytest.fixture(params=["gemma3", "gemma3_linear"])
def model(request, tmp_path):
    return str(tiny.write(request.param, tmp_path))


def poison_what_is_free(runner, monkeypatch):
    """Pages without a holder become NaN as soon as a window has passed."""
    view = np.frombuffer(runner.kv.buffer.view(), np.float32).reshape(runner.kv.num_pages, -1)
    trim = GroupedCacheManager.trim
    poisoned = []

    def trim_and_poison(self, sequence, position):
        before = self.windows(sequence).held()
        trim(self, sequence, position)
        gone = [page for page in before if not self.allocator.references(page) and not self.prefix]
        view[gone] = np.nan
        poisoned.extend(gone)

    monkeypatch.setattr(GroupedCacheManager, "trim", trim_and_poison)
    return poisoned


def replies(model, monkeypatch, *, grouped: bool, ahead: bool = False, **options):
    """What some requests say, in which some begin as others did, and the pages that the longest held at most."""
    with monkeypatch.context() as patch:
        if not grouped:
            patch.setattr(groups, "MAX_WASTE", -9.0)
        config = EngineConfig(
            model=model,
            device="cpu",
            threads=1,
            activations="f32",
            kv_dtype="f32",
            max_rows=3,
            max_tokens_per_step=24,
            **options,
        )
        loaded = load_engine(config, Phases(lambda: 0.0))
        engine = loaded.engine
        if ahead:
            engine = Engine(
                engine.scheduler, Runner(loaded.device, engine.runner.model, loaded.config, runs_ahead=True)
            )
        poisoned = poison_what_is_free(engine.runner, patch)
        scheduler, said, held = engine.scheduler, {}, 0
        ids = (tiny.tokens("gemma3").tolist() * 5)[:190]
        sampled = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
        for batch in (
            [(0, ids[:150], greedy(30)), (1, ids[20:37], sampled), (2, ids[7:90], greedy(50))],
            [(3, [*ids[:150], 9, 9], sampled), (4, ids[30:31], greedy(60)), (5, ids[:60], greedy(3))],
        ):
            for id, prompt, params in batch:
                engine.submit(id, prompt, params)
                said[id] = []
            while engine.has_work:
                for output in engine.step():
                    said[output.id] += output.tokens
                assert scheduler.check_integrity() == []
                held = max(
                    held,
                    len(scheduler.cache.table(0))
                    + sum(
                        len(windows.held())
                        for id, windows in getattr(scheduler.cache, "_windows", {}).items()
                        if id == 0
                    ),
                )
        scores = [chunk[1] for chunk in engine.feature("jobs").score(ids)]
        assert scheduler.check_integrity() == []
        assert ("trimmed_pages" in engine.counters()) == isinstance(scheduler.cache, GroupedCacheManager)
        assert scheduler.cache.allocator.num_free == scheduler.cache.allocator.num_pages
        engine.runner.close()
        loaded.source.close()
    return said, np.concatenate(scores), held, len(poisoned)


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no prefixes", "prefixes"])
def test_tokens_are_those_of_whole_tables(model, ahead, prefix_cache, monkeypatch):
    whole, scores, pages, _ = replies(model, monkeypatch, grouped=False, ahead=ahead, prefix_cache=prefix_cache)
    said, again, held, poisoned = replies(model, monkeypatch, grouped=True, ahead=ahead, prefix_cache=prefix_cache)
    assert said == whole and all(said.values())
    np.testing.assert_array_equal(again, scores)
    assert (poisoned > 0) == (not prefix_cache)
    layers = tiny.config("gemma3")["num_hidden_layers"] if "linear" not in model else 3
    assert pages >= 11 and held < pages * layers


@pytest.mark.parametrize(
    ("size", "prefix_cache", "pages"), [(32, False, None), (32, True, None), (64, False, None), (64, True, 96)]
)
def test_larger_pages_change_nothing(model, size, prefix_cache, pages, monkeypatch):
    """pages: few enough that requests are preempted."""
    whole, scores, _, _ = replies(model, monkeypatch, grouped=False, prefix_cache=prefix_cache)
    few = {} if pages is None else dict(max_context=208, num_pages=pages)
    said, again, _, poisoned = replies(
        model, monkeypatch, grouped=True, ahead=size == 32, prefix_cache=prefix_cache, page_size=size, **few
    )
    assert said == whole
    np.testing.assert_array_equal(again, scores)
    assert (poisoned > 0) == (not prefix_cache)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_large"])
def test_heads_of_two_sizes_share_a_pool(family, tmp_path, monkeypatch):
    """Pages of layers with large heads and of those with small ones, given back and shared: the same tokens in every way."""
    path = str(tiny_families.write(family, tmp_path))
    said, scores, _, poisoned = replies(path, monkeypatch, grouped=True, prefix_cache=False)
    assert poisoned and all(said.values())
    for options in (
        dict(prefix_cache=True),
        dict(prefix_cache=True, ahead=True, page_size=32),
        dict(prefix_cache=True, max_context=208, num_pages=42),
    ):
        again, other, _, _ = replies(path, monkeypatch, grouped=True, **options)
        assert again == said
        np.testing.assert_array_equal(other, scores)


def test_heads_of_two_sizes_want_tables_of_their_own(tmp_path):
    """Where they do not fit in each other's pages, and where every row has all of them."""
    path = str(tiny_families.write("gemma4", tmp_path))
    for options in (dict(kv_layout="contiguous"), dict(kv_dtype="int8")):
        with pytest.raises(ConfigError, match="two sizes"):
            load_engine(EngineConfig(model=path, device="cpu", threads=1, **options), Phases(lambda: 0.0))


def test_rows_of_a_whole_context_give_nothing_back(model, monkeypatch):
    whole, scores, _, _ = replies(model, monkeypatch, grouped=False)
    said, again, _, poisoned = replies(model, monkeypatch, grouped=True, kv_layout="contiguous", max_context=208)
    assert said == whole and not poisoned
    np.testing.assert_array_equal(again, scores)


def test_few_pages_are_shared_out_by_preemption(model, monkeypatch):
    """Half of what three whole contexts need."""
    whole, _, _, _ = replies(model, monkeypatch, grouped=False)
    layers = len(groups.group_layers(load_config(model)))
    said, _, _, _ = replies(model, monkeypatch, grouped=True, max_context=208, num_pages=13 + (layers - 1) * 5 + 4)
    assert said == whole


def load_config(model):
    from zse.formats.opening import open_model
    from zse.models.load import plan_model

    with open_model(model) as source:
        return plan_model(source).config
