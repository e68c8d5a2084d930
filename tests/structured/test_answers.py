"""How the grammar process answers: in words of the shared memory where it can, else by a message; and how messages are read."""

import socket
import struct
import threading
import time
from array import array
from functools import partial

import msgspec
import pytest
from test_engine import drain, options, params
from test_lazy_masks import GRAMMARS, make, model  # noqa: F401

from zse.engine import grammars as queue
from zse.structured import service
from zse.structured.messages import (
    ANSWERED,
    ANSWERS_IN_MEMORY,
    IS_AWAITED,
    KIND,
    MASKED,
    US,
    WORDS_BYTES,
    FromProcess,
    Opened,
    Stepped,
)
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
    theirs.sendall(packet(Stepped([[0]], {7: "too large"}, 1.0)))  # a failure is a message
    assert "too large" in grammars.finish().failures[7].message


def test_messages_in_pieces_and_several_at_once(pair):
    grammars, theirs = pair
    first, second, third = Opened(1, "x" * 100_000), Opened(2), Stepped([[1]], {}, 2.0, {3: {4: [5]}})
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
