"""What every architecture says of itself beside its forward: its weights' names, and how config.json and GGUF metadata
become a ModelConfig."""

from collections.abc import Iterator
from typing import ClassVar

from zse.models.config import Fields, ModelConfig
from zse.models.names import HF_PREFIXES, LLAMA, MODEL, Names, Role, layer_roles


class Family:
    """An architecture. Subclasses override what differs from Llama.

    names: a layer's roles with their names. hf_norm_plus_one: a Hugging Face file stores norm weights as their distance
    from 1. whole_qk_norm: q and k are normalized over all heads together. norm_kind: "rms" or "layer" (without a bias).
    """

    names: ClassVar[Names] = LLAMA
    hf_norm_plus_one: ClassVar[bool] = False
    whole_qk_norm: ClassVar[bool] = False
    norm_kind: ClassVar[str] = "rms"

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        """ModelConfig of config.json (and generation_config.json, for its end-of-sequence ids)."""
        raise NotImplementedError

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        """ModelConfig of GGUF metadata. tensors: name → shape."""
        raise NotImplementedError

    @classmethod
    def roles(cls, config: ModelConfig) -> Iterator[Role]:
        """Every tensor of the model in execution order; a tied head is not a tensor of its own."""
        yield Role("embed", (config.vocab_size, config.hidden_size), "matrix")
        roles = layer_roles(config, cls.names, cls.whole_qk_norm)
        for layer in range(config.num_layers):
            for role in roles:
                yield Role(f"layers.{layer}.{role.name}", role.shape, role.kind, role.heads)
        yield Role("final_norm", (config.hidden_size,), "norm")
        if not config.tied_head:
            yield Role("head", (config.vocab_size, config.hidden_size), "matrix")

    @classmethod
    def gguf_name(cls, role: str) -> str:
        """ "layers.3.q" → "blk.3.attn_q.weight"."""
        if not role.startswith("layers."):
            return MODEL[role][0]
        _, layer, name = role.split(".")
        return f"blk.{layer}.{cls.names[name][0]}"

    @classmethod
    def hf_name(cls, role: str, prefix: str = "model.") -> str:
        """ "layers.3.q" → "model.layers.3.self_attn.q_proj.weight"; the head has a prefix of its own."""
        if not role.startswith("layers."):
            return (HF_PREFIXES[prefix] if role == "head" else prefix) + MODEL[role][1]
        _, layer, name = role.split(".")
        return f"{prefix}layers.{layer}.{cls.names[name][1]}"
