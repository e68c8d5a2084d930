"""LoRA adapters that are uploaded: kept by content, loaded, listed, deleted; what is refused; quotas, disks, clients that leave, restarts."""

import errno
import hashlib
import os
import sys
import time
from pathlib import Path

import pytest
from harness import request, wait_for

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("models", "structured")]

import tiny_adapters  # noqa: E402

from zse.formats import adapter_store  # noqa: E402

PATH = "/admin/adapters/upload"
KIND = {"content-type": "multipart/form-data; boundary=b"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    return {seed: tiny_adapters.write(tiny_adapters.adapter("llama", seed), folder / f"a{seed}") for seed in (1, 2)}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ZSE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "adapters"


@pytest.fixture
def server(own_server, home):
    return own_server()


def form(*parts: tuple[str, bytes]) -> bytes:
    head = "--b\r\nContent-Disposition: form-data; name={}; filename=../../{}\r\n\r\n"
    return b"".join(head.format(name, name).encode() + data + b"\r\n" for name, data in parts) + b"--b--\r\n"


def parts(folder, name: str = "mine", **more: bytes) -> list[tuple[str, bytes]]:
    files = {
        "name": name.encode(),
        "config": (folder / "adapter_config.json").read_bytes(),
        "weights": (folder / "adapter_model.safetensors").read_bytes(),
    }
    return list((files | more).items())


def upload(server, *given: tuple[str, bytes], **headers):
    return server.post(PATH, form(*given), KIND | headers)


def left(home) -> tuple[int, int]:
    """Folders of adapters, and what is arriving."""
    contents = [path for path in home.iterdir() if len(path.name) == 64]
    return len(contents), len(list((home / ".partial").iterdir()))


def wait_left(home, wanted: tuple[int, int]) -> None:
    wait_for(lambda: left(home) == wanted)


def test_kept_by_content_loaded_listed_and_deleted(server, home, folders):
    digest = hashlib.sha256((folders[1] / "adapter_model.safetensors").read_bytes()).hexdigest()
    card = upload(server, *parts(folders[1], sha256=digest.encode())).json
    assert (card["id"], card["state"], card["uploaded"]) == ("fake:mine", "loaded", True)
    folder = Path(card["path"])
    assert folder.parent == home and (folder.stat().st_mode & 0o777, home.stat().st_mode & 0o777) == (0o700, 0o700)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (folder / file).read_bytes() == (folders[1] / file).read_bytes()
        assert (folder / file).stat().st_mode & 0o777 == 0o600
    assert server.post("/v1/completions", {"model": "fake:mine", "prompt": "a"}).status == 200
    same = upload(server, *parts(folders[1], "same")).json
    assert same["path"] != card["path"]  # deleted for itself
    assert upload(server, *parts(folders[2], "other")).status == 200
    wait_left(home, (3, 0))
    reply = upload(server, *parts(folders[2]))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (409, "conflict", "name")
    # Unloaded it stays, and is loaded again by its name.
    assert server.post("/admin/adapters/unload", {"name": "mine"}).status == 200
    listed = {card["id"]: card for card in server.get("/admin/adapters").json["data"]}
    assert [listed[f"fake:{name}"]["state"] for name in ("mine", "same", "other")] == ["stored", "loaded", "loaded"]
    assert listed["fake:mine"]["rank"] == 4 and listed["fake:mine"]["bytes"] > 1000
    assert upload(server, *parts(folders[2])).status == 409
    assert server.post("/admin/adapters", {"name": "mine"}).json["path"] == card["path"]
    assert server.post("/admin/adapters", {"name": "never"}).error["param"] == "path"
    for name, wanted in (("mine", (2, 0)), ("same", (1, 0)), ("other", (0, 0))):
        reply = server.raw(request("DELETE", f"/admin/adapters/fake:{name}"))
        assert reply.json == {"id": f"fake:{name}", "object": "adapter", "deleted": True}
        wait_left(home, wanted)
        assert server.post("/v1/completions", {"model": f"fake:{name}", "prompt": "a"}).status == 404
    assert server.get("/admin/adapters").json["data"] == []
    assert server.raw(request("DELETE", "/admin/adapters/fake:mine")).status == 404
    assert server.pool.default.users == 0  # nothing holds the model
    server.assert_quiet()


def test_refused(server, home, folders, monkeypatch):
    good = dict(parts(folders[1]))
    config, weights = good["config"], good["weights"]

    def check(status: int, param: str, message: str = "", **given: bytes | None) -> None:
        sent = {name: data for name, data in (good | given).items() if data is not None}
        reply = upload(server, *sent.items())
        assert (reply.status, reply.error["param"]) == (status, param), reply.body
        assert message in reply.error["message"] and str(home) not in reply.error["message"]

    for name in (b"", b"../x", b"A", b"a b", b"x" * 65, b"a:b", b"a.b"):
        check(400, "name", name=name)
    check(400, "name", name=None)
    check(400, "config", config=None)
    check(400, "weights", weights=None)
    check(400, "sha256", sha256=b"0")
    check(400, "other", other=b"x")
    check(404, "model", model=b"nope")
    check(422, "sha256", "SHA-256 of the weights is", sha256=b"0" * 64)
    check(422, "weights", "adapter_model.safetensors: ", weights=b"x" * 100)
    check(422, "weights", weights=weights[:-1])
    check(422, "weights", weights=b"")
    check(422, "weights", config=b"{")
    check(422, "weights", "says rank 5", config=config.replace(b'"r": 4', b'"r": 5'))
    check(422, "weights", "use_dora", config=config.replace(b'"r": 4', b'"r": 4, "use_dora": true'))
    monkeypatch.setattr("zse.server.requests.adapters.MAX_CONFIG_BYTES", 100)
    check(413, "config")
    monkeypatch.setattr("zse.server.requests.adapters.MAX_CONFIG_BYTES", 1 << 20)
    server.app.adapter_quota = len(weights)
    check(413, "weights", f"{len(weights)} bytes together")
    server.app.adapter_quota = 1 << 30
    reply = server.post(PATH, form(*good.items()), KIND | {"origin": "http://other.site"})
    assert reply.status == 403
    assert server.post(PATH, {"name": "x"}).status == 415
    wait_left(home, (0, 0))
    assert server.get("/admin/adapters").json["data"] == []
    assert upload(server, *good.items()).status == 200  # what was refused has left nothing in its way
    server.assert_quiet()


def test_what_cannot_be_kept_is_not_loaded(server, home, folders, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("put", "begin"):
        with monkeypatch.context() as patch:
            patch.setattr(adapter_store, name, full)
            reply = upload(server, *parts(folders[1]))
            assert (reply.status, reply.error["code"]) == (503, "storage_unavailable")
        wait_left(home, (0, 0))
    # The engine refuses it.
    real = server.engine.load_adapter

    async def refuse(path):
        raise server_error()

    def server_error():
        from zse.server.errors import APIError

        return APIError("unprocessable_file", "rank 4 is not supported")

    server.engine.load_adapter = refuse
    assert upload(server, *parts(folders[1])).status == 422
    server.engine.load_adapter = real
    wait_left(home, (0, 0))
    assert server.post("/v1/completions", {"model": "fake:mine", "prompt": "a"}).status == 404


def test_a_client_that_leaves_leaves_nothing(server, home, folders):
    body = form(*parts(folders[1]))
    with server.connect() as sock:
        head = request("POST", PATH, None, KIND | {"content-length": str(len(body))})
        sock.sendall(head + body[: len(body) // 2])
        wait_for(lambda: (home / ".partial").is_dir() and left(home)[1] == 1)
    wait_left(home, (0, 0))
    server.assert_quiet()


def test_what_a_death_left_is_deleted(server, home, folders):
    card = upload(server, *parts(folders[1])).json
    old, young = home / ".partial" / ("2" * 32), home / ".partial" / ("3" * 32)
    damaged = home / ("0" * 64)
    for folder in (old, young, damaged):
        folder.mkdir()
        (folder / "adapter.json").write_text("{")
    before = time.time() - 2 * adapter_store.STALE_S
    for path in (old, Path(card["path"])):
        os.utime(path, (before, before))
    assert upload(server, *parts(folders[2], "next")).status == 200
    wait_left(home, (3, 1))
    assert young.exists() and Path(card["path"]).exists()
    assert [card["name"] for card in server.get("/admin/adapters").json["data"]] == ["mine", "next"]


def test_served_by_a_real_engine_and_after_a_restart(tmp_path, folders):
    import subprocess

    import tiny_text
    from test_adapters_served import Server

    base = tiny_adapters.base("llama", tmp_path / "base")
    tiny_text.write(tmp_path / "base")
    wide = tiny_adapters.write(tiny_adapters.adapter("llama", 3, rank=20), tmp_path / "wide", rank=20)
    environment = {"ZSE_HOME": str(tmp_path / "home")}
    words = (str(base), "--model-name", "m", "--adapter-slots", "2")

    def send(server, name: str, folder) -> str:
        files = [f"config=@{folder}/adapter_config.json", f"weights=@{folder}/adapter_model.safetensors"]
        fields = [word for field in (*files, f"name={name}") for word in ("-F", field)]
        done = subprocess.run(
            ["curl", "-sS", server.address + PATH, *fields], capture_output=True, text=True, timeout=60
        )
        return done.stdout

    server = Server(*words, environment=environment)
    assert '"id":"m:mine"' in send(server, "mine", folders[1])
    assert "up to 16 (--adapter-rank)" in send(server, "wide", wide)
    plain, mine = (server.reply(name)[0] for name in ("m", "m:mine"))
    assert plain != mine
    server.close()
    server = Server(*words, environment=environment)
    assert server.reply("m:mine")[0] == mine
    assert [card["id"] for card in server.call("/v1/models")[1]["data"]] == ["m", "m:mine"]
    server.close()
