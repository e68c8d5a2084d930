"""Parked engines: processes that have their device open and their kernels loaded, but no model."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from zse.engine.messages import Expect, Fatal, FrameReader, FromEngine, encode
from zse.engine.process import EngineProcess
from zse.errors import EngineError

log = logging.getLogger("zse.server")

SPARE_BUDGET, SPARE_WINDOW_S = 5, 600.0  # parked engines that may die within the window before they are given up


class ParkedEngines:
    """Those of a pool. wanted: how many. park: starts one; None: nothing does. expect_bytes: of files that one may make ready for its
    GPU; None: its own bound. num_loads: those that were taken for a model."""

    def __init__(self, wanted: int, park: Callable[[], EngineProcess] | None, expect_bytes: int | None = None):
        self.wanted, self.num_loads = wanted, 0
        self._park, self._expect_bytes = park, expect_bytes
        self._processes: list[EngineProcess] = []
        self._deaths: list[float] = []

    @property
    def ready(self) -> int:
        """How many are up."""
        return sum(spare.is_parked for spare in self._processes)

    def take(self, arguments: list[str]) -> EngineProcess | None:
        """One for these arguments, preferably one that is up."""
        for spare in sorted(self._processes, key=lambda spare: not spare.is_parked):
            self._processes.remove(spare)
            if spare.poll() is None:
                spare.load = arguments
                self.num_loads += 1
                return spare
            self._count_death(spare)
        return None

    def replace(self, is_quiet: bool) -> None:
        """Those that died; and, where no load goes on that should have the machine for itself, start what is missing."""
        for spare in [spare for spare in self._processes if spare.poll() is not None]:
            self._processes.remove(spare)
            self._count_death(spare)
        while self._park is not None and is_quiet and len(self._processes) < self.wanted:
            self._processes.append(self._park())

    def tell(self, models: list[str]) -> None:
        """Which models they may become, rather the first ones: what an engine reads of each."""
        for spare in self._processes if self._expect_bytes != 0 else ():
            if spare.expects != models and spare.is_parked:
                spare.expects = models
                with suppress(OSError):  # of one that died, which replace() finds
                    spare.sock.sendall(encode(Expect(models, self._expect_bytes)))

    def kill(self) -> None:
        for spare in self._processes:
            spare.kill()

    def close(self) -> None:
        self.kill()
        for spare in self._processes:
            spare.sock.close()

    def _count_death(self, spare: EngineProcess) -> None:
        now = time.monotonic()
        reason = _fatal_message(spare)
        spare.sock.close()
        self._deaths = [at for at in self._deaths if now - at < SPARE_WINDOW_S] + [now]
        log.error("a parked engine ended with exit code %s%s", spare.poll(), reason)
        if len(self._deaths) >= SPARE_BUDGET and self.wanted:
            self.wanted = 0
            log.error("no engine is parked any more: %d of them ended within %.0f s", SPARE_BUDGET, SPARE_WINDOW_S)


def _fatal_message(process: EngineProcess) -> str:
    """: MESSAGE" of the Fatal that a process sent before it ended; "" where it sent none."""
    try:
        process.sock.setblocking(False)
        messages = FrameReader(FromEngine).feed(process.sock.recv(1 << 16))
    except (OSError, EngineError):
        return ""
    return "".join(f": {message.message}" for message in messages if isinstance(message, Fatal))
