"""Batches run: lines go through the handlers of their route as requests of the lowest priority, a bounded number at once.

BatchRunner: the batches that have not ended, the oldest of each tenant at a time, and the places of their lines. A batch
takes what interactive requests leave: half of the rows at most, none while the queue is filled to three quarters, and
waits where a request of a client would be refused. BatchJob (batch_job.py): one batch."""

import asyncio
import fcntl
import logging
import os
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from zse.server import batch_job as jobs
from zse.server import database as storage
from zse.server.api_request import APIRequest
from zse.server.database.batches import CANCELLING, IN_PROGRESS, StoredBatch
from zse.server.database.connection import StorageError
from zse.server.files import FileStore, needs_database, new_id
from zse.server.routes.table import BY_PATH

if TYPE_CHECKING:
    from zse.server.batch_job import BatchJob

log = logging.getLogger("zse.server")

WINDOW_S = 86400.0
LOOK_S = 5.0  # what another server with this database made or cancelled is seen after so long
SHARE = 0.5  # of the engine's rows, for lines; MOST_FILLED: of the rows, with those of others, for a line to begin
MOST_FILLED = 0.75


class BatchRunner:
    """Of one server with a database. wake() when there may be something to do; close() at the end."""

    def __init__(self, app: Any, files: FileStore):
        self._app, self._files, self._database = app, files, app.database
        self._jobs: dict[tuple[str, str], BatchJob] = {}  # by tenant and id of the batch
        self._waiting: list[BatchJob] = []  # for a place, who waited longest first
        self._task: asyncio.Task | None = None
        self._woken, self._changed = asyncio.Event(), asyncio.Event()
        self._lock: int | None = None
        self.num_running = 0  # lines

    def wake(self) -> None:
        self._woken.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Lines that run end without a result."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    # -- which batches run

    async def _run(self) -> None:
        """Until nothing is left to do."""
        reason = ""
        try:
            while True:
                self._woken.clear()
                try:
                    await self._files.open()
                    if self._is_mine():
                        await self._look()
                    if not self._jobs and not self._woken.is_set() and not await self.left():
                        return
                    reason = ""
                except StorageError as error:
                    if error.reason != reason:
                        log.error("batches wait: %s", error.reason)
                    reason = error.reason
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), LOOK_S)
        finally:
            for job in self._jobs.values():
                job.task.cancel()
            await asyncio.gather(*(job.task for job in self._jobs.values()), return_exceptions=True)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    async def left(self) -> bool:
        """Whether there is something to do. Raises StorageError."""
        return bool(await self._database.run(storage.batches.unfinished, writes=False)) or self._woken.is_set()

    def _is_mine(self) -> bool:
        """Whether this process runs the batches of the database: one does, until there are none."""
        if self._lock is None:
            path = os.path.join(self._files.folder, "batches.lock")
            try:
                number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror}") from None
            try:
                fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(number)
                return False
            self._lock = number
        return True

    async def _look(self) -> None:
        found = await self._database.run(storage.batches.unfinished, writes=False)
        busy = {tenant for (tenant, _), job in self._jobs.items() if job.batch.status == IN_PROGRESS}
        for tenant, batch in found:
            name = (tenant, batch.id)
            job = self._jobs.get(name)
            if job is not None:
                if batch.status == CANCELLING:
                    job.cancel()
                continue
            if batch.status == IN_PROGRESS:
                if tenant in busy:
                    continue
                busy.add(tenant)
            job = self._jobs[name] = jobs.BatchJob(self._app, self._files, self, tenant, batch)
            job.task = asyncio.get_running_loop().create_task(job.run())
            job.task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: tuple[str, str], task: asyncio.Task) -> None:
        del self._jobs[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, StorageError):
                log.error("a batch waits: %s", error.reason)
            else:
                log.error("a batch waits", exc_info=error)
            return  # it is tried again when the runner looks next
        self._woken.set()

    def cancelled(self, tenant: str, id: str) -> None:
        """A client cancelled it."""
        job = self._jobs.get((tenant, id))
        if job is not None:
            job.cancel()
        self.wake()

    # -- places of lines

    async def place(self, job: "BatchJob") -> None:
        """Wait until the job may begin a line, or is over; returned() when the line has ended."""
        self._waiting.append(job)
        try:
            while job.may_go_on() and not self._may_begin(job):
                self._changed.clear()
                with suppress(TimeoutError):  # others' requests end, too
                    await asyncio.wait_for(self._changed.wait(), 0.1)
        finally:
            self._waiting.remove(job)
        self.num_running += 1

    def returned(self) -> None:
        self.num_running -= 1
        self.changed()

    def changed(self) -> None:
        """Who waits for a place looks again."""
        self._changed.set()

    def _may_begin(self, job: "BatchJob") -> bool:
        """In turns: of those that have room the one with the fewest lines."""
        able = [other for other in self._waiting if self._has_room(other)]
        return bool(able) and min(able, key=lambda other: other.num_running) is job

    def _has_room(self, job: "BatchJob") -> bool:
        control = self._app.admission
        rows, load = control.bounds.num_rows, control.tenants[job.batch.account]
        if self._app.draining or self.num_running >= max(1, int(rows * SHARE)):
            return False
        if control.choices and control.choices >= rows * MOST_FILLED:
            return False
        held = max(load.choices, job.num_running)  # a line that has just begun holds nothing yet
        return not load.max_choices or held < max(1, load.max_choices - 1)  # one is left for the key's other requests


def of(app: Any) -> BatchRunner:
    """Raises APIError where there is no database."""
    if app.batches is None:
        raise needs_database()
    return app.batches


async def create(app: Any, request: APIRequest, values: dict[str, Any], metadata: str) -> StoredBatch:
    """A batch of checked values, which begins. Raises APIError."""
    runner, now = of(app), time.time()
    app.check_access(request, BY_PATH[values["endpoint"]]["POST"])
    ends = values["output_expires_after"]
    ttl_s = None if ends is None else float(ends["seconds"])
    who, asked = (request.account, app.identity(request)), (values["input_file_id"], values["endpoint"], metadata)
    batch = StoredBatch(new_id("batch_"), *who, now, now + WINDOW_S, ttl_s, *asked)
    work = partial(storage.batches.add, tenant=request.tenant, batch=batch, quota=app.file_quota)
    await app.database.run(work)
    runner.wake()
    return batch
