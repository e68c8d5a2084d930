"""Two servers of a real model: one computes the prompts of the other."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest


class Server:
    """`zse serve` as a process."""

    def __init__(self, model, *options: str):
        command = [
            sys.executable,
            "-m",
            "zse",
            "serve",
            str(model),
            "--served-model-name",
            "m",
            "--port",
            "0",
            *options,
        ]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = ""
        while "try:" not in said:
            line = self.popen.stdout.readline()
            assert line, said
            said += line
        self.base = re.search(r"http://[^ ]+:\d+", said)[0]

    def ask(self, text: str, **fields):
        body = {"model": "m", "prompt": text, "temperature": 0, "max_tokens": 16, **fields}
        request = urllib.request.Request(
            self.base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def counter(self, name: str) -> float:
        with urllib.request.urlopen(self.base + "/metrics") as reply:
            found = re.search(rf"^zse_engine_{name}\S* (\S+)$", reply.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0  # before the first heartbeat

    def stop(self):
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(20)


@pytest.fixture
def pair(real_models, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    options = ("--kv-secret", str(secret), "--threads", "1")
    address = f"unix:{tmp_path}/kv"
    servers = []
    try:
        for role in (("prefill", "--kv-listen"), ("decode", "--kv-peers")):
            servers.append(Server(real_models["smollm2"], "--role", *role, address, *options))
        computes, asks = servers
        end = time.monotonic() + 10
        while asks.counter("prefill_peers") != 1:
            assert time.monotonic() < end
            time.sleep(0.2)
        yield asks, computes
    finally:
        codes = [server.stop() for server in servers if server.popen.poll() is None]
    assert codes in ([0], [0, 0])


def test_two_servers(pair):
    asks, computes = pair
    text = " ".join(f"On day {number} the ship sailed {number * 7 % 13} miles." for number in range(60))
    status, found = asks.ask(text)
    usage = found["usage"]
    assert status == 200 and usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 17
    time.sleep(0.6)  # counters come with the heartbeat
    assert asks.counter("prefill_failed_prompts") == 0
    assert computes.counter("prefill_served_pages") == asks.counter("prefill_fetched_pages") > 30

    status, refused = computes.ask(text)
    assert status == 503 and refused["error"]["code"] == "prefill_only"

    # Killed, the other server leaves this one to compute alone; the tokens are the same.
    computes.popen.kill()
    computes.popen.wait()
    status, again = asks.ask(text, cache_salt="another")
    assert status == 200 and again["choices"][0]["text"] == found["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
