"""Rows of files, by tenant; their contents stand in a folder (zse.server.files). The functions take the connection: hand
them to Database.run()."""

import math
import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from zse.server.database.owned import OwnedTable
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


_TABLE = OwnedTable("files", StoredFile)
find, stored_bytes = _TABLE.find, _TABLE.size


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
    _TABLE.add(connection, tenant, file)


def listed(
    connection: sqlite3.Connection,
    tenant: str,
    now: float,
    limit: int,
    order: str,
    after: str | None,
    purpose: str | None,
) -> list[StoredFile] | None:
    """As OwnedTable.listed; purpose: only those for it."""
    return _TABLE.listed(connection, tenant, limit, after, now, order, "purpose GLOB ?", (purpose or "*",))


def delete(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> bool:
    """Whether it was there. Raises APIError conflict: a batch reads it."""
    batch = connection.execute(
        "SELECT id FROM batches WHERE tenant = ? AND input_file = ? AND ended = 0", (tenant, id)
    ).fetchone()
    if batch is not None:
        raise APIError("conflict", f"The batch {batch[0]} reads this file; cancel it, or wait until it has ended.")
    return _TABLE.delete(connection, tenant, id, now)


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
