"""What sentence-transformers wrote beside an embedding model: modules.json, config.json of its Pooling and Dense
modules, sentence_bert_config.json, config_sentence_transformers.json."""

import os
import re
from typing import Any

from zse.errors import FormatError, UnsupportedError
from zse.formats.file import read_object, read_whole
from zse.lazy import json

MODULES, LENGTHS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
MAX_BYTES = 1 << 20
# Key of a Pooling module's config.json → ours.
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}

# Module behind module: a folder that has them in another order computes something else.
_ORDER = re.compile(r"(Transformer )?(Pooling ((Dense|Dropout) )*)?(Normalize )?")
KINDS = ("Transformer", "Pooling", "Dense", "Dropout", "Normalize")  # in this order
# Last part of a Dense module's activation_function → ours (zse.models.config.DENSE_ACTIVATIONS).
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_MODULE_WEIGHTS = re.compile(r"\d+_[A-Za-z]+_model\.safetensors")  # as `zse pull` names them

_PLAIN = re.compile(
    r"(.*\.)?(position_embd|token_types|cls|cls\.output|dense_\d+|(position|token_type)_embeddings|classifier.*|pooler\.dense"
    r"|head\.dense|conv1d|conv\.conv|ssm_conv1d|shortconv\.conv|ssm_norm)\.weight|(.*\.)?ssm_[ad]"
)


def stays_plain(name: str) -> bool:
    """Whether the tensor of that name is an encoder's table of positions or types, of a cross-encoder's classifier, or
    of a recurrent layer and no matrix: small, and kept as it is, row by row."""
    return _PLAIN.fullmatch(name) is not None


def is_module(name: str) -> bool:
    """Whether the file of that name, beside a model's own weights, has those of one of its modules."""
    return _MODULE_WEIGHTS.fullmatch(name) is not None


def dense_name(number: int, part: str) -> str:
    """The tensor "weight" or "bias" of a Dense module, from 0 on."""
    return f"sentence_transformers.dense_{number}.{part}"


def settings(path: str, names: list[str]) -> tuple[dict[str, Any], list[str]] | None:
    """Pooling, dense (a dict for each such module), max_seq_length and prompts, as far as files of the directory `path`
    say, and the files of the Dense modules' weights; None without such files. FormatError, UnsupportedError."""
    found: dict[str, Any] = {}
    weights = []
    if MODULES in names:
        modules = _modules(os.path.join(path, MODULES))
        found["modules"] = [kind for kind, _ in modules]
        for kind, folder in modules:
            if kind == "Pooling":
                found["pooling"] = _pooling(_file(path, names, folder, "config.json"))
            if kind == "Dense":
                found["dense"] = [*found.get("dense", []), _dense(_file(path, names, folder, "config.json"))]
                weights.append(_file(path, names, folder, "model.safetensors"))
                if not os.path.exists(weights[-1]):
                    what = "is missing: of a Dense module *.safetensors is read, no pickle"
                    raise FormatError(weights[-1], 0, "file", what)
    if LENGTHS in names:
        length = read_object(os.path.join(path, LENGTHS), LENGTHS).get("max_seq_length")
        found |= {} if length is None else {"max_seq_length": length}
    if PROMPTS in names:
        prompts = read_object(os.path.join(path, PROMPTS), PROMPTS).get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise FormatError(os.path.join(path, PROMPTS), 0, "prompts", "is not an object of texts")
        found |= {"prompts": prompts} if prompts else {}
    return (found, weights) if found else None


def _file(path: str, names: list[str], folder: str, name: str) -> str:
    """A module's file; `zse pull` has all files of a model in one folder."""
    pulled = f"{folder}_{name}"
    return os.path.join(path, *([pulled] if pulled in names else [folder, name]))


def _modules(path: str) -> list[tuple[str, str]]:
    """(kind, folder) of each."""
    try:
        modules = json.loads(read_whole(path, MODULES, MAX_BYTES))
        found = [(module["type"].rpartition(".")[2], module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(path, 0, MODULES, f"is not a list of modules: {error}") from None
    for _, folder in found:
        if not isinstance(folder, str) or os.path.isabs(folder) or ".." in folder.split("/"):
            raise FormatError(path, 0, "path", f"{str(folder)[:60]!r} is not a folder of this model")
    kinds = [str(kind)[:60] for kind, _ in found]
    for kind in kinds:
        if kind not in KINDS:
            raise UnsupportedError(f"{path}: module", kind, KINDS)
    if not _ORDER.fullmatch("".join(f"{kind} " for kind in kinds)):
        raise UnsupportedError(f"{path}: order of modules", ", ".join(kinds), [", ".join(KINDS)])
    return found


def _pooling(path: str) -> str:
    config = read_object(path, "config.json")
    given = config.get("pooling_mode")
    wanted = (
        [given] if given is not None else [name for name, on in config.items() if on is True and "pooling_mode" in name]
    )
    names = [POOLINGS.get(str(name), name if name in POOLINGS.values() else None) for name in wanted]
    if len(names) != 1 or names[0] is None:
        raise UnsupportedError(f"{path}: pooling", ", ".join(map(str, wanted)) or "none", sorted(POOLINGS))
    return names[0]


def _dense(path: str) -> dict[str, Any]:
    """inputs, outputs, bias and activation of a Dense module."""
    config = read_object(path, "config.json")
    for name in ("module_input_name", "module_output_name"):
        if (given := config.get(name)) not in (None, "sentence_embedding"):
            raise UnsupportedError(f"{path}: {name}", str(given)[:60], ["sentence_embedding"])
    given = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _ACTIVATIONS.get(given.rpartition(".")[2])
    if activation is None:
        raise UnsupportedError(f"{path}: activation_function", given[:60], sorted(_ACTIVATIONS))
    sizes = {"inputs": config.get("in_features"), "outputs": config.get("out_features")}
    return sizes | {"bias": config.get("bias", True), "activation": activation}
