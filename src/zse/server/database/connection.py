"""A SQLite file with one thread that reads and writes it: nothing of it runs on the event loop.

What was submitted while a commit was under way shares the next one. A result is given once it is on the disk
(`synchronous=FULL`)."""

import asyncio
import os
import queue
import sqlite3
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from zse.errors import ConfigError
from zse.server.database.schema import MIGRATIONS
from zse.server.errors import APIError

MOST_IN_GROUP = 256
BUSY_MS = 5000  # how long another process may hold the file: `zse keys` beside a server
Work = Callable[[sqlite3.Connection], Any]
Migrations = Sequence[Sequence[str]]


class StorageError(APIError):
    """503: the database could not be written or read. reason: for the log."""

    def __init__(self, reason: str):
        super().__init__("storage_unavailable", "The server's database cannot be written or read now.")
        self.reason = reason


class _Job(msgspec.Struct, eq=False):
    work: Work
    writes: bool
    done: Future


class Database:
    """The file at `path`, made, private to its owner, where there is none. close() it; or `with Database(path) as it`.

    After an error of the disk the file is opened again with the next job, and never made again.
    migrations: the steps that make its tables, as of schema.py. num_opened: how often; what PRAGMA data_version says holds for
    one connection. Two of one path, one that writes and one that reads, do not wait for each other.

    Raises ConfigError: it cannot be opened, others could read it, it is damaged, or a newer version made it."""

    def __init__(self, path: str, migrations: Migrations | None = None):
        self.path, self.num_opened = path, 1
        self._migrations = MIGRATIONS if migrations is None else migrations
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
        """All that was submitted is written first."""
        self._jobs.put(None)
        self._thread.join()

    def submit(self, work: Work, writes: bool = True) -> Future:
        """work(connection), in a transaction that may be shared; a job that raises has written nothing, and fails
        alone. The result raises what work raises, or StorageError."""
        job = _Job(work, writes, Future())
        self._jobs.put(job)
        return job.done

    def now(self, work: Work, writes: bool = True) -> Any:
        """submit() for callers that may wait."""
        return self.submit(work, writes).result()

    async def run(self, work: Work, writes: bool = True) -> Any:
        """submit() for the event loop."""
        return await asyncio.wrap_future(self.submit(work, writes))

    def version(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Work: another one once another process has committed."""
        return self.num_opened, connection.execute("PRAGMA data_version").fetchone()[0]

    # -- its thread

    def _run(self, opened: Future) -> None:
        connection: sqlite3.Connection | None = None
        try:
            connection = _open(self.path, self._migrations, is_new=True)
        except (sqlite3.Error, OSError, ConfigError) as error:
            opened.set_exception(error if isinstance(error, ConfigError) else ConfigError(f"{self.path}: {error}"))
            return
        opened.set_result(None)
        is_open = True
        while is_open:
            group = self._next_group()
            jobs = [job for job in group if job is not None]
            is_open = len(jobs) == len(group)
            try:
                if connection is None:
                    connection = _open(self.path, self._migrations, is_new=False)
                    self.num_opened += 1
                if _did(connection, jobs):
                    continue
                connection.close()
            except (sqlite3.Error, OSError, ConfigError) as error:
                for job in jobs:
                    if not job.done.done():
                        job.done.set_exception(StorageError(str(error)))
            connection = None
        if connection is not None:
            connection.close()

    def _next_group(self) -> list[_Job | None]:
        """Jobs that share a commit; None at its end: the last one."""
        group = [self._jobs.get()]
        while group[-1] is not None and len(group) < MOST_IN_GROUP:
            try:
                group.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return group


def _open(path: str, migrations: Migrations, is_new: bool) -> sqlite3.Connection:
    """is_new: it is made where there is none."""
    try:
        if is_new:
            os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT * is_new, 0o600))
        state = os.stat(path)
    except OSError as error:
        raise ConfigError(f"the database {path}: {error.strerror}") from None
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError(f"the database {path} can be read or changed by others; run chmod 600 {path} as its owner")
    connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_MS / 1000)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        _migrate(connection, path, migrations)
    except sqlite3.DatabaseError as error:
        connection.close()
        damaged = type(error) is sqlite3.DatabaseError
        raise ConfigError(f"the database {path}: {error}" + "; move it away to begin a new one" * damaged) from None
    except ConfigError:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, path: str, migrations: Migrations) -> None:
    """Each step that the file lacks, with its number, in a transaction."""
    while True:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(migrations):
            raise ConfigError(
                f"the database {path} was made by a newer ZSE (its version {version}, the newest here {len(migrations)})"
            )
        if version == len(migrations):
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            if connection.execute("PRAGMA user_version").fetchone()[0] == version:  # no other process was first
                for statement in migrations[version]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={version + 1}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")


def _did(connection: sqlite3.Connection, jobs: list[_Job]) -> bool:
    """Do the writes in one transaction and then the reads, and tell their callers. False: the disk failed."""
    is_well = True
    writes = [job for job in jobs if job.writes]
    if writes:
        try:
            outcomes = _commit(connection, writes)
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            is_well, outcomes = False, [(job, None, StorageError(str(error))) for job in writes]
        for job, value, wrong in outcomes:
            _tell(job, value, wrong)
    for job in jobs:
        if not job.writes:
            value, wrong = _done(connection, job)
            is_well = is_well and not isinstance(wrong, StorageError)
            _tell(job, value, wrong)
    return is_well


def _commit(connection: sqlite3.Connection, jobs: list[_Job]) -> list[tuple[_Job, Any, Exception | None]]:
    """Raises sqlite3.Error: nothing of it is written."""
    outcomes = []
    connection.execute("BEGIN IMMEDIATE")
    for job in jobs:
        connection.execute("SAVEPOINT job")
        value, wrong = _done(connection, job)
        if isinstance(wrong, StorageError):  # the disk is full, say: SQLite may have undone all
            raise sqlite3.OperationalError(wrong.reason)
        if wrong is not None:
            connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")
        outcomes.append((job, value, wrong))
    connection.execute("COMMIT")
    return outcomes


def _done(connection: sqlite3.Connection, job: _Job) -> tuple[Any, Exception | None]:
    try:
        return job.work(connection), None
    except sqlite3.Error as error:
        return None, StorageError(str(error))
    except Exception as error:  # the caller's, who is told
        return None, error


def _tell(job: _Job, value: Any, wrong: Exception | None) -> None:
    if not job.done.set_running_or_notify_cancel():
        return  # nobody waits any more
    if wrong is None:
        job.done.set_result(value)
    else:
        job.done.set_exception(wrong)
