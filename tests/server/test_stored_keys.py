"""Keys of the database: what they may do, that a server sees what another process changes, and the file itself."""

import concurrent.futures
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import chat_body, read_reply, request, rest_of, wait_for
from test_lifecycle import start  # noqa: F401

from zse.errors import ConfigError
from zse.server.auth import KeyCheck
from zse.server.database import keys
from zse.server.database.connection import Database, StorageError
from zse.server.database.schema import MIGRATIONS
from zse.server.keys import MAX_KEYS, Access, Caller, Quota, quotas, weights

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "server.db")


@pytest.fixture
def database(path):
    with Database(path) as opened:
        yield opened


def make(database: Database, name: str, **values) -> str:
    return database.now(lambda connection: keys.create(connection, name, "test", **values))[1]


def zse_keys(path: str, *words: str) -> str:
    command = [sys.executable, "-m", "zse", "keys", words[0], *words[1:], "--database", path]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_a_key_is_an_account_of_its_tenant(database):
    texts = [
        make(database, "a", rpm=60, models=["m", "l"]),
        make(database, "b", tenant="a", weight=2.5, admin=True),
        make(database, "c", expires=time.time() - 1, concurrency=3),
        make(database, "d"),
    ]
    database.now(lambda connection: keys.revoke(connection, "d", "test"))
    ring = database.now(lambda connection: keys.read(database, connection), writes=False)
    assert [key.state(time.time()) for key in database.now(keys.listed, writes=False)] == [
        "valid",
        "valid",
        "expired",
        "revoked",
    ]
    assert weights(ring.valid, {"a/a": 4.0}) == {"a/a": 4.0, "a/b": 2.5, "c/c": 1.0}
    assert quotas(ring.valid) == {"a/a": Quota(rpm=60), "c/c": Quota(concurrency=3)}
    check = KeyCheck(ring.valid, secret=ring.secret)
    assert check.find(f"Bearer {texts[0]}") == Caller("a", Access(models=frozenset("ml")), "a/a", 1)
    assert check.find(f"Bearer {texts[1]}") == Caller("a", Access(admin=True), "a/b", 2)
    assert check.find(f"Bearer {texts[2]}") is check.find(f"Bearer {texts[3]}") is check.find("Bearer x") is None
    assert KeyCheck((), secret=ring.secret).is_needed  # a database without keys lets nobody in


def test_the_file_holds_no_key_and_is_its_owners(database, path):
    text = make(database, "a")
    database.now(lambda connection: keys.rotate(connection, "a", "test"))
    database.now(lambda connection: connection.execute("SELECT 1").fetchone(), writes=False)
    folder = Path(path).parent
    assert {file.name for file in folder.iterdir()} == {"server.db", "server.db-wal", "server.db-shm"}
    for file in folder.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
        assert text.encode() not in file.read_bytes() and text[16:].encode() not in file.read_bytes()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o660])
def test_a_file_of_others_is_refused(path, mode):
    Database(path).close()
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {re.escape(path)}"):
        Database(path)


def test_what_is_no_database_is_refused(tmp_path, path):
    for content in (b"x" * 5000, b"SQLite format 3\0" + b"y" * 5000):
        Path(path).unlink(missing_ok=True)
        Path(path).touch(0o600)
        Path(path).write_bytes(content)
        with pytest.raises(ConfigError, match="move it away"):
            Database(path)
        assert Path(path).read_bytes() == content
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="symbolic links"):
        Database(str(link))
    with pytest.raises(ConfigError, match="Is a directory"):
        Database(str(tmp_path))


@pytest.mark.parametrize("version", range(len(MIGRATIONS)))
def test_every_older_version_is_brought_up(path, version):
    os.close(os.open(path, os.O_CREAT, 0o600))
    old = sqlite3.connect(path)
    for number, step in enumerate(MIGRATIONS[:version], 1):
        for statement in step:
            old.execute(statement)
        old.execute(f"PRAGMA user_version={number}")
    old.commit()
    old.close()
    with Database(path) as database:
        found = database.now(lambda connection: connection.execute("PRAGMA user_version").fetchone(), writes=False)
        assert found == (len(MIGRATIONS),)
        assert make(database, "a")


def test_a_step_that_fails_half_way_leaves_the_version_before(path, monkeypatch):
    first = MIGRATIONS[0]
    for count in range(len(first)):
        broken = (*first[:count], "CREATE NONSENSE")
        monkeypatch.setattr("zse.server.database.connection.MIGRATIONS", (broken,))
        with pytest.raises(ConfigError):
            Database(path)
        with sqlite3.connect(path) as left:
            assert left.execute("PRAGMA user_version").fetchone() == (0,)
            assert not left.execute("SELECT name FROM sqlite_master").fetchall()
        left.close()
    monkeypatch.undo()
    Database(path).close()


