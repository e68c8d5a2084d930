"""Weights of models that are not loaded, kept in memory (`--keep-in-memory`): pages of their files, locked, so that the next
load is its transfer whatever else wants the page cache.

The files are mapped for that and never read through the mapping: one that shrinks meanwhile harms nobody."""

import logging
import os
import resource
import threading
from collections import OrderedDict
from typing import NamedTuple

from zse.errors import ConfigError
from zse.formats import store
from zse.runtime import mappings, probe

log = logging.getLogger("zse.server")

LEFT_BYTES = 512 << 20  # of what is available, for everything else


class _Held(NamedTuple):
    """identity: of the files as they were. places: address and bytes of each mapping."""

    identity: list[tuple]
    places: list[tuple[int, int]]
    num_bytes: int


class ResidentFiles:
    """At most max_bytes, of the models that were unloaded last. Its methods are called in threads. Raises ConfigError where
    this process may not lock so much."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._turn = max_bytes, threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()  # by the model's name, the last unloaded last
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        most = hard if hard == resource.RLIM_INFINITY else max(hard, max_bytes)
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
        except (ValueError, OSError):
            raise ConfigError(
                f"--keep-in-memory: this user may lock {hard >> 10} KiB of memory (ulimit -l), not {max_bytes >> 10}; raise it "
                "(LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 of a container), or ask for less"
            ) from None

    @property
    def num_bytes(self) -> int:
        """Locked now."""
        return sum(held.num_bytes for held in list(self._held.values()))

    def bytes_of(self, name: str) -> int:
        """Of one model; 0: it is not held."""
        held = self._held.get(name)
        return 0 if held is None else held.num_bytes

    def hold(self, name: str, path: str) -> None:
        """The files of the model at `path` stay in memory from now on; reads what is not there. What cannot be held is a
        line of the log."""
        with self._turn:
            try:
                files = store.model_files(path)
                facts = [os.stat(file) for file in files]
                identity = [(fact.st_dev, fact.st_ino, fact.st_size, fact.st_mtime_ns) for fact in facts]
                if name in self._held and self._held[name].identity == identity:
                    self._held.move_to_end(name)
                    return
                self._release(name)
                size = sum(fact.st_size for fact in facts)
                self._make_room(size)
                self._held[name] = _Held(identity, self._lock(files), size)
                log.info("%s stays in memory: %d MiB", name, size >> 20)
            except OSError as error:
                log.warning("%s does not stay in memory: %s", name, error.strerror or error)

    def release(self, name: str) -> None:
        """The model is served no more."""
        with self._turn:
            self._release(name)

    def _make_room(self, size: int) -> None:
        if size > self._max_bytes:
            raise OSError(f"it has {size >> 20} MiB, more than --keep-in-memory")
        while self._held and self.num_bytes + size > self._max_bytes:
            self._release(next(iter(self._held)))
        available = probe.memory_bytes()["available"]
        if available is not None and size + LEFT_BYTES > available:
            raise OSError(f"{available >> 20} MiB are available")

    def _release(self, name: str) -> None:
        held = self._held.pop(name, None)
        for place in [] if held is None else held.places:
            mappings.unmap(*place)

    def _lock(self, files: list[str]) -> list[tuple[int, int]]:
        """Addresses and bytes of their mappings. Raises OSError and leaves none then."""
        places: list[tuple[int, int]] = []
        try:
            for file in files:
                with open(file, "rb") as opened:
                    size = os.fstat(opened.fileno()).st_size
                    if size:
                        places.append((mappings.map_file(opened.fileno(), size), size))
                if size and mappings.library().mlock(*places[-1]):
                    raise mappings.failed()
        except OSError:
            for place in places:
                mappings.unmap(*place)
            raise
        return places
