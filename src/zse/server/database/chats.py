"""The web page's chats, by tenant: a document each, whose version tells who was first. The functions take the
connection: hand them to Database.run()."""

import sqlite3
from typing import NamedTuple

from zse.server.database.owned import OwnedTable
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


_TABLE = OwnedTable("chats", ChatCard, order="changed", oldest="changed, id")
find, delete = _TABLE.find_whole, _TABLE.delete


def listed(
    connection: sqlite3.Connection, tenant: str, limit: int, after: str | None, search: str
) -> list[ChatCard] | None:
    """As OwnedTable.listed; search: what titles hold, in whatever case."""
    return _TABLE.listed(connection, tenant, limit, after, where="instr(folded, ?) > 0", values=(search.casefold(),))


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
    _TABLE.delete(connection, tenant, id)
    _TABLE.add(connection, tenant, card, folded=card.title.casefold(), body=kept)
    _TABLE.make_room(connection, tenant, MOST_BYTES)
    return card
