"""Batches and the results of their lines, by tenant. The functions take the connection: hand them to Database.run().

A batch's rows say how far it is, so that a server that starts goes on from there: a line has one result, whose row is
written when it is known; the files of a batch that ends get their rows with its last status, and then its lines' rows
go."""

import sqlite3
from typing import Any, NamedTuple

import msgspec

from zse.server.database import files
from zse.server.database.files import StoredFile
from zse.server.database.owned import OwnedTable
from zse.server.errors import APIError

MOST_OPEN = 64  # of one tenant that have not ended
VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, EXPIRED, CANCELLED = ENDS = "completed", "failed", "expired", "cancelled"
CLEARED_AT_ONCE = 2000  # rows: 10 ms of the database's thread


class StoredBatch(NamedTuple):
    """metadata, times (status → seconds since 1970), errors (of the batch): JSON. identity: of the key that made it.
    output_ttl: seconds. ended: and nothing is left to do. total: lines; completed, failed: of those that have a result;
    bytes: of the results."""

    id: str
    account: str
    identity: str
    created: float
    expires: float
    output_ttl: float | None
    input_file: str
    endpoint: str
    metadata: str
    status: str = VALIDATING
    ended: int = 0
    times: str = "{}"
    total: int = 0
    completed: int = 0
    failed: int = 0
    bytes: int = 0
    errors: str = "[]"
    output_file: str | None = None
    error_file: str | None = None


_TABLE = OwnedTable("batches", StoredBatch)
find, listed = _TABLE.find, _TABLE.listed


def add(connection: sqlite3.Connection, tenant: str, batch: StoredBatch, quota: int) -> None:
    """quota: bytes that the tenant's files may have together. Raises APIError."""
    found = files.find(connection, tenant, batch.input_file, batch.created)
    if found is None or found.purpose != "batch":
        raise APIError("not_found", "There is no such file of the purpose batch.", "input_file_id")
    if files.stored_bytes(connection, tenant) >= quota:
        raise files.too_much(quota)
    count = "SELECT count(*) FROM batches WHERE tenant = ? AND ended = 0"
    if connection.execute(count, (tenant,)).fetchone()[0] >= MOST_OPEN:
        raise APIError("conflict", f"{MOST_OPEN} batches have not ended; wait for one, or cancel one.")
    _TABLE.add(connection, tenant, batch)


def unfinished(connection: sqlite3.Connection) -> list[tuple[str, StoredBatch]]:
    """(tenant, batch) of all that have not ended, the oldest first."""
    rows = connection.execute(f"SELECT tenant, {_TABLE.columns} FROM batches WHERE ended = 0 ORDER BY created")
    return [(row[0], StoredBatch(*row[1:])) for row in rows]


def move(
    connection: sqlite3.Connection, tenant: str, id: str, status: str, now: float, **changes: Any
) -> StoredBatch | None:
    """Give a batch another status, and the columns of `changes`; one that is cancelled meanwhile stays it. What it is
    then; None: it is gone."""
    found = find(connection, tenant, id)
    if found is None or found.status in ENDS or found.status == CANCELLING and status not in ENDS:
        return found
    times = msgspec.json.encode(msgspec.json.decode(found.times) | {status: now}).decode()
    return _set(connection, tenant, found, {"status": status, "times": times} | changes)


def _set(connection: sqlite3.Connection, tenant: str, batch: StoredBatch, values: dict[str, Any]) -> StoredBatch:
    columns = ", ".join(f"{name} = ?" for name in values)
    connection.execute(
        f"UPDATE batches SET {columns} WHERE tenant = ? AND id = ?", (*values.values(), tenant, batch.id)
    )
    return batch._replace(**values)


def cancel(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> StoredBatch | None:
    """Raises APIError conflict: it has ended."""
    found = find(connection, tenant, id)
    if found is not None and found.status in ENDS and found.status != CANCELLED:
        raise APIError("conflict", f"This batch is {found.status}.")
    return move(connection, tenant, id, CANCELLING, now)


def done_lines(connection: sqlite3.Connection, tenant: str, id: str) -> list[int]:
    """Numbers of the lines that have a result."""
    rows = connection.execute("SELECT line FROM batch_lines WHERE tenant = ? AND batch = ?", (tenant, id))
    return [row[0] for row in rows]


def record(
    connection: sqlite3.Connection, tenant: str, id: str, line: int, failed: bool, result: bytes, quota: int
) -> bool:
    """The result of a line, once. Whether there is room for more: bytes of the tenant's files and of this batch's results
    against `quota`."""
    has_one = "SELECT 1 FROM batch_lines WHERE tenant = ? AND batch = ? AND line = ?"
    found = find(connection, tenant, id)
    if found is None or found.status in ENDS or connection.execute(has_one, (tenant, id, line)).fetchone():
        return True
    connection.execute(
        "INSERT INTO batch_lines (tenant, batch, line, failed, result) VALUES (?, ?, ?, ?, ?)",
        (tenant, id, line, failed, result),
    )
    size = found.bytes + len(result) + 1
    counts = {"completed": found.completed + (not failed), "failed": found.failed + failed, "bytes": size}
    _set(connection, tenant, found, counts)
    return files.stored_bytes(connection, tenant) + size <= quota


def results(
    connection: sqlite3.Connection, tenant: str, id: str, failed: bool, after: int, limit: int
) -> list[tuple[int, bytes]]:
    """(line, result) behind a line, in their order, of those that failed or of those that did not."""
    rows = connection.execute(
        "SELECT line, result FROM batch_lines WHERE tenant = ? AND batch = ? AND line > ? AND failed = ? "
        "ORDER BY line LIMIT ?",
        (tenant, id, after, failed, limit),
    )
    return rows.fetchall()


def end(
    connection: sqlite3.Connection,
    tenant: str,
    id: str,
    status: str,
    now: float,
    output: StoredFile | None = None,
    rejects: StoredFile | None = None,
    **changes: Any,
) -> StoredBatch | None:
    """The last status, with the rows of its files and other columns. Raises APIError conflict: it has one."""
    found = find(connection, tenant, id)
    if found is None or found.status in ENDS:
        raise APIError("conflict", "This batch has ended.")
    for file in (output, rejects):
        if file is not None:
            files.add(connection, tenant, file)
    ids = {"output_file": output and output.id, "error_file": rejects and rejects.id}
    return move(connection, tenant, id, status, now, **ids, **changes)


def clear(connection: sqlite3.Connection, tenant: str, id: str) -> bool:
    """Delete some rows of lines of a batch that has its last status; whether all are gone, which is noted."""
    rows = connection.execute(
        "DELETE FROM batch_lines WHERE tenant = ? AND batch = ? AND line <= (SELECT coalesce(min(line), 0) + ? "
        "FROM batch_lines WHERE tenant = ? AND batch = ?)",
        (tenant, id, CLEARED_AT_ONCE, tenant, id),
    )
    if rows.rowcount:
        return False
    connection.execute("UPDATE batches SET ended = 1 WHERE tenant = ? AND id = ?", (tenant, id))
    return True
