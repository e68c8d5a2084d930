import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import tiny_model
from fake_engine import EOS

from zse.engine import serving
from zse.engine.messages import (
    Ask,
    Cancel,
    Cancelled,
    Failed,
    Fatal,
    FrameReader,
    FromEngine,
    Heartbeat,
    Ready,
    Shutdown,
    StepTokens,
    Submit,
    TokenLogprob,
    Tokens,
    encode,
)
from zse.engine.process import spawn
from zse.engine.serving import told
from zse.errors import EngineError
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import StepOutput, numerical_error

FAKE = ("-P", str(Path(__file__).parent / "fake_engine.py"))


def frame(data) -> bytes:
    payload = msgspec.msgpack.encode(data)
    return len(payload).to_bytes(4, "little") + payload


class Client:
    """The server's end, blocking."""

    def __init__(self, *arguments, worker=FAKE):
        self.process = spawn(list(arguments), worker)
        self.reader, self.inbox, self.beats = FrameReader(FromEngine), [], []

    def send(self, *messages):
        self.process.sock.sendall(b"".join(encode(message) for message in messages))

    def receive(self, timeout=20.0):
        """The next message that is no heartbeat; None at end-of-file."""
        deadline = time.monotonic() + timeout
        while not self.inbox:
            assert select.select([self.process.sock], [], [], max(0, deadline - time.monotonic()))[0], "no message"
            data = self.process.sock.recv(1 << 16)
            if not data:
                return None
            for message in self.reader.feed(data):
                if isinstance(message, StepTokens):
                    self.inbox += map(lambda id, token: Tokens(id, [token]), message.ids, message.tokens)
                else:
                    (self.beats if isinstance(message, Heartbeat) else self.inbox).append(message)
        return self.inbox.pop(0)

    def reply(self, id):
        tokens = []
        while True:
            message = self.receive()
            assert isinstance(message, Tokens) and message.id == id
            tokens += message.tokens
            if message.finish:
                return tokens, message.finish


@pytest.fixture
def start():
    clients = []

    def make(*arguments, worker=FAKE, ready=True):
        client = Client(*arguments, worker=worker)
        clients.append(client)
        if ready:
            assert isinstance(client.receive(), Ready)
        return client

    yield make
    for client in clients:
        client.process.kill()
        client.process.wait(10)
        client.process.sock.close()


def test_a_step_of_several_requests_is_one_message():
    outputs = [
        StepOutput(1, [5], None, None),
        StepOutput(2, [6], None, "stop"),
        StepOutput(3, [7], None, None),
        StepOutput(4, [8], [TokenLogprob(-1.0, [])], None),
        StepOutput(5, [], None, "error", error=numerical_error()),
    ]
    messages = told(outputs)
    assert messages[:3] == [
        StepTokens([1, 3], [5, 7]),
        Tokens(2, [6], None, "stop"),
        Tokens(4, [8], [TokenLogprob(-1.0, [])]),
    ]
    assert (messages[3].id, messages[3].code) == (5, "numerical_error") and told([]) == []
    frames = b"".join(encode(message) for message in messages)
    assert FrameReader(FromEngine).feed(frames) == messages
    with pytest.raises(EngineError, match="no message"):
        FrameReader(FromEngine).feed(frame({"kind": "StepTokens", "ids": [1, 2], "tokens": [3]}))


def test_ready_says_what_was_started(start):
    ready = start(ready=False).receive()
    assert (ready.model, ready.max_context, ready.max_rows, ready.num_pages) == ("fake", 256, 4, 64)
    assert list(ready.phases_ms) == ["interpreter", "ready"]
    assert 0 < ready.phases_ms["interpreter"] <= ready.phases_ms["ready"]


def test_a_reply_with_logprobs(start):
    client = start()
    client.send(Submit(id=5, prompt=[97], params=SamplingParams(max_tokens=9, logprobs=2)))
    message = client.receive()
    assert 0 < message.waited_s < 5
    message.waited_s = 0.0
    assert message == Tokens(id=5, tokens=[98], logprobs=[TokenLogprob(-0.5, [(98, -0.5), (99, -1.5)])])
    assert client.reply(5) == ([99, EOS], "stop")


def test_requests_run_interleaved(start):
    client = start("--step-seconds", "0.01")
    client.send(*(Submit(id=id, prompt=[id * 10 + 1], params=SamplingParams(max_tokens=5)) for id in range(4)))
    order, got = [], {}
    while sum(map(len, got.values())) < 20:
        message = client.receive()
        order.append(message.id)
        got.setdefault(message.id, []).extend(message.tokens)
    assert got == {id: [id * 10 + 2 + i for i in range(5)] for id in range(4)}
    assert order != sorted(order)


