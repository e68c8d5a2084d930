"""How two engines that have a secret in common speak about KV pages: the handshake, and frames that nobody else can have
written (docs/design/0013-prefill-and-decode.md)."""

import hmac
import os
import socket
import stat
import struct
from typing import NamedTuple

import msgspec

from zse.errors import ConfigError, ZSEError
from zse.lazy import hashlib

MAGIC = b"ZSEKVW01"
NONCE_BYTES, FINGERPRINT_BYTES, PROOF_BYTES, TAG_BYTES = 32, 16, 32, 16
HANDSHAKE_S = 5.0  # for each step of it
SEND_S = 30.0  # a peer that takes nothing for so long is gone
MAX_CONTENT = 1 << 26  # of a frame that is no page: 16 M tokens
MAX_PAGE = 1 << 30
LEAST_SECRET = 16

# The kinds of frames.
PROMPT, CANCEL, PAGE, DONE, FAILED, ALIVE = range(1, 7)
# What the listening end answers to the proof of the other.
WELCOME, NO_SECRET, OTHER_MODEL = range(3)
REFUSALS = {
    NO_SECRET: "it has another --kv-secret",
    OTHER_MODEL: "it has another model, version, quantization, page size, KV dtype or kind of device",
}

_HEAD = struct.Struct("<BxxxIQ")  # kind, job, bytes of content
_NUMBER = struct.Struct("<Q")


class LinkError(ZSEError):
    """The other engine cannot be spoken to (any more)."""


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


def read_secret(path: str) -> bytes:
    """What --kv-secret names: a private file of at least LEAST_SECRET bytes. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            secret = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"--kv-secret {path}: {error.strerror or error}") from None
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise ConfigError(f"--kv-secret {path} may be read by others: run `chmod 600` on it")
    if len(secret) < LEAST_SECRET:
        raise ConfigError(f"--kv-secret {path} has fewer than {LEAST_SECRET} bytes: write random ones into it")
    return secret


def address_of(text: str, option: str) -> tuple[int, "str | tuple[str, int]"]:
    """(family, what connect() and bind() take) of "unix:/path" or "host:port". Raises ConfigError."""
    if text.startswith("unix:") and len(text) > 5:
        return socket.AF_UNIX, text[5:]
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} {text!r} is neither HOST:PORT nor unix:/PATH")
    host = host.strip("[]")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port))


def _proof(secret: bytes, end: bytes, nonces: bytes, fingerprint: bytes, size: int = PROOF_BYTES) -> bytes:
    return hashlib.blake2b(end + nonces + fingerprint, key=secret[:64], digest_size=size).digest()


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
        family, place = address
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(HANDSHAKE_S)
            sock.connect(place)
            hello = _exactly(sock, len(MAGIC) + NONCE_BYTES)
            if hello[: len(MAGIC)] != MAGIC:
                raise LinkError("no engine of this version listens there")
            nonces = hello[len(MAGIC) :] + os.urandom(NONCE_BYTES)
            sock.sendall(MAGIC + nonces[NONCE_BYTES:] + fingerprint + _proof(secret, b"asks", nonces, fingerprint))
            said = _exactly(sock, 1)[0]
            if said != WELCOME:
                raise LinkError(f"refused: {REFUSALS.get(said, 'for no reason that this version knows')}")
            if not hmac.compare_digest(_exactly(sock, PROOF_BYTES), _proof(secret, b"answers", nonces, fingerprint)):
                raise LinkError(REFUSALS[NO_SECRET])
            keys = [_proof(secret, way, nonces, fingerprint) for way in (b"up", b"down")]
            return cls(sock, *keys)
        except OSError as error:
            sock.close()
            raise LinkError(error.strerror or str(error)) from None
        except LinkError:
            sock.close()
            raise

    @classmethod
    def accept(cls, sock: socket.socket, fingerprint: bytes, secret: bytes) -> "Link":
        """The same from the listening end; `sock` is closed where it fails."""
        try:
            sock.settimeout(HANDSHAKE_S)
            nonce = os.urandom(NONCE_BYTES)
            sock.sendall(MAGIC + nonce)
            said = _exactly(sock, len(MAGIC) + NONCE_BYTES + FINGERPRINT_BYTES + PROOF_BYTES)
            at = len(MAGIC) + NONCE_BYTES
            nonces, theirs = nonce + said[len(MAGIC) : at], said[at : at + FINGERPRINT_BYTES]
            known = hmac.compare_digest(said[-PROOF_BYTES:], _proof(secret, b"asks", nonces, theirs))
            code = NO_SECRET if not known else WELCOME if theirs == fingerprint else OTHER_MODEL
            if said[: len(MAGIC)] != MAGIC or code != WELCOME:
                sock.sendall(bytes((code,)))
                raise LinkError(f"refused: {REFUSALS.get(code, 'it speaks otherwise')}")
            sock.sendall(bytes((WELCOME,)) + _proof(secret, b"answers", nonces, fingerprint))
            keys = [_proof(secret, way, nonces, fingerprint) for way in (b"down", b"up")]
            return cls(sock, *keys)
        except OSError as error:
            sock.close()
            raise LinkError(error.strerror or str(error)) from None
        except LinkError:
            sock.close()
            raise

    def send(self, kind: int, job: int, content: bytes = b"") -> None:
        """Write a frame."""
        head = _HEAD.pack(kind, job, len(content))
        try:
            self._sock.sendall(head)
            self._sock.sendall(content)
            self._sock.sendall(self._tag(self._send_key, self._num_sent, head, content))
        except OSError as error:
            raise LinkError(error.strerror or str(error)) from None
        self._num_sent += 1

    def receive(self, patience_s: float, place=None) -> Frame:
        """The next frame, which must begin within patience_s. place(job, nbytes): the memory that takes a PAGE's content,
        or None to drop it."""
        try:
            self._sock.settimeout(patience_s)
            head = _exactly(self._sock, _HEAD.size)
            self._sock.settimeout(SEND_S)
            kind, job, nbytes = _HEAD.unpack(head)
            if not PROMPT <= kind <= ALIVE or nbytes > (MAX_PAGE if kind == PAGE else MAX_CONTENT):
                raise LinkError("a frame that no engine sends")
            memory = place(job, nbytes) if place is not None and kind == PAGE else None
            content = memoryview(bytearray(nbytes)) if memory is None else memory
            _into(self._sock, content)
            tag = _exactly(self._sock, TAG_BYTES)
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


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _into(sock, memoryview(data))
    return bytes(data)


def _into(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise LinkError("it has closed the connection")
        view = view[count:]
