"""Computes prompts for other engines and sends their KV pages as they are committed
(docs/design/0013-prefill-and-decode.md). Connections have threads of their own; prompts are requests of this engine like
others, with ids below zero."""

import os
import socket
import stat
import threading
from array import array
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from zse.engine.kv_wire import ALIVE, CANCEL, DONE, FAILED, PAGE, PROMPT, Link, LinkError, Prompt, Wake
from zse.errors import ConfigError, RequestError
from zse.lazy import logging
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import Batch, StepOutput
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions
from zse.scheduler.request import salt_of

MAX_LINKS = 64  # and as many handshakes at once: before these a stranger may connect
# Content that a connection has not taken: beyond it its prompt ends, for the one that reads so slowly can compute as well.
MAX_PENDING_BYTES = 512 << 20
ALIVE_S = 1.0  # between signs of life
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class AskedPrompt(NamedTuple):
    """A prompt of the connection's job `number`."""

    connection: "PrefillLink"
    number: int
    tokens: bytes
    salt: tuple[str, ...]
    sent: list[int]  # one number: of pages


class PrefillLink:
    """One engine that asks: a thread reads its frames, another writes what it gets."""

    def __init__(self, link: Link, heard):
        self.link, self._heard = link, heard
        self.pending_bytes = 0
        self.is_open = True
        self._pending: deque[tuple[int, int, bytes]] = deque()
        self._wake = threading.Condition()

    def start(self) -> None:
        """Begin to read and to write."""
        for run in (self._read, self._write):
            threading.Thread(target=run, name="kv link", daemon=True).start()

    def send(self, kind: int, job: int, content: bytes = b"") -> None:
        """Have a frame written; nothing where the other end has gone."""
        with self._wake:
            if not self.is_open:
                return
            self._pending.append((kind, job, content))
            self.pending_bytes += len(content)
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self.is_open, self.pending_bytes = False, 0
            self._pending.clear()
            self._wake.notify()
        self.link.close()

    def _write(self) -> None:
        try:
            while self.is_open:
                with self._wake:
                    if not self._pending:
                        self._wake.wait(ALIVE_S)
                    if not self.is_open:
                        return
                    kind, job, content = self._pending.popleft() if self._pending else (ALIVE, 0, b"")
                    self.pending_bytes -= len(content)
                self.link.send(kind, job, content)
        except LinkError:
            self.close()

    def _read(self) -> None:
        try:
            while True:
                frame = self.link.receive(365 * 86400.0)  # asked nothing, it says nothing
                if frame.kind not in (PROMPT, CANCEL):
                    raise LinkError("a frame that an engine that asks does not send")
                prompt = msgspec.msgpack.decode(frame.content, type=Prompt) if frame.kind == PROMPT else None
                self._heard(self, frame.job, prompt)
        except (LinkError, msgspec.DecodeError):
            self.close()
            self._heard(self, -1, None)


