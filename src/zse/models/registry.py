"""Exact architecture names → the class that knows the architecture. A miss lists what is supported; nothing is
guessed."""

import importlib

from zse.errors import UnsupportedError
from zse.models import sentence
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder

# ModelConfig.architecture → module and class.
ARCHITECTURES = {
    "llama": ("llama", "Llama"),
    "mistral": ("mistral", "Mistral"),
    "ministral3": ("mistral", "Ministral3"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "qwen2_moe": ("qwen2_moe", "Qwen2Moe"),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe"),
    "mixtral": ("mixtral", "Mixtral"),
    "olmoe": ("olmoe", "Olmoe"),
    "granite_moe": ("granite_moe", "GraniteMoe"),
    "glm4_moe": ("glm4_moe", "Glm4Moe"),
    "minimax_m2": ("minimax_m2", "MiniMaxM2"),
    "gemma2": ("gemma2", "Gemma2"),
    "gemma3": ("gemma3", "Gemma3"),
    "gemma_embedding": ("gemma_embedding", "GemmaEmbedding"),
    "gemma4": ("gemma4", "Gemma4"),
    "gpt_oss": ("gpt_oss", "GptOss"),
    "phi3": ("phi3", "Phi3"),
    "olmo2": ("olmo2", "Olmo2"),
    "smollm3": ("smollm3", "SmolLM3"),
    "granite": ("granite", "Granite"),
    "glm4": ("glm4", "Glm4"),
    "minicpm": ("minicpm", "MiniCPM"),
    "minicpm3": ("minicpm3", "MiniCPM3"),
    "deepseek": ("deepseek", "DeepSeek"),
    "deepseek_plain": ("deepseek", "DeepSeekPlain"),
    "cohere": ("cohere", "Cohere"),
    "cohere2": ("cohere", "Cohere2"),
    "lfm2": ("lfm2", "Lfm2"),
    "qwen3_next": ("qwen3_next", "Qwen3Next"),
    "qwen3_5": ("qwen3_next", "Qwen35"),
    "granite_hybrid": ("granite_hybrid", "GraniteHybrid"),
    "nemotron_h": ("nemotron_h", "NemotronH"),
    "bert": ("bert", "Bert"),
    "roberta": ("bert", "Roberta"),
    "modernbert": ("modernbert", "ModernBert"),
    "nomic_bert": ("nomic_bert", "NomicBert"),
    "nomic_bert_moe": ("nomic_bert_moe", "NomicBertMoe"),
    "qwen3_next_mtp": ("next_token", "Qwen3NextBlock"),
    "qwen3_5_mtp": ("next_token", "Qwen35Block"),
    "glm4_moe_mtp": ("next_token", "Glm4MoeBlock"),
    "deepseek_mtp": ("next_token", "DeepSeekBlock"),
    "eagle3": ("eagle3", "Eagle3"),
}
# `architectures[0]` of config.json.
HF_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "GraniteMoeForCausalLM": "granite_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3TextModel": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "GptOssForCausalLM": "gpt_oss",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Glm4ForCausalLM": "glm4",
    "MiniCPMForCausalLM": "minicpm",
    "MiniCPM3ForCausalLM": "minicpm3",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "Mistral4ForCausalLM": "deepseek",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "GraniteMoeHybridForCausalLM": "granite_hybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "BertModel": "bert",
    "BertForSequenceClassification": "bert",
    "RobertaModel": "roberta",
    "RobertaForSequenceClassification": "roberta",
    "XLMRobertaModel": "roberta",
    "XLMRobertaForSequenceClassification": "roberta",
    "ModernBertModel": "modernbert",
    "ModernBertForSequenceClassification": "modernbert",
    "NomicBertModel": "nomic_bert",
}
# Models whose text part is one of ours, by `model_type` of their `text_config`, or of the whole config.json where it
# has none (Qwen2-VL's and Qwen2.5-VL's own files); what they see with is not read. Qwen's turn in three parts (time,
# height, width), which of a text are one number: what Qwen2 and Qwen3 do.
_QWEN2_LLAMA = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"}
WRAPPERS = {
    "KimiK25ForConditionalGeneration": {"kimi_k2": "deepseek", "deepseek_v3": "deepseek"},
    "Mistral3ForConditionalGeneration": {"mistral": "mistral", "ministral3": "ministral3", "mistral4": "deepseek"},
    "Gemma3ForConditionalGeneration": {"gemma3_text": "gemma3"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "gemma4"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "gemma4"},
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": "qwen2", "qwen2_vl": "qwen2"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "qwen3"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "qwen3_moe"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "qwen3_5"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "qwen3_5"},
    "DeepseekVLV2ForCausalLM": {"deepseek_v2": "deepseek"},
    "Lfm2VlForConditionalGeneration": {"lfm2": "lfm2"},
    "InternVLForConditionalGeneration": _QWEN2_LLAMA,
    "LlavaOnevisionForConditionalGeneration": _QWEN2_LLAMA,
    "Idefics3ForConditionalGeneration": {"llama": "llama"},
    "SmolVLMForConditionalGeneration": {"llama": "llama"},
}
# `general.architecture` of a GGUF file. Mistral's files say llama, OLMo 3's say olmo2.
GGUF_NAMES = {
    "llama": "llama",
    "mistral3": "ministral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    "granitemoe": "granite_moe",
    "glm4moe": "glm4_moe",
    "minimax-m2": "minimax_m2",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma-embedding": "gemma_embedding",
    "gemma4": "gemma4",
    "gpt-oss": "gpt_oss",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "glm4": "glm4",
    "minicpm": "minicpm",
    "minicpm3": "minicpm3",
    "deepseek2": "deepseek",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5",
    "granitehybrid": "granite_hybrid",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "bert": "bert",
    "modern-bert": "modernbert",
    "nomic-bert": "nomic_bert",
    "nomic-bert-moe": "nomic_bert_moe",
}
# EAGLE-3 heads (models/eagle3.py), as SpecForge, AngelSlim and NVIDIA call them, and as speculators does. Those of EAGLE's authors are
# called LlamaForCausalLM and have draft_vocab_size.
EAGLE3_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
# What those are that have experts and no name of their own, and those whose tokens see what comes behind them.
GGUF_WITH_EXPERTS = {"llama": "mixtral"}
HF_WITH_EXPERTS = {"nomic_bert": "nomic_bert_moe"}
BIDIRECTIONAL = {"Gemma3TextModel": "gemma_embedding"}


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
    fields, family = Fields(path, metadata, name), GGUF_NAMES[name]
    if fields.integer(".expert_count", 0, low=0):
        family = GGUF_WITH_EXPERTS.get(family, family)
    return architecture(family).from_gguf(fields, tensors)


