"""Files by the official client: what comes back, lists, hostile names, quotas, tenants, ends, a disk that fails, what a death leaves."""

import errno
import hashlib
import os
import random
import threading
import time
import urllib.request

import openai
import pytest
from harness import read_reply, request, wait_for
from test_stored_keys import bearer, make

from zse.server import files as stores
from zse.server.database import files as rows
from zse.server.database.connection import Database
from zse.server.requests import files as fields

PATH = "/v1/files"


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "server.db")


@pytest.fixture
def keys(path) -> list[str]:
    """Two of one tenant, one of another."""
    with Database(path) as database:
        return [make(database, "a"), make(database, "b", tenant="a"), make(database, "c")]


@pytest.fixture
def server(own_server, path, keys):
    return own_server(database=path)


@pytest.fixture
def clients(server, keys):
    made = [openai.OpenAI(base_url=server.base + "/v1", api_key=key, timeout=20, max_retries=0) for key in keys]
    yield made
    for client in made:
        client.close()


def form(*parts: tuple[str, bytes]) -> bytes:
    made = (
        f"--b\r\nContent-Disposition: form-data; name={name}\r\n\r\n".encode() + data + b"\r\n" for name, data in parts
    )
    return b"".join(made) + b"--b--\r\n"


def upload(server, key: str, *parts: tuple[str, bytes], **headers: str):
    kind = {"content-type": "multipart/form-data; boundary=b"}
    return server.post(PATH, form(*parts), bearer(key) | kind | headers)


def contents(path: str) -> list[str]:
    folder = path + ".files"
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def test_a_file_and_its_content(clients, path, server):
    client, same, other = clients
    data = random.Random(1).randbytes(3_000_000)
    made = client.files.create(file=("../../etc/pass\x00wd.jsonl", data), purpose="batch")
    assert (made.bytes, made.purpose, made.object, made.status, made.expires_at) == (
        len(data),
        "batch",
        "file",
        "processed",
        None,
    )
    assert (
        made.filename == "pass%00wd.jsonl" and made.id.startswith("file-") and abs(made.created_at - time.time()) < 60
    )
    assert client.files.retrieve(made.id) == made == same.files.retrieve(made.id)
    assert client.files.content(made.id).read() == data
    with Database(path) as database:
        row = database.now(lambda c: rows.find(c, "a", made.id, 0.0))
    assert row.digest == hashlib.sha256(data).digest()
    assert contents(path) == [made.id]
    assert (
        os.stat(f"{path}.files/{made.id}").st_mode & 0o777 == 0o600
        and os.stat(f"{path}.files").st_mode & 0o777 == 0o700
    )
    reply = server.get(f"{PATH}/{made.id}/content", bearer(client.api_key))
    assert (
        reply.headers["content-disposition"] == "attachment" and reply.headers["content-security-policy"] == "sandbox"
    )
    address = f"{server.base}{PATH}/{made.id}/content"
    asked = urllib.request.Request(address, headers=bearer(client.api_key), method="HEAD")
    with urllib.request.urlopen(asked, timeout=10) as head:
        assert head.headers["content-length"] == "3000000" and head.read() == b""
    # Another tenant's is none.
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    assert other.files.list().data == []
    assert same.files.delete(made.id).deleted is True
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    wait_for(lambda: contents(path) == [])
    empty = client.files.create(file=("empty", b""), purpose="user_data")
    assert empty.bytes == 0 and client.files.content(empty.id).read() == b""


def test_lists(clients):
    client = clients[0]
    made = [client.files.create(file=(f"{n}", b"x"), purpose="batch" if n % 2 else "user_data") for n in range(5)]
    ids = [file.id for file in made]
    assert [file.id for file in client.files.list()] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids  # the client asks for each page
    assert [file.id for file in client.files.list(purpose="batch", order="asc")] == ids[1::2]
    assert [file.id for file in client.files.list(after=ids[3])] == ids[2::-1]
    page = client.files.list(limit=2)
    assert page.has_more and len(page.data) == 2
    for query in ({"after": "file-none"}, {"limit": 10_001}, {"limit": 0}, {"purpose": "x"}, {"order": "x"}):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**query)


