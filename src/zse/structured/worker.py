"""The grammar process:

    python -m zse.structured.worker --fd N --memory M --wake W --lines L --vocab V --eos 1,2 --model PATH

The engine starts it with the first request that has a grammar. It is a process of its own because building llguidance's
vocabulary holds the interpreter lock for 0.2 s (49k tokens) to 1.7 s (262k), which no step of the engine should wait
for, because a compilation cannot be stopped from within, and because a crash on a stranger's grammar must not be the
engine's. Masks go through shared memory M: L lines of V bits, each in whole 4-byte words, and some words
(zse.structured.messages). W is an eventfd, by which the engine says that it has asked in these words."""

import argparse
import ctypes
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from llguidance import LLExecutor

from zse.formats.opening import open_model
from zse.structured import checker, limits
from zse.structured.compile import MASK_S, SLOW, Cache, GrammarError, Vocabulary, refusal
from zse.structured.mask import Guide
from zse.structured.messages import (
    ANSWERED,
    ANSWERS_IN_MEMORY,
    ASKED,
    FREE,
    ID,
    IS_AWAITED,
    KIND,
    LINE,
    MASKED,
    NOBODY,
    ONE,
    TOKEN,
    US,
    WHOSE,
    WORDS_BYTES,
    Close,
    MaskJob,
    MaskStep,
    Open,
    Opened,
    Stepped,
    ToProcess,
)
from zse.structured.options import TEXT
from zse.structured.plain import is_plain
from zse.structured.turns import MAX_WAITING, Refusals, Turns
from zse.tokenizer.load import load_tokenizer as load_tokenizer_of

# All grammars and their lexers' states together; when it is used up the process dies, and begins anew without them.
MAX_MEMORY = 4 << 30
# Seconds of processor time, of all threads together, between two looks at the work: a mask takes some 15 ms at most.
MAX_PROCESSOR_S = 30
MAX_COMPILE_S = (
    10.0  # what compiled in CHECK_S before does so again, beside others: longer, and the process may not go on
)
# From so many requests with a grammar on their masks, 0.1 ms each, are computed by several threads.
LEAST_TOGETHER, MAX_THREADS = 4, 16

_encode = msgspec.msgpack.encode


