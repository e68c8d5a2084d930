"""The whole server in one thread: a seeded walk over clients, engines, devices, disks and clocks that all misbehave.

docs/design/0006-hostile-world.md says what is real and what is invented. A client knows what it must be told, because the device's
"model" is a hash of seed and history. What is held:

- after every step of an engine: the scheduler's I1–I16 (tests/scheduler/simulator.py), every read its own history;
- of every request: one end; nothing that differs from its answer; errors that something caused;
- when no client is left: nothing is held, and a request that is sent then is answered;
- at a signal: everybody has an answer within the time to drain, and nothing is left of the process.
"""

import asyncio
import functools
import hashlib
import json
import logging
import os
import random
import signal
import tempfile
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import fake_text
from harness import read_reply, request
from processes import EngineProcess, InlineThread
from simulator import EOS, chain, said_after
from virtual_time import Clock, Loop, Wire

from zse.cache import files
from zse.engine import disk_reads, disk_writes
from zse.engine.messages import Fatal, ServerGone
from zse.http.listener import Limits, Server
from zse.server import keys, main
from zse.server.api_request import APIRequest
from zse.server.requests.completions import choice_seed
from zse.server.served import ModelSpec

KEYS = {"a": "key-of-a-0123456789", "b": "key-of-b-0123456789", "c": "key-of-c-0123456789"}
RPM = 20
KEY_FILE = f"a {KEYS['a']}\nb {KEYS['b']} 2\nc {KEYS['c']} rpm={RPM}\n"
REVOKED = KEY_FILE[: KEY_FILE.index("c key")]
MODELS = ("one", "two")
PATIENCE_S = 400.0  # virtual seconds after which a request that has no end is stuck
ALWAYS = {"overloaded", "engine_restarting", "engine_unavailable"}


class Ordered(dict):
    """A set in order of insertion: sets of objects are in the order of their addresses, which no seed chooses."""

    def add(self, item) -> None:
        self[item] = None

    def discard(self, item) -> None:
        self.pop(item, None)


def answer(seed: int, prompt: list[int], limit: int) -> tuple[list[int], bool]:
    """The first `limit` tokens of a reply, and whether the last one ends it."""
    link, reply = 0, []
    for token in prompt:
        link = chain(token, link)
    while len(reply) < limit:
        token = said_after(seed, link)
        link = chain(token, link)
        reply.append(token)
        if token == EOS:
            return reply, True
    return reply, False


