"""A client that leaves, in every phase and in every way: its generation stops at once and nothing is left behind."""

import random
import socket
import struct
import time

import pytest
from harness import Harness, chat_body, open_fds, read_reply, request, wait_for

CHAT = "/v1/chat/completions"


def fin(sock: socket.socket) -> None:
    sock.close()


def rst(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


LEAVE = {"fin": fin, "rst": rst, "half-close": half}
BODY = request("POST", CHAT, chat_body("!tokens=100000 !ms=5", max_tokens=4000))
STREAM = request("POST", CHAT, chat_body("!tokens=100000 !ms=5", max_tokens=4000, stream=True))
PREFILL = request("POST", CHAT, chat_body("!stall", stream=True))
MANY = request("POST", CHAT, chat_body("!tokens=100000 !ms=5", max_tokens=4000, stream=True, n=8))


@pytest.fixture(scope="module")
def server():
    harness = Harness()
    yield harness
    harness.close()


@pytest.mark.parametrize("way", LEAVE)
@pytest.mark.parametrize("name,data,wait", [
    ("whole, prefill", request("POST", CHAT, chat_body("!stall")), 1), ("whole, decoding", BODY, 1),
    ("stream, prefill", PREFILL, 1), ("stream, decoding", STREAM, 1), ("stream, n = 8", MANY, 8)])
def test_the_engine_stops_within_100_ms(server, way, name, data, wait):
    sock = server.connect()
    sock.sendall(data)
    wait_for(lambda: len(server.engine.requests) == wait)
    if "decoding" in name or "n =" in name:
        time.sleep(0.05)
    LEAVE[way](sock)
    took = wait_for(lambda: not server.engine.requests, 2)
    assert took < 0.1 + 0.1, took  # the second 0.1 s is the test machine's share
    server.assert_quiet()
    sock.close()


def test_leaving_while_requests_wait_for_the_engine(own_server):
    server = own_server(engine="--load-ms 800", wait=False)
    for way in LEAVE.values():
        sock = server.connect()
        sock.sendall(STREAM)
        wait_for(lambda: server.state()["choices"] == 1)
        way(sock)
        wait_for(lambda: server.state()["choices"] == 0, 0.5)
        sock.close()
    server.wait_ready()
    server.assert_quiet()


def test_random_disconnects_leave_nothing(server):
    """Any phase (before, in and after head and body, queued, first, middle, last token, after the end) × any way."""
    draw = random.Random(99)
    fds = open_fds()
    kinds = [request("POST", CHAT, chat_body(f"!tokens={count} !ms={pause}", stream=stream, n=n))
             for count, pause in ((0, 0), (3, 1), (2000, 1)) for stream in (False, True) for n in (1, 3)]
    kinds += [PREFILL, request("GET", "/version"), b"GARBAGE\r\n\r\n"]
    for _ in range(250):
        data = draw.choice(kinds)
        sock = server.connect()
        cut = len(data) if draw.random() < 0.6 else draw.randrange(len(data))
        sock.sendall(data[:cut])
        phase = draw.random()
        if phase < 0.3:
            time.sleep(draw.random() * 0.01)
        elif phase < 0.5 and cut == len(data) and data is not PREFILL:
            sock.settimeout(0.05)
            try:
                sock.recv(draw.choice([1, 100, 10000]))
            except TimeoutError:
                pass
        draw.choice(list(LEAVE.values()))(sock)
        sock.close()
    server.assert_quiet(5)
    assert open_fds() <= fds + 1
    assert server.chat("still here").json["choices"][0]["message"]["content"] == "still here"


def test_a_cancel_that_meets_the_end_is_harmless(server):
    """Events of a request that was cancelled meanwhile are counted and dropped."""
    late = server.engine.num_late_events
    for _ in range(30):
        sock = server.connect()
        sock.sendall(request("POST", CHAT, chat_body("!tokens=50", stream=True)))
        sock.recv(200)
        sock.close()
    server.assert_quiet()
    assert server.engine.num_late_events >= late
    with server.connect() as sock:
        sock.sendall(request("POST", CHAT, chat_body("ok")))
        assert read_reply(sock).status == 200
