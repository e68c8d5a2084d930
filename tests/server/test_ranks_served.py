"""`zse serve --tp 2` and `--pp 2` with real processes: a rank that is killed in the middle of an answer, and nothing that is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import tiny_model
import tiny_text
from harness import read_reply, request, wait_for

COMPLETE = "/v1/completions"
BODY = {"model": "one", "prompt": "on and on", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@contextmanager
def serving(folder: Path, *options: str, **model):
    """(address, process) of a server whose model has two ranks. model: of tiny_model.write()."""
    tiny_text.write(tiny_model.write(folder / "models" / "one", **model))
    command = [sys.executable, "-m", "zse", "serve", "one", "--port", "0", *options]
    environment = os.environ | {"ZSE_HOME": str(folder)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert " on http://" in line, process.communicate()[1]
        where = urlsplit(line.split(" on ")[1].split()[0])
        yield (where.hostname, where.port), process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=["--tp", "--pp"])
def served(request, tmp_path):
    with serving(tmp_path, request.param, "2", "--device", "cpu", "--threads", "2") as found:
        yield found


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def engine_of(process) -> tuple[int, int]:
    """The process of rank 0, and of rank 1."""
    (engine,) = [pid for pid in children(process.pid) if children(pid)]
    (rank,) = [pid for pid in children(engine) if b"--rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return engine, rank


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def ask(address, **fields):
    with socket.create_connection(address, timeout=20) as sock:
        sock.sendall(request("POST", COMPLETE, BODY | fields))
        return read_reply(sock)


def text_of(reply) -> str:
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


def until_ready(address) -> None:
    def ready() -> bool:
        with socket.create_connection(address, timeout=20) as sock:
            sock.sendall(request("GET", "/health/ready"))
            return read_reply(sock).status == 200

    wait_for(ready, timeout=20)


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_rank_that_dies_is_told_and_replaced(served):
    ranks_are_replaced(*served)


def ranks_are_replaced(address, process) -> list[tuple[str, float]]:
    """Each rank is killed in the middle of an answer: that is told, and the next answer is as before. What took how many seconds."""
    took, begun_s = [], time.monotonic()

    def done(what: str) -> None:
        nonlocal begun_s
        now = time.monotonic()
        took.append((what, now - begun_s))
        begun_s = now

    wanted = text_of(ask(address))
    done("first answer")
    ended = []
    for victim in (1, 0):
        killed = engine_of(process)
        ended.append(killed[victim])
        with socket.create_connection(address, timeout=20) as sock:
            sock.sendall(request("POST", COMPLETE, BODY | {"stream": True, "max_tokens": 240}))
            begun = sock.recv(4096)
            while b"data:" not in begun:
                begun += sock.recv(4096)
            os.kill(killed[victim], signal.SIGKILL)
            while data := sock.recv(1 << 16):
                begun += data
                if data.endswith(b"0\r\n\r\n"):
                    break
        done(f"rank {victim} killed until that is told")
        events = [line[6:] for line in begun.splitlines() if line.startswith(b"data: {")]
        assert json.loads(events[-1])["error"]["code"] == "engine_restarting"
        until_ready(address)
        done("ready again")
        wait_for(lambda killed=killed: not any(map(is_running, killed)))
        done("processes gone")
        assert text_of(ask(address)) == wanted
        done("next answer")
    last = engine_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    wait_for(lambda: not any(map(is_running, last)))
    done("stopped")
    said = process.stderr.read()
    assert f"the engine process stopped: rank 1 (process {ended[0]}) was killed by signal 9" in said
    assert "the engine process stopped: the engine process was killed by SIGKILL" in said
    assert "Traceback" not in said
    return took


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_server_that_is_killed_leaves_no_rank(served):
    _, process = served
    left = engine_of(process)
    process.kill()
    wait_for(lambda: not any(map(is_running, left)))
