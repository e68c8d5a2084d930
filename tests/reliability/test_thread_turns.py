"""Threads for parsing, templates and tokenizing: a tenant's many long prompts hold up nobody else's."""

import asyncio
import threading
import time

import fake_text
import pytest
from harness import chat_body, read_reply, request, wait_for

from zse.server import work
from zse.server.keys import Key
from zse.server.work import FairThreads

CHAT = "/v1/chat/completions"
KEYS = (Key("flood", "sk-flood"), Key("calm", "sk-calm"))


class Work:
    """Jobs that run until they are told to end."""

    def __init__(self, turns: FairThreads):
        self.turns, self.begun, self._ends = turns, [], {}

    def ask(self, tenant: str, name: str) -> asyncio.Task:
        self._ends[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            assert self._ends[name].wait(20)
            return name

        return asyncio.create_task(self.turns.run(tenant, work))

    def end(self, name: str) -> None:
        self._ends[name].set()

    async def has_begun(self, count: int) -> list[str]:
        while len(self.begun) < count:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.01)
        return list(self.begun)


def test_tenants_take_turns(monkeypatch):
    monkeypatch.setattr(work, "MOST_THREADS", 4)

    async def run() -> None:
        work = Work(FairThreads())
        tasks = [work.ask("b", "b0")]
        work.end("b0")
        await tasks[0]
        tasks += [work.ask("a", f"a{number}") for number in range(6)]
        assert await work.has_begun(3) == ["b0", "a0", "a1"]  # half of the threads
        tasks += [work.ask("b", "b1"), work.ask("c", "c1"), work.ask("b", "b2")]
        assert await work.has_begun(5) == ["b0", "a0", "a1", "b1", "c1"]
        work.end("a0")
        assert (await work.has_begun(6))[5:] == ["a2"]
        work.end("a1")  # and now it is b's turn
        assert (await work.has_begun(7))[6:] == ["b2"]
        for name in [*(f"a{number}" for number in range(6)), "b1", "b2", "c1"]:
            work.end(name)
        assert len(await asyncio.gather(*tasks)) == 10
        assert not work.turns._running and not work.turns._waiting

    asyncio.run(run())


def test_a_tenant_alone_has_all_threads(monkeypatch):
    monkeypatch.setattr(work, "MOST_THREADS", 4)

    async def run() -> None:
        work = Work(FairThreads())
        tasks = [work.ask("a", str(number)) for number in range(6)]
        assert len(await work.has_begun(4)) == 4
        for number in range(6):
            work.end(str(number))
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_who_leaves_keeps_its_thread_until_the_work_ends_and_its_place_not(monkeypatch):
    monkeypatch.setattr(work, "MOST_THREADS", 1)

    async def run() -> None:
        work = Work(FairThreads())
        first, second, third = (work.ask("a", name) for name in ("1", "2", "3"))
        await work.has_begun(1)
        first.cancel()
        second.cancel()
        await asyncio.sleep(0.02)
        assert first.cancelled() and work.begun == ["1"]
        work.end("1")
        work.end("3")
        assert await third == "3" and work.begun == ["1", "3"]
        await asyncio.sleep(0.01)
        assert not work.turns._running and not work.turns._waiting

    asyncio.run(run())


@pytest.mark.parametrize("fails", [False, True])
def test_what_work_raises_is_raised(fails):
    def work() -> int:
        if fails:
            raise KeyError("x")
        return 3

    async def run() -> None:
        turns = FairThreads()
        if fails:
            with pytest.raises(KeyError):
                await turns.run("a", work)
        else:
            assert await turns.run("a", work) == 3
        await asyncio.sleep(0)
        assert not turns._running

    asyncio.run(run())


@pytest.mark.timed
def test_a_chat_does_not_wait_for_another_tenants_long_prompts(own_server, monkeypatch):
    """Forty prompts that take 0.1 s each: 0.7 s of six threads."""
    render = fake_text.TextModel.encode_chat

    def slow(*args, **kwargs):
        found = render(*args, **kwargs)
        time.sleep(0.1 if len(found) > 10_000 else 0)
        return found

    monkeypatch.setattr(fake_text.TextModel, "encode_chat", slow)
    server = own_server(engine="--max-context 100000", key=KEYS, max_choices=200)
    calm, flood = ({"authorization": f"Bearer {key}"} for key in ("sk-calm", "sk-flood"))
    assert server.post(CHAT, chat_body("hi"), calm).status == 200
    held = []
    for _ in range(40):
        sock = server.connect()
        sock.sendall(request("POST", CHAT, chat_body("x" * 20_000, max_tokens=1), flood))
        held.append(sock)
    wait_for(lambda: server.state()["choices"] >= 20)
    start = time.monotonic()
    assert server.post(CHAT, chat_body("hi"), calm).status == 200
    took = time.monotonic() - start
    print(f"a chat beside forty long prompts: {1000 * took:.0f} ms")
    assert took < 0.2
    assert {read_reply(sock).status for sock in held} == {200}
    for sock in held:
        sock.close()
    server.assert_quiet()
