"""Helpers of the tests beside this folder: the models' oracle and session, the engine's tiny model."""

import gc
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
for name in ("engine", "models", "formats", "runtime", "speculative", "structured", "server"):
    sys.path.insert(0, str(TESTS / name))


@pytest.fixture(autouse=True)
def memory_is_given_back():
    """What a test leaves to the garbage collector holds gigabytes of the GPU, which other processes' tests want."""
    yield
    gc.collect()