class Client:
    """One connection and its requests, one after the other."""

    def __init__(self, world: "World", number: int):
        self.world, self.number = world, number
        self.rng, self.rate = random.Random(world.rng.getrandbits(64)), 1e9

    def connect(self) -> Wire | None:
        world, rng = self.world, self.rng
        if not world.loop.listeners:
            return None
        self.rate = rng.choice((1e9, 1e9, 1e9, 1e9, 1e9, 3000.0, 30.0))
        return Wire(world.loop, rng, world.loop.listeners[0](), f"10.0.0.{rng.randrange(6)}", self.rate)

    async def run(self) -> None:
        wire = self.connect()
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            if wire is None or wire.gone or wire.ended:
                break
            if not await self.ask(wire):
                return
            await asyncio.sleep(self.rng.random() * 0.2)
        if wire is not None:
            wire.fin()

    def body(self) -> tuple[dict, str]:
        rng, chat = self.rng, self.rng.random() < 0.5
        text = f"{rng.choice(('once upon a time ', 'hello ', ''))}{'x' * rng.choice((0, 1, 15, 16, 17, 60, 200))}{rng.randrange(4)}"
        body: dict = {"model": rng.choice(MODELS[: self.world.num_models]), "seed": rng.getrandbits(31)}
        body |= {"max_tokens": rng.choice((1, 2, 5, 20, 60)), "stream": rng.random() < 0.6}
        if rng.random() < 0.1:
            del body["max_tokens"]
        if rng.random() < 0.15:
            body["n"] = rng.choice((2, 3))
        if rng.random() < 0.15:
            body["stop"] = [chr(rng.randrange(50)) + chr(rng.randrange(50)), chr(rng.randrange(50))]
        if rng.random() < 0.1:
            body["deadline_ms"] = rng.choice((1.0, 500.0, 20_000.0))
        if rng.random() < 0.2:
            body["priority"] = rng.choice((-10, 3, 10))
        if rng.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
        if body["stream"] and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if chat:
            return body | {"messages": [{"role": "user", "content": text}]}, "/v1/chat/completions"
        return body | {"prompt": text or "a"}, "/v1/completions"

    async def ask(self, wire: Wire, calm: bool = False) -> bool:
        """One request and its answer; False when this side leaves."""
        world, rng = self.world, self.rng
        body, path = self.body()
        if calm:
            body = {
                "model": MODELS[0],
                "prompt": "are you there",
                "max_tokens": 3,
                "seed": 5,
                "stream": rng.random() < 0.5,
            }
            path = "/v1/completions"
        tenant = rng.choice("aabbc") if not calm else "b"
        key = KEYS[tenant] if calm or rng.random() < 0.97 else "a wrong key"
        data = request("POST", path, body, {"authorization": f"Bearer {key}"})
        leaves_s = rng.choice((0.0, 0.001, 0.05, 0.5, 3.0)) if not calm and rng.random() < 0.25 else None
        at, asked, keys_read = len(wire.received), world.loop.time(), world.keys_read
        world.num_requests += 1
        if not calm and rng.random() < 0.02:  # it never sends the rest
            data = data[: rng.randrange(1, len(data))]
            world.causes.add("request_timeout")
        wire.send(data, rng.choice((0, 0, 1, 5)))
        if leaves_s is not None:
            await asyncio.sleep(leaves_s)
            world.note("leaves", self.number)
            how = rng.randrange(3)
            if how == 0:
                wire.fin()
            elif how == 1:
                wire.reset()
            else:
                wire.vanish(rng.choice((1.0, 30.0)))
            return False
        reply = await self.answer(wire, at)
        if (
            reply is None
            or not reply.status
            or not is_whole(wire.received, at)
            and not (reply.status == 200 and body["stream"])
        ):
            # The connection ended without an answer: we were too slow, or it was idle when the server closed it.
            assert wire.rate < 1e6 or wire.ended or wire.gone, "no answer"
            world.num_unanswered += 1
            assert world.may_cut(wire), f"{body}: the connection was closed without an answer"
            return True
        world.num_answers[reply.status] = world.num_answers.get(reply.status, 0) + 1
        world.note("answer", (self.number, reply.status, len(reply.body), round(world.loop.time() - asked, 6)))
        if keys_read != world.keys_read and tenant == "c":
            return True  # which of the keys counted is not known
        try:
            self.check(reply, body, path, tenant, key)
        except AssertionError as error:
            raise AssertionError(f"{path} {body} → {reply.status} {bytes(reply.body)[-600:]}: {error}") from error
        return True

    async def answer(self, wire: Wire, at: int):
        """The reply, once it is whole or the connection has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(
                PATIENCE_S
            ):  # one timer an answer: a task and a timer a piece took a third of a walk
                while not (is_whole(wire.received, at) or wire.ended or wire.gone):
                    wire.news.clear()
                    await wire.news.wait()
        data = bytes(wire.received[at:])
        is_over = is_whole(wire.received, at) or wire.ended or wire.gone
        assert is_over, f"client {self.number} has waited for {PATIENCE_S} s with {data[-200:]!r}"
        if not data:
            return None
        pieces = [data]
        return read_reply(SimpleNamespace(recv=lambda size: pieces.pop() if pieces else b""))

    # -- what an answer must be

    def check(self, reply, body: dict, path: str, tenant: str, key: str) -> None:
        assert "x-request-id" in reply.headers
        if key != KEYS[tenant] or tenant == "c" and self.world.is_revoked:
            assert reply.status in (401, 408), "a key that is not valid"
            return
        if tenant == "c" and reply.status == 200:
            self.world.charged.append(self.world.loop.time())
        if reply.status != 200:
            self.check_error(reply.error, reply.status, body)
            return
        text, finish = {}, {}
        num_usage = 0
        events = reply.events if body["stream"] else [reply.json]
        is_cut = False
        if body["stream"]:
            is_whole = events[-1:] == ["[DONE]"]
            assert "[DONE]" not in events[:-1], "[DONE] is the last event"
            events = events[:-1] if is_whole else events
            is_cut = not is_whole
            if events and "error" in events[-1]:
                self.check_error(events.pop()["error"], 0, body)
            elif is_cut:
                assert self.world.may_cut(None) or self.is_slow(reply), "a stream ends without a verdict"
        for event in events:
            if event.get("usage"):
                num_usage = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                index = choice["index"]
                part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
                assert index not in finish, "nothing follows the end of an answer"
                text[index] = text.get(index, "") + part
                if choice["finish_reason"] is not None:
                    finish[index] = choice["finish_reason"]
        num_tokens = sum(self.check_text(body, path, index, text[index], finish.get(index)) for index in text)
        if not is_cut:
            assert sorted(finish) == list(range(body.get("n", 1))), "each answer has an end"
            assert num_usage in (0, num_tokens) or "stop" in body, f"usage {num_usage}, {num_tokens} tokens"
            self.world.num_whole += 1

    def is_slow(self, reply) -> bool:
        return reply.closed

    def check_text(self, body: dict, path: str, index: int, text: str, finish: str | None) -> int:
        """The answer is what the model says, up to the end that it gives; its tokens."""
        if "messages" in body:
            prompt = fake_text.TextModel().encode_chat(body["messages"])
        else:
            prompt = list(body["prompt"].encode())
        limit = body.get("max_tokens", 200)
        seed = choice_seed(body["seed"], index) if index else body["seed"]
        reply, ends = answer(seed, prompt, limit)
        said = bytes(reply[:-1] if ends else reply).decode()
        uncut = said
        stops = [said.find(stop) for stop in body.get("stop", ()) if stop in said]
        if stops:
            said = said[: min(stops)]
        if finish is None:
            assert said.startswith(text), f"answer {index} is not what the model says"
        elif finish == "stop":
            assert text == said and (ends or stops), f"answer {index} stops where the model does not"
        else:
            assert finish == "length" and not (stops and "max_tokens" in body), finish
            assert text == said or "max_tokens" not in body and uncut.startswith(text), f"answer {index} differs"
        return len(text) + (finish == "stop")

    def check_error(self, error: dict, status: int, body: dict) -> None:
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
        code = error["code"]
        allowed = ALWAYS | self.world.causes | {"context_length_exceeded"}
        if "deadline_ms" in body:
            allowed |= {"timeout"}
        if self.rate < 1e6:
            allowed |= {"request_timeout"}
        assert code in allowed, f"{error}: nothing caused it ({sorted(self.world.causes)})"
        if code in ("engine_restarting", "engine_unavailable"):
            assert self.world.num_faults, f"{error} although no engine failed"
        for name, key in KEYS.items():
            assert key not in json.dumps(error), f"the key of {name} stands in an error"


def is_whole(data: bytearray, at: int) -> bool:
    """Whether the bytes from `at` on are a whole HTTP answer."""
    end = data.find(b"\r\n\r\n", at)
    if end < 0:
        return False
    head = bytes(data[at:end]).lower()
    if b"transfer-encoding: chunked" in head:
        return len(data) - end - 4 >= 5 and data.endswith(b"0\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length: "):
            return len(data) - end - 4 >= int(line[16:])
    return False


class Unwaited(threading.Condition):
    """Of a thread that waits in virtual time: it looks again later."""

    def wait(self, timeout: float | None = None) -> bool:
        return False


class World:
    """One walk. events: how many things happen."""

    def __init__(self, seed: int, events: int = 60):
        self.seed, self.events = seed, events
        self.rng = rng = random.Random(seed)
        self.clock = Clock(seed)
        self.loop = Loop(self.clock, random.Random(rng.getrandbits(64)))
        self.processes: list[EngineProcess] = []
        self.pages: list = []  # what stands in files of the disk tier
        self.num_models = rng.choice((1, 1, 2))
        self.has_disk = rng.random() < 0.6
        self.fault_rate = rng.choice((0.0, 0.1, 0.3))
        self.causes: set[str] = {"rate_limit_exceeded"}
        self.charged: list[float] = []  # when requests of tenant c were answered
        self.num_faults = self.num_poisoned = self.num_requests = self.num_whole = self.num_unanswered = (
            self.num_steps
        ) = 0
        self.num_answers: dict[int, int] = {}
        self.key_file: str | OSError = KEY_FILE
        self.keys_read, self.is_revoked = 0, False  # whether c has a key
        self.digest = hashlib.sha256()
        self.clients: list[asyncio.Task] = []
        self.disk_error: int = 0
        self.cut_since = -1e9
        self.failing_loads = 0.0

    def note(self, what: str, value=None) -> None:
        """Into the trace."""
        self.digest.update(f"{self.clock.now:.6f} {what} {value}\n".encode())

    def may_cut(self, wire) -> bool:
        """Whether connections may end without an answer now: the client reads slowly, or the server is being ended."""
        return self.stopping or wire is not None and (wire.rate < 1e6 or wire.ended or wire.gone)

    # -- what processes ask

    def load_fault(self) -> str:
        """How a load goes wrong: "die", a code of Fatal, or ""."""
        is_first = self.processes[0].engine is None  # a server whose first load fails ends
        if is_first or self.rng.random() >= self.failing_loads:
            return ""
        self.num_faults += 1
        return self.rng.choice(("die", "format", "out_of_memory"))

    def page_files(self, page_size: int):
        try:
            return files.PageFiles(self.folder, b"world" + bytes([page_size]), 1 << 20, page_size)
        except Exception as error:
            self.note("no disk tier", type(error).__name__)
            return None

    def after_step(self, process: EngineProcess) -> None:
        self.num_steps += 1
        scheduler = process.engine.scheduler
        if self.num_steps % 8 == 0:
            assert scheduler.check_integrity() == []
        assert process.engine.runner.flight or not scheduler.life.retired, "held although nothing is in flight"
        assert len(scheduler.running) <= scheduler.max_rows
        tier = process.engine._features.get("disk")
        if tier is not None and tier._writer.pending and self.rng.random() < 0.3:
            tier._writer._closing = True
            tier._writer.run()
            tier._writer._closing = False
        if tier is not None and tier._reading and self.rng.random() < 0.3:
            tier._reader._closing = True
            tier._reader.read()
            tier._reader._closing = False
            tier._mover.take_read()

    # -- the walk

    def run(self) -> str:
        """Walk; the digest of the trace."""
        level, root = logging.getLogger("zse").level, logging.getLogger("zse")
        handler = logging.Handler()
        handler.emit = self.look_at_log
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        try:
            with tempfile.TemporaryDirectory() as self.folder, self.clock.installed(), self.patched():
                os.chmod(self.folder, 0o700)
                try:
                    self.loop.run_until_complete(self.live())
                except BaseException:
                    self.loop.abandon()
                    raise
                left = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
                assert not left, f"tasks are left behind: {left}"
                assert not self.loop.errors, self.loop.errors
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
            self.loop.close()
        return self.digest.hexdigest()

    def look_at_log(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        assert not any(key in line for key in KEYS.values()), "a key stands in the log"
        assert "books are wrong" not in line, line
        assert record.exc_info is None, f"{line}: {record.exc_info}"
        self.note("log", line)

    @contextmanager
    def patched(self):
        """The key file, the disk tier's thread and files, and the set of connections are ours."""
        world = self

        class OrderedServer(Server):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                self.connections = Ordered()
                world.server = self

        def open_keys(path, **options):
            if isinstance(world.key_file, OSError):
                raise world.key_file
            return Text(world.key_file)

        real_open = os.open

        def failing_open(path, flags, *rest, **more):
            if world.disk_error and flags & os.O_CREAT and str(path).endswith((".tmp", ".kv")):
                raise OSError(world.disk_error, os.strerror(world.disk_error))
            return real_open(path, flags, *rest, **more)

        def made(*arguments):
            request = APIRequest(*arguments)
            request.started = world.clock.now
            return request

        # Defaults of arguments are bound before the clock is ours.
        before = main.Server, disk_writes.threading, main.AdmissionControl, main.KeyCheck, main.App.request_type
        main.Server = OrderedServer
        main.AdmissionControl = functools.partial(main.AdmissionControl, clock=lambda: self.clock.now)
        main.KeyCheck = functools.partial(main.KeyCheck, clock=lambda: self.clock.now + self.clock.wall_offset)
        main.App.request_type = staticmethod(made)
        keys.open = open_keys
        real_threading = disk_writes.threading
        disk_writes.threading = SimpleNamespace(Thread=InlineThread, Condition=real_threading.Condition)
        disk_reads.threading = SimpleNamespace(Thread=InlineThread, Condition=Unwaited)
        files.os = Proxy(os, open=failing_open)
        try:
            yield
        finally:
            main.Server, disk_writes.threading, main.AdmissionControl, main.KeyCheck, main.App.request_type = before
            disk_reads.threading = real_threading
            del keys.open
            files.os = os

    async def live(self) -> None:
        self.stopping = False
        listening = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 8000))
        first = EngineProcess(self)
        options = main.ServeOptions(
            models=tuple(ModelSpec((name,), name) for name in MODELS[: self.num_models]),
            keys=keys.read_file("keys"),
            key_file="keys",
            spare_engines=self.rng.choice((0, 0, 1)),
            max_queue=self.rng.choice((None, 2, 50)),
            max_loaded=1 if self.num_models > 1 and self.rng.random() < 0.5 else None,
            idle_timeout_s=self.rng.choice((None, 5.0)),
            drain_s=self.rng.choice((0.5, 30.0)),
            cache_secret=b"s" * 32,
            exits_on_failure=False,
            limits=Limits(),
            since_exec=lambda: self.clock.now,
        )
        self.options = options
        serving = main._Serving(
            options,
            listening,
            first,
            lambda arguments: EngineProcess(self),
            lambda: EngineProcess(self, parked=True),
            lambda path, name: fake_text.TextModel(),
        )
        self.serving = serving
        server = self.loop.create_task(serving.run())
        while not self.loop.listeners:
            await asyncio.sleep(0.001)
        for _ in range(self.events):
            self.happen()
            await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.01, 0.1, 1.0)))
            self.raise_failures(server)
        await self.quiet(server)
        await self.leave(server)

    def happen(self) -> None:
        """One thing that the seed chooses."""
        rng = self.rng
        if rng.random() < self.fault_rate:
            fault = rng.choice(
                (self.kill_engine, self.fail_device, self.fail_disk, self.turn_clock, self.read_keys, self.fail_loads)
            )
            fault()
            return
        for _ in range(rng.choice((1, 1, 2, 6))):
            client = Client(self, len(self.clients))
            self.clients.append(self.loop.create_task(client.run()))

    def living(self) -> list[EngineProcess]:
        return [process for process in self.processes if process.status is None and process.engine is not None]

    def kill_engine(self) -> None:
        rng, living = self.rng, self.living()
        if not living:
            return
        process = rng.choice(living)
        how = rng.choice(("kill", "exit", "fatal", "noise", "freeze", "deaf"))
        self.note("fault", how)
        self.num_faults += 1
        if how == "kill":
            process.end(-9)
        elif how == "exit":
            process.end(3)
        elif how == "fatal":
            with suppress(ServerGone):
                process.send(Fatal(message="the device is lost", exit_code=1))
            process.end(1)
        elif how == "noise":
            process.noise()
        elif how == "freeze":
            process.frozen_until = self.clock.now + rng.choice((0.5, 9.0, 90.0))
        else:
            process.close_socket()

    def fail_device(self) -> None:
        rng, living = self.rng, self.living()
        if not living:
            return
        engine = rng.choice(living).engine
        how = rng.choice(("nan", "allocate", "preempt", "calm"))
        self.note("fault", how)
        engine.runner.nan_rate = 0.2 if how == "nan" else 0.0
        engine.scheduler.cache.allocator.failure_rate = rng.choice((0.5, 0.9)) if how == "allocate" else 0.0
        if how == "nan":
            self.causes.add("numerical_error")
        if how == "preempt":
            running = [request for request in engine.scheduler.running if not request.is_pinned]
            if running:
                engine.scheduler.preempt(rng.choice(running).id)

    def fail_disk(self) -> None:
        rng = self.rng
        self.note("fault", "disk")
        self.disk_error = rng.choice((0, 0, 28, 5, 30))
        found = sorted(os.path.join(folder, name) for folder, _, names in os.walk(self.folder) for name in names)
        for path in rng.sample(found, min(len(found), 3)):
            if path.endswith(".kv"):
                with open(path, "r+b") as file:
                    how = rng.randrange(3)
                    if how == 0:
                        file.truncate(rng.randrange(100))
                    elif how == 1:
                        file.seek(rng.randrange(max(1, os.path.getsize(path))))
                        file.write(b"\x55")
                    else:
                        os.unlink(path)

    def turn_clock(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            self.clock.wall_offset += rng.choice((-3600.0, 3600.0, -0.5, 86400.0))
        else:
            self.clock.now += rng.choice((0.5, 5.0, 20.0))
            self.causes |= {"request_timeout", "timeout"}
        self.note("fault", "clock")

    def read_keys(self) -> None:
        self.key_file = self.rng.choice(
            (KEY_FILE, REVOKED, "no line of a key file\n", OSError(5, "Input/output error"), "")
        )
        self.note("fault", "keys")
        self.loop.signal(signal.SIGHUP)
        if self.key_file in (KEY_FILE, REVOKED):  # of the others none changes anything
            self.keys_read, self.is_revoked = self.keys_read + 1, self.key_file is REVOKED

    def fail_loads(self) -> None:
        self.failing_loads = self.rng.choice((0.0, 0.3, 1.0))

    def raise_failures(self, server: asyncio.Task) -> None:
        for context in self.loop.errors:
            raise context.get("exception") or AssertionError(context["message"])
        if server.done():
            raise AssertionError(f"the server ended: {server.result()}")
        for task in self.clients:
            if task.done() and task.exception() is not None:
                raise task.exception()

    # -- the end

    async def quiet(self, server: asyncio.Task) -> None:
        """No more faults: everybody gets an answer, nothing is held, and who asks then is answered."""
        self.failing_loads, self.disk_error = 0.0, 0
        for process in self.living():
            process.engine.runner.nan_rate = process.engine.scheduler.cache.allocator.failure_rate = 0.0
        while not all(task.done() for task in self.clients):
            await asyncio.wait([task for task in self.clients if not task.done()], return_when=asyncio.FIRST_EXCEPTION)
            self.raise_failures(server)
        self.raise_failures(server)
        await asyncio.sleep(100.0)  # connections of those who vanished, lingering ones, engines that are tried again
        self.raise_failures(server)
        app, pool = self.serving._app, self.serving._pool
        held = {
            "choices": app.admission.choices,
            "queued tokens": app.admission.queued_tokens,
            "bodies": self.server.bodies.total + len(self.server.bodies.held),
            "connections": len(self.server.connections),
            "of tenants": sum(load.choices + load.queued for load in app.admission.tenants.values()),
            "users": sum(model.users for model in pool.models),
            "requests": sum(len(model.engine.requests) for model in pool.models),
            "requests without a last word": sum(len(model.engine.cancelled) for model in pool.models),
            "engine requests": sum(len(process.engine.scheduler.requests) for process in self.living()),
        }
        assert not any(held.values()), f"held when nobody is there: {held}"
        for process in self.living():
            scheduler = process.engine.scheduler
            assert not scheduler.running and not scheduler.cache.tables and not process.engine.runner.flight
            assert scheduler.check_integrity() == []
            assert scheduler.cache.allocator.num_free == scheduler.cache.allocator.num_pages
        client = Client(self, -1)
        status = []
        for _ in range(4):  # a model that could not be loaded is tried again by the first request after a while
            wire = Wire(self.loop, client.rng, self.loop.listeners[0](), "10.9.9.9")
            before = self.num_whole
            await client.ask(wire, calm=True)
            wire.fin()
            status.append(self.num_whole > before)
            if status[-1]:
                break
            await asyncio.sleep(61.0)
        assert status[-1], (
            f"the server does not recover: {[model.state for model in pool.models]}, {pool.default.engine.reason}"
        )
        ok, why = pool.health()
        assert ok, f"not ready although it answers: {why}"
        assert self.charged == sorted(self.charged)
        for index, at in enumerate(self.charged):  # a minute's worth at once, then its rate
            since = [other for other in self.charged[: index + 1] if at - other <= 60]
            assert len(since) <= 2 * RPM + 1 + RPM * self.keys_read, (
                f"{len(since)} requests a minute on a quota of {RPM}"
            )
        usage = sum(tenant.completion_tokens for tenant in app.tenants.values())
        assert usage == sum(model.statistics.completion_tokens for model in pool.models), "usage and statistics differ"

    async def leave(self, server: asyncio.Task) -> None:
        """SIGTERM under load."""
        self.causes |= {"shutting_down", "request_timeout"}
        for _ in range(6):
            client = Client(self, len(self.clients))
            self.clients.append(self.loop.create_task(client.run()))
        await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.3)))
        self.stopping = True
        asked = self.clock.now
        self.note("fault", "SIGTERM")
        self.loop.signal(signal.SIGTERM)
        code = await server
        assert code == 0
        assert self.clock.now - asked <= self.options.drain_s + 8, "it does not end in time"
        await asyncio.wait(self.clients)
        for task in self.clients:
            if task.exception() is not None:
                raise task.exception()
        await asyncio.sleep(5.0)
        alive = [process.pid for process in self.processes if process.status is None]
        assert not alive, f"processes {alive} run although nobody is there"
        assert not self.server.connections, "connections are left"


NO_FILE = os.open(os.devnull, os.O_RDONLY)


class Text:
    """An open text file."""

    def __init__(self, text: str):
        self.read = lambda size: text
        self.fileno = lambda: NO_FILE

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        return


class Proxy:
    """A module with some of its functions replaced."""

    def __init__(self, module, **replaced):
        self.__dict__ |= replaced
        self._module = module

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def walk(seed: int, events: int = 60) -> World:
    """Raises AssertionError that begins with the seed."""
    world = World(seed, events)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(f"world seed {seed}: {type(error).__name__}: {error}") from error
    return world
