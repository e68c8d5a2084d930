"""Conversations of requests with a session_id, by tenant. The functions take the connection: hand them to
Database.run()."""

import sqlite3
from typing import NamedTuple

from zse.server.database.owned import OwnedTable
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


_TABLE = OwnedTable("sessions", SessionCard, order="used", oldest="used, id")
find, listed, delete = _TABLE.find_whole, _TABLE.listed, _TABLE.delete


def store(
    connection: sqlite3.Connection, tenant: str, id: str, body: bytes, turns: int, now: float, expires: float
) -> None:
    """Keep the conversation behind one more turn. turns: that it had when it was read. Raises APIError conflict: another
    server that has this database answered it meanwhile."""
    row = connection.execute("SELECT turns, created, expires FROM sessions WHERE tenant = ? AND id = ?", (tenant, id))
    had, created, ended = row.fetchone() or (turns, now, expires)
    if had != turns and (turns or ended > now):  # one that has expired counts for none
        raise APIError("conflict", "The session was changed while this request was answered.", "session_id")
    _TABLE.delete(connection, tenant, id)
    _TABLE.expire(connection, now)
    card = SessionCard(id, turns + 1, created if turns else now, now, expires, len(body))
    _TABLE.add(connection, tenant, card, body=body)
    _TABLE.make_room(connection, tenant, MOST_BYTES)
