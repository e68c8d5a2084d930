"""Run with io_points.c preloaded: database_points.py WORK HOW FOLDER. Every point at which the database's work writes goes wrong once.

HOW is "die" or the name of an errno. For each point: what there was before is made, the work is done in a fork that dies or whose call
fails there, then the file must open and be sound, what was acknowledged must be in it, and the rest all or not at all. Where a call failed
the same process does the work again and must succeed, and so must the next one."""

import ctypes
import errno
import hashlib
import json
import math
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from zse.errors import ConfigError
from zse.lazy import numpy as np
from zse.rag import schema, search
from zse.rag import store as documents
from zse.rag.documents import Chunk
from zse.rag.index import Indexes
from zse.server.auth import digest_of
from zse.server.database import answers, batches, files, keys, responses, usage
from zse.server.database.connection import Database, Migrations, StorageError
from zse.server.database.files import StoredFile
from zse.server.database.schema import MIGRATIONS
from zse.server.files import Written

OWNER = ("t", 1, "m", 5)
COUNTS = [1] * len(usage.COUNTS)
NUM_GROUPS = 4


class Job(NamedTuple):
    """prepare(path). run(path, told): told(word) with each thing that is acknowledged. check(path, words): of the file, open and
    sound; raises AssertionError."""

    prepare: Callable[[str], object]
    run: Callable[[str, Callable[[str], None]], object]
    check: Callable[[sqlite3.Connection, list[str]], None]
    migrations: Migrations = MIGRATIONS


def in_database(
    path: str,
    *works,
    told: Callable[[str], object] = lambda word: None,
    word=lambda result: "done",
    migrations: Migrations = MIGRATIONS,
) -> None:
    """One work after the other; of each told(word(its result)) in the moment in which its caller is told."""
    with Database(path, migrations) as database:
        for work in works:
            job = database.submit(work)
            job.add_done_callback(lambda done: done.exception() or told(word(done.result())))
            job.result()


def two_keys(path: str) -> None:
    in_database(path, *(partial(keys.create, name=name, actor="x") for name in "ab"))


def first_start(path: str, told) -> None:
    in_database(path, partial(keys.prepare, makes_admin=True), told=told, word=str)


def is_known(connection: sqlite3.Connection, text: str) -> bool:
    return digest_of(keys.secret(connection), text) in {
        key.digest for key in keys.listed(connection) if not key.revoked
    }


def has_admin(connection: sqlite3.Connection, words: list[str]) -> None:
    names = [key.name for key in keys.listed(connection)]
    assert names == ["admin"] or names == [] and not words, names
    assert not words[-1:] or words[-1] == "" or is_known(connection, words[-1])


def create(path: str, told) -> None:
    work = partial(keys.create, name=f"c{time.monotonic_ns()}", actor="x", rpm=5)
    in_database(path, work, told=told, word=lambda made: made[1])


def has_all(connection: sqlite3.Connection, words: list[str]) -> None:
    listed = keys.listed(connection)
    assert [key.name for key in listed][:2] == ["a", "b"] and all(is_known(connection, word) for word in words)
    audited = [line.subject for line in keys.audit(connection, 1000) if line.action == "keys.create"]
    assert sorted(audited) == sorted(key.name for key in listed), "a key without its line, or a line without its key"


def revoke(path: str, told) -> None:
    in_database(path, partial(keys.revoke, name="b", actor="x"), told=told)


def is_revoked(connection: sqlite3.Connection, words: list[str]) -> None:
    first, second = keys.listed(connection)
    assert first.revoked is None and (second.revoked is not None or not words)
    lines = [line for line in keys.audit(connection, 10) if line.action == "keys.revoke"]
    assert len(lines) == (second.revoked is not None)


def rotate(path: str, told) -> None:
    in_database(path, partial(keys.rotate, name="b", actor="x"), told=told, word=lambda made: made[1])


def is_rotated(connection: sqlite3.Connection, words: list[str]) -> None:
    assert len(keys.listed(connection)) == 2 and all(is_known(connection, word) for word in words[-1:])


def use(path: str, told) -> None:
    counts, windows = {OWNER: COUNTS, (*OWNER[:3], 6): COUNTS}, [("a/a", "tokens", 5.0, 7.0)]
    in_database(path, *[partial(usage.write, counts=counts, windows=windows)] * NUM_GROUPS, told=told)


def is_used(connection: sqlite3.Connection, words: list[str]) -> None:
    counts = [row.requests for row in usage.totals(connection, by="hour")]
    assert len(set(counts)) <= 1 and len(counts) in (0, 2), counts  # a group is whole or not there
    assert len(words) <= (counts or [0])[0] <= len(words) + 1 or not words


BODY = b"x" * 9000  # more than a page


