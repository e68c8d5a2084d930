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
_GEMMA = dict(
    model_type="gemma3_text",
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=128,
    vocab_size=160,
    max_position_embeddings=80,
    hidden_activation="gelu_pytorch_tanh",
    rms_norm_eps=1e-6,
    query_pre_attn_scalar=32,
    sliding_window=16,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    use_bidirectional_attention=True,
    eos_token_id=1,
    bos_token_id=2,
    pad_token_id=0,
)
# As the authors' config.json names things.
_NOMIC_MOE = dict(
    architectures=["NomicBertModel"],
    model_type="nomic_bert",
    activation_function="gelu",
    n_embd=64,
    n_layer=4,
    n_head=2,
    n_inner=96,
    n_positions=80,
    vocab_size=160,
    type_vocab_size=1,
    layer_norm_epsilon=1e-5,
    prenorm=False,
    qkv_proj_bias=True,
    mlp_fc1_bias=True,
    mlp_fc2_bias=True,
    rotary_emb_base=10000,
    rotary_emb_fraction=1.0,
    rotary_emb_interleaved=False,
    use_rms_norm=None,
    num_experts=4,
    moe_top_k=2,
    moe_every_n_layers=2,
    moe_normalize_expert_weights=False,
    num_shared_experts=0,
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
    "gemma": _GEMMA | dict(architectures=["Gemma3TextModel"]),
    "nomic_moe": _NOMIC_MOE,
}
PAIRS = tuple(name for name in CONFIGS if name.endswith("_pair"))
PLAIN = tuple(name for name in CONFIGS if name not in PAIRS)
# What GGUF metadata have words for; a BERT's pooler and ModernBERT's head its converter leaves out.
IN_GGUF = ("bert", "xlmr", "xlmr_pair", "modernbert", "nomic", "gemma", "nomic_moe")
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
        name, shape = model.hf_name(role.name, prefix), role.shape
        if name.endswith("mlp.experts.bias"):
            shape = shape[1:]
        if "{e}.w2" in name:  # as the files have them: for each expert [inner, hidden]
            name, shape = name.replace("{e}.w2", "mlp.w2"), (role.shape[0] * 96 // 64, 64)
        found[name] = tiny.uniform(family + name, shape, 0.5 if len(shape) == 1 else 0.25)
        if "norm" in role.name and not role.name.endswith("_bias") and not model.hf_norm_plus_one:
            found[name] += np.float32(1)
    return found


def write(
    family: str, folder: Path, dtype: str = "F32", pooling: dict | None = None, dense: tuple[dict, ...] = ()
) -> Path:
    """A directory. pooling: the Pooling module's config.json, with modules.json beside it. dense: config.json of Dense modules, whose
    weights are dense_weights()."""
    tiny.save(folder, CONFIGS[family], weights(family), dtype)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        kinds = ["Transformer", "Pooling", *("Dense" for _ in dense), "Normalize"]
        paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
        modules = [
            {"type": f"sentence_transformers.models.{kind}", "path": path}
            for kind, path in zip(kinds, paths, strict=True)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
    for number, config in enumerate(dense):
        (folder / f"{number + 2}_Dense").mkdir()
        tiny.save(folder / f"{number + 2}_Dense", config, dense_weights(number, config), dtype)
    return folder


def dense_weights(number: int, config: dict) -> dict[str, np.ndarray]:
    """Of a Dense module, by the names of its file."""
    shape = config["out_features"], config["in_features"]
    found = {"linear.weight": tiny.uniform(f"dense {number}", shape, 0.25)}
    if config["bias"]:
        found["linear.bias"] = tiny.uniform(f"dense bias {number}", shape[:1], 0.5)
    return found


def write_gguf(family: str, folder: Path, pooling: int = 1, extra: list[GGUFTensor] | None = None) -> Path:
    """A GGUF file of f32 tensors as llama.cpp's converter makes it. pooling: its number there. extra: more tensors."""
    config = CONFIGS[family]
    known = {"nomic_bert": "nomic-bert", "modernbert": "modern-bert", "gemma3_text": "gemma-embedding"}
    arch = "nomic-bert-moe" if family == "nomic_moe" else known.get(config["model_type"], "bert")
    names = gguf.get_tensor_name_map({name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], 4)
    tensors = []
    for name, values in weights(family).items():
        if name.endswith("mlp.experts.bias"):
            continue  # the converter leaves it out
        if arch == "gemma-embedding" and "norm" in name:
            values = values + np.float32(1)
        if name.endswith((".mlp.w1", ".mlp.w2")):
            values = values.reshape(config["num_experts"], config["n_inner"], config["n_embd"])
            values, name = (values.swapaxes(1, 2) if name.endswith("w2") else values), f"{name}.weight"
        stem, _, ending = name.removeprefix("roberta.").rpartition(".")
        found = names.get_name(stem) or names.get_name(f"bert.{stem}") or names.get_name(f"model.{stem}")
        assert found, stem
        if config["model_type"] == "xlm-roberta" and stem.endswith("position_embeddings"):
            values = values[config["pad_token_id"] + 1 :]  # the converter leaves out what is not used
        data = np.ascontiguousarray(values, np.float32)
        tensors.append(GGUFTensor(f"{found}.{ending}", "F32", data.shape, data.tobytes()))
    config = GGUF_SAYS.get(family, {}) | config
    context = config["max_position_embeddings"] - (2 if config["model_type"] == "xlm-roberta" else 0)
    keys = [
        ("block_count", "u32", 4),
        ("context_length", "u32", context),
        ("embedding_length", "u32", config["hidden_size"]),
        ("feed_forward_length", "u32", config["intermediate_size"]),
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
    if arch == "nomic-bert-moe":
        keys += [
            ("rope.freq_base", "f32", 10000.0),
            ("expert_count", "u32", 4),
            ("expert_used_count", "u32", 2),
            ("moe_every_n_layers", "u32", 2),
        ]
    if arch == "gemma-embedding":
        keys += [
            ("attention.head_count_kv", "u32", 1),
            ("attention.key_length", "u32", 32),
            ("attention.value_length", "u32", 32),
            ("attention.layer_norm_rms_epsilon", "f32", 1e-6),
            ("attention.sliding_window", "u32", 16),
            ("attention.sliding_window_pattern", "u32", 3),
            ("rope.freq_base", "f32", 1000000.0),
        ]
    tensors += extra or []
    path = folder / f"{family}.gguf"
    metadata = [("general.architecture", "string", arch), *((f"{arch}.{key}", *rest) for key, *rest in keys)]
    path.write_bytes(bytes(build_gguf(metadata, tensors)))
    return path


# What the authors' names say, by those of others.
GGUF_SAYS = {
    "nomic_moe": dict(
        hidden_size=64, intermediate_size=96, num_attention_heads=2, max_position_embeddings=80, layer_norm_eps=1e-5
    )
}


def nomic_moe(ids: list[int], read: dict[str, np.ndarray], sum_bias: bool = True) -> np.ndarray:
    """Hidden states f64 [tokens, 64] by the formula of the authors' code, which transformers does not have. sum_bias: False of GGUF
    files, whose converter leaves that vector out."""
    from math import erf

    def norm(x, name):
        x = x - x.mean(1, keepdims=True)
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)
        return x * read[f"{name}.weight"] + read[f"{name}.bias"]

    def gelu(x):
        return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))

    def turn(x):  # [tokens, heads, 32]
        angles = np.arange(len(x))[:, None] / 10000.0 ** (np.arange(16) / 16)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        low, high = x[..., :16], x[..., 16:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    read = {name: values.astype(np.float64) for name, values in read.items()}
    x = read["embeddings.word_embeddings.weight"][ids] + read["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "emb_ln")
    for layer in range(4):
        part = {
            name.removeprefix(at): v for name, v in read.items() if name.startswith(at := f"encoder.layers.{layer}.")
        }
        q, k, v = np.split(
            (x @ part["attn.Wqkv.weight"].T + part["attn.Wqkv.bias"]).reshape(len(ids), 6, 32), 3, axis=1
        )
        scores = np.einsum("qhd,khd->hqk", turn(q), turn(k)) / np.sqrt(32)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(ids), 64)
        x = norm(
            x + mixed @ part["attn.out_proj.weight"].T + part["attn.out_proj.bias"], f"encoder.layers.{layer}.norm1"
        )
        if layer % 2:
            logits = x @ part["mlp.router.layer.weight"].T
            chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            w1, w2 = (part[f"mlp.experts.mlp.w{number}"].reshape(4, 96, 64) for number in (1, 2))
            total = np.zeros_like(x) + (part["mlp.experts.bias"] if sum_bias else 0)
            for token, row in enumerate(chances):
                for e in np.argsort(-row)[:2]:
                    total[token] += row[e] * (gelu(w1[e] @ x[token]) @ w2[e])
        else:
            inner = gelu(x @ part["mlp.fc1.weight"].T + part["mlp.fc1.bias"])
            total = inner @ part["mlp.fc2.weight"].T + part["mlp.fc2.bias"]
        x = norm(x + total, f"encoder.layers.{layer}.norm2")
    return x


def references(family: str, folder: Path) -> np.ndarray:
    """By transformers: the hidden states of all texts, or a pair's logits; of nomic_moe by the formula."""
    if family == "nomic_moe":
        return np.concatenate([nomic_moe(ids, weights(family)) for ids, _ in texts(family)])
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
