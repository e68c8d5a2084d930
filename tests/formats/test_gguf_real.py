"""The two public models: opening them, and their tensors against the `gguf` package."""

import time

import numpy as np
import pytest

from zse.formats.gguf_blocks import dequantize
from zse.formats.opening import open_model

GEMMA, SMOLLM = "gemma3-270m", "smollm2"


@pytest.fixture
def model(real_models):
    return lambda name: open_model(real_models[name])


def test_smollm(model):
    with model(SMOLLM) as source:
        assert (source.kind, source.naming, source.architecture) == ("gguf", "gguf", "llama")
        assert source.interleaved_rope and source.metadata["llama.block_count"] == 30
        info = source.tensors["blk.0.ffn_down.weight"]
        assert (info.type, info.shape, info.layout, info.nbytes) == ("Q4_1", (576, 1536), "ggml", 552960)
        assert source.metadata["tokenizer.ggml.tokens"].count == 49152
        assert source.metadata["tokenizer.ggml.merges"].count == 48900
        assert source.tokenizer.fields["tokenizer.ggml.model"] == "gpt2"
        assert source.chat_template.startswith("{% for message in messages %}")


def test_gemma_opens_fast_with_its_vocabulary_left_in_the_file(model):
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        with model(GEMMA) as source:
            best = min(best, time.perf_counter() - start)
    assert best < 0.2
    with model(GEMMA) as source:
        tokens, scores = source.metadata["tokenizer.ggml.tokens"], source.metadata["tokenizer.ggml.scores"]
        assert tokens.count == scores.count == 262144 and len(scores.raw) == 4 * 262144
        assert list(tokens)[:4] == [b"<pad>", b"<eos>", b"<bos>", b"<unk>"]
        assert not source.interleaved_rope


@pytest.mark.parametrize("file", [SMOLLM, GEMMA])
def test_values_equal_the_gguf_package(model, file):
    import gguf
    from gguf import quants

    with model(file) as source:
        seen = set()
        for info in source.tensors.values():
            if info.type in seen:
                continue
            seen.add(info.type)
            rows = min(info.shape[0], 64)
            shape = (rows, *info.shape[1:])
            raw = source.read(info, 0, info.nbytes // info.shape[0] * rows)
            blocks = np.frombuffer(raw, np.uint8).reshape(rows, -1)
            expected = quants.dequantize(blocks, gguf.GGMLQuantizationType[info.type]).reshape(shape)
            assert np.array_equal(dequantize(info.type, raw, shape), expected), info.name
    assert len(seen) >= 3
