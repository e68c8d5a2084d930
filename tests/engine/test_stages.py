"""An engine whose layers are on several ranks, one behind the other: the tokens and log-probabilities of one process, bit for bit."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_model

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("structured", "models")]
import tiny
import tiny_families
import tiny_text

from zse import LLM, BeamParams, SamplingParams
from zse.engine.config import EngineConfig
from zse.errors import ConfigError, GroupError, UnsupportedError
from zse.models.stages import spans_of

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2, ignore_eos=True)
MASKED = SamplingParams(max_tokens=12, temperature=0.0, allowed_token_ids=tuple(range(20, 40)), ignore_eos=True)


def prompt(length: int, seed: int = 0, most: int = 100) -> list[int]:
    return np.random.default_rng(seed).integers(3, most, length).tolist()


PROMPTS = [prompt(40), prompt(7, 1), prompt(90, 2)]


def engine(model, size: int, **options) -> LLM:
    options = dict(activations="f32", kv_dtype="f32", max_rows=4) | options
    return LLM(str(model), device="cpu", threads=size, pipeline_parallel_size=size, **options)


@pytest.fixture(scope="module")
def model(model):
    tiny_text.write(model, letters="".join(map(chr, range(0xC0, 0xC0 + tiny_model.VOCAB - 124))))
    return model


def replies(llm, params=GREEDY, prompts=PROMPTS):
    return [(output.token_ids, output.logprobs) for output in llm.generate(prompts, params)]


def test_replies_jobs_and_beams(model):
    """In steps of 16 tokens, so that chunks of prompts follow each other through the ranks."""
    with engine(model, 1, max_tokens_per_step=16) as one, engine(model, 2, max_tokens_per_step=16) as two:
        for params in (GREEDY, SAMPLED, MASKED):
            assert replies(two, params) == replies(one, params)
        np.testing.assert_array_equal(two.embed(PROMPTS), one.embed(PROMPTS))
        assert two.logprobs_of(PROMPTS[2]).logprobs == one.logprobs_of(PROMPTS[2]).logprobs
        beams = BeamParams(beam_width=3, max_tokens=8)
        found, wanted = (llm.beam_search(PROMPTS[1], beams)[0] for llm in (two, one))
        assert [beam.token_ids for beam in found] == [beam.token_ids for beam in wanted]
        assert two.model_config == one.model_config
        assert two._engine.scheduler.check_integrity() == [] and not two._engine.has_work


def test_pages_move_on_all_ranks(model):
    tight = dict(
        max_rows=3, max_tokens_per_step=16, num_pages=14, page_size=16, reserve_output=False, preemption="swap"
    )
    with engine(model, 1) as one, engine(model, 2, cache_host_memory=1 << 24, **tight) as two:
        wanted = replies(one)
        assert [ids for ids, _ in replies(two)] == [ids for ids, _ in wanted]
        longer = [PROMPTS[2] + wanted[2][0][:-1]]
        assert replies(two, prompts=longer)[0][0] == replies(one, prompts=longer)[0][0]


FAMILIES = ["llama", "qwen2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v2_lite", "minicpm3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    """Tied heads, windows in groups of pages, experts, latents."""
    module = tiny if family in tiny.CONFIGS else tiny_families
    path = module.write(family, tmp_path)
    tiny_text.write(path, letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    prompts = [prompt(60, 3, 50), prompt(9, 4, 50)]
    with engine(path, 1, max_tokens_per_step=32) as one, engine(path, 2, max_tokens_per_step=32) as two:
        assert replies(two, prompts=prompts) == replies(one, prompts=prompts)


def test_a_rank_that_is_killed_ends_the_group(model):
    with engine(model, 2) as llm:
        pid = llm._engine.feature("ranks")._ranks._peers[0].process.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GroupError, match=rf"rank 1 \(process {pid}\) was killed by signal 9"):
            llm.generate(PROMPTS, GREEDY)


def test_a_rank_that_is_silent_is_given_up(model, monkeypatch):
    monkeypatch.setenv("ZSE_GROUP_TIMEOUT_S", "2")
    with engine(model, 2) as llm:
        pid = llm._engine.feature("ranks")._ranks._peers[0].process.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(GroupError, match="waited 2 s for rank 1"):
            llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("options", [dict(tensor_parallel_size=2), dict(adapter_slots=1), dict(resident_layers=0)])
def test_options_that_do_not_go_together(options):
    with pytest.raises(ConfigError, match="is not possible with --pipeline-parallel-size 2 yet"):
        EngineConfig(model="x", pipeline_parallel_size=2, **options)


def test_more_ranks_than_layers(model):
    with pytest.raises((UnsupportedError, GroupError), match="--pipeline-parallel-size 9: layers"):
        LLM(str(model), device="cpu", pipeline_parallel_size=9)


def test_spans_are_even():
    assert spans_of([1] * 8, 0, 2) == [(0, 4), (4, 8)]
    assert spans_of([1] * 8, 4, 2) == [(0, 2), (2, 8)]
    assert spans_of([5, 1, 1, 1], 0, 3) == [(0, 1), (1, 3), (3, 4)]
    assert spans_of([1, 1], 100, 2) == [(0, 1), (1, 2)]
    rng = np.random.default_rng(0)
    for _ in range(50):
        costs, size = rng.integers(1, 9, 9).tolist(), int(rng.integers(1, 5))
        found = spans_of(costs, 3, size)
        assert found[0][0] == 0 and found[-1][1] == 9 and all(a < b for a, b in found)
        assert all(end == start for (_, end), (start, _) in zip(found, found[1:], strict=False))
