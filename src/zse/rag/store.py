"""Documents with their chunks, words and vectors, by tenant. The functions take the connection: the server hands them to its
database's thread. Those that write run in one transaction, so that a document is there whole in one version, or not at all."""

import math
import sqlite3
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from zse.lazy import numpy as np
from zse.rag.documents import Chunk, DocumentError
from zse.rag.words import words_of

QUOTA_BYTES = 4 << 30  # of one tenant
MAX_CHUNKS = 100_000  # of one document
MARK = "\u00b7"  # between an owner's number and a word: a letter to the tokenizer, and in no word of words_of()
Scalar = str | int | float | bool


class NewDocument(msgspec.Struct):
    """digest: SHA-256 of the file, 32 bytes. options: how it was cut, any text. metadata: name → string, number or boolean."""

    id: str
    name: str
    kind: str
    title: str
    digest: bytes
    options: str
    file_bytes: int
    num_pages: int
    chunks: list[Chunk]
    metadata: dict[str, Scalar] = {}
    warnings: list[str] = []


class StoredDocument(msgspec.Struct):
    """As the table `documents` says it. row: of this version, in the whole file."""

    row: int
    id: str
    version: int
    name: str
    kind: str
    title: str
    digest: bytes
    options: str
    size: int
    file_bytes: int
    num_pages: int
    num_chunks: int
    num_tokens: int
    created: float
    updated: float
    metadata: dict[str, Scalar]
    warnings: list[str]
    vector_model: str
    num_embedded: int


class Added(msgspec.Struct):
    """outcome: "duplicate": the document is another one, which has the same bytes, and nothing was written; "unchanged": it is as it
    was before."""

    outcome: Literal["created", "replaced", "unchanged", "duplicate"]
    document: StoredDocument


class Unembedded(msgspec.Struct):
    """Chunks that lack vectors. first: position of the first."""

    tenant: str
    document: str
    version: int
    first: int
    texts: list[str]


_COLUMNS = ", ".join(StoredDocument.__struct_fields__)


def add(
    connection: sqlite3.Connection, tenant: str, new: NewDocument, now: float, quota_bytes: int = QUOTA_BYTES
) -> Added:
    """Store it as the next version of its id and drop the version before it; times in seconds since 1970.

    The same bytes under another id: a duplicate, unless a document of this id is there to be replaced. Raises DocumentError
    request_too_large: the tenant's documents would have more than quota_bytes, or it has more than MAX_CHUNKS."""
    before = find(connection, tenant, new.id)
    if before is None and (twin := find_content(connection, tenant, new.digest)) is not None:
        return Added("duplicate", twin)
    if before is not None and _is_same(before, new):
        return Added("unchanged", before)
    if len(new.chunks) > MAX_CHUNKS:
        message = (
            f"The document has {len(new.chunks)} chunks; at most {MAX_CHUNKS} are stored. Cut it into larger ones."
        )
        raise DocumentError(message, "request_too_large")
    metadata, warnings = msgspec.json.encode(new.metadata).decode(), msgspec.json.encode(new.warnings).decode()
    headings = [msgspec.json.encode(chunk.headings).decode() for chunk in new.chunks]
    size = sum(len(chunk.text.encode()) for chunk in new.chunks) + sum(map(len, headings))
    size += sum(len(text.encode()) for text in (new.id, new.name, new.title, new.options, metadata, warnings))
    owner = _grown(connection, tenant, size - (before.size if before else 0), quota_bytes)
    if before is not None:
        _drop(connection, tenant, before.row)
    version, created = (before.version + 1, before.created) if before else (1, now)
    cursor = connection.execute(
        "INSERT INTO documents (tenant, id, version, name, kind, title, digest, options, size, file_bytes, num_pages,"
        " num_chunks, num_tokens, created, updated, metadata, warnings, vector_model, num_embedded)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '', 0)",
        (tenant, new.id, version, new.name, new.kind, new.title, new.digest, new.options, size, new.file_bytes, new.num_pages)
        + (len(new.chunks), sum(chunk.num_tokens for chunk in new.chunks), created, now, metadata, warnings),
    )  # fmt: skip
    row = cursor.lastrowid
    assert row is not None
    _put_chunks(connection, tenant, owner, row, new, headings)
    connection.executemany(
        "INSERT INTO labels (tenant, name, value, document) VALUES (?, ?, ?, ?)",
        [(tenant, name, _json(value), row) for name, value in new.metadata.items()],
    )
    stored = find(connection, tenant, new.id)
    assert stored is not None
    return Added("replaced" if before else "created", stored)


