"""Host memory for pages and states that leave the device, had before they do.

A GPU copies from and to page-locked memory, and a thread locks 3 GB/s: the gigabyte of a long session would be waited for by the
step that moves it out, or by the request for which it is read from files."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

from zse.cache.layout import HostSlots
from zse.errors import DeviceError
from zse.runtime import probe
from zse.scheduler.feature import Feature

# Of the machine's memory, or the control group's, what stays available: beyond it slots get theirs when they are used.
LEAST_AVAILABLE = 1 / 8

log = logging.getLogger("zse.engine")


class HostMemory(Feature):
    """engine: one with host slots. Where its device locks memory, a thread takes that of all slots, as many as the
    configuration has; where it cannot be locked, or the machine runs out of it, the rest is taken as it is used."""

    is_live = False  # no step has to do with it

    def __init__(self, engine: Any):
        self._slots: list[HostSlots] = engine.runner.pages.host
        self._closing = False
        self._thread: threading.Thread | None = None
        if engine.runner.device.locks_memory:
            self._thread = threading.Thread(target=self._take, name="host memory", daemon=True)
            self._thread.start()

    def _take(self) -> None:
        for slots, number in self._chunks():
            if self._closing or not self._is_there(slots.per_chunk * slots.nbytes):
                return
            try:
                is_locked = slots.take(number).is_locked
            except DeviceError as error:  # a closed device, too
                log.warning("host memory for cached pages is taken when it is used: %s", error)
                return
            if not is_locked:
                log.warning(
                    "host memory for cached pages cannot be page-locked, copies will be slower: see `ulimit -l`"
                )
                return

    def _chunks(self) -> Iterator[tuple[HostSlots, int]]:
        """All of them, those that are used first in front: of pages and of states in proportion."""
        starts = [
            (slot / slots.count, kind, slot // slots.per_chunk)
            for kind, slots in enumerate(self._slots)
            for slot in range(0, slots.count, slots.per_chunk)
        ]
        return ((self._slots[kind], number) for _, kind, number in sorted(starts))

    @staticmethod
    def _is_there(nbytes: int) -> bool:
        facts = probe.memory_bytes()
        whole = facts["limit"] or facts["total"] or 0
        return facts["available"] is None or facts["available"] - nbytes > LEAST_AVAILABLE * whole

    def counters(self) -> dict[str, float]:
        return {"host_cache_bytes": sum(slots.taken_nbytes for slots in self._slots)}

    def close(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._thread.join()
