"""The web page's chats, by tenant: a document each, whose version tells who was first. The functions take the
connection: hand them to Database.run()."""

import math
import sqlite3
from typing import NamedTuple

from zse.server.database.room import Owned, make_room
from zse.server.errors import APIError

MOST_BYTES = 256 << 20  # of one tenant; those that were not changed for longest go to make room


class ChatCard(NamedTuple):
    """What is known of a chat beside its messages. version: one more with each change; size: bytes of its messages. Times
    in seconds since 1970."""

    id: str
    version: int
    title: str
    created: float
    changed: float
    size: int


_COLUMNS = ", ".join(ChatCard._fields)
_OWNED = Owned(
    "SELECT bytes FROM stored WHERE tenant = ? AND kind = 'chats'",
    "SELECT id, size FROM chats WHERE tenant = ? ORDER BY changed, id LIMIT 64",
    "DELETE FROM chats WHERE tenant = ? AND id = ?",
)


def find(connection: sqlite3.Connection, tenant: str, id: str) -> tuple[ChatCard, bytes] | None:
    """The tenant's chat of that id and its messages, JSON."""
    row = connection.execute(f"SELECT {_COLUMNS}, body FROM chats WHERE tenant = ? AND id = ?", (tenant, id)).fetchone()
    return None if row is None else (ChatCard(*row[:-1]), row[-1])


def listed(
    connection: sqlite3.Connection, tenant: str, limit: int, after: str | None, search: str
) -> list[ChatCard] | None:
    """At most so many whose title holds `search` in whatever case, the last changed first, behind the one of the id
    `after`. None: there is none of that id."""
    start = (math.inf, "")
    if after is not None:
        found = find(connection, tenant, after)
        if found is None:
            return None
        start = (found[0].changed, after)
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM chats WHERE tenant = ? AND (changed, id) < (?, ?) AND instr(folded, ?) > 0 "
        "ORDER BY changed DESC, id DESC LIMIT ?",
        (tenant, *start, search.casefold(), limit),
    )
    return [ChatCard(*row) for row in rows]


def store(
    connection: sqlite3.Connection,
    tenant: str,
    id: str,
    version: int,
    title: str | None,
    body: bytes | None,
    now: float,
) -> ChatCard:
    """Make or change a chat. version: the one that is changed, 0 of a new chat; title, body: None as they are. Raises
    APIError: conflict, where it has another version; not_found, where there is none and the version is not 0."""
    found = find(connection, tenant, id)
    if found is None and version:
        raise APIError("not_found", "There is no such chat.")
    if found is not None and found[0].version != version:
        raise APIError(
            "conflict", f"The chat was changed: its version is {found[0].version}, not {version}.", "version"
        )
    if found is None:
        card, old = ChatCard(id, 0, "", now, now, 0), b"[]"
    else:
        card, old = found
    kept = old if body is None else body
    if len(kept) > MOST_BYTES:
        raise APIError("request_too_large", f"A chat of {len(kept)} bytes is not kept; at most {MOST_BYTES} are.")
    card = card._replace(
        version=version + 1,
        title=card.title if title is None else title,
        changed=now if body is not None else card.changed,
        size=len(kept),
    )
    connection.execute(_OWNED.delete, (tenant, id))
    connection.execute(
        f"INSERT INTO chats (tenant, folded, body, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (tenant, card.title.casefold(), kept, *card),
    )
    make_room(connection, tenant, _OWNED, MOST_BYTES)
    return card


def delete(connection: sqlite3.Connection, tenant: str, id: str) -> bool:
    """Whether it was there."""
    return connection.execute(_OWNED.delete, (tenant, id)).rowcount > 0
