"""examples/ray_serve.py on a cluster of one machine: replicas of a real model that start on demand, answer as `zse serve`
does, keep each prefix on one replica, replace a server that dies and go when nobody asks. `make test-cluster` installs what
it needs."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: make test-cluster")
import httpx
import psutil

pytestmark = pytest.mark.exhaustive
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
IDLE_S = 6
NAME = f"smollm2-{os.getpid()}"


def until(condition, timeout_s: float):
    """What `condition` gives once it is true."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, f"{condition} is not so after {timeout_s} s"
        time.sleep(0.2)
    return found


def listens(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def cluster(real_models, tmp_path_factory):
    """(client, the processes of `zse serve` that run now), of at most two replicas."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("ray") / "log"
    marker = f"--served-model-name={NAME}"  # which servers are of this test
    with log.open("w") as out:
        command = [sys.executable, EXAMPLE, str(real_models["smollm2"]), f"--port={port}", f"--idle={IDLE_S}"]
        process = subprocess.Popen([*command, marker], stdout=out, stderr=out, start_new_session=True)

    def servers() -> list[psutil.Process]:
        found = []
        for each in psutil.process_iter(["cmdline"]):
            line = each.info["cmdline"] or ()
            if marker in line and "serve" in line and each.ppid() not in {other.pid for other in found}:
                found.append(each)
        return found

    until(lambda: listens(port) or process.poll() is not None, 60)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    until(lambda: process.poll() is not None or client.get("/-/routes").status_code == 200, 60)
    assert process.poll() is None, log.read_text()[-4000:]
    yield client, servers
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    until(lambda: not servers(), 20)


def chat(client, text: str, **fields) -> httpx.Response:
    body = {"model": NAME, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body)


def test_replicas(cluster):
    client, servers = cluster
    assert not servers()  # nobody has asked yet
    answer = chat(client, "Say hello.", max_tokens=4)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert len(servers()) == 1

    # Answers, errors and streams are those of `zse serve`.
    wrong = chat(client, "x", max_tokens=-1)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "max_tokens"
    assert client.get("/v1/models").json()["data"][0]["id"] == NAME
    with client.stream("POST", "/v1/completions", json={"model": NAME, "prompt": "a b", "stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 3

    # Load brings the second replica; all are answered.
    statuses: Counter[int] = Counter()

    def ask(number: int) -> None:
        statuses[chat(client, f"Count from {number}.", max_tokens=60).status_code] += 1

    def load() -> bool:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(servers()) == 2

    until(load, 60)
    assert set(statuses) == {200}

    # A prefix that one replica has is not computed by the other.
    texts = {word: (word + " ") * 400 for word in ("apple", "river", "stone", "cloud")}
    cached = []
    for turn in range(4):
        for text in texts.values():
            usage = chat(client, f"{text} {turn}", max_tokens=1).json()["usage"]
            if turn:
                cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    assert min(cached) > 0.9, cached

    # A server that dies is replaced.
    victim = servers()[0]
    victim.send_signal(signal.SIGKILL)
    until(lambda: chat(client, "Still there?", max_tokens=2).status_code == 200, 60)

    # Nobody asks: no replica. Then one starts again while the request waits.
    until(lambda: not servers(), 60)
    began = time.monotonic()
    answer = chat(client, "Say hello.", max_tokens=4)
    assert answer.status_code == 200, answer.text
    print(json.dumps({"from_zero_s": round(time.monotonic() - began, 2)}))
