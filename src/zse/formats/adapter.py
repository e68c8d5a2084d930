"""LoRA adapters as PEFT writes them (https://huggingface.co/docs/peft, "LoRA"): a folder with adapter_config.json and
adapter_model.safetensors.

Of a module the file has lora_A [r, inputs] and lora_B [outputs, r]; what they add is scale * B A, scale = alpha / r, or
alpha / sqrt(r) with use_rslora (arXiv 2312.03732). What else PEFT's configuration can ask for is refused by its name.
"""

import math
import os
from typing import Any, NamedTuple

from zse.errors import FormatError, UnsupportedError
from zse.formats.file import ModelFile, read_object
from zse.formats.safetensors import filled, read_header
from zse.formats.source import DENSE_TYPES, TensorInfo
from zse.lazy import numpy as np
from zse.quant import pack

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
MAX_RANK = 1024
# Fields that change what an adapter computes; only what switches them off is read.
OFF = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication"),
    *("target_parameters", "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "megatron_config"),
)
# Parts of tensors' names → what they belong to.
OTHERS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "an adapter of an embedding",
    "lora_B.bias": "lora_bias",
    "lora_": "another kind of adapter",
    "": "modules_to_save",
}


class Pair(NamedTuple):
    """One module's adapter. down: lora_A [rank, inputs]; up: lora_B [outputs, rank]."""

    down: TensorInfo
    up: TensorInfo
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class AdapterFile(NamedTuple):
    """pairs: by the module's name, "model.layers.0.self_attn.q_proj". Its file is open until close()."""

    path: str
    file: ModelFile
    pairs: dict[str, Pair]

    def wrong(self, module: str, reason: str) -> FormatError:
        """What is raised for a module."""
        return self.file.wrong(self.pairs[module].down.offset, module, reason)

    def close(self) -> None:
        self.file.close()


def open_adapter(path: str) -> AdapterFile:
    """Open a PEFT folder; nothing but headers is read. Raises FormatError, UnsupportedError."""
    path = os.fspath(path)
    config_path, tensors_path = os.path.join(path, CONFIG), os.path.join(path, TENSORS)
    if not os.path.exists(config_path):
        raise FormatError(path, 0, CONFIG, f"is missing; an adapter is a folder with {CONFIG} and {TENSORS}")
    config = read_object(config_path, CONFIG)
    rank, alpha = _check_config(config_path, config)
    if not os.path.exists(tensors_path) and os.path.exists(os.path.join(path, "adapter_model.bin")):
        reason = f"is a pickle, which can run code when it is read; only {TENSORS} is"
        raise FormatError(os.path.join(path, "adapter_model.bin"), 0, "file", reason)
    file = ModelFile(tensors_path)
    try:
        return AdapterFile(path, file, _pairs(file, config, rank, alpha))
    except BaseException:
        file.close()
        raise


def largest_rank(path: str) -> int:
    """Of a PEFT folder's modules. Raises as open_adapter()."""
    file = open_adapter(path)
    file.close()
    return max(pair.rank for pair in file.pairs.values())


def numbers_of(info: TensorInfo) -> Any:
    """A matrix of an adapter, NumPy f32. FormatError where a number is not finite."""
    raw = info.file.read(info.offset, info.nbytes, info.name)
    if info.type == "BF16":
        values = pack.bf16_to_f32(np.frombuffer(raw, np.uint16))
    else:
        values = np.frombuffer(raw, np.float32 if info.type == "F32" else np.float16).astype(np.float32)
    if not np.isfinite(values).all():
        raise info.file.wrong(info.offset, info.name, "holds values that are not finite")
    return values.reshape(info.shape)


def _check_config(path: str, config: dict) -> tuple[int, float]:
    """r and lora_alpha."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: peft_type", str(kind)[:80], ["LORA"])
    for name in OFF:
        if config.get(name):
            raise UnsupportedError(f"{path}: {name}", str(config[name])[:80], ["an adapter without it"])
    if config.get("bias", "none") != "none":
        raise UnsupportedError(f"{path}: bias", str(config["bias"])[:80], ["none"])
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise FormatError(path, 0, "r", f"{str(rank)[:80]} is not a whole number from 1 to {MAX_RANK}")
    return rank, _alpha(path, "lora_alpha", alpha)


def _alpha(path: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9:
        raise FormatError(path, 0, name, f"{str(value)[:80]} is not a number")
    return float(value)


def _pattern(path: str, config: dict, name: str) -> dict[str, Any]:
    """rank_pattern or alpha_pattern: ends of modules' names → a number. PEFT reads the names as regular expressions;
    those of a file from anywhere are not run."""
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise FormatError(path, 0, name, "is not an object")
    for key in pattern:
        if not key.replace(".", "").replace("_", "").isalnum():
            raise UnsupportedError(f"{path}: {name}", key[:80], ["ends of modules' names"])
    return pattern


def _found(pattern: dict[str, Any], module: str, otherwise: Any) -> Any:
    """What a pattern says of a module: its first key that the name ends with."""
    return next((value for key, value in pattern.items() if f".{module}".endswith(f".{key}")), otherwise)


def _pairs(file: ModelFile, config: dict, rank: int, alpha: float) -> dict[str, Pair]:
    tensors = filled(read_header(file)[0])
    path = os.path.join(os.path.dirname(file.path), CONFIG)
    ranks, alphas = (_pattern(path, config, name) for name in ("rank_pattern", "alpha_pattern"))
    downs: dict[str, TensorInfo] = {}
    ups: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        found = next(((kind, end) for kind, end in ((downs, DOWN), (ups, UP)) if name.endswith(end)), None)
        if found is None or not name.startswith(PREFIX):
            what = next(what for part, what in OTHERS.items() if part in name)
            raise UnsupportedError(f"{file.path}: tensor {name[:120]}: {what}", name[-40:], [f"*{DOWN}", f"*{UP}"])
        if info.type not in DENSE_TYPES:
            raise UnsupportedError(f"{file.path}: tensor {name[:120]}: dtype", info.type, DENSE_TYPES)
        if len(info.shape) != 2:
            raise file.wrong(info.offset, name, f"has shape {list(info.shape)}, expected two sizes")
        kind, end = found
        kind[name.removeprefix(PREFIX).removesuffix(end)] = info
    if not downs:
        raise file.wrong(0, "file", "has no lora_A: it adapts nothing")
    for module in downs.keys() ^ ups.keys():
        alone = downs[module] if module in downs else ups[module]
        raise file.wrong(alone.offset, alone.name, "stands alone: a module has lora_A and lora_B")
    pairs = {}
    for module, down in downs.items():
        up, mine = ups[module], down.shape[0]
        if up.shape[1] != mine or mine > MAX_RANK or mine != _found(ranks, module, rank):
            wanted = _found(ranks, module, rank)
            shapes = f"lora_A {list(down.shape)} and lora_B {list(up.shape)}"
            raise file.wrong(down.offset, module, f"has {shapes}; {CONFIG} says rank {str(wanted)[:20]}")
        factor = _alpha(path, "alpha_pattern", _found(alphas, module, alpha))
        pairs[module] = Pair(down, up, factor / (math.sqrt(mine) if config.get("use_rslora") is True else mine))
    return pairs
