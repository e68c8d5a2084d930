"""Clients that ask for streams and do not read them: what each may hold, when it is cut off, and that others do not notice."""

import socket
import time

from harness import chat_body, request, wait_for

from zse.engine.channel import STREAM_BYTES
from zse.http.listener import Limits

READERS = 4
ENDLESS = {"ignore_eos": True, "max_tokens": 1_000_000, "stream": True}


def test_a_reader_that_stalls_holds_little_and_is_cut_off(own_server):
    server = own_server(engine="--max-context 2000000", limits=Limits(write_stall_s=1.5))
    before = server.chat("!tokens=200").json
    stalled: list[socket.socket] = []
    for _ in range(READERS):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request("POST", "/v1/chat/completions", chat_body("!tokens=100000 !wide=50 !ms=2", **ENDLESS)))
        stalled.append(sock)
    wait_for(lambda: server.state()["requests"] == READERS)

    def held() -> tuple[int, int]:
        """The most that a connection has not sent, and that a stream has waiting."""
        unsent = max((connection.unsent_bytes for connection in server.server.connections), default=0)
        waiting = max((request.channel._bytes for request in server.engine.requests.values()), default=0)
        return unsent, waiting

    most, started, answered = (0, 0), time.monotonic(), 0
    while server.state()["requests"] and time.monotonic() - started < 10:
        most = tuple(map(max, most, server.call(held)))
        asked = time.monotonic()
        assert server.chat("!tokens=200").json["choices"] == before["choices"]
        answered += time.monotonic() - asked < 1
    print(
        f"{READERS} readers: {most[0]} bytes unsent and {most[1]} waiting of one at most, {answered} answers to others"
    )
    assert answered >= 3 and 0 < most[1] and most[1] <= STREAM_BYTES and sum(most) <= 256 << 10
    for sock in stalled:
        sock.close()
    server.assert_quiet()
