"""Engines that compute prompts for others: the same tokens as one engine, whatever happens to the one that is asked."""

import contextlib
import os
import random
import socket
import threading
import time
from array import array

import msgspec
import pytest
import tiny_model
from tiny_engines import TinyEngines, prompt

from zse.engine import kv_wire, prefill_client, wire
from zse.engine.kv_wire import ALIVE, FAILED, PAGE, PROMPT, Link, LinkError
from zse.errors import ConfigError, RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
OPTIONS = dict(max_rows=4, max_context=2048, num_pages=300, speculation="none")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", context=2048)


@pytest.fixture
def engines(model):
    with TinyEngines(model, **OPTIONS) as made:
        yield made


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return str(path)


class Running:
    """An engine whose loop runs in a thread."""

    def __init__(self, engine):
        self.engine, self.going = engine, True
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while self.going:
            self.engine.step()
            self.engine.scheduler.check_integrity() and pytest.fail("integrity")
            time.sleep(0.001)

    def stop(self):
        self.going = False
        self.thread.join()


@pytest.fixture
def pair(engines, secret, tmp_path):
    """(asks, computes): engines; more(options) makes others."""
    address = f"unix:{tmp_path}/kv"
    computes = engines(role="prefill", kv_listen=address, kv_secret=secret)
    asks = engines(role="decode", kv_peers=address, kv_secret=secret)
    running = Running(computes)
    connected(asks)
    yield asks, computes
    running.stop()


def connected(engine, count=1):
    until(lambda: engine.counters()["prefill_peers"] == count)


