"""Models that come and go while the server serves: /admin/models over the fake engine, and over two real tiny models."""

import os
import signal
import subprocess
import sys
import threading
import time

import openai
import pytest
import tiny_model
import tiny_text
from harness import FakeLibrary, chat_body, request, wait_for
from test_pool import Models, said

from zse.errors import RequestError
from zse.formats import store
from zse.http.listener import Limits
from zse.server.keys import OWNER, Key, Quota
from zse.server.library import Library
from zse.server.requests.models import LOAD, read


class Store(Models):
    """A server of the first model, with a store of all of them."""

    def __init__(self, models: dict[str, str], **options):
        self.stored = models
        first = next(iter(models))
        super().__init__({first: models[first]}, **options)

    def library(self):
        return FakeLibrary(self.stored)

    def send(self, method: str, route: str, **body):
        return self.raw(request(method, route, body if method == "POST" else None))

    def add(self, name: str):
        return self.send("POST", "/admin/models", model=name)

    def admin(self, name: str, what: str, **body):
        return self.send("POST", f"/admin/models/{name}/{what}", **body)

    def remove(self, name: str):
        return self.send("DELETE", f"/admin/models/{name}")

    def cards(self) -> dict[str, dict]:
        return {card["name"]: card for card in self.get("/admin/models").json["models"]}


@pytest.fixture
def start():
    made = []

    def make(models, **options):
        made.append(Store(models, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()
        assert all(process.poll() is not None for process in server.spawned), "a process is left"


def test_a_model_is_added_loaded_unloaded_and_removed(start):
    server = start({"a": "", "b": "--max-context 64"})
    assert server.ask("b").error["code"] == "model_not_found"
    assert server.admin("b", "load").error["code"] == "model_not_found"
    reply = server.add("b")
    assert reply.status == 200 and reply.json["state"] == "unloaded"
    assert server.add("b").status == 200 and list(server.cards()) == ["a", "b"]  # twice is once
    reply = server.admin("b", "load")
    assert (reply.json["state"], reply.json["context"], reply.json["requests"]) == ("loaded", 64, 1)
    assert said(server.ask("b")) == "hi" and server.served("b").num_loads == 1
    assert server.admin("b", "unload").json["state"] == "unloaded"
    assert said(server.ask("b")) == "hi" and server.served("b").num_loads == 2  # the next request loads it again
    reply = server.remove("b")
    assert reply.json == {"name": "b", "removed": True, "requests": 0}
    assert server.ask("b").error["code"] == "model_not_found" and list(server.states()) == ["a"]
    wait_for(lambda: server.spawned[-1].poll() is not None)
    wait_for(lambda: not server.pool._removed)
    assert server.add("b").status == 200 and said(server.ask("b")) == "hi"


def test_what_cannot_be_added(start):
    server = start({"a": "", "b": ""})
    assert server.add("nothing").error["code"] == "model_not_found"
    assert server.send("POST", "/admin/models", model="b", name="a").error["code"] == "conflict"
    assert server.send("POST", "/admin/models", model="b", name="c").json["name"] == "c"
    assert server.send("POST", "/admin/models", path="/etc").error["code"] == "unknown_parameter"
    form = request("POST", "/admin/models/a/unload", b"force=true", {"content-type": "text/plain"})
    assert server.raw(form).status == 415  # what a page of another site could send


def test_a_model_in_use_is_unloaded_by_force_only(start):
    server = start({"a": "", "b": ""})
    server.add("b")
    streams = []
    ask = lambda: streams.append(server.ask("b", "!tokens=400 !ms=10", stream=True))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.call(lambda: len(server.served("b").engine.requests)) == 3)
    reply = server.admin("b", "unload")
    assert (reply.status, reply.error["code"]) == (409, "conflict") and "3 requests" in reply.error["message"]
    assert reply.headers["x-should-retry"] == "false"
    assert server.admin("b", "unload", force=True).json["state"] == "unloaded"
    for thread in threads:
        thread.join(5)
    assert {error_of(stream)["code"] for stream in streams} == {"engine_restarting"}
    assert said(server.ask("b")) == "hi" and said(server.ask("a")) == "hi"


def test_requests_of_a_removed_model_end_as_they_would(start):
    server = start({"a": "", "b": ""})
    server.add("b")
    replies = []
    thread = threading.Thread(target=lambda: replies.append(server.ask("b", "!tokens=60 !ms=10")))
    thread.start()
    wait_for(lambda: server.call(lambda: len(server.served("b").engine.requests)) == 1)
    assert server.remove("b").json["requests"] == 1
    process = server.spawned[-1]
    assert server.ask("b").error["code"] == "model_not_found"
    thread.join(5)
    assert len(said(replies[0])) == 60
    wait_for(lambda: process.poll() is not None)


def test_unload_ends_a_load_that_goes_on(start):
    server = start({"a": "", "b": "--load-ms 5000", "c": ""})
    server.add("b")
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.append(server.ask("b"))),
        threading.Thread(target=lambda: replies.append(server.admin("b", "load", stream=True))),
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.cards()["b"]["requests"] == 2)
    time.sleep(0.3)  # both have their tokens, and wait
    began = time.monotonic()
    assert server.admin("b", "unload", force=True).json["state"] == "unloaded"
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - began < 3 and server.served("b").engine.state == "unloaded"
    assert {error_of(reply)["code"] for reply in replies} == {"engine_restarting"}
    server.add("c")
    assert server.admin("c", "load").status == 200  # the place of who decides on memory is free again
    server.assert_quiet()