def find(connection: sqlite3.Connection, tenant: str, id: str) -> StoredDocument | None:
    """The tenant's document of that id."""
    found = connection.execute(f"SELECT {_COLUMNS} FROM documents WHERE tenant = ? AND id = ?", (tenant, id)).fetchone()
    return None if found is None else _stored(found)


def find_content(connection: sqlite3.Connection, tenant: str, digest: bytes) -> StoredDocument | None:
    """The tenant's document that has these bytes; the first of them."""
    statement = f"SELECT {_COLUMNS} FROM documents WHERE tenant = ? AND digest = ? ORDER BY row LIMIT 1"
    found = connection.execute(statement, (tenant, digest)).fetchone()
    return None if found is None else _stored(found)


def listed(connection: sqlite3.Connection, tenant: str, after: str = "", limit: int = 100) -> list[StoredDocument]:
    """In the order of their ids, those after `after`."""
    statement = f"SELECT {_COLUMNS} FROM documents WHERE tenant = ? AND id > ? ORDER BY id LIMIT ?"
    return [_stored(row) for row in connection.execute(statement, (tenant, after, limit))]


def delete(connection: sqlite3.Connection, tenant: str, id: str) -> bool:
    """Whether it was there."""
    found = find(connection, tenant, id)
    if found is None:
        return False
    _grown(connection, tenant, -found.size, QUOTA_BYTES)
    _drop(connection, tenant, found.row)
    return True


def chunks(connection: sqlite3.Connection, tenant: str, id: str, first: int = 0, limit: int = 100) -> list[Chunk]:
    """Of the document as it is now, those at positions from `first`; [] where there is no such document."""
    found = find(connection, tenant, id)
    if found is None:
        return []
    statement = (
        "SELECT text, headings, first_page, last_page, num_tokens FROM chunks"
        " WHERE tenant = ? AND document = ? AND position >= ? ORDER BY position LIMIT ?"
    )
    return [chunk_of(*row) for row in connection.execute(statement, (tenant, found.row, first, limit))]


def used_bytes(connection: sqlite3.Connection, tenant: str) -> int:
    """What counts against the quota."""
    found = connection.execute("SELECT bytes FROM owners WHERE tenant = ?", (tenant,)).fetchone()
    return found[0] if found else 0


def coverage(connection: sqlite3.Connection, tenant: str) -> dict[str, int]:
    """Of the tenant's chunks: model → how many have its vectors, "" → how many have none."""
    statement = (
        "SELECT vector_model, sum(num_embedded), sum(num_chunks) FROM documents WHERE tenant = ? GROUP BY vector_model"
    )
    found: Counter[str] = Counter()
    for model, embedded, total in connection.execute(statement, (tenant,)):
        found.update({model: embedded, "": total - embedded})
    return dict(found)


def unembedded(connection: sqlite3.Connection, model: str, limit: int, last: str = "") -> Unembedded | None:
    """The next chunks, whoever's they are, that have no vector of the model; None: all have one. last: the tenant whose turn was
    last: the others, in their order, come first."""
    found = connection.execute(
        "SELECT tenant, id, version, row, vector_model, num_embedded FROM documents"
        " WHERE num_chunks > 0 AND (vector_model <> ? OR num_embedded < num_chunks)"
        " ORDER BY tenant <= ?, tenant, row LIMIT 1",
        (model, last),
    ).fetchone()
    if found is None:
        return None
    tenant, id, version, row, current, embedded = found
    first = embedded if current == model else 0
    statement = "SELECT text FROM chunks WHERE tenant = ? AND document = ? AND position >= ? ORDER BY position LIMIT ?"
    texts = [text for (text,) in connection.execute(statement, (tenant, row, first, limit))]
    return Unembedded(tenant, id, version, first, texts)


def put_vectors(connection: sqlite3.Connection, model: str, group: Unembedded, vectors) -> bool:
    """Vectors f32 [number of the group's texts, width] of the model. False, and nothing is written: the version is gone, or the
    chunks before them have none."""
    found = find(connection, group.tenant, group.document)
    rows = np.asarray(vectors, np.float32)
    if found is None or found.version != group.version or not len(rows):
        return False
    embedded = found.num_embedded if found.vector_model == model else 0
    if group.first != embedded or embedded + len(rows) > found.num_chunks:
        return False
    if not embedded:  # of another model
        connection.execute("DELETE FROM vectors WHERE tenant = ? AND document = ?", (group.tenant, found.row))
    peak = np.abs(rows).max(axis=1, keepdims=True)  # f16 ends at 65,504; the length of a vector means nothing
    data = (rows / np.maximum(peak, 1e-30)).astype("<f2").tobytes()
    connection.execute(
        "INSERT INTO vectors (tenant, document, model, first, num, data) VALUES (?, ?, ?, ?, ?, ?)",
        (group.tenant, found.row, model, group.first, len(rows), data),
    )
    connection.execute(
        "UPDATE documents SET vector_model = ?, num_embedded = ? WHERE tenant = ? AND row = ?",
        (model, embedded + len(rows), group.tenant, found.row),
    )
    _grown(connection, group.tenant, 0, QUOTA_BYTES)
    return True


