"""Tiny models of tiny_families.py with the block that predicts behind the last layer, as their folders and GGUF files have it."""

import re
from pathlib import Path

import gguf
import numpy as np
import tiny
import tiny_families
import tiny_hybrids
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf

from zse.models import next_token, registry

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3", "glm4_moe_lite")
IN_GGUF = ("qwen3_5", "qwen3_5_moe", "glm4_moe", "deepseek_v3")
# What llama.cpp calls the parts that only such a block has.
GGUF_PARTS = dict(enorm="enorm", hnorm="hnorm", eh_proj="eh_proj", shared_head="shared_head_norm")
GGUF_PARTS |= {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}


def config(family: str) -> dict:
    """config.json; of families whose layer stands behind the last one it says how many there are."""
    found = tiny_families.CONFIGS[family]
    return found if family.startswith("qwen") else found | {"num_nextn_predict_layers": 1}


def block_shapes(family: str) -> dict[str, tuple[int, ...]]:
    """The tensors of the block as its folder has them."""
    raw = config(family)
    found, shapes = next_token.block_config("config.json", registry.config_from_hf("config.json", raw)), {}
    model = registry.architecture(found.architecture)
    for role in model.roles(found):
        name = model.file_name(found, role.name, "hf", "model.").split("|")[0].partition("#")[0]
        if role.experts:
            shapes |= {name.format(e=e): (role.shape[0] // role.experts, role.shape[1]) for e in range(role.experts)}
        else:
            shapes[name] = role.shape if role.columns is None else (role.shape[0], role.columns[1])
    for name in [name for name in shapes if name.endswith("k_b_proj.weight")]:
        heads, nope, value = (raw[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
        _, rank = shapes.pop(name.replace("k_b_proj", "v_b_proj"))
        shapes[name.replace("k_b_proj", "kv_b_proj")] = (heads * (nope + value), rank)
        del shapes[name]
    return shapes


def block_weights(family: str) -> dict[str, np.ndarray]:
    """Exact in bf16."""
    centered, found = tiny_families.is_centered(family), {}
    for name, shape in block_shapes(family).items():
        wide = len(shape) == 1 or "mlp.gate.weight" in name
        values = tiny.uniform(family + name, shape, 0.5 if wide else 0.25)
        if "norm" in name and not centered:
            values += np.float32(1)
        found[name] = (tiny.to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    return found


def weights(family: str, agrees: bool = False) -> dict[str, np.ndarray]:
    """agrees: layers add little, and the block predicts from its token as the model does: mostly the same."""
    found = tiny_families.weights(family) | block_weights(family)
    if not agrees:
        return found
    hidden = config(family)["hidden_size"]
    norm = next(name for name in found if name.endswith((".shared_head.norm.weight", "mtp.norm.weight")))
    for name, values in found.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            found[name] = values * np.float32(0.003)
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            found[name] = np.concatenate([np.eye(hidden, dtype=np.float32), values[:, hidden:] * np.float32(0.1)], 1)
        elif "enorm" in name or "pre_fc_norm_embedding" in name:
            found[name] = values * 0 + np.float32(not tiny_families.is_centered(family))
    found[norm] = found["model.norm.weight"]
    return found


def write(family: str, folder: Path, dtype: str = "F32", agrees: bool = False) -> Path:
    return tiny.save(folder, config(family), weights(family, agrees), dtype)


def write_gguf(family: str, folder: Path) -> Path:
    """As llama.cpp's converters make it: the block is the layer behind the last one."""
    raw = tiny_families.CONFIGS[family]
    layers, hybrid = raw["num_hidden_layers"], family in tiny_hybrids.CONFIGS
    arch = (tiny_hybrids.ARCHS if hybrid else tiny_families.GGUF_ARCH).get(family, raw["model_type"])
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, layers + 1)
    made = {}
    for name, values in block_weights(family).items():
        if name.startswith("mtp.") and name.endswith("norm.weight") or "pre_fc_norm" in name:
            values = values + np.float32(1)
        if name.startswith("mtp.layers."):
            name = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
        made[name] = values
    metadata = tiny_hybrids.metadata(family, arch) if hybrid else tiny_families._metadata(family, arch)
    keys = [key for key in metadata if not key[0].endswith((".block_count", ".recurrent_layers"))]
    keys += [(f"{arch}.block_count", "u32", layers + 1), (f"{arch}.nextn_predict_layers", "u32", 1)]
    if hybrid:
        recurs = [kind == "linear_attention" for kind in raw["layer_types"]]
        keys.append((f"{arch}.attention.recurrent_layers", "bool[]", [*recurs, False]))
        plain = tiny_hybrids.gguf_weights(raw, tiny_families._stacked(tiny_families.weights(family)))
    else:
        plain = tiny_families._stacked(tiny_families.weights(family))
    tensors = []

    def add(name: str, values) -> None:
        data = np.ascontiguousarray(values, np.float32)
        tensors.append(GGUFTensor(name, "F32", data.shape, data.tobytes()))

    for name, values in (plain | tiny_families._stacked(made)).items():
        parts = [part for part in GGUF_PARTS if re.search(rf"(?:^|\.){part}\.", name)]
        if name == "mtp.norm.weight":
            parts = ["shared_head"]
        if parts:
            add(f"blk.{layers}.nextn.{GGUF_PARTS[parts[0]]}.weight", values)
        elif "kv_b_proj" in name:
            for called, part in tiny_families.split_latents(raw, values).items():
                add(f"blk.{name.split('.')[2]}.{called}.weight", part)
        else:
            add(tiny_hybrids.gguf_name(names, name), values)
    path = folder / f"{family}-mtp.gguf"
    path.write_bytes(bytes(build_gguf(keys, tensors)))
    return path
