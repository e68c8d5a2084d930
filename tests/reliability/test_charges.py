"""A quota is charged what the engine computed, whatever becomes of the request: the sum of all charges is what the fake device
has counted, over random requests that finish, fail, are refused or dropped.

ZSE_TEST_CHARGES: how many random walks (default 12). A failure prints its seed."""

import concurrent.futures
import gc
import importlib.util
import os
import random
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness import chat_body, request, wait_for

from zse.cache.prefix import PrefixCache
from zse.engine.channel import Channel
from zse.engine.client import READY, EngineClient, restarting_error
from zse.engine.messages import Ask, FrameReader, FromEngine, ToEngine, encode
from zse.engine.serving import serve
from zse.errors import RequestError
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.options import RequestOptions
from zse.server.keys import Key, Quota

_spec = importlib.util.spec_from_file_location(
    "counting_engine", Path(__file__).parents[1] / "engine" / "fake_engine.py"
)
counting_engine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(counting_engine)

NUM_WALKS = int(os.environ.get("ZSE_TEST_CHARGES", "12"))
NAN = 666  # CountingRunner fails what has this token


class Device(counting_engine.CountingRunner):
    """Counts tokens of prompts that it computes for the first time, and those that it says, unless nobody could have stopped it:
    a step that was started ahead of an answer's end. cancelled: ids whose last steps count."""

    def __init__(self, runs_ahead: bool):
        super().__init__(runs_ahead=runs_ahead)
        self.computed, self.reached, self.cancelled = 0, {}, set()
        self.forwards, self.pages = self, SimpleNamespace(run=lambda transfers: None)
        self.max_lines, self.dense = 64, lambda pooled: pooled
        self._flights = []

    def run(self, batch):
        if not hasattr(batch, "entries"):
            return self._run_jobs(batch)
        self._flights.append(batch)
        return super().run(batch)

    def collect(self, sampled):
        for entry in self._flights.pop(0).entries:
            request = entry.request
            if request.state != "finished" or request.id in self.cancelled or request.id < 0:
                self._count(request.id, request, entry.start, entry.count, entry.samples)
        return super().collect(sampled)

    def _count(self, key, request, start, count, said):
        if key < 0:  # a beam: its search has one prompt
            key = tuple(request.tokens[: request.prompt_len])
        fresh = min(start + count, request.prompt_len) - max(start, self.reached.get(key, 0))
        self.reached[key] = max(start + count, self.reached.get(key, 0))
        self.computed += max(0, fresh) + said

    def _run_jobs(self, pieces):
        self.computed += sum(piece.num_tokens for piece in pieces)

    def hidden(self, place, count):
        return np.ones((count, 4))

    def logprobs(self, lines):
        return [counting_engine.TokenLogprob(float("nan") if line.target == NAN else -0.5, []) for line in lines]


class Walk:
    """A client's end and an engine's in one thread, with serve() between them: it asks `receive` for what the server sent."""

    def __init__(self, seed: int, turns: int = 250):
        self.draw = random.Random(seed)
        self.turns, self.inbox, self.open = turns, bytearray(), []
        self.charged, self.channels = 0, 0
        pages = self.draw.choice((16, 24, 64))  # of 16 tokens: the first two preempt
        self.engine = counting_engine.make_engine(
            num_pages=pages,
            runs_ahead=self.draw.random() < 0.5,
            prefix_cache=PrefixCache(pages, "lru") if self.draw.random() < 0.7 else None,
        )
        self.device = self.engine.runner = Device(self.engine.runner.runs_ahead)
        cancel = self.engine.cancel

        def noted(id):
            self.device.cancelled.add(id)
            return cancel(id)

        self.engine.cancel = noted
        self.client = EngineClient(lambda: None)
        self.client.state = READY
        self.client._link = SimpleNamespace(send=lambda message: self.inbox.extend(encode(message)))
        self._reader, self._to_engine = FrameReader(FromEngine), FrameReader(ToEngine)

    def settle(self, computed: int) -> None:
        assert computed >= 0
        self.charged += computed
        self.channels -= 1

    # What serve() asks of its socket

    def receive(self, timeout):
        self.turns -= 1
        if self.turns > 0:
            self.act()
        elif self.turns == 0:
            for channel in self.open:
                channel.close()
        elif not self.client.cancelled:
            return None
        data = bytes(self.inbox)
        self.inbox.clear()
        return self._to_engine.feed(data)

    def send(self, *replies) -> None:
        for reply in self._reader.feed(b"".join(map(encode, replies))):
            self.client._receive(reply)

    # What clients do

    def act(self) -> None:
        draw = self.draw
        if draw.random() < 0.35:
            self.submit()
        for channel in [channel for channel in self.open if draw.random() < 0.04]:
            if channel.ids and draw.random() < 0.3:
                channel.cancel(draw.choice([*channel.ids]))
            else:
                channel.close()
                self.open.remove(channel)

    def submit(self) -> None:
        draw = self.draw
        channel = Channel(self.client, self.settle)
        self.channels += 1
        self.open.append(channel)
        prompt = [draw.randrange(100, 600) for _ in range(draw.choice((1, 7, 16, 40, 100)))]
        if draw.random() < 0.1:
            prompt[-1] = NAN
        if draw.random() < 0.1:
            prompt = [99_999]  # refused by the engine
        options = RequestOptions(tenant=draw.choice("ab"))
        kind = draw.randrange(4)
        for key in range(draw.choice((1, 1, 3))):
            params = SamplingParams(max_tokens=draw.randrange(1, 40), ignore_eos=True, seed=1)
            if kind == 0:
                params = Ask(draw.choice(("mean", "logprobs")))
            elif kind == 1 and len(prompt) < 50:
                prompt = [draw.randrange(100, 600), *prompt]  # by which the device tells searches apart
                params = BeamParams(beam_width=draw.choice((1, 2, 3)), max_tokens=draw.randrange(1, 12))
            self.client.submit(channel, key, prompt, params, options)


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_charges_are_what_was_computed(seed):
    walk = Walk(seed)
    try:
        assert serve(walk.engine, walk) == 0
    finally:
        gc.unfreeze()
    assert not walk.client.cancelled and not walk.client.requests and not walk.channels
    assert walk.charged == walk.device.computed > 1000


