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

from zse.formats import store
from zse.kernel import cache
from zse.runtime import isa

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Made in a copy of the tree, which keeps what is compiled here already."""
    tree = tmp_path_factory.mktemp("tree") / "zse"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "tests", "__pycache__", "*.egg-info", "zse_emulator"
    )
    shutil.copytree(ROOT, tree, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
    done = subprocess.run(command, cwd=tree, env={**os.environ, "ZSE_BUILD_ISA": "all"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (tree / "dist").glob("*.whl")
    return path


@pytest.mark.exhaustive
def test_a_wheel_has_every_level_and_every_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"zse/_native/libzse_kernels_{level}.so" for level in isa.levels_of_machine()} <= names
    source = ROOT / "src"
    assert {str(path.relative_to(source)) for path in (source / "zse").rglob("*.py")} <= names
    assert not [name for name in names if "emulator" in name or name.endswith(".o")]
    assert wheel.name.startswith("zse-") and "-py3-none-manylinux_2_" in wheel.name


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
    size = sum(
        path.stat().st_size
        for path in (venv / "lib").rglob("*")
        if path.is_file() and not {"pip", "setuptools", "pkg_resources", "__pycache__"} & set(path.parts)
    )
    print(f"installed: {size / 2**20:.1f} MiB without bytecode")
    assert size < 105 << 20
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
    done = subprocess.run([*script, "--out", tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("zse_gpu_kernels-*-py3-none-any.whl")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, path]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packs = sorted((target / "zse" / "_native").glob("*.pack"))
    assert [pack.name for pack in packs] == [cache.pack_path(arch).name for arch in ("sm_80", "sm_90a")]
    for pack in packs:
        assert set(cache.Pack(pack).manifest) == {"rope_table"}
