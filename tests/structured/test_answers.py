"""How the grammar process answers: in words of the shared memory where it can, else by a message; and how messages are read."""

import os
import signal
import socket
import struct
import threading
import time
from array import array
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from test_engine import drain, options, params
from test_lazy_masks import GRAMMARS, make, model  # noqa: F401

from zse.engine import grammars as queue
from zse.structured import service
from zse.structured.messages import (
    ANSWERED,
    ANSWERS_IN_MEMORY,
    ASKED,
    ASKS_IN_MEMORY,
    ID,
    IS_AWAITED,
    KIND,
    LINE,
    MASKED,
    TOKEN,
    US,
    WORDS_BYTES,
    FromProcess,
    Opened,
    Stepped,
    ToProcess,
)
from zse.structured.options import Structure
from zse.structured.service import Grammars, MaskAsk

BY_MESSAGE = (
    "import sys, zse.structured.worker as worker; worker.ANSWERS_IN_MEMORY = False; "
    "raise SystemExit(worker.main(sys.argv[1:]))"
)


def replies(engine) -> list:
    """Of one request after another, greedy and drawn."""
    found = []
    for number, name in enumerate(GRAMMARS):
        for temperature in (0.0, 1.0):
            engine.submit(number, [3, 9, 4], params(7, temperature=temperature, max_tokens=30), options(GRAMMARS[name]))
            found.append(drain(engine)[number])
    return found


@pytest.mark.parametrize("is_slow", [False, True])
def test_either_way_the_same_tokens(model, monkeypatch, is_slow):  # noqa: F811
    """is_slow: a forward takes as long as the grammar process, for which the engine then never waits: no step is answered by a
    message."""
    messages = []
    take, begin = Grammars._next, Grammars.begin

    def counted(self, timeout):
        message = take(self, timeout)
        messages.append(isinstance(message, Stepped))
        return message

    def slow(self, asks):
        begin(self, asks)
        end = time.monotonic() + 5
        while is_slow and kind == "memory" and self._words[ANSWERED] != self._num_steps and time.monotonic() < end:
            time.sleep(0.0002)

    monkeypatch.setattr(Grammars, "_next", counted)
    monkeypatch.setattr(Grammars, "begin", slow)
    found = {}
    for kind in ("memory", "messages"):
        if kind == "messages":
            monkeypatch.setattr(queue, "Grammars", partial(Grammars, command=("-P", "-c", BY_MESSAGE)))
        loaded = make(model)
        try:
            messages.clear()
            found[kind] = replies(loaded.engine)
            steps, told = loaded.engine.counters()["masked_lines"], sum(messages)
        finally:
            loaded.engine.close()
            loaded.source.close()
        assert steps > 50
        if kind == "messages":
            assert told >= steps
        elif is_slow and ANSWERS_IN_MEMORY:
            assert told == 0
    assert found["memory"] == found["messages"]


class Request:
    id, prompt_len, tokens = 7, 0, array("i")


@pytest.fixture
def pair():
    """Grammars without a process, and the other end of its socket."""
    made = Grammars("model", 64, frozenset([2]), 4)
    ours, theirs = socket.socketpair()
    made._pipe, made._decoder = ours, msgspec.msgpack.Decoder(FromProcess)
    made._words = memoryview(bytearray(WORDS_BYTES)).cast("q")
    made._poll = service.select.poll()
    made._poll.register(ours.fileno(), service.select.POLLIN)
    yield made, theirs
    ours.close()
    theirs.close()


def packet(message) -> bytes:
    """As multiprocessing.connection sends it."""
    data = msgspec.msgpack.encode(message)
    return struct.pack("!i", len(data)) + data


def test_an_answer_in_memory_just_before_it_is_waited_for(pair):
    """The process has looked whether it is awaited, and then writes the words: no message comes."""
    grammars, _ = pair
    grammars.begin([MaskAsk(Request, 3)])

    def answer():
        while not grammars._words[IS_AWAITED]:
            pass
        time.sleep(0.02)
        grammars._words[KIND], grammars._words[US] = MASKED, 12
        grammars._words[ANSWERED] = 1

    thread = threading.Thread(target=answer)
    thread.start()
    started = time.monotonic()
    found = grammars.finish()
    thread.join()
    assert found.lines == [3] and not found.failures and time.monotonic() - started < service.STEP_S / 2
    assert not grammars._words[IS_AWAITED]


def test_an_answer_of_an_earlier_step_is_not_this_one_s(pair):
    grammars, theirs = pair
    for number, kind in enumerate((MASKED, 0), 1):
        grammars.begin([MaskAsk(Request, 1)])
        grammars._words[KIND], grammars._words[ANSWERED] = kind, number
        assert grammars.finish().lines == [1] * kind
    grammars.begin([MaskAsk(Request, 1)])
    theirs.sendall(packet(Stepped([[0]], {7: "too large"}, 1.0, 3)))  # a failure is a message
    assert "too large" in grammars.finish().failures[7].message


def test_messages_in_pieces_and_several_at_once(pair):
    grammars, theirs = pair
    first, second, third = Opened(1, "x" * 100_000), Opened(2), Stepped([[1]], {}, 2.0, 1, {3: {4: [5]}})
    data = packet(first) + packet(second) + packet(third)
    theirs.settimeout(5)
    found = []

    def read():
        while (message := grammars._next(0.0)) is not None:
            found.append(message)

    for start, stop in ((0, 3), (3, 4), (4, 90_000), (90_000, len(packet(first)) + 2), (len(packet(first)) + 2, None)):
        theirs.sendall(data[start:stop])
        time.sleep(0.01)
        read()
    assert found == [first, second, third]
    assert grammars._next(0.01) is None
    theirs.close()
    with pytest.raises(EOFError):
        grammars._next(0.0)


