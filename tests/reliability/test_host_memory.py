"""Every allocation of an engine on a CPU fails once: one error, nothing left open, and the next load is whole."""

import errno
import mmap
import os
import sys
from types import SimpleNamespace

import pytest
import tiny_model

from zse.engine import messages, worker
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import DeviceMemoryError
from zse.runtime import buffer
from zse.sampling.params import SamplingParams

ERRORS = {"the system's": OSError(errno.ENOMEM, "Cannot allocate memory"), "Python's": MemoryError()}


class Allocations:
    """In the place of the module mmap: counts, and the one of number `at` raises."""

    def __init__(self, at: int, error: Exception):
        self.at, self.error, self.seen = at, error, 0

    def __getattr__(self, name: str):
        return getattr(mmap, name)

    def mmap(self, *arguments, **options):
        self.seen += 1
        if self.seen - 1 == self.at:
            raise self.error
        return mmap.mmap(*arguments, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


def answer(model) -> list[int]:
    """What an engine says that is loaded, asked and closed."""
    config = EngineConfig(model=str(model), threads=2, activations="f32", device="cpu", num_pages=8, max_context=64)
    loaded = load_engine(config, Phases(lambda: 0.0))
    try:
        loaded.engine.submit(1, [5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        tokens: list[int] = []
        while loaded.engine.has_work:
            tokens += [token for output in loaded.engine.step() for token in output.tokens]
        return tokens
    finally:
        loaded.engine.close()
        loaded.source.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("name", ERRORS)
def test_every_allocation_fails(name, model, monkeypatch):
    expected = answer(model)
    watched = Allocations(-1, ERRORS[name])
    monkeypatch.setattr(buffer, "mmap", watched)
    assert answer(model) == expected and watched.seen > 5
    # Of the system's: what other tests of this process have begun counts in both.
    threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for at in range(watched.seen):
        monkeypatch.setattr(buffer, "mmap", Allocations(at, ERRORS[name]))
        with pytest.raises((DeviceMemoryError, MemoryError)):
            answer(model)
        assert len(os.listdir("/proc/self/task")) <= threads + 1, f"allocation {at} leaves a thread"
        assert len(os.listdir("/proc/self/fd")) <= descriptors, f"allocation {at} leaves a descriptor"
    monkeypatch.setattr(buffer, "mmap", mmap)
    assert answer(model) == expected


@pytest.mark.parametrize("error", [MemoryError(), DeviceMemoryError("no memory for it")])
def test_the_engine_process_says_that_memory_is_short(error, monkeypatch):
    sent: list = []
    monkeypatch.setattr(messages, "FrameSocket", SimpleNamespace(from_fd=lambda fd: SimpleNamespace(send=sent.append)))
    monkeypatch.setattr(worker, "die_with_parent", lambda parent: None)
    # What main() sets for a process of its own.
    monkeypatch.setattr(worker, "gc", SimpleNamespace(disable=lambda: None))
    monkeypatch.setattr(worker, "signal", SimpleNamespace(signal=lambda number, to: None, SIGINT=2, SIG_IGN=1))
    monkeypatch.setattr(worker, "sys", SimpleNamespace(setswitchinterval=lambda seconds: None, stderr=sys.stderr))

    def build(*arguments):
        raise error

    assert worker.main(["--fd", "0"], build=build) != 0
    assert [type(message).__name__ for message in sent] == ["Fatal"] and sent[0].code == "out_of_memory"