def main(arguments: list[str]) -> int:
    """Serve until the engine closes its end; the exit code."""
    parser = argparse.ArgumentParser()
    for name in ("fd", "memory", "lines", "vocab"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--wake", type=int, default=-1)
    parser.add_argument("--eos", required=True)
    parser.add_argument("--model", required=True)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(given.fd)
    nbytes = line_nbytes(given.vocab)
    memory = mmap.mmap(given.memory, given.lines * nbytes + WORDS_BYTES)
    vocabulary = Vocabulary(load_tokenizer(given.model), given.vocab, frozenset(int(id) for id in given.eos.split(",")))
    limits.limit_memory(MAX_MEMORY)
    try:
        server = _Server(pipe, memory, given.wake, nbytes, vocabulary)  # which forks the checker
        limits.close_in(may_start_threads=True)
        server.run()
    except (EOFError, OSError):
        return 0  # the engine is gone
    return 0


def line_nbytes(vocab_size: int) -> int:
    """Bytes of one mask."""
    return (vocab_size + 31) // 32 * 4


def load_tokenizer(path: str):
    with open_model(path) as source:
        return load_tokenizer_of(source)


class _Compilation:
    """A grammar on its way: the checker first, unless it is plain, then a thread of this process. first: who asked for it
    first. waiting: the requests that want it."""

    def __init__(self, first: Open):
        self.structure, self.tenant, self.started = first.structure, first.tenant, time.perf_counter()
        self.waiting: dict[int, Open] = {}
        self.is_plain = not first.checks and is_plain(first.structure)
        self.matcher = None
        self.error: GrammarError | None = None


class _Server:
    def __init__(self, pipe: Connection, memory: mmap.mmap, wake: int, nbytes: int, vocabulary: Vocabulary):
        self._pipe, self._nbytes, self._vocabulary = pipe, nbytes, vocabulary
        self._checker = checker.start(vocabulary, [pipe.fileno(), *([wake] if wake >= 0 else [])])
        self._buffer, self._words = memoryview(memory)[:-WORDS_BYTES], memoryview(memory)[-WORDS_BYTES:].cast("q")
        self._words[WHOSE] = NOBODY
        self._num_steps = 0  # the number of the last one
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._woken, self._wake = (wake, wake) if wake >= 0 else os.pipe()
        self._finished: deque[int] = deque()  # compilations that a thread has ended
        self._guides: dict[int, Guide] = {}
        self._pending: dict[int, _Compilation] = {}  # by request
        self._compilations: dict[int, _Compilation] = {}  # by number
        self._by_key: dict[tuple, int] = {}  # the choices of one request have one grammar
        self._num_compilations = 0
        self._compiling: dict[int, float] = {}  # those in a thread of this process, and since when
        self._allowed_at = 0.0
        self._turns = Turns()
        self._cache = Cache()
        self._refused = Refusals()
        self._executor: Any = None
        self._step: MaskStep | None = None  # waits for a grammar: after a restart masks are asked for at once

    def run(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToProcess)
        checked = msgspec.msgpack.Decoder(checker.Checked)
        poll = select.poll()
        for descriptor in (self._pipe.fileno(), self._checker.fileno(), self._woken):
            poll.register(descriptor, select.POLLIN)
        engine = self._pipe.fileno()
        while True:
            self._allow()
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    os.read(self._woken, 8)
                    self._look()
                    while self._finished:
                        self._on_compiled(self._finished.popleft())
                elif descriptor == engine:
                    self._take(decoder.decode(self._pipe.recv_bytes()))
                else:
                    self._on_checked(checked.decode(self._checker.recv_bytes()))

    def _allow(self) -> None:
        """Once a second the process may compute on, unless a thread compiles for too long: its next seconds are its
        last."""
        now = time.monotonic()
        if now - self._allowed_at < 1.0 or any(now - begun > MAX_COMPILE_S for begun in self._compiling.values()):
            return
        self._allowed_at = now
        limits.limit_processor(MAX_PROCESSOR_S)

    def _look(self) -> None:
        """Answer what is asked in memory."""
        words = self._words
        number = words[ASKED]
        if number > self._num_steps:
            self._num_steps = number
            self._answer(MaskStep([MaskJob(words[ID], [words[TOKEN]], words[LINE])], number))

    def _take(self, message: Open | MaskStep | Close) -> None:
        if isinstance(message, MaskStep):
            self._look()
            self._num_steps = message.number
            self._answer(message)
        elif isinstance(message, Open):
            self._open(message)
        else:
            for id in message.ids:
                self._guides.pop(id, None)
                compilation = self._pending.pop(id, None)
                if compilation is not None:
                    del compilation.waiting[id]
                    if not compilation.waiting:
                        self._forget(compilation)

    # -- compiling

    def _open(self, message: Open) -> None:
        structure = message.structure
        key = Cache.key(structure)
        matcher = None if structure.kind == TEXT else self._cache.get(key)
        if matcher is not None or structure.kind == TEXT:
            self._begin(message, matcher, 0.0)
            return
        refused = self._refused.get(key)
        if refused is not None:
            self._pipe.send_bytes(_encode(Opened(message.id, str(refused), refused.code)))
            return
        number = self._by_key.get(key)
        if number is None:
            number = self._num_compilations
            if not self._turns.add(message.tenant, number):
                error = f"{MAX_WAITING} grammars of yours wait to be compiled; send no new ones until some are"
                self._pipe.send_bytes(_encode(Opened(message.id, error, "rate_limit_exceeded")))
                return
            self._by_key[key] = number
            self._num_compilations += 1
            self._compilations[number] = _Compilation(message)
        compilation = self._pending[message.id] = self._compilations[number]
        compilation.waiting[message.id] = message
        self._check_next()

    def _check_next(self) -> None:
        """Give the checker whoever's turn it is; what is plain is compiled at once."""
        while (number := self._turns.next()) is not None:
            compilation = self._compilations[number]
            if compilation.is_plain:
                self._compile_beside(number, compilation)
            else:
                self._checker.send_bytes(_encode(checker.Check(number, compilation.structure)))

    def _end_turn(self, compilation: _Compilation) -> None:
        self._turns.done(compilation.tenant)
        self._check_next()

    def _forget(self, compilation: _Compilation) -> None:
        """Nobody waits for it any more: it is not compiled, unless the checker has it already."""
        key = Cache.key(compilation.structure)
        number = self._by_key[key]
        if self._turns.remove(compilation.tenant, number):
            del self._by_key[key], self._compilations[number]

    def _on_checked(self, result: checker.Checked) -> None:
        compilation = self._compilations[result.id]
        self._end_turn(compilation)
        if result.code:
            compilation.error = GrammarError(result.error, result.code)
            self._refused.put(Cache.key(compilation.structure), compilation.error)
            self._on_compiled(result.id)
        else:
            # Again, in this process: what took the checker less than its limit takes a thread no longer.
            self._compile_beside(result.id, compilation)

    def _compile_beside(self, number: int, compilation: _Compilation) -> None:
        self._compiling[number] = time.monotonic()
        threading.Thread(target=self._compile, args=(number, compilation), daemon=True).start()

    def _compile(self, number: int, compilation: _Compilation) -> None:
        try:
            compilation.matcher = self._vocabulary.compile(compilation.structure)
        except GrammarError as error:
            compilation.error = error
        self._finished.append(number)
        os.write(self._wake, ONE)

    def _on_compiled(self, number: int) -> None:
        compilation = self._compilations.pop(number)
        self._compiling.pop(number, None)
        if compilation.is_plain:
            self._end_turn(compilation)
        key = Cache.key(compilation.structure)
        del self._by_key[key]
        if compilation.matcher is not None:
            self._cache.put(key, compilation.matcher)
        milliseconds = 1000 * (time.perf_counter() - compilation.started)
        for id, message in compilation.waiting.items():
            del self._pending[id]
            if compilation.error is None:
                self._begin(message, self._cache.get(key), milliseconds)
            else:
                error = compilation.error
                self._pipe.send_bytes(_encode(Opened(id, str(error), error.code, milliseconds)))
        step = self._step
        if step is not None and not any(job.id in self._pending for job in step.jobs):
            self._step = None
            self._run_step(step)

    def _begin(self, message: Open, matcher, milliseconds: float) -> None:
        self._guides[message.id] = Guide(self._vocabulary, matcher, message.structure.thinking)
        self._pipe.send_bytes(_encode(Opened(message.id, compile_ms=milliseconds)))

    # -- masks

    def _answer(self, step: MaskStep) -> None:
        """Now, or once all its grammars are compiled."""
        if self._pending and any(job.id in self._pending for job in step.jobs):
            self._step = step
        else:
            self._run_step(step)

    def _run_step(self, step: MaskStep) -> None:
        started = time.perf_counter()
        kinds: list[list[int]] = []
        failures: dict[int, str] = {}
        forced: dict[int, dict[int, list[int]] | None] = {}
        together: list[tuple] = []  # (matcher, line), computed by several threads
        for job in step.jobs:
            self._words[WHOSE], began = job.id, time.thread_time()
            try:
                behind = forced[job.id] = {} if step.looks_ahead else None
                kinds.append(self._masks(job, together if len(step.jobs) >= LEAST_TOGETHER else None, behind))
                asked = self._guides[job.id]
                took, asked.ahead_s = time.thread_time() - began + asked.ahead_s, 0.0
                if took > MASK_S:
                    kinds.pop()
                    raise GrammarError(SLOW)
            except GrammarError as error:
                failures[job.id] = str(error)
                kinds.append([FREE] * (1 + len(job.drafts)))
        self._words[WHOSE] = NOBODY
        if together:
            began = time.process_time()
            self._compute(together)
            is_slow = time.process_time() - began > MASK_S  # of one of them: from now on each is computed alone
            computed = {line for _, line in together}
            for index, job in enumerate(step.jobs):
                guide = self._guides.get(job.id)
                if job.line + len(kinds[index]) - 1 in computed and guide is not None:
                    guide.is_alone = is_slow
                    if guide.matcher.is_error():
                        failures[job.id] = str(refusal(guide.matcher.get_error()))
                        kinds[index] = [FREE] * len(kinds[index])
        us = 1e6 * (time.perf_counter() - started)
        behind_of = {id: behind for id, behind in forced.items() if behind}
        is_plain = len(kinds) == len(kinds[0]) == 1 and not (failures or behind_of or step.jobs[0].drawn)
        if ANSWERS_IN_MEMORY and is_plain and not self._words[IS_AWAITED]:
            self._words[KIND], self._words[US] = kinds[0][0], int(us)
            self._words[ANSWERED] = step.number
        else:
            self._pipe.send_bytes(_encode(Stepped(kinds, failures, us, step.number, behind_of)))
        # While the engine runs on: 5 µs a request, 70 where the next token is forced.
        for job in step.jobs:
            if job.drawn:
                guide = self._guides.get(job.id)
                if guide is not None:
                    self._words[WHOSE], began = job.id, time.thread_time()
                    guide.look_ahead()
                    guide.ahead_s = time.thread_time() - began
        self._words[WHOSE] = NOBODY

    def _compute(self, together: list[tuple]) -> None:
        if len(together) < LEAST_TOGETHER:  # of drawn tokens few are refused
            for matcher, line in together:
                matcher.unsafe_compute_mask_ptr(self._address + line * self._nbytes, self._nbytes)
            return
        if self._executor is None:
            self._executor = LLExecutor(min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 2)))
        self._executor.unsafe_compute_mask_ptr(together, self._address, self._nbytes, len(self._buffer) // self._nbytes)

    def _masks(self, job: MaskJob, together: list[tuple] | None, forced: dict[int, list[int]] | None) -> list[int]:
        guide = self._guides.get(job.id)
        if guide is None:
            raise GrammarError(
                "a mask of the grammar takes too long, or too much memory"
            )  # the process before died of it
        guide.take(job.tokens)
        if job.drawn:
            taken = guide.take_allowed(job.drawn)
            if taken == len(job.drawn):
                return [FREE] * taken
            line = job.line + taken
            if together is not None and not guide.is_alone and guide.has_choice:
                together.append((guide.matcher, line))
                return [FREE] * taken + [MASKED]
            return [FREE] * taken + [guide.write_mask(self._buffer, line, self._nbytes, self._address)]
        if together is not None and not guide.is_alone and not job.drafts and guide.has_choice:
            together.append((guide.matcher, job.line))
            return [MASKED]
        return guide.masks(self._buffer, job.line, self._nbytes, self._address, job.drafts, forced)


if __name__ == "__main__":
    sys.stdout.flush()
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads that still compile are nobody's any more
