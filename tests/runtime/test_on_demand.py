"""A level of which only a part is compiled: what is missing is compiled when it is asked for, once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zse import build
from zse.cli import doctor
from zse.errors import DeviceError, ZSEError
from zse.runtime import native, on_demand
from zse.runtime.cpu import CPUDevice

LEVEL = native.choose_level()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A native folder that has one kernel, as the part for a first model."""
    native.runtime()
    build.Builder(tmp_path, 1, quiet=True).kernel_library(LEVEL, ["rope_table"], native.FIRST)
    monkeypatch.setenv("ZSE_NATIVE_DIR", str(tmp_path))
    monkeypatch.setenv("ZSE_ISA", LEVEL)
    return tmp_path


@pytest.fixture
def compilers(tmp_path, monkeypatch):
    """CC, which notes what it compiles and takes its time. A function that gives the notes."""
    notes, script = tmp_path / "notes", tmp_path / "slow-cc"
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) echo "$*" >>{notes}; sleep 0.3;; esac\nexec {build.find_compiler()[0]} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return lambda: notes.read_text().splitlines() if notes.exists() else []


def test_a_kernel_is_compiled_when_it_is_asked_for(folder, compilers):
    with CPUDevice(threads=1) as device:
        assert device.symbols() == ["rope_table"] and device.program("rope_table").address
        assert not compilers()
        assert device.program("gather_rows").address and device.program("gather_rows").params[0][1] == "ptr"
        with pytest.raises(DeviceError, match="no kernel 'gather_row' .*near: gather_rows"):
            device.program("gather_row")
    with CPUDevice(threads=1) as device:
        assert device.program("gather_rows").address
    assert len(compilers()) == 1


def test_a_second_process_waits_for_the_first(folder, compilers):
    command = [sys.executable, "-m", "zse.build", "--isa", LEVEL, "--kernel", "gather_rows"]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(compilers()) == 1


def test_without_a_compiler_it_says_what_to_type(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    with (
        CPUDevice(threads=1) as device,
        pytest.raises(DeviceError, match="^gather_rows is not compiled yet.*no C compiler.*zse.build`$"),
    ):
        device.program("gather_rows")


def test_the_whole_library_is_taken_once_it_is_there(folder, monkeypatch):
    with CPUDevice(threads=1) as device:
        units = build._part_units(LEVEL, {"gather_rows", "scale_logits"}, "k", 1)
        monkeypatch.setattr(build, "kernel_units", lambda level: units)
        build.Builder(folder, 1, quiet=True).kernel_library(LEVEL)
        monkeypatch.setattr(on_demand.KernelsOnDemand, "_compile", None)
        assert device.program("gather_rows").address
        assert device.symbols() == ["gather_rows", "rope_table", "scale_logits"]
    with CPUDevice(threads=1) as device:  # and by the next start
        assert device.symbols() == ["gather_rows", "scale_logits"]


def test_a_build_for_a_model(folder, monkeypatch, tmp_path):
    """Its kernels, unless all are there; an older library makes room, and a model that cannot be planned gets all."""
    builder = build.Builder(folder, 1, quiet=True)
    monkeypatch.setattr(build, "kernel_units", lambda level: build._part_units(level, {"scale_logits"}, "k", 1))
    monkeypatch.setattr("zse.engine.load.kernels_of", lambda *_: {"gather_rows"})
    whole, manifest = map(Path, native.kernel_files(str(folder), LEVEL))
    whole.write_bytes(b"old")
    manifest.write_text('{"key": "old"}')
    builder.first_kernels(LEVEL, str(tmp_path))
    first = json.loads(Path(native.kernel_files(str(folder), LEVEL, native.FIRST)[1]).read_text())
    assert list(first["kernels"]) == ["gather_rows"] and not whole.exists() and not manifest.exists()
    assert "in part" in [row[2] for row in doctor._checks() if row[0] == "cpu kernels"][1]

    def refuse(*_):
        raise ZSEError("no such model")

    monkeypatch.setattr("zse.engine.load.kernels_of", refuse)
    builder.first_kernels(LEVEL, str(tmp_path))
    assert native.kernel_library(LEVEL) == str(whole)
    monkeypatch.setattr("zse.engine.load.kernels_of", None)
    builder.first_kernels(LEVEL, str(tmp_path))


def test_a_build_beside_takes_what_is_left():
    script = "import os\nfrom zse import build\nbuild._yield_to_others()\nprint(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "19\n", done.stderr
    assert os.nice(0) < 19
