"""The wheel: installed where there is no compiler, it serves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from zse import build
from zse.errors import CompileError
from zse.formats import store
from zse.kernel import cache
from zse.runtime import isa, native

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Made in a copy of the tree, which keeps what is compiled here already."""
    return make_wheel(tmp_path_factory.mktemp("tree") / "zse")


def make_wheel(tree: Path, umask: int = 0o022, levels: str = "all", anew: bool = False) -> Path:
    """levels: as ZSE_BUILD_ISA. anew: without what is compiled here already."""
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "tests", "__pycache__", "*.egg-info", "zse_emulator", *["_native"] * anew
    )
    shutil.copytree(ROOT, tree, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
    for path in tree.rglob("*"):
        path.chmod((0o777 if path.is_dir() or path.stat().st_mode & 0o100 else 0o666) & ~umask)
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "ZSE_BUILD_ISA": levels}, capture_output=True, text=True, umask=umask
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tree / "dist").glob("*.whl")
    return path


@pytest.mark.exhaustive
def test_a_wheel_has_every_level_and_every_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"zse/_native/libzse_kernels_{level}.so" for level in isa.levels_of_machine()} <= names
    source = ROOT / "src"
    assert {str(path.relative_to(source)) for path in (source / "zse").rglob("*.py")} <= names
    assert not [name for name in names if "emulator" in name or name.endswith((".o", ".c", ".h"))]
    assert wheel.name.startswith("zse-") and "-py3-none-manylinux_2_" in wheel.name


@pytest.mark.exhaustive
def test_two_builds_give_the_same_bytes(tmp_path):
    """Of another folder, at another time, by somebody with another umask. With ZSE_TEST_LEVELS (`make soak`), somebody who compiles
    every kernel of as many levels again (285 s of a processor for one); otherwise it is for the two tests below to say that whoever
    compiles anew gives the compiler the same text, and that a compiler makes the same of it."""
    best = native.choose_level()
    others = [level for level in isa.levels_of_machine() if level != best]
    number = int(os.environ.get("ZSE_TEST_LEVELS", "0"))
    levels = ",".join([best, *others][: number or 1])
    wheel = make_wheel(tmp_path / "here", levels=levels)
    other = make_wheel(tmp_path / "elsewhere", umask=0o002, levels=levels, anew=bool(number))
    assert other.name == wheel.name and other.read_bytes() == wheel.read_bytes()


GENERATE = """
import json, sys
from pathlib import Path
from zse import build
from zse.kernel import emit
from zse.runtime import native

def run(command, what):
    sys.exit(f"the C of {what} is not what was compiled")

level, place = sys.argv[1], Path(sys.argv[2])
build.run = run
builder, manifest = build.Builder(Path(native.native_dir()), 1, quiet=True), {}
for name, variants in build.kernel_units(level):
    text, entries = emit.emit_unit(variants, level)
    manifest |= entries
    (place / f"{name}.c").write_text(text, encoding="utf-8")
    builder.compiled(f"{level}/{name}", place / f"{name}.c", build._flags(level))
kept = json.loads(Path(native.kernel_files(native.native_dir(), level)[1]).read_text(encoding="utf-8"))
assert json.loads(json.dumps(manifest)) == kept["kernels"], "the manifest differs"
print(len(manifest))
"""


@pytest.mark.exhaustive
def test_the_c_of_all_kernels_is_the_same_another_time(tmp_path):
    """Generated again in another folder by a process that orders sets and hashes otherwise: an object is kept under the hash of its
    text, the flags and the compiler, so one that is missing would be compiled from another text."""
    build.build(quiet=True)
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", GENERATE, native.choose_level(), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300


def test_two_compilations_give_the_same_bytes(tmp_path):
    """Libraries and manifests of two folders: the part of a wheel that a compiler makes."""
    folders = [tmp_path / "a", tmp_path / "another folder"]
    level = native.choose_level()
    for folder in folders:
        build.build(folder, [], quiet=True)
        build.Builder(folder, 2, quiet=True).kernel_library(level, ["rope_table", "gather_rows"], "some")
    files = [
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.suffix in (".so", ".json")
        }
        for folder in folders
    ]
    assert len(files[0]) == 5 and files[0] == files[1]


