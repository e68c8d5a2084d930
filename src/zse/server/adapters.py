"""The LoRA adapters of a served model by the names that requests give them (`model:adapter`).

The engine knows an adapter by the hash of what its folder holds. An engine that was started again, or evicted and
loaded again, is told of one when the first request names it."""

import asyncio
from collections.abc import Sequence
from typing import Any

from zse.engine.client import READY, EngineClient
from zse.engine.messages import AdapterLoaded
from zse.sampling.fields import shown
from zse.server.errors import APIError

MAX_ADAPTERS = 4096  # of a model


class ServedAdapter:
    """loaded: what the engine said of it, None before; of: that engine's Ready; loading: its being read just now."""

    def __init__(self, name: str, path: str):
        self.name, self.path = name, path
        self.loaded: AdapterLoaded | None = None
        self.of: Any = None
        self.loading: asyncio.Task | None = None


class Adapters:
    """by_name: those that were loaded and not unloaded since, and those of before the start: `first`, that the server
    was given, and `stored`, that were uploaded; as (name, path). Used from the event loop, which is its one writer."""

    def __init__(
        self, engine: EngineClient, first: Sequence[tuple[str, str]] = (), stored: Sequence[tuple[str, str]] = ()
    ):
        self._engine = engine
        self.by_name = {name: ServedAdapter(name, path) for name, path in [*stored, *first]}
        self._first = [name for name, _ in first]
        self._leaving: set[str] = set()  # hashes that a name has left
        self._num_reading = 0

    async def load(self, name: str, path: str) -> ServedAdapter:
        """A new adapter; the engine is ready. Raises RequestError: 409 for a name that is taken, 422 for a folder that
        cannot be used."""
        if name in self.by_name:
            raise APIError("conflict", f"There is an adapter '{name}' already: unload it first.", "name")
        if len(self.by_name) >= MAX_ADAPTERS:
            raise APIError("conflict", f"A model has at most {MAX_ADAPTERS} adapters: unload others first.", "name")
        adapter = self.by_name[name] = ServedAdapter(name, path)
        try:
            await self._read(adapter)
        except BaseException:
            if self.by_name.get(name) is adapter:
                del self.by_name[name]
            raise
        return adapter

    async def load_first(self) -> None:
        """Those that the server was started with; the engine is ready. Raises RequestError."""
        for name in self._first:
            await self.id_of(name)

    def unload(self, name: str) -> ServedAdapter:
        """Requests that have it end as they would; others do not find it. Raises APIError."""
        adapter = self.by_name.pop(name, None)
        if adapter is None:
            raise APIError("model_not_found", f"There is no adapter '{shown(name)}' of this model.", "name")
        self._leave(adapter)
        return adapter

    async def id_of(self, name: str) -> str:
        """What the engine, which is ready, knows it by. Raises RequestError."""
        adapter = self.by_name.get(name)
        if adapter is None:
            raise APIError("model_not_found", f"The adapter '{shown(name)}' is not loaded here any more.", "model")
        if adapter.loaded is None or adapter.of is not self._engine.info:
            await self._read(adapter)
        assert adapter.loaded is not None
        return adapter.loaded.adapter

    async def _read(self, adapter: ServedAdapter) -> None:
        """Several requests wait for one reading."""
        if adapter.loading is None:
            adapter.loading = asyncio.get_running_loop().create_task(self._tell(adapter))
        await asyncio.shield(adapter.loading)

    async def _tell(self, adapter: ServedAdapter) -> None:
        self._num_reading += 1
        try:
            engine = self._engine.info
            adapter.loaded, adapter.of = await self._engine.load_adapter(adapter.path), engine
        finally:
            adapter.loading = None
            self._num_reading -= 1
            self._leave(adapter)

    def _leave(self, adapter: ServedAdapter) -> None:
        """The engine forgets what no name means any more, and so what one was unloaded from that was being read. Not while any is read:
        it may hold the same."""
        if self.by_name.get(adapter.name) is not adapter and adapter.loaded is not None:
            self._leaving.add(adapter.loaded.adapter)
        if not self._num_reading:
            of = self._engine.info
            held = {one.loaded.adapter for one in self.by_name.values() if one.loaded is not None and one.of is of}
            for hash in self._leaving - held:
                self._engine.unload_adapter(hash)
            self._leaving.clear()

    def card(self, adapter: ServedAdapter) -> dict[str, Any]:
        """What the admin's routes say of it."""
        loaded = adapter.loaded
        is_there = loaded is not None and adapter.of is self._engine.info and self._engine.state == READY
        found = {"name": adapter.name, "path": adapter.path, "state": "loaded" if is_there else "unloaded"}
        if loaded is None:
            return found
        more = {"hash": loaded.adapter, "rank": loaded.rank, "modules": loaded.members, "bytes": loaded.nbytes}
        return found | more
