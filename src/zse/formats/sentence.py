"""What sentence-transformers wrote beside an embedding model: modules.json, the Pooling module's config.json,
sentence_bert_config.json, config_sentence_transformers.json."""

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

_PLAIN = re.compile(
    r"(.*\.)?(position_embd|token_types|cls|cls\.output|(position|token_type)_embeddings|classifier.*|pooler\.dense|head\.dense)\.weight"
)


def stays_plain(name: str) -> bool:
    """Whether the tensor of that name is an encoder's table of positions or types, or of a cross-encoder's classifier: small, and
    kept as it is, row by row."""
    return _PLAIN.fullmatch(name) is not None


def settings(path: str, names: list[str]) -> dict[str, Any] | None:
    """pooling, modules (the kinds of all), max_seq_length and prompts, as far as files of the directory `path` say; None without
    such files. FormatError, UnsupportedError."""
    found: dict[str, Any] = {}
    if MODULES in names:
        modules = _modules(os.path.join(path, MODULES))
        found["modules"] = [kind for kind, _ in modules]
        for kind, folder in modules:
            if kind == "Pooling":
                # `zse pull` has all files of a model in one folder.
                pulled = f"{folder}_config.json"
                found["pooling"] = _pooling(
                    os.path.join(path, *([pulled] if pulled in names else [folder, "config.json"]))
                )
    if LENGTHS in names:
        length = read_object(os.path.join(path, LENGTHS), LENGTHS).get("max_seq_length")
        found |= {} if length is None else {"max_seq_length": length}
    if PROMPTS in names:
        prompts = read_object(os.path.join(path, PROMPTS), PROMPTS).get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise FormatError(os.path.join(path, PROMPTS), 0, "prompts", "is not an object of texts")
        found |= {"prompts": prompts} if prompts else {}
    return found or None


def _modules(path: str) -> list[tuple[str, str]]:
    """(kind, folder) of each."""
    try:
        modules = json.loads(read_whole(path, MODULES, MAX_BYTES))
        found = [(module["type"].rpartition(".")[2], module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(path, 0, MODULES, f"is not a list of modules: {error}") from None
    for _, folder in found:
        if not isinstance(folder, str) or os.path.isabs(folder) or ".." in folder.split("/"):
            raise FormatError(path, 0, "path", f"{str(folder)[:60]!r} is not a folder of this model")
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
