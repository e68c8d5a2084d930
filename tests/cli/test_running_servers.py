"""zse ps, load and unload, and the files by which they find servers."""

import json
import multiprocessing
import os
import stat
import sys
from pathlib import Path

import pytest

from zse.cli import main
from zse.server import presence

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("server", "structured", "engine")]

from harness import Harness, chat_body, wait_for  # noqa: E402
from test_admin_models import Store  # noqa: E402
from test_stored_keys import bearer, make  # noqa: E402

from zse.server.database.connection import Database  # noqa: E402
from zse.server.keys import OWNER, Key  # noqa: E402


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    monkeypatch.delenv("ZSE_API_KEY", raising=False)
    return tmp_path


def announce_and_wait(url, event):
    kept = presence.Announcement(url, "1")
    assert kept
    event.set()
    multiprocessing.Event().wait()


def test_a_server_that_was_killed_is_forgotten(home):
    assert presence.running() == []
    ours = presence.Announcement("http://127.0.0.1:1", "0.1")
    path = Path(ours.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    context = multiprocessing.get_context("fork")
    event = context.Event()
    other = context.Process(target=announce_and_wait, args=("http://127.0.0.1:2", event))
    other.start()
    assert event.wait(10)
    assert [server["url"] for server in presence.running()] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    other.kill()
    other.join()
    assert [server["pid"] for server in presence.running()] == [os.getpid()] and len(os.listdir(path.parent)) == 1
    path.chmod(0o644)
    assert presence.running() == []  # others could have written it
    ours.withdraw()
    assert not path.exists()


def zse(capsys, *words: str, code: int = 0) -> str:
    assert main.main(list(words)) == code, capsys.readouterr()
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


@pytest.fixture
def server():
    made = Store({"a": "", "b": "--load-ms 300"})
    there = presence.Announcement(made.base, "0.1")
    yield made
    there.withdraw()
    made.close()


def test_models_of_a_server(capsys, server):
    rows = zse(capsys, "ps").splitlines()
    assert len(rows) == 2 and rows[1].split()[1:4] == ["a", "loaded", "3.1"]
    assert zse(capsys, "load", "b", "--keep-alive", "30m").startswith("b is loaded in 0.")
    assert zse(capsys, "ps", "-q").split() == ["a", "b"]
    [told] = json.loads(zse(capsys, "ps", "--json"))
    assert [(model["name"], model["keep_alive_s"]) for model in told["models"]] == [("a", None), ("b", 1800)]
    assert "is unloaded" in zse(capsys, "unload", "b") and zse(capsys, "ps", "-q").split() == ["a"]
    assert "is removed" in zse(capsys, "unload", "b", "--remove") and "b" not in server.cards()
    assert zse(capsys, "load", "c", "--pull").startswith("c is loaded")
    failed = zse(capsys, "load", "gone2", "--pull", code=1)
    assert failed.endswith("zse: error: the hub cannot be reached: Connection refused\n")
    error = zse(capsys, "load", "nothing", code=1)
    assert error.startswith(f"zse: error: {server.base}: The model 'nothing'") and error.count("\n") == 1
    assert "'x' is not served here" in zse(capsys, "unload", "x", code=1)
    assert "'never'" not in zse(capsys, "load", "a", "--keep-alive", "never", code=1)


def test_which_server(capsys, server):
    with_key = Harness(key=(Key("a", "user"), Key("b", "admin", access=OWNER)))
    there = presence.Announcement(with_key.base, "0.1")
    try:
        assert "several servers run here" in zse(capsys, "unload", "a", code=2)
        assert "give an admin's key" in zse(capsys, "unload", "fake", "--server", with_key.base, code=1)
        assert "give an admin's key" in zse(
            capsys, "unload", "fake", "--server", with_key.base, "--api-key", "user", code=1
        )
        assert "is unloaded" in zse(capsys, "unload", "fake", "--server", with_key.base, "--api-key", "admin")
        assert main.main(["ps"]) == 1  # of one it may not know
        said = capsys.readouterr()
        assert server.base in said.out and with_key.base in said.err
    finally:
        there.withdraw()
        with_key.close()


def test_there_is_no_server(capsys):
    assert zse(capsys, "ps") == ""
    assert "no server of this user runs here" in zse(capsys, "load", "a", code=2)
    assert "127.0.0.1:9: " in zse(capsys, "unload", "a", "--server", "http://127.0.0.1:9", code=1)
    assert "give an address" in zse(capsys, "unload", "a", "--server", "localhost:1", code=2)


def test_a_real_server_announces_itself(home):
    from test_lifecycle import Process

    process = Process()
    try:
        wait_for(presence.running)  # a second after its start
        [server] = presence.running()
        assert server["pid"] == process.popen.pid and server["url"] in process.block
        process.popen.terminate()
        assert process.finish()[0] == 0
        wait_for(lambda: not presence.running())
        assert not os.listdir(home / "servers")
    finally:
        process.popen.kill()
        process.popen.communicate()


def test_sessions_of_a_server(capsys, tmp_path, monkeypatch):
    path = str(tmp_path / "zse.db")
    with Database(path) as database:
        mine, other = make(database, "a"), make(database, "b")
    made = Harness(database=path)
    there = presence.Announcement(made.base, "0.1")
    monkeypatch.setenv("ZSE_API_KEY", mine)
    try:
        assert zse(capsys, "sessions", "ls") == ""
        for id in ("one", "two", "three"):
            reply = made.post("/v1/chat/completions", chat_body("hi", session_id=id), bearer(mine))
            assert reply.status == 200
        rows = [line.split() for line in zse(capsys, "sessions", "ls").splitlines()]
        assert [row[:2] for row in rows[1:]] == [["three", "1"], ["two", "1"], ["one", "1"]]
        assert zse(capsys, "sessions", "ls", "--api-key", other) == ""
        assert "one: " in zse(capsys, "sessions", "rm", "one", "--api-key", other, code=1)
        assert zse(capsys, "sessions", "rm", "two") == "two is removed\n"
        assert "two: " in zse(capsys, "sessions", "rm", "two", code=1)
        assert zse(capsys, "sessions", "ls", "-q").split() == ["three", "one"]
        assert [session["id"] for session in json.loads(zse(capsys, "sessions", "ls", "--json"))] == ["three", "one"]
        assert "or give --all" in zse(capsys, "sessions", "rm", code=2)
        assert "a key whose tenant" in zse(capsys, "sessions", "ls", "--api-key", "sk-wrong", code=1)
        assert zse(capsys, "sessions", "rm", "--all").count("is removed") == 2
        assert zse(capsys, "sessions", "ls", "-q") == ""
    finally:
        there.withdraw()
        made.close()
