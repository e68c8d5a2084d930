"""One model of a server: what it is, its engine, what its requests and loads took."""

import asyncio
import functools
import hashlib
import os
import time

import msgspec

from zse import __version__
from zse.engine.client import DOWN, READY, STARTING, UNLOADED, EngineClient
from zse.engine.process import EngineProcess
from zse.errors import RequestError
from zse.formats import adapter_store, store
from zse.server import adapters
from zse.server.work import Statistics


class ModelSpec(msgspec.Struct, frozen=True):
    """A model that is served. names: what requests may call it, the first is listed. path: file or folder.
    arguments: of its engine's command line. adapters: (name, path) of those that it is started with."""

    names: tuple[str, ...]
    path: str
    arguments: tuple[str, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()


class ReadBytes:
    """How far a load is, by the bytes that its engine's process has read since (Linux tells; files are read, never
    mapped)."""

    def __init__(self, process: EngineProcess, path: str):
        self._place, self._total = f"/proc/{process.pid}/io", _model_bytes(path)
        self._before = self._count()

    def _count(self) -> int | None:
        try:
            with open(self._place, "rb") as file:
                return int(file.readline().partition(b":")[2])
        except (OSError, ValueError):
            return None

    @property
    def share(self) -> float | None:
        """From 0 to 0.99, since only Ready is all; None where the system does not tell."""
        count = self._count()
        if count is None or self._before is None or not self._total:
            return None
        return round(min(0.99, (count - self._before) / self._total), 3)


def _model_bytes(path: str) -> int:
    try:
        return sum(map(os.path.getsize, store.model_files(path)))
    except OSError:
        return 0


def stamp(path: str) -> list[tuple[str, int, int, int]]:
    """What tells the files of a model from others that took their place; [] where there are none."""
    try:
        found = [(name, os.stat(name)) for name in store.model_files(path)]
    except OSError:
        return []
    return [(name, facts.st_ino, facts.st_size, facts.st_mtime_ns) for name, facts in found]


class Served:
    """One model. engine: the client of its engine process, also while it is not loaded. text: tokenizer and template,
    once somebody needed them. reads: what its engine reads, a converted copy perhaps. files: the stamp of what they were read from. users: requests that hold it. changing: the load or eviction that is under way. keep_s:
    without requests it stays loaded for so long, math.inf: for ever; None: as long as the pool says. problem: why its
    last load failed, for an administrator. reading: of a load on demand that goes on. num_ends: times that it was
    unloaded with its requests. revision: of its files, once vectors of documents asked for it."""

    def __init__(self, spec: ModelSpec, engine: EngineClient):
        self.spec, self.engine = spec, engine
        self.text: asyncio.Future | None = None
        self.reads = spec.path
        self.files = stamp(spec.path)
        self.users = self.num_loads = self.num_evictions = self.num_requests = self.num_ends = 0
        self.load_ms = 0.0  # of the last load, from the request to Ready
        self.last_used = time.monotonic()
        self.keep_s: float | None = None
        self.statistics = Statistics()
        # system_fingerprint of answers: the same while version, model and options are the same.
        origin = "\0".join((__version__, spec.names[0], *spec.arguments))
        self.fingerprint = "fp_" + hashlib.sha256(origin.encode()).hexdigest()[:10]
        self.failed_at = 0.0
        self.failure: RequestError | None = None
        self.problem = ""
        self.revision: str | None = None
        self.changing: asyncio.Task | None = None
        self.reading: ReadBytes | None = None

    @property
    def name(self) -> str:
        return self.spec.names[0]

    @functools.cached_property
    def adapters(self) -> "adapters.Adapters":
        """Its LoRA adapters, by name; where there are slots for them, those that were uploaded, too."""
        takes = "--adapter-slots" in self.spec.arguments
        stored = [(each.name, each.path) for each in adapter_store.listed() if each.model == self.name] if takes else []
        return adapters.Adapters(self.engine, self.spec.adapters, stored)

    @property
    def state(self) -> str:
        """unloaded, loading, loaded, restarting, failed or stopping."""
        if self.changing is not None:
            return "loading" if self.engine.state in (STARTING, UNLOADED, DOWN) else "stopping"
        return {STARTING: "loading", READY: "loaded", DOWN: "failed"}.get(self.engine.state, self.engine.state)

    @property
    def is_idle(self) -> bool:
        """Whether its engine can be ended: nobody uses it, and nothing is being done to it."""
        return not self.users and self.changing is None and self.engine.state in (READY, DOWN)