def until(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def replies(engine, prompts, tenant="", params=PARAMS, timeout_s=20.0):
    """[(tokens, cached_tokens, error)] of prompts that run at once."""
    found = {id: ([], [0], []) for id in range(1, len(prompts) + 1)}
    for id, ids in enumerate(prompts, 1):
        engine.submit(id, ids, params, RequestOptions(tenant=tenant))
    open_ids, end = set(found), time.monotonic() + timeout_s
    while open_ids:
        assert time.monotonic() < end, f"{open_ids} have no end"
        for output in engine.step():
            found[output.id][0].extend(output.tokens)
            found[output.id][1][0] += output.cached_tokens
            if output.error is not None:
                found[output.id][2].append(output.error.code)
            if output.finish is not None:
                open_ids.discard(output.id)
        assert engine.scheduler.check_integrity() == []
        if not engine.has_work:
            time.sleep(0.001)
    return [(tokens, cached[0], errors) for tokens, cached, errors in found.values()]


def test_same_tokens(pair, engines):
    asks, computes = pair
    alone = engines()
    rng = random.Random(1)
    prompts = [prompt(rng.choice((40, 257, 300, 512, 513, 777, 1500)), number) for number in range(8)]
    expected = replies(alone, prompts)
    found = replies(asks, prompts)
    assert [said[0] for said in found] == [said[0] for said in expected]
    for ids, (_, cached, _) in zip(prompts, found, strict=True):
        assert cached == ((len(ids) - 1) // 16 * 16 if len(ids) > 256 else 0)  # 16: of a page
    totals = asks.counters()
    assert totals["prefill_failed_prompts"] == 0 and totals["prefill_asked_prompts"] == sum(
        len(ids) > 256 for ids in prompts
    )
    # What is cached here is not asked for again; what is behind it is.
    longer = prompts[-1] + prompt(600, 99)
    assert replies(asks, [longer])[0][0] == replies(alone, [longer])[0][0]
    served = computes.counters()
    assert served["prefill_served_pages"] == asks.counters()["prefill_fetched_pages"]
    assert not computes.scheduler.requests


def test_tenants_share_nothing(pair):
    asks, computes = pair
    ids = prompt(600, 5)
    replies(asks, [ids], "me")
    computed = computes.counters()["scheduled_tokens"]
    replies(asks, [ids], "other")
    assert computes.counters()["scheduled_tokens"] - computed > 500


def test_its_own_requests_are_refused(pair):
    with pytest.raises(RequestError, match="computes prompts for others") as refused:
        pair[1].submit(1, prompt(10), PARAMS)
    assert refused.value.code == "prefill_only" and refused.value.status == 503


def test_cancelled_and_late(pair, monkeypatch):
    asks, computes = pair
    for number in range(6):
        asks.submit(1, prompt(1500, 20 + number), PARAMS)
        if number % 2:
            time.sleep(0.02)
        assert asks.num_computed(1) == 0 and asks.cancel(1) and not asks.cancel(1)
        asks.step()
    asks.submit(2, prompt(1500, 40), PARAMS, RequestOptions(deadline_ms=1.0))
    time.sleep(0.01)
    outputs = []
    until(lambda: outputs.extend(asks.step()) or outputs)
    assert [(output.id, output.finish) for output in outputs] == [(2, "timeout")]
    until(lambda: not asks.step() and not asks.scheduler.cache.filling)
    assert asks.scheduler.check_integrity() == [] and not computes.scheduler.running
    assert replies(asks, [prompt(700, 41)])[0][2] == []


def test_who_was_held_back_has_waited_since_it_was_submitted(pair):
    """Its patience (max_wait_s) began anew when its pages had come."""
    asks, _ = pair
    begin = asks.clock()
    asks.submit(3, prompt(1500, 50), PARAMS, RequestOptions(deadline_ms=60_000.0))
    time.sleep(0.2)
    until(lambda: asks.step() or 3 in asks.scheduler.requests)
    request = asks.scheduler.requests[3]
    assert request.submitted_at - begin < 0.1 and request.deadline_at == pytest.approx(request.submitted_at + 60)
    assert asks.cancel(3)


def test_the_other_engine_goes(engines, secret, tmp_path, monkeypatch):
    """Killed before, between and after pages: the prompt is computed here; when it is back it is asked again."""
    address = f"unix:{tmp_path}/kv"
    asks = engines(role="decode", kv_peers=address, kv_secret=secret)
    alone = engines()
    monkeypatch.setattr(prefill_client, "RETRY_S", 0.05)
    ids = prompt(900, 7)
    assert replies(asks, [ids]) == replies(alone, [ids])  # nobody is there
    client = asks.feature("prefill client")
    fingerprint = client._peers[0]._fingerprint
    key = wire.read_secret(secret)
    mover = alone.runner.pages
    for num_pages in (0, 1, 20):
        listener = socket.socket(socket.AF_UNIX)
        (tmp_path / "kv").unlink(missing_ok=True)
        listener.bind(str(tmp_path / "kv"))
        listener.listen()
        ids = prompt(900, 100 + num_pages)
        expected = replies(alone, [ids])[0][0]
        nodes = alone.scheduler.cache.prefix.match(("", ""), array("i", ids).tobytes(), whole=True).nodes

        def serve(listener=listener, nodes=nodes, num_pages=num_pages):
            link = Link.accept(listener.accept()[0], fingerprint, key)
            link.send(ALIVE, 0)
            frame = link.receive(5.0)
            assert frame.kind == PROMPT
            for node in nodes[:num_pages]:
                link.send(PAGE, frame.job, mover.read_page(node.page))
            link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        connected(asks)
        failed = asks.counters()["prefill_failed_prompts"]
        said = replies(asks, [ids])[0]
        assert said == (expected, 16 * num_pages, [])
        assert asks.counters()["prefill_failed_prompts"] == failed + 1
        thread.join()
        listener.close()


def test_one_that_is_silent(engines, secret, tmp_path, monkeypatch):
    monkeypatch.setattr(prefill_client, "SILENCE_S", 0.3)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "kv"))
    listener.listen()
    asks = engines(role="decode", kv_peers=f"unix:{tmp_path}/kv", kv_secret=secret)
    fingerprint = asks.feature("prefill client")._peers[0]._fingerprint
    link = Link.accept(listener.accept()[0], fingerprint, wire.read_secret(secret))
    connected(asks)
    began = time.monotonic()
    assert replies(asks, [prompt(500, 3)])[0][2] == []
    assert time.monotonic() - began < 5
    link.close()
    listener.close()