def test_a_preempted_prompt_costs_once_what_it_reached():
    engine = counting_engine.make_engine()
    engine.submit(1, list(range(100, 200)), SamplingParams(max_tokens=4, seed=1))
    assert engine.num_computed(1) == engine.num_computed(77) == 0
    for reached in (32, 64):  # tokens of a step
        engine.step()
        assert engine.num_computed(1) == reached
    assert engine.scheduler.preempt(1) and engine.num_computed(1) == 64
    engine.step()
    assert engine.num_computed(1) == 64  # the first 32 again
    for _ in range(4):
        engine.step()
    assert engine.num_computed(1) > 100
    engine.cancel(1)
    assert engine.num_computed(1) == 0


def test_what_an_engine_that_died_told_is_charged():
    walk = Walk(3, turns=120)
    walk.engine.runner.lost = False
    act, seen = walk.act, []

    def die() -> None:
        act()
        if walk.turns == 20:
            walk.client._link = None
            told = sum(owed.computed for owed in (*walk.client.requests.values(), *walk.client.cancelled.values()))
            before, channels = walk.charged, list(walk.open)
            for channel in channels:
                channel.close()
            walk.client._fail_all(restarting_error())
            seen.append((walk.channels, walk.charged - before >= told > 0))
            walk.turns = -1

    walk.act = die
    serve(walk.engine, walk)
    gc.unfreeze()
    assert seen == [(0, True)] and 0 < walk.charged <= walk.device.computed


def test_a_channel_that_failed_takes_no_more():
    walk = Walk(0)
    settled = []
    channel = Channel(walk.client, settled.append)
    walk.client.submit(channel, 0, [1, 2, 3], SamplingParams(max_tokens=2))
    error = RequestError("no", status=401)
    channel.fail(error)
    with pytest.raises(RequestError):
        walk.client.submit(channel, 1, [1], SamplingParams(max_tokens=1))
    channel.close()
    channel.close()
    assert not settled
    walk.turns = 0
    serve(walk.engine, walk)
    gc.unfreeze()
    assert settled == [0]


# Over HTTP: every route, every way to end

KEYS = tuple(Key(name, "key-" + name, None, Quota(tpm=10_000_000)) for name in ("a", "b", "c"))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def asked(draw: random.Random, tenant: str) -> tuple[str, dict]:
    """A route and a body whose prompts begin with the tenant's letter and are like no other."""

    def prompt() -> str:
        return f"{tenant}{draw.getrandbits(64):020d}" + "x" * draw.choice((0, 10, 300))

    kind = draw.randrange(6)
    if kind == 0:
        body = {"input": [prompt() for _ in range(draw.choice((1, 12)))]}
        if draw.random() < 0.4:
            body["dimensions"] = draw.choice((4, 9_999_999))
        return "/v1/embeddings", body
    if kind == 1:
        documents = [prompt() for _ in range(3)]
        return "/v1/rerank", {"query": prompt(), "documents": documents, "method": "embedding"}
    body = {"prompt": prompt(), "max_tokens": draw.randrange(1, 40), "ignore_eos": True}
    if kind == 2:
        body |= {"prompt_logprobs": 1}
    elif kind == 3:
        body |= {"use_beam_search": True, "beam_width": 2, "max_tokens": draw.randrange(1, 8)}
        del body["ignore_eos"]
    elif kind == 4:
        body |= {"stream": True, "n": draw.choice((1, 1, 2)), "logprobs": draw.choice((None, 1))}
    else:
        body |= {"stop": ["xx"], "stream": draw.random() < 0.5}
    if draw.random() < 0.1:
        body["max_tokens"] = 1 << 20  # refused
    return TEXT, body


