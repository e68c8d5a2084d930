"""The server in a background thread over the fake engine, and raw-socket clients for it."""

import asyncio
import contextlib
import gc
import json
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import fake_text

from zse.engine.process import spawn
from zse.errors import ModelNotFoundError, ZSEError
from zse.http import bind
from zse.http.listener import Limits, Server
from zse.server.admission import AdmissionControl, QueueBounds
from zse.server.app import App
from zse.server.auth import HostCheck, KeyCheck
from zse.server.database import keys as stored_keys
from zse.server.database.connection import Database
from zse.server.database.usage import UsageLog, restore
from zse.server.errors import APIError
from zse.server.key_watch import KeyWatch
from zse.server.keys import Key, quotas, single, weights
from zse.server.library import Library
from zse.server.mcp.servers import McpServers
from zse.server.pool import ModelPool
from zse.server.retrieval import Retrieval
from zse.server.served import ModelSpec
from zse.server.work import FairThreads, RequestRun, Statistics, Tenants

FAKE_ENGINE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_engine.py")
SCHEDULED_ENGINE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scheduled_engine.py")
JSON = {"content-type": "application/json"}


def fixed_bounds(max_choices: int, max_tokens: int) -> QueueBounds:
    bounds = QueueBounds(0, max_tokens)
    bounds.set_engine(max_choices, max_tokens)
    return bounds


class FakeLibrary(Library):
    """A store that has every model whose name does not begin with "no". A pull takes three steps; one of "gone" fails. arguments: of
    each one's engine."""

    def __init__(self, arguments: dict[str, str] | None = None):
        super().__init__(fetch=self.fetch)
        self.arguments, self.step_s = arguments or {}, 0.0
        self.removed: list[str] = []

    def spec(self, name: str, called: str | None = None) -> ModelSpec:
        if name.startswith("no"):
            raise APIError(
                "model_not_found", f"The model '{name}' is not in the store, which has: all others.", "model"
            )
        return ModelSpec((called or name,), name, tuple(self.arguments.get(name, "").split()))

    def fetch(self, name: str, force: bool, progress, notice) -> None:
        if name.startswith("no"):
            raise ModelNotFoundError(f"cannot pull {name!r}")
        notice("it fits")
        for done in range(4):
            time.sleep(self.step_s)
            progress("downloading", 100 * done, 300)
            if name.startswith("gone") and done == 2:
                raise ZSEError("the hub cannot be reached: Connection refused")
        progress("checking", 300, 300)

    def remove(self, name: str) -> None:
        if name.startswith("no"):
            raise APIError("model_not_found", "not here", "model")
        self.removed.append(name)

    def stored(self) -> list[dict]:
        return [{"name": name, "bytes": 1000, "licence": None} for name in self.arguments or ("fake",)]


class Admitted(RequestRun):
    """A request of a tenant that a queue has admitted, without a server around it."""

    def __init__(self, control: AdmissionControl, tenant: str):
        served = SimpleNamespace(engine=None, statistics=Statistics())
        pool = SimpleNamespace(enter=lambda served: None, leave=lambda served: None)
        app = SimpleNamespace(
            usage=None,
            draining=False,
            tracer=None,
            admission=control,
            pool=pool,
            tenants=Tenants(),
            threads=FairThreads(),
            running={},
        )
        app.find_model = lambda request, name, param: served
        self.request = SimpleNamespace(
            account=tenant, identity="", body=b"", text_bytes=0, started=0.0, more_headers=[]
        )
        control.admit(self.request, needs_room=True)
        super().__init__(app, self.request)

    def reserve(self, choices: int, prompt_tokens: int, answer_tokens: int = 0) -> "Admitted":
        self.start(None, choices, answer_tokens, prompt_tokens)
        return self

    def leave(self, tokens: int) -> None:
        if self.served is not None:
            self.channel.owed += 1
            self.channel.end(tokens)
        self.__exit__(None, None, None)