def test_the_first_model_is_not_taken_away_while_it_starts(start, monkeypatch):
    monkeypatch.setattr(Store, "wait_ready", lambda self: None)
    server = start({"a": "--load-ms 500", "b": ""})
    assert server.remove("a").error["code"] == server.admin("a", "unload").error["code"] == "conflict"
    wait_for(lambda: server.engine.state == "ready")
    assert server.remove("a").status == 200
    assert server.get("/v1/models").json["data"] == [] and server.get("/health/ready").status == 200
    assert server.chat("x").error["code"] == "model_not_found"
    assert server.add("b").status == 200 and said(server.ask("b")) == "hi"


def test_a_stream_tells_how_a_load_goes(start):
    server = start({"a": "", "b": "--load-ms 700", "bad": "--fatal broken"})
    server.add("b")
    events = server.admin("b", "load", stream=True).events
    assert [event["state"] for event in (events[0], events[-1])] == ["loading", "loaded"] and events[-1][
        "load_ms"
    ] > 600
    server.add("bad")
    reply = server.admin("bad", "load")
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
    assert reply.error["message"] == "bad could not be loaded: broken"
    assert server.cards()["bad"]["problem"] == "broken" and said(server.ask("b")) == "hi"
    assert server.ask("bad").error["message"] == "The model could not be loaded."  # who is no administrator


def test_memory_pressure_takes_the_one_idle_for_longest(start):
    server = start({"a": "", "b": "", "c": ""}, max_loaded=2)
    for name in ("b", "c"):
        server.add(name)
        assert server.admin(name, "load", keep_alive=-1).status == 200
        said(server.ask(name))
    assert server.states() == {"a": "unloaded", "b": "loaded", "c": "loaded"}
    said(server.ask("a"))
    assert server.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}


def test_a_model_stays_as_long_as_it_was_told(start):
    server = start({"a": "", "b": ""}, idle_s=60)
    server.add("b")
    assert server.admin("b", "load", keep_alive=0.3).json["keep_alive_s"] == 0.3
    wait_for(lambda: server.states()["b"] == "unloaded", 3)
    assert server.cards()["b"]["keep_alive_s"] == 60  # until it was unloaded
    assert server.admin("a", "load", keep_alive="-1m").json["keep_alive_s"] is None


