"""Drafts of an EAGLE-3 head: the same replies whatever it thinks, in batches, under masks, behind cached prefixes, after preemptions
and ahead; where it is refused, and what it takes."""

import pytest
import tiny
import tiny_eagle3
import tiny_text
from block_checks import (
    ORDERS,
    accepted,
    drafts_that_see_all_at_once,
    replies_in_an_order,
    replies_under_masks,
    run_ahead,
)
from test_draft_model import always
from test_hybrid_drafts import params, prompt, said
from tiny_engines import TinyEngines

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import ConfigError, FormatError
from zse.plan.kept import KeptStreams

OPTIONS = dict(max_context=128, max_rows=4, draft_tokens=3, kv_dtype="f32", speculation="eagle3")
PLAIN = dict(speculation="none", draft_model=None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(a model, its head), which mostly thinks as it does; " other": one that thinks otherwise."""
    found = {}
    for family in ("llama", "qwen3"):
        found[family] = tiny_eagle3.write(tmp_path_factory.mktemp(family), family, agrees=True)
        found[f"{family} other"] = tiny_eagle3.write(tmp_path_factory.mktemp(family), family)
    return found


@pytest.fixture
def engines(folders, request):
    model, head = folders[request.param]
    with TinyEngines(model, draft_model=str(head), **OPTIONS) as make:
        yield make


def drafting(engine, is_ahead=False):
    """The engine, whose head drafts whether it pays or not."""
    speculator = engine.feature("speculation")
    always(speculator)
    if is_ahead:
        planner = engine.runner.planner
        planner.kept = KeptStreams(planner, speculator.runner.model.config.eagle.layers)
        run_ahead(engine)
    return engine


@pytest.mark.parametrize("engines", ["llama", "qwen3", "llama other", "qwen3 other"], indirect=True)
def test_replies_are_the_same(engines, request):
    """Greedy and sampled, with penalties and biases, in a batch."""
    sampled = dict(temperature=0.3, seed=3), dict(temperature=0.4, seed=4, top_p=0.9, repetition_penalty=1.3)
    requests = [
        (prompt(length), params(32, **more))
        for length, more in ((1, {}), (15, {"logit_bias": {9: 1.0}}), (33, sampled[0]), (40, sampled[1]))
    ]
    told = said(engines(prefix_cache=False, **PLAIN), requests)
    engine = drafting(engines())
    for _ in range(2):  # the second time prompts and replies are cached
        assert said(engine, requests) == told
    right, drafted = accepted(engine)
    assert (right < 0.1 * drafted) if "other" in request.node.name else (0.2 * drafted < right < drafted), (
        right / drafted
    )
    speculator = engine.feature("speculation")
    speculator._forget()
    assert speculator.cache.allocator.num_free == speculator.cache.allocator.num_pages


@pytest.mark.parametrize("engines", ["qwen3"], indirect=True)
@ORDERS
def test_in_other_orders(engines, options):
    replies_in_an_order(engines, options, PLAIN, drafting)


@pytest.mark.parametrize("engines", ["llama other"], indirect=True)
@pytest.mark.parametrize("chunk", [16, 64])
def test_drafts_are_those_of_a_head_that_sees_all_at_once(engines, chunk):
    """Behind a prompt in chunks, after rejected drafts, and behind each reply's token; and they are tokens that it knows."""
    made = drafts_that_see_all_at_once(engines, chunk, drafting)
    known = set(tiny_eagle3.tokens_of(tiny_eagle3.head_config("llama")).tolist())
    assert all(known.issuperset(drafts) for drafts in made.values())


@pytest.mark.parametrize("engines", ["llama"], indirect=True)
def test_masks_hold(engines, folders):
    tiny_text.write(folders["llama"][0])

    told = replies_under_masks(engines(**PLAIN))
    engine = drafting(engines())
    assert replies_under_masks(engine) == told
    assert accepted(engine)[1] > 0


@pytest.mark.parametrize("engines", ["qwen3"], indirect=True)
def test_with_quantized_weights_of_the_model(engines):
    """The head stays as it is."""
    requests = [(prompt(20), params(40)), (prompt(9, 4), params(40, temperature=1.0, seed=1))]
    told = said(engines(quantize="int8", **PLAIN), requests)
    engine = drafting(engines(quantize="int8"))
    assert said(engine, requests) == told and accepted(engine)[0] > 0
    weights = engine.feature("speculation").runner.model.weights
    assert {weights[name].scheme.kind for name in ("fc", "head", "layers.0.qkv")} == {"dense"}
    assert weights["embed"] is engine.runner.model.weights["embed"]


@pytest.mark.parametrize("engines", ["llama"], indirect=True)
def test_its_memory_is_planned(engines):
    engine = drafting(engines())
    said(engine, [(prompt(20), params(20))])
    device, config = engine.runner.device, engine.runner.config
    hidden = engine.runner.model.config.hidden_size
    assert engine.runner.planner.kept.streams.shape == (config.max_tokens_per_step, 3 * hidden)
    used, planned = device.memory(), engines.made[-1][0].plan.parts
    parts = [planned[name] for name in ("embedding", "layers", "head", "draft model") if name in planned]
    assert used["weights"] == sum(parts) and used["scratch"] == planned["scratch"]


def refused(error, match, model, head, **options):
    with pytest.raises(error, match=match) as raised:
        load_engine(EngineConfig(model=str(model), draft_model=str(head), device="cpu", **options), Phases(lambda: 0.0))
    assert "\n" not in str(raised.value)


def test_refused(folders, tmp_path):
    model, head = folders["llama"]
    with pytest.raises(ConfigError, match="speculation eagle3 needs a draft_model: the folder of an EAGLE-3 head"):
        EngineConfig(model="m", speculation="eagle3")
    with pytest.raises(ConfigError, match="--speculation eagle3 is not possible with --pipeline-parallel-size yet"):
        EngineConfig(model="m", speculation="eagle3", draft_model="d", pipeline_parallel_size=2)
    refused(FormatError, "is an EAGLE-3 head, no model", model, head)  # --speculation left out
    refused(FormatError, "is an EAGLE-3 head, no model", head, head, speculation="eagle3")
    (tmp_path / "small").mkdir()
    small = tiny.write("llama", tmp_path / "small")
    refused(ConfigError, "reads three states between layers", small, head, speculation="eagle3")
    refused(Exception, "an EAGLE-3 head's architecture", model, small, speculation="eagle3")
