"""Drafts in every family of models (windows, norms and biases of all kinds), and under the masks of a grammar."""

import random

import pytest
import tiny
import tiny_model
import tiny_text
from oracle import Oracle
from schemas import SCHEMAS
from test_verify import COUNT, engine_of, model, params, run  # noqa: F401

from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions
from zse.structured.options import read_structure


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_replies_are_the_same(engine_of, family, tmp_path):  # noqa: F811
    engine = engine_of(model=str(tiny.write(family, tmp_path)))
    ids = tiny.tokens(family).tolist()
    limit = engine.scheduler.max_context
    requests = [
        (ids[:length], params(min(24, limit - length), **sampled))
        for length, sampled in (
            (15, {}),
            (21, dict(temperature=1.0, seed=3)),
            (40, dict(temperature=0.7, seed=4, logprobs=1)),
        )
    ]
    told = run(engine, requests)
    rng = random.Random(1)
    oracle = Oracle(
        engine.scheduler,
        {tuple(ids): reply[0] for (ids, _), reply in zip(requests, told, strict=True)},
        COUNT,
        lambda: rng.randint(0, COUNT),
        tiny.config(family)["vocab_size"],
    )
    engine.use("speculation", oracle)
    assert run(engine, requests) == told
    assert engine.scheduler.counters.accepted_tokens > 10


def test_masks_hold_behind_drafts(engine_of, tmp_path):  # noqa: F811
    """Right drafts, wrong ones, and such that the grammar forbids, up to the end of the reply."""
    folder = tiny_model.write(tmp_path / "text")
    tiny_text.write(folder)
    engine = engine_of(model=str(folder))
    names = ("person", "array", "pattern", "enum")

    def replies() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {name: [] for name in names}
        for id, name in enumerate(names):
            options = RequestOptions(structure=read_structure({"json": SCHEMAS[name]}))
            engine.submit(id, [5 + id, 6, 7], SamplingParams(max_tokens=100, temperature=1.0, seed=id), options)
        while engine.has_work:
            for output in engine.step():
                assert output.finish in (None, "stop"), output.error
                found[names[output.id]] += output.tokens
        return found

    told = replies()
    rng = random.Random(2)
    oracle = Oracle(
        engine.scheduler,
        {(5 + id, 6, 7): told[name] for id, name in enumerate(names)},
        COUNT,
        lambda: rng.randint(0, COUNT),
        tiny_model.VOCAB,
    )
    engine.use("speculation", oracle)
    assert replies() == told
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
