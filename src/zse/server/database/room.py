"""How much of the database one tenant may fill."""

import sqlite3
from typing import NamedTuple


class Owned(NamedTuple):
    """Statements on the rows of a tenant. size: bytes of all; oldest: (id, size) of some, those that go first; delete:
    one, by tenant and id."""

    size: str
    oldest: str
    delete: str


def make_room(connection: sqlite3.Connection, tenant: str, rows: Owned, most: int) -> None:
    """Delete the oldest rows until at most so many bytes are left."""
    over = connection.execute(rows.size, (tenant,)).fetchone()[0] - most
    while over > 0 and (oldest := connection.execute(rows.oldest, (tenant,)).fetchall()):
        for id, freed in oldest:
            if over > 0:
                connection.execute(rows.delete, (tenant, id))
                over -= freed
