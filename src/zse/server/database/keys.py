"""API keys in the database: made, changed, ended. A key is shown once, when it is made; the file has its HMAC.

Every change has a line in the audit log. The functions take the connection: hand them to Database.submit(), run() or
now()."""

import binascii
import os
import sqlite3
import time
from typing import Any

import msgspec

from zse.errors import ConfigError
from zse.sampling.fields import shown
from zse.server.auth import SECRET_BYTES, digest_of
from zse.server.database.connection import Database
from zse.server.keys import MAX_KEYS, Access, Key, Quota

PREFIX, SHOWN = "zse-", 12  # what a key begins with; how many of its characters are kept to tell it by
FIRST = "admin"  # the name of the key that the first start makes
# What create() and change() may set.
CHANGEABLE = tuple(
    "tenant expires admin models routes weight rpm tpm concurrency input_price cached_price output_price".split()
)


class KeyRefused(ConfigError):
    """A change that cannot be. code: of the API's errors."""

    code: str

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class StoredKey(msgspec.Struct, frozen=True):
    """A row. models, routes: None: all. Prices: of a million tokens; cached_price None: as input_price. Times in
    seconds since
    1970. weight None: 1, or what --tenant-weight says."""

    id: int
    name: str
    tenant: str
    prefix: str
    digest: bytes
    created: float
    expires: float | None
    revoked: float | None
    admin: bool
    models: tuple[str, ...] | None
    routes: tuple[str, ...] | None
    weight: float | None
    rpm: int
    tpm: int
    concurrency: int
    input_price: float
    cached_price: float | None
    output_price: float

    def state(self, now: float) -> str:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "valid"

    def public(self, now: float) -> dict[str, Any]:
        """What is shown of it."""
        return {"state": self.state(now)} | {
            name: getattr(self, name) for name in self.__struct_fields__ if name not in ("digest", "id")
        }

    @property
    def key(self) -> Key:
        """As requests meet it."""
        models, routes = (None if names is None else frozenset(names) for names in (self.models, self.routes))
        quota, access = Quota(self.rpm, self.tpm, self.concurrency), Access(self.admin, models, routes)
        return Key(self.tenant, "", self.weight, quota, access, self.expires, self.name, self.id, self.digest)


_COLUMNS = StoredKey.__struct_fields__


class Keyring(msgspec.Struct, frozen=True):
    """The keys that were not revoked in a version of the database, by Database.version(), and the secret of their
    digests."""

    version: tuple[int, int]
    secret: bytes
    valid: tuple[Key, ...]


def read(database: Database, connection: sqlite3.Connection) -> Keyring:
    """What a server needs of them: made here, on the database's thread, because thousands take 30 ms."""
    connection.execute("BEGIN")  # one state of the file
    try:
        valid = tuple(key.key for key in listed(connection, "revoked IS NULL"))
        return Keyring(database.version(connection), secret(connection), valid)
    finally:
        connection.execute("ROLLBACK")


def secret(connection: sqlite3.Connection) -> bytes:
    """Of this file's digests; made with the first use."""
    row = connection.execute("SELECT value FROM secrets WHERE name = 'keys'").fetchone()
    if row is not None:
        return row[0]
    made = os.urandom(SECRET_BYTES)
    connection.execute("INSERT INTO secrets (name, value) VALUES ('keys', ?)", (made,))
    return made


def listed(connection: sqlite3.Connection, where: str = "1", *values: object) -> tuple[StoredKey, ...]:
    """All keys, the oldest first. where: of SQL, with its values: those of which it is true."""
    rows = connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM keys WHERE {where} ORDER BY id", values).fetchall()
    return tuple(map(_key, rows))


def _key(row: tuple) -> StoredKey:
    values = dict(zip(_COLUMNS, row, strict=True))
    for name in ("models", "routes"):
        values[name] = None if values[name] is None else tuple(msgspec.json.decode(values[name]))
    return StoredKey(**values | {"admin": bool(values["admin"])})


def prepare(connection: sqlite3.Connection, makes_admin: bool) -> str:
    """Of a server's start: the secret; and with makes_admin, where there never was a key, one for the administrator.
    Its text; else ""."""
    secret(connection)
    if not makes_admin or connection.execute("SELECT 1 FROM keys").fetchone():
        return ""
    return create(connection, FIRST, "server", admin=True)[1]


def find(connection: sqlite3.Connection, name: str) -> StoredKey:
    """The key of that name, or whose shown beginning it is. Raises KeyRefused."""
    found = listed(connection, "name = ?", name) or listed(connection, "prefix = ?", name)
    if not found:
        raise KeyRefused("not_found", f"there is no key {shown(name)!r}")
    return found[0]


