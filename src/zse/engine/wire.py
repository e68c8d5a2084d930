"""Connections between processes that have a secret in common: the handshake, in which neither end tells it, and records that nobody
else can have written. What is sent is signed, not encrypted."""

import hmac
import os
import socket
import stat
import struct
from typing import Any

from zse.errors import ConfigError, ZSEError
from zse.lazy import hashlib, logging

NONCE_BYTES, FINGERPRINT_BYTES, PROOF_BYTES, TAG_BYTES = 32, 16, 32, 16
HANDSHAKE_S = 5.0  # for each step of it
SEND_S = 30.0  # a peer that takes nothing for so long is gone
LEAST_SECRET = 16
MAX_RECORD = 1 << 27
# What the listening end answers to the proof of the other.
WELCOME, NO_SECRET, OTHER = range(3)
# A host that is gone without a word is noticed after 5 + 3 * 5 s, also where nothing is to be sent (Linux, most others).
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}

_SIZE, _NUMBER = struct.Struct("<I"), struct.Struct("<Q")


class LinkError(ZSEError):
    """The other process cannot be spoken to (any more)."""


class LinkRefused(LinkError):
    """It does not want to; asking again does not help."""


def read_secret(path: str, option: str = "--kv-secret") -> bytes:
    """What the option names: a private file of at least LEAST_SECRET bytes. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            secret = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from None
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise ConfigError(f"{option} {path} may be read by others: run `chmod 600` on it")
    if len(secret) < LEAST_SECRET:
        raise ConfigError(f"{option} {path} has fewer than {LEAST_SECRET} bytes: write random ones into it")
    return secret


def address_of(text: str, option: str) -> "tuple[int, Any]":
    """(family, what connect() and bind() take) of "unix:/path" or "host:port". Raises ConfigError."""
    if text.startswith("unix:") and len(text) > 5:
        return socket.AF_UNIX, text[5:]
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} {text!r} is neither HOST:PORT nor unix:/PATH")
    host = host.strip("[]")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port))


def _proof(secret: bytes, end: bytes, nonces: bytes, fingerprint: bytes) -> bytes:
    return hashlib.blake2b(end + nonces + fingerprint, key=secret[:64], digest_size=PROOF_BYTES).digest()


def ask(
    address: "tuple[int, Any]", magic: bytes, fingerprint: bytes, secret: bytes, refusals: dict[int, str]
) -> tuple[socket.socket, bytes, bytes]:
    """Reach who listens at address_of(): the socket, and the keys of what is sent and of what comes. Both ends prove that they have
    the secret, by keyed hashes of random numbers of both. Raises LinkError."""
    family, place = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(HANDSHAKE_S)
        sock.connect(place)
        hello = exactly(sock, len(magic) + NONCE_BYTES)
        if hello[: len(magic)] != magic:
            raise LinkRefused("no engine of this version listens there")
        nonces = hello[len(magic) :] + os.urandom(NONCE_BYTES)
        sock.sendall(magic + nonces[NONCE_BYTES:] + fingerprint + _proof(secret, b"asks", nonces, fingerprint))
        said = exactly(sock, 1)[0]
        if said != WELCOME:
            raise LinkRefused(f"refused: {refusals.get(said, 'for no reason that this version knows')}")
        if not hmac.compare_digest(exactly(sock, PROOF_BYTES), _proof(secret, b"answers", nonces, fingerprint)):
            raise LinkRefused(refusals[NO_SECRET])
        up, down = (_proof(secret, way, nonces, fingerprint) for way in (b"up", b"down"))
        return sock, up, down
    except OSError as error:
        sock.close()
        raise LinkError(error.strerror or str(error)) from None
    except LinkError:
        sock.close()
        raise


def answer(
    sock: socket.socket, magic: bytes, fingerprint: bytes, secret: bytes, refusals: dict[int, str]
) -> tuple[bytes, bytes]:
    """The same from the listening end: the keys; `sock` is closed where it fails."""
    try:
        sock.settimeout(HANDSHAKE_S)
        nonce = os.urandom(NONCE_BYTES)
        sock.sendall(magic + nonce)
        said = exactly(sock, len(magic) + NONCE_BYTES + FINGERPRINT_BYTES + PROOF_BYTES)
        at = len(magic) + NONCE_BYTES
        nonces, theirs = nonce + said[len(magic) : at], said[at : at + FINGERPRINT_BYTES]
        known = hmac.compare_digest(said[-PROOF_BYTES:], _proof(secret, b"asks", nonces, theirs))
        code = NO_SECRET if not known else WELCOME if theirs == fingerprint else OTHER
        if said[: len(magic)] != magic or code != WELCOME:
            sock.sendall(bytes((code,)))
            raise LinkRefused(f"refused: {refusals.get(code, 'it speaks otherwise')}")
        sock.sendall(bytes((WELCOME,)) + _proof(secret, b"answers", nonces, fingerprint))
        down, up = (_proof(secret, way, nonces, fingerprint) for way in (b"down", b"up"))
        return down, up
    except OSError as error:
        sock.close()
        raise LinkError(error.strerror or str(error)) from None
    except LinkError:
        sock.close()
        raise


class SignedSocket:
    """A socket after its handshake, used like one: what a sendall() is given, a recv() of the other end gives, whole, or b"" when the
    connection is over. poll() tells what there is to receive, for nothing is read ahead."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes):
        self.sock, self._send_key, self._receive_key = sock, send_key, receive_key
        self._num_sent = self._num_received = 0
        sock.settimeout(SEND_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def sendall(self, data: bytes) -> None:
        """Raises OSError."""
        head = _SIZE.pack(len(data))
        self.sock.sendall(b"".join((head, data, self._tag(self._send_key, self._num_sent, head, data))))
        self._num_sent += 1

    def recv(self, most: int = 0) -> bytes:
        """most: of no meaning here. A record that was changed ends the connection, and the log says it."""
        try:
            head = exactly(self.sock, _SIZE.size)
            (nbytes,) = _SIZE.unpack(head)
            if nbytes > MAX_RECORD:
                raise LinkRefused("a record that nobody sends")
            data = exactly(self.sock, nbytes + TAG_BYTES)
        except LinkRefused as error:
            logging.getLogger("zse.engine").warning("a connection has ended: %s", error)
            return b""
        except (OSError, LinkError):
            return b""
        data, tag = data[:nbytes], data[nbytes:]
        if not hmac.compare_digest(tag, self._tag(self._receive_key, self._num_received, head, data)):
            logging.getLogger("zse.engine").warning("a connection has ended: a record was changed on its way")
            return b""
        self._num_received += 1
        return data

    def fileno(self) -> int:
        return self.sock.fileno()

    def setblocking(self, blocks: bool) -> None:
        """It always has the limit of SEND_S for a record that has begun."""

    def settimeout(self, seconds: float) -> None:
        self.sock.settimeout(seconds)

    def close(self) -> None:
        self.sock.close()

    def keys_for(self, name: bytes) -> bytes:
        """32 bytes of keys for another use of the connection: 16 of what is sent, 16 of what comes."""
        ways = (self._send_key, self._receive_key)
        return b"".join(hashlib.blake2b(name, key=key, digest_size=16).digest() for key in ways)

    @staticmethod
    def _tag(key: bytes, number: int, head: bytes, data: bytes) -> bytes:
        total = hashlib.blake2b(_NUMBER.pack(number) + head, key=key, digest_size=TAG_BYTES)
        total.update(data)
        return total.digest()


def exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes. Raises OSError; LinkError where there are no more."""
    data = bytearray(count)
    read_into(sock, memoryview(data))
    return bytes(data)


def read_into(sock: socket.socket, view: memoryview) -> None:
    """The same to a memory."""
    while view:
        count = sock.recv_into(view)
        if not count:
            raise LinkError("it has closed the connection")
        view = view[count:]
