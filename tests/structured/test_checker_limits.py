"""What compiles a stranger's grammar, and what computes its masks, reaches nothing beside it and does not compute for ever."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny_model
import tiny_text

from zse.structured import limits, worker
from zse.structured.options import Structure
from zse.structured.service import Grammars

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")


def in_a_fork(work) -> int:
    """The exit code of work() in a fork, 99 where it raised."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = work() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reached(folder, *others) -> int:
    """Bits of what could be done, of: a file to read, one to write, a socket, a pipe, a name, a file's end, a process, a program."""
    kept = folder / "kept"
    tries = (
        lambda: open(os.devnull),
        lambda: open(folder / "new", "w"),
        socket.socket,
        os.pipe,
        lambda: os.rename(kept, folder / "moved"),
        lambda: os.truncate(kept, 0),
        lambda: os.fork() or os._exit(0),
        lambda: os.execv("/bin/true", ["true"]),
        *others,
    )
    bits = 0
    for number, reach in enumerate(tries):
        try:
            reach()
            bits |= 1 << number
        except OSError:
            continue
    return bits


@pytest.mark.parametrize("may_start_threads", [False, True])
def test_a_closed_in_process_reaches_nothing(tmp_path, may_start_threads):
    (tmp_path / "kept").write_text("kept")

    def work() -> int:
        limits.close_in(may_start_threads)
        return reached(tmp_path)

    assert in_a_fork(work) == 0
    assert (tmp_path / "kept").read_text() == "kept" and os.listdir(tmp_path) == ["kept"]


def test_threads_and_pipes_that_are_there_go_on():
    def work() -> int:
        reading, writing = os.pipe()
        limits.close_in(may_start_threads=True)
        thread = threading.Thread(target=os.write, args=(writing, b"word"))
        thread.start()
        thread.join(5)
        return 0 if os.read(reading, 4) == b"word" else 1

    assert in_a_fork(work) == 0


def test_processor_time_ends_unless_it_is_prolonged():
    def work(prolong: bool) -> int:
        end = time.process_time() + 2.2
        while time.process_time() < end:
            if prolong:
                limits.limit_processor(1)
        return 0

    assert in_a_fork(lambda: limits.limit_processor(1) or work(True)) == 0
    assert in_a_fork(lambda: limits.limit_processor(0) or work(False)) == -signal.SIGXCPU


def test_the_process_of_the_masks_has_them(tmp_path):
    folder = tiny_model.write(tmp_path / "tiny")
    tiny_text.write(folder)
    grammars = Grammars(str(folder), tiny_model.VOCAB, frozenset({tiny_model.EOS}), 8)
    try:
        grammars.open(1, Structure(kind="regex", source="(ab)+"))
        end = time.monotonic() + 20
        while grammars.is_compiling and time.monotonic() < end:
            assert all(error is None for _, error in grammars.poll(1.0))
        lines = Path(f"/proc/{grammars._pid}/limits").read_text().splitlines()
        soft = {" ".join(line[:25].split()): line[26:].split()[0] for line in lines}
        assert soft["Max open files"] == "3" and soft["Max file size"] == "0"
        assert 0 < int(soft["Max cpu time"]) < 2 * worker.MAX_PROCESSOR_S
        status = Path(f"/proc/{grammars._pid}/status").read_text()
        assert "\nSeccomp:\t2\n" in status and "\nNoNewPrivs:\t1\n" in status
    finally:
        grammars.stop()


def test_a_compilation_that_does_not_end_ends_the_process(monkeypatch):
    """Its processor time is not prolonged while a thread compiles for longer than what compiled within the checker's clock may."""
    prolonged = []
    monkeypatch.setattr(limits, "limit_processor", prolonged.append)
    server = object.__new__(worker._Server)
    server._allowed_at, server._compiling = 0.0, {1: time.monotonic() - 1}
    server._allow()
    server._allow()
    assert prolonged == [worker.MAX_PROCESSOR_S], "once a second"
    server._allowed_at, server._compiling = 0.0, {1: time.monotonic() - worker.MAX_COMPILE_S - 1, 2: time.monotonic()}
    server._allow()
    assert len(prolonged) == 1
