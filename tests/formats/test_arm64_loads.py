"""Weights are repacked by the kernels of arm64, in an emulator (tests/kernels/arm64.py): bit for bit what NumPy makes."""

import gc

import numpy as np
import pytest
from kernels import arm64, repack_cases
from test_load_equal import compare, tiny_llama

from zse.formats.ggml import BLOCKS
from zse.kernels import repack_pieces
from zse.models import repack_load

pytestmark = pytest.mark.exhaustive("kernels of arm64 in an emulator")


@pytest.fixture(scope="module")
def level():
    with arm64.whole_level() as machine:
        yield machine


@pytest.fixture
def loading(level, monkeypatch):
    arm64.buffers_in(level.memory, monkeypatch)
    yield arm64.LoadingDevice(level)
    gc.collect()  # buffers go before they are ordinary ones again


@pytest.mark.parametrize("case", repack_cases.CASES, ids=str)
def test_checkpoints(case, loading, tmp_path, monkeypatch):
    monkeypatch.setattr(repack_load, "PIECE_BYTES", case.step_bytes)
    monkeypatch.setattr(repack_pieces, "RUN_BYTES", 64)  # so that matrices of few rows are read in runs, too
    repack_cases.check(case, loading, tmp_path / "w", np.random.default_rng(), lambda jobs: loading.load(jobs).wait())


@pytest.mark.parametrize("type", BLOCKS)
def test_gguf(type, loading, tmp_path):
    """A model of this type is what `zse convert`, which is NumPy's, makes of it."""
    (tmp_path / "m.gguf").write_bytes(tiny_llama(type))
    compare(loading, tmp_path / "m.gguf", tmp_path)