class PrefillServer(Feature):
    """address: of wire.address_of(), where it listens. fingerprint: of the model and its pages. alone: whether
    requests of this engine's own server are refused (--role prefill). Raises ConfigError where it cannot listen."""

    def __init__(self, engine: Any, address: Any, fingerprint: bytes, secret: bytes, alone: bool):
        self._engine, self._cache, self._mover = engine, engine.scheduler.cache, engine.runner.pages
        self._fingerprint, self._secret, self._alone = fingerprint, secret, alone
        self.num_prompts = self.num_pages = self.num_refused = 0
        self._jobs: dict[int, AskedPrompt] = {}
        self._ids: dict[tuple[PrefillLink, int], int] = {}
        self._next_id = -1
        self._heard: deque[tuple[PrefillLink, int, Prompt | None]] = deque()
        self._connections: set[PrefillLink] = set()
        self._handshakes = threading.BoundedSemaphore(MAX_LINKS)
        self._wake = Wake()
        self.wake_fd = self._wake.fd
        self._listener = _listen(*address)
        threading.Thread(target=self._accept, name="kv listener", daemon=True).start()

    # -- the threads' side

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if not self._handshakes.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._welcome, args=(sock,), name="kv handshake", daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            if len(self._connections) >= MAX_LINKS:
                sock.close()
                return
            connection = PrefillLink(Link.accept(sock, self._fingerprint, self._secret), self._hear)
            self._connections.add(connection)
            connection.start()  # behind that: what it says last takes it out again
        except LinkError as error:
            self.num_refused += 1
            logging.getLogger("zse.engine").warning("an engine that asked for KV pages was not served: %s", error)
        finally:
            self._handshakes.release()

    def _hear(self, connection: PrefillLink, job: int, prompt: Prompt | None) -> None:
        self._heard.append((connection, job, prompt))
        self._wake.set()

    # -- the engine's side

    @property
    def is_live(self) -> bool:  # type: ignore[override]
        return bool(self._jobs or self._heard)

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self._heard)

    def before_submit(self, id: int, prompt: list[int], params: Any, options: RequestOptions) -> bool:
        """Refuse the requests of this engine's own server where it computes for others alone."""
        if self._alone and id >= 0:
            message = "this server computes prompts for others (--role prefill): ask one with --role decode"
            raise RequestError(message, status=503, type="server_error", code="prefill_only")
        return False

    def before_schedule(self, now: float) -> list[StepOutput]:
        """Take what was heard."""
        while self._heard:
            connection, number, prompt = self._heard.popleft()
            if prompt is not None:
                self._begin(connection, number, prompt)
            elif number >= 0:
                self._end(connection, number)
                connection.send(FAILED, number, b"cancelled")
            else:
                self._connections.discard(connection)
                for other, job in [key for key in self._ids if key[0] is connection]:
                    self._end(other, job)
        return []

    def _begin(self, connection: PrefillLink, number: int, prompt: Prompt) -> None:
        options = RequestOptions(tenant=prompt.tenant, cache_salt=prompt.cache_salt)
        id, self._next_id = self._next_id, self._next_id - 1
        try:
            if len(prompt.tokens) % 4 or (connection, number) in self._ids:
                raise RequestError("no prompt", code="invalid_value")
            job = AskedPrompt(connection, number, prompt.tokens, salt_of(options), [max(0, prompt.here)])
            self._jobs[id], self._ids[connection, number] = job, id
            self._engine.submit(id, array("i", prompt.tokens).tolist(), PARAMS, options)
        except RequestError as error:
            self._jobs.pop(id, None)
            self._ids.pop((connection, number), None)
            connection.send(FAILED, number, error.message.encode())
            return
        self.num_prompts += 1
        self._send_pages(job)  # that are cached

    def after_commit(self, batch: Batch, seconds: float) -> None:
        """Send the pages that the batch has filled."""
        for entry in batch.entries:
            job = self._jobs.get(entry.request.id)
            if job is not None:
                self._send_pages(job)

    def _send_pages(self, job: AskedPrompt) -> None:
        nodes = self._cache.prefix.match(job.salt, job.tokens, copies=False, whole=True).nodes[job.sent[0] :]
        if any(node.page < 0 for node in nodes):  # on the host, perhaps not yet
            self._mover.run(self._cache.take_transfers())
            self._mover.settle()
        for node in nodes:
            if job.connection.pending_bytes > MAX_PENDING_BYTES:
                return  # the pages behind are left out
            content = self._mover.read_page(node.page) if node.page >= 0 else self._mover.read_slot(node.slot)
            job.connection.send(PAGE, job.number, content)
            job.sent[0] += 1
            self.num_pages += 1

    def filter_outputs(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Those of other engines' prompts are theirs."""
        for output in outputs:
            job = self._jobs.get(output.id) if output.finish is not None else None
            if job is not None:
                failed = None if output.error is None else output.error.message
                kind = DONE if failed is None else FAILED
                job.connection.send(kind, job.number, b"" if failed is None else failed.encode())
                self._forget(output.id)
        return [output for output in outputs if output.id >= 0]

    def _end(self, connection: PrefillLink, number: int) -> None:
        id = self._ids.get((connection, number))
        if id is not None:
            self._forget(id)
            self._engine.cancel(id)

    def _forget(self, id: int) -> None:
        job = self._jobs.pop(id)
        del self._ids[job.connection, job.number]

    def counters(self) -> dict[str, float]:
        """Totals since the start."""
        return {
            "prefill_served_prompts": self.num_prompts,
            "prefill_served_pages": self.num_pages,
            "prefill_refused_links": self.num_refused,
        }

    def close(self) -> None:
        """Nobody is listened to any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which would take one more
        self._listener.close()
        for connection in list(self._connections):
            connection.close()


def _listen(family: int, place: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(place).st_mode):
                    os.unlink(place)  # of an engine that was killed; anything else is somebody's, and bind() says so
            before = os.umask(0o077)
            try:
                listener.bind(place)
            finally:
                os.umask(before)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        listener.listen(MAX_LINKS)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--kv-listen {place}: {error.strerror or error}") from None
    return listener