def test_the_one_that_knows_the_prompt_is_asked(engines, secret, tmp_path):
    addresses = [f"unix:{tmp_path}/{name}" for name in "ab"]
    computing = [engines(role="prefill", kv_listen=address, kv_secret=secret) for address in addresses]
    running = [Running(engine) for engine in computing]
    # It forgets at once what it was sent: each prompt is asked for.
    asks = engines(role="decode", kv_peers=",".join(addresses), kv_secret=secret, num_pages=130)
    connected(asks, 2)
    bases = [prompt(1000, seed) for seed in (1, 2)]
    try:
        for turn in range(4):
            for base in bases:
                replies(asks, [base + prompt(100, 50 + turn)])
                asks.scheduler.cache.clear()
    finally:
        for each in running:
            each.stop()
    served = [engine.counters()["prefill_served_prompts"] for engine in computing]
    assert served == [4, 4]
    # 1,000 tokens twice, and what is behind them each time.
    assert all(engine.counters()["scheduled_tokens"] < 1000 + 4 * 140 for engine in computing)


def test_strangers_are_refused(pair, secret, tmp_path):
    """Without the secret, of another model, and whatever bytes they send: no page, and the engine goes on."""
    asks, computes = pair
    server = computes.feature("prefill server")
    address, key = wire.address_of(f"unix:{tmp_path}/kv", ""), wire.read_secret(secret)
    with pytest.raises(LinkError, match="another --kv-secret"):
        Link.connect(address, server._fingerprint, b"x" * 32)
    with pytest.raises(LinkError, match="another model"):
        Link.connect(address, bytes(16), key)
    rng = random.Random(2)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address[1])
            sock.sendall(rng.randbytes(rng.randrange(1, 400)))
    link = Link.connect(address, server._fingerprint, key)
    link._send_key = bytes(32)
    link.send(PROMPT, 1, b"")  # not its own
    with pytest.raises(LinkError):
        while True:
            link.receive(2.0)
    for content in (b"", b"\xc1", rng.randbytes(100)):
        link = Link.connect(address, server._fingerprint, key)
        link.send(PROMPT, 1, content)
        with pytest.raises(LinkError):
            while True:
                link.receive(2.0)
    assert replies(asks, [prompt(600, 8)])[0][2] == []
    assert asks.counters()["prefill_failed_prompts"] == 0


def test_a_changed_page_is_not_used(engines, secret, tmp_path):
    """Through a relay that turns one bit: the connection ends, the prompt is computed here."""
    inner, outer = f"{tmp_path}/inner", f"{tmp_path}/outer"
    computes = engines(role="prefill", kv_listen=f"unix:{inner}", kv_secret=secret)
    running = Running(computes)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(outer)
    listener.listen()

    def relay():
        near, _ = listener.accept()
        far = socket.socket(socket.AF_UNIX)
        far.connect(inner)

        def pump(source, target, turn):
            seen = 0
            with contextlib.suppress(OSError):
                while data := bytearray(source.recv(1 << 16)):
                    if turn and seen <= 9000 < seen + len(data):
                        data[9000 - seen] ^= 1
                    seen += len(data)
                    target.sendall(data)
            target.close()

        threading.Thread(target=pump, args=(near, far, False), daemon=True).start()
        pump(far, near, True)

    threading.Thread(target=relay, daemon=True).start()
    asks, alone = engines(role="decode", kv_peers=f"unix:{outer}", kv_secret=secret), engines()
    connected(asks)
    ids = prompt(900, 11)
    said = replies(asks, [ids])[0]
    assert said[0] == replies(alone, [ids])[0][0] and said[1] < 800
    assert asks.counters()["prefill_failed_prompts"] == 1
    running.stop()
    listener.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(role="prefill"), "needs --kv-listen"),
        (dict(role="decode"), "needs --kv-peers"),
        (dict(kv_peers="a:1"), "need --kv-secret"),
        (dict(kv_peers="a:1", kv_secret="/nowhere"), "No such file"),
        (dict(kv_listen="nonsense", kv_secret="SECRET"), "neither HOST:PORT nor"),
        (dict(kv_listen="unix:/nowhere/x", kv_secret="SECRET"), "--kv-listen"),
        (dict(kv_peers="a:1", kv_secret="SECRET", prefix_cache=False), "switched off"),
    ],
)
def test_bad_options(engines, secret, options, said):
    options = {name: secret if value == "SECRET" else value for name, value in options.items()}
    with pytest.raises(ConfigError, match=said):
        engines(**options)


