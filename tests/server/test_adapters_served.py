"""`zse serve` with adapters, on a real engine of a tiny model: names, admin routes, keys, restarts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("models", "structured")]

import tiny_adapters  # noqa: E402
import tiny_text  # noqa: E402

from zse.engine.messages import AdapterLoaded  # noqa: E402
from zse.server.adapters import Adapters  # noqa: E402

ADMIN, USER, BOUND = "admin-key", "user-key", "bound-key"


class Server:
    """A process of `zse serve`. call(): (status, parsed body)."""

    def __init__(self, *words, environment=None):
        command = [sys.executable, "-m", "zse", "serve", *words, "--port", "0", "--device", "cpu", "--max-rows", "4"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {})
        )
        line = self.process.stdout.readline()
        assert " on http://" in line, self.process.communicate()[1]
        self.address = line.split(" on ")[1].split()[0]
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def call(self, path, body=None, key=ADMIN):
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.address + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def reply(self, model, key=ADMIN, text="hello hello hello", **fields):
        body = {"model": model, "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
        status, answer = self.call("/v1/completions", body, key)
        assert status == 200, answer
        assert answer["model"] == model
        return answer["choices"][0]["text"], answer["usage"]

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0 and not any("Traceback" in line for line in self.log), self.log


class CountedEngine:
    """Knows adapters by what their folder's path begins with; reads one when it is told to."""

    def __init__(self):
        self.info, self.images, self.reads = object(), set(), {}

    async def load_adapter(self, path):
        self.reads[path] = asyncio.get_running_loop().create_future()
        await self.reads[path]
        self.images.add(path[0])
        return AdapterLoaded(1, path[0], 4, ["q"], 100)

    def unload_adapter(self, adapter):
        self.images.discard(adapter)


@pytest.mark.parametrize("leaves", ["new", "old"])
def test_two_names_of_one_adapter_leave_the_engine_one_by_one(leaves):
    """One is unloaded while the other is read: what the engine knows both by stays with the one that is left."""

    async def run():
        engine = CountedEngine()
        adapters = Adapters(engine)

        async def load(name):
            task = asyncio.ensure_future(adapters.load(name, f"h-{name}"))
            await asyncio.sleep(0.001)
            return task

        first = await load("old")
        engine.reads["h-old"].set_result(None)
        await first
        second = await load("new")
        adapters.unload(leaves)
        engine.reads["h-new"].set_result(None)
        await second
        assert engine.images == {"h"}
        (left,) = adapters.by_name
        assert await adapters.id_of(left) == "h"
        adapters.unload(left)
        assert not engine.images

    asyncio.run(run())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    found = {"base": tiny_adapters.base("llama", folder / "base")}
    tiny_text.write(folder / "base")
    (folder / "base" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for seed in (1, 2):
        adapter = tiny_adapters.adapter("llama", seed)
        found[seed] = tiny_adapters.write(adapter, folder / f"a{seed}")
        found["merged", seed] = tiny_adapters.merged("llama", adapter, folder / f"m{seed}")
        tiny_text.write(folder / f"m{seed}")
    found["wide"] = tiny_adapters.write(tiny_adapters.adapter("llama", 3, rank=20), folder / "wide", rank=20)
    found["other"] = tiny_adapters.write(tiny_adapters.adapter("gemma3", 3), folder / "other")
    return found


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"boss {ADMIN} admin\nannie {USER}\nbert {BOUND} models=m:one\n")
    keys.chmod(0o600)
    options = ["--activations", "f32", "--kv-dtype", "f32", "--speculation", "none", "--adapter-slots", "2"]
    served = Server(
        *(str(folders["base"]), "--model-name", "m", "--adapter", f"one={folders[1]}", "--api-key-file", str(keys)),
        *options,
    )
    yield served
    served.close()


def merged_replies(folders, text):
    """What the models with merged weights answer."""
    found = {}
    for name, path in (("m", "base"), ("m:one", ("merged", 1)), ("m:two", ("merged", 2))):
        options = ["--activations", "f32", "--kv-dtype", "f32", "--speculation", "none"]
        server = Server(str(folders[path]), "--model-name", name, *options)
        found[name] = server.reply(name, text=text)[0]
        server.close()
    return found


