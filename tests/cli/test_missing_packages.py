"""A Python that lacks one of the packages: one line that says what to do, from whichever process it meets."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from cli_process import ENVIRONMENT

from zse.engine import grammars
from zse.errors import RequestError, missing_package

# Stands before every finder: what BLOCKED names is not there, in this process and those that it starts.
FINDER = """
import os, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["BLOCKED"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("msgspec", ["run", "smollm2", "hi"]),
        ("msgspec", ["info", "smollm2"]),
        ("msgspec", ["serve", "smollm2", "--port", "0"]),
        ("httptools", ["serve", "smollm2", "--port", "0"]),
        ("numpy", ["verify", "smollm2"]),
        ("_ctypes", ["run", "smollm2", "hi"]),
    ],
)
def test_a_package_that_is_missing_is_one_line(package, command, tmp_path, real_models):
    (tmp_path / "sitecustomize.py").write_text(FINDER)
    path = os.pathsep.join((str(tmp_path), ENVIRONMENT["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-m", "zse", *command],
        env={**ENVIRONMENT, "PYTHONPATH": path, "BLOCKED": package},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    says = f"without its module {package}" if package[0] == "_" else f"-m pip install {package}`"
    assert sum(line.startswith("zse: error: ") and says in line for line in done.stderr.splitlines()) == 1, done.stderr


def test_a_module_of_ours_is_a_bug():
    for name in ("zse.engine.nothing", "zse_emulator", None):
        assert missing_package(ModuleNotFoundError("No module", name=name)) is None


def test_structured_output_without_llguidance_is_refused(monkeypatch):
    monkeypatch.setattr(grammars, "find_spec", lambda name: None if name == "llguidance" else find_spec(name))
    feature = object.__new__(grammars.GrammarQueue)
    feature._grammars, feature._engine = None, type("Engine", (), {"model": "here"})()
    with pytest.raises(RequestError, match="needs the Python package llguidance"):
        feature.start()
