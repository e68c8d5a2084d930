"""Requests as bytes: malformed ones are refused the same way however they are cut, limits hold, keep-alive works."""

import contextlib
import json
import random
import socket
import time

import pytest
from harness import chat_body, read_reply, receive, request, wait_for

from zse.errors import RequestError
from zse.http.exchange import FILES_SHARE, HTTPRequest
from zse.http.listener import Limits

H = b"Host: localhost\r\n"
GET = b"GET /version HTTP/1.1\r\n" + H
BODY = json.dumps(chat_body("hi")).encode()
JSON = b"Content-Type: application/json\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + H + JSON


def _length(value: bytes, body: bytes = BODY) -> bytes:
    return POST + b"Content-Length: " + value + b"\r\n\r\n" + body


def _chunked(chunks: bytes, header: bytes = b"Transfer-Encoding: chunked\r\n") -> bytes:
    return POST + header + b"\r\n" + chunks


_INVALID = {
    "lf only": b"GET /version HTTP/1.1\nHost: localhost\n\n",
    "lf after request line": b"GET /version HTTP/1.1\n" + H + b"\r\n",
    "lf after header": b"GET /version HTTP/1.1\r\nHost: localhost\n\r\n",
    "cr without lf": GET + b"A: b\rc\r\n\r\n",
    "nul in value": GET + b"A: b\0c\r\n\r\n",
    "nul in name": GET + b"A\0: b\r\n\r\n",
    "control in value": GET + b"A: \x01\r\n\r\n",
    "del in value": GET + b"A: \x7f\r\n\r\n",
    "obs-fold space": GET + b"A: b\r\n c\r\n\r\n",
    "obs-fold tab": GET + b"A: b\r\n\tc\r\n\r\n",
    "space before colon": GET + b"A : b\r\n\r\n",
    "space in name": GET + b"A b: c\r\n\r\n",
    "no colon": GET + b"Abc\r\n\r\n",
    "empty name": GET + b": b\r\n\r\n",
    "name with paren": GET + b"A(: b\r\n\r\n",
    "space before method": b" GET /version HTTP/1.1\r\n" + H + b"\r\n",
    "unknown method": b"FOO /version HTTP/1.1\r\n" + H + b"\r\n",
    "lower-case method": b"get /version HTTP/1.1\r\n" + H + b"\r\n",
    "no version": b"GET /version\r\n" + H + b"\r\n",
    "version 0.9": b"GET /version HTTP/0.9\r\n" + H + b"\r\n",
    "version 2": b"GET /version HTTP/2.0\r\n" + H + b"\r\n",
    "version 1.2": b"GET /version HTTP/1.2\r\n" + H + b"\r\n",
    "version letters": b"GET /version HTTP/x.y\r\n" + H + b"\r\n",
    "other protocol": b"GET /version HTPT/1.1\r\n" + H + b"\r\n",
    "http2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "binary": bytes(range(128, 256)),
    "space in target": b"GET /ver sion HTTP/1.1\r\n" + H + b"\r\n",
    "bytes in target": b"GET /\x80 HTTP/1.1\r\n" + H + b"\r\n",
    "nul in target": b"GET /\0 HTTP/1.1\r\n" + H + b"\r\n",
    "fragment": b"GET /version#a HTTP/1.1\r\n" + H + b"\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\n" + H + b"\r\n",
    "authority": b"CONNECT localhost:1 HTTP/1.1\r\n" + H + b"\r\n",
    "bad percent bytes": b"GET /%ff HTTP/1.1\r\n" + H + b"\r\n",
    "no host": b"GET /version HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: localhost\r\n\r\n",
    "empty host": b"GET /version HTTP/1.1\r\nHost:\r\n\r\n",
    "foreign host": b"GET /version HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "host with user": b"GET /version HTTP/1.1\r\nHost: a@localhost\r\n\r\n",
    "host with slash": b"GET /version HTTP/1.1\r\nHost: localhost/x\r\n\r\n",
    "host bad port": b"GET /version HTTP/1.1\r\nHost: localhost:x\r\n\r\n",
    "host big port": b"GET /version HTTP/1.1\r\nHost: localhost:99999\r\n\r\n",
    "host open bracket": b"GET /version HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "two authorizations": GET + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    "two content types": POST + JSON + b"Content-Length: 2\r\n\r\n{}",
    "length and chunked": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "two different lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length list": _length(b"2, 2"),
    "length plus": _length(b"+2"),
    "length minus": _length(b"-2"),
    "length hex": _length(b"0x2"),
    "length space": _length(b"2 2"),
    "length letters": _length(b"two"),
    "length float": _length(b"2.0"),
    "length empty": _length(b""),
    "length overflow": _length(b"9" * 30),
    "length arabic digits": _length("٣".encode()),
    "coding gzip": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "coding gzip, chunked": _chunked(b"0\r\n\r\n", b"Transfer-Encoding: gzip, chunked\r\n"),
    "coding chunked, identity": _chunked(b"0\r\n\r\n", b"Transfer-Encoding: chunked, identity\r\n"),
    "coding xchunked": _chunked(b"0\r\n\r\n", b"Transfer-Encoding: xchunked\r\n"),
    "coding twice": _chunked(b"0\r\n\r\n", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
    "chunked in http/1.0": _chunked(b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "chunk size minus": _chunked(b"-2\r\n{}\r\n0\r\n\r\n"),
    "chunk size plus": _chunked(b"+2\r\n{}\r\n0\r\n\r\n"),
    "chunk size 0x": _chunked(b"0x2\r\n{}\r\n0\r\n\r\n"),
    "chunk size space": _chunked(b"2 \r\n{}\r\n0\r\n\r\n"),
    "chunk size empty": _chunked(b"\r\n{}\r\n0\r\n\r\n"),
    "chunk size overflow": _chunked(b"f" * 20 + b"\r\n{}\r\n0\r\n\r\n"),
    "chunk size lf": _chunked(b"2\n{}\r\n0\r\n\r\n"),
    "chunk too long": _chunked(b"2\r\n{}x\r\n0\r\n\r\n"),
    "chunk without crlf": _chunked(b"2\r\n{}0\r\n\r\n"),
    "upgrade and chunked": _chunked(
        b"0\r\n\r\n", b"Transfer-Encoding: chunked\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    ),
}
_OTHERS = {
    "unknown route": (b"GET /nope HTTP/1.1\r\n" + H + b"\r\n", 404, "not_found"),
    "traversal": (b"GET /v1/../../etc/passwd HTTP/1.1\r\n" + H + b"\r\n", 404, "not_found"),
    "encoded traversal": (b"GET /v1/models/%2e%2e%2fpasswd HTTP/1.1\r\n" + H + b"\r\n", 404, "model_not_found"),
    "delete": (b"DELETE /v1/models HTTP/1.1\r\n" + H + b"\r\n", 405, "method_not_allowed"),
    "get on post": (b"GET /v1/completions HTTP/1.1\r\n" + H + b"\r\n", 405, "method_not_allowed"),
    "options": (b"OPTIONS /v1/completions HTTP/1.1\r\n" + H + b"\r\n", 405, "method_not_allowed"),
    "form": (
        b"POST /v1/completions HTTP/1.1\r\n" + H + b"Content-Type: application/x-www-form-urlencoded\r\n"
        b"Content-Length: 2\r\n\r\n{}",
        415,
        "unsupported_media_type",
    ),
    "no type": (
        b"POST /v1/completions HTTP/1.1\r\n" + H + b"Content-Length: 2\r\n\r\n{}",
        415,
        "unsupported_media_type",
    ),
    "latin-1": (
        b"POST /v1/completions HTTP/1.1\r\n" + H + b"Content-Type: application/json; charset=latin-1\r\n"
        b"Content-Length: 2\r\n\r\n{}",
        415,
        "unsupported_media_type",
    ),
    "gzip": (POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415, "unsupported_media_type"),
    "no length": (POST + b"\r\n", 411, "length_required"),
    "length 0": (POST + b"Content-Length: 0\r\n\r\n", 400, "invalid_json"),
    "too large": (_length(b"99999999", b""), 413, "request_too_large"),
    "long target": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + H + b"\r\n", 414, "uri_too_long"),
    "long target, no end": (b"GET /" + b"a" * 9000, 414, "uri_too_long"),
    "long header": (GET + b"A: " + b"a" * 17000 + b"\r\n\r\n", 431, "header_too_large"),
    "endless header": (GET + b"A: " + b"a" * 40000, 431, "header_too_large"),
    "many headers": (GET + b"A: b\r\n" * 120 + b"\r\n", 431, "header_too_large"),
    "many headers, then rubbish": (GET + b"A: b\r\n" * 120 + b"\0\r\n\r\n", 431, "header_too_large"),
    "bad json": (_length(b"1", b"{"), 400, "invalid_json"),
}
MALFORMED = {name: (data, 400, "invalid_http") for name, data in _INVALID.items()} | _OTHERS


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_request_has_the_same_verdict_for_every_cut(server, name):
    data, status, code = MALFORMED[name]
    draw = random.Random(name)
    cuts = [(), tuple(sorted(draw.sample(range(1, len(data)), min(3, len(data) - 1))))]
    cuts += [(draw.randrange(1, len(data)),) for _ in range(3)]
    if len(data) < 400:
        cuts.append(tuple(range(1, len(data))))
    for cut in cuts:
        reply = server.raw(data, cut)
        assert (reply.status, reply.error["code"]) == (status, code), (cut, reply)
        assert reply.error["type"] == "invalid_request_error"
        assert reply.headers["x-request-id"].startswith("req_")
        assert reply.headers["x-should-retry"] == "false"
        if status in (413, 414, 431) or code == "invalid_http":
            assert reply.closed


def test_random_mutants_never_give_a_5xx_or_hang(server):
    draw = random.Random(20)
    seeds = [_length(str(len(BODY)).encode()), GET + b"\r\n", _chunked(b"2\r\n{}\r\n0\r\n\r\n")]
    for _ in range(150):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(1, 4)):
            position = draw.randrange(len(data))
            action = draw.randrange(3)
            if action == 0:
                data[position] = draw.randrange(256)
            elif action == 1:
                del data[position]
            else:
                data.insert(position, draw.choice(b"\r\n\0 :;,\x80"))
        with server.connect(5) as sock:
            sock.sendall(data)
            sock.settimeout(0.15)
            try:
                reply = read_reply(sock)
            except TimeoutError:
                continue  # a mutant that waits for more; its deadline is tested elsewhere
            assert reply.status == 0 or 200 <= reply.status < 500, (bytes(data), reply)
    server.assert_quiet()


def test_allow_header_names_the_methods(server):
    assert server.raw(b"DELETE /v1/models HTTP/1.1\r\n" + H + b"\r\n").headers["allow"] == "GET, HEAD"
    assert server.raw(b"PUT /v1/completions HTTP/1.1\r\n" + H + b"\r\n").headers["allow"] == "POST"


def test_chunked_and_split_bodies_are_read(server):
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, BODY[i : i + 1]) for i in range(len(BODY))) + b"0\r\nTrailer: x\r\n\r\n"
    assert server.raw(_chunked(chunks)).json["choices"][0]["message"]["content"] == "hi"
    data = _length(str(len(BODY)).encode())
    assert server.raw(data, tuple(range(1, len(data))), 0.0005).status == 200


