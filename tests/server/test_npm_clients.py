"""The official npm clients of OpenAI, Anthropic and Ollama, driven by npm/drive.mjs; their versions and hashes are npm/package-lock.json."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import Harness
from servers import TEMPLATE
from test_stored_keys import make

from zse.server.database.connection import Database

FOLDER = Path(__file__).parent / "npm"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """drive.mjs beside its packages. Without node, or a registry, this is left out; ZSE_REQUIRE_NODE=1 makes that a failure."""
    folder = tmp_path_factory.mktemp("npm")
    missing = ""
    if shutil.which("node") is None or shutil.which("npm") is None:
        missing = "node and npm are not installed"
    else:
        for file in FOLDER.iterdir():
            shutil.copy(file, folder)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
        missing = "" if done.returncode == 0 else f"npm ci: {done.stderr.strip()[-300:]}"
    if missing and os.environ.get("ZSE_REQUIRE_NODE") == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    return folder / "drive.mjs"


def test_the_clients_understand_every_api(driver, tmp_path):
    path = str(tmp_path / "server.db")
    with Database(path) as database:
        key = make(database, "a")
    harness = Harness(template=TEMPLATE, database=path)
    try:
        done = subprocess.run(["node", driver, harness.base, key], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        harness.assert_quiet()
    finally:
        harness.close()
    rome = {"place": "Rome"}
    items = ["reasoning", "message", "function_call"]
    assert json.loads(done.stdout) == {
        "chat": ["One moment.", "weather", rome, "tool_calls"],
        "completions": ["ab", ["a", "b"]],
        "embeddings": [6, 6],
        "models": ["fake"],
        "refused": ["NotFoundError", 404, "model_not_found"],
        "responses": [items, "One moment.", rome, "completed"],
        "events": True,
        "messages": [["thinking", "text", "tool_use"], rome, "tool_use"],
        "counted": len("user:hello\nassistant:"),
        "unknown": ["NotFoundError", 404],
        "ollama": ["One moment.", [{"index": 0, "name": "weather", "arguments": rome}]],
        "generated": "ab",
        "embedded": 2,
        "tags": ["fake"],
        "batch": ["completed", 2, [["a", "a"], ["b", "b"]], "b", ["lines.jsonl", "batch_output.jsonl"]],
        "deleted": True,
        "listed": True,
        "cancelled": ["ConflictError", 409],
    }