def send(server, seed: int) -> None:
    draw = random.Random(seed)
    tenant = draw.choice("abc")
    path, body = asked(draw, tenant)
    with server.connect() as sock:
        sock.sendall(request("POST", path, body, {"authorization": f"Bearer key-{tenant}"}))
        if draw.random() < 0.5:  # leaves, at whatever comes first
            time.sleep(draw.random() * 0.06)
            return
        sock.settimeout(20)
        data = b""
        while piece := sock.recv(1 << 16):
            data += piece
            if b"content-length" in data or b"0\r\n\r\n" in data:
                return


def test_every_route_is_charged_with_what_it_cost(scheduled, tmp_path):
    log = tmp_path / "computed"
    server = scheduled(f"--rows 6 --pages 256 --step-ms 2 --computed {log}", key=KEYS, max_choices=400)
    seed = random.randrange(1 << 30)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda index: send(server, seed + index), range(240)))
    server.assert_quiet(20)
    counted = {ord(name): 0 for name in "abc"}
    for line in log.read_text().splitlines():
        first, count = map(int, line.split())
        counted[first] += count
    for name in "abc":
        tenant = server.app.admission.tenants[name]
        charged = server.app.tenants[name].computed_tokens
        assert charged == counted[ord(name)] > 300, (seed, name)
        level = tenant.buckets["tokens"].level
        assert level >= 10_000_000 - charged  # all of the reservations came back
    page = server.call(lambda: server.app.tenants["a"].computed_tokens)
    assert page == counted[ord("a")]


def test_dimensions_are_refused_before_the_engine_runs(own_server):
    server = own_server()
    seen = []
    link = server.engine._link
    passes, link.send = link.send, lambda message: (seen.append(message), passes(message))
    reply = server.post("/v1/embeddings", {"input": "a" * 100, "dimensions": 9_999_999})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "out_of_range", "dimensions")
    assert not seen and "at most 6" in reply.error["message"]
    assert server.post("/v1/embeddings", {"input": "a", "dimensions": 6}).status == 200 and seen


def test_a_reservation_ends_with_the_engine(own_server):
    """The engine dies with answers that run and others whose client has just left: nothing stays reserved."""
    key = (Key("a", "key-a", None, Quota(tpm=100_000)),)
    server = own_server(key=key)
    header = {"authorization": "Bearer key-a"}
    socks = [server.connect() for _ in range(6)]
    for sock in socks:
        sock.sendall(request("POST", CHAT, chat_body("!tokens=5000 !ms=1", max_tokens=2000, stream=True), header))
    for sock in socks:
        sock.recv(1 << 12)
    for sock in socks[:3]:
        sock.shutdown(socket.SHUT_RDWR)
    server.call(lambda: server.engine.kill())
    wait_for(lambda: not server.app.running and not server.engine.cancelled)
    for sock in socks:
        sock.close()
    bucket = server.app.admission.tenants["a"].buckets["tokens"]
    charged = server.app.tenants["a"].computed_tokens
    assert 6 * 20 < charged < 12_000 and bucket.level >= 100_000 - charged


def test_a_frozen_engine_holds_no_reservation(own_server, monkeypatch):
    """Also where only requests are left whose client has gone: it is killed, and what it told is charged."""
    monkeypatch.setattr("zse.engine.client.KILL_S", 1.0)
    server = own_server(key=(Key("a", "key-a", None, Quota(tpm=100_000)),))
    with server.connect() as sock:
        header = {"authorization": "Bearer key-a"}
        sock.sendall(request("POST", CHAT, chat_body("!freeze", max_tokens=2000), header))
        wait_for(lambda: server.engine.requests)
        time.sleep(0.1)
    wait_for(lambda: server.engine.cancelled)
    wait_for(lambda: not server.engine.cancelled, 6)
    assert server.app.tenants["a"].computed_tokens == 0
    assert server.app.admission.tenants["a"].buckets["tokens"].level == 100_000
