"""Schemathesis over GET /openapi.json: for every operation, bodies and parameters that its schemas allow and such that they do
not. No answer is a 5xx, all are what the document says, and what no schema allows is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_lifecycle import Process

HERE = Path(__file__).parent
KEY = "sk-admin-of-the-examples-0123456789"
EXAMPLES = int(os.environ.get("ZSE_TEST_EXAMPLES", "4"))  # of each operation and mode


def run(server, tmp_path, examples: int, phases: str) -> str:
    """What Schemathesis says when it is content."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        f"--config-file={HERE / 'schemathesis.toml'}",
        "run",
        f"http://127.0.0.1:{server.port}/openapi.json",
        f"--header=Authorization: Bearer {KEY}",
        "--mode=all",
        f"--max-examples={examples}",
        f"--phases={phases}",
        "--checks=all",
        "--suppress-health-check=all",
        "--continue-on-failure",
        "--warnings=off",
        "--no-color",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def server_process(tmp_path):
    """With a database, a store that has nothing, and a key of an admin."""
    options = ("--database", str(tmp_path / "server.db"), "--api-key", KEY, "--log-level", "error")
    process = Process(*options, env={"ZSE_HOME": str(tmp_path / "home")})
    yield process
    process.popen.terminate()
    code, errors = process.finish()
    assert code == 0 and "Traceback" not in errors, errors


def test_examples_of_every_operation(server_process, tmp_path):
    assert "No issues found" in run(server_process, tmp_path, EXAMPLES, "fuzzing")


@pytest.mark.exhaustive
def test_boundaries_of_every_operation(server_process, tmp_path):
    assert "No issues found" in run(server_process, tmp_path, 1, "coverage")
