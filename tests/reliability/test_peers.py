"""The attacks that benchmarks/peer_reliability.py makes on servers of others, on ours: what it would say of it; and on a server that
does everything wrong, that it says so.

ZSE_TEST_RAW_MUTANTS: requests that are changed at random and sent to the server's socket (default 300)."""

import asyncio
import os
import threading

import peer_parts
import wire
from harness import Harness

from zse.http.listener import Limits
from zse.server.keys import Key

COUNT = int(os.environ.get("ZSE_TEST_RAW_MUTANTS", "300"))


def test_every_row_of_the_error_contract_is_as_the_table_says():
    server = Harness(key=(Key("a", "user"), Key("a", "old", expires=1.0)))
    try:
        found = peer_parts.errors_of(server.port)
    finally:
        server.close()
    assert len(found) > 40 and {verdict for _, verdict in found.values()} == {"as the table says"}, found


def test_what_rfc_9112_has_refused_is():
    server = Harness(limits=Limits(head_s=0.5, body_idle_s=0.5))
    try:
        found = peer_parts.malformed_of(server.port)
    finally:
        server.close()
    assert {found[name] for name in peer_parts.MUST_REFUSE} == {"refused"}
    assert not [name for name, verdict in found.items() if verdict == "no answer" or "5xx" in verdict]


def test_raw_mutants_give_no_5xx_and_no_hang():
    """Those that wait for more are ended by the server."""
    server = Harness(limits=Limits(head_s=1, body_idle_s=1, keep_alive_s=1), max_choices=1 << 12)
    try:
        sent = wire.mutants(peer_parts.seeds_of_http(), COUNT, COUNT)
        verdicts, wrong = asyncio.run(wire.send_mutants(server.port, sent, 64, 30))
        print(f"{COUNT} mutants: {dict(verdicts)}")
        server.assert_quiet(10)
    finally:
        server.close()
    assert not wrong and not {"waits", "refused"} & verdicts.keys(), (verdicts, wrong[:3])
    assert verdicts["200"] and verdicts["400"]


class Bad:
    """A server that answers 500 to everything that has a head, and never to anything else."""

    def __enter__(self) -> "Bad":
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)))
        self._thread.start()
        assert started.wait(10)
        return self

    async def _main(self, started: threading.Event) -> None:
        async def serve(reader, writer):
            try:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
            except asyncio.IncompleteReadError:
                pass
            writer.close()

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()

    def __exit__(self, *error) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


def test_a_server_that_does_everything_wrong_is_told_so():
    with Bad() as bad:
        answer = asyncio.run(wire.ask(bad.port, wire.completion("a", 1), 5))
        verdicts, wrong = asyncio.run(
            wire.send_mutants(bad.port, wire.mutants(peer_parts.seeds_of_http(), 20, 1), 8, 0.3)
        )
    assert wrong and verdicts["500"] == len(wrong)
    assert peer_parts.verdict_of(answer, 400) == "5xx" and peer_parts.verdict_of(answer, 500) != "as the table says"
    refused = asyncio.run(wire.ask(bad.port, b"", 1))
    assert refused.how == "refused" and peer_parts.verdict_of(refused, 400) == "no answer"
