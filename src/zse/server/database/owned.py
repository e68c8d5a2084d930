"""A table whose rows tenants own: how they are found, listed, added, deleted and bounded, whatever they are. The methods take
the connection: hand them to Database.run()."""

import math
import sqlite3
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


class OwnedTable(Generic[Row]):
    """Where a method takes `now`, rows that have expired by then are not there; None: they do not expire.

    Args:
        name: of the table.
        row: a NamedTuple of its columns but those of the tenant, the body and what only statements ask for.
        key: the column that names one of a tenant's rows.
        order: the column by which lists go.
        oldest: the columns by which rows go first to make room.
    """

    def __init__(self, name: str, row: type[Row], key: str = "id", order: str = "created", oldest: str = ""):
        self._name, self._key, self._order, self._oldest = name, key, order, oldest
        self._row: Callable[..., Row] = row
        self.fields: tuple[str, ...] = row._fields  # type: ignore[attr-defined]
        self.columns = ", ".join(self.fields)

    def _selected(self, connection: sqlite3.Connection, columns: str, tenant: str, id: str, now: float | None) -> Any:
        alive, values = ("", ()) if now is None else (" AND expires > ?", (now,))
        query = f"SELECT {columns} FROM {self._name} WHERE tenant = ? AND {self._key} = ?{alive}"
        return connection.execute(query, (tenant, id, *values)).fetchone()

    def find(self, connection: sqlite3.Connection, tenant: str, id: str, now: float | None = None) -> Row | None:
        """The tenant's row of that id."""
        row = self._selected(connection, self.columns, tenant, id, now)
        return None if row is None else self._row(*row)

    def find_whole(
        self, connection: sqlite3.Connection, tenant: str, id: str, now: float | None = None
    ) -> tuple[Row, bytes] | None:
        """The same with its body, JSON."""
        row = self._selected(connection, f"{self.columns}, body", tenant, id, now)
        return None if row is None else (self._row(*row[:-1]), row[-1])

    def listed(
        self,
        connection: sqlite3.Connection,
        tenant: str,
        limit: int,
        after: str | None,
        now: float | None = None,
        order: str = "desc",
        where: str = "1",
        values: tuple = (),
    ) -> list[Row] | None:
        """At most so many of which `where` (SQL, with its values) is true, the last first ("desc") or last ("asc"), behind the
        one of the id `after`. None: there is none of that id."""
        start = (math.inf if order == "desc" else -math.inf, "")
        if after is not None:
            found = self.find(connection, tenant, after, now)
            if found is None:
                return None
            start = (getattr(found, self._order), after)
        if now is not None:
            where, values = f"expires > ? AND {where}", (now, *values)
        rows = connection.execute(
            f"SELECT {self.columns} FROM {self._name} WHERE tenant = ? "
            f"AND ({self._order}, id) {'<' if order == 'desc' else '>'} (?, ?) AND ({where}) "
            f"ORDER BY {self._order} {order}, id {order} LIMIT ?",
            (tenant, *start, *values, limit),
        )
        return [self._row(*row) for row in rows]

    def add(self, connection: sqlite3.Connection, tenant: str, row: Any, **more: Any) -> None:
        """more: other columns."""
        columns = (*more, *self.fields)
        query = f"INSERT INTO {self._name} (tenant, {', '.join(columns)}) VALUES (?{', ?' * len(columns)})"
        connection.execute(query, (tenant, *more.values(), *row))

    def delete(self, connection: sqlite3.Connection, tenant: str, id: str, now: float | None = None) -> bool:
        """Whether it was there."""
        alive, values = ("", ()) if now is None else (" AND expires > ?", (now,))
        query = f"DELETE FROM {self._name} WHERE tenant = ? AND {self._key} = ?{alive}"
        return connection.execute(query, (tenant, id, *values)).rowcount > 0

    def expire(self, connection: sqlite3.Connection, now: float) -> None:
        connection.execute(f"DELETE FROM {self._name} WHERE expires <= ?", (now,))

    def size(self, connection: sqlite3.Connection, tenant: str) -> int:
        """Bytes of all of the tenant's."""
        query = "SELECT bytes FROM stored WHERE tenant = ? AND kind = ?"
        row = connection.execute(query, (tenant, self._name)).fetchone()
        return 0 if row is None else row[0]

    def make_room(self, connection: sqlite3.Connection, tenant: str, most: int) -> None:
        """Delete the oldest rows until at most so many bytes are left."""
        query = f"SELECT {self._key}, size FROM {self._name} WHERE tenant = ? ORDER BY {self._oldest} LIMIT 64"
        over = self.size(connection, tenant) - most
        while over > 0 and (oldest := connection.execute(query, (tenant,)).fetchall()):
            for id, freed in oldest:
                if over > 0:
                    self.delete(connection, tenant, id)
                    over -= freed
