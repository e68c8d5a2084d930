"""A model on two GPUs of this machine, a process each: python -m pytest tests/gpu/test_ranks.py"""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_families
import tiny_model
import tiny_text
from test_act_order import write as write_gptq

from zse import LLM, SamplingParams
from zse.errors import GroupError
from zse.formats.convert import convert
from zse.runtime.cuda import list_devices

pytestmark = pytest.mark.skipif(len(list_devices()) < 2, reason="needs two GPUs")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
# bf16 between the operations: sums of shares are rounded where the sum of all is. Of the largest log-probability.
LIMIT = 0.05


def engine(path, size: int, **options) -> LLM:
    return LLM(str(path), device="cuda", tensor_parallel_size=size, max_context=128, **dict(max_rows=4) | options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, length).tolist()


PROMPTS = [prompt(40), prompt(7, 1), prompt(90, 2)]


def near(found: LLM, wanted: LLM) -> None:
    """Log-probabilities of prompts; most greedy tokens are the other's under teacher forcing."""
    for ids in PROMPTS:
        a, b = (np.array(llm.logprobs_of(ids).logprobs) for llm in (found, wanted))
        assert np.abs(a - b).max() < LIMIT * np.abs(b).max()
    replies = [output.token_ids for output in found.generate(PROMPTS, GREEDY)]
    for ids, reply in zip(PROMPTS, replies, strict=True):
        likeliest = wanted.logprobs_of(ids + reply).top1[len(ids) - 1 :]
        assert (np.array(likeliest) == np.array(reply)).mean() > 0.5


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    model = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", head_dim=64)
    tiny_text.write(model, letters="".join(map(chr, range(0xC0, 0xC0 + tiny_model.VOCAB - 124))))
    return model


def test_logits_of_one_gpu(path):
    with engine(path, 1) as one, engine(path, 2) as two:
        assert two._engine.runner.runs_ahead
        near(two, one)
        sampled = SamplingParams(max_tokens=16, temperature=0.8, seed=5, repetition_penalty=1.1, logprobs=2)
        assert [len(output.logprobs) for output in two.generate(PROMPTS, sampled)] == [
            len(output.token_ids) for output in two.generate(PROMPTS, sampled)
        ]
        np.testing.assert_allclose(two.embed(PROMPTS[:2]), one.embed(PROMPTS[:2]), atol=0.02)


HYBRIDS = [("lfm2", "bf16"), ("qwen3_5", "bf16"), ("granite_hybrid", "bf16")]


@pytest.mark.parametrize("family, quant", [("gemma3", "fp8"), ("mixtral", "bf16"), ("llama", "int4"), *HYBRIDS])
def test_families_and_schemes(family, quant, tmp_path):
    module = tiny if family in tiny.CONFIGS else tiny_families
    (tmp_path / "hf").mkdir()
    source = module.write(family, tmp_path / "hf", "BF16")
    tiny_text.write(source, letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    convert(str(source), str(tmp_path / "model.zse"), quant=quant, layout="rows")
    with engine(tmp_path / "model.zse", 1) as one, engine(tmp_path / "model.zse", 2) as two:
        near(two, one)


def test_whole_experts(tmp_path):
    source = tiny_families.write("mixtral", tmp_path, "BF16")
    tiny_text.write(source, letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    with engine(source, 1) as one, engine(source, 2, expert_parallel=True) as two:
        near(two, one)


def test_attention_of_own_requests(tmp_path):
    source = tiny_families.write("minicpm3", tmp_path, "BF16")
    tiny_text.write(source, letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    with engine(source, 1) as one, engine(source, 2, data_parallel_attention=True) as two:
        near(two, one)
        assert two._engine.scheduler.check_integrity() == []


def test_columns_in_an_order_of_their_own(tmp_path):
    """GPTQ's act-order: ranks gather the inputs of o."""
    source, _ = write_gptq(tmp_path / "gptq")
    tiny_text.write(Path(source), letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    with engine(source, 1) as one, engine(source, 2) as two:
        near(two, one)


def test_stages(path):
    """Two groups of rows under way, and the first of them again: the tokens of one GPU bit for bit."""
    found = []
    for size in (1, 2):
        options = dict(max_context=192, max_rows=4, deterministic=True, pipeline_parallel_size=size)
        with LLM(str(path), device="cuda", **options) as llm:
            found.append([output.token_ids for output in llm.generate(PROMPTS * 3, GREEDY)])
            found.append(llm.embed(PROMPTS[:2]))
    assert found[0] == found[2]
    np.testing.assert_array_equal(found[1], found[3])


def test_a_rank_that_is_killed_ends_the_group(path):
    with engine(path, 2) as two:
        peer = two._engine.feature("ranks")._ranks._peers[0].process.pid
        two.generate(PROMPTS, GREEDY)
        os.kill(peer, signal.SIGKILL)
        with pytest.raises(GroupError, match="rank 1"):
            two.generate(PROMPTS, GREEDY)
