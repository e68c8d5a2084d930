"""Answers of the Responses API that were asked to be kept, by tenant. The functions take the connection: hand them to
Database.run().

A row has what its request brought (`items`) and the id of the response that it went on from, so that a conversation is
kept once."""

import sqlite3
from typing import NamedTuple

from zse.server.database.owned import OwnedTable
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


_TABLE = OwnedTable("responses", StoredResponse, oldest="expires, created")
find, delete = _TABLE.find, _TABLE.delete


def store(connection: sqlite3.Connection, tenant: str, response: StoredResponse, now: float) -> None:
    """Keep it, and those that it goes on from as long. Raises APIError request_too_large."""
    if response.size > MOST_BYTES:
        message = f"A response of {response.size} bytes is not stored; at most {MOST_BYTES} are."
        raise APIError("request_too_large", message, "store")
    _TABLE.expire(connection, now)
    _TABLE.add(connection, tenant, response, size=response.size, expires=now + KEPT_S)
    previous = response.previous
    while previous:
        row = connection.execute(
            "UPDATE responses SET expires = ? WHERE tenant = ? AND id = ? RETURNING previous",
            (now + KEPT_S, tenant, previous),
        ).fetchone()
        previous = row[0] if row else ""
    _TABLE.make_room(connection, tenant, MOST_BYTES)


def named(connection: sqlite3.Connection, tenant: str, ids: list[str], now: float) -> list[StoredResponse]:
    """Those of the ids that are there, until there are more than CONVERSATION_BYTES."""
    out: list[StoredResponse] = []
    size = 0
    for id in ids:
        if size <= CONVERSATION_BYTES and (found := find(connection, tenant, id, now)) is not None:
            out.append(found)
            size += found.size
    return out


def conversation(connection: sqlite3.Connection, tenant: str, id: str, now: float) -> list[StoredResponse]:
    """The response and those that it went on from, the oldest first: as far back as they are there, and until there are
    more than CONVERSATION_BYTES."""
    out: list[StoredResponse] = []
    size = 0
    while id and size <= CONVERSATION_BYTES and (found := find(connection, tenant, id, now)) is not None:
        out.append(found)
        id, size = found.previous, size + found.size
    return out[::-1]
