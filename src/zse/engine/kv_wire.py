"""How two engines that have a secret in common (wire.py) speak about KV pages: frames that nobody else can have written
(docs/design/0013-prefill-and-decode.md)."""

import hmac
import os
import socket
import struct
from typing import NamedTuple

import msgspec

from zse.engine import wire
from zse.engine.wire import SEND_S, TAG_BYTES, LinkError
from zse.lazy import hashlib

MAGIC = b"ZSEKVW01"
MAX_CONTENT = 1 << 26  # of a frame that is no page: 16 M tokens
MAX_PAGE = 1 << 30

# The kinds of frames.
PROMPT, CANCEL, PAGE, DONE, FAILED, ALIVE = range(1, 7)
REFUSALS = {
    wire.NO_SECRET: "it has another --kv-secret",
    wire.OTHER: "it has another model, version, quantization, page size, KV dtype or kind of device",
}

_HEAD = struct.Struct("<BxxxIQ")  # kind, job, bytes of content
_NUMBER = struct.Struct("<Q")


class Wake:
    """Ends the engine's wait: `fd` can be read from after set(), by a thread."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)

    def set(self) -> None:
        try:
            os.write(self._write, b"x")
        except OSError:
            pass  # it is full of them already, or closed

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write)


class Frame(NamedTuple):
    """content: bytes; of a PAGE, where it was received."""

    kind: int
    job: int
    content: bytes | memoryview


class Prompt(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a PROMPT has. tokens: i32 of full pages and one more token. here: pages of them that need not be sent."""

    tokens: bytes
    here: int
    tenant: str
    cache_salt: str


class Link:
    """One end of a connection after its handshake. One thread sends, one receives. Raises LinkError where the other end
    is gone, or what it says is not its own."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes):
        self._sock = sock
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        sock.settimeout(SEND_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address, fingerprint: bytes, secret: bytes) -> "Link":
        """Reach the engine that listens at address_of()."""
        return cls(*wire.ask(address, MAGIC, fingerprint, secret, REFUSALS))

    @classmethod
    def accept(cls, sock: socket.socket, fingerprint: bytes, secret: bytes) -> "Link":
        """The same from the listening end; `sock` is closed where it fails."""
        return cls(sock, *wire.answer(sock, MAGIC, fingerprint, secret, REFUSALS))

    def send(self, kind: int, job: int, content: bytes = b"") -> None:
        """Write a frame."""
        head = _HEAD.pack(kind, job, len(content))
        # Before anything is sent: who receives hashes the page before meanwhile, and need not wait for this.
        tag = self._tag(self._send_key, self._num_sent, head, content)
        try:
            self._sock.sendall(head)
            self._sock.sendall(content)
            self._sock.sendall(tag)
        except OSError as error:
            raise LinkError(error.strerror or str(error)) from None
        self._num_sent += 1

    def receive(self, patience_s: float, place=None) -> Frame:
        """The next frame, which must begin within patience_s. place(job, nbytes): the memory that takes a PAGE's content,
        or None to drop it."""
        try:
            self._sock.settimeout(patience_s)
            head = wire.exactly(self._sock, _HEAD.size)
            self._sock.settimeout(SEND_S)
            kind, job, nbytes = _HEAD.unpack(head)
            if not PROMPT <= kind <= ALIVE or nbytes > (MAX_PAGE if kind == PAGE else MAX_CONTENT):
                raise LinkError("a frame that no engine sends")
            memory = place(job, nbytes) if place is not None and kind == PAGE else None
            content = memoryview(bytearray(nbytes)) if memory is None else memory
            wire.read_into(self._sock, content)
            tag = wire.exactly(self._sock, TAG_BYTES)
        except OSError as error:
            raise LinkError(error.strerror or str(error) or "it is silent") from None
        if not hmac.compare_digest(tag, self._tag(self._receive_key, self._num_received, head, content)):
            raise LinkError("a frame was changed on its way")
        self._num_received += 1
        return Frame(kind, job, content if kind == PAGE else bytes(content))

    def close(self) -> None:
        """Both threads' calls end with LinkError."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone already
        self._sock.close()

    @staticmethod
    def _tag(key: bytes, number: int, head: bytes, content) -> bytes:
        total = hashlib.blake2b(_NUMBER.pack(number) + head, key=key, digest_size=TAG_BYTES)
        total.update(content)
        return total.digest()
