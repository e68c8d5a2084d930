"""What plug-ins of the step are held to: see scheduler/feature.py."""

import ast
import inspect
import re

import pytest
from fake_engine import make_engine
from tiny_engines import TinyEngines, prompt

from zse.engine import core
from zse.engine.adapters import AdapterStore
from zse.engine.beams import BeamQueue
from zse.engine.divided_files import DividedDisk
from zse.engine.expert_counters import ExpertCounters
from zse.engine.features import FEATURES
from zse.engine.grammars import GrammarQueue
from zse.engine.host_memory import HostMemory
from zse.engine.idle_memory import IdleMemory
from zse.engine.images import ImageStore
from zse.engine.jobs import JobQueue
from zse.engine.messages import Ask, ImageInput
from zse.engine.offload import DiskTier
from zse.engine.prefill_client import PrefillClient
from zse.engine.prefill_server import PrefillServer
from zse.engine.ranks import RankWatch
from zse.engine.token_rules import TokenRuleQueue
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.feature import Feature
from zse.scheduler.options import DEFAULT, PlacedImage, RequestOptions
from zse.speculative.speculator import Speculator
from zse.structured.options import Structure

CLASSES = {
    "images": ImageStore,
    "speculation": Speculator,
    "beams": BeamQueue,
    "jobs": JobQueue,
    "rules": TokenRuleQueue,
    "grammars": GrammarQueue,
    "adapters": AdapterStore,
    "disk": DiskTier,
    "prefill server": PrefillServer,
    "prefill client": PrefillClient,
    "experts": ExpertCounters,
    "ranks": RankWatch,
    "host memory": HostMemory,
    "idle memory": IdleMemory,
}


def test_every_feature_overrides_what_the_interface_has():
    assert list(CLASSES) == list(FEATURES)
    hooks = {name: inspect.signature(hook) for name, hook in vars(Feature).items() if inspect.isfunction(hook)}
    for feature in (*CLASSES.values(), DividedDisk):
        overridden = [name for name in hooks if name in vars(feature)]
        assert len(overridden) > 1
        for name in set(overridden) - {"submit"}:  # whose params are of a feature's own kind
            assert list(inspect.signature(vars(feature)[name]).parameters) == list(hooks[name].parameters), name


def test_the_core_names_no_feature():
    tree = ast.parse(inspect.getsource(core))
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    named = [word for word in words for name in FEATURES if re.search(name.rstrip("s")[:5], word, re.IGNORECASE)]
    assert not named and "FEATURES" in words


@pytest.mark.parametrize(
    ("params", "options", "name"),
    [
        (SamplingParams(), DEFAULT, None),
        (SamplingParams(), RequestOptions(structure=Structure(kind="json_object")), "grammars"),
        (BeamParams(), DEFAULT, "beams"),
        (BeamParams(), RequestOptions(structure=Structure(kind="json_object")), "beams"),
        (Ask("mean"), DEFAULT, "jobs"),
        (SamplingParams(), RequestOptions(images=(ImageInput(0, 1, 1, 1, b"", b""),)), "images"),
        (SamplingParams(), RequestOptions(images=(PlacedImage(0, 1, b"", b""),)), None),
        (SamplingParams(min_tokens=1), DEFAULT, "rules"),
        (SamplingParams(allowed_token_ids=(1,)), RequestOptions(structure=Structure(kind="json_object")), "rules"),
    ],
)
def test_who_takes_a_request(params, options, name):
    assert next((name for name, row in FEATURES.items() if row.takes(params, options)), None) == name


def test_a_feature_is_made_with_its_first_request_and_then_costs_steps_nothing(monkeypatch):
    engine = make_engine()

    def reply(id):
        engine.submit(id, [1], SamplingParams(max_tokens=3))
        tokens = []
        while engine.has_work:
            tokens += [token for output in engine.step() for token in output.tokens]
        return tokens

    assert reply(1) == [2, 3, 4] and not engine._features
    zeros = {name: 0 for row in FEATURES.values() for name in row.counters}
    assert engine.counters().items() >= zeros.items() and len(zeros) == 19
    engine.submit(2, [1], BeamParams(beam_width=2, max_tokens=2))
    while engine.has_work:
        assert engine.step() == []
    (search,) = engine.take_completed()
    assert search.id == 2 and len(search.result.replies) == 2 and list(engine._features) == ["beams"]
    assert engine.counters()["beam_searches"] == 1
    for hook in ("before_schedule", "before_run", "after_commit", "filter_outputs", "after_step"):
        monkeypatch.setattr(BeamQueue, hook, lambda *arguments: pytest.fail("no live request uses it"), raising=False)
    assert reply(3) == [2, 3, 4] and engine._live == []


def test_features_are_asked_in_the_tables_order():
    engine = make_engine()
    first, second = Feature(), Feature()
    engine.use("disk", second)
    engine.use("speculation", first)
    assert list(engine._features.values()) == [first, second]
    engine.use("disk", None)
    assert list(engine._features) == ["speculation"]
    with pytest.raises(KeyError, match="not configured"):
        engine.feature("disk")


def test_a_feature_is_live_from_the_step_on_in_which_it_gets_what_was_held(model, tmp_path):
    """Of a beam search whose beginning is read from files: the tokens of its first step are beams', not a reply's."""
    with TinyEngines(model, threads=1, num_pages=64, cache_disk=str(tmp_path / "kv")) as engines:
        found = []
        for number in range(2):
            engine = engines()
            engine.submit(1, prompt(90, 24), BeamParams(beam_width=2, max_tokens=4), RequestOptions())
            while engine.has_work:
                assert not engine.step()
            found += [completed.result.replies for completed in engine.take_completed()]
            assert engine.counters()["prefix_disk_hits"] == number
            engine.close()
    assert len(found) == 2 and [beam.tokens for beam in found[0]] == [beam.tokens for beam in found[1]]