def test_a_file_that_ends(clients, path, server):
    client = clients[0]
    made = client.files.create(file=b"x", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600
    later = client.files.create(file=b"x", purpose="user_data")
    assert contents(path) == sorted([made.id, later.id])
    server.database.now(lambda c: c.execute("UPDATE files SET expires = 5.0 WHERE id = ?", (made.id,)) and None)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    server.app.files._looked_at -= stores.LOOK_S
    client.files.list()
    wait_for(lambda: contents(path) == [later.id])


@pytest.mark.parametrize(
    "parts, status, code, param",
    [
        ([("file", b"x")], 400, "missing_required_parameter", "purpose"),
        ([("purpose", b"batch")], 400, "missing_required_parameter", "file"),
        ([("file", b"x"), ("purpose", b"batch_output")], 400, "invalid_value", "purpose"),
        ([("file", b"x"), ("purpose", b"fine-tune")], 400, "invalid_value", "purpose"),
        ([("file", b"x"), ("purpose", b"batch"), ("file", b"y")], 400, "invalid_value", "file"),
        ([("file", b"x"), ("purpose", b"batch"), ("else", b"y")], 400, "unknown_parameter", "else"),
        ([("file", b"x"), ("purpose", b"\xff")], 400, "invalid_value", "purpose"),
        ([("file", b"x"), ("purpose", b"a" * 5000)], 413, "request_too_large", None),
        ([("purpose[a]", b"x"), ("purpose", b"batch")], 400, "invalid_value", "purpose"),
        (
            [("file", b"x"), ("purpose", b"batch"), ("expires_after[seconds]", b"x")],
            400,
            "missing_required_parameter",
            "expires_after.anchor",
        ),
        (
            [
                ("file", b"x"),
                ("purpose", b"batch"),
                ("expires_after[anchor]", b"created_at"),
                ("expires_after[seconds]", b"9"),
            ],
            400,
            "out_of_range",
            "expires_after.seconds",
        ),
    ],
)
def test_forms_that_are_refused_leave_nothing(server, keys, path, parts, status, code, param):
    reply = upload(server, keys[0], *parts)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)
    wait_for(lambda: contents(path) == [])
    server.assert_quiet()


def test_quotas_and_bounds(server, keys, path, monkeypatch):
    monkeypatch.setattr(fields, "MAX_BATCH_BYTES", 3000)
    server.app.file_quota = 5000
    ok = ("purpose", b"user_data")
    assert upload(server, keys[0], ("file", b"x" * 3001), ("purpose", b"batch")).error["code"] == "request_too_large"
    assert upload(server, keys[0], ("file", b"x" * 4000), ok).status == 200
    reply = upload(server, keys[1], ("file", b"x" * 1001), ok)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (413, "request_too_large", "file")
    # One that cannot fit is not read to its end, and two at once do not share the room.
    head = request(
        "POST",
        PATH,
        None,
        bearer(keys[0]) | {"content-type": "multipart/form-data; boundary=b", "content-length": "400000000"},
    )
    with server.connect() as sock:
        sock.sendall(head + form(ok, ("file", b"x" * 2000))[:-20])
        assert read_reply(sock).status == 413
    with server.connect() as first:
        first.sendall(head + form(ok, ("file", b"x" * 800))[:-20])
        wait_for(lambda: server.app.files._arriving["a"] > 700)
        assert upload(server, keys[0], ("file", b"x" * 500), ok).status == 413
        assert upload(server, keys[2], ("file", b"x" * 5000), ok).status == 200  # another tenant's
    wait_for(lambda: not server.app.files._arriving)
    assert upload(server, keys[0], ("file", b"x" * 1000), ok).status == 200
    monkeypatch.setattr(rows, "MAX_FILES", 2)
    assert upload(server, keys[0], ("file", b""), ok).status == 413
    wait_for(lambda: len(contents(path)) == 3)
    too_long = bearer(keys[0]) | {"content-type": "multipart/form-data; boundary=b", "content-length": str(1 << 30)}
    assert server.raw(request("POST", PATH, None, too_long)).status == 413
    server.assert_quiet()


