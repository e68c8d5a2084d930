"""EmbeddingGemma (arXiv 2509.20354): Gemma 3 whose tokens see their whole sequence, in layers with a window half of
that on each side."""

import msgspec

from zse.models.config import DenseConfig, Fields, ModelConfig
from zse.models.encoder import GGUF_POOLING, Encoder
from zse.models.gemma3 import Gemma3
from zse.models.names import GGUF_DENSE


class GemmaEmbedding(Gemma3):
    attention = Encoder.attention
    finish = Encoder.finish

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        return _both_ways(Gemma3.from_hf(fields.changed(use_bidirectional_attention=None), generation), fields)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        kind = fields.choice_of(".pooling_type", GGUF_POOLING, 1)
        return _both_ways(Gemma3.from_gguf(fields, tensors), fields, pooling=kind, dense=_dense(fields, tensors))


def _both_ways(config: ModelConfig, fields: Fields, **values) -> ModelConfig:
    """The files' window counts both sides; its own token is between them."""
    window = config.sliding_window and config.sliding_window // 2 + 1
    values |= dict(architecture="gemma_embedding", causal=False, tied_head=True, sliding_window=window)
    return fields.build(**msgspec.structs.asdict(config) | values)


def _dense(fields: Fields, tensors) -> tuple[DenseConfig, ...]:
    """The dense modules that the file has; llama.cpp's converter leaves them out unless it is told."""
    shapes: list = []
    while (name := f"dense_{GGUF_DENSE + len(shapes)}.weight") in tensors:
        shapes.append(tensors[name])
        if len(shapes[-1]) != 2:
            raise fields.fail(name, f"has shape {list(shapes[-1])}, expected [outputs, inputs]")
    return tuple(DenseConfig(inputs=inputs, outputs=outputs, bias=False) for outputs, inputs in shapes)
