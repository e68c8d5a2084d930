"""SIGKILL at random instants under load, of an engine or of the server: every client has an answer, an error or (where the server died)
a connection that ends; nothing is left, and the port is free.

ZSE_TEST_KILLS: how many (default 5; 200 take ten minutes). ZSE_TEST_SEED: of the instants."""

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from harness import chat_body, read_reply, request, wait_for
from test_lifecycle import Process, alive

KILLS = int(os.environ.get("ZSE_TEST_KILLS", "5"))
SEED = int(os.environ.get("ZSE_TEST_SEED", "1"))
EACH = 5  # of one server, the last one of itself: a budget lets an engine start again five times in ten minutes
CHAT = "/v1/chat/completions"


class Clients:
    """8 that ask for streams and whole answers until the server is gone, and what became of each request."""

    def __init__(self, process: Process, seed: int):
        self.process, self.verdicts, self.ending = process, Counter(), False
        self.problems: list[str] = []
        self.threads = [threading.Thread(target=self._ask, args=(seed * 100 + number,)) for number in range(8)]
        for thread in self.threads:
            thread.start()

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.ending:
            stream, count = draw.random() < 0.5, draw.choice((1, 20, 60))
            body = chat_body(f"!tokens={count} !ms=1", stream=stream)
            try:
                with self.process.send(request("POST", CHAT, body)) as sock:
                    reply = read_reply(sock)
                verdict = self._verdict(reply, stream)
            except OSError as error:
                verdict = "no connection" if isinstance(error, ConnectionError) else f"{error!r}"
            except Exception as error:  # a reply that cannot be read
                self.problems.append(repr(error))
                return
            self.verdicts[verdict] += 1
            if verdict == "no connection":
                return
            if verdict == "refused":
                time.sleep(0.05)

    @staticmethod
    def _verdict(reply, stream: bool) -> str:
        if reply.status == 0:
            return "no connection"
        if reply.status == 503:
            assert reply.error["code"] in ("engine_restarting", "overloaded"), reply.error
            return "refused"
        assert reply.status == 200, (reply.status, reply.body)
        if not stream:
            return "whole" if b'"finish_reason":"stop"' in reply.body.replace(b" ", b"") else "cut"
        if reply.body.endswith(b"data: [DONE]\n\n"):
            return "whole"
        return "an error" if b'data: {"error"' in reply.body.replace(b'": ', b'":') else "cut"

    def end(self) -> Counter:
        self.ending = True
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive(), "a client waits for ever"
        assert not self.problems, self.problems[:3]
        return self.verdicts


@pytest.mark.timed
@pytest.mark.parametrize("round", range(-(-KILLS // EACH)))
def test_killed_at_random_instants(round):
    draw = random.Random(f"{SEED} {round}")
    begin = time.monotonic()
    process = Process("--log-level", "error")
    cold, port, clients = time.monotonic() - begin, process.port, Clients(process, SEED + round)
    try:
        for _ in range(min(EACH, KILLS - EACH * round) - 1):
            engine = process.engine_pid
            time.sleep(draw.uniform(0, 0.4))
            os.kill(engine, signal.SIGKILL)
            wait_for(
                lambda: process.get("/health/ready").status == 503 or str(engine) not in children(process.popen.pid), 5
            )
            assert process.get("/health/live").status == 200
            took = wait_for(lambda: process.get("/health/ready").status == 200, cold + 12)
            assert took < cold + 2, f"ready after {took:.1f} s, a cold start takes {cold:.1f}"
            assert not alive(engine)
        time.sleep(draw.uniform(0, 0.4))
        assert clients.verdicts["cut"] == clients.verdicts["no connection"] == 0, clients.verdicts
        family = [process.popen.pid, *map(int, children(process.popen.pid))]
        process.popen.kill()
        wait_for(lambda: not any(map(alive, family)), 3)
    finally:
        process.popen.kill()
        verdicts = clients.end()
        process.popen.communicate()
    print(f"seed {SEED}, round {round}: cold start {cold:.2f} s, {dict(verdicts)}")
    assert verdicts["whole"] > 0
    again = Process("--port", str(port), "--log-level", "error")
    assert again.port == port and again.chat("hello").status == 200
    again.popen.send_signal(signal.SIGTERM)
    assert again.finish()[0] == 0


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
