"""Compiles strangers' grammars where it may fail: each in a fork with a clock and a memory limit.

A schema of 60 bytes ({"type": "integer", "multipleOf": 9999991, …}) keeps llguidance busy for 40 s, and no thread can
be stopped. The checker is a fork of the grammar process, made while that has one thread and its vocabulary built, so
that all of them share its pages; it forks once for each grammar, ahead where nothing is checked: a fork of a vocabulary
takes some milliseconds, compiling a short schema half of one. Who is checked when, turns.py decides."""

import contextlib
import os
import resource
import select
import signal
import time
from multiprocessing.connection import Connection, Pipe

import msgspec

from zse.structured import limits
from zse.structured.compile import MASK_S, SLOW, GrammarError, Vocabulary, refusal
from zse.structured.options import Structure

CHECK_S = 1.5  # of 2 s: the rest is for the way there and back
MAX_MEMORY = 256 << 20
_TOO_LONG = f"the grammar takes longer than {CHECK_S} s to compile"
_TOO_LARGE = f"the grammar takes more than {MAX_MEMORY >> 20} MiB to compile"


class Check(msgspec.Struct, array_like=True):
    """process → checker."""

    id: int
    structure: Structure


class Checked(msgspec.Struct, array_like=True):
    """checker → process: error is "" for a grammar that compiles within the limits."""

    id: int
    error: str
    code: str


def start(vocabulary: Vocabulary, others: list[int]) -> Connection:
    """Fork the checker; the end of the pipe that takes Check and gives Checked. others: descriptors to close in it."""
    ours, theirs = Pipe()
    if os.fork():
        theirs.close()
        return ours
    code = 1
    try:
        ours.close()
        for descriptor in others:
            os.close(descriptor)
        _serve(vocabulary, theirs)
        code = 0
    finally:
        os._exit(code)


class _Run:
    """A fork that compiles one grammar. It waits for begin(), and ends by itself when this process does before that."""

    def __init__(self, vocabulary: Vocabulary):
        self.pipe, write = os.pipe()
        source, self._source = os.pipe()
        self.id, self.deadline = -1, 0.0
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            os.close(source)
            return
        try:
            os.close(self._source)
            with open(source, "rb") as file:
                data = file.read()
            if data:
                structure = msgspec.msgpack.decode(data, type=Structure)
                os.write(write, _compile(structure, vocabulary)[:4096])
        finally:
            os._exit(0)

    def begin(self, check: Check) -> None:
        """Let it compile. `pipe` will be readable."""
        self.id, self.deadline = check.id, time.monotonic() + CHECK_S
        with (
            contextlib.suppress(BrokenPipeError),
            open(self._source, "wb") as file,
        ):  # a fork that is gone gives no result
            file.write(msgspec.msgpack.encode(check.structure))

    def result(self) -> Checked:
        """Called when the pipe is readable or the deadline has passed; wait() is to follow."""
        late = not select.select([self.pipe], [], [], 0)[0]
        if late:
            os.kill(self.pid, signal.SIGKILL)
        data = b"" if late else os.read(self.pipe, 4096)
        os.close(self.pipe)
        if not data:
            return Checked(self.id, _TOO_LONG if late else _TOO_LARGE, "schema_too_complex")
        code, _, error = data.decode("utf-8", "replace").partition("\n")
        return Checked(self.id, error, code)

    def wait(self) -> None:
        """Until the process is gone, which takes longer than telling what it found."""
        os.waitpid(self.pid, 0)


def _compile(structure: Structure, vocabulary: Vocabulary) -> bytes:
    close_in()
    code, error = verdict(structure, vocabulary)
    return f"{code}\n{error}".encode("utf-8", "replace")


def close_in() -> None:
    """From now on this process has the limits of one compilation, but for the clock."""
    limits.limit_memory(MAX_MEMORY)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (4, 4))  # should nobody be left to kill it
    # What a killed or aborted compiler says is for nobody.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    limits.close_in()


def verdict(structure: Structure, vocabulary: Vocabulary) -> tuple[str, str]:
    """(code, error) of a grammar that is compiled here, both "" where nothing is wrong with it."""
    try:
        matcher = vocabulary.compile(structure)
        compiled = time.process_time()
        matcher.compute_ff_tokens()
        matcher.compute_bitmask()
        if time.process_time() - compiled > MASK_S:
            return "schema_too_complex", SLOW
        if matcher.is_error():
            raise refusal(matcher.get_error())
    except GrammarError as error:
        return error.code, str(error)
    except MemoryError:
        return "schema_too_complex", _TOO_LARGE
    return "", ""


def _serve(vocabulary: Vocabulary, pipe: Connection) -> None:
    decoder, encode = msgspec.msgpack.Decoder(Check), msgspec.msgpack.encode
    runs: list[_Run] = []
    spare: _Run | None = None
    while True:
        if spare is None and not runs:
            spare = _Run(vocabulary)
        timeout = min((run.deadline for run in runs), default=None)
        wait_s = None if timeout is None else max(0.0, timeout - time.monotonic())
        ready = select.select([pipe.fileno(), *(run.pipe for run in runs)], [], [], wait_s)[0]
        if pipe.fileno() in ready:
            try:
                check = decoder.decode(pipe.recv_bytes())
                run, spare = spare or _Run(vocabulary), None
                run.begin(check)
                runs.append(run)
            except (EOFError, OSError):
                for run in runs:
                    os.kill(run.pid, signal.SIGKILL)
                return
        now = time.monotonic()
        for run in [run for run in runs if run.pipe in ready or run.deadline <= now]:
            runs.remove(run)
            pipe.send_bytes(encode(run.result()))
            run.wait()
