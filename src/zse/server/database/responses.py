"""Answers of the Responses API that were asked to be kept, by tenant. The functions take the connection: hand them to
Database.run().

A row has what its request brought (`items`) and the id of the response that it went on from, so that a conversation is
kept once."""

import sqlite3
from typing import NamedTuple

from zse.server.database.room import Owned, make_room
from zse.server.errors import APIError

KEPT_S = 30 * 86400.0  # since the last response that went on from it
MOST_BYTES = 64 << 20  # of one tenant; the oldest go to make room
CONVERSATION_BYTES = 2 << 20  # that a response may go on from, as much as a body has by default


class StoredResponse(NamedTuple):
    """body: the answer, JSON; items: the items of its request, JSON. previous: the id of the response before it, or "".
    Times in seconds since 1970."""

    id: str
    previous: str
    created: float
    body: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items)


_COLUMNS = ", ".join(StoredResponse._fields)
_FIND = f"SELECT {_COLUMNS} FROM responses WHERE tenant = ? AND id = ? AND expires > ?"

_OWNED = Owned(
    "SELECT bytes FROM stored WHERE tenant = ? AND kind = 'responses'",
    "SELECT id, size FROM responses WHERE tenant = ? ORDER BY expires, created LIMIT 64",
    "DELETE FROM responses WHERE tenant = ? AND id = ?",
)


def store(connection: sqlite3.Connection, tenant: str, response: StoredResponse, now: float) -> None:
    """Keep it, and those that it goes on from as long. Raises APIError request_too_large."""
    if response.size > MOST_BYTES:
        message = f"A response of {response.size} bytes is not stored; at most {MOST_BYTES} are."
        raise APIError("request_too_large", message, "store")
    connection.execute("DELETE FROM responses WHERE expires <= ?", (now,))
    connection.execute(
        f"INSERT INTO responses (tenant, size, expires, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (tenant, response.size, now + KEPT_S, *response),
    )
    previous = response.previous
    while previous:
        row = connection.execute(
            "UPDATE responses SET expires = ? WHERE tenant = ? AND id = ? RETURNING previous",
            (now + KEPT_S, tenant, previous),
        ).fetchone()
        previous = row[0] if row else ""
    make_room(connection, tenant, _OWNED, MOST_BYTES)


def find(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> StoredResponse | None:
    """The tenant's response of that id."""
    row = connection.execute(_FIND, (tenant, id, now)).fetchone()
    return None if row is None else StoredResponse(*row)


def conversation(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> list[StoredResponse]:
    """The response and those that it went on from, the oldest first: as far back as they are there, and until there are
    more than CONVERSATION_BYTES."""
    out: list[StoredResponse] = []
    size = 0
    while id and size <= CONVERSATION_BYTES and (found := find(connection, tenant, id, now)) is not None:
        out.append(found)
        id, size = found.previous, size + found.size
    return out[::-1]


def delete(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> bool:
    """Whether it was there."""
    statement = "DELETE FROM responses WHERE tenant = ? AND id = ? AND expires > ?"
    return connection.execute(statement, (tenant, id, now)).rowcount > 0
