"""`zse info`: what is in a model file, without reading its weights."""

import os

from zse.formats.arrays import ScalarArray, StringArray
from zse.formats.opening import open_model

_MAX_SHOWN = 200


def info(path: str | os.PathLike) -> dict:
    """A description in plain JSON types. FormatError and UnsupportedError as open_model().

    path, kind, naming, architecture, nbytes, files [{path, nbytes}], num_parameters, vocab_size, num_tensors,
    types {type: {tensors, parameters, nbytes}}, bits_per_weight, tensors [{name, type, layout, shape, nbytes, offset,
    file}], metadata {key: value, texts cut at 200 characters, arrays as "N x type"}, tokenizer {kind, ...} or None,
    chat_template (bool), provenance.
    """
    with open_model(path) as model:
        types: dict[str, dict[str, int]] = {}
        tensors = []
        for tensor in model.tensors.values():
            entry = types.setdefault(tensor.type, {"tensors": 0, "parameters": 0, "nbytes": 0})
            entry["tensors"] += 1
            entry["parameters"] += tensor.num_elements
            entry["nbytes"] += tensor.nbytes
            facts = {name: getattr(tensor, name) for name in ("name", "type", "layout", "shape", "nbytes", "offset")}
            tensors.append(facts | {"shape": list(tensor.shape), "file": tensor.file.path})
        parameters = sum(entry["parameters"] for entry in types.values())
        metadata = dict(model.metadata)
        if model.naming == "hf":
            metadata |= {f"config.{key}": value for key, value in (model.hf_config or {}).items()}
            metadata |= {f"generation_config.{key}": value for key, value in (model.generation_config or {}).items()}
        tokenizer: dict[str, object] | None = None
        if model.tokenizer is not None:
            tokenizer = {"kind": model.tokenizer.kind, "vocab_size": model.vocab_size}
            if model.tokenizer.kind == "gguf":
                fields = model.tokenizer.fields
                tokenizer |= {name: _shown(fields.get(f"tokenizer.ggml.{name}")) for name in ("model", "pre")}
        return {
            **{name: getattr(model, name) for name in ("path", "kind", "naming", "architecture", "nbytes")},
            "files": [{"path": file.path, "nbytes": file.size} for file in model.files],
            "num_parameters": parameters,
            "vocab_size": model.vocab_size,
            "num_tensors": len(tensors),
            "types": types,
            "bits_per_weight": 8 * sum(entry["nbytes"] for entry in types.values()) / max(parameters, 1),
            "tensors": tensors,
            "metadata": {key: _shown(value) for key, value in metadata.items()},
            "tokenizer": tokenizer,
            "chat_template": model.chat_template is not None,
            "provenance": model.provenance,
        }


def _shown(value: object) -> object:
    if isinstance(value, StringArray | ScalarArray):
        return f"{value.count} x {value.type}"
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        return value[:_MAX_SHOWN] + "…"
    if isinstance(value, list):
        return [_shown(item) for item in value[:16]] + (["…"] if len(value) > 16 else [])
    if isinstance(value, dict):
        return {str(key): _shown(item) for key, item in value.items()}
    return value