def store(path: str, told) -> None:
    """An answer with its Idempotency-Key and two stored responses, the second goes on from the first; those of a run before are cleared away."""
    responses.MOST_BYTES = 2 * len(BODY)
    now = float(time.monotonic_ns())
    first, second, answer = f"{now}", f"{now + 1}", answers.KeptAnswer(b"", "a/b", BODY)

    def respond(connection: sqlite3.Connection, id: str, previous: str) -> str:
        row = responses.StoredResponse(id, previous, now, BODY, b"")
        responses.store(connection, "t", row, now + bool(previous))
        return id

    def keep(connection: sqlite3.Connection) -> str:
        answers.keep(connection, "t", first, answer, now)
        return "k" + first

    works = keep, partial(respond, id=first, previous=""), partial(respond, id=second, previous=first)
    in_database(path, *works, told=told, word=str)


def is_stored(connection: sqlite3.Connection, words: list[str]) -> None:
    for word in words[-3:]:  # the others may have made room
        find = answers.find if word.startswith("k") else responses.find
        found = find(connection, "t", word.removeprefix("k"), 0.0)
        assert found is not None and found.body == BODY, word
    for (id,) in connection.execute("SELECT id FROM responses WHERE tenant = 't'").fetchall():
        assert responses.find(connection, "t", id, 0.0).body == BODY


NUM_CHUNKS = 6


def document(word: str) -> documents.NewDocument:
    """Chunks that fill more than a page, all of which have the word."""
    chunks = [Chunk(f"{word} {number} " + "filler " * 90, [word], 0, 0, 90) for number in range(NUM_CHUNKS)]
    digest = word.encode().ljust(32)
    return documents.NewDocument("x", word, "text", word, digest, "", 9, 0, chunks, {"word": word})


def embed(connection: sqlite3.Connection) -> bool:
    group = documents.unembedded(connection, "m", 4)
    return group is not None and documents.put_vectors(connection, "m", group, np.ones((len(group.texts), 64)))


def a_document(path: str) -> None:
    works = partial(documents.add, tenant="t", new=document("old"), now=1.0), embed, embed
    in_database(path, *works, migrations=schema.MIGRATIONS)


def replace(path: str, told) -> None:
    """The document by another version, with the vectors of its first chunks; then another tenant's."""
    word = f"new{time.monotonic_ns()}"
    works = (
        partial(documents.add, tenant="t", new=document(word), now=2.0),
        embed,
        partial(documents.add, tenant="u", new=document(word), now=2.0),
    )
    in_database(path, *works, told=told, migrations=schema.MIGRATIONS, word=lambda result: word)


