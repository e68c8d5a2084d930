"""Frames between server and engine: any cut of the stream gives the same messages, a broken peer is named."""

import socket

import msgspec
import pytest

from zse.engine.messages import (
    MAX_FRAME_BYTES,
    PACKED_TOKENS,
    Cancel,
    FrameReader,
    FrameSocket,
    FromEngine,
    Heartbeat,
    Measured,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
    TokenLogprob,
    Tokens,
    encode,
)
from zse.errors import EngineError
from zse.sampling.params import SamplingParams

TO_ENGINE = [
    Submit(1, [1, 2, 3], SamplingParams(max_tokens=4, stop=("a",), logit_bias={5: -1.0})),
    Cancel(1),
    Shutdown(),
]
FROM_ENGINE = [
    Ready("m", 128, 4, 10, {"weights": 1}, {"ready": 2.5}),
    Tokens(7, [1, 2], [TokenLogprob(-0.5, [(1, -0.5)]), TokenLogprob(-1.0, [])], "stop", 16),
    Heartbeat(1, 2, 3, 4),
]


@pytest.mark.parametrize("kind,messages", [(ToEngine, TO_ENGINE), (FromEngine, FROM_ENGINE)])
def test_every_cut_gives_the_same_messages(kind, messages):
    stream = b"".join(encode(message) for message in messages)
    for step in range(1, len(stream) + 1):
        reader, got = FrameReader(kind), []
        for start in range(0, len(stream), step):
            got += reader.feed(stream[start : start + step])
        assert got == messages


@pytest.mark.parametrize("count", [0, 1, PACKED_TOKENS, 2 * PACKED_TOKENS + 1])
def test_log_probabilities_travel_as_bytes(count):
    scores = [None, *(TokenLogprob(-0.25 * index, [(index, -1.0)]) for index in range(count - 1))][:count]
    sent = Measured(3, count, None, scores).to_send()
    (came,) = FrameReader(FromEngine).feed(encode(sent))
    assert came.logprobs is None and len(came.packed) == -(-count // PACKED_TOKENS) and came.scores() == scores
    vector = Measured(4, 2, b"abcd")
    assert vector.to_send() is vector and vector.scores() == []


def test_oversized_and_foreign_frames_are_refused():
    with pytest.raises(EngineError, match="over the limit"):
        FrameReader(ToEngine).feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    payload = msgspec.msgpack.encode({"type": "Reboot"})
    with pytest.raises(EngineError, match="no message"):
        FrameReader(ToEngine).feed(len(payload).to_bytes(4, "little") + payload)


def test_frame_socket_receives_what_is_there_and_reports_the_end():
    ours, theirs = socket.socketpair()
    engine = FrameSocket(theirs)
    assert engine.receive(0) == []
    ours.sendall(b"".join(encode(message) for message in TO_ENGINE))
    assert engine.receive(1.0) == TO_ENGINE
    engine.send(*FROM_ENGINE)
    assert FrameReader(FromEngine).feed(ours.recv(1 << 16)) == FROM_ENGINE
    ours.close()
    assert engine.receive(None) is None
    with pytest.raises(EngineError, match="gone"):
        engine.send(Heartbeat(0, 0, 0, 0))
        engine.send(Heartbeat(0, 0, 0, 0))
    engine.close()
