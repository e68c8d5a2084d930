"""Conversations of requests with a session_id, by tenant. The functions take the connection: hand them to
Database.run()."""

import math
import sqlite3
from typing import NamedTuple

from zse.server.database.room import Owned, make_room
from zse.server.errors import APIError

MOST_BYTES = 64 << 20  # of one tenant; those that were not used for longest go to make room
SESSION_BYTES = 2 << 20  # that a request may go on from, as much as a body has by default


class SessionCard(NamedTuple):
    """What is known of a session beside its conversation. turns: requests that it has answered; size: bytes of its
    conversation. Times in seconds since 1970."""

    id: str
    turns: int
    created: float
    used: float
    expires: float
    size: int


_COLUMNS = ", ".join(SessionCard._fields)
_OWNED = Owned(
    "SELECT bytes FROM stored WHERE tenant = ? AND kind = 'sessions'",
    "SELECT id, size FROM sessions WHERE tenant = ? ORDER BY used, id LIMIT 64",
    "DELETE FROM sessions WHERE tenant = ? AND id = ?",
)


def find(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> tuple[SessionCard, bytes] | None:
    """The tenant's session of that id and its conversation, JSON."""
    row = connection.execute(
        f"SELECT {_COLUMNS}, body FROM sessions WHERE tenant = ? AND id = ? AND expires > ?", (tenant, id, now)
    ).fetchone()
    return None if row is None else (SessionCard(*row[:-1]), row[-1])


def listed(
    connection: sqlite3.Connection, tenant: str, now: float, limit: int, after: str | None
) -> list[SessionCard] | None:
    """At most so many, the last used first, behind the one of the id `after`. None: there is none of that id."""
    start = (math.inf, "")
    if after is not None:
        found = find(connection, tenant, after, now)
        if found is None:
            return None
        start = (found[0].used, after)
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM sessions WHERE tenant = ? AND (used, id) < (?, ?) AND expires > ? "
        "ORDER BY used DESC, id DESC LIMIT ?",
        (tenant, *start, now, limit),
    )
    return [SessionCard(*row) for row in rows]


def store(
    connection: sqlite3.Connection, tenant: str, id: str, body: bytes, turns: int, now: float, expires: float
) -> None:
    """Keep the conversation behind one more turn. turns: that it had when it was read. Raises APIError conflict: another
    server that has this database answered it meanwhile."""
    row = connection.execute("SELECT turns, created, expires FROM sessions WHERE tenant = ? AND id = ?", (tenant, id))
    had, created, ended = row.fetchone() or (turns, now, expires)
    if had != turns and (turns or ended > now):  # one that has expired counts for none
        raise APIError("conflict", "The session was changed while this request was answered.", "session_id")
    connection.execute(_OWNED.delete, (tenant, id))
    connection.execute("DELETE FROM sessions WHERE expires <= ?", (now,))
    connection.execute(
        f"INSERT INTO sessions (tenant, body, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (tenant, body, id, turns + 1, created if turns else now, now, expires, len(body)),
    )
    make_room(connection, tenant, _OWNED, MOST_BYTES)


def delete(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> bool:
    """Whether it was there."""
    statement = "DELETE FROM sessions WHERE tenant = ? AND id = ? AND expires > ?"
    return connection.execute(statement, (tenant, id, now)).rowcount > 0
