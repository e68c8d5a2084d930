"""What is missing or wrong is one line: what it is, and what to type next."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zse import build
from zse.errors import CompileError, DeviceError
from zse.formats import catalog
from zse.runtime import compiler, isa, native

ROOT = Path(__file__).parents[1]


def build_in(folder: Path, *arguments: str, **environment: str) -> str:
    """What `python -m zse.build` in an empty folder says when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "zse.build", "--dir", str(folder), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_no_compiler(tmp_path):
    line = build_in(tmp_path / "native", PATH=str(tmp_path), CC="")
    assert "no C compiler" in line and "`apt install gcc libc6-dev`" in line
    line = build_in(tmp_path / "native", CC="/nonexistent")
    assert line == "zse: CC=/nonexistent is no program: unset CC, or set it to a C compiler\n"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "x.c:1:10: fatal error: stdio.h: No such file or directory",
            "headers are missing: install gcc or clang, e.g. `apt",
        ),
        (
            "x.c:1:1: fatal error: error writing to /tmp/x.s: No space left on device",
            "free some space, there or where TMPDIR",
        ),
        ("cc: internal compiler error: Killed", "failed with 1: cc: internal compiler error: Killed"),
    ],
)
def test_a_compiler_that_cannot_work(tmp_path, said, words):
    cc = script(tmp_path / "cc", f'case "$1" in --version) echo cc 1; exit 0;; esac\necho "{said}" >&2; exit 1')
    assert words in build_in(tmp_path / "native", CC=cc)
    with pytest.raises(CompileError):
        compiler.run([cc, "-c"], "x")


def test_no_space_for_the_libraries(tmp_path, monkeypatch, capsys):
    def full(path, *arguments, **options):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(build.Path, "write_text", full)
    assert build.main(["--dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("zse: No space left on device: ") and error.endswith("in TMPDIR, or --dir DIR")


def test_a_folder_that_is_not_ours(tmp_path):
    (tmp_path / "file").write_text("")
    assert "zse: Not a directory: " in build_in(tmp_path / "file" / "native")


def test_a_cpu_without_avx2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(isa, "runnable_levels", lambda bits: [])
    monkeypatch.setattr(isa, "missing_features", lambda level, bits: ["avx2", "fma"])
    with pytest.raises(
        DeviceError, match=r"^this CPU \(.*\) cannot run the kernels: it lacks avx2, fma; use one that"
    ) as caught:
        native.choose_level()
    assert "\n" not in str(caught.value)
    assert build.main(["--dir", str(tmp_path), "--model", "smollm2"]) == 1  # before anything is compiled for it
    assert "it lacks avx2, fma" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(isa, "levels_of_machine", lambda family=None: [])
    assert "use an x86-64 or arm64 machine" in str(native.unsupported_cpu(0))


def make_serve(folder: Path, python: str) -> subprocess.CompletedProcess:
    shutil.copy(ROOT / "Makefile", folder)
    for name in (
        "pyproject.toml",
        "setup.py",
        "requirements.lock",
        "requirements-pdf.lock",
        "requirements-images.lock",
    ):
        (folder / name).write_text("")
    command = ["make", "--silent", "serve", f"PYTHON={python}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_make_with_an_old_python(tmp_path):
    old = script(
        tmp_path / "python",
        f"exec {sys.executable} -c 'import sys; sys.version_info = (3, 9); exec(sys.argv[1])' \"$2\"",
    )
    done = make_serve(tmp_path, old)
    assert done.stderr.splitlines()[0] == "zse needs Python 3.11 or later: make serve PYTHON=python3.12", done
    assert not (tmp_path / ".venv").exists()


def test_make_without_a_network(tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    script(tmp_path / ".venv" / "bin" / "pip", "echo 'ERROR: no route to host' >&2; exit 1")
    done = make_serve(tmp_path, script(tmp_path / "python", "exit 0"))
    assert done.returncode == 2 and "the packages were not installed" in done.stdout and "PIP_INDEX_URL" in done.stdout
    assert not (tmp_path / ".venv" / ".installed").exists()


def test_a_name_is_suggested_once():
    assert catalog.did_you_mean("smollm", ["smollm2"]).count("smollm2") == 1
