"""--keep-in-memory and converted copies in a server's pool: what follows the unloading of a model."""

import os
import resource
from types import SimpleNamespace

import pytest
from harness import wait_for
from test_pool import Models

from zse.errors import ConfigError
from zse.runtime import probe
from zse.server import pool as pools
from zse.server.resident import ResidentFiles


def locked_bytes() -> int:
    with open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith("VmLck")).split()[1])


@pytest.fixture
def files(tmp_path):
    """Paths of three models of 64 KiB, one of them a folder."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(os.urandom(65536))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "weights").write_bytes(os.urandom(65536))
    (tmp_path / "c" / "empty").write_bytes(b"")
    return {name: str(tmp_path / name) for name in "abc"}


def test_the_last_ones_stay_up_to_the_bound(files, caplog):
    caplog.set_level("INFO", "zse.server")
    before, kept = locked_bytes(), ResidentFiles(140_000)
    for name, path in files.items():
        kept.hold(name, path)
    assert [kept.bytes_of(name) for name in files] == [0, 65536, 65536] and kept.num_bytes == 131072
    assert locked_bytes() - before == 131072
    kept.hold("b", files["b"])  # again: now the last one
    kept.hold("a", files["a"])
    assert [kept.bytes_of(name) for name in files] == [65536, 65536, 0]
    with open(files["a"], "ab") as file:  # a new version of a model
        file.write(b"more")
    kept.hold("a", files["a"])
    assert kept.bytes_of("a") == 65540
    with open(files["a"], "wb"):  # one that shrinks harms nobody
        pass
    kept.release("a")
    kept.release("b")
    kept.release("nobody")
    assert kept.num_bytes == 0 and locked_bytes() == before
    assert "b stays in memory" in caplog.text


def test_what_cannot_be_held_is_a_line(files, caplog, monkeypatch):
    kept = ResidentFiles(1000)
    kept.hold("a", files["a"])
    kept.hold("gone", files["a"] + "x")
    assert "more than --keep-in-memory" in caplog.text and "gone does not stay in memory: No such file" in caplog.text
    monkeypatch.setattr(probe, "memory_bytes", lambda: {"available": 1 << 18})
    kept = ResidentFiles(1 << 20)
    kept.hold("a", files["a"])
    assert "0 MiB are available" in caplog.text and kept.num_bytes == 0


def test_a_user_who_may_not_lock_so_much_is_told(monkeypatch):
    given = []

    def setrlimit(which, limits):
        if limits[1] > 8 << 20:
            raise ValueError("not allowed to raise maximum limit")
        given.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 8 << 20))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    with pytest.raises(ConfigError, match="may lock 8192 KiB of memory .ulimit -l., not 16384.*LimitMEMLOCK"):
        ResidentFiles(16 << 20)
    ResidentFiles(4 << 20)
    assert given == [(8 << 20, 8 << 20)]


def test_what_follows_an_unload(files, monkeypatch):
    """The file that the next load reads is held, a copy is begun and taken; a model that is removed is let go."""
    monkeypatch.setattr(pools, "BEHIND_S", 0.05)
    begun, taken = [], []

    def arguments(words):
        taken.append(list(words))
        return [*words, "--max-context", "99"] if len(begun) > 1 else list(words)

    copies = SimpleNamespace(begin=lambda paths: begun.append(paths), arguments=arguments)
    kept = ResidentFiles(1 << 20)
    server = Models({"one": "", "two": f"--model {files['a']}"}, max_loaded=1, copies=lambda: copies, resident=kept)
    try:
        assert server.ask("two").status == 200
        wait_for(lambda: ["one"] in begun)
        assert server.ask("one").status == 200  # two is unloaded
        wait_for(lambda: ["two"] in begun and kept.bytes_of("two"))
        (card,) = [card for card in server.get("/admin/models").json["models"] if card["name"] == "two"]
        assert card["kept_bytes"] == 65536
        assert "zse_kept_in_memory_bytes 65536" in server.get("/metrics").body.decode()
        assert server.ask("two").status == 200
        assert server.spawned[-1] is not None and server.served("two").engine.info.max_context == 99
        server.call(lambda: server.pool.remove(server.served("two")))
        wait_for(lambda: not kept.num_bytes)
    finally:
        server.close()
