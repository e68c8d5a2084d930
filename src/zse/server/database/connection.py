"""A SQLite file with one thread that reads and writes it: nothing of it runs on the event loop.

Writes of several callers share a commit. One that is acknowledged is on the disk (`synchronous=FULL`) before its caller goes on; usage may wait
up to GROUP_S for others, which is what a death of the process may lose.
"""

import asyncio
import os
import queue
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from zse.errors import ConfigError, RequestError
from zse.server.database.schema import MIGRATIONS

GROUP_S, MOST_IN_GROUP = 0.1, 256
BUSY_MS = 5000  # how long another process may hold the file: `zse keys` beside a server
Work = Callable[[sqlite3.Connection], Any]


class StorageError(RequestError):
    """503: the database could not be written or read. The reason is for the log."""

    def __init__(self, reason: str):
        super().__init__(
            "The server's database is not available.", status=503, type="server_error", code="storage_unavailable"
        )
        self.reason = reason


class _Job(msgspec.Struct, eq=False):
    work: Work
    is_urgent: bool
    done: Future


class Database:
    """The file at `path`, which is made, private to its owner, where there is none. close() it; or `with Database(path) as it`.

    Raises ConfigError: it cannot be opened, others could read it, it is damaged, or a newer version made it."""

    def __init__(self, path: str):
        self.path = path
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        opened: Future = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="zse-database", daemon=True)
        self._thread.start()
        opened.result()

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()

    def close(self) -> None:
        """All that was handed in is written first."""
        self._jobs.put(None)
        self._thread.join()

    def submit(self, work: Work, is_urgent: bool = True) -> Future:
        """work(connection) in a transaction of its own or of several callers; its result once that is on the disk. It fails alone:
        what it has written is undone then. is_urgent: it does not wait for others. The result raises what work raises, or
        StorageError."""
        job = _Job(work, is_urgent, Future())
        self._jobs.put(job)
        return job.done

    def now(self, work: Work) -> Any:
        """submit() for callers that may wait."""
        return self.submit(work).result()

    async def run(self, work: Work) -> Any:
        """submit() for the event loop."""
        return await asyncio.wrap_future(self.submit(work))

    # -- its thread

    def _run(self, opened: Future) -> None:
        try:
            connection = _open(self.path)
        except (sqlite3.Error, OSError, ConfigError) as error:
            opened.set_exception(
                error if isinstance(error, ConfigError) else ConfigError(f"the database {self.path}: {error}")
            )
            return
        opened.set_result(None)
        try:
            is_open = True
            while is_open:
                group = self._next_group()
                is_open = group[-1] is not None
                _commit(connection, [job for job in group if job is not None])
        finally:
            connection.close()

    def _next_group(self) -> list[_Job | None]:
        """Jobs that share a commit; None at its end: the last one."""
        group, until = [self._jobs.get()], time.monotonic() + GROUP_S
        while group[-1] is not None and len(group) < MOST_IN_GROUP:
            wait_s = 0.0 if any(job.is_urgent for job in group if job is not None) else until - time.monotonic()
            try:
                group.append(self._jobs.get(timeout=wait_s) if wait_s > 0 else self._jobs.get_nowait())
            except queue.Empty:
                break
        return group


def _open(path: str) -> sqlite3.Connection:
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        state = os.stat(path)
    except OSError as error:
        raise ConfigError(f"the database {path}: {error.strerror}") from None
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError(f"the database {path} is not yours alone; run chmod 600 {path}")
    connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_MS / 1000)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        _migrate(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ConfigError(f"the database {path}: {error}; move it away to begin a new one") from None
    except ConfigError:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, path: str) -> None:
    """Each step that the file lacks, with its number, in a transaction."""
    while True:
        connection.execute("BEGIN IMMEDIATE")
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > len(MIGRATIONS):
                raise ConfigError(
                    f"the database {path} was made by a newer ZSE (its version {version}, ours {len(MIGRATIONS)})"
                )
            if version == len(MIGRATIONS):
                return
            for statement in MIGRATIONS[version].split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={version + 1}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")


def _commit(connection: sqlite3.Connection, jobs: list[_Job]) -> None:
    """Do the jobs in one transaction, and tell their callers."""
    results: list[tuple[_Job, Any, Exception | None]] = []
    try:
        if jobs:
            connection.execute("BEGIN IMMEDIATE")
        for job in jobs:
            connection.execute("SAVEPOINT job")
            result: Any = None
            failure: Exception | None = None
            try:
                result = job.work(connection)
            except sqlite3.Error as error:
                failure = StorageError(str(error))
            except Exception as error:
                failure = error
            if not connection.in_transaction:  # SQLite has undone all of it: the disk is full, say
                raise sqlite3.OperationalError(getattr(failure, "reason", "the transaction ended"))
            if failure is not None:
                connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
            results.append((job, result, failure))
        if jobs:
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        results = [(job, None, StorageError(str(error))) for job in jobs]
    for job, value, wrong in results:
        if wrong is None:
            job.done.set_result(value)
        else:
            job.done.set_exception(wrong)