def test_a_newer_version_is_refused(path):
    Database(path).close()
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    newer.close()
    with pytest.raises(
        ConfigError, match=f"newer ZSE .its version {len(MIGRATIONS) + 1}, the newest here {len(MIGRATIONS)}"
    ):
        Database(path)


def test_jobs_share_commits_and_fail_alone(database):
    def broken(connection):
        keys.create(connection, "half", "test")
        raise ValueError("no")

    jobs = [database.submit(lambda c, name=f"k{index}": keys.create(c, name, "test")) for index in range(40)]
    wrong = database.submit(broken)
    taken = database.submit(lambda connection: keys.create(connection, "k3", "test"))
    jobs.append(database.submit(lambda connection: keys.create(connection, "last", "test")))
    assert len({job.result()[1] for job in jobs}) == 41
    with pytest.raises(ValueError, match="no"):
        wrong.result()
    with pytest.raises(ConfigError, match="'k3'"):
        taken.result()
    names = [key.name for key in database.now(keys.listed, writes=False)]
    assert names == [f"k{index}" for index in range(40)] + ["last"]
    with pytest.raises(StorageError):
        database.now(lambda connection: connection.execute("SELECT * FROM nothing"))
    assert database.now(keys.listed, writes=False)[0].name == "k0"  # opened again


def test_the_number_of_valid_keys_is_bounded(database, monkeypatch):
    monkeypatch.setattr(keys, "MAX_KEYS", 3)
    assert MAX_KEYS == 4096
    for name in "abc":
        make(database, name)
    with pytest.raises(ConfigError, match="3 keys already"):
        make(database, "d")
    database.now(lambda connection: keys.revoke(connection, "a", "test"))
    make(database, "d")


def test_a_server_sees_what_another_process_changes(own_server, path):
    alice = zse_keys(path, "create", "alice")
    bob = zse_keys(path, "create", "bob", "--models", "gone")
    server = own_server(database=path)

    def status(key: str) -> int:
        return server.post(TEXT, {"prompt": "a", "max_tokens": 1}, bearer(key)).status

    assert [status(key) for key in (alice, bob, "zse-none")] == [200, 403, 401] and server.get(
        "/v1/models"
    ).status == 401
    stream = server.connect()
    stream.sendall(
        request("POST", CHAT, chat_body("!tokens=100000 !ms=5", max_tokens=3000, stream=True), bearer(alice))
    )
    stream.recv(1 << 12)
    carol = zse_keys(path, "create", "carol", "--rpm", "2")
    changed = time.monotonic()
    wait_for(lambda: status(carol) == 200, 1.5)
    zse_keys(path, "update", "bob", "--models", "all")
    fresh = zse_keys(path, "rotate", "alice")
    changed = time.monotonic()
    stream.settimeout(3)
    rest = rest_of(stream)
    assert time.monotonic() - changed < 1.5 and b'"code":"invalid_api_key"' in rest and b"[DONE]" not in rest
    stream.close()
    assert [status(key) for key in (alice, fresh, bob)] == [401, 200, 200]
    zse_keys(path, "revoke", "bob")
    wait_for(lambda: status(bob) == 401, 1.5)
    page = server.call(lambda: sorted(server.app.tenants))
    assert page == ["alice/alice", "bob/bob", "carol/carol"]
    server.assert_quiet()


def test_keys_of_one_tenant_share_its_cache_and_not_their_limits(own_server, path):
    first, second, other = (zse_keys(path, "create", *words) for words in (
        ("a", "--concurrency", "1"), ("b", "--tenant", "a"), ("c",)
    ))  # fmt: skip
    server = own_server(database=path)
    app = server.app
    salts = {}
    for text in (first, second, other):
        caller = app._key.find(f"Bearer {text}")
        salts[caller.account] = app.salts.salt(caller.tenant)
    assert salts["a/a"] == salts["a/b"] != salts["c/c"]
    with server.connect() as held:
        held.sendall(request("POST", CHAT, chat_body("!stall"), bearer(first)))
        wait_for(lambda: server.state()["choices"] == 1)
        assert server.post(CHAT, chat_body("hi"), bearer(first)).status == 429
        assert server.post(CHAT, chat_body("hi"), bearer(second)).status == 200
    server.assert_quiet()


def test_a_thousand_parallel_requests_of_a_stored_key(own_server, path):
    """rpm=60 under a clock that stands still: exactly 60, while other keys come and change; then one for each second."""
    key = zse_keys(path, "create", "a", "--rpm", "60")
    server = own_server(database=path, max_choices=2000)
    now = [time.monotonic() + 100]
    server.call(lambda: setattr(server.app.admission, "clock", lambda: now[0]))

    def some(seed: int) -> list[int]:
        statuses = []
        with server.connect() as sock:
            for index in range(25):
                if (seed + index) % 2:
                    sock.sendall(request("GET", "/v1/models", None, bearer(key)))
                else:
                    sock.sendall(request("POST", TEXT, {"prompt": "a", "max_tokens": 1}, bearer(key)))
                statuses.append(read_reply(sock).status)
        return statuses

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        futures = [pool.submit(some, index) for index in range(40)]
        zse_keys(path, "create", "b")
        zse_keys(path, "update", "a", "--weight", "2")
        statuses = [status for future in futures for status in future.result()]
    wait_for(lambda: server.call(lambda: server.app.admission.weights.get("a/a")) == 2.0)
    assert len(statuses) == 1000 and statuses.count(200) == 60 and statuses.count(429) == 940
    now[0] += 3.0
    assert some(0).count(200) == 3


