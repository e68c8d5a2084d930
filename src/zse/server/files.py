"""Contents of files: in a folder beside the database, `server.db.files`, whose rows say whose they are.

A file there has its id as name, mode 0600, and is written beside, brought to the disk and renamed before its row is; a
row goes before its content does. What a death leaves between the two is a content without a row, which the next server
deletes. In the database itself 512 MB would pass through its one thread and its log, and be held whole."""

import asyncio
import hashlib
import logging
import math
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

from zse import trust
from zse.server import database as storage
from zse.server.api_request import APIRequest
from zse.server.database.connection import StorageError
from zse.server.database.files import StoredFile
from zse.server.errors import APIError

log = logging.getLogger("zse.server")

PIECE_BYTES = 1 << 18  # that are written and read at once
LOOK_S = 60.0  # between two looks for files that have ended, which requests do not see from then on
ORPHAN_S = 3600.0  # a content without a row that is as old is nobody's: another server may be writing a younger one
PART = ".part"
Run = Callable[[Callable[[], Any]], Awaitable[Any]]  # work() in a thread


def new_id(prefix: str = "file-") -> str:
    return prefix + os.urandom(16).hex()


class Written:
    """A content that is being written beside its place. size: bytes so far; digest: their SHA-256, of a content that is
    kept; path: of that. Its methods wait for the disk and for each other, so that a thread of which nobody waits any more is no
    danger. Raises StorageError."""

    def __init__(self, folder: str):
        self._folder, self.id = folder, new_id()
        self.size, self._hash, self._lock = 0, hashlib.sha256(), threading.Lock()
        self.path = os.path.join(folder, self.id)
        self._is_kept = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file: BinaryIO = os.fdopen(_tried(os.open, self.path + PART, flags, 0o600), "wb", buffering=0)

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        with self._lock:
            while left and not self._file.closed:
                left = left[_tried(self._file.write, left) :]
            self._hash.update(data)
            self.size += len(data)

    def keep(self) -> bytes:
        """Bring it to the disk under its id; its digest."""
        with self._lock:
            if not self._file.closed:
                _tried(os.fsync, self._file.fileno())
                self._file.close()
                _tried(os.rename, self.path + PART, self.path)
                self._is_kept = True
                _tried(trust.sync, self._folder)
            return self._hash.digest()

    def discard(self) -> None:
        """Forget it, kept or not."""
        with self._lock:
            self._file.close()
            with suppress(OSError):
                os.unlink(self.path + PART * (not self._is_kept))


async def fill(written: Written, pieces: AsyncIterator[bytes], run: Run, count: Callable[[int], None]) -> None:
    """Write the pieces as they come. count: called with the size of each, before it is written; what it raises ends
    it."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        count(len(piece))
        if len(buffer) >= PIECE_BYTES:
            await run(partial(written.write, bytes(buffer)))
            buffer.clear()
    await run(partial(written.write, bytes(buffer)))


def discard(written: Written) -> None:
    """Forget it, in a thread that nobody waits for."""
    asyncio.get_running_loop().run_in_executor(None, written.discard)


def _tried(call: Callable, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except OSError as error:
        log.error("a file cannot be kept: %s", error)
        raise StorageError(f"{error.strerror}: {error.filename or 'a file'}") from None


class FileStore:
    """The files of `app`, a server with a database."""

    def __init__(self, app: Any):
        self._app, self._database, self.folder = app, app.database, app.database.path + ".files"
        self._arriving: Counter[str] = Counter()  # tenant → bytes that are being uploaded
        self._is_open, self._looked_at = False, -math.inf

    @property
    def quota(self) -> int:
        """Bytes of one tenant's files together."""
        return self._app.file_quota

    async def open(self) -> None:
        """Before anything is written: make the folder, and delete what nobody has. Raises StorageError."""
        loop = asyncio.get_running_loop()
        if not self._is_open:
            found = await loop.run_in_executor(None, self._prepare)
            self._is_open = True
            await self._unlink(await self._database.run(partial(storage.files.unknown, names=found), writes=False))
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            await self._unlink(await self._database.run(partial(storage.files.expire, now=time.time())))

    def _prepare(self) -> list[str]:
        """Make the folder; names of contents that are not new."""
        with suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        state = _tried(os.lstat, self.folder)
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise StorageError(f"{self.folder} can be read or changed by others, or is no folder")
        before = time.time() - ORPHAN_S
        with os.scandir(self.folder) as entries:
            return [
                entry.name
                for entry in entries
                if entry.name.startswith("file-") and entry.stat(follow_symlinks=False).st_mtime < before
            ]

    async def _unlink(self, ids: list[str]) -> None:
        def unlink() -> None:
            for id in ids:
                with suppress(OSError):
                    os.unlink(os.path.join(self.folder, id))

        if ids:
            await asyncio.get_running_loop().run_in_executor(None, unlink)

    def begin(self) -> Written:
        """A new content, in a thread. Raises StorageError."""
        return Written(self.folder)

    async def write(self, tenant: str, pieces: AsyncIterator[bytes], run: Run) -> Written:
        """The content of an upload, to be kept or discarded. run: where the disk is waited
        for. Raises APIError: request_too_large; StorageError; and what `pieces` raises."""
        used = await self._database.run(partial(storage.files.stored_bytes, tenant=tenant), writes=False)
        written = await run(self.begin)
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            counted += size
            self._arriving[tenant] += size
            if used + self._arriving[tenant] > self.quota:
                raise storage.files.too_much(self.quota)

        try:
            await fill(written, pieces, run, count)
            return written
        except BaseException:
            discard(written)
            raise
        finally:
            self._arriving[tenant] -= counted
            if not self._arriving[tenant]:
                del self._arriving[tenant]

    async def find(self, request: APIRequest, id: str) -> StoredFile:
        """The file of that id of who asks. Raises APIError not_found."""
        work = partial(storage.files.find, tenant=request.tenant, id=id, now=time.time())
        found = await self._database.run(work, writes=False)
        if found is None:
            raise not_found()
        return found

    async def delete(self, request: APIRequest, id: str) -> None:
        """Raises APIError: not_found; conflict, a batch reads it."""
        if not await self._database.run(partial(storage.files.delete, tenant=request.tenant, id=id, now=time.time())):
            raise not_found()
        await self._unlink([id])

    def read(self, id: str) -> BinaryIO:
        """The content, to be read in a thread. Raises APIError not_found: somebody deleted it beside the server."""
        path = os.path.join(self.folder, id)
        try:
            return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
        except OSError:
            raise APIError("not_found", "The content of this file is gone.") from None


def not_found() -> APIError:
    return APIError("not_found", "There is no such file.")


def needs_database() -> APIError:
    return APIError(
        "unsupported_parameter", "Files and batches are kept by a server with a database (--database PATH)."
    )
