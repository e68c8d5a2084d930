"""From a file that was sent to a document that is searched.

    parse (a process of its own, rag/worker.py) → chunks (in a thread) → one transaction → vectors in the background

A tenant's documents take turns with the others'. One that was sent with `wait: false` is acknowledged when it is on the
disk: its file and what was said of it lie in a folder beside documents.db until it is stored, and a server that starts
goes on with them. What a kill leaves of others is removed."""

import asyncio
import fcntl
import hashlib
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from zse import trust
from zse.errors import RequestError
from zse.rag import chunk, store, worker
from zse.rag.documents import DocumentError
from zse.server.api_request import APIRequest
from zse.server.database.connection import StorageError
from zse.server.errors import APIError, limited
from zse.server.requests.documents import Upload

log = logging.getLogger("zse.server")

AT_ONCE, OWN_AT_ONCE = 4, 2  # documents, of all and of one tenant: each may be 256 MiB of text in memory
MOST_WAITING = 64  # of one tenant; of those that failed as many are remembered
WRITE_BYTES = 1 << 20  # that are written to the disk at once, in a thread
PART, DATA, ABOUT, TEMPORARY = ".part", ".data", ".json", ".tmp"  # the last: of trust.write_whole


class SentFile(msgspec.Struct):
    """The file. data: its bytes, or its path."""

    data: bytes | str
    size: int
    digest: bytes

    @classmethod
    def of_bytes(cls, data: bytes) -> "SentFile":
        return cls(data, len(data), hashlib.sha256(data).digest())

    def remove(self) -> None:
        if isinstance(self.data, str):
            with suppress(FileNotFoundError):
                os.unlink(self.data)


class PendingDocument(msgspec.Struct):
    """One that is not stored yet. status: queued, parsing or failed; error: why."""

    token: str
    tenant: str
    account: str
    id: str
    upload: Upload
    size: int
    digest: bytes
    created: float
    model: str
    status: str = "queued"
    error: str = ""

    @property
    def shown(self) -> dict[str, Any]:
        """As the API shows a document."""
        return {
            "id": self.id,
            "object": "rag.document",
            "name": self.upload.name,
            "title": "",
            "kind": self.upload.kind,
            "version": 0,
            "status": self.status,
            "error": self.error or None,
            "created": int(self.created),
            "updated": int(self.created),
            "bytes": self.size,
            "sha256": self.digest.hex(),
            "num_pages": 0,
            "num_chunks": 0,
            "num_tokens": 0,
            "vectors": {"done": 0, "total": 0},
            "metadata": self.upload.metadata,
            "warnings": [],
        }


def new_id() -> str:
    return "doc_" + os.urandom(12).hex()


def refused(error: DocumentError) -> APIError:
    """A document that cannot be used, as the API says it."""
    text = str(error)
    return APIError(error.code, text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else "."))


