"""Images are decoded in processes with limits; this is the server's side of them.

    image = await decoder.decode(data, rule, tenant="acme")

MAX_DECODES run at once, OWN_DECODES of one tenant, and tenants take turns. Nothing that the processes import comes into this one."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from zse.errors import RequestError
from zse.images import messages
from zse.images.messages import DecodedImage, ImageJob, ImageLimits
from zse.images.sizes import SizeRule
from zse.lazy import socket, subprocess
from zse.structured.turns import Turns

MAX_DECODES, OWN_DECODES = 3, 2
_COMMAND = ("-P", "-S", "-m", "zse.images")
_START_S = 20.0  # for Pillow's import on a busy machine, beside an image's own time
_READ_BYTES = 1 << 20


class UnreadableImage(Exception):
    """What is wrong with an image, behind "the image"."""


class ImageDecoder:
    """Decodes images in turns. The process that forks the others is started with the first one, and again where it has died."""

    def __init__(self, limits: ImageLimits = ImageLimits()):
        self.limits = limits
        self._numbers = itertools.count()
        self._turns = Turns(MAX_DECODES, OWN_DECODES)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._threads = ThreadPoolExecutor(MAX_DECODES, "image")
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    async def decode(self, data: bytes, rule: SizeRule, *, tenant: str = "", reads: bool = True) -> DecodedImage:
        """The image at its model's size, when the tenant's turn has come. reads: False gives the size alone. Raises UnreadableImage
        for what cannot be decoded, RequestError (503) when too many of the tenant's wait."""
        number = next(self._numbers)
        if not self._turns.add(tenant, number):
            raise RequestError(
                "too many images of yours wait to be decoded: try again later",
                status=503,
                type="server_error",
                code="overloaded",
            )
        loop = asyncio.get_running_loop()
        begun = self._waiting[number] = loop.create_future()
        self._begin_next()
        try:
            await begun
        except asyncio.CancelledError:
            self._end(tenant, number)
            raise
        work = loop.run_in_executor(self._threads, self.decode_now, data, rule, reads)
        work.add_done_callback(lambda done: self._end(tenant, number))  # its turn lasts as long as its process
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at, where nobody waits
            raise

    def decode_now(self, data: bytes, rule: SizeRule, reads: bool = True) -> DecodedImage:
        """decode() in the calling thread, without a turn."""
        job = msgspec.msgpack.encode(ImageJob(len(data), rule, self.limits, reads))
        head = messages.LENGTH.pack(len(job)) + job
        received = self._sent(head, data) or self._sent(head, data)  # nothing: the process that forks has died meanwhile
        return self._result(received, reads)

    def _sent(self, head: bytes, data: bytes) -> bytes:
        """What comes back of a job."""
        deadline = time.monotonic() + self.limits.wall_s + _START_S
        with self._forked() as mine:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
                mine.settimeout(self.limits.wall_s + _START_S)
                mine.sendall(head)
                mine.sendall(data)
            return self._received(mine, deadline)

    def close(self) -> None:
        """End the processes. Nothing is decoded afterwards."""
        with self._lock:
            self._drop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- turns

    def _begin_next(self) -> None:
        while (number := self._turns.next()) is not None:
            begun = self._waiting[number]
            if not begun.done():
                begun.set_result(None)

    def _end(self, tenant: str, number: int) -> None:
        self._waiting.pop(number, None)
        if not self._turns.remove(tenant, number):
            self._turns.done(tenant)
        self._begin_next()

    # -- processes

    def _forked(self) -> "socket.socket":
        """This end of a socket whose other one a new process has."""
        mine, other = socket.socketpair()
        with other, self._lock:
            for _ in range(2):
                try:
                    socket.send_fds(self._started(), [b"j"], [other.fileno()])
                    return mine
                except OSError:
                    self._drop()  # it has died: another one takes its place
        mine.close()
        raise UnreadableImage("cannot be decoded: the process for it does not start")

    def _started(self) -> "socket.socket":
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._drop()
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        paths = dict.fromkeys([root, *(folder for folder in sys.path if folder)])
        self._control, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, *_COMMAND],
                stdin=other,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(paths), "PATH": os.defpath},
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

    def _received(self, mine: "socket.socket", deadline: float) -> bytes:
        """All that comes back, until the process has ended."""
        parts = []
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return b"".join(parts)
            mine.settimeout(left)
            try:
                data = mine.recv(_READ_BYTES)
            except (TimeoutError, ConnectionResetError):
                data = b""
            if not data:
                return b"".join(parts)
            parts.append(data)

    def _result(self, data: bytes, reads: bool) -> DecodedImage:
        head = messages.LENGTH.size
        if len(data) > head + messages.STATUS.size:
            size = head + messages.LENGTH.unpack_from(data)[0]
            with contextlib.suppress(msgspec.MsgspecError):
                answer = _ANSWER.decode(data[head:size])
                if isinstance(answer, messages.Refused):
                    raise UnreadableImage(answer.reason)
                num_bytes = 3 * answer.height * answer.width if reads else 0
                if len(data) >= size + num_bytes and num_bytes <= len(data):
                    return DecodedImage(answer.height, answer.width, data[size : size + num_bytes])
        raise UnreadableImage(self._why_it_ended(data))

    def _why_it_ended(self, data: bytes) -> str:
        if self._process is not None and self._process.poll() == messages.NO_PILLOW:
            return "cannot be decoded: this server reads no images, its operator has to run `pip install 'zse[images]'`"
        status = messages.STATUS.unpack(data[-messages.STATUS.size :])[0] if len(data) >= messages.STATUS.size else 0
        if status in (signal.SIGXCPU, signal.SIGALRM) or not data:
            return f"takes too long to decode (more than {self.limits.cpu_s} s)"
        return f"is damaged, or needs more than {self.limits.memory_bytes >> 20} MiB: it cannot be decoded"


_ANSWER = msgspec.msgpack.Decoder(messages.Decoded | messages.Refused)
