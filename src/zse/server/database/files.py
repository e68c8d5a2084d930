"""Rows of files, by tenant; their contents stand in a folder (zse.server.files). The functions take the connection: hand
them to Database.run()."""

import math
import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from zse.server.errors import APIError

MAX_FILES = 10_000  # of one tenant


class StoredFile(NamedTuple):
    """id: also the name of its content. expires: infinite: never. size in bytes, digest: SHA-256 of the content.
    filename: as its client named it, without folders. Times in seconds since 1970."""

    id: str
    created: float
    expires: float
    size: int
    filename: str
    purpose: str
    digest: bytes


_COLUMNS = ", ".join(StoredFile._fields)


def stored_bytes(connection: sqlite3.Connection, tenant: str) -> int:
    """Of all files of the tenant."""
    row = connection.execute("SELECT bytes FROM stored WHERE tenant = ? AND kind = 'files'", (tenant,)).fetchone()
    return 0 if row is None else row[0]


def too_much(quota: int) -> APIError:
    return APIError(
        "request_too_large", f"The files of a key's tenant may have {quota} bytes together; delete some.", "file"
    )


def add(connection: sqlite3.Connection, tenant: str, file: StoredFile, quota: int | None = None) -> None:
    """quota: bytes that the tenant's files may have together; None: it is not asked. Raises APIError
    request_too_large."""
    if quota is not None:
        if stored_bytes(connection, tenant) + file.size > quota:
            raise too_much(quota)
        if connection.execute("SELECT count(*) FROM files WHERE tenant = ?", (tenant,)).fetchone()[0] >= MAX_FILES:
            raise APIError("request_too_large", f"A tenant may have {MAX_FILES} files; delete some.", "file")
    connection.execute(f"INSERT INTO files (tenant, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (tenant, *file))


def find(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> StoredFile | None:
    """The tenant's file of that id."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND id = ? AND expires > ?", (tenant, id, now)
    ).fetchone()
    return None if row is None else StoredFile(*row)


def listed(
    connection: sqlite3.Connection,
    tenant: str,
    now: float,
    limit: int,
    order: str,
    after: str | None,
    purpose: str | None,
) -> list[StoredFile] | None:
    """At most so many, in the order of their making or ("desc") the last first, behind the one of the id `after`. None:
    there is none of that id."""
    is_last_first = order == "desc"
    start = (math.inf if is_last_first else -math.inf, "")
    if after is not None:
        found = find(connection, tenant, after, now)
        if found is None:
            return None
        start = (found.created, after)
    beyond, direction = ("<", "DESC") if is_last_first else (">", "ASC")
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND (created, id) {beyond} (?, ?) AND expires > ? "
        f"AND purpose GLOB ? ORDER BY created {direction}, id {direction} LIMIT ?",
        (tenant, *start, now, purpose or "*", limit),
    )
    return [StoredFile(*row) for row in rows]


def delete(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> bool:
    """Whether it was there. Raises APIError conflict: a batch reads it."""
    batch = connection.execute(
        "SELECT id FROM batches WHERE tenant = ? AND input_file = ? AND ended = 0", (tenant, id)
    ).fetchone()
    if batch is not None:
        raise APIError("conflict", f"The batch {batch[0]} reads this file; cancel it, or wait until it has ended.")
    statement = "DELETE FROM files WHERE tenant = ? AND id = ? AND expires > ?"
    return connection.execute(statement, (tenant, id, now)).rowcount > 0


def expire(connection: sqlite3.Connection, now: float) -> list[str]:
    """Delete the rows of files that have expired, except those that batches read; their ids."""
    gone = []
    for tenant, id in connection.execute("SELECT tenant, id FROM files WHERE expires <= ?", (now,)).fetchall():
        try:
            delete(connection, tenant, id, -math.inf)
        except APIError:
            continue
        gone.append(id)
    return gone


def unknown(connection: sqlite3.Connection, names: Iterable[str]) -> list[str]:
    """Those of some ids that no row has."""
    known = {row[0] for row in connection.execute("SELECT id FROM files")}
    return [name for name in names if name not in known]
