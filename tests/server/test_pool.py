"""Several models in one server: loaded on demand, evicted, parked engines, failures; over the fake engine."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import fake_text
import pytest
from harness import FAKE_ENGINE, Harness, chat_body, request, wait_for

from zse.engine import client as engine_client
from zse.engine.process import spawn
from zse.server import pool as pools
from zse.server import spares
from zse.server.pool import ModelPool
from zse.server.served import ModelSpec, Served


class Models(Harness):
    """A Harness with several models: name → options of its fake engine. The first is loaded at once."""

    def __init__(self, models: dict[str, str], **pool_options):
        self.models, self.pool_options = models, pool_options
        self.spawned: list = []
        super().__init__(engine=next(iter(models.values())))

    def spawn(self, arguments=None):
        process = spawn(self.engine_options if arguments is None else arguments, (FAKE_ENGINE,))
        self.spawned.append(process)
        return process

    def close(self):
        if self._thread.is_alive():
            super().close()

    def park(self):
        return self.spawn(["--park", *self.pool_options.get("park", "").split()])

    def make_pool(self):
        specs = [ModelSpec((name,), name, tuple(options.split())) for name, options in self.models.items()]
        options = {key: value for key, value in self.pool_options.items() if key != "park"}
        pool = ModelPool(
            specs, lambda path, name: fake_text.load(path, name), spawn=self.spawn, park=self.park, **options
        )
        pool.start()
        return pool

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.get("/v1/models").json["data"]}

    def ask(self, model: str, text: str = "hi", **fields):
        return self.post("/v1/chat/completions", chat_body(text, model=model, **fields))

    def served(self, name: str) -> Served:
        return self.pool.by_name[name]


@pytest.fixture
def start():
    made = []

    def make(models, **options):
        made.append(Models(models, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()
        assert all(process.poll() is not None for process in server.spawned), "a process is left"


def said(reply) -> str:
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["message"]["content"]


def test_an_engine_with_states_is_told_where_messages_begin(start):
    """ "user:!points hi" and a line break before the answer; another engine is told nothing."""
    server = start({"a": "--has-state yes", "b": ""})
    assert said(server.ask("a", "!points")) == "(13,)" and said(server.ask("b", "!points")) == "()"
    assert said(server.ask("a", "one\ntwo !points")) == "(9, 21)"


def test_a_model_is_loaded_by_the_request_that_names_it(start):
    server = start({"a": "", "b": "--max-context 64", "c": ""})
    assert server.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
    assert said(server.ask("b")) == "hi" and said(server.ask("a")) == "hi"
    assert server.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    cards = {card["id"]: card for card in server.get("/v1/models").json["data"]}
    assert (cards["a"]["max_model_len"], cards["b"]["max_model_len"]) == (4096, 64)
    assert "max_model_len" not in cards["c"]
    assert server.ask("b", "x" * 80).error["code"] == "context_length_exceeded"
    assert server.ask("d").error["code"] == "model_not_found"
    assert server.get("/v1/models/b").json["state"] == "loaded" and server.get("/v1/models/d").status == 404
    assert server.get("/health/ready").status == 200


def test_requests_wait_while_it_loads_and_load_it_once(start):
    server = start({"a": "", "b": "--load-ms 400"})
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(server.ask("b"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.states()["b"] == "loading")
    assert said(server.ask("a")) == "hi", "other models go on"
    assert server.get("/health/ready").status == 200
    for thread in threads:
        thread.join()
    assert [said(reply) for reply in replies] == ["hi"] * 8
    assert server.served("b").num_loads == 1 and len(server.spawned) == 2


def test_a_model_whose_files_were_replaced_is_read_anew_with_its_next_engine(tmp_path):
    """Tokenizer, template and revision are of the files that its engine read, not of those that stood there before."""
    path, read = tmp_path / "b.gguf", []
    path.write_bytes(b"one")

    class Replaced(Models):
        def make_pool(self):
            specs = [ModelSpec((name,), str(tmp_path / f"{name}.gguf"), ()) for name in self.models]

            def load(place, name):
                read.append((name, (tmp_path / place).read_bytes() if name == "b" else b""))
                return fake_text.load(place, name)

            return ModelPool(specs, load, spawn=self.spawn, **self.pool_options)

    server = Replaced({"a": "", "b": ""})
    try:
        assert said(server.ask("b")) == "hi" and said(server.ask("b")) == "hi"
        server.served("b").revision = "one's"
        assert server.post("/admin/models/b/unload", {}).status == 200
        assert said(server.ask("b")) == "hi" and read == [("b", b"one")]  # the same files: read once
        (tmp_path / "new").write_bytes(b"two")
        (tmp_path / "new").rename(path)
        assert said(server.ask("b")) == "hi" and read == [("b", b"one")]  # its engine has the old ones
        os.kill(server.served("b").engine._process.pid, signal.SIGKILL)
        wait_for(lambda: server.served("b").engine.num_restarts == 1 and server.states()["b"] == "loaded")
        assert said(server.ask("b")) == "hi" and read == [("b", b"one"), ("b", b"two")]
        assert server.served("b").revision is None
        path.write_bytes(b"three")
        server.post("/admin/models/b/unload", {})
        assert said(server.ask("b")) == "hi" and read[2:] == [("b", b"three")]
    finally:
        server.close()


def test_an_engine_that_was_ended_runs_and_holds_nothing(start):
    server = start({"a": ""})

    def gauges() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in server.get("/metrics").body.decode().splitlines() if line[:1] != "#"]
        return {name.partition("{")[0]: float(value) for name, value in lines if name.startswith("zse_engine_")}

    with server.connect() as sock:
        sock.sendall(request("POST", "/v1/chat/completions", chat_body("!stall", model="a", stream=True)))
        wait_for(lambda: gauges()["zse_engine_running"])
        assert server.post("/admin/models/a/unload", {"force": True}).status == 200
        found = gauges()
    assert found["zse_engine_running"] == found["zse_engine_waiting"] == found["zse_engine_free_pages"] == 0
    assert not found.keys() & {"zse_engine_kv_usage", "zse_engine_pages", "zse_engine_memory_bytes"}
    assert said(server.ask("a")) == "hi" and "zse_engine_kv_usage" in gauges()


def test_clients_that_leave_while_it_loads_leave_nothing(start):
    server = start({"a": "", "b": "--load-ms 300"})
    for _ in range(5):
        with server.connect() as sock:
            sock.sendall(request("POST", "/v1/chat/completions", chat_body("hi", model="b", stream=True)))
            time.sleep(0.02)
    wait_for(lambda: server.states()["b"] == "loaded")
    server.assert_quiet()
    assert server.served("b").users == 0 and said(server.ask("b")) == "hi"


def test_a_model_whose_engine_dies_too_often_fails_alone(start, monkeypatch):
    monkeypatch.setattr(engine_client, "RESTART_BUDGET", 0)
    failures = []
    server = start({"one": "", "two": ""}, on_failure=failures.append)
    said(server.ask("two"))
    server.ask("two", "!crash=0")
    wait_for(lambda: server.states()["two"] == "failed")
    reply = server.ask("two")
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
    assert said(server.ask("one")) == "hi"
    assert server.get("/health/ready").status == 200 and not failures
    server.ask("one", "!crash=0")
    wait_for(lambda: failures)
    assert "the engine failed for good" in str(failures[0]) and server.get("/health/ready").status == 503


def test_a_model_that_failed_is_tried_again_later_and_may_be_evicted_before(start, monkeypatch):
    monkeypatch.setattr(engine_client, "RESTART_BUDGET", 0)
    monkeypatch.setattr(engine_client, "RETRY_DOWN_S", 0.3)
    server = start({"one": "", "two": ""}, tries_again=True)
    said(server.ask("two"))
    server.ask("two", "!crash=0")
    assert server.ask("two").status == 503
    wait_for(lambda: server.states()["two"] == "loaded")
    assert said(server.ask("two")) == "hi"
    monkeypatch.setattr(engine_client, "RETRY_DOWN_S", 60.0)
    server.ask("two", "!crash=0")
    wait_for(lambda: server.served("two").engine.state == "down")
    unload = server.served("two").engine.unload()
    asyncio.run_coroutine_threadsafe(unload, server.loop).result(5)  # ends its waiting
    assert server.states()["two"] == "unloaded"


def test_a_failed_load_is_an_answer_and_may_succeed_later(start, monkeypatch, tmp_path):
    monkeypatch.setattr(pools, "RETRY_S", 1.0)
    flag = tmp_path / "flag"
    flag.touch()
    server = start({"a": "", "b": f"--fits-beside {flag}", "c": "--fatal bad_model", "d": "--die 5"})
    for name in "bcd":
        reply = server.ask(name)
        assert (reply.status, reply.error["code"]) == (503, "engine_unavailable"), name
        assert "bad_model" not in reply.error["message"], "what the engine says may hold paths"
        assert server.states()[name] == "failed"
        count = len(server.spawned)
        assert server.ask(name).status == 503 and len(server.spawned) == count, "not tried again at once"
    assert said(server.ask("a")) == "hi" and server.get("/health/ready").status == 200
    count = len(server.spawned)  # a was evicted for b, in vain, and is back
    flag.unlink()
    time.sleep(1.1)
    assert said(server.ask("b")) == "hi" and server.states()["b"] == "loaded"
    assert server.ask("c").status == 503 and len(server.spawned) == count + 2


def test_the_one_idle_for_longest_goes_when_memory_is_needed(start, tmp_path):
    """c fits beside b, but not beside a, whose process holds the file while it lives."""
    held = tmp_path / "held"
    server = start({"a": f"--taken {held}", "b": "", "c": f"--fits-beside {held}"})
    said(server.ask("b"))
    said(server.ask("a"))  # b has been idle for longer now
    a, b = server.spawned[:2]

    def release():
        # The fake's memory: given back when the process is gone.
        while a.poll() is None:
            time.sleep(0.005)
        held.unlink()

    thread = threading.Thread(target=release)
    thread.start()
    reply = server.ask("c")
    if reply.status != 200:  # a was gone, but its file not yet
        time.sleep(pools.RETRY_S + 0.1)
        reply = server.ask("c")
    thread.join()
    assert said(reply) == "hi"
    states = server.states()
    assert states == {"a": "unloaded", "b": "unloaded", "c": "loaded"}, "b first, and then a"
    assert b.poll() is not None
    assert [server.served(name).num_evictions for name in "abc"] == [1, 1, 0]


def test_a_model_with_requests_is_never_evicted(start):
    server = start({"a": "", "b": "", "c": ""}, max_loaded=2)
    running = threading.Thread(target=lambda: said(server.ask("a", "!tokens=200 !ms=20")))
    running.start()
    wait_for(lambda: server.served("a").users == 1)
    stream = []
    busy = threading.Thread(target=lambda: stream.append(server.ask("b", "!tokens=100 !ms=20")))
    busy.start()
    wait_for(lambda: server.states()["b"] == "loaded")
    reply = server.ask("c")
    assert (reply.status, reply.error["code"]) == (503, "overloaded") and reply.headers["retry-after"] == "1"
    busy.join()
    running.join()
    assert len(said(stream[0])) == 100
    time.sleep(pools.RETRY_S + 0.1)
    assert said(server.ask("c")) == "hi"
    assert sorted(server.states().values()) == ["loaded", "loaded", "unloaded"]


def test_idle_models_are_unloaded_and_come_back(start):
    server = start({"a": "", "b": ""}, idle_s=0.3)
    said(server.ask("b"))
    wait_for(lambda: set(server.states().values()) == {"unloaded"}, 5)
    assert server.get("/health/ready").status == 200, "a request would be answered"
    assert all(process.poll() is not None for process in server.spawned)
    assert said(server.ask("a")) == "hi" and server.served("a").num_loads == 1
    long = server.ask("a", "!tokens=20 !ms=40")
    assert said(long) == "abcdefghijklmnopqrst", "not idle while it answers"


def test_a_load_goes_into_a_parked_engine(start):
    server = start({"a": "", "b": "", "c": ""}, spares=1)
    wait_for(lambda: server.call(lambda: server.pool.spares.ready) == 1)
    parked = server.spawned[-1]
    assert said(server.ask("b")) == "hi"
    assert server.served("b").engine._process is parked and server.pool.spares.num_loads == 1
    wait_for(lambda: server.call(lambda: server.pool.spares.ready) == 1)
    assert len(server.spawned) == 3, "another one is parked"
    text = server.get("/metrics").body.decode()
    assert "zse_parked_engines 1\n" in text and "zse_parked_engine_loads_total 1\n" in text
    assert 'zse_model_loads_total{model="b"} 1\n' in text and 'zse_model_state{model="c",state="unloaded"} 1\n' in text


@pytest.mark.parametrize("bound", [None, 0, 1 << 30])
def test_a_parked_engine_is_told_what_it_may_become(start, tmp_path, bound):
    """Those that are not loaded first, of them the one that was used last."""
    told = tmp_path / "told"
    server = start(dict.fromkeys("abc", ""), spares=1, max_loaded=2, expect_bytes=bound, park=f"--expects {told}")
    if bound == 0:
        wait_for(lambda: server.call(lambda: server.pool.spares.ready) == 1)
        time.sleep(0.6)
        assert not told.exists()
        return
    wait_for(lambda: told.exists() and told.read_text() in (f"c b a {bound}\n", f"b c a {bound}\n"))
    assert said(server.ask("c")) == "hi"
    wait_for(lambda: told.read_text().endswith(f"\nb a c {bound}\n"))
    assert said(server.ask("b")) == "hi"
    wait_for(lambda: told.read_text().endswith(f"\na b c {bound}\n"))


def test_parked_engines_that_die_are_replaced(start):
    server = start({"a": "", "b": ""}, spares=2)
    wait_for(lambda: server.call(lambda: server.pool.spares.ready) == 2)
    os.kill(server.spawned[-1].pid, signal.SIGKILL)
    wait_for(lambda: len(server.spawned) == 4 and server.call(lambda: server.pool.spares.ready) == 2)
    # One that died unnoticed is not taken into use.
    for process in server.spawned[1:]:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    assert said(server.ask("b")) == "hi"


def test_parking_is_given_up_when_it_never_works(start, caplog):
    server = start({"a": "", "b": ""}, spares=1, park="--park-fatal no_device")
    wait_for(lambda: server.pool.spares.wanted == 0, 10)
    assert len(server.spawned) <= 1 + spares.SPARE_BUDGET
    assert "a parked engine ended with exit code 2: no_device" in caplog.text
    assert said(server.ask("b")) == "hi"


def test_an_engine_that_dies_is_replaced_by_a_parked_one(start):
    server = start({"a": "", "b": ""}, spares=1)
    said(server.ask("b"))
    wait_for(lambda: server.call(lambda: server.pool.spares.ready) == 1)
    parked = server.spawned[-1]
    assert server.ask("b", "!crash=0").error["code"] == "engine_restarting"
    wait_for(lambda: server.states()["b"] == "loaded")
    assert server.served("b").engine._process is parked and said(server.ask("b")) == "hi"
    assert server.get("/health/ready").json["restarts"] == 1


@pytest.mark.timed
def test_a_stop_while_a_model_loads(start):
    server = start({"a": "", "b": "--load-ms 3000"}, spares=1)
    reply = []
    thread = threading.Thread(target=lambda: reply.append(server.ask("b")))
    thread.start()
    wait_for(lambda: server.states()["b"] == "loading")
    begin = time.monotonic()
    server.call(lambda: setattr(server.app, "draining", True))
    server.close()
    thread.join()
    assert time.monotonic() - begin < 4
    assert reply[0].status in (0, 503)


def test_start_block_and_options(start):
    from test_lifecycle import Process

    process = Process("--spare-engines", "0", "one", "two")
    try:
        assert "on demand: two" in process.block and "ZSE " in process.block
        with process.connect() as sock:
            from harness import read_reply, request

            sock.sendall(request("POST", "/v1/chat/completions", chat_body("hi", model="two")))
            assert said(read_reply(sock)) == "hi"
        children = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children").read_text().split()
        assert len(children) == 2
        process.popen.send_signal(signal.SIGTERM)
        assert process.finish()[0] == 0
        assert not any(Path(f"/proc/{pid}/stat").exists() for pid in children)
    finally:
        process.popen.kill()
        process.popen.communicate()
