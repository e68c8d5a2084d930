"""Pulling over the API: progress, joining, failures, Ollama's lines, and the whole way from a hub to an answer's model list."""

import sys
import threading
from pathlib import Path

import ollama
import pytest
from harness import request, wait_for
from test_admin_models import Store
from test_pool import said

from zse.formats import hub, store
from zse.server import library as libraries
from zse.server.library import Library

sys.path.append(str(Path(__file__).parents[1] / "store"))

from fake_hub import CONFIG, WEIGHTS, FakeHub  # noqa: E402


@pytest.fixture
def server():
    made = Store({"a": "", "b": ""})
    made.app.library.step_s = 0.3
    yield made
    made.close()


def pulls(server) -> dict[str, dict]:
    return {pull["name"]: pull for pull in server.get("/admin/models").json["pulls"]}


def test_a_pull_tells_how_it_goes_and_the_model_is_served(server):
    events = server.admin("b", "pull", stream=True).events
    assert [event["state"] for event in events] == ["pulling"] * (len(events) - 1) + ["stored"]
    counts = [event["done_bytes"] for event in events]
    assert counts == sorted(counts) and {0, 100, 200} < {*counts} and events[-1]["total_bytes"] == 300
    assert events[-1]["notice"] == "it fits" and said(server.ask("b")) == "hi"
    assert server.admin("c", "pull", serve=False).json["state"] == "stored"
    assert server.ask("c").error["code"] == "model_not_found" and set(pulls(server)) == {"b", "c"}


def test_who_comes_later_joins_and_who_leaves_stops_nothing(server):
    server.app.library.step_s = 0.2
    with server.connect() as sock:
        sock.sendall(request("POST", "/admin/models/b/pull", {"stream": True}))
        sock.recv(100)
    first = server.app.library.pulls["b"]
    wait_for(lambda: pulls(server)["b"]["done_bytes"] == 100)
    assert server.admin("b", "pull").json["state"] == "stored" and server.app.library.pulls["b"] is first
    server.assert_quiet()


def test_a_pull_that_fails_is_one_line(server, monkeypatch):
    monkeypatch.setattr(libraries, "MAX_PULLS", 1)
    assert server.admin("nothing", "pull").error["code"] == "model_not_found"
    running = threading.Thread(target=server.admin, args=("gone", "pull"))
    running.start()
    wait_for(lambda: "gone" in pulls(server))
    assert server.admin("b", "pull").error["code"] == "overloaded"
    running.join()
    assert (pulls(server)["gone"]["state"], pulls(server)["gone"]["problem"]) == (
        "failed",
        "the hub cannot be reached: Connection refused",
    )
    last = server.admin("gone", "pull", stream=True).events[-1]["error"]
    assert last["code"] == "pull_failed" and "\n" not in last["message"]


def test_ollamas_client_pulls_and_deletes(server):
    client = ollama.Client(host=server.base, timeout=20)
    lines = list(client.pull("b:latest", stream=True))
    assert lines[-1].status == "success" and {line.completed for line in lines} >= {0, 100, 200}
    bars = {line.digest for line in lines if line.total}
    assert len(bars) == 1 and bars.pop().startswith("sha256:")
    assert client.chat("b", [{"role": "user", "content": "x"}]).message.content == "x"
    assert client.pull("b").status == "success"
    with pytest.raises(ollama.ResponseError, match="Connection refused"):
        list(client.pull("gone", stream=True))
    with pytest.raises(ollama.ResponseError) as caught:
        client.pull("nothing")
    assert caught.value.status_code == 404
    assert client.delete("b").status == "success" and server.app.library.removed == ["b"]
    assert [model.model for model in client.list().models] == ["a"]
    with pytest.raises(ollama.ResponseError, match="not here"):
        client.delete("nothing")
    assert server.post("/admin/models", {"model": "b", "name": "mine:latest"}).status == 200  # a name as it is
    assert client.show("mine:latest").details and client.delete("mine:latest").status == "success"
    assert [model.model for model in client.list().models] == ["a"]
    older = server.raw(request("POST", "/api/pull", {"name": "b", "stream": False, "insecure": True}))
    assert older.json == {"status": "success"}
    assert server.post("/api/pull", {}).status == 400


@pytest.fixture
def real_hub(tmp_path, monkeypatch):
    made = FakeHub()
    monkeypatch.setenv("ZSE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield made
    made.close()


def test_the_whole_way_from_a_hub(real_hub, monkeypatch):
    """As `zse pull` leaves it, byte for byte; a hub that cannot be reached is one error, and leaves what was there."""

    class Real(Store):
        def library(self):
            return Library(lambda path: [], hub.pull)

    real_hub.repos["org/name"] = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
    server = Real({"a": ""})
    try:
        events = server.admin("hf:org/name", "pull", stream=True).events
        assert events[-1]["state"] == "stored" and max(event["total_bytes"] for event in events) >= len(WEIGHTS)
        model = store.describe("hf:org/name")
        assert (Path(model["path"]) / "model.safetensors").read_bytes() == WEIGHTS and not store.partials()
        [entry] = server.get("/admin/models").json["stored"]
        assert entry["name"] == "hf:org/name"
        assert set(server.cards()) == {"a", "hf:org/name"}
        assert server.raw(request("DELETE", "/api/delete", {"model": "hf:org/name"})).status == 200
        assert store.describe("hf:org/name") is None and set(server.cards()) == {"a"}
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        error = server.admin("hf:org/name", "pull").error
        assert error["code"] == "pull_failed" and "refused" in error["message"] and "\n" not in error["message"]
        assert "HF_" in error["message"] or "hub" in error["message"]
        assert server.admin("hf:broken", "pull").error["code"] == "model_not_found"
        server.assert_quiet()
    finally:
        server.close()


def test_what_is_remembered_of_pulls_is_bounded(server, monkeypatch):
    monkeypatch.setattr(libraries, "MAX_KEPT", 3)
    server.app.library.step_s = 0
    for number in range(6):
        server.admin(f"m{number}", "pull", serve=False)
    assert list(pulls(server)) == ["m3", "m4", "m5"]