class Ingest:
    def __init__(self, of: Any):
        self._retrieval, self._app = of, of.app
        self.folder = of.path + ".uploads"
        self._lock = -1
        self._all = asyncio.Semaphore(AT_ONCE)
        self._own: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(OWN_AT_ONCE))
        self._waiting: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # bytes of files that arrive or wait for their answer
        self.pending: dict[tuple[str, str], PendingDocument] = {}  # by tenant and id
        self._tasks: dict[tuple[str, str], asyncio.Task] = {}

    # -- the folder; in a thread

    def lock(self) -> None:
        """One server writes here. Raises OSError."""
        if self._lock < 0:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            lock = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                reason = "another server has these documents; start this one with --documents PATH"
                raise OSError(f"{self._retrieval.path}: {reason}") from None
            self._lock = lock

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def recover(self) -> None:
        """Read what was acknowledged and not stored; remove what was never acknowledged. Raises OSError."""
        names = set(os.listdir(self.folder))
        for name in sorted(names):
            token, ending = os.path.splitext(name)
            if ending in (PART, TEMPORARY) or ending == DATA and token + ABOUT not in names:
                os.unlink(os.path.join(self.folder, name))
            elif ending == ABOUT:
                try:
                    with open(os.path.join(self.folder, name), "rb") as file:
                        found = msgspec.json.decode(file.read(), type=PendingDocument)
                    self.pending[found.tenant, found.id] = found
                except msgspec.DecodeError as error:
                    log.error("the record of a document that was sent is damaged, and is left: %s: %s", name, error)

    def _path(self, token: str, ending: str) -> str:
        return os.path.join(self.folder, token + ending)

    def _keep(self, pending: PendingDocument) -> None:
        """Its record, on the disk when this returns."""
        trust.write_whole(self._path(pending.token, ABOUT), msgspec.json.encode(pending), 0o600)
        trust.sync(self.folder)

    def _keep_file(self, pending: PendingDocument, source: SentFile) -> None:
        """The file and then its record; neither where this raises: a full disk must not stay full of them."""
        try:
            self._write_file(self._path(pending.token, DATA), source)
            self._keep(pending)
        except OSError:
            self._forget(pending)
            raise

    def _write_file(self, path: str, source: SentFile) -> None:
        if isinstance(source.data, str):
            os.rename(source.data, path)
        else:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(source.data)
        trust.sync(path)

    def _forget(self, pending: PendingDocument, about: bool = True) -> None:
        """Its record goes first: a file without one is nobody's."""
        for ending in (ABOUT, DATA) if about else (DATA,):
            with suppress(FileNotFoundError):
                os.unlink(self._path(pending.token, ending))

    # -- what is sent

    async def receive(self, request: APIRequest, body: AsyncIterator[bytes]) -> SentFile:
        """The file that a request brings, written as it arrives. Raises RequestError; nothing is left then."""
        await self._retrieval.opened()
        source = SentFile(self._path(os.urandom(16).hex(), PART), 0, b"")
        digest, held = hashlib.sha256(), bytearray()
        loop, tenant = asyncio.get_running_loop(), request.tenant
        kept = sum(pending.size for (owner, _), pending in self.pending.items() if owner == tenant)

        def write(file: Any, data: bytes) -> None:
            digest.update(data)
            file.write(data)

        try:
            # Here, not in a thread: a client that left meanwhile would leave the file with nobody.
            number = os.open(source.data, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(number, "wb", buffering=0) as file:
                async for data in body:
                    held += data
                    source.size += len(data)
                    self._held[tenant] += len(data)
                    if kept + self._held[tenant] > self._retrieval.quota_bytes:
                        message = f"Files that wait to be read may have {self._retrieval.quota_bytes} bytes in all."
                        raise APIError("request_too_large", message, close=True)
                    if len(held) >= WRITE_BYTES:
                        await loop.run_in_executor(None, write, file, bytes(held))
                        held.clear()
                await loop.run_in_executor(None, write, file, bytes(held))
            source.digest = digest.digest()
            return source
        except OSError as error:
            self.release(tenant, source)
            log.error("a file cannot be written: %s", error)
            raise StorageError(str(error)) from None
        except BaseException:
            self.release(tenant, source)
            raise

    def release(self, tenant: str, source: SentFile) -> None:
        """It is needed no more."""
        if isinstance(source.data, str):
            self._held[tenant] -= source.size
            if not self._held[tenant]:
                del self._held[tenant]
        source.remove()

    async def add(self, request: APIRequest, upload: Upload, source: SentFile) -> dict[str, Any]:
        """Store it, or begin to; what the API answers. The source is taken. Raises RequestError."""
        try:
            tenant = request.tenant
            served = self._app.find_model(request, upload.model, "model")
            chunk.checked_sizes(upload.chunk_tokens, upload.overlap_tokens)
            await self._retrieval.opened()
            running = self.pending.get((tenant, upload.id or ""))
            if running is not None and running.status != "failed":
                raise APIError("conflict", "A document with this id is being added; try again when it is done.", "id")
            token = os.urandom(16).hex()
            owner = (token, tenant, request.account, upload.id or new_id())
            pending = PendingDocument(*owner, upload, source.size, source.digest, time.time(), served.name)
            if self._waiting[tenant] >= MOST_WAITING:
                raise limited("requests", f"{MOST_WAITING} documents of yours wait to be read.", 1.0)
            if upload.wait:
                answer = await self._stored(pending, source)
                await self.drop(tenant, pending.id)
                return answer
            await self._retrieval.app.threads.run(request.account, lambda: self._keep_file(pending, source))
        except OSError as error:
            log.error("a document cannot be kept: %s", error)
            raise StorageError(str(error)) from None
        finally:
            self.release(request.tenant, source)
        upload.password = None
        await self.drop(tenant, pending.id)
        self.pending[tenant, pending.id] = pending
        self._begin(pending)
        return pending.shown

    def resume(self) -> None:
        """Go on with what an earlier run acknowledged."""
        for pending in self.pending.values():
            if pending.status != "failed":
                pending.status = "queued"
                self._begin(pending)

    def _begin(self, pending: PendingDocument) -> None:
        key = pending.tenant, pending.id
        task = self._tasks[key] = asyncio.get_running_loop().create_task(self._run(pending))
        task.add_done_callback(lambda done: self._tasks.pop(key, None) if self._tasks.get(key) is done else None)

    async def _run(self, pending: PendingDocument) -> None:
        loop = asyncio.get_running_loop()
        source = SentFile(self._path(pending.token, DATA), pending.size, pending.digest)
        try:
            while True:
                try:
                    await self._stored(pending, source)
                    break
                except RequestError as error:
                    if error.status < 500:
                        failed = msgspec.structs.replace(pending, status="failed", error=error.message)
                        await loop.run_in_executor(None, self._keep, failed)  # before anybody sees it
                        await loop.run_in_executor(None, self._forget, pending, False)
                        pending.status, pending.error = "failed", error.message
                        self._forget_failures(pending.tenant)
                        return
                    await asyncio.sleep(2.0)  # the disk is full, say, or the model is not there
            await loop.run_in_executor(None, self._forget, pending)
            del self.pending[pending.tenant, pending.id]
        except OSError as error:
            log.error("a document that was sent cannot be kept: %s", error)

    def _forget_failures(self, tenant: str) -> None:
        failed = [key for key, each in self.pending.items() if key[0] == tenant and each.status == "failed"]
        for key in failed[:-MOST_WAITING]:
            self._forget(self.pending.pop(key))

    async def drop(self, tenant: str, id: str) -> bool:
        """One that waits or failed is not wanted any more; whether there was one."""
        pending = self.pending.pop((tenant, id), None)
        if pending is None:
            return False
        task = self._tasks.pop((tenant, id), None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._forget, pending)
        return True

    async def stop(self) -> None:
        """What is under way ends; the next start goes on with it."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- the steps

    async def _stored(self, pending: PendingDocument, source: SentFile) -> dict[str, Any]:
        """Parse it, cut it and store it; the document as the API shows it. Raises RequestError."""
        tenant = pending.tenant
        self._waiting[tenant] += 1
        try:
            async with self._own[tenant], self._all:
                pending.status = "parsing"
                return await self._store(pending, source)
        except DocumentError as error:
            raise refused(error) from None
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
                self._own.pop(tenant, None)

    async def _store(self, pending: PendingDocument, source: SentFile) -> dict[str, Any]:
        of, upload, tenant = self._retrieval, pending.upload, pending.tenant
        sizes = chunk.checked_sizes(upload.chunk_tokens, upload.overlap_tokens)
        options = f"{sizes[0]} {sizes[1]} {pending.model}"
        before = await of.read(store.find, tenant, pending.id)
        if before is None:
            twin = await of.read(store.find_content, tenant, source.digest)
            if twin is not None:
                return shown(twin, of.revision) | {"outcome": "duplicate", "duplicate_of": twin.id}
        elif (before.digest, before.options, before.name, before.metadata) == (
            source.digest,
            options,
            upload.name,
            upload.metadata,
        ) and upload.kind in (None, before.kind):
            return shown(before, of.revision) | {"outcome": "unchanged"}
        document = await worker.parse_document(
            source.data,
            upload.name,
            upload.media_type,
            upload.password,
            kind=upload.kind or "",
            tenant=tenant,
            ocr=of.ocr,
        )
        served = self._app.pool.by_name.get(pending.model) or self._app.pool.default
        model = await self._app.pool.text(served)

        def count(texts: list[str]) -> list[int]:
            return [len(model.encode_part(text)) for text in texts]

        chunks = await self._app.threads.run(pending.account, lambda: chunk.chunk_document(document, count, *sizes))
        if not chunks:
            raise APIError("unprocessable_file", "The document has no text.")
        new = store.NewDocument(
            pending.id,
            upload.name,
            document.kind,
            document.title,
            source.digest,
            options,
            source.size,
            document.num_pages,
            chunks,
            dict(upload.metadata),
            document.warnings,
        )
        added = await of.write(store.add, tenant, new, time.time(), of.quota_bytes)
        of.vectors.accounts[tenant] = pending.account
        of.vectors.wake()
        twin_id = {"duplicate_of": added.document.id} if added.outcome == "duplicate" else {}
        return shown(added.document, of.revision) | {"outcome": added.outcome} | twin_id


def shown(document: store.StoredDocument, revision: str) -> dict[str, Any]:
    """A document as the API shows it. revision: of the model whose vectors are wanted."""
    done = document.num_embedded if document.vector_model == revision else 0
    return {
        "id": document.id,
        "object": "rag.document",
        "name": document.name,
        "title": document.title,
        "kind": document.kind,
        "version": document.version,
        "status": "ready" if done == document.num_chunks else "indexing",
        "error": None,
        "created": int(document.created),
        "updated": int(document.updated),
        "bytes": document.file_bytes,
        "sha256": document.digest.hex(),
        "num_pages": document.num_pages,
        "num_chunks": document.num_chunks,
        "num_tokens": document.num_tokens,
        "vectors": {"done": done, "total": document.num_chunks},
        "metadata": document.metadata,
        "warnings": document.warnings,
    }
