"""Answers to requests with an Idempotency-Key, by tenant. The functions take the connection: hand them to
Database.run()."""

import sqlite3
from typing import NamedTuple

from zse.server.database.room import Owned, make_room

KEPT_S = 86400.0
MOST_BYTES = 64 << 20  # of one tenant; the oldest go to make room


class KeptAnswer(NamedTuple):
    """Of a request that had succeeded. digest: of its route and body; media_type, body: of the answer."""

    digest: bytes
    media_type: str
    body: bytes


_OWNED = Owned(
    "SELECT bytes FROM stored WHERE tenant = ? AND kind = 'answers'",
    "SELECT key, size FROM answers WHERE tenant = ? ORDER BY expires LIMIT 64",
    "DELETE FROM answers WHERE tenant = ? AND key = ?",
)


def find(connection: sqlite3.Connection, tenant: str, key: str, now: float) -> KeptAnswer | None:
    """The tenant's answer of that key."""
    row = connection.execute(
        "SELECT digest, media_type, body FROM answers WHERE tenant = ? AND key = ? AND expires > ?", (tenant, key, now)
    ).fetchone()
    return None if row is None else KeptAnswer(*row)


def keep(connection: sqlite3.Connection, tenant: str, key: str, answer: KeptAnswer, now: float) -> None:
    """One that is larger than MOST_BYTES is not kept."""
    if len(answer.body) > MOST_BYTES:
        return
    connection.execute("DELETE FROM answers WHERE expires <= ?", (now,))
    connection.execute(_OWNED.delete, (tenant, key))  # of another server with this database
    connection.execute(
        "INSERT INTO answers (tenant, key, expires, size, digest, media_type, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (tenant, key, now + KEPT_S, len(answer.body), *answer),
    )
    make_room(connection, tenant, _OWNED, MOST_BYTES)