def test_what_is_no_upload(server, keys, own_server):
    assert upload(server, "zse-wrong", ("file", b"x")).status == 401
    assert server.post(PATH, {"file": "x"}, bearer(keys[0])).error["code"] == "unsupported_media_type"
    reply = server.post(PATH, b"--b\r\n", bearer(keys[0]) | {"content-type": "multipart/form-data; boundary=b"})
    assert (reply.status, reply.error["code"]) == (400, "invalid_multipart")
    good = [("file", b"x"), ("purpose", b"batch")]
    assert upload(server, keys[0], *good, origin="http://evil.example").status == 403
    assert upload(server, keys[0], *good, origin="http://localhost").status == 200
    assert upload(server, keys[0], *good, **{"idempotency-key": "a"}).error["code"] == "unsupported_parameter"
    bare = own_server()
    for reply in (
        upload(bare, "x", *good),
        bare.get(PATH),
        bare.get(PATH + "/file-1"),
        bare.get(PATH + "/file-1/content"),
    ):
        assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")


def test_a_disk_that_is_full_and_a_folder_of_others(server, keys, path, monkeypatch):
    good = [("file", b"x" * 400_000), ("purpose", b"batch")]
    assert upload(server, keys[0], *good).status == 200

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("fsync", "rename"):
        with monkeypatch.context() as patched:
            patched.setattr(stores.os, name, full)
            reply = upload(server, keys[0], *good)
        assert (reply.status, reply.error["code"]) == (503, "storage_unavailable")
        wait_for(lambda: len(contents(path)) == 1)
    assert upload(server, keys[0], *good).status == 200
    os.unlink(f"{path}.files/{contents(path)[0]}")  # by somebody else
    listed = server.get(PATH, bearer(keys[0])).json["data"]
    found = sorted(server.get(f"{PATH}/{file['id']}/content", bearer(keys[0])).status for file in listed)
    assert found == [200, 404]


def test_a_client_that_leaves_before_its_answer(server, keys, path, monkeypatch):
    """Its file is there with its content, whatever the database was doing."""
    add, begun = rows.add, threading.Event()

    def slow(*arguments, **options):
        add(*arguments, **options)
        begun.set()
        time.sleep(0.3)

    monkeypatch.setattr(rows, "add", slow)
    kind = {"content-type": "multipart/form-data; boundary=b"}
    with server.connect() as sock:
        sock.sendall(request("POST", PATH, form(("file", b"x"), ("purpose", b"batch")), bearer(keys[0]) | kind))
        assert begun.wait(10)
    time.sleep(0.5)
    (file,) = server.get(PATH, bearer(keys[0])).json["data"]
    assert server.get(f"{PATH}/{file['id']}/content", bearer(keys[0])).status == 200 and contents(path) == [file["id"]]
    server.assert_quiet()


def test_what_a_death_leaves_is_deleted(own_server, path, keys):
    folder = path + ".files"
    os.mkdir(folder, 0o700)
    old = time.time() - 2 * stores.ORPHAN_S
    for name, age in (("file-1", old), ("file-2.part", old), ("file-3", None), ("notes.txt", old)):
        open(f"{folder}/{name}", "w").close()
        os.utime(f"{folder}/{name}", None if age is None else (age, age))
    server = own_server(database=path)
    kept = upload(server, keys[0], ("file", b"x"), ("purpose", b"batch")).json["id"]
    assert contents(path) == sorted([kept, "file-3", "notes.txt"])
    os.chmod(folder, 0o755)
    server = own_server(database=path)
    assert upload(server, keys[0], ("file", b"x"), ("purpose", b"batch")).error["code"] == "storage_unavailable"
