"""What is written to files of pages, by a thread, while the engine's steps go on."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger("zse.engine")


class Write(NamedTuple):
    """What the thread is to do. nbytes: that wait with it, none of what removes; pages: that it writes. session: what it is of alone.
    told(whether the disk took it): called by the thread when it is over."""

    run: Callable[[], None]
    nbytes: int = 0
    pages: int = 0
    session: str = ""
    told: Callable[[bool], None] | None = None


class DiskWriter:
    """Its thread runs Writes, first come first. has_failed: after an error of the disk nothing is written any more; what removes may
    still go. pending: what waits, pending_bytes of it; num_written: pages since the start."""

    def __init__(self) -> None:
        self.pending: deque[Write] = deque()
        self.pending_bytes = self.num_written = 0
        self.has_failed = False
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self.run, name="kv files", daemon=True)
        self._thread.start()

    def ask(self, write: Write) -> None:
        """Have it run."""
        with self._wake:
            self.pending.append(write)
            self.pending_bytes += write.nbytes
            self._wake.notify()

    def drop(self, session: str) -> None:
        """Forget what waits to be written for a session."""
        with self._wake:
            self.pending_bytes -= sum(write.nbytes for write in self.pending if write.session == session)
            self.pending = deque(write for write in self.pending if write.session != session)

    def wait(self, seconds: float) -> None:
        """Until one is over, or so long."""
        with self._wake:
            self._wake.wait(seconds)

    def run(self) -> None:
        """What the thread does until close()."""
        while True:
            with self._wake:
                while not self.pending and not self._closing:
                    self._wake.wait()
                if not self.pending:
                    return
                write = self.pending.popleft()
            is_taken = not self.has_failed or not write.nbytes
            try:
                if is_taken:
                    write.run()
                    self.num_written += write.pages
            except OSError as error:
                self.has_failed, is_taken = True, False
                log.warning("the prefix cache no longer writes to disk: %s", error)
            if write.told is not None:
                write.told(is_taken)
            with self._wake:
                self.pending_bytes -= write.nbytes
                self._wake.notify()

    def close(self, deadline: float) -> None:
        """Write what waits, until time.monotonic() is `deadline`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(max(0.1, deadline - time.monotonic()))