def test_headers_are_read_once_and_change_no_byte(tmp_path, monkeypatch):
    """A build of more files than FEW has gcc begin with their headers as kept; those of clang, which keeps them otherwise, do not. Where
    there is no room for what is kept, they are read each time."""
    symbols = ["feed_tokens", "gather_rows", "rope_table"]
    monkeypatch.setattr(build, "UNIT_VARIANTS", 1)
    plain, commands, libraries = build.run, [], []

    def run(command, what):
        commands.append(command)
        if "c-header" in command and where == "full":
            raise CompileError("No space left on device")
        plain(command, what)

    monkeypatch.setattr(build, "run", run)
    for where, few, version in (("kept", 1, ""), ("full", 1, ""), ("plain", 9, ""), ("clang", 1, "clang version 15")):
        monkeypatch.setattr(build, "FEW", few)
        builder = build.Builder(tmp_path / where, 2, quiet=True)
        builder.version = version or builder.version
        commands.clear()
        builder.kernel_library(native.choose_level(), symbols, "some")
        libraries.append(next((tmp_path / where).rglob("*.so")).read_bytes())
        begun = sum("-include" in command for command in commands), sum("c-header" in command for command in commands)
        keeps = where in ("kept", "full") and "clang" not in builder.version
        assert begun == ((2, 1) if keeps else (0, 0))
    assert libraries == libraries[:1] * 4


@pytest.mark.exhaustive
def test_it_serves_where_there_is_no_compiler(wheel, tmp_path, real_models):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ZSE_") and name != "PYTHONPATH"
    }
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    start = time.monotonic()
    done = subprocess.run(
        [venv / "bin" / "pip", "install", "--quiet", "--only-binary", ":all:", wheel],
        env={**environment, "PATH": str(venv / "bin")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    print(f"pip install: {time.monotonic() - start:.1f} s")
    of_pip = {"pip", "setuptools", "pkg_resources", "_distutils_hack"}
    files = [
        path
        for path in (venv / "lib").rglob("*")
        if path.is_file() and not {part.partition("-")[0] for part in path.parts} & of_pip
    ]
    size = sum(path.stat().st_size for path in files)
    bare = sum(path.stat().st_size for path in files if path.suffix != ".pyc")
    print(f"installed: {size / 1e6:.1f} MB, {bare / 1e6:.1f} without bytecode")
    assert bare < 83e6 and size < 108e6  # 105 and 125 with bytecode are asked; a level of kernels is 2.6
    process = subprocess.Popen(
        [venv / "bin" / "zse", "serve", real_models["smollm2"], "--model-name", "smollm2", "--port", "0"],
        env={**environment, "PATH": str(venv / "bin"), "ZSE_HOME": store.home()},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert " on http://" in line, process.communicate()[1]
        body = {
            "messages": [{"role": "user", "content": "The capital of France is"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        request = urllib.request.Request(
            line.split(" on ")[1].split()[0] + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_gpu_kernels_come_in_a_wheel_of_their_own(tmp_path):
    """Made with one kernel of two architectures; pip checks its record, and a start finds the packs."""
    script = [sys.executable, ROOT / "scripts" / "make_gpu_wheel.py", "sm_80", "sm_90a", "--op", "rope_table"]
    environment = {**os.environ, "ZSE_HOME": str(tmp_path / "home")}
    for out in (tmp_path, tmp_path / "again"):
        done = subprocess.run([*script, "--out", out], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("zse_gpu_kernels-*-py3-none-any.whl")
    assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, path]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packs = sorted((target / "zse" / "_native").glob("*.pack"))
    assert [pack.name for pack in packs] == [cache.pack_path(arch).name for arch in ("sm_80", "sm_90a")]
    for pack in packs:
        assert set(cache.Pack(pack).manifest) == {"rope_table"}
