"""Bodies that are read while they arrive, and forms out of them: the same parts however the bytes are cut, bounds hold,
a handler that is behind holds the peer back."""

import asyncio
import hashlib
import random
import socket
import threading
import time

import pytest
from harness import read_reply, request

from zse.errors import RequestError
from zse.http import bind
from zse.http.body import HELD_BYTES, BodyStream
from zse.http.exchange import HTTPError, HTTPRequest, Response
from zse.http.listener import Limits, Server
from zse.http.multipart import MAX_HEADER_BYTES, MAX_PARTS, FormReader, parameters

B = b"--bound"
TYPE = "multipart/form-data; boundary=bound"


def form(*parts: tuple[str, bytes], end: bytes = B + b"--\r\n") -> bytes:
    out = b"".join(B + b"\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts)
    return out + end


def field(name: str, more: str = "") -> str:
    return f'Content-Disposition: form-data; name="{name}"{more}'


class Uploads:
    """POST /sum answers with what each part's bytes hash to; /slow waits for `go` first; /early does not read."""

    request_type = HTTPRequest
    needs_key = False

    def __init__(self):
        self.go = asyncio.Event()
        self.most, self.failed, self.cancelled = 0, [], 0

    def check_head(self, request) -> None:
        if request.path == "/no":
            raise RequestError("no", status=404, code="lost")
        if request.path != "/plain":
            request.upload = BodyStream(8 << 20)

    async def handle(self, request) -> Response | None:
        if request.path == "/plain":
            return Response(200, b"plain %d" % len(request.body))
        if request.path == "/early":
            return Response(200, b"early")
        try:
            if request.path == "/slow":
                await self.go.wait()
            if request.path == "/raw":
                digest = hashlib.sha256()
                async for data in request.upload:
                    digest.update(data)
                return Response(200, digest.hexdigest().encode())
            out = []
            async for part in FormReader(request.upload, request.headers["content-type"]):
                digest, size = hashlib.sha256(), 0
                async for data in part:
                    digest.update(data)
                    size += len(data)
                out.append([part.name, part.filename, part.media_type, size, digest.hexdigest()])
            return Response.json(out)
        except RequestError as error:
            self.failed.append(error.code)
            raise
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def error_event(self, error, request) -> bytes:
        return b""

    def error_response(self, error, request) -> Response:
        return Response(error.status, error.code.encode(), close=error.close)

    def finished(self, request, status) -> None:
        pass


@pytest.fixture(scope="module")
def uploads():
    """(application, server, port)."""
    app, loop, started = Uploads(), asyncio.new_event_loop(), threading.Event()
    sock, stop, made = bind.listen("127.0.0.1", 0), asyncio.Event(), []

    async def main():
        limits = Limits(body_bytes=1000, body_idle_s=0.6, body_total_s=1.0, all_bodies_bytes=4 << 20)
        made.append(Server(app, limits))
        await made[0].listen(sock)
        started.set()
        await stop.wait()
        made[0].close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert started.wait(10)
    yield app, made[0], sock.getsockname()[1]
    assert made[0].bodies.total == 0
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def send(port: int, *pieces: bytes, pause: float = 0.0):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        for piece in pieces:
            try:
                client.sendall(piece)
            except ConnectionError:
                break
            time.sleep(pause)
        return read_reply(client)


def post(path: str, body: bytes, kind: str = TYPE) -> bytes:
    return request("POST", path, body, {"content-type": kind})


def chunked(path: str, body: bytes, size: int) -> bytes:
    head = request("POST", path, None, {"content-type": TYPE, "transfer-encoding": "chunked"})
    cut = (body[at : at + size] for at in range(0, len(body), size))
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut) + b"0\r\n\r\n"


FORM = form(
    (field("a"), b"1"), (field("file", '; filename="x.txt"') + "\r\nContent-Type: text/CSV", b"\r\n--boun\r\n-" * 999)
)