def create(connection: sqlite3.Connection, name: str, actor: str, **values: Any) -> tuple[StoredKey, str]:
    """A new key, and its text, which is nowhere else. values: of CHANGEABLE; the tenant is the name where they have
    none. Raises KeyRefused for a name that is taken, and for too many keys."""
    now = time.time()
    if listed(connection, "name = ?", name):
        raise KeyRefused("conflict", f"there is, or was, a key {name!r}; take another name, or rotate it")
    is_valid = "revoked IS NULL AND (expires IS NULL OR expires > ?)"
    if connection.execute(f"SELECT count(*) FROM keys WHERE {is_valid}", (now,)).fetchone()[0] >= MAX_KEYS:
        raise KeyRefused("conflict", f"there are {MAX_KEYS} keys already; revoke one first")
    text = _text()
    row = {"name": name, "created": now} | _fresh(connection, text) | _stored({"tenant": name} | values)
    places = ", ".join("?" * len(row))
    connection.execute(f"INSERT INTO keys ({', '.join(row)}) VALUES ({places})", tuple(row.values()))
    note(connection, actor, "keys.create", name, values)
    return find(connection, name), text


def _text() -> str:
    """256 random bits, of letters, digits, - and _. (The module secrets costs a start 4 ms.)"""
    text = binascii.b2a_base64(os.urandom(32), newline=False).decode()
    return PREFIX + text.rstrip("=").replace("+", "-").replace("/", "_")


def _fresh(connection: sqlite3.Connection, text: str) -> dict:
    return {"prefix": text[:SHOWN], "digest": digest_of(secret(connection), text)}


def _stored(values: dict) -> dict:
    assert values.keys() <= {*CHANGEABLE}, values
    return {
        name: msgspec.json.encode(sorted(value)).decode()
        if name in ("models", "routes") and value is not None
        else value
        for name, value in values.items()
    }


def change(connection: sqlite3.Connection, name: str, actor: str, **values: Any) -> StoredKey:
    """Set some of CHANGEABLE. Raises KeyRefused."""
    key, row = find(connection, name), _stored(values)
    if row:
        settings = ", ".join(f"{column} = ?" for column in row)
        connection.execute(f"UPDATE keys SET {settings} WHERE id = ?", (*row.values(), key.id))
        note(connection, actor, "keys.update", key.name, values)
    return find(connection, key.name)


def revoke(connection: sqlite3.Connection, name: str, actor: str) -> StoredKey:
    """From now on it is not valid; its usage stays. Raises KeyRefused."""
    key = find(connection, name)
    if key.revoked is None:
        connection.execute("UPDATE keys SET revoked = ? WHERE id = ?", (time.time(), key.id))
        note(connection, actor, "keys.revoke", key.name, {})
    return find(connection, key.name)


def rotate(connection: sqlite3.Connection, name: str, actor: str) -> tuple[StoredKey, str]:
    """A new text for it: the old one is not valid any more. Raises KeyRefused, also for one that was revoked."""
    key = find(connection, name)
    if key.revoked is not None:
        raise KeyRefused("conflict", f"the key {key.name!r} was revoked; make another one")
    text = _text()
    connection.execute(
        "UPDATE keys SET prefix = ?, digest = ? WHERE id = ?", (*_fresh(connection, text).values(), key.id)
    )
    note(connection, actor, "keys.rotate", key.name, {})
    return find(connection, key.name), text


class AuditLine(msgspec.Struct, frozen=True):
    """Who changed which key and how. at: seconds since 1970."""

    id: int
    at: float
    actor: str
    action: str
    subject: str
    detail: dict[str, Any]


_AUDIT = AuditLine.__struct_fields__


def audit(connection: sqlite3.Connection, last: int, before: int | None = None) -> list[AuditLine]:
    """The last lines of the audit log, the latest first. before: an id, of which only earlier lines are wanted."""
    rows = connection.execute(
        f"SELECT {', '.join(_AUDIT)} FROM audit WHERE id < ? ORDER BY id DESC LIMIT ?",
        (1 << 62 if before is None else before, last),
    )
    return [AuditLine(**dict(zip(_AUDIT, (*row[:-1], msgspec.json.decode(row[-1])), strict=True))) for row in rows]


def note(connection: sqlite3.Connection, actor: str, action: str, subject: str, detail: dict) -> None:
    """A line of the audit log. actor: "cli", "server", or tenant/name of an admin's key."""
    connection.execute(
        "INSERT INTO audit (at, actor, action, subject, detail) VALUES (?, ?, ?, ?, ?)",
        (time.time(), actor, action, subject, msgspec.json.encode(detail).decode()),
    )