class Harness:
    """A running server. `lag_s`: the longest time that its event loop was blocked."""

    engine_path = FAKE_ENGINE

    def __init__(
        self,
        engine: str = "",
        limits: Limits | None = None,
        key: str | tuple[Key, ...] = (),
        max_choices: int = 64,
        max_queue_tokens: int = 1 << 20,
        hosts: frozenset | None = frozenset({"localhost"}),
        wait: bool = True,
        template: str = "",
        any_model_name: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        database: str | None = None,
        documents: str | None = None,
        documents_bytes: int = 1 << 30,
        ocr=None,
        mcp: str | None = None,
    ):
        self.engine_options = engine.split()
        self._template = template
        self._parsers = {
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
            "any_model_name": any_model_name,
        }
        self.lag_s = 0.0
        self._options = (limits, key, max_choices, max_queue_tokens, hosts)
        self._database_path, self.database = database, None
        self._documents = None
        if documents is not None:
            self._documents = lambda app: Retrieval(app, documents, documents_bytes, ocr)
        self._mcp_path = mcp
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), daemon=True)
        self._thread.start()
        assert started.wait(20)
        if wait:
            self.wait_ready()

    def spawn(self):
        return spawn(self.engine_options, (self.engine_path,))

    def text_model(self):
        """Tokenizer and template."""
        return fake_text.TextModel(self._template)

    def make_pool(self) -> ModelPool:
        return ModelPool([ModelSpec(("fake",), "fake")], spawn=lambda arguments: self.spawn())

    def library(self) -> FakeLibrary:
        return FakeLibrary()

    async def _main(self, started: threading.Event) -> None:
        limits, key, max_choices, max_queue_tokens, hosts = self._options
        keys, keyring = single(key) if isinstance(key, str) else key, None
        given = keys
        if self._database_path:
            self.database = Database(self._database_path)
            self.database.now(lambda connection: stored_keys.prepare(connection, False))
            keyring = self.database.now(lambda connection: stored_keys.read(self.database, connection), writes=False)
            keys += keyring.valid
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        model = self.loop.create_future()
        model.set_result(self.text_model())
        self.pool = self.make_pool()
        self.engine = self.pool.default.engine
        self.app = App(
            self.pool,
            weights=weights(keys),
            admission=AdmissionControl(fixed_bounds(max_choices, max_queue_tokens), weights(keys), quotas(keys)),
            key=KeyCheck(keys, secret=None if keyring is None else keyring.secret),
            hosts=HostCheck(hosts),
            library=self.library,
            documents=self._documents,
            **self._parsers,
        )
        if self.database is not None:
            self.app.usage = UsageLog(self.database, self.app.admission)
            self.database.now(lambda connection: restore(connection, self.app.admission))
        if self._mcp_path is not None:
            self.app.mcp = McpServers(self._mcp_path)
        self.server = Server(self.app, limits)
        sock = bind.listen("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.pool.adopt(self.spawn(), model)
        await self.server.listen(sock)
        probe = asyncio.create_task(self._probe())
        self.watch = KeyWatch(self.app, None, given, {}, self.database, keyring)
        self.app.key_watch = self.watch
        watching = asyncio.create_task(self.watch.run()) if keyring is not None else None
        await self.app.resume()
        started.set()
        await self._stop.wait()
        probe.cancel()
        if watching is not None:
            watching.cancel()
        await self.app.close()
        await self.pool.stop()
        self.server.close()
        if self.app.mcp is not None:
            await self.app.mcp.close()
        if self.database is not None:
            self.app.usage.close()
        await asyncio.sleep(0.01)

    async def _probe(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            self.lag_s = max(self.lag_s, time.perf_counter() - before - 0.005)

    @contextlib.contextmanager
    def longest_callback(self):
        """A list that has (seconds, what) of the loop's longest callback at the end: processor time of its thread, which
        other processes and threads do not make longer."""
        longest, run, thread = [(0.0, None)], asyncio.Handle._run, self._thread

        def timed(handle):
            if threading.current_thread() is not thread:
                return run(handle)
            started, what = time.thread_time(), handle._callback
            run(handle)
            if time.thread_time() - started > longest[0][0]:
                longest[0] = time.thread_time() - started, what

        asyncio.Handle._run = timed
        try:
            yield longest
        finally:
            asyncio.Handle._run = run

    def call(self, work, timeout: float = 10.0):
        """work() on the server's loop."""

        async def run():
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout)

    def wait_ready(self, timeout: float = 10.0) -> None:
        wait_for(lambda: self.engine.state == "ready", timeout)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def state(self) -> dict[str, int]:
        """Everything that a request may not leave behind."""

        def count():
            return {
                "connections": len(self.server.connections),
                "requests": len(self.engine.requests),
                "cancelled": len(self.engine.cancelled),
                "choices": self.app.admission.choices,
                "queued_tokens": self.app.admission.queued_tokens,
                "body_bytes": self.server.bodies.total,
                "tasks": len(asyncio.all_tasks()),
                "engine_rows": self.engine.heartbeat.running,
            }

        return self.call(count)

    def assert_quiet(self, timeout: float = 3.0) -> None:
        """Wait until nothing of any request is left."""

        def quiet():
            left = {name: value for name, value in self.state().items() if name != "tasks" and value}
            # Main, probe, this call; supervisor and watchdog of each engine; who looks after several models.
            engines = sum(model.engine.state not in ("unloaded", "down") for model in self.pool.models)
            readers = (
                sum(2 for server in self.app.mcp.by_label.values() if server.config.command) if self.app.mcp else 0
            )
            return not left and self.state()["tasks"] <= 3 + 2 * engines + (self.pool._task is not None) + readers + (
                self.database is not None
            )

        try:
            wait_for(quiet, timeout)
        except AssertionError:
            tasks = self.call(lambda: list(asyncio.all_tasks()))
            raise AssertionError(f"left behind: {self.state()}, {tasks}") from None

    # Clients

    def connect(self, timeout: float = 10.0) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def raw(self, data: bytes, cuts: tuple[int, ...] = (), pause: float = 0.0, timeout: float = 10.0) -> "Reply":
        """Send `data`, cut at the given offsets, and read one answer."""
        with self.connect(timeout) as sock:
            position = 0
            for cut in [*cuts, len(data)]:
                try:
                    sock.sendall(data[position:cut])
                except ConnectionError:
                    break  # refused early; the answer is there to read
                position = cut
                if pause and cut != len(data):
                    time.sleep(pause)
            return read_reply(sock)

    def post(self, path: str, body, headers: dict | None = None, timeout: float = 10.0) -> "Reply":
        return self.raw(request("POST", path, body, headers), timeout=timeout)

    def get(self, path: str, headers: dict | None = None) -> "Reply":
        return self.raw(request("GET", path, None, headers))

    def chat(self, text: str, **fields) -> "Reply":
        return self.post("/v1/chat/completions", chat_body(text, **fields))

    def complete(self, prompt, **fields) -> "Reply":
        return self.post("/v1/completions", {"model": "fake", "prompt": prompt, **fields})


class Scheduled(Harness):
    """Over the real scheduler and prefix cache, and a device that echoes (scheduled_engine.py)."""

    engine_path = SCHEDULED_ENGINE


def chat_body(text: str, **fields) -> dict:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def request(method: str, path: str, body=None, headers: dict | None = None) -> bytes:
    """Bytes of a request; a dict body is sent as JSON."""
    lines = {"host": "localhost"}
    data = b""
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines |= JSON | {"content-length": str(len(data))}
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    closed: bool

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json["error"]

    @property
    def events(self) -> list:
        """Data of the server-sent events, JSON decoded ([DONE] as it is); checks the grammar of each line."""
        out = []
        for block in self.body.decode().split("\n\n")[:-1]:
            if block.startswith(":"):
                continue
            assert block.startswith("data: ") and "\n" not in block, block
            out.append(block[6:] if block[6:] == "[DONE]" else json.loads(block[6:]))
        return out


def rest_of(sock: socket.socket) -> bytes:
    """What comes until a stream in chunks ends, or the connection does."""
    rest = b""
    while not rest.endswith(b"\r\n0\r\n\r\n") and (piece := sock.recv(1 << 16)):
        rest += piece
    return rest


def read_reply(sock: socket.socket, until_closed: bool = False) -> Reply:
    """One whole answer; dechunks. `closed`: the server closed after it, or said that it will."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = receive(sock)
        if not piece:
            return Reply(0, {}, data, True)
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
        while not head:
            body += receive(sock)
            head, _, body = body.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    closed = headers.get("connection") == "close"
    if headers.get("transfer-encoding") == "chunked":
        out = b""
        while True:
            while not (match := re.match(rb"([0-9a-f]+)\r\n", body)) or len(body) < match.end() + int(match[1], 16) + 2:
                piece = receive(sock)
                if not piece:
                    return Reply(int(first.split()[1]), headers, out, True)
                body += piece
            size = int(match[1], 16)
            if size == 0:
                break
            out += body[match.end() : match.end() + size]
            body = body[match.end() + size + 2 :]
        body = out
    else:
        length = int(headers.get("content-length", "0"))
        while len(body) < length:
            piece = receive(sock)
            if not piece:
                break
            body += piece
    return Reply(int(first.split()[1]), headers, body, closed)


def receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionError:
        return b""


def wait_for(condition, timeout: float = 5.0) -> float:
    """Seconds until condition() is true; fails after `timeout`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout, "timed out"
        time.sleep(0.005)
    return time.monotonic() - start


def open_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