def test_parts_are_the_same_however_they_arrive(uploads):
    _, _, port = uploads
    want = [["a", None, "text/plain", 1], ["file", "x.txt", "text/csv", 999 * 11]]
    whole = send(port, post("/sum", FORM))
    assert [part[:4] for part in whole.json] == want and not whole.closed
    for data in (chunked("/sum", FORM, 1), chunked("/sum", FORM, 7), chunked("/sum", FORM, 4000)):
        assert send(port, data).json == whole.json
    data, cuts = post("/sum", FORM), random.Random(1)
    for _ in range(20):
        at = sorted(cuts.randrange(1, len(data)) for _ in range(3))
        assert (
            send(port, *(data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)), pause=0.002).json
            == whole.json
        )


def test_the_connection_goes_on_behind_a_form(uploads):
    _, _, port = uploads
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(post("/sum", FORM) + chunked("/sum", FORM, 500) + post("/plain", b"12") + post("/sum", FORM))
        replies = b""
        while replies.count(b"HTTP/1.1 200") < 4 or not replies.endswith(b"]]"):
            replies += client.recv(1 << 16)
    assert replies.count(b"plain 2") == 1
    expect = request(
        "POST", "/sum", None, {"content-type": TYPE, "content-length": str(len(FORM)), "expect": "100-continue"}
    )
    assert send(port, expect, FORM, pause=0.05).status == 200


def test_a_large_body_is_never_held_whole(uploads):
    """8 MB, sent while the handler waits: what is held stays near HELD_BYTES, and the client is held back, not refused."""
    app, server, port = uploads
    data = random.Random(2).randbytes(8 << 20)
    answers = []
    sender = threading.Thread(target=lambda: answers.append(send(port, post("/slow", data, "x/y; boundary=a"))))
    sender.start()
    most, until = (
        0,
        time.monotonic() + 1.2,
    )  # longer than body_idle_s and body_total_s: it is not the client that is slow
    while time.monotonic() < until:
        most = max(most, server.bodies.total)
        time.sleep(0.01)
    app.go._loop.call_soon_threadsafe(app.go.set)
    sender.join(10)
    assert HELD_BYTES <= most <= 3 * HELD_BYTES
    assert answers[0].status == 400  # it is no form
    reply = send(port, post("/raw", data))
    assert reply.body.decode() == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "data, status, code",
    [
        (request("POST", "/sum", None, {"content-type": TYPE, "content-length": "9000000"}), 413, b"request_too_large"),
        (chunked("/raw", b"a" * ((8 << 20) + 1), 1 << 20), 413, b"request_too_large"),
        (request("POST", "/raw", None, {"transfer-encoding": "chunked"}) + b"5\r\nabcdef\r\n", 400, b"invalid_http"),
        (request("POST", "/raw", None, {"content-length": "10"}) + b"abc", 408, b"request_timeout"),
        (post("/no", FORM), 404, b"lost"),
        (post("/plain", b"a" * 1001), 413, b"request_too_large"),
        (post("/early", b"a" * 100_000), 200, b"early"),
    ],
)
def test_what_goes_wrong_while_it_arrives(uploads, data, status, code):
    _, _, port = uploads
    reply = send(port, data)
    assert (reply.status, reply.body) == (status, code)
    assert reply.closed or status == 200


def test_a_client_that_leaves_ends_its_handler(uploads):
    app, server, port = uploads
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(post("/raw", b"a" * 100_000)[:-10])
        time.sleep(0.1)
    until = time.monotonic() + 5
    while not app.cancelled and time.monotonic() < until:
        time.sleep(0.01)
    assert app.cancelled == 1 and server.bodies.total == 0


# -- forms


