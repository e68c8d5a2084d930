import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import ENVIRONMENT


@pytest.fixture
def home(tmp_path, monkeypatch, kernel_cache):
    path = tmp_path / "home"
    (path / "kernels").mkdir(parents=True, mode=0o700)
    for folder in ("echo", "base"):
        (path / "models" / folder).mkdir(parents=True)
        (path / "models" / folder / "m.gguf").write_bytes(b"not read by the fake")
    monkeypatch.setenv("ZSE_HOME", str(path))
    return path


@pytest.fixture
def zse(home, kernel_cache):
    """Run `zse ARGUMENTS` in a process of its own; fake=True: with the echoing LLM."""

    def run(*arguments, code=0, input="", fake=False, **options):
        program = [str(Path(__file__).parent / "fake_llm.py")] if fake else ["-m", "zse"]
        emulates = arguments[:2] == ("kernels", "check")  # compiled once, for all tests
        environment = {**ENVIRONMENT, "ZSE_HOME": str(kernel_cache if emulates else home)}
        done = subprocess.run(
            [sys.executable, *program, *arguments],
            input=input,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run
