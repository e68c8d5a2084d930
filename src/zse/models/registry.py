"""Exact architecture names → the class that knows the architecture. A miss lists what is supported; nothing is
guessed."""

import importlib

from zse.errors import UnsupportedError
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder

# ModelConfig.architecture → module and class.
ARCHITECTURES = {
    "llama": ("llama", "Llama"),
    "mistral": ("mistral", "Mistral"),
    "ministral3": ("mistral", "Ministral3"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "gemma2": ("gemma2", "Gemma2"),
    "gemma3": ("gemma3", "Gemma3"),
    "phi3": ("phi3", "Phi3"),
    "olmo2": ("olmo2", "Olmo2"),
    "smollm3": ("smollm3", "SmolLM3"),
    "granite": ("granite", "Granite"),
    "glm4": ("glm4", "Glm4"),
    "minicpm": ("minicpm", "MiniCPM"),
    "cohere": ("cohere", "Cohere"),
    "cohere2": ("cohere", "Cohere2"),
}
# `architectures[0]` of config.json.
HF_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3TextModel": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Glm4ForCausalLM": "glm4",
    "MiniCPMForCausalLM": "minicpm",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
}
# Models whose text part is one of ours, by `model_type` of their `text_config`; what they see with is not read.
WRAPPERS = {
    "Mistral3ForConditionalGeneration": {"mistral": "mistral", "ministral3": "ministral3"},
    "Gemma3ForConditionalGeneration": {"gemma3_text": "gemma3"},
}
# `general.architecture` of a GGUF file. Mistral's files say llama, OLMo 3's say olmo2.
GGUF_NAMES = {
    "llama": "llama",
    "mistral3": "ministral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "glm4": "glm4",
    "minicpm": "minicpm",
    "command-r": "cohere",
    "cohere2": "cohere2",
}


def architecture(name: str) -> type[Decoder]:
    """The class of an architecture, by ModelConfig.architecture."""
    if name not in ARCHITECTURES:
        raise UnsupportedError("architecture", name, ARCHITECTURES)
    module, attribute = ARCHITECTURES[name]
    return getattr(importlib.import_module(f"zse.models.{module}"), attribute)


def forward_of(config: ModelConfig) -> Decoder:
    """The forward of a model."""
    return architecture(config.architecture)(config)


def config_from_gguf(path: object, metadata, tensors) -> ModelConfig:
    """ModelConfig of a GGUF file. metadata: key → value, and the names.ROPE_TENSORS that the file has → their values.
    tensors: name → shape (only sizes and presence are used).

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
    family = HF_NAMES.get(names[0])
    if names[0] in WRAPPERS:
        text = fields.section("text_config")
        if text is None:
            raise fields.fail("text_config", "is missing")
        family = text.choice("model_type", WRAPPERS[names[0]])
        # Some of a model's own settings stand outside of its text part.
        outer = {key: config[key] for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id") if key in config}
        fields = Fields(text.path, outer | text.values)
    if family is None:
        raise UnsupportedError(f"{path}: architecture", names[0], [*HF_NAMES, *WRAPPERS])
    generation = None if generation_config is None else Fields("generation_config.json", generation_config)
    return architecture(family).from_hf(fields, generation)
