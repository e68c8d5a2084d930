"""The process that decodes images: `python -P -S -m zse.images`, started by images/worker.py with a socket as descriptor 0.

For each socket that arrives there it forks a process, which decodes one image behind limits of memory and time, opens no file, socket
or process, and ends: what one image did to it no other one meets. A fork takes 1 to 2 ms where a new process takes 50. It reads no
stranger's bytes itself. What Pillow needs is imported and tried before the first fork."""

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from typing import Any

from zse.lazy import import_lean, select

import_lean("msgspec")

import msgspec  # noqa: E402

from zse.images import decode, messages  # noqa: E402
from zse.structured import limits  # noqa: E402

_PARENT_DEATH_SIGNAL = 1  # prctl(2)
_NICENESS = 5  # as of readers of documents
_TICK_MS = 250
_SLACK_S = 1.0  # beyond its time, after which a process is killed from outside


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _receive(job: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = job.recv_into(view)
        if not count:
            os._exit(0)  # the server waits no more
        view = view[count:]
    return bytes(data)


def _read(job: socket.socket, kind: type) -> Any:
    (size,) = messages.LENGTH.unpack(_receive(job, messages.LENGTH.size))
    return msgspec.msgpack.decode(_receive(job, size), type=kind)


def _answer(job: socket.socket, answer: messages.Answer, pixels: bytes = b"") -> None:
    job.sendall(messages.encode(answer))
    job.sendall(pixels)


def _work(job: socket.socket) -> None:
    """One image, in a process of its own."""
    asked = _read(job, messages.ImageJob)
    bounds = asked.limits
    signal.setitimer(signal.ITIMER_REAL, bounds.wall_s)  # its signal ends the process
    limits.limit_memory(bounds.memory_bytes)
    limits.limit_processor(bounds.cpu_s)
    limits.close_in()
    try:
        image = decode.EncodedImage(_receive(job, asked.num_bytes), bounds.max_pixels)
        _answer(job, messages.ImageSize(image.height, image.width))
        target = _read(job, messages.ResizeTo)
        pixels = image.resized(target)
    except decode.ImageError as error:
        _answer(job, messages.Refused(str(error)))
    except MemoryError:
        _answer(job, messages.Refused(f"takes more than {bounds.memory_bytes >> 20} MiB to decode"))
    else:
        _answer(job, messages.Decoded(len(pixels)), pixels)


class _Forks:
    """Those that run: process id → (when it is killed, the socket of its job)."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[float, socket.socket]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, job: socket.socket, control: socket.socket) -> None:
        pid = os.fork()
        if pid:
            self._running[pid] = time.monotonic() + messages.WALL_S + _SLACK_S, job
            return
        status = 1
        try:
            _die_with_parent()
            os.nice(_NICENESS)
            control.close()
            for _, other in self._running.values():
                other.close()
            _work(job)
            status = 0
        finally:
            os._exit(status)

    def collect(self) -> None:
        """Tell the server how those ended that have, and kill those whose time is over."""
        now = time.monotonic()
        for pid, (end, job) in list(self._running.items()):
            if now > end:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            del self._running[pid]
            with job, contextlib.suppress(OSError):  # perhaps nobody waits
                job.send(messages.STATUS.pack(status), socket.MSG_DONTWAIT)


def main() -> None:
    _die_with_parent()
    control = socket.socket(fileno=0)
    try:
        decode.load()
    except ImportError:
        sys.exit(messages.NO_PILLOW)
    gc.freeze()  # collections would write to pages that forks share
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    forks = _Forks()
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(_TICK_MS if len(forks) else None)}
        if woken in ready:
            os.read(woken, 4096)
        forks.collect()
        if control.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return  # the server has ended
            for descriptor in descriptors:
                forks.start(socket.socket(fileno=descriptor), control)


if __name__ == "__main__":
    main()
