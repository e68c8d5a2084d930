"""API keys in the database: made, changed, ended. A key is shown once, when it is made; the file has its HMAC.

Every change is acknowledged when it is on the disk, with a line in the audit log. The functions take the connection: hand them to
Database.submit(), run() or now().
"""

import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import time
from typing import Any

import msgspec

from zse.errors import ConfigError
from zse.server.keys import Access, Quota

PREFIX, SHOWN = "zse-", 12  # of a key: what it begins with; how many of its characters are kept to tell it by
SECRET_BYTES = 32
_COLUMNS = (
    *(
        "id",
        "name",
        "tenant",
        "prefix",
        "digest",
        "created",
        "expires",
        "revoked",
        "admin",
        "models",
        "routes",
        "weight",
    ),
    *("rpm", "tpm", "concurrency", "input_price", "output_price"),
)
# What `change` may set.
CHANGEABLE = (
    "tenant",
    "expires",
    "admin",
    "models",
    "routes",
    "weight",
    "rpm",
    "tpm",
    "concurrency",
    "input_price",
    "output_price",
)


class StoredKey(msgspec.Struct, frozen=True):
    """A row. models, routes: None: all. Prices: of a million tokens. Times in seconds since 1970."""

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
    output_price: float

    @property
    def quota(self) -> Quota:
        return Quota(self.rpm, self.tpm, self.concurrency)

    @property
    def access(self) -> Access:
        models, routes = (None if names is None else frozenset(names) for names in (self.models, self.routes))
        return Access(self.admin, models, routes)

    def ended(self, now: float) -> str:
        """Why it is not valid; "": it is."""
        if self.revoked is not None and self.revoked <= now:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else ""


def secret(connection: sqlite3.Connection) -> bytes:
    """Of this file's digests; made with the first use."""
    row = connection.execute("SELECT value FROM secrets WHERE name = 'keys'").fetchone()
    if row is not None:
        return row[0]
    made = os.urandom(SECRET_BYTES)
    connection.execute("INSERT INTO secrets (name, value) VALUES ('keys', ?)", (made,))
    return made


def digest_of(file_secret: bytes, key: str) -> bytes:
    return hmac.digest(file_secret, key.encode("latin-1"), hashlib.sha256)


def listed(connection: sqlite3.Connection) -> list[StoredKey]:
    """All keys, the oldest first."""
    rows = connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM keys ORDER BY id").fetchall()
    return [_key(row) for row in rows]


def _key(row: tuple) -> StoredKey:
    values = dict(zip(_COLUMNS, row, strict=True))
    for name in ("models", "routes"):
        values[name] = None if values[name] is None else tuple(json.loads(values[name]))
    return StoredKey(**values | {"admin": bool(values["admin"])})


def find(connection: sqlite3.Connection, name: str) -> StoredKey:
    """The key of that name, or whose shown prefix it is. Raises ConfigError."""
    found = [key for key in listed(connection) if name in (key.name, key.prefix)]
    if not found:
        raise ConfigError(f"there is no key {name!r}; `zse keys ls` shows them")
    return found[0]


def create(connection: sqlite3.Connection, name: str, tenant: str, actor: str, **values: Any) -> tuple[StoredKey, str]:
    """A new key, and its text, which is nowhere else. values: of CHANGEABLE. Raises ConfigError for a name that is taken."""
    if connection.execute("SELECT 1 FROM keys WHERE name = ?", (name,)).fetchone():
        raise ConfigError(f"there is a key {name!r} already; take another name, or `zse keys rotate {name}`")
    text = PREFIX + secrets.token_urlsafe(32)
    row = {"name": name, "tenant": tenant, "created": time.time()} | _fresh(connection, text) | _stored(values)
    places = ", ".join("?" * len(row))
    connection.execute(f"INSERT INTO keys ({', '.join(row)}) VALUES ({places})", tuple(row.values()))
    note(connection, actor, "keys.create", name, {"tenant": tenant} | {key: values[key] for key in values})
    return find(connection, name), text


def _fresh(connection: sqlite3.Connection, text: str) -> dict:
    return {"prefix": text[:SHOWN], "digest": digest_of(secret(connection), text)}


def _stored(values: dict) -> dict:
    unknown = values.keys() - set(CHANGEABLE)
    assert not unknown, unknown
    return {
        name: json.dumps(sorted(value)) if name in ("models", "routes") and value is not None else value
        for name, value in values.items()
    }


def change(connection: sqlite3.Connection, name: str, actor: str, **values: Any) -> StoredKey:
    """Set some of CHANGEABLE. Raises ConfigError."""
    key = find(connection, name)
    row = _stored(values)
    if row:
        settings = ", ".join(f"{column} = ?" for column in row)
        connection.execute(f"UPDATE keys SET {settings} WHERE id = ?", (*row.values(), key.id))
        note(connection, actor, "keys.update", key.name, values)
    return find(connection, key.name)


def revoke(connection: sqlite3.Connection, name: str, actor: str) -> StoredKey:
    """From now on it is not valid; its usage stays. Raises ConfigError."""
    key = find(connection, name)
    if key.revoked is None:
        connection.execute("UPDATE keys SET revoked = ? WHERE id = ?", (time.time(), key.id))
        note(connection, actor, "keys.revoke", key.name, {})
    return find(connection, key.name)


def rotate(connection: sqlite3.Connection, name: str, actor: str) -> tuple[StoredKey, str]:
    """A new text for it: the old one is not valid any more. Raises ConfigError, also for one that was revoked."""
    key = find(connection, name)
    if key.revoked is not None:
        raise ConfigError(f"the key {key.name!r} was revoked; make another one")
    text = PREFIX + secrets.token_urlsafe(32)
    fresh = _fresh(connection, text)
    connection.execute(
        "UPDATE keys SET prefix = ?, digest = ? WHERE id = ?", (fresh["prefix"], fresh["digest"], key.id)
    )
    note(connection, actor, "keys.rotate", key.name, {})
    return find(connection, key.name), text


def note(connection: sqlite3.Connection, actor: str, action: str, subject: str, detail: dict) -> None:
    """A line of the audit log. actor: "cli", or tenant/name of an admin's key."""
    connection.execute(
        "INSERT INTO audit (at, actor, action, subject, detail) VALUES (?, ?, ?, ?, ?)",
        (time.time(), actor, action, subject, json.dumps(detail, default=list)),
    )
