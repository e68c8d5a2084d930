"""Images are decoded in processes with limits; this is the server's side of them.

    image = await decoder.decode(data, vision, tenant="acme")

MAX_DECODES run at once, OWN_DECODES of one tenant, and tenants take turns. The last results are kept, by tenant: each turn of a chat
brings its images again. Nothing that the processes import comes into this one."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from typing import Any

import msgspec

from zse import env
from zse.images import messages
from zse.images.messages import DecodedImage, ImageJob, ImageLimits
from zse.lazy import socket, subprocess
from zse.structured.threads import ThreadTurns, busy

MAX_DECODES, OWN_DECODES = 3, 2
KEPT_BYTES = 64 << 20  # of pixels: some 30 images
_COMMAND = ("-P", "-S", "-m", "zse.images")
_START_S = 20.0  # for Pillow's import on a busy machine, beside an image's own time
_READ_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 4096


class UnreadableImage(Exception):
    """What is wrong with an image, behind "the image"."""


class ImageDecoder:
    """Decodes images in turns. The process that forks the others is started with the first one, and again where it has died."""

    def __init__(self, limits: ImageLimits):
        self.limits = limits
        self._turns = ThreadTurns(MAX_DECODES, OWN_DECODES, "image", "images of yours wait to be decoded")
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._kept: OrderedDict[tuple, DecodedImage] = OrderedDict()
        self._kept_bytes = 0

    async def decode(
        self, data: bytes, vision: Any, *, tenant: str = "", digest: bytes = b"", reads: bool = True
    ) -> DecodedImage:
        """The image at its model's size, when the tenant's turn has come. vision: the model's VisionConfig. digest: of `data`, where the result may be
        one that is kept. reads: False gives the size alone. Raises UnreadableImage for what cannot be decoded, RequestError (503) when too
        many of the tenant's wait, or the machine has no room."""
        key = tenant, digest, vision
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return kept if reads else kept._replace(pixels=b"")
        image = await self._turns.run(tenant, lambda: self.decode_now(data, vision, reads))
        if digest and reads and key not in self._kept:
            self._kept[key] = image
            self._kept_bytes += len(image.pixels)
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1].pixels)
        return image

    def decode_now(self, data: bytes, vision: Any, reads: bool = True) -> DecodedImage:
        """decode() in the calling thread, without a turn."""
        for is_last in (False, True):
            with _Job(self._forked(), self.limits) as job:
                try:
                    return job.run(data, vision, reads)
                except EOFError:
                    # Without a word: the process that forks the others has died, and another one takes its place.
                    if is_last or job.rest or job.is_late or self._lacks_pillow():
                        raise UnreadableImage(self._why_it_ended(job.rest)) from None
        raise AssertionError

    def close(self) -> None:
        """End the processes. Nothing is decoded afterwards."""
        with self._lock:
            self._is_closed = True
            self._drop()
        self._turns.close()

    # -- processes

    def _forked(self) -> "socket.socket":
        """This end of a socket whose other one a new process has."""
        why = "images are decoded no more"
        with contextlib.suppress(OSError):
            mine, other = socket.socketpair()
            with other, self._lock:
                for _ in range(0 if self._is_closed else 2):
                    try:
                        socket.send_fds(self._started(), [b"j"], [other.fileno()])
                        return mine
                    except OSError as error:
                        why = f"the process that decodes images does not start ({error.strerror})"
                        self._drop()  # it has died: another one takes its place
            mine.close()
        raise busy(why)

    def _started(self) -> "socket.socket":
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._drop()
        self._control, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, *_COMMAND],
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": env.python_path(), "PATH": os.defpath},
            )
        return self._control

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def _lacks_pillow(self) -> bool:
        with self._lock, contextlib.suppress(subprocess.TimeoutExpired):
            return self._process is not None and self._process.wait(0.5) == messages.NO_PILLOW
        return False

    def _why_it_ended(self, rest: bytes | bytearray) -> str:
        if not rest and self._lacks_pillow():
            return "cannot be decoded: this server reads no images, its operator has to run `pip install 'zse[images]'`"
        status = messages.STATUS.unpack(rest[-messages.STATUS.size :])[0] if len(rest) >= messages.STATUS.size else 0
        if status in (signal.SIGXCPU, signal.SIGALRM) or not rest:
            return f"takes too long to decode (more than {self.limits.cpu_s} s)"
        return f"is damaged, or needs more than {self.limits.memory_bytes >> 20} MiB: it cannot be decoded"


class _Job:
    """One image's process, by its socket. rest: what it sent that was not read."""

    def __init__(self, mine: "socket.socket", limits: ImageLimits):
        self._socket, self._limits = mine, limits
        self._deadline = time.monotonic() + limits.wall_s + _START_S
        self.rest = bytearray()

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def __enter__(self) -> "_Job":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._socket.close()

    def run(self, data: bytes, vision: Any, reads: bool) -> DecodedImage:
        """Raises UnreadableImage; RequestError where the model takes no image of this shape; EOFError: it ended without an answer."""
        self._send(messages.encode(ImageJob(len(data), self._limits)), data)
        size = self._read(messages.ImageSize)
        if size.height * size.width > self._limits.max_pixels:
            raise EOFError  # no word of a sound process
        height, width = vision.target(size.height, size.width)
        if not reads:
            return DecodedImage(height, width, b"")
        overview = vision.overview(height, width)
        self._send(messages.encode(messages.ResizeTo(height, width, vision.resample, overview, vision.fill)))
        count = 3 * vision.num_pixels(height, width)
        if self._read(messages.Decoded).num_bytes != count:
            raise EOFError
        pixels = self._take(count)
        self._to_the_end()
        return DecodedImage(height, width, pixels)

    def _send(self, *parts: bytes) -> None:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError, TimeoutError
        ):  # what it said before is there to read
            for part in parts:
                self._socket.settimeout(max(0.01, self._deadline - time.monotonic()))
                self._socket.sendall(part)

    def _read(self, kind: type) -> Any:
        size = messages.LENGTH.unpack(self._take(messages.LENGTH.size))[0]
        if size > _MAX_ANSWER_BYTES:
            raise EOFError
        try:
            answer = _ANSWER.decode(self._take(size))
        except msgspec.MsgspecError:
            raise EOFError from None
        if isinstance(answer, messages.Refused):
            self._to_the_end()
            raise UnreadableImage(answer.reason)
        if not isinstance(answer, kind):
            raise EOFError
        return answer

    def _take(self, count: int) -> bytes:
        while len(self.rest) < count:
            if not self._more():
                raise EOFError
        taken = bytes(memoryview(self.rest)[:count])
        del self.rest[:count]
        return taken

    def _to_the_end(self) -> None:
        """Wait until the process has ended: the turn of its image lasts as long."""
        while self._more():
            del self.rest[: -messages.STATUS.size]

    def _more(self) -> bool:
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        self._socket.settimeout(left)
        try:
            data = self._socket.recv(_READ_BYTES)
        except (TimeoutError, ConnectionResetError):
            return False
        self.rest += data
        return bool(data)


_ANSWER = msgspec.msgpack.Decoder(messages.Answer)