def name_of(path: object, config: dict) -> str:
    """The architecture that a config.json names, which is one that can be served or that drafts. What it may say of code of its own
    (`auto_map`) is for other programs. FormatError, UnsupportedError."""
    fields = Fields(path, config)
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.fail("architectures", "is not a list of names")
    if not any(names[0] in known for known in (HF_NAMES, WRAPPERS, EAGLE3_NAMES)):
        raise UnsupportedError(f"{path}: architecture", names[0], [*HF_NAMES, *WRAPPERS])
    return names[0]


def is_head(config: dict) -> bool:
    """Whether a config.json is of an EAGLE-3 head."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name in EAGLE3_NAMES or (name == "LlamaForCausalLM" and config.get("draft_vocab_size") is not None)


def config_from_hf(path: object, config: dict, generation_config: dict | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face directory's config.json (and generation_config.json, for its end-of-sequence ids).

    Raises FormatError for missing or impossible values, UnsupportedError for what this version does not know.
    """
    fields = Fields(path, config)
    name = name_of(path, config)
    if is_head(config):
        raise fields.fail(
            "architectures", "is an EAGLE-3 head, no model: MODEL --speculation eagle3 --draft-model HEAD"
        )
    family = HF_NAMES.get(name)
    if family is None:
        text = fields.section("text_config") or fields
        family = text.choice("model_type", WRAPPERS[name])
        # Some of a model's own settings stand outside of its text part.
        outer = {key: config[key] for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id") if key in config}
        fields = Fields(text.path, outer | text.values)
    if fields.integer("num_experts", 0, low=0):
        family = HF_WITH_EXPERTS.get(family, family)
    if fields.get("use_bidirectional_attention") is True:
        family = BIDIRECTIONAL.get(name, family)
    generation = None if generation_config is None else Fields("generation_config.json", generation_config)
    found = architecture(family).from_hf(fields, generation)
    return sentence.with_modules(found, Fields(path, config)) if "sentence_transformers" in config else found
