"""What is said has the distribution that the model gives, with drafts from prompt lookup, from a model and from a block that think
otherwise: chi-square over many seeds against probabilities from teacher forcing."""

import itertools
import math
import random

import numpy as np
import pytest
import tiny_eagle3
import tiny_families
import tiny_model
import tiny_mtp
from test_draft_model import always
from test_verify import model  # noqa: F401

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.sampling.params import SamplingParams

IDS = (40, 41, 42)  # all that is said: biases leave the others e^-100
NARROW, PARTLY = 64, (40, 42, 71)  # first ids, of which one of these is none
LENGTH, SEEDS = 3, 1500
# Any three of them stand in the prompt: prompt lookup always has a draft, often a wrong one.


def prompt_of(ids) -> list[int]:
    return [7, 8, *random.Random(1).choices(ids, k=100)]


def replies(engine, ids) -> list[tuple[int, ...]]:
    params = dict(max_tokens=LENGTH, temperature=2.0, ignore_eos=True, logit_bias={id: 100.0 for id in ids})
    for seed in range(SEEDS):
        engine.submit(seed, prompt_of(ids), SamplingParams(seed=seed, **params))
    said: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step():
            said[output.id] = said.get(output.id, ()) + tuple(output.tokens)
    return [said[seed] for seed in range(SEEDS)]


def probabilities(engine, ids) -> dict[tuple[int, ...], float]:
    """Of every reply, from the logits of teacher forcing."""
    found, prompt = {}, prompt_of(ids)
    for reply in itertools.product(ids, repeat=LENGTH):
        lines = np.concatenate(
            [
                np.array(logits, dtype=np.float64).reshape(-1, engine.scheduler.vocab_size)
                for _, _, _, logits in engine.feature("jobs").score([*prompt, *reply])
            ]
        )
        tempered = lines[len(prompt) - 1 : -1, ids] / 2.0
        each = np.exp(tempered) / np.exp(tempered).sum(axis=1, keepdims=True)
        found[reply] = float(np.prod([each[at, ids.index(token)] for at, token in enumerate(reply)]))
    return found


def statistic(said, expected) -> tuple[float, float]:
    """(chi-square, its 0.999 quantile after Wilson and Hilferty); cells with fewer than 5 expected are one."""
    cells = [(sum(one == reply for one in said), SEEDS * chance) for reply, chance in expected.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    small = [cell for cell in cells if cell[1] < 5]
    if small:
        large.append((sum(seen for seen, _ in small), sum(chance for _, chance in small)))
    freedom = len(large) - 1
    value = sum((seen - chance) ** 2 / chance for seen, chance in large)
    return value, freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("source", ["ngram", "draft", "hybrid", "mtp", "mtp latent", "mtp narrow", "eagle3"])
def test_distribution(model, tmp_path, source):  # noqa: F811
    options = {"speculation": "ngram"}
    if source == "draft":
        options = {"draft_model": str(tiny_model.write(tmp_path / "other", seed=1))}
    if source == "hybrid":
        model = tiny_families.write("qwen3_next", tmp_path)
    if source.startswith("mtp"):
        options = {"speculation": "mtp"} | ({"draft_vocabulary": NARROW} if "narrow" in source else {})
        model = tiny_mtp.write("deepseek_v3" if "latent" in source else "qwen3_5", tmp_path)
    if source == "eagle3":  # one of the ids it does not know
        model, head = tiny_eagle3.write(tmp_path, "qwen3", absent=IDS[2:])
        options = {"speculation": "eagle3", "draft_model": str(head)}
    loaded = load_engine(
        EngineConfig(
            model=str(model),
            threads=2,
            activations="f32",
            device="cpu",
            max_rows=32,
            kv_dtype="f32",
            max_waiting=SEEDS,
            draft_tokens=3,
            **options,
        ),
        Phases(lambda: 0.0),
    )
    engine, ids = loaded.engine, PARTLY if "narrow" in source else IDS
    expected = probabilities(engine, ids)
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-9)
    always(engine.feature("speculation"))
    said = replies(engine, ids)
    counters = engine.scheduler.counters
    assert 0.1 < counters.accepted_tokens / counters.drafted_tokens < 0.9
    value, bound = statistic(said, expected)
    assert value < bound
    # The bar is low enough to find one reply in thirty changed.
    commonest = max(expected, key=expected.get)
    wrong = [commonest if seed % 30 == 0 else reply for seed, reply in enumerate(said)]
    assert statistic(wrong, expected)[0] > value
    loaded.engine.close()
    loaded.source.close()
