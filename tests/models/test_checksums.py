"""Checksums of a `.zse` that are compared while its weights are read."""

import os
import random
import subprocess
import sys
import zlib
from ctypes import addressof, create_string_buffer
from pathlib import Path

import pytest
import tiny

from zse.engine.llm import LLM
from zse.errors import FormatError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.checksums import PIECE_BYTES, Checks, read_jobs
from zse.models.load import load_model, plan_model
from zse.runtime import native
from zse.runtime.null import NullLoad

sys.path += [str(Path(__file__).parents[1] / name) for name in ("engine", "structured")]
import tiny_model  # noqa: E402
import tiny_text  # noqa: E402

QUANTS = (None, "int4", "int5", "int6", "int8", "fp8", "f16", "bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write("wide", tmp_path_factory.mktemp("wide"), "BF16")


def converted(folder, path, quant="int4", layout="r16"):
    convert(str(folder), str(path), quant=quant, layout=layout)
    return str(path)


def flip(path: str, info, at: int) -> None:
    """Damage a byte of a tensor, counted over its planes."""
    for _, offset, nbytes in info.ranges():
        if at < nbytes:
            with open(path, "r+b") as file:
                file.seek(offset + at)
                byte = file.read(1)[0]
                file.seek(offset + at)
                file.write(bytes([byte ^ 0x10]))
            return
        at -= nbytes
    raise AssertionError("the tensor has fewer bytes")


def load(device, path, verify):
    """The tensors that nobody checked."""
    with open_model(path) as source:
        model = load_model(device, plan_model(source), verify_weights=verify)
        left = []
        compare = model._checks._compare
        model._checks._compare = lambda loading, rest: (compare(loading, rest), left.append(sorted(rest)))
        model.wait()
        return left[-1]


def test_sums_are_zlibs():
    library, rng = native.runtime(), random.Random(1)
    data = rng.randbytes(20_000)
    memory = create_string_buffer(data, len(data))
    for nbytes in (*range(300), 4095, 4096, 19_000):
        start, crc = rng.randrange(16), rng.getrandbits(32)
        got = library.zse_crc32(crc, addressof(memory) + start, nbytes)
        assert got == zlib.crc32(data[start : start + nbytes], crc)
        cut = rng.randrange(nbytes + 1)
        first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:nbytes])
        assert library.zse_crc32_joined(first, second, nbytes - cut) == zlib.crc32(data[:nbytes])


@pytest.mark.parametrize("layout", ["r16", "rows"])
@pytest.mark.parametrize("quant", QUANTS)
def test_sound_files_are_sound(device, folder, tmp_path, quant, layout):
    """Whatever repacks them on their way; what is stored as it is computed with is checked without being asked for."""
    path = converted(folder, tmp_path / "m.zse", quant, layout)
    assert load(device, path, True) == []
    if native.runtime().zse_crc32_is_fast() and quant != "fp8":  # which a CPU converts with NumPy
        assert load(device, path, None) == []


@pytest.mark.parametrize("verify", [None, True])
@pytest.mark.parametrize("quant", ["int4", "bf16"])
def test_every_damaged_tensor_is_named(device, folder, tmp_path, quant, verify):
    if verify is None and not native.runtime().zse_crc32_is_fast():
        pytest.skip("this CPU has no instruction for checksums: they are taken with --verify alone")
    path, rng = converted(folder, tmp_path / "m.zse", quant), random.Random(3)
    with open_model(path) as source:
        infos = list(source.tensors.values())
    for info in infos:
        at = rng.choice((0, info.nbytes - 1, rng.randrange(info.nbytes)))
        flip(path, info, at)
        with pytest.raises(FormatError, match="the weights are damaged") as caught:
            load(device, path, verify)
        assert info.name in str(caught.value) and path in str(caught.value)
        flip(path, info, at)
    flip(path, infos[0], 0)
    assert load(device, path, False) == []


class Elsewhere:
    """A device whose copies the host does not see."""

    shares_memory = False

    def __init__(self, host):
        self.host = host


def test_a_gpus_weights_are_read_once_more_where_that_is_asked_for(device, folder, tmp_path):
    path = converted(folder, tmp_path / "m.zse")
    with open_model(path) as source:
        victim = list(source.tensors.values())[5]
        for verify in (None, True):
            checks = Checks(source, Elsewhere(device), verify)
            checks.begin()
            checks.finish(NullLoad())
        flip(path, victim, 7)
        unasked = Checks(source, Elsewhere(device), None)
        unasked.begin()
        unasked.finish(NullLoad())
        asked = Checks(source, Elsewhere(device), True)
        asked.begin()
        with pytest.raises(FormatError, match=victim.name):
            asked.finish(NullLoad())
        asked.begin()
        asked.cancel()
        assert asked.finished


def test_large_tensors_are_read_in_pieces(folder, tmp_path):
    path = converted(folder, tmp_path / "m.zse")
    with open_model(path) as source:
        info = next(iter(source.tensors.values()))._replace(planes=None, nbytes=2 * PIECE_BYTES + 5)
        jobs = read_jobs([info])
    assert [job.nbytes for job in jobs] == [PIECE_BYTES, PIECE_BYTES, 5]
    assert [job.offset - info.offset for job in jobs] == [0, PIECE_BYTES, 2 * PIECE_BYTES]


def test_a_start_ends_with_one_line(tmp_path):
    """LLM, zse run and zse serve, before any token."""
    tiny_text.write(tiny_model.write(tmp_path / "tiny"))
    path = converted(tmp_path / "tiny", tmp_path / "m.zse", "int8")
    with open_model(path) as source:
        flip(path, source.tensors["model.layers.0.mlp.down_proj.weight"], 100)
    with pytest.raises(FormatError, match="model.layers.0.mlp.down_proj.weight"):
        LLM(path, device="cpu", threads=1, verify_weights=True)
    LLM(path, device="cpu", threads=1, verify_weights=False).close()
    for command in (["run", path, "x"], ["serve", path, "--port", "0"]):
        done = subprocess.run(
            [sys.executable, "-m", "zse", *command, "--device", "cpu", "--threads", "1", "--verify"],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"ZSE_LOG": "warning"},
        )
        assert done.returncode != 0 and done.stdout == ""
        assert "model.layers.0.mlp.down_proj.weight" in done.stderr and path in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1, done.stderr
