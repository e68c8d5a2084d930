"""Tiny random encoders: their configs, weights by Hugging Face name, folders, GGUF files named by the `gguf` package, and what
transformers computes of them (encoders.npz).

    PYTHONPATH=src:tests/formats python tests/models/tiny_encoders.py

makes encoders.npz anew, with transformers and torch installed.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import tiny
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf

from zse.models import registry

PATH = Path(__file__).with_name("encoders.npz")
_SIZES = dict(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=96, vocab_size=160, pad_token_id=0
)
_BERT = _SIZES | dict(
    model_type="bert", hidden_act="gelu", layer_norm_eps=1e-12, max_position_embeddings=80, type_vocab_size=2
)
_XLMR = _BERT | dict(model_type="xlm-roberta", pad_token_id=1, type_vocab_size=1, layer_norm_eps=1e-5)
_MODERN = _SIZES | dict(
    model_type="modernbert",
    hidden_activation="gelu",
    norm_eps=1e-5,
    max_position_embeddings=80,
    local_attention=16,
    global_attn_every_n_layers=3,
    global_rope_theta=160000.0,
    local_rope_theta=10000.0,
    eos_token_id=2,
    bos_token_id=1,
    cls_token_id=1,
    sep_token_id=2,
)
_ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
CONFIGS = {
    "bert": _BERT | dict(architectures=["BertModel"]),
    "bert_relu": _BERT | dict(architectures=["BertModel"], hidden_act="relu", num_attention_heads=4),
    "bert_pair": _BERT | dict(architectures=["BertForSequenceClassification"]) | _ONE,
    "xlmr": _XLMR | dict(architectures=["XLMRobertaModel"]),
    "xlmr_pair": _XLMR | dict(architectures=["XLMRobertaForSequenceClassification"]) | _ONE,
    "modernbert": _MODERN | dict(architectures=["ModernBertModel"]),
    "modernbert_pair": _MODERN
    | dict(architectures=["ModernBertForSequenceClassification"], classifier_pooling="mean")
    | _ONE,
    "nomic": _SIZES
    | dict(
        architectures=["NomicBertModel"],
        model_type="nomic_bert",
        hidden_act="silu",
        layer_norm_eps=1e-12,
        max_position_embeddings=80,
        type_vocab_size=2,
        rope_parameters={"rope_theta": 1000.0, "rope_type": "default"},
    ),
}
PAIRS = tuple(name for name in CONFIGS if name.endswith("_pair"))
PLAIN = tuple(name for name in CONFIGS if name not in PAIRS)
# What GGUF metadata have words for; a BERT's pooler and ModernBERT's head its converter leaves out.
IN_GGUF = ("bert", "xlmr", "xlmr_pair", "modernbert", "nomic")
LENGTHS = (40, 1, 57, 33)


def has_types(family: str) -> bool:
    return CONFIGS[family].get("type_vocab_size", 0) > 1


def texts(family: str) -> list[tuple[list[int], int]]:
    """(token ids, where the second text begins, 0: nowhere) of sequences of LENGTHS."""
    ids = [
        (tiny.uniform(f"{family} text {number}", (length,), 70.0) + 85).astype(int).tolist()
        for number, length in enumerate(LENGTHS)
    ]
    return [(each, len(each) // 3 if has_types(family) else 0) for each in ids]


def weights(family: str) -> dict[str, np.ndarray]:
    parsed = registry.config_from_hf("config.json", CONFIGS[family])
    model = registry.architecture(parsed.architecture)
    prefix = model.prefixes[-1] if family in PAIRS else ""
    found = {}
    for role in model.roles(parsed):
        name = model.hf_name(role.name, prefix)
        found[name] = tiny.uniform(family + name, role.shape, 0.5 if len(role.shape) == 1 else 0.25)
        if "norm" in role.name and not role.name.endswith("_bias"):
            found[name] += np.float32(1)
    return found


def write(family: str, folder: Path, dtype: str = "F32", pooling: dict | None = None) -> Path:
    """A directory. pooling: the Pooling module's config.json, with modules.json beside it."""
    tiny.save(folder, CONFIGS[family], weights(family), dtype)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in MODULES]
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))


def write_gguf(family: str, folder: Path, pooling: int = 1) -> Path:
    """A GGUF file of f32 tensors as llama.cpp's converter makes it. pooling: its number there."""
    config = CONFIGS[family]
    arch = {"nomic_bert": "nomic-bert", "modernbert": "modern-bert"}.get(config["model_type"], "bert")
    names = gguf.get_tensor_name_map({name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], 4)
    tensors = []
    for name, values in weights(family).items():
        stem, _, ending = name.removeprefix("roberta.").rpartition(".")
        found = names.get_name(stem) or names.get_name(f"bert.{stem}") or names.get_name(f"model.{stem}")
        assert found, stem
        if config["model_type"] == "xlm-roberta" and stem.endswith("position_embeddings"):
            values = values[config["pad_token_id"] + 1 :]  # the converter leaves out what is not used
        data = np.ascontiguousarray(values, np.float32)
        tensors.append(GGUFTensor(f"{found}.{ending}", "F32", data.shape, data.tobytes()))
    context = config["max_position_embeddings"] - (2 if config["model_type"] == "xlm-roberta" else 0)
    keys = [
        ("block_count", "u32", 4),
        ("context_length", "u32", context),
        ("embedding_length", "u32", 64),
        ("feed_forward_length", "u32", 96),
        ("attention.head_count", "u32", config["num_attention_heads"]),
        ("attention.layer_norm_epsilon", "f32", config.get("layer_norm_eps", 1e-5)),
        ("attention.causal", "bool", False),
        ("pooling_type", "u32", pooling),
    ]
    if arch == "nomic-bert":
        keys.append(("rope.freq_base", "f32", 1000.0))
    if arch == "modern-bert":
        keys += [
            ("rope.freq_base", "f32", 160000.0),
            ("rope.freq_base_swa", "f32", 10000.0),
            ("attention.sliding_window", "u32", 16),
        ]
    path = folder / f"{family}.gguf"
    metadata = [("general.architecture", "string", arch), *((f"{arch}.{key}", *rest) for key, *rest in keys)]
    path.write_bytes(bytes(build_gguf(metadata, tensors)))
    return path


def references(family: str, folder: Path) -> np.ndarray:
    """By transformers: the hidden states of all texts, or a pair's logits."""
    import torch
    import transformers

    kind = getattr(transformers, CONFIGS[family]["architectures"][0])
    model, info = kind.from_pretrained(
        write(family, folder), output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not info["unexpected_keys"] and all("pooler" in name for name in info["missing_keys"]), info
    found = []
    for ids, second in texts(family):
        types = {}
        if has_types(family):
            first = second or len(ids)
            types["token_type_ids"] = torch.tensor([[0] * first + [1] * (len(ids) - first)])
        with torch.inference_mode():
            out = model.eval()(input_ids=torch.tensor([ids]), **types)
        found.append((out.logits if family in PAIRS else out.last_hidden_state)[0].numpy())
    return np.concatenate([each.reshape(-1, each.shape[-1]) for each in found])


if __name__ == "__main__":
    import tempfile

    made = {}
    for each in CONFIGS:
        with tempfile.TemporaryDirectory() as where:
            made[each] = references(each, Path(where)).astype(np.float32)
    np.savez_compressed(PATH, **made)