def test_a_copy_that_was_made_while_a_server_ran_is_whole(own_server, path, tmp_path):
    key = zse_keys(path, "create", "a")
    server = own_server(database=path)
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}, bearer(key)).status == 200
    wait_for(lambda: len(json.loads(zse_keys(path, "usage", "--json"))) == 1)
    copy = str(tmp_path / "copy.db")
    os.close(os.open(copy, os.O_CREAT, 0o600))
    source, target = sqlite3.connect(path), sqlite3.connect(copy)
    source.backup(target)
    source.close(), target.close()
    zse_keys(path, "revoke", "a")
    other = own_server(database=copy)
    assert other.get("/v1/models", bearer(key)).status == 200
    assert json.loads(zse_keys(copy, "usage", "--json"))[0]["requests"] == 1


def test_a_database_that_fails_changes_no_key(own_server, path, caplog):
    key = zse_keys(path, "create", "a")
    server = own_server(database=path)
    os.rename(path, path + ".away")
    real = sqlite3.connect
    server.database.submit(lambda connection: connection.execute("SELECT * FROM nothing"))  # so that it is opened again
    wait_for(lambda: "keys stay as they were" in caplog.text, 3)
    time.sleep(1.2)
    assert caplog.text.count("keys stay as they were") == 1 and sqlite3.connect is real
    assert server.get("/v1/models", bearer(key)).status == 200 and not os.path.exists(path)
    os.rename(path + ".away", path)
    zse_keys(path, "revoke", "a")
    wait_for(lambda: server.get("/v1/models", bearer(key)).status == 401, 2.5)


def test_the_first_start_makes_a_key_for_the_administrator(start, path):  # noqa: F811
    process = start("--database", path)
    key = re.search(r"^admin key, shown this once: (zse-\S{43})$", process.block, re.M)[1]
    with process.send(request("GET", "/metrics", None, bearer(key))) as sock:
        assert read_reply(sock).status == 200
    assert process.get("/v1/models").status == 401
    process.popen.terminate()
    code, stderr = process.finish()
    assert code == 0 and key not in stderr
    again = start("--database", path)
    assert "admin key" not in again.block
    with again.send(request("GET", "/metrics", None, bearer(key))) as sock:
        assert read_reply(sock).status == 200


def test_a_start_with_a_key_of_its_own_makes_none(start, path):  # noqa: F811
    process = start("--database", path, "--api-key", "mine", "--host", "0.0.0.0")
    assert "admin key" not in process.block
    assert json.loads(zse_keys(path, "ls", "--json")) == []
    for key, status in (("mine", 200), (zse_keys(path, "create", "a"), 200), ("no", 401)):
        wait_for(lambda key=key, status=status: _models(process, key) == status, 2)


def _models(process, key: str) -> int:
    with process.send(request("GET", "/v1/models", None, bearer(key))) as sock:
        return read_reply(sock).status


def test_the_default_database_is_used_when_it_is_there(start, tmp_path):  # noqa: F811
    home = {"ZSE_HOME": str(tmp_path)}
    assert _models(start(env=home), "x") == 200 and not (tmp_path / "server.db").exists()
    key = zse_keys(str(tmp_path / "server.db"), "create", "a")
    process = start(env=home)
    assert [_models(process, word) for word in (key, "x")] == [200, 401]
    assert _models(start("--database", "none", env=home), "x") == 200


def test_a_start_with_a_damaged_database_ends(start, path):  # noqa: F811
    Path(path).touch(0o644)
    process = start("--database", path, wait=False)
    code, stderr = process.finish()
    assert code == 2 and stderr.strip().endswith(f"run chmod 600 {path} as its owner") and stderr.count("\n") == 1


@pytest.mark.timed
@pytest.mark.exhaustive("times beside a load")
def test_a_change_among_thousands_of_keys_does_not_hold_up_the_loop(own_server, database, path):
    def many(connection):
        return [keys.create(connection, f"k{index}", "test", rpm=60, tpm=1000)[1] for index in range(4000)]

    texts = database.now(many)
    server = own_server(database=path)
    with server.longest_callback() as longest:
        for name in ("a", "b"):
            key = make(database, name)
            wait_for(
                lambda key=key: server.get("/v1/models", bearer(key)).status == 200, 20
            )  # reading them is a thread's
        assert server.get("/v1/models", bearer(texts[-1])).status == 200
    print(longest)
    assert longest[0][0] <= 0.05, longest
