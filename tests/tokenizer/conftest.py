"""The C library under test, built from the sources at hand, and the public models' tokenizers."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from zse.formats.opening import open_model
from zse.tokenizer import native
from zse.tokenizer.bpe import from_gguf

SOURCES = Path(native.__file__).parent / "csrc"
# The goldens' file names by catalog name.
GOLDENS = {"smollm2": "smollm2.json", "gemma3-270m": "gemma.json"}


@pytest.fixture(scope="session", autouse=True)
def library(tmp_path_factory):
    """Loads the library, built from the sources at hand with every warning an error, or that of ZSE_NATIVE_DIR (a build
    with sanitizers, for instance)."""
    path = Path(native.installed())
    if not os.environ.get("ZSE_NATIVE_DIR"):
        path = tmp_path_factory.mktemp("native") / native.LIBRARY
        subprocess.run(
            [
                "cc",
                "-std=c11",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-fPIC",
                "-shared",
                "-fvisibility=hidden",
                *sorted(map(str, SOURCES.glob("*.c"))),
                "-o",
                str(path),
            ],
            check=True,
        )
    return native.library(str(path))


@pytest.fixture(scope="session")
def real_fields(real_models) -> dict[str, dict]:
    """Catalog name -> the tokenizer fields of that model's GGUF file."""
    sources = {name: open_model(real_models[name]) for name in GOLDENS}
    return {name: source.tokenizer.fields for name, source in sources.items()}


@pytest.fixture(scope="session")
def real_tokenizers(real_fields) -> dict:
    return {name: from_gguf(fields) for name, fields in real_fields.items()}


@pytest.fixture(scope="session")
def golden_cases(goldens) -> dict[str, list[dict]]:
    """Catalog name -> the tokenizer cases that llama.cpp made."""
    return {name: json.loads((goldens / file).read_text())["tokenizer"] for name, file in GOLDENS.items()}
