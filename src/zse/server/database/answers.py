"""Answers to requests with an Idempotency-Key, by tenant. The functions take the connection: hand them to
Database.run()."""

import sqlite3
from typing import NamedTuple

from zse.server.database.owned import OwnedTable

KEPT_S = 86400.0
MOST_BYTES = 64 << 20  # of one tenant; the oldest go to make room


class KeptAnswer(NamedTuple):
    """Of a request that had succeeded. digest: of its route and body; media_type, body: of the answer."""

    digest: bytes
    media_type: str
    body: bytes


_TABLE = OwnedTable("answers", KeptAnswer, key="key", oldest="expires")
find = _TABLE.find  # the tenant's answer of that key


def keep(connection: sqlite3.Connection, tenant: str, key: str, answer: KeptAnswer, now: float) -> None:
    """One that is larger than MOST_BYTES is not kept."""
    if len(answer.body) > MOST_BYTES:
        return
    _TABLE.expire(connection, now)
    _TABLE.delete(connection, tenant, key)  # of another server with this database
    _TABLE.add(connection, tenant, answer, key=key, expires=now + KEPT_S, size=len(answer.body))
    _TABLE.make_room(connection, tenant, MOST_BYTES)
