"""Random PEFT folders for the tiny models, and the models with these merged into their weights."""

import json

import numpy as np
import tiny
import tiny_families
from formats_build import safetensors

LINEAR = ("_proj.weight", "_proj_with_mqa.weight", "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight")
LINEAR += tuple(f"in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))


def weights_of(family):
    return tiny.weights(family) if family in tiny.CONFIGS else tiny_families.weights(family)


def config_of(family):
    return tiny.config(family) if family in tiny.CONFIGS else tiny_families.CONFIGS[family]


def modules(family, only=None):
    """Of the model's file, that adapters may change: without experts and routers. only: ends of their names."""
    names = [
        name.removesuffix(".weight")
        for name in weights_of(family)
        if name.endswith(LINEAR) and ".layers." in name and ".experts." not in name and "kv_b_proj" not in name
    ]
    return [name for name in names if only is None or name.endswith(tuple(only))]


def adapter(family, seed, rank=4, alpha=6.0, only=None):
    """(module → lora_A, lora_B, scale). Numbers are exact in f16, so that what is compared is the arithmetic."""
    rng = np.random.default_rng(seed)
    shapes = {name: values.shape for name, values in weights_of(family).items()}
    found = {}
    for module in modules(family, only):
        rows, columns = shapes[f"{module}.weight"]
        down = rng.standard_normal((rank, columns)) / columns**0.5
        up = rng.standard_normal((rows, rank)) / 4
        found[module] = *(each.astype(np.float16).astype(np.float32) for each in (down, up)), alpha / rank
    return found


def write(found, folder, rank=4, alpha=6.0, dtype="F32", tensors=None, **config):
    """A PEFT folder. tensors: more of them, or others, by name; config: fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"F32": np.float32, "F16": np.float16}
    stored = {}
    for module, (down, up, _) in found.items():
        for name, values in (("lora_A", down), ("lora_B", up)):
            raw = tiny.to_bf16(values) if dtype == "BF16" else values.astype(kinds[dtype])
            stored[f"base_model.model.{module}.{name}.weight"] = dtype, values.shape, raw.tobytes()
    names = sorted({module.rpartition(".")[2] for module in found})
    fields = dict(peft_type="LORA", r=rank, lora_alpha=alpha, target_modules=names, bias="none", task_type="CAUSAL_LM")
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    (folder / "adapter_model.safetensors").write_bytes(safetensors(stored | (tensors or {}), {"format": "pt"}))
    return folder


def merged(family, found, folder):
    """The model's folder with the adapter in its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights_of(family)
    for module, (down, up, scale) in found.items():
        delta = scale * (up.astype(np.float64) @ down.astype(np.float64))
        weights[f"{module}.weight"] = (weights[f"{module}.weight"] + delta).astype(np.float32)
    return tiny.save(folder, config_of(family), weights, "F32")


def base(family, folder):
    folder.mkdir(parents=True, exist_ok=True)
    return tiny.save(folder, config_of(family), weights_of(family), "F32")