def read(data: bytes, kind: str = TYPE, step: int = 5) -> list:
    """[(name, filename, media type, bytes)]"""

    async def pieces():
        for at in range(0, len(data), step):
            yield data[at : at + step]

    async def run():
        return [(p.name, p.filename, p.media_type, await p.read(1000)) async for p in FormReader(pieces(), kind)]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "data, want",
    [
        (form(), []),
        (form((field("a"), b"")), [("a", None, "text/plain", b"")]),
        (b"before\r\n" + form((field("a"), b"x"), end=B + b"--"), [("a", None, "text/plain", b"x")]),
        (form((field("a"), b"x")) + b"after it", [("a", None, "text/plain", b"x")]),
        (B + b" \t\r\n" + field("a").encode() + b"\r\n\r\n\r\n" + B + b"--", [("a", None, "text/plain", b"")]),
        (form((field("a", r'; filename="a\"b\\c\d"'), b"x")), [("a", r'a"b\c\d', "text/plain", b"x")]),
        (form((field("%22"), b"x")), [('"', None, "text/plain", b"x")]),
        (form(("content-disposition:form-data;name=a;filename=../é", b"x")), [("a", "../é", "text/plain", b"x")]),
    ],
)
def test_forms(data, want):
    for step in (1, 2, 7, 1 << 20):
        assert read(data, step=step) == want


HEAD = MAX_HEADER_BYTES


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "ends before"),
        (form((field("a"), b"x"), end=b""), "ends before"),
        (form((field("a"), b"x"), end=B), "ends before"),
        (form((field("a"), b"x"), end=B + b"x\r\n\r\n"), "does not end its line"),
        (form(("", b"x")), "no Content-Disposition"),
        (form(("Content-Disposition: form-data", b"x")), "no Content-Disposition"),
        (form(('Content-Disposition: attachment; name="a"', b"x")), "no Content-Disposition"),
        (form(('Content-Disposition: form-data; name="a', b"x")), "parameters"),
        (form(('Content-Disposition: form-data; name="a"; name="b"', b"x")), "parameters"),
        (form((field("a") + "\r\n" + field("b"), b"x")), "twice"),
        (form((field("a") + "\r\nA b", b"x")), "malformed"),
        (form((field("a") + "\r\nA : b", b"x")), "malformed"),
        (form((field("a", '; filename="a\0b"'), b"x")), "malformed"),
        (form((field("a") + "\r\nContent-Transfer-Encoding: base64", b"x")), "Transfer-Encoding"),
        (form((field("a") + "\r\nA: " + "b" * HEAD, b"x")), f"{HEAD} bytes"),
        (form((field("a") + "".join(f"\r\nA{i}: b" for i in range(20)), b"x")), "16 headers"),
        (b"x" * 3 * HEAD + form(), "does not begin"),
        (form(*((field("a"), b"x") for _ in range(MAX_PARTS + 1))), "too many parts"),
        (B + b"\r\n" + field("a").encode() + b"\xff\r\n\r\n" + B + b"--", "UTF-8"),
    ],
)
def test_what_is_no_form(data, reason):
    for step in (3, 4000):
        with pytest.raises(HTTPError, match=reason) as caught:
            read(data, step=step)
        assert (caught.value.status, caught.value.code) == (400, "invalid_multipart")


@pytest.mark.parametrize(
    "kind", ["", "multipart/form-data", "a; boundary=", f"a; boundary={'a' * 71}", 'a; boundary="a\tb"']
)
def test_a_form_needs_a_boundary(kind):
    with pytest.raises(HTTPError, match="boundary|parameters"):
        read(b"", kind)


def test_a_field_is_bounded_and_parameters_are_read_in_linear_time():
    with pytest.raises(HTTPError) as caught:
        read(form((field("a"), b"x" * 1001)))
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")
    start = time.process_time()
    for hostile in ('a; b="' + "\\" * HEAD, "a" + "; " * HEAD, "a; b=" + '"' * HEAD, "a; " + "b" * HEAD):
        try:
            parameters(hostile)
        except HTTPError:
            pass
    assert time.process_time() - start < 0.5