def labelled(connection: sqlite3.Connection, tenant: str, name: str, value: Scalar) -> set[int]:
    """Rows of the documents whose metadata have this value."""
    statement = "SELECT document FROM labels WHERE tenant = ? AND name = ? AND value = ?"
    return {row for (row,) in connection.execute(statement, (tenant, name, _json(value)))}


def chunk_of(text: str, headings: str, first_page: int, last_page: int, num_tokens: int) -> Chunk:
    """Of columns of the table."""
    return Chunk(text, msgspec.json.decode(headings), first_page, last_page, num_tokens)


def _json(value: Scalar) -> str:
    """Numbers that are equal have one text: 1 and 1.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return msgspec.json.encode(value).decode()


def _stored(row: Sequence) -> StoredDocument:
    document = StoredDocument(*row)
    document.metadata = msgspec.json.decode(row[_METADATA])
    document.warnings = msgspec.json.decode(row[_METADATA + 1])
    return document


_METADATA = StoredDocument.__struct_fields__.index("metadata")


def _is_same(before: StoredDocument, new: NewDocument) -> bool:
    return (before.digest, before.options, before.name, before.kind, before.metadata) == (
        new.digest,
        new.options,
        new.name,
        new.kind,
        new.metadata,
    )


def _grown(connection: sqlite3.Connection, tenant: str, more: int, quota_bytes: int) -> int:
    """Count so many bytes more (or fewer) and a change; the owner's number. Raises DocumentError request_too_large."""
    found = connection.execute("SELECT number, bytes FROM owners WHERE tenant = ?", (tenant,)).fetchone()
    if more > 0 and (found[1] if found else 0) + more > quota_bytes:
        message = f"Documents may take {quota_bytes} bytes in all; delete some, or send less than {more} bytes more."
        raise DocumentError(message, "request_too_large")
    if found is None:
        connection.execute("INSERT INTO owners (tenant, bytes, changes) VALUES (?, 0, 0)", (tenant,))
    statement = "UPDATE owners SET bytes = bytes + ?, changes = changes + 1 WHERE tenant = ? RETURNING number"
    return connection.execute(statement, (more, tenant)).fetchone()[0]


def _drop(connection: sqlite3.Connection, tenant: str, row: int) -> None:
    ids = connection.execute("SELECT id FROM chunks WHERE tenant = ? AND document = ?", (tenant, row)).fetchall()
    connection.executemany("DELETE FROM words WHERE rowid = ?", ids)
    connection.execute("DELETE FROM chunks WHERE tenant = ? AND document = ?", (tenant, row))
    connection.execute("DELETE FROM vectors WHERE tenant = ? AND document = ?", (tenant, row))
    connection.execute("DELETE FROM labels WHERE tenant = ? AND document = ?", (tenant, row))
    connection.execute("DELETE FROM documents WHERE tenant = ? AND row = ?", (tenant, row))


def _put_chunks(
    connection: sqlite3.Connection, tenant: str, owner: int, row: int, new: NewDocument, headings: list[str]
) -> None:
    """Its chunks and their words: of the text, the headings that it stands under, and the document's title."""
    mark = f"{owner}{MARK}"
    title = words_of(f"{new.title} {new.name}")
    statement = (
        "INSERT INTO chunks (tenant, document, position, text, headings, first_page, last_page, num_tokens, num_words, norm)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    )
    for position, (chunk, above) in enumerate(zip(new.chunks, headings, strict=True)):
        words = title + words_of(" ".join(chunk.headings)) + words_of(chunk.text)
        norm = math.sqrt(sum((1 + math.log(count)) ** 2 for count in Counter(words).values()))
        id = connection.execute(
            statement,
            (tenant, row, position, chunk.text, above, chunk.first_page, chunk.last_page, chunk.num_tokens)
            + (len(words), norm),
        ).lastrowid
        marked = f" {mark}".join(["", *words])
        connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (id, marked))
