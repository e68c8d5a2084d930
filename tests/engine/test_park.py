"""The real worker, forked and parked: it becomes the engine of a model, and says why when it cannot."""

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zse.engine.messages import (
    Expect,
    Fatal,
    FrameReader,
    FromEngine,
    Heartbeat,
    LoadModel,
    Parked,
    Ready,
    Shutdown,
    Submit,
    Tokens,
    encode,
)
from zse.engine.process import spawn
from zse.sampling.params import SamplingParams


class Parking:
    """The server's end of a parked worker."""

    def __init__(self, *arguments):
        self.process = spawn(["--park", *arguments])
        self.reader, self.inbox = FrameReader(FromEngine), []

    def receive(self, timeout=30.0):
        """The next message that is no heartbeat; None at the end."""
        deadline = time.monotonic() + timeout
        while not self.inbox:
            assert select.select([self.process.sock], [], [], max(0, deadline - time.monotonic()))[0], "no message"
            data = self.process.sock.recv(1 << 16)
            if not data:
                return None
            self.inbox += [item for item in self.reader.feed(data) if not isinstance(item, Heartbeat)]
        return self.inbox.pop(0)

    def send(self, *messages):
        self.process.sock.sendall(b"".join(map(encode, messages)))

    def load(self, model, *arguments):
        self.send(LoadModel(["--model", str(model), "--device", "cpu", "--threads", "1", *arguments]))


@pytest.fixture
def park():
    made = []

    def make(*arguments):
        made.append(Parking("--device", "cpu", "--threads", "1", *arguments))
        return made[-1]

    yield make
    for parking in made:
        parking.process.kill()
        parking.process.wait(10)
        parking.process.sock.close()


def test_a_parked_engine_becomes_that_of_a_model(park, model):
    parking = park()
    assert isinstance(parking.receive(), Parked)
    parking.send(Expect([str(model)], None))  # a CPU has nothing to make ready
    parking.load(model, "--max-context", "64", "--max-rows", "2")
    ready = parking.receive()
    assert isinstance(ready, Ready) and (ready.max_context, ready.max_rows) == (64, 2)
    assert 0 <= ready.phases_ms["file open"] < ready.phases_ms["ready"] < 10_000, "counted from the LoadModel"
    parking.send(Submit(1, [5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)))
    tokens = []
    while True:
        message = parking.receive()
        tokens += message.tokens
        if isinstance(message, Tokens) and message.finish is not None:
            break
    assert len(tokens) == 4
    parking.send(Shutdown())
    assert parking.process.wait(10) == 0


def test_it_says_when_it_is_parked_without_being_read(park):
    parking = park()
    deadline = time.monotonic() + 30
    while not parking.process.is_parked and time.monotonic() < deadline:
        time.sleep(0.01)
    assert parking.process.is_parked and isinstance(parking.receive(), Parked)


def test_a_load_that_fails_is_fatal_and_says_why(park, tmp_path):
    parking = park()
    assert isinstance(parking.receive(), Parked)
    parking.load(tmp_path / "none.zse")
    fatal = parking.receive()
    assert isinstance(fatal, Fatal) and fatal.exit_code == 2 and "none.zse" in fatal.message
    assert parking.process.wait(10) == 2


@pytest.mark.parametrize("how", ["shutdown", "closed"])
def test_it_ends_with_the_server(park, how):
    parking = park()
    assert isinstance(parking.receive(), Parked)
    if how == "shutdown":
        parking.send(Shutdown())
    else:
        parking.process.sock.shutdown(socket.SHUT_RDWR)
    assert parking.process.wait(10) == 0


def test_an_unknown_device_is_fatal(park):
    parking = Parking("--device", "nonsense")
    fatal = parking.receive()
    assert isinstance(fatal, Fatal) and "nonsense" in fatal.message
    assert parking.process.wait(10) == 2


def test_memory_that_is_missing_is_told_apart(park, model):
    parking = park()
    assert isinstance(parking.receive(), Parked)
    parking.load(model, "--max-memory", "1000")
    fatal = parking.receive()
    assert isinstance(fatal, Fatal) and fatal.code == "out_of_memory" and "--max-memory" in fatal.message


FORK = """
import os, socket, sys, time
from zse.engine.process import fork
def main(words, clock):
    from zse.engine import worker
    return worker.main(words, clock=clock)
start = time.perf_counter()
listening = socket.socket(); listening.bind(("127.0.0.1", 0)); listening.listen()
os.environ["ZSE_API_KEY"] = "secret"
process = fork(["--model", sys.argv[1], "--device", "cpu", "--threads", "1"], lambda: time.perf_counter() - start,
               main, close=(listening.fileno(),))
from zse.engine.messages import FrameReader
from zse.engine.messages import FromEngine, Heartbeat
assert os.getpgid(process.pid) == process.pid
environment = open(f"/proc/{process.pid}/environ", "rb").read()
reader, message = FrameReader(FromEngine), None
while message is None:
    found = [item for item in reader.feed(process.sock.recv(1 << 16)) if not isinstance(item, Heartbeat)]
    message = found[0] if found else None
links = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
ours = os.readlink(f"/proc/self/fd/{listening.fileno()}")
print(type(message).__name__, message.model, ours in links, message.phases_ms["ready"] > message.phases_ms["file open"])
process.sock.close()
print(process.wait(10))
"""


# Elsewhere the server starts its engines anew (process.fork asks the platform): there is no fork to test.
@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
def test_a_forked_engine_is_one_of_its_own(model):
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(
        [sys.executable, "-c", FORK, str(model)], capture_output=True, text=True, timeout=60, env=environment
    )
    assert result.stdout.split("\n")[:2] == [f"Ready {model} False True", "0"], result.stderr


@pytest.mark.parametrize("has_pack", [True, False])
def test_kernels_are_loaded_from_a_pack_only(has_pack, monkeypatch):
    from types import SimpleNamespace

    from zse.engine.load import load_kernels
    from zse.errors import DeviceError
    from zse.kernel import cache

    loaded = []

    def program(symbol):
        loaded.append(symbol)
        if symbol == "large":
            raise DeviceError("large needs more shared memory than there is")

    monkeypatch.setattr(cache, "open_pack", lambda arch: SimpleNamespace(pack=object() if has_pack else None))
    load_kernels(
        SimpleNamespace(loads_modules=True, isa="sm_90a", symbols=lambda: ["a", "large", "b"], program=program)
    )
    assert loaded == (["a", "large", "b"] if has_pack else [])
    load_kernels(SimpleNamespace(loads_modules=False))