@pytest.mark.parametrize(
    "given,seconds", [("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25), (7, 7), (-1, float("inf")), (0, 0)]
)
def test_durations(given, seconds):
    assert read(LOAD, {"keep_alive": given})["keep_alive"] == seconds


@pytest.mark.parametrize("given", ["", "5", "m", "5m3", "5 m", "1d", [], True, "1m" * 40])
def test_what_is_no_duration(given):
    with pytest.raises(RequestError) as caught:
        read(LOAD, {"keep_alive": given})
    assert caught.value.param == "keep_alive"


def test_the_library_is_the_store(tmp_path, monkeypatch):
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    tiny_model.write(tmp_path / "models" / "tiny")
    library = Library(lambda path: ["--model", path])
    spec = library.spec("tiny", "mine")
    assert spec.names == ("mine",) and spec.arguments == ("--model", str(tmp_path / "models" / "tiny"))
    assert [model["name"] for model in library.stored()] == ["tiny"]
    for name in ("other", "smollm2", "hf:a/b", str(tmp_path / "models" / "tiny"), "../models/tiny", "a/b", "x\0y"):
        with pytest.raises(RequestError) as caught:
            library.spec(name)
        assert caught.value.code == "model_not_found" and str(tmp_path) not in caught.value.message
    (tmp_path / "models" / "tiny" / store.MANIFEST).write_text("{")
    with pytest.raises(RequestError, match="not valid JSON") as caught:
        library.spec("tiny")
    assert str(tmp_path) not in caught.value.message


def error_of(reply) -> dict:
    """Of an answer, or the last event of a stream that had begun."""
    return reply.error if reply.status != 200 else reply.events[-1]["error"]


@pytest.fixture
def real(tmp_path):
    """`zse serve one` with a store of tiny models: (address, process)."""
    for seed, name in enumerate(("one", "two", "bad")):
        model = tiny_model.write(tmp_path / "models" / name, seed=seed)
        tiny_text.write(model)
    path = tmp_path / "models" / "bad" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    command = [sys.executable, "-m", "zse", "serve", "one", "--port", "0", "--device", "cpu", "--threads", "1"]
    environment = os.environ | {"ZSE_HOME": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert " on http://" in line, process.communicate()[1]
    yield line.split(" on ")[1].split()[0], process
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)


def test_clients_stream_while_real_models_come_and_go(real):
    address, process = real
    stop, texts, failures = threading.Event(), set(), []
    options = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}

    def stream(client):
        while not stop.is_set():
            try:
                parts = client.completions.create(model="one", prompt="on", stream=True, **options)
                texts.add("".join(part.choices[0].text for part in parts))
            except openai.APIError as error:
                failures.append(error)
                return
            time.sleep(0.02)

    with openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0) as client:

        def admin(method, path, **body):
            return getattr(client, method)(
                "/../admin/models" + path, cast_to=object, **({"body": body} if body or method == "post" else {})
            )

        threads = [threading.Thread(target=stream, args=(client,)) for _ in range(2)]
        told = []
        try:
            for thread in threads:
                thread.start()
            for _ in range(2):
                assert admin("post", "", model="two")["state"] == "unloaded"
                assert admin("post", "/two/load")["state"] == "loaded"
                told.append(client.completions.create(model="two", prompt="on", **options).choices[0].text)
                assert admin("post", "/two/unload")["state"] == "unloaded"
                told.append(client.completions.create(model="two", prompt="on", **options).choices[0].text)
                assert admin("delete", "/two")["removed"]
                with pytest.raises(openai.NotFoundError):
                    client.completions.create(model="two", prompt="on")
            admin("post", "", model="bad")
            with pytest.raises(
                openai.InternalServerError, match="bad could not be loaded: .*model.safetensors"
            ) as caught:
                admin("post", "/bad/load")
            message = caught.value.body["message"]
            assert "\n" not in message and "/models/" not in message
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert len(texts) == 1 and not failures  # the same answer all the time
        assert len(set(told)) == 1 and set(told) != texts
        states = {model["name"]: model["state"] for model in admin("get", "")["models"]}
        assert states == {"one": "loaded", "bad": "failed"}
    wait_for(lambda: len(_children(process.pid)) == 1)


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_a_request_says_how_long_its_model_stays(start):
    server = start({"a": "", "b": ""}, idle_s=60)
    server.add("b")
    assert said(server.ask("b", keep_alive=0.3)) == "hi" and server.cards()["b"]["keep_alive_s"] == 0.3
    wait_for(lambda: server.states()["b"] == "unloaded", 3)
    assert server.post("/v1/embeddings", {"model": "b", "input": "x", "keep_alive": "-1s"}).status == 200
    assert server.cards()["b"]["keep_alive_s"] is None
    reply = server.post("/api/generate", {"model": "b", "prompt": "hi", "keep_alive": 0, "stream": False})
    assert reply.json["response"] == "hi"
    wait_for(lambda: server.states()["b"] == "unloaded", 3)
    loaded = server.post("/api/generate", {"model": "b", "keep_alive": "5m"}).json
    assert loaded["done_reason"] == "load" and server.states()["b"] == "loaded"
    [shown] = [model for model in server.get("/api/ps").json["models"] if model["name"] == "b"]
    assert shown["expires_at"].endswith("Z")
    assert server.post("/api/chat", {"model": "b", "keep_alive": 0}).json["done_reason"] == "unload"
    assert server.states()["b"] == "unloaded"


def test_a_tenant_takes_no_model_away(own_server):
    server = own_server(key=(Key("a", "user", quota=Quota(concurrency=1)), Key("b", "admin", access=OWNER)))
    user, admin = ({"authorization": f"Bearer {key}"} for key in ("user", "admin"))
    assert server.post("/v1/chat/completions", chat_body("x", keep_alive=0), user).status == 200
    assert server.post("/api/generate", {"model": "fake", "keep_alive": 0}, user).status == 403
    assert server.pool.default.keep_s is None and server.pool.default.state == "loaded"
    assert server.post("/api/generate", {"model": "fake"}, user).json["done_reason"] == "load"
    with server.connect() as sock:
        sock.sendall(request("POST", "/v1/chat/completions", chat_body("!stall"), user))
        wait_for(lambda: server.state()["requests"])
        # A request that only loads is one of the tenant's answers at once, as any other.
        assert server.post("/api/generate", {"model": "fake"}, user).status == 429
        assert server.post("/api/generate", {"model": "fake", "keep_alive": 0}, admin).json["done_reason"] == "unload"
        assert server.pool.default.keep_s == 0.0  # it goes with the request that uses it
    wait_for(lambda: server.pool.default.state == "unloaded")
    server.call(lambda: setattr(server.app, "draining", True))
    assert server.post("/api/generate", {"model": "fake"}, user).error == "The server is shutting down."


def test_a_stream_lives_while_its_model_loads(start):
    server = start({"a": "", "b": "--load-ms 1800"})
    server.add("b")
    server.call(lambda: setattr(server.server, "limits", Limits(comment_s=0.2)))
    reply = server.ask("b", "hi", stream=True)
    head, _, rest = reply.body.partition(b"data: ")
    assert head.count(b": keep-alive\n\n") >= 2 and b"[DONE]" in rest
    server.assert_quiet()
