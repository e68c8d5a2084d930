"""LoRA adapters that administrators upload: checked before they are kept, kept before they are loaded.

The weights go to the disk as they arrive, and are never held whole. What a death leaves without a name is deleted by a
later upload (zse.formats.adapter_store)."""

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from zse.errors import RequestError, ZSEError
from zse.formats import adapter, adapter_store
from zse.http.multipart import FormPart
from zse.server.api_request import APIRequest
from zse.server.database.connection import StorageError
from zse.server.errors import APIError
from zse.server.files import Run, Written, discard, fill
from zse.server.requests import adapters as fields
from zse.server.uploads import read_form

if TYPE_CHECKING:
    from zse.server.adapters import ServedAdapter
    from zse.server.served import Served

_FILES = {"config": adapter.CONFIG, "weights": adapter.TENSORS}


class AdapterUploads:
    """Those of `app`."""

    def __init__(self, app: Any):
        self._app = app
        self._arriving = 0  # bytes of uploads that are not kept yet
        self._keeping = asyncio.Lock()  # one at a time

    async def receive(self, request: APIRequest) -> "tuple[Served, ServedAdapter]":
        """The adapter of a form, kept and loaded. Raises RequestError: 409 where the model has another of its name, 413
        beyond the quota, 422 for what is no adapter of the model; StorageError."""
        run = partial(self._app.threads.run, request.account)
        arrived = _Arrived(self, run, await run(adapter_store.used_bytes))
        try:
            await run(arrived.begin)
            values = await read_form(request, fields.UPLOAD, arrived.take)
        except BaseException:
            arrived.discard()
            raise
        # From here on it goes to its end, whether the client waits for it or not.
        work = asyncio.get_running_loop().create_task(self._take(request, values, arrived, run))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(work)

    async def _take(
        self, request: APIRequest, values: dict[str, Any], arrived: "_Arrived", run: Run
    ) -> "tuple[Served, ServedAdapter]":
        try:
            digests = arrived.digests
            if values["sha256"] not in (None, digests[adapter.TENSORS].hex()):
                message = f"The SHA-256 of the weights is {digests[adapter.TENSORS].hex()}."
                raise APIError("unprocessable_file", message, "sha256")
            rank = await run(partial(_check, arrived.folder))
            served = self._app.find_model(request, values["model"], "model")
            self._app.pool.enter(served)
            try:
                await self._app.pool.ready(served)
                async with self._keeping:
                    return served, await self._keep(served, values["name"], arrived.folder, digests, rank, run)
            finally:
                self._app.pool.leave(served)
        except RequestError as error:
            error.message = error.message.replace(arrived.folder + os.sep, "")  # which nobody else knows
            raise
        finally:
            arrived.discard()

    def count(self, size: int, used: int = 0) -> None:
        """So many bytes more arrive, where `used` are kept. Raises APIError request_too_large."""
        self._arriving += size
        quota = self._app.adapter_quota
        if size > 0 and used + self._arriving > quota:
            raise APIError("request_too_large", f"Uploaded adapters may have {quota} bytes together.", "weights")

    async def _keep(
        self, served: "Served", name: str, folder: str, digests: dict[str, bytes], rank: int, run: Run
    ) -> "ServedAdapter":
        """Load it from where it arrived, then give it its place."""
        if await run(partial(adapter_store.find, served.name, name)) is not None:
            raise _taken()
        loaded = await served.adapters.load(name, folder)
        try:
            put = partial(adapter_store.put, folder, served.name, name, rank, digests)
            loaded.path = (await run(partial(_tried, put))).path
        except BaseException:
            served.adapters.unload(name)
            raise
        return loaded

    async def delete(self, request: APIRequest, id: str) -> None:
        """Forget MODEL:NAME: requests that have it end as they would. Raises APIError not_found."""
        model, _, name = id.rpartition(":")
        served = self._app.pool.by_name.get(model)
        remove = partial(adapter_store.remove, model if served is None else served.name, name)
        async with self._keeping:
            stored = await self._app.threads.run(request.account, partial(_tried, remove))
        if stored is None:
            raise APIError("not_found", "There is no such uploaded adapter, as MODEL:NAME.")
        loaded = None if served is None else served.adapters.by_name.get(name)
        if served is not None and loaded is not None and loaded.path == stored.path:
            served.adapters.unload(name)


class _Arrived:
    """The files of one upload, in a folder beside their place. used: bytes that the store had before it. size: bytes so
    far; digests: SHA-256 by file. What goes to the disk by do() waits for the others, and is refused behind discard(): a
    thread of which nobody waits any more is no danger."""

    def __init__(self, uploads: AdapterUploads, run: Run, used: int):
        self._uploads, self._run, self._used = uploads, run, used
        self.folder, self.size = "", 0
        self.digests: dict[str, bytes] = {}
        self._lock, self._is_over = threading.Lock(), False

    def begin(self) -> None:
        self.folder = self.do(adapter_store.begin)

    def do(self, call: Callable[[], Any]) -> Any:
        """call(), in a thread. Raises StorageError."""
        with self._lock:
            if self._is_over:
                raise StorageError("the upload has ended")
            return _tried(call)

    def discard(self) -> None:
        """Forget what is not kept, in a thread that nobody waits for."""
        self._uploads.count(-self.size)
        self.size = 0
        asyncio.get_running_loop().run_in_executor(None, self._discard)

    def _discard(self) -> None:
        with self._lock:
            self._is_over = True
            if self.folder:
                adapter_store.discard(self.folder)

    async def take(self, part: FormPart) -> str:
        file = _FILES[part.name]
        written: Written = await self._run(partial(self.do, partial(Written, self.folder)))
        before = self.size
        try:
            await fill(written, aiter(part), self._run, partial(self._count, file, before))
            self.digests[file] = await self._run(written.keep)
            place = os.path.join(self.folder, file)
            await self._run(partial(self.do, partial(os.rename, written.path, place)))
        except BaseException:
            discard(written)
            raise
        return file

    def _count(self, file: str, before: int, size: int) -> None:
        self.size += size
        self._uploads.count(size, self._used)
        if file == adapter.CONFIG and self.size - before > fields.MAX_CONFIG_BYTES:
            message = f"{file} is larger than {fields.MAX_CONFIG_BYTES} bytes."
            raise APIError("request_too_large", message, "config")


def _check(folder: str) -> int:
    """The largest rank of an adapter that is whole. Raises APIError."""
    try:
        return adapter.largest_rank(folder)
    except ZSEError as error:
        raise APIError("unprocessable_file", str(error), "weights") from None


def _taken() -> APIError:
    return APIError("conflict", "There is an adapter of this name already: delete it first.", "name")


def _tried(call: Callable[[], Any]) -> Any:
    """call(), with what a disk refuses as StorageError, and a name that is taken as APIError conflict."""
    try:
        return call()
    except FileExistsError:
        raise _taken() from None
    except OSError as error:
        raise StorageError(f"{error.strerror}: {error.filename or 'an adapter'}") from None