def test_refused_and_failed_requests(start):
    client = start()
    prompts = ([5000], [1] * 300, [666])
    client.send(*(Submit(id=1 + i, prompt=prompt, params=SamplingParams()) for i, prompt in enumerate(prompts)))
    refused, too_long, numerical = (client.receive() for _ in range(3))
    assert isinstance(refused, Failed)
    assert (refused.id, refused.status, refused.code, refused.param) == (1, 400, "invalid_token_id", "prompt")
    assert (too_long.id, too_long.status, too_long.code) == (2, 400, "context_length_exceeded")
    assert (numerical.id, numerical.status, numerical.code) == (3, 500, "numerical_error")
    assert numerical.type == "server_error"
    client.send(Submit(id=4, prompt=[1], params=SamplingParams(max_tokens=1)))
    assert client.reply(4) == ([2], "length")


def test_cancel_stops_a_request_and_unknown_ids_are_ignored(start):
    client = start("--step-seconds", "0.02")
    client.send(Submit(id=1, prompt=[100], params=SamplingParams(max_tokens=100)))
    client.receive()
    client.send(Cancel(id=1), Cancel(id=1), Cancel(id=77))
    client.send(Submit(id=2, prompt=[1], params=SamplingParams(max_tokens=2)))
    seen = []
    while not seen or seen[-1].id != 2 or not seen[-1].finish:
        seen.append(client.receive())
    told = [message for message in seen if not isinstance(message, Cancelled)]
    assert sum(message.id == 1 for message in told) <= 2 and not any(m.id == 1 and m.finish for m in told)
    words = [message for message in seen if isinstance(message, Cancelled)]
    assert [word.id for word in words] == [1, 1, 77] and words[0].computed >= 2 and not words[1].computed


def test_heartbeats_come_while_idle_and_while_busy(start):
    client = start("--step-seconds", "0.05")
    client.send(Submit(id=1, prompt=[100], params=SamplingParams(max_tokens=30)))
    client.reply(1)
    busy = len(client.beats)
    assert busy >= 2 and any(beat.running == 1 and beat.free_pages < 64 for beat in client.beats)
    end = time.monotonic() + 1.3
    while time.monotonic() < end:
        if select.select([client.process.sock], [], [], 0.1)[0]:
            client.beats += client.reader.feed(client.process.sock.recv(1 << 16))
    idle = client.beats[busy:]
    assert 2 <= len(idle) <= 4 and idle[-1].running == 0 and idle[-1].free_pages == 64 and idle[-1].steps == 30


@pytest.mark.timed
def test_an_idle_engine_does_not_spin(start):
    client = start()
    before = _cpu_seconds(client.process.pid)
    time.sleep(1.0)
    assert _cpu_seconds(client.process.pid) - before <= 0.05


def _cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("how", ["shutdown", "eof"])
def test_it_exits_when_told_and_when_the_server_goes(start, how, busy):
    client = start("--step-seconds", "0.01")
    if busy:
        client.send(Submit(id=1, prompt=[100], params=SamplingParams(max_tokens=200)))
        client.receive()
    if how == "shutdown":
        client.send(Shutdown())
    else:
        client.process.sock.close()
    assert client.process.wait(5) == 0  # whether it meets the closed socket when it receives or when it sends


def test_sigint_is_left_to_the_server(start):
    client = start()
    os.kill(client.process.pid, signal.SIGINT)
    client.send(Submit(id=1, prompt=[1], params=SamplingParams(max_tokens=1)))
    assert client.reply(1) == ([2], "length")


@pytest.mark.parametrize(
    ("failure", "message", "exit_code", "code"),
    [
        ("format", "model.gguf: offset 17: version: is 99", 2, ""),
        ("bug", "internal error in the engine: KeyError", 1, ""),
        ("memory", "out of memory; lower max_context or max_rows", 1, "out_of_memory"),
    ],
)
def test_load_errors_are_fatal_and_say_why(start, failure, message, exit_code, code):
    client = start("--fail", failure, ready=False)
    assert client.receive() == Fatal(message=message, exit_code=exit_code, code=code)
    assert client.receive() is None and client.process.wait(5) == exit_code


def test_a_bug_in_a_step_is_fatal(start):
    client = start()
    client.send(Submit(id=1, prompt=[667], params=SamplingParams()))
    assert client.receive() == Fatal(message="internal error in the engine: RuntimeError", exit_code=1)
    assert client.process.wait(5) == 1