def test_bad_secrets(engines, tmp_path):
    path = tmp_path / "s"
    path.write_bytes(b"x" * 32)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        engines(kv_peers="a:1", kv_secret=str(path))
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="fewer than 16"):
        engines(kv_peers="a:1", kv_secret=str(path))


def test_two_that_ask_each_other_come_to_an_end(engines, secret, tmp_path):
    """A prompt that one was asked for is computed there, not asked for again."""
    addresses = [f"unix:{tmp_path}/{name}" for name in "ab"]
    both = [
        engines(kv_listen=mine, kv_peers=other, kv_secret=secret) for mine, other in (addresses, reversed(addresses))
    ]
    running = Running(both[1])
    try:
        connected(both[0])
        connected(both[1])
        assert replies(both[0], [prompt(700, 12)])[0][1:] == (688, [])
        assert [engine.counters()["prefill_asked_prompts"] for engine in both] == [1, 0]
    finally:
        running.stop()


def test_whatever_one_with_the_secret_asks(pair, tmp_path, secret):
    """Nothing, a token that is none, half a token, a prompt beyond the context: each is told, and the engine goes on."""
    asks, computes = pair
    server = computes.feature("prefill server")
    link = Link.connect(wire.address_of(f"unix:{tmp_path}/kv", ""), server._fingerprint, wire.read_secret(secret))
    wrong = (b"", b"abc", array("i", [10**6] * 40).tobytes(), array("i", [-1] * 40).tobytes(), bytes(4 * 5000))
    for job, tokens in enumerate(wrong, 1):
        link.send(PROMPT, job, msgspec.msgpack.encode(kv_wire.Prompt(tokens, 10**9, "", "")))
        while (frame := link.receive(5.0)).kind == ALIVE:
            pass
        assert (frame.kind, frame.job) == (FAILED, job) and frame.content
    # One that leaves in the middle of its prompt.
    link.send(PROMPT, 9, msgspec.msgpack.encode(kv_wire.Prompt(array("i", prompt(1600, 31)).tobytes(), 0, "", "")))
    link.close()
    until(lambda: not server._jobs and not server._heard and len(server._connections) == 1)
    assert replies(asks, [prompt(600, 13)])[0][2] == []


def test_a_file_of_somebody_is_not_removed(engines, secret, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(ConfigError, match="--kv-listen"):
        engines(kv_listen=f"unix:{notes}", kv_secret=secret)
    assert notes.read_text() == "mine"


def test_a_closed_engine_listens_no_more(engines, secret):
    """Its thread waited in accept() and took one more link; the port stayed taken for as long as the process lived."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listening = lambda: [thread for thread in threading.enumerate() if thread.name == "kv listener"]  # noqa: E731
    before = len(listening())
    engine = engines(role="prefill", kv_listen=f"127.0.0.1:{port}", kv_secret=secret)
    assert len(listening()) == before + 1
    engine.close()
    until(lambda: len(listening()) == before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