def test_upgrade_offers_are_ignored_body_included(server):
    """Java's HTTP client offers h2c with its first POST."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQ\r\n"
    data = POST + offer + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    for cuts in ((), tuple(range(1, len(data))), (len(data) - 5,)):
        assert server.raw(data, cuts).json["choices"][0]["message"]["content"] == "hi"
    with server.connect() as sock:
        sock.sendall(data + GET + offer + b"\r\n" + GET + b"\r\n")
        assert [read_reply(sock).status for _ in range(1)] == [200]


def test_keep_alive_and_pipelining_answer_in_order(server):
    with server.connect() as sock:
        for _ in range(3):
            sock.sendall(_length(str(len(BODY)).encode()))
            assert read_reply(sock).status == 200
        one = b"GET /v1/models/%d HTTP/1.1\r\n" + H + b"\r\n"
        sock.sendall(b"".join(one % number for number in range(20)) + GET + b"Connection: close\r\n\r\n")
        data = b""
        while piece := receive(sock):
            data += piece
        assert data.count(b"HTTP/1.1 404") == 20 and data.count(b"HTTP/1.1 200") == 1
        assert data.rindex(b"HTTP/1.1 404") < data.index(b"HTTP/1.1 200")


def test_head_has_no_body_and_http_10_closes(server):
    with server.connect() as sock:
        sock.sendall(b"HEAD /version HTTP/1.1\r\n" + H + b"\r\n" + GET + b"Connection: close\r\n\r\n")
        data = b""
        while piece := receive(sock):
            data += piece
        assert data.count(b"HTTP/1.1 200 OK") == 2 and data.count(b'{"version"') == 1
    stream = request("POST", "/v1/chat/completions", chat_body("hi", stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")
    for head in (stream, stream.replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1)):  # the close is its end
        with server.connect() as sock:
            sock.sendall(head)
            data = b""
            while piece := receive(sock):
                data += piece
            assert b"transfer-encoding" not in data and data.endswith(b"data: [DONE]\n\n")
            assert b"connection: close" in data


def test_a_stream_that_failed_leaves_the_connection_to_the_next_request(own_server):
    """Its head said that the connection stays, and its last chunk came."""
    server = own_server()
    with server.connect() as sock:
        sock.sendall(request("POST", "/v1/chat/completions", chat_body("abc!crash=2", stream=True)))
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += receive(sock)
        assert b'data: {"error"' in data and b"connection: close" not in data
        sock.sendall(GET + b"\r\n")
        assert read_reply(sock).status == 200


def test_expect_continue(server):
    with server.connect() as sock:
        sock.sendall(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert receive(sock).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        sock.sendall(BODY)
        assert read_reply(sock).status == 200


def test_body_over_the_limit_is_refused_without_reading_it(own_server):
    server = own_server(limits=Limits(body_bytes=2000 // FILES_SHARE))  # of a route that takes images
    reply = server.post("/v1/chat/completions", b" " * 2001)
    assert (reply.status, reply.error["code"], reply.closed) == (413, "request_too_large", True)
    chunk = b"100\r\n" + b" " * 256 + b"\r\n"
    reply = server.raw(_chunked(chunk * 9))
    assert (reply.status, reply.closed) == (413, True)
    # A client that goes on sending still gets the answer.
    with server.connect() as sock:
        sock.sendall(_length(b"5000000", b""))
        for _ in range(20):
            sock.sendall(b" " * 10000)
        assert read_reply(sock).status == 413
    # Trailers and chunk extensions count, too.
    assert server.raw(_chunked(b"0\r\n" + b"A: " + b"b" * 100_000 + b"\r\n\r\n")).status == 431
    assert server.raw(_chunked(b"1;" + b"b" * 200_000 + b"\r\n \r\n")).status == 413


def test_all_bodies_together_are_bounded(own_server):
    server = own_server(limits=Limits(body_bytes=1000, all_bodies_bytes=1300))
    with server.connect() as first, server.connect() as second:
        first.sendall(_length(b"1000", b" " * 900))
        wait_for(lambda: server.server.bodies.total == 900)
        second.sendall(_length(b"1000", b" " * 900))
        reply = read_reply(second)
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
    server.assert_quiet()


FAST = Limits(head_s=0.5, body_idle_s=0.5, body_total_s=2.0, keep_alive_s=1.0, write_stall_s=1.0, comment_s=0.5)


@pytest.mark.timed
@pytest.mark.parametrize(
    "data,phase",
    [
        (b"GET /ver", "headers"),
        (GET, "headers"),
        (_length(b"10", b""), "body"),
        (_length(b"10", b"{"), "body"),
        (_chunked(b"5\r\n{"), "body"),
    ],
)
def test_half_sent_requests_time_out(own_server, data, phase):
    server = own_server(limits=FAST)
    start = time.monotonic()
    reply = server.raw(data)
    assert (reply.status, reply.error["code"], reply.closed) == (408, "request_timeout", True)
    assert phase in reply.error["message"] and "x-should-retry" not in reply.headers
    assert time.monotonic() - start < 2.5


def test_slow_senders_time_out_although_they_send(own_server):
    server = own_server(limits=FAST)
    with server.connect() as sock:
        sock.sendall(_length(b"2000", b""))
        start = time.monotonic()
        reply = None
        while reply is None and time.monotonic() - start < 5:
            try:
                sock.sendall(b" ")
                sock.settimeout(0.1)
                reply = read_reply(sock)
            except TimeoutError:
                pass
        assert reply is not None and reply.status == 408


def test_idle_connections_close(own_server):
    server = own_server(limits=FAST)
    with server.connect() as fresh, server.connect() as used:
        used.sendall(GET + b"\r\n")
        assert read_reply(used).status == 200
        for sock in (fresh, used):
            assert sock.recv(1) == b""
    server.assert_quiet()


def test_stream_sends_comments_while_it_waits(own_server):
    server = own_server(limits=FAST)
    with server.connect() as sock:
        sock.sendall(request("POST", "/v1/chat/completions", chat_body("!stall", stream=True)))
        data = b""
        while data.count(b": keep-alive\n\n") < 2:
            data += sock.recv(1000)
        assert data.startswith(b"HTTP/1.1 200 OK")
    server.assert_quiet()


def test_reader_that_stops_reading_is_dropped(own_server):
    server = own_server(limits=FAST)
    with server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = chat_body(
            "!tokens=100000 !wide=50", stream=True, logprobs=True, top_logprobs=20, ignore_eos=True, max_tokens=4000
        )
        sock.sendall(request("POST", "/v1/chat/completions", body))
        # Dropped, although we never read nor close. What counts answers keeps one that came and went between two looks.
        wait_for(lambda: server.app.responses["/v1/chat/completions", 200] == 1, 8)
        server.assert_quiet()
        with contextlib.suppress(ConnectionResetError):
            received = b""
            while block := sock.recv(1 << 16):
                received += block
        assert received.startswith(b"HTTP/1.1 200") and b"data: [DONE]" not in received


def test_too_many_connections(own_server):
    server = own_server(limits=Limits(connections=4))
    socks = [server.connect() for _ in range(4)]
    wait_for(lambda: len(server.server.connections) == 4)
    with server.connect() as extra:
        assert read_reply(extra).error["code"] == "overloaded"
    for sock in socks:
        sock.close()
    server.assert_quiet()
    assert server.get("/version").status == 200


def nested(rng: random.Random, depth: int, twice: list[bool]) -> str:
    """JSON text of objects and arrays in each other; twice: one object, at a place of its own, has a key twice if it holds True."""
    if not depth or rng.random() < 0.2:
        return rng.choice(["1", "-2.5", '"a:{[b"', "true", "[]", "{}", "[1,2,3]"])
    parts = [nested(rng, depth - 1, twice) for _ in range(rng.randrange(1, 5))]
    if rng.random() < 0.5:
        return f"[{','.join(parts)}]"
    names = [f'"{number}"' for number in range(len(parts))]
    if twice[0] and rng.random() < 0.2:
        twice[0], names, parts = False, [*names, names[0]], [*parts, rng.choice(["[[{}]]", "7", '{"c":[{}]}'])]
    return "{" + ",".join(f"{name}:{part}" for name, part in zip(names, parts, strict=True)) + "}"


def test_json_may_begin_with_a_bom():
    """As files of Windows' tools do: curl -d @body.json."""
    for text, well in (("\ufeff{}", True), ("\ufeff\ufeff{}", False), ("{\ufeff}", False)):
        request = HTTPRequest("POST", "/", "", {}, False, True, None, text.encode())
        if well:
            assert request.json() == {}
        else:
            with pytest.raises(RequestError, match="not valid JSON"):
                request.json()


@pytest.mark.parametrize("seed", range(20))
def test_a_key_twice_is_found_wherever_it_stands(seed):
    rng, found = random.Random(seed), 0
    while found < 20:
        twice = [True]
        text = '{"x":' + nested(rng, 6, twice) + ',"y":[{"z":[3]}]}'
        request = HTTPRequest("POST", "/", "", {}, False, True, None, text.encode())
        if twice[0]:
            assert request.json() == json.loads(text)
        else:
            found += 1
            with pytest.raises(RequestError, match="a key occurs twice"):
                request.json()
