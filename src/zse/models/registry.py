"""Exact architecture names → the module that knows the architecture. A miss lists what is supported; nothing is
guessed."""

import importlib

from zse.errors import UnsupportedError
from zse.models.config import Fields, ModelConfig

# `architectures[0]` of config.json.
HF_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3TextModel": "gemma3",
}
# `general.architecture` of a GGUF file (Mistral files say llama).
GGUF_NAMES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def architecture(name: str):
    """The module of an architecture: `from_gguf`, `from_hf`, `GGUF_QK_PERMUTED`, `HF_NORM_PLUS_ONE`."""
    if name not in ARCHITECTURES:
        raise UnsupportedError("architecture", name, ARCHITECTURES)
    return importlib.import_module(f"zse.models.{name}")


def forward_of(config: ModelConfig):
    """The zse.models.decoder.Decoder of a model."""
    module = architecture(config.architecture)
    return getattr(module, config.architecture.capitalize())(config)


def config_from_gguf(path: object, metadata, tensors) -> ModelConfig:
    """ModelConfig of a GGUF file. metadata: key → value. tensors: name → shape (only sizes and presence are used).

    Raises FormatError for missing or impossible values, UnsupportedError for what this version does not know.
    """
    name = Fields(path, metadata).text("general.architecture")
    if name not in GGUF_NAMES:
        raise UnsupportedError(f"{path}: architecture", name, GGUF_NAMES)
    return architecture(GGUF_NAMES[name]).from_gguf(Fields(path, metadata, name), tensors)


def config_from_hf(path: object, config: dict, generation_config: dict | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face directory's config.json (and generation_config.json, for its end-of-sequence ids).

    Raises FormatError for missing or impossible values, UnsupportedError for what this version does not know.
    """
    fields = Fields(path, config)
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.fail("architectures", "is not a list of names")
    if config.get("auto_map"):
        raise fields.fail("auto_map", "the model asks to run code from its directory, which is never done")
    if names[0] not in HF_NAMES:
        raise UnsupportedError(f"{path}: architecture", names[0], HF_NAMES)
    generation = None if generation_config is None else Fields("generation_config.json", generation_config)
    return architecture(HF_NAMES[names[0]]).from_hf(fields, generation)