def test_replies_loads_and_unloads(server, folders):
    text = "hello hello hello"
    expected = merged_replies(folders, text)
    assert len(set(expected.values())) > 1
    assert server.reply("m")[0] == expected["m"]
    assert server.reply("m:one")[0] == expected["m:one"]
    status, answer = server.call("/v1/completions", {"model": "m:two", "prompt": text})
    assert status == 404 and answer["error"]["code"] == "model_not_found" and "m:one" in answer["error"]["message"]
    status, card = server.call("/admin/adapters", {"name": "two", "path": str(folders[2])})
    assert status == 200 and card["id"] == "m:two" and card["state"] == "loaded" and card["rank"] == 4
    assert card["modules"] == sorted(["q", "k", "v", "o", "gate", "up", "down"]) and len(card["hash"]) == 32
    # All at once, each with what was cached for it alone.
    replies, threads = {}, []
    for number in range(9):
        name = ("m", "m:one", "m:two")[number % 3]
        threads.append(
            threading.Thread(target=lambda number=number, name=name: replies.update({number: server.reply(name)[0]}))
        )
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert [replies[number] for number in range(9)] == [expected[name] for name in ("m", "m:one", "m:two")] * 3
    _, listed = server.call("/admin/adapters")
    assert [card["id"] for card in listed["data"]] == ["m:one", "m:two"]
    _, models = server.call("/v1/models", key=USER)
    assert [(card["id"], card.get("parent")) for card in models["data"]] == [
        ("m", None),
        ("m:one", "m"),
        ("m:two", "m"),
    ]
    assert server.call("/v1/models/m:two", key=USER)[1]["id"] == "m:two"
    assert server.call("/v1/models/m:two")[1]["parent"] == "m" and "parent" not in server.call("/v1/models/m")[1]
    assert server.call("/admin/adapters/unload", {"name": "two"})[1]["state"] == "unloaded"
    assert server.call("/v1/completions", {"model": "m:two", "prompt": text})[0] == 404
    assert server.call("/admin/adapters/unload", {"name": "two"})[0] == 404


def test_every_api_takes_the_name(server):
    chat = {"model": "m:one", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    assert server.call("/v1/chat/completions", chat)[1]["model"] == "m:one"
    assert server.call("/v1/messages", chat)[1]["model"] == "m:one"
    lines = {"model": "m:one", "messages": chat["messages"], "options": {"num_predict": 4}, "stream": False}
    assert server.call("/api/chat", lines)[1]["model"] == "m:one"
    assert server.call("/v1/responses", {"model": "m:one", "input": "hello"})[1]["model"] == "m:one"
    for path, body in (
        ("/v1/embeddings", {"model": "m:one", "input": "hello"}),
        ("/v1/completions", {"model": "m:one", "prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 1}),
    ):
        status, answer = server.call(path, body)
        assert (status, answer["error"]["param"]) == (400, "model"), answer


def test_keys(server, folders):
    body = {"name": "x", "path": str(folders[2])}
    assert server.call("/admin/adapters", body, key=USER)[0] == 403
    assert server.call("/admin/adapters", key=USER)[0] == 403
    assert server.call("/admin/adapters/unload", {"name": "one"}, key=USER)[0] == 403
    assert server.reply("m:one", key=BOUND)[0] == server.reply("m:one", key=USER)[0]
    assert server.call("/v1/completions", {"model": "m", "prompt": "a"}, key=BOUND)[0] == 403
    assert [card["id"] for card in server.call("/v1/models", key=BOUND)[1]["data"]] == ["m:one"]


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("wide", "rank 20 is not supported; supported: up to 16 (--adapter-rank)"),
        ("other", "the model's weight is"),
        ("base", "adapter_config.json: is missing"),
    ],
)
def test_folders_that_are_refused(which, message, server, folders):
    status, answer = server.call("/admin/adapters", {"name": "bad", "path": str(folders[which])})
    assert status == 422 and answer["error"]["code"] == "unprocessable_file" and message in answer["error"]["message"]
    assert [card["id"] for card in server.call("/admin/adapters")[1]["data"]] == ["m:one"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "x" * 65, "é", "a:b", ".hidden", "\u202ex", "a\0b"])
def test_names_that_are_refused(name, server, folders):
    assert server.call("/admin/adapters", {"name": name, "path": str(folders[2])})[0] == 400


def test_a_taken_name_and_missing_fields(server, folders):
    assert server.call("/admin/adapters", {"name": "one", "path": str(folders[2])})[0] == 409
    assert server.call("/admin/adapters", {"name": "z"})[0] == 400
    assert server.call("/admin/adapters", {"name": "z", "path": str(folders[2]), "model": "nope"})[0] == 404
    assert server.call("/admin/adapters", {"name": "z", "path": "\0"})[0] in (400, 422)


def test_an_engine_that_comes_back_has_its_adapters(server):
    """Killed, it is started again; the next request has the adapter read once more."""
    before = server.reply("m:one")[0]
    children = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True).stdout.split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while server.call("/v1/completions", {"model": "m:one", "prompt": "a", "max_tokens": 1})[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert server.reply("m:one")[0] == before


def test_a_start_with_a_folder_that_cannot_be_used(folders):
    for options, message in (
        ([f"one={folders['base']}"], "adapter_config.json: is missing"),
        ([f"one={folders['other']}"], "the model's weight is"),
        (["one"], "is not [MODEL:]NAME=FOLDER"),
        ([f"nope:one={folders[1]}"], "is not [MODEL:]NAME=FOLDER"),
    ):
        words = [word for option in options for word in ("--adapter", option)]
        command = [sys.executable, "-m", "zse", "serve", str(folders["base"]), "--port", "0", "--device", "cpu", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode in (1, 2) and message in done.stderr, done.stderr
        assert done.stderr.splitlines()[-1].startswith("zse: error: ") and "Traceback" not in done.stderr