@pytest.mark.parametrize("options", [(), ("--ahead", "1")], ids=["in step", "ahead"])
def test_a_device_that_fails_in_a_step_ends_the_engine(start, options):
    """At once, though closing the device would hang, and with the driver's words."""
    client = start(*options)
    client.send(Submit(id=1, prompt=[5], params=SamplingParams(max_tokens=200)))
    first = client.receive()
    assert (first.id, first.tokens) == (1, [6])
    client.send(Submit(id=2, prompt=[669], params=SamplingParams()))
    message = client.receive()
    while isinstance(message, Tokens) and message.id == 1:
        message = client.receive()
    assert message == Fatal(
        message="the device failed: event_wait: CUDA_ERROR_ILLEGAL_ADDRESS (700) while running decode", exit_code=75
    )
    assert client.receive() is None and client.process.wait(5) == 75


def test_a_crash_shows_as_end_of_file(start):
    client = start()
    client.send(Submit(id=1, prompt=[668], params=SamplingParams()))
    assert client.receive() is None and client.process.wait(5) == 139


def test_a_broken_frame_ends_the_engine(start):
    client = start()
    client.process.sock.sendall(b"\xff\xff\xff\xff")
    assert client.process.wait(5) == 1


def test_started_by_hand_it_says_who_starts_it():
    done = subprocess.run([sys.executable, "-m", "zse.engine.worker"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "started by `zse serve`" in done.stderr


def test_bad_options_are_fatal(start):
    client = start("--modle", "x", worker=("-P", "-m", "zse.engine.worker"), ready=False)
    fatal = client.receive()
    assert isinstance(fatal, Fatal) and "unknown engine option --modle" in fatal.message and fatal.exit_code == 2


def test_a_job_is_answered_once_or_refused(start, tmp_path):
    """With a real model: the frames of Submit with an Ask, Measured and Failed."""
    client = start(
        "--model", str(tiny_model.write(tmp_path / "tiny")), "--device", "cpu", worker=("-m", "zse.engine.worker")
    )
    client.send(
        Submit(1, [5, 6, 7], Ask("last", normalize=True)),
        Submit(2, [5, 6, 7], Ask("logprobs", top=2)),
        Submit(3, [1 << 20], Ask("mean")),
        Submit(4, [5, 6, 7], SamplingParams(max_tokens=2)),
    )
    answers = {}
    while len(answers) < 4:
        message = client.receive()
        if not isinstance(message, Tokens) or message.finish:
            answers[message.id] = message
    assert len(answers[1].vector) == 4 * tiny_model.HIDDEN and answers[1].num_tokens == 3
    assert answers[2].scores()[0] is None and [len(entry.top) for entry in answers[2].scores()[1:]] == [2, 2]
    assert (answers[3].code, answers[3].param) == ("invalid_token_id", "prompt")
    while not client.beats or client.beats[-1].counters["jobs_finished"] != 2:
        client.beats += client.reader.feed(client.process.sock.recv(1 << 16))


class QuietEngine:
    """Has something to do in idle time, as long as `pieces` are left; `busy` turns of work first."""

    wake_fds: tuple[int, ...] = ()

    def __init__(self, pieces: int, busy: int = 0):
        self.pieces, self.busy, self.begun = pieces, busy, []

    has_work = property(lambda self: self.busy > 0)

    def use_idle_time(self) -> bool:
        self.pieces -= 1
        self.begun.append(time.monotonic())
        return self.pieces >= 0

    def counters(self):
        return {}

    def step(self):
        self.busy -= self.busy > 0
        return []

    def take_completed(self):
        return []


class WaitingSocket:
    """Nothing comes; a wait lasts as long as it is asked for. messages: what the first receives return, one each."""

    def __init__(self, *messages):
        self.messages, self.waits = list(messages), []

    def receive(self, seconds: float):
        self.waits.append(seconds)
        time.sleep(seconds)
        return [self.messages.pop(0)] if self.messages else []

    def send(self, *messages):
        pass

    def watch(self, fd):
        pass


@pytest.mark.parametrize("after", ["start", "message", "work"])
def test_idle_time_begins_behind_a_quiet_while(after, monkeypatch):
    """A request that follows a start, a message or the end of others finds no graph being recorded; what is to be done is done then
    without a pause."""
    monkeypatch.setattr(serving, "heartbeat", lambda engine: None)
    engine = QuietEngine(3, busy=5 if after == "work" else 0)
    socket = WaitingSocket(*[Cancel(id=9)] * (after == "message"))
    engine.num_computed, engine.cancel = lambda id: 0, lambda id: None
    loop = serving.turns(engine, socket)
    begin = time.monotonic()
    while engine.busy > 0:
        next(loop)
        begin = time.monotonic()
    while engine.pieces >= 0:
        next(loop)
    assert engine.begun[0] - begin >= 0.9 * serving.QUIET_S
    assert len(engine.begun) == 4 and socket.waits[-1] > 0.1  # then it waits for a message
    assert sum(seconds > 0 for seconds in socket.waits[:-1]) <= 3
