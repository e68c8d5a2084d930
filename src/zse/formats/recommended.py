"""The sampling that a model's authors recommend, for requests that name none."""

import os
from collections.abc import Mapping
from typing import Any

from zse.formats import catalog, store
from zse.formats.source import ModelSource

# Sampling field → its key in a GGUF file, as llama.cpp writes and reads them (gguf-py's Keys.General.SAMPLING_*).
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def recommended(source: ModelSource) -> tuple[dict[str, Any], str]:
    """(sampling field → value, where they stand): of generation_config.json, of GGUF metadata, or of the catalog when
    the file is a catalog model's; ({}, "") without any. Only numbers; whether they are in range is the caller's to
    check.

    `do_sample` is not looked at: many files leave it out and recommend a temperature all the same, as vLLM has it
    (ModelConfig.get_diff_sampling_param)."""
    places = (
        (lambda: {name: (source.generation_config or {}).get(name) for name in GGUF_KEYS}, "generation_config.json"),
        (lambda: {name: source.metadata.get(key) for name, key in GGUF_KEYS.items()}, "the file's metadata"),
        (lambda: _of_catalog(source), "the catalog"),
    )
    for values, place in places:
        if found := {name: value for name, value in values().items() if type(value) in (int, float)}:
            return found, place
    return {}, ""


def _of_catalog(source: ModelSource) -> Mapping[str, float]:
    """The sampling of the catalog model that the file is: by its name and size, or by the name under which it is
    stored."""
    file = os.path.basename(source.path)
    for entry in catalog.CATALOG.values():
        if entry.filename == file and entry.size == source.nbytes:
            return entry.sampling
    name = store.stored_name(source.path)
    found = catalog.find(name) if name and name not in catalog.CATALOG else None
    return found.sampling if found else {}