def is_whole(connection: sqlite3.Connection, words: list[str]) -> None:
    """Each document is in one version, with all of its rows; what was acknowledged last is there."""
    tenants = [tenant for (tenant,) in connection.execute("SELECT tenant FROM owners ORDER BY tenant")]
    size = 0
    for tenant in tenants:
        one = documents.find(connection, tenant, "x")
        assert one is not None and one.num_chunks == NUM_CHUNKS, tenant
        assert one.name.startswith("new") or one.name == "old" and tenant == "t" and not words
        assert not words or tenant != "t" or one.name >= words[-1]
        texts = [chunk.text.split()[:2] for chunk in documents.chunks(connection, tenant, "x")]
        assert texts == [[one.name, str(number)] for number in range(NUM_CHUNKS)]
        found = search.search(connection, Indexes(), tenant, search.SearchQuery(one.name, top_k=99))
        assert [passage.version for passage in found] == [one.version] * NUM_CHUNKS
        assert documents.labelled(connection, tenant, "word", one.name) == {one.row}
        numbers = connection.execute("SELECT sum(num) FROM vectors WHERE tenant = ?", (tenant,)).fetchone()
        assert (numbers[0] or 0) == one.num_embedded
        assert documents.used_bytes(connection, tenant) == one.size
        size += NUM_CHUNKS
    for table in ("chunks", "words"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (size,), table
    assert len(words) < 3 or tenants == ["t", "u"]


NUM_LINES = 3


def batch(path: str, told) -> None:
    """A file with its content; a batch of it, the results of its lines, its end with an output file, and that their rows go."""
    now, id = time.time(), f"b{time.monotonic_ns()}"

    def content(text: bytes) -> StoredFile:
        written = Written(path + ".files")
        written.write(text)
        return StoredFile(written.id, now, math.inf, written.size, "x", "batch", written.keep())

    def add(connection: sqlite3.Connection, file: StoredFile) -> str:
        files.add(connection, "t", file, 1 << 30)
        row = batches.StoredBatch(id, "t/a", "1", now, now + 9, None, file.id, "/x", "{}")
        batches.add(connection, "t", row, 1 << 30)
        batches.move(connection, "t", id, "in_progress", now, total=NUM_LINES)
        return f"made {id}"

    def record(connection: sqlite3.Connection, line: int) -> str:
        batches.record(connection, "t", id, line, line == 2, b"%d" % line, 1 << 30)
        batches.record(connection, "t", id, line, False, b"twice", 1 << 30)  # another server's
        return f"line {id} {line}"

    def end(connection: sqlite3.Connection, output: StoredFile) -> str:
        batches.end(connection, "t", id, "completed", now, output)
        return f"end {id}"

    try:
        os.makedirs(path + ".files", mode=0o700, exist_ok=True)
        works = [partial(add, file=content(BODY)), *(partial(record, line=line) for line in range(1, NUM_LINES + 1))]
        in_database(path, *works, told=told, word=str)
        in_database(path, partial(end, output=content(b"out")), told=told, word=str)
        clear = partial(batches.clear, tenant="t", id=id)
        in_database(path, clear, clear)
    except OSError as error:
        raise StorageError(str(error)) from None


def is_batch(connection: sqlite3.Connection, words: list[str]) -> None:
    folder = connection.execute("PRAGMA database_list").fetchone()[2] + ".files"
    for id, digest in connection.execute("SELECT id, digest FROM files").fetchall():
        with open(os.path.join(folder, id), "rb") as file:  # no row without its content
            assert hashlib.sha256(file.read()).digest() == digest
    told = [word.split() for word in words]
    for kind, id, *more in told:
        found = batches.find(connection, "t", id)
        assert found is not None and (["end", id] not in told or found.status == "completed" and found.output_file)
        if kind == "line" and found.status != "completed":
            assert int(more[0]) in batches.done_lines(connection, "t", id)
    for tenant, found in batches.unfinished(connection):
        results = [batches.results(connection, tenant, found.id, failed, 0, 9) for failed in (False, True)]
        if found.status != "completed":  # else some of them are gone
            assert [len(some) for some in results] == [found.completed, found.failed]
        assert all(result == b"%d" % line for some in results for line, result in some), "a second result"


JOBS = {
    "batch": Job(two_keys, batch, is_batch),
    "document": Job(a_document, replace, is_whole, schema.MIGRATIONS),
    "store": Job(two_keys, store, is_stored),
    "first start": Job(lambda path: None, first_start, has_admin),
    "create": Job(two_keys, create, has_all),
    "revoke": Job(two_keys, revoke, is_revoked),
    "rotate": Job(two_keys, rotate, is_rotated),
    "usage": Job(two_keys, use, is_used),
}


def checked(job: Job, path: str, words: list[str]) -> None:
    with Database(path, job.migrations) as database:
        assert database.now(lambda c: c.execute("PRAGMA integrity_check").fetchone(), writes=False) == ("ok",)
        database.now(lambda c: job.check(c, words))


def forked(work: Callable[[Callable[[str], None]], None]) -> tuple[list[str], int]:
    """work(told) in a fork: what it told, and how it ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(reading)
            work(lambda word: os.write(writing, word.encode() + b"\n"))
            code = 0
        except AssertionError as error:
            sys.stderr.write(f"{error!r}\n")
        finally:
            os._exit(code)
    os.close(writing)
    data = b""
    while piece := os.read(reading, 1 << 16):
        data += piece
    os.close(reading)
    return data.decode().split("\n")[:-1], os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(work: str, how: str, folder: str) -> None:
    points = ctypes.CDLL(None)
    points.points_set.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    points.points_seen.restype = ctypes.c_long
    job, error = JOBS[work], 0 if how == "die" else getattr(errno, how)
    number = 0
    if work == "document":
        np.ones(1)  # imported once, not in four forks of each point: a tenth of a second
    before = os.path.join(folder, "before")
    os.mkdir(before, 0o700)
    assert forked(lambda told: (job.prepare(os.path.join(before, "server.db")), None)[1])[1] == 0

    def fresh() -> str:
        nonlocal number
        number += 1
        return os.path.join(shutil.copytree(before, os.path.join(folder, f"run{number}")), "server.db")

    def broken(told, path: str, at: int) -> None:
        points.points_set(os.path.dirname(path).encode(), at, error)
        try:
            job.run(path, told)
        except (StorageError, ConfigError):
            assert how != "die"
        else:
            told(f"={points.points_seen()}")
            return
        points.points_set(b"", -1, 0)
        job.run(path, told)  # without a restart

    words, code = forked(partial(broken, path=(path := fresh()), at=-1))
    assert code == 0 and words[-1].startswith("="), (words, code)
    count = int(words[-1][1:])
    died = 0
    for at in range(count):
        path = fresh()
        words, code = forked(partial(broken, path=path, at=at))
        where = f"{work}, point {at} of {count}, {how}"
        assert code == (-9 if how == "die" else 0) or code == 0, (where, words, code)
        died += code == -9
        acknowledged = [word for word in words if not word.startswith("=")]
        for attempt in (lambda told: checked(job, path, acknowledged), partial(again, job=job, path=path)):
            assert forked(attempt)[1] == 0, (where, acknowledged)
        shutil.rmtree(os.path.dirname(path))
    print(json.dumps({"points": count, "died": died}))


def again(told, job: Job, path: str) -> None:
    """The next process does the same, and what it is told holds."""
    said: list[str] = []
    job.run(path, said.append)
    checked(job, path, said[-1:] if job.run is not use else [])


main(*sys.argv[1:])
