"""`zse serve` as a process: start, refusals to start, drain, crashes of the engine, deaths of either process."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import chat_body, read_reply, request, wait_for

from zse.engine import client as engine_client

HERE = Path(__file__).parent


class Process:
    """serve_fake.py on a free port."""

    def __init__(self, *options: str, wait: bool = True, env: dict | None = None):
        environment = {key: value for key, value in os.environ.items() if key != "ZSE_API_KEY"} | (env or {})
        self.popen = subprocess.Popen(
            [sys.executable, str(HERE / "serve_fake.py"), "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.block = ""
        if wait:
            while "try:" not in self.block:
                line = self.popen.stdout.readline()
                assert line, self.popen.stderr.read()
                self.block += line
            self.port = int(re.search(r"http://[^:]+:(\d+)", self.block)[1])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def send(self, data: bytes) -> socket.socket:
        sock = self.connect()
        sock.sendall(data)
        return sock

    def get(self, path: str):
        with self.send(request("GET", path)) as sock:
            return read_reply(sock)

    def chat(self, text: str, **fields):
        with self.send(request("POST", "/v1/chat/completions", chat_body(text, **fields))) as sock:
            return read_reply(sock)

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        return int(children[0])

    def finish(self, timeout: float = 10) -> tuple[int, str]:
        """Exit code and stderr."""
        _, stderr = self.popen.communicate(timeout=timeout)
        return self.popen.returncode, stderr


@pytest.fixture
def start():
    made = []

    def make(*options, **more):
        made.append(Process(*options, **more))
        return made[-1]

    yield make
    for process in made:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_start_block_and_its_example(start):
    process = start()
    assert re.match(r"ZSE \S+: fake on http://127\.0\.0\.1:\d+ \(context 4096, 8 at once\)\n", process.block)
    assert "weights 1 MiB" in process.block and "engine spawned" in process.block
    command = re.search(r"try: (curl .*)", process.block)[1]
    output = subprocess.run(
        ["sh", "-c", command.replace("curl", "curl -s")], stdout=subprocess.PIPE, text=True, timeout=10
    )
    assert output.stdout.endswith("data: [DONE]\n\n")
    assert '"content":"o"' in output.stdout


@pytest.mark.timed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_when_idle_exits_0_quickly(start, number):
    process = start()
    engine = process.engine_pid
    with process.connect():  # an idle connection does not hold it up
        begin = time.monotonic()
        process.popen.send_signal(number)
        code, stderr = process.finish()
    assert code == 0 and "Traceback" not in stderr
    assert time.monotonic() - begin < 2 and not alive(engine)


def test_a_signal_drains_running_streams(start):
    process = start()
    text = "!tokens=40 !ms=20"
    streams = [
        process.send(request("POST", "/v1/chat/completions", chat_body(text, stream=bool(index % 2))))
        for index in range(20)
    ]
    for sock in streams[1::2]:
        sock.recv(10, socket.MSG_PEEK)
    keep_alive = process.connect()
    process.popen.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    with pytest.raises(ConnectionRefusedError):
        process.connect()
    for index, sock in enumerate(streams):
        reply = read_reply(sock)
        assert reply.status == 200
        assert reply.events[-1] == "[DONE]" if index % 2 else reply.json["usage"]["completion_tokens"] == 41
    assert process.finish()[0] == 0
    keep_alive.close()


def test_requests_and_readiness_during_the_drain(start):
    process = start()
    busy = process.send(request("POST", "/v1/chat/completions", chat_body("!tokens=30 !ms=20", stream=True)))
    late, health = process.connect(), process.connect()
    # Half of a request is on the way when the signal comes: it is answered, not reset.
    data = request("POST", "/v1/chat/completions", chat_body("hi"))
    late.sendall(data[:50])
    ready = request("GET", "/health/ready")
    health.sendall(ready[:10])
    busy.recv(10, socket.MSG_PEEK)
    process.popen.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    late.sendall(data[50:])
    health.sendall(ready[10:])
    reply = read_reply(late)
    assert (reply.status, reply.error["code"], reply.closed) == (503, "shutting_down", True)
    assert reply.headers["retry-after"] == "5"
    assert (reply := read_reply(health)).status == 503 and reply.error["code"] == "shutting_down"
    assert read_reply(busy).events[-1] == "[DONE]"
    assert process.finish()[0] == 0


def test_drain_timeout_ends_requests_with_an_error(start):
    process = start("--drain-timeout", "0.3")
    whole = process.send(request("POST", "/v1/chat/completions", chat_body("!stall")))
    stream = process.send(request("POST", "/v1/chat/completions", chat_body("!tokens=3000 !ms=10", stream=True)))
    stream.recv(10, socket.MSG_PEEK)
    process.popen.send_signal(signal.SIGTERM)
    reply = read_reply(whole)
    assert (reply.status, reply.error["code"]) == (503, "shutting_down")
    events = read_reply(stream).events
    assert events[-1]["error"]["code"] == "shutting_down" and "[DONE]" not in events
    assert process.finish()[0] == 0


def test_a_second_signal_stops_at_once(start):
    process = start()
    engine = process.engine_pid
    sock = process.send(request("POST", "/v1/chat/completions", chat_body("!stall")))
    time.sleep(0.1)
    process.popen.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.popen.send_signal(signal.SIGINT)
    assert process.finish(3)[0] == 130
    wait_for(lambda: not alive(engine))
    sock.close()


@pytest.mark.timed
def test_a_signal_while_loading(start):
    process = start("--engine", "--load-ms 5000", wait=False)
    time.sleep(0.6)
    begin = time.monotonic()
    process.popen.send_signal(signal.SIGTERM)
    code, stderr = process.finish()
    assert (code, "Traceback" in stderr) in ((0, False), (-signal.SIGTERM, False))
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize("how", ["!crash=2", "!eof=2", "!garbage=2", "!lost=2"])
def test_an_engine_that_dies_is_restarted(start, how):
    process = start()
    first = process.engine_pid
    neighbour = process.send(request("POST", "/v1/chat/completions", chat_body("!stall")))
    stream = process.send(request("POST", "/v1/chat/completions", chat_body(f"!tokens=9 {how} !ms=20", stream=True)))
    events = read_reply(stream).events
    assert events[-1]["error"]["code"] == "engine_restarting" and "[DONE]" not in events
    reply = read_reply(neighbour)
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "engine_restarting", "1")
    assert process.get("/health/live").status == 200
    wait_for(lambda: process.get("/health/ready").status == 200)
    assert process.get("/health/ready").json["restarts"] == 1
    assert process.chat("again").json["choices"][0]["message"]["content"] == "again"
    assert process.engine_pid != first and not alive(first)
    if how == "!lost=2":
        process.popen.send_signal(signal.SIGTERM)
        assert "the device failed: event_wait: CUDA_ERROR_LAUNCH_FAILED (719)" in process.finish()[1]


def test_requests_while_the_engine_restarts_are_refused(own_server):
    server = own_server(engine="--load-ms 300")
    server.chat("!crash=0")
    reply = server.chat("hi")
    assert (reply.status, reply.error["code"]) == (503, "engine_restarting")
    assert server.get("/health/ready").status == 503 and server.get("/v1/models").status == 200
    server.wait_ready()
    assert server.chat("hi").status == 200


def test_the_restart_budget(own_server, monkeypatch):
    monkeypatch.setattr(engine_client, "RESTART_BUDGET", 2)
    server = own_server()
    for _ in range(2):
        assert server.chat("!crash=0").error["code"] == "engine_restarting"
        server.wait_ready()
    server.chat("!crash=0")
    wait_for(lambda: server.engine.state == "down")
    reply = server.chat("hi")
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
    assert "retry-after" not in reply.headers and reply.headers["x-should-retry"] == "false"
    ready = server.get("/health/ready")
    assert ready.status == 503 and ready.json["reason"] == "the engine is down"
    assert server.get("/health/live").status == 200


def crash_often(process, times):
    for number in range(times):
        wait_for(lambda: process.get("/health/ready").status == 200, 20)
        assert process.chat("!crash=0").error["code"] == "engine_restarting", number


@pytest.mark.timed(alone=False)
def test_an_engine_that_dies_too_often_ends_the_process(start):
    process = start("--log-level", "error")
    crash_often(process, engine_client.RESTART_BUDGET + 1)
    code, stderr = process.finish(20)
    assert code == 1
    assert "zse: error: the engine failed for good: 5 restarts within 600 s; last: the engine process" in stderr
    assert "Traceback" not in stderr


@pytest.mark.timed(alone=False)
def test_the_server_may_wait_for_an_engine_that_dies_too_often(start):
    process = start("--log-level", "error", "--on-engine-failure", "wait")
    crash_often(process, engine_client.RESTART_BUDGET + 1)
    wait_for(lambda: process.get("/health/ready").json["reason"] == "the engine is down")
    assert process.get("/health/live").status == 200 and process.get("/health/ready").status == 503
    reply = process.chat("hi")
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
    assert "tried again every minute" in reply.error["message"]
    process.popen.send_signal(signal.SIGTERM)
    assert process.finish()[0] == 0


def test_a_frozen_engine_is_not_ready_and_is_killed(own_server, monkeypatch):
    monkeypatch.setattr(engine_client, "SILENT_S", 0.5)
    monkeypatch.setattr(engine_client, "KILL_S", 1.5)
    server = own_server()
    reply = []
    thread = threading.Thread(target=lambda: reply.append(server.chat("!freeze")))
    thread.start()
    wait_for(lambda: server.get("/health/ready").status == 503, 3)
    assert "silent" in server.get("/health/ready").json["reason"]
    thread.join(10)
    assert reply[0].error["code"] == "engine_restarting"
    server.wait_ready()
    assert server.chat("hi").status == 200


def test_a_busy_engine_is_ready(own_server, monkeypatch):
    monkeypatch.setattr(engine_client, "SILENT_S", 1.0)
    monkeypatch.setattr(engine_client, "STUCK_S", 1.0)
    server = own_server()
    with server.connect() as sock:
        sock.sendall(request("POST", "/v1/chat/completions", chat_body("!tokens=200 !ms=20", stream=True)))
        for _ in range(20):
            assert server.get("/health/ready").status == 200
            time.sleep(0.1)


def test_the_engine_dies_with_the_server(start):
    process = start()
    engine = process.engine_pid
    process.popen.kill()
    wait_for(lambda: not alive(engine), 2)


@pytest.mark.parametrize(
    "options,code,line",
    [
        (("--engine", "--fatal a.gguf:_offset_8:_version:_is_9"), 2, "zse: error: a.gguf:_offset_8:_version:_is_9\n"),
        (("--engine", "--die 7"), 1, "zse: error: the engine process exited with code 7\n"),
    ],
)
def test_a_start_that_fails_is_one_line_and_the_exit_code(start, options, code, line):
    process = start(*options, wait=False)
    got, stderr = process.finish()
    assert (got, stderr) == (code, line)


def test_requests_that_wait_for_a_start_that_fails_are_answered(start):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start(
        "--engine", "--load-ms 700 --fatal bad_model", "--port", str(port), "--log-level", "error", wait=False
    )
    process.port = port
    deadline = time.monotonic() + 5
    while True:
        try:
            sock = process.send(request("POST", "/v1/chat/completions", chat_body("hi")))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with sock:
        reply = read_reply(sock)
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
    assert process.finish() == (2, "zse: error: bad_model\n")


def test_a_busy_port_is_one_line(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start("--port", str(port), wait=False)
        code, stderr = process.finish()
    assert code == 2 and stderr == (
        f"zse: error: port {port} on 127.0.0.1 is in use by another program; stop it or choose another with --port\n"
    )


@pytest.mark.parametrize(
    "options,part",
    [
        (("--host", "0.0.0.0"), "can be reached from other machines"),
        (("--host", "203.0.113.9", "--api-key", "k"), "this machine has no such address"),
        (("--host", "no-such-host.invalid", "--api-key", "k"), "--host no-such-host.invalid"),
        (("--api-key", "with space"), "printable ASCII"),
        (("--api-key-file", "/nonexistent"), "/nonexistent"),
        (("--api-key", "a", "--api-key-file", "b"), "give one of"),
    ],
)
def test_options_that_are_refused(start, options, part):
    code, stderr = start(*options, wait=False).finish()
    assert code == 2 and part in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize("how", ["option", "file", "environment"])
def test_api_key_sources(start, how, tmp_path):
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("s3cret\n")
    options = {"option": ("--api-key", "s3cret"), "file": ("--api-key-file", str(tmp_path / "key")), "environment": ()}
    process = start("--host", "0.0.0.0", *options[how], env={"ZSE_API_KEY": "s3cret"} if how == "environment" else None)
    assert process.get("/v1/models").status == 401
    with process.send(request("GET", "/v1/models", None, {"authorization": "Bearer s3cret"})) as sock:
        assert read_reply(sock).status == 200
    with process.send(request("GET", "/v1/models", None, {"authorization": "Bearer other", "host": "my.name"})) as sock:
        assert read_reply(sock).status == 401  # any Host name: the key protects
    process.popen.send_signal(signal.SIGTERM)
    code, stderr = process.finish()
    assert code == 0 and "s3cret" not in stderr and "s3cret" not in process.block


def test_sighup_reads_the_keys_again(start, tmp_path):
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text("alice sk-old\nbob sk-bob rpm=100\n")
    process = start("--api-key-file", str(path), "--log-level", "warning")

    def status(key: str, sock: socket.socket) -> int:
        sock.sendall(request("GET", "/v1/models", None, {"authorization": f"Bearer {key}"}))
        return read_reply(sock).status

    with process.connect() as sock:
        assert [status(key, sock) for key in ("sk-old", "sk-new", "sk-bob")] == [200, 401, 200]
        path.write_text("alice sk-new\n")
        process.popen.send_signal(signal.SIGHUP)
        wait_for(lambda: status("sk-new", sock) == 200, 1)
        assert [status(key, sock) for key in ("sk-old", "sk-new", "sk-bob")] == [401, 200, 401]
        path.write_text("alice sk-third extra words here\n")
        process.popen.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        assert [status(key, sock) for key in ("sk-third", "sk-new")] == [401, 200]
    process.popen.send_signal(signal.SIGTERM)
    code, stderr = process.finish()
    assert code == 0 and "the keys stay as they were" in stderr and "line 1" in stderr and "sk-" not in stderr


def test_log_lines_cannot_be_forged(start):
    process = start()
    process.get("/%0d%0a2026-01-01%20FORGED%1b[31m")
    process.popen.send_signal(signal.SIGTERM)
    _, stderr = process.finish()
    assert "\\x0d\\x0a2026-01-01 FORGED\\x1b[31m" in stderr and "\x1b" not in stderr
