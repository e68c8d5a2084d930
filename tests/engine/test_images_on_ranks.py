"""Models that see on several ranks: rank 0 has the tower, the others get what it made of an image with the step's inputs."""

import sys
from pathlib import Path

import numpy as np
import pytest
from rank_threads import ThreadedRanks

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("models", "formats")]
import tiny_vision as tiny  # noqa: E402

del sys.path[:2]

from test_seen_images import TOP, agrees  # noqa: E402

from zse.models.vision import load as _tower_loading  # noqa: E402, F401  # ranks are threads here: not imported by two at once
from zse.runtime.opening import open_device  # noqa: E402
from zse.sampling.params import SamplingParams  # noqa: E402
from zse.scheduler.options import RequestOptions  # noqa: E402

REFERENCES = np.load(tiny.PATH)


def run(engine, *requests) -> list:
    found = {id: ([], []) for id in range(len(requests))}
    for id, (prompt, images, params) in enumerate(requests):
        engine.submit(id, prompt, params, RequestOptions(images=tuple(images)))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.id][0].extend(output.tokens)
            found[output.id][1].extend(output.logprobs or [])
    return list(found.values())


@pytest.mark.parametrize(
    "family", "gemma3 qwen2_5_vl qwen3_vl mistral3 gemma4 gemma4_unified deepseek_vl2 deepseek_vl2/own".split()
)
def test_logits_equal_transformers(family, tmp_path):
    """All prompts at once in small steps; then replies, one of a cached prompt. own: each rank has its own pages."""
    family, _, own = family.partition("/")
    path, most = str(tiny.write(family, tmp_path)), 24 if tiny.vision(family).whole else 7
    options = dict(model=path, device="cpu", threads=2, kv_dtype="f32", activations="f32", tensor_parallel_size=2)
    options |= dict(max_tokens_per_step=most, max_rows=4, max_context=192, speculation="none")
    options["data_parallel_attention"] = own == "own"
    prompts = [tiny.prompt(family, number) for number in range(len(tiny.PROMPTS))]
    with ThreadedRanks(lambda rank: open_device("cpu", threads=1), **options) as ranks:
        for number, found in enumerate(run(ranks.engine, *((*prompt, TOP) for prompt in prompts))):
            agrees(found, REFERENCES[f"{family} logits {number}"][-1])
        greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        (first, second), (alone,) = (
            run(ranks.engine, *some) for some in ([(*prompts[0], greedy)] * 2, [(*prompts[0], greedy)])
        )
        assert first[0] == second[0] == alone[0] and len(alone[0]) == 6
        assert ranks.engine.counters()["images_encoded"] == 2
