"""Frames on the socket between server and engine: msgpack behind a 4-byte little-endian length, both directions.

Shared by both ends: `encode` and `FrameReader` are pure, `FrameSocket` is the engine's blocking end.
"""

import select
import socket

import msgspec

from zse.engine.messages import FromEngine, ToEngine
from zse.errors import EngineError

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20  # a prompt of 1 M token ids is 5 MB; anything near this is a broken peer
_READ_BYTES = 1 << 18

_encoder = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    """One message as one frame. Raises EngineError when it is larger than MAX_FRAME_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise EngineError(f"a {type(message).__name__} message of {len(payload)} bytes is over the frame limit")
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class ServerGone(EngineError):
    """The server has closed its end: the engine has nobody left to work for and ends."""


class FrameReader:
    """Turns a byte stream, however it is cut, into messages. `kind`: the union of messages this end may receive."""

    def __init__(self, kind: object):
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list:
        """Add received bytes; returns the messages completed by them.

        Raises EngineError for an oversized frame or one that is no message: the stream cannot be trusted after that.
        """
        buffer = self._buffer
        buffer += data
        messages, start = [], 0
        while len(buffer) - start >= HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise EngineError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + HEADER_BYTES + size
            if len(buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(buffer[start + HEADER_BYTES : end])))
            except msgspec.MsgspecError as error:
                raise EngineError(f"a frame that is no message: {error}") from error
            start = end
        del buffer[:start]
        return messages


class FrameSocket:
    """The engine's end: blocking sends, receives with a timeout. One thread receives; sends are atomic per call
    only if the caller serialises them."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(True)
        self._sock = sock
        self._reader = FrameReader(ToEngine)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @classmethod
    def from_fd(cls, fd: int) -> "FrameSocket":
        """Adopt an inherited descriptor (`--fd N` of the worker)."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, *messages: FromEngine) -> None:
        """Write the messages in one call. Raises ServerGone when the server has closed its end."""
        try:
            self._sock.sendall(b"".join([encode(message) for message in messages]))
        except OSError as error:
            raise ServerGone(f"the server process is gone: {error.strerror}") from error

    def receive(self, timeout: float | None = 0.0) -> list[ToEngine] | None:
        """The messages that are there, waiting up to `timeout` seconds (None: for ever, 0: not at all) for the first
        byte. Returns [] when nothing came and None when the server closed its end: then the engine must exit."""
        messages: list[ToEngine] = []
        wait_ms = None if timeout is None else max(0, int(timeout * 1000 + 0.999))
        while self._poll.poll(wait_ms):
            try:
                data = self._sock.recv(_READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                return None
            messages += self._reader.feed(data)
            wait_ms = 0
        return messages

    def close(self) -> None:
        self._sock.close()
