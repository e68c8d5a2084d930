"""The HTTP package by itself: an application of a few lines, which knows neither models nor the API."""

import asyncio
import socket
import threading
import time

import pytest
from harness import read_reply, request

from zse.errors import RequestError
from zse.http import bind
from zse.http.exchange import CODES, HTTPError, HTTPRequest, Response
from zse.http.listener import Limits, Server
from zse.server import errors


class Noted(HTTPRequest):
    """A request to which the application adds what it knows."""

    user: str = "nobody"


class Echo:
    """POST /echo answers with the body's "text", /stream with its words as events; /broken raises."""

    request_type = Noted
    needs_key = False

    def __init__(self):
        self.answered: list[tuple[str, int]] = []

    def check_head(self, request: Noted) -> None:
        if request.path not in ("/echo", "/stream", "/broken"):
            raise RequestError("no such path", status=404, code="lost")
        request.user = request.headers.get("user", request.user)

    async def handle(self, request: Noted) -> Response | None:
        if request.path == "/broken":
            raise ZeroDivisionError
        text = request.json()["text"]
        if request.path == "/echo":
            return Response(200, text.encode(), [("user", request.user)], media_type="text/plain")
        for word in text.split():
            if word == "fail":
                raise RequestError("it fails", status=500, code="failed")
            request.send_events(b"data: " + word.encode() + b"\n\n")
            await request.connection.drain()
        request.send_events(b"", is_last=True)
        return None

    def error_event(self, error: RequestError, request: Noted) -> bytes:
        return b"data: " + f"{error.code}!".encode() + b"\n\n"

    def error_response(self, error: RequestError, request: Noted | None) -> Response:
        return Response(error.status, f"{error.code}!".encode(), media_type="text/plain", close=error.close)

    def finished(self, request: Noted | None, status: int) -> None:
        self.answered.append(("" if request is None else request.path, status))

    def last_answered(self, path: str, status: int) -> bool:
        """Whether the last answer was this one; the server's thread may note it just after its client has read it."""
        deadline = time.monotonic() + 10
        while self.answered[-1:] != [(path, status)] and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.answered[-1:] == [(path, status)]


@pytest.fixture(scope="module")
def echo():
    """(application, function that sends bytes and returns the answer)."""
    app, loop, started = Echo(), asyncio.new_event_loop(), threading.Event()
    sock = bind.listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    stop = asyncio.Event()

    async def main():
        server = Server(app, Limits(body_bytes=1000))
        await server.listen(sock)
        started.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert started.wait(10)

    def send(data: bytes):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(data)
            return read_reply(client)

    yield app, send
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def test_a_whole_answer(echo):
    app, send = echo
    reply = send(request("POST", "/echo", {"text": "hi"}, {"user": "ann"}))
    assert (reply.status, reply.body, reply.headers["user"]) == (200, b"hi", "ann")
    assert reply.headers["content-type"] == "text/plain" and app.last_answered("/echo", 200)


def test_a_stream_of_events(echo):
    _, send = echo
    reply = send(request("POST", "/stream", {"text": "one two"}))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body == b"data: one\n\ndata: two\n\n" and not reply.closed


@pytest.mark.parametrize(
    "data, status, body",
    [
        (request("GET", "/other"), 404, b"lost!"),
        (b"GET /echo HTTP/1.1\r\nbad header\r\n\r\n", 400, b"invalid_http!"),
        (request("POST", "/echo", b"{"), 400, b"invalid_json!"),
        (request("POST", "/echo", b"[]"), 400, b"invalid_type!"),
        (request("POST", "/echo", b" " * 1001), 413, b"request_too_large!"),
        (request("POST", "/broken", {}), 500, b"internal_error!"),
        (request("POST", "/stream", {"text": "fail"}), 500, b"failed!"),
    ],
)
def test_every_error_has_the_body_of_the_application(echo, data, status, body):
    _, send = echo
    reply = send(data)
    assert (reply.status, reply.body) == (status, body)


def test_an_error_within_a_stream_is_its_last_event(echo):
    _, send = echo
    assert send(request("POST", "/stream", {"text": "one fail two"})).body == b"data: one\n\ndata: failed!\n\n"


@pytest.mark.parametrize("code", CODES)
def test_what_the_package_refuses_stands_in_the_contract_of_the_api(code):
    refusal = HTTPError(code, "x")
    assert errors.CODES[code][:2] == (refusal.status, refusal.type)


def test_percent_escapes_of_a_path(echo):
    _, send = echo
    assert send(request("POST", "/%65ch%6F", {"text": "hi"})).status == 200
    assert send(request("POST", "/%zz%6", {"text": "hi"})).body == b"lost!"
    assert send(request("POST", "/%ff", {"text": "hi"})).body == b"invalid_http!"