def asked_in_memory(grammars) -> list[int]:
    return [grammars._words[place] for place in (ASKED, ID, TOKEN, LINE)]


@pytest.fixture
def woken(pair):
    """The pair, asked in memory; and the request of which it knows all but the last token."""
    grammars, theirs = pair
    if not ASKS_IN_MEMORY:
        pytest.skip("nothing is asked in memory here")
    grammars._wake = os.eventfd(0, os.EFD_NONBLOCK)
    grammars._live[7] = live = service._Live(Structure(kind="regex", source="a*"), "")
    live.sent = live.start = 2
    request = SimpleNamespace(id=7, prompt_len=2, tokens=array("i", [3, 4, 5]))
    yield grammars, theirs, request
    os.close(grammars._wake)


def test_a_mask_that_is_asked_for_ahead_is_not_asked_for_again(woken):
    grammars, theirs, request = woken
    grammars.ahead(request, 1)
    assert asked_in_memory(grammars) == [1, 7, 5, 1] and os.eventfd_read(grammars._wake) == 1
    grammars.ahead(request, 1)  # nobody has taken the first
    grammars.begin([MaskAsk(request, 1)])
    grammars._words[KIND], grammars._words[ANSWERED] = MASKED, 1
    assert grammars.finish().lines == [1] and asked_in_memory(grammars)[0] == 1
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)


def test_a_step_that_wants_something_else_throws_away_what_was_asked_ahead(woken):
    grammars, theirs, request = woken
    grammars.ahead(request, 1)
    theirs.sendall(packet(Stepped([[0]], {7: "too large"}, 1.0, 1)))  # an answer that nobody waits for
    grammars.begin([MaskAsk(request, 2)])
    step = msgspec.msgpack.decode(theirs.recv(4096)[4:], type=ToProcess)
    assert (step.number, step.jobs[0].line, step.jobs[0].tokens) == (2, 2, [])  # token 5 is known
    theirs.sendall(packet(Stepped([[1]], {}, 1.0, 2)))
    found = grammars.finish()
    assert found.lines == [2] and not found.failures


def test_a_failure_of_a_mask_that_was_asked_for_ahead_is_told(woken):
    grammars, theirs, request = woken
    grammars.ahead(request, 1)
    theirs.sendall(packet(Stepped([[0]], {7: "too large"}, 1.0, 1)))
    grammars.poll(0.1)
    grammars.begin([MaskAsk(request, 1)])
    assert "too large" in grammars.finish().failures[7].message


def with_one_that_goes(engine) -> list[int]:
    """The tokens of a request beside which another begins and is cancelled."""
    for number in (100, 101):
        engine.submit(number, [3, number - 90], params(number, max_tokens=40), options({"regex": "[a-z]{60}"}))
    tokens = []
    while engine.has_work:
        tokens += [token for output in engine.step() if output.id == 100 for token in output.tokens]
        if len(tokens) > 20:
            engine.cancel(101)
    return tokens


@pytest.mark.parametrize("how", ["memory", "messages"])
def test_one_request_has_its_masks_asked_for_ahead(model, monkeypatch, how):  # noqa: F811
    """The tokens are those of masks that are asked for with the step; another request that comes, and one that goes, throw away what
    was asked."""
    if how == "messages":
        monkeypatch.setattr(service, "ASKS_IN_MEMORY", False)
    ahead, send = Grammars.ahead, Grammars._send_step
    sent: list[str] = []

    def sends(self, asks):
        sent.append("ahead" if asks == [self._ahead] else "step")
        send(self, asks)

    found = {}
    for kind in ("ahead", "with the step"):
        monkeypatch.setattr(Grammars, "ahead", ahead if kind == "ahead" else lambda self, request, line: None)
        monkeypatch.setattr(Grammars, "_send_step", sends)
        loaded = make(model)
        try:
            sent.clear()
            found[kind] = replies(loaded.engine)
            steps = loaded.engine.counters()["masked_lines"]
            asked = sent.count("step")
            assert asked < 0.2 * steps if kind == "ahead" else asked == len(sent)
            assert sent.count("ahead") > 0.5 * steps or how == "memory" or kind != "ahead"
            found[kind].append(with_one_that_goes(loaded.engine))
        finally:
            loaded.engine.close()
            loaded.source.close()
    assert found["ahead"] == found["with the step"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_process_dies_around_what_is_asked_ahead(model, monkeypatch, moment):  # noqa: F811
    loaded = make(model)
    ahead, calls = Grammars.ahead, []

    def ahead_and_kill(self, request, line):
        calls.append(1)
        if len(calls) == 5 and moment == "before":
            os.kill(self._pid, signal.SIGKILL)
        ahead(self, request, line)
        if len(calls) == 5 and moment == "after":
            os.kill(self._pid, signal.SIGKILL)

    try:
        whole = replies(loaded.engine)
        monkeypatch.setattr(Grammars, "ahead", ahead_and_kill)
        assert replies(loaded.engine) == whole and len(calls) > 5
        assert loaded.engine.counters()["grammar_process_restarts"] == 1
    finally:
        loaded.engine.close()
        loaded.source.close()
