"""The engine's end of the grammar process: requests wait here for their grammar, and ask here for masks.

    grammars.open(id, structure)        # a request was submitted
    for id, error in grammars.poll(): …  # its grammar is compiled, or refused
    grammars.begin([MaskAsk(request, line, drafts), …]); …forward…; result = grammars.finish()
    grammars.begin([MaskAsk(request, line, drawn=[token]), …]); result = grammars.finish()      # drawn without a mask
    grammars.close(id)

One thread uses it. Nothing here blocks but finish(), which waits for masks that are computed meanwhile.
"""

import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from zse import env
from zse.errors import RequestError, one_line
from zse.lazy import logging
from zse.structured.messages import (
    ANSWERED,
    ASKED,
    ASKS_IN_MEMORY,
    ID,
    IS_AWAITED,
    KIND,
    LINE,
    NOBODY,
    ONE,
    TOKEN,
    US,
    WHOSE,
    WORDS_BYTES,
    Close,
    FromProcess,
    MaskJob,
    MaskStep,
    Open,
    Opened,
)
from zse.structured.options import Structure, checked

# The process has a vocabulary to build first: 3 s for 262k tokens on a slow core.
START_S = 30.0
STEP_S = 5.0  # a mask takes some 15 ms at most
RECHECK_S = 0.001
MAX_RESTARTS, WINDOW_S = 3, 60.0
WATCHED = 16  # tokens of a request that say whether its masks are computed ahead
IDLE_S = 300.0  # without requests the process ends, and gives its memory back
MOST_LOOKED_AHEAD = 2  # requests in a step: with more, drafts hardly pay on a CPU
_KEPT = 1024  # latencies of which percentiles are reported
# What is read at once; multiprocessing.connection's packets, which the process speaks, begin with their length. Its own
# reading takes two calls of the system and ten of Python: behind a forward, which has emptied the caches, 60 µs of a
# step.
READ_BYTES, LENGTH_BYTES = 1 << 16, 4
_encode = msgspec.msgpack.Encoder().encode


class MaskAsk(NamedTuple):
    """What is asked about one request: the mask of its next token, in `line`, and those behind its drafts, in the lines
    that follow; or, with drawn tokens, whether the grammar allows them, and the mask of the first that it does not.
    known: tokens of this step behind request.tokens that are settled."""

    request: Any
    line: int
    drafts: Sequence[int] = ()
    drawn: Sequence[int] = ()
    known: Sequence[int] = ()


class Masks(NamedTuple):
    """What finish() gives: lines of `memory` that hold a mask, requests whose grammar cannot go on, and how many of its
    drawn tokens the grammar of each MaskAsk allows. forced: request → (position, token that may
    come there → tokens that must come behind it)."""

    lines: list[int]
    failures: dict[int, RequestError]
    num_allowed: list[int]
    forced: dict[int, tuple[int, dict[int, list[int]]]] = {}


class _Live:
    """A request with a grammar. start: length of its prompt; sent: tokens of its sequence that the process knows.
    error: why its grammar was refused. refusals: of the last 16 tokens that were drawn without a mask, a bit each."""

    __slots__ = ("error", "refusals", "sent", "start", "structure", "tenant")

    def __init__(self, structure: Structure, tenant: str):
        self.structure, self.tenant, self.sent, self.start = structure, tenant, -1, -1
        self.error: RequestError | None = None
        self.refusals = 0


class Grammars:
    """model: path of the model, for its tokenizer. vocab_size: of its head. eos_ids: tokens that end an answer.
    max_lines: of masks in a step. looks_ahead: whether tokens that the grammar leaves no choice about are asked for, as
    drafts. command: starts the process (tests)."""

    def __init__(
        self,
        model: str,
        vocab_size: int,
        eos_ids: frozenset[int],
        max_lines: int,
        looks_ahead: bool = False,
        command: tuple[str, ...] = ("-P", "-m", "zse.structured.worker"),
    ):
        self._model, self._vocab_size, self._eos_ids, self._max_lines = model, vocab_size, eos_ids, max_lines
        self._looks_ahead, self._command = looks_ahead, command
        self.line_nbytes = (vocab_size + 31) // 32 * 4
        self.memory: memoryview = memoryview(b"")
        self._map: mmap.mmap | None = None
        self._words: memoryview[int] = memoryview(b"")
        self._num_steps = 0  # that this process was asked for
        self._suspect = NOBODY  # whose mask was being computed when the process died last
        self._pipe: socket.socket | None = None
        self._received = b""  # that was not taken yet
        self._wake = -1  # an eventfd: the process looks at what is asked in memory. -1: there is none
        self._pid = 0
        self._live: dict[int, _Live] = {}
        self._compiling: set[int] = set()  # of them, those whose grammar was not told of yet
        self.is_up = False  # whether this process has told of a grammar: its vocabulary is there
        self._settled: deque[tuple[int, RequestError | None]] = deque()
        self._asked: list[MaskAsk] | None = None
        self._stepped: Any = None
        self._ahead: MaskAsk | None = None  # asked for before the step that wants it
        self._restarts: list[float] = []
        self._started_at = self._used_at = 0.0
        self._decoder: Any = None
        self._mask_us: deque[float] = deque(maxlen=_KEPT)
        self._wait_us: deque[float] = deque(maxlen=_KEPT)
        self.counts = {
            "grammars_compiled": 0,
            "grammars_cached": 0,
            "grammars_refused": 0,
            "grammar_compile_ms": 0.0,
            "masked_lines": 0,
            "masks_avoided": 0,
            "tokens_redrawn": 0,
            "grammar_process_restarts": 0,
        }

    # -- requests

    @property
    def num_live(self) -> int:
        """Requests with a grammar, compiled or not."""
        return len(self._live)

    @property
    def is_compiling(self) -> bool:
        """Whether poll() may have something to tell."""
        return bool(self._settled or self._compiling)

    def start(self) -> None:
        """Start the process, unless it runs: its vocabulary takes a while."""
        if self._pipe is None:
            self._spawn()

    def open(self, id: int, structure: Structure, tenant: str = "") -> None:
        """Begin to compile the grammar of a request; tenants take turns. Raises RequestError when it is refused
        unread."""
        checked(structure)
        if not self._eos_ids:
            raise RequestError(
                "this model has no end token, which structured output needs",
                code="unsupported_parameter",
                param="structure",
            )
        self.start()
        self._live[id] = _Live(structure, tenant)
        self._compiling.add(id)
        self._send(Open(id, structure, tenant))

    def close(self, id: int) -> None:
        """The request ended, in whatever state. Unknown ids are ignored."""
        if self._live.pop(id, None) is not None and self._pipe is not None:
            self._send(Close([id]))
            self._compiling.discard(id)
            self._settled = deque(told for told in self._settled if told[0] != id)
            self._used_at = time.monotonic()

    def poll(self, timeout: float = 0.0) -> list[tuple[int, RequestError | None]]:
        """Requests whose grammar is there now (None) or refused, waiting up to `timeout` seconds for the first."""
        if self._pipe is not None and (self.is_compiling or timeout):
            self._receive(0.0 if self._settled else timeout)
        settled, self._settled = list(self._settled), deque()
        return [(id, error) for id, error in settled if id in self._live]

    def rest(self) -> None:
        """End the process if no request has had a grammar for IDLE_S seconds."""
        if not self._live and self._pipe is not None and time.monotonic() - self._used_at > IDLE_S:
            self._end()

    # -- masks

    def begin(self, asks: Iterable[MaskAsk]) -> None:
        """Ask for masks, or about drawn tokens. The process computes meanwhile."""
        self._asked, ahead, self._ahead = list(asks), self._ahead, None
        if ahead is None or self._asked != [ahead]:
            self._stepped = None
            self._send_step(self._asked)

    def ahead(self, request: Any, line: int) -> None:
        """Ask for the mask of the request's next token, of which all but the last are known, before the step that it is
        for is scheduled: begin() takes it where that step asks for nothing else. The process computes while the host
        prepares the step and the other cores have nothing to do."""
        live, count = self._live.get(request.id), len(request.tokens)
        if self._pipe is None or self._ahead is not None or live is None or live.sent != count - 1:
            return
        self._ahead, self._stepped = MaskAsk(request, line), None
        if self._wake < 0:
            self._send_step([self._ahead])
            return
        live.sent, words = count, self._words
        self._num_steps += 1
        words[ID], words[TOKEN], words[LINE] = request.id, request.tokens[-1], line
        words[ASKED] = self._num_steps
        os.write(self._wake, ONE)

    def finish(self) -> Masks:
        """Wait for what begin() asked for."""
        waited_s = 0.0
        if self._pipe is not None and self._words[ANSWERED] != self._num_steps:
            started = time.perf_counter()
            self._wait()
            waited_s = time.perf_counter() - started
        self._wait_us.append(1e6 * waited_s)
        asked, stepped = self._asked or [], self._stepped
        self._asked = self._stepped = None
        if stepped is None and self._pipe is not None:  # answered in memory: one line
            self._mask_us.append(self._words[US])
            lines = [asked[0].line] if self._words[KIND] else []
            self.counts["masked_lines"] += len(lines)
            return Masks(lines, {}, [0])
        if stepped is None:
            return Masks([], {ask.request.id: _lost() for ask in asked}, [0] * len(asked))
        self._mask_us.append(stepped.us)
        return self._masks_of(asked, stepped)

    def _wait(self) -> None:
        """For what begin() asked for, which is not there yet."""
        deadline = time.monotonic() + STEP_S
        while self._stepped is None and self._pipe is not None and self._words[ANSWERED] != self._num_steps:
            left = deadline - time.monotonic()
            self._words[IS_AWAITED] = (
                1  # the process may have looked just before: no longer than RECHECK_S without a look
            )
            if self._words[ANSWERED] != self._num_steps:
                self._receive(min(RECHECK_S, max(0.0, left)))
            if self._pipe is not None:
                self._words[IS_AWAITED] = 0
            if self._stepped is None and left <= 0.0 and self._words[ANSWERED] != self._num_steps:
                self._restart("it gave no masks")
                deadline = time.monotonic() + START_S

    def _masks_of(self, asked: list[MaskAsk], stepped: Any) -> Masks:
        lines, num_allowed, forced = [], [], {}
        for ask, kinds in zip(asked, stepped.kinds, strict=True):
            lines += [ask.line + index for index, kind in enumerate(kinds) if kind]
            failed = ask.request.id in stepped.failures
            allowed = len(kinds) - kinds[-1] if ask.drawn and not failed else 0
            num_allowed.append(allowed)
            live = self._live.get(ask.request.id)
            if allowed:
                self.counts["masks_avoided"] += allowed
                if live is not None:
                    live.sent += allowed
            behind = stepped.forced.get(ask.request.id)
            if behind and live is not None:
                forced[ask.request.id] = live.sent + sum(kinds) - 1, behind  # behind the drafts that have a mask
        self.counts["masked_lines"] += len(lines)
        failures = {id: self._refused(id) or _stuck(reason) for id, reason in stepped.failures.items()}
        return Masks(lines, failures, num_allowed, forced)

    def _refused(self, id: int) -> RequestError | None:
        """Why the grammar of a request was not compiled for which a mask was asked all the same."""
        live = self._live.get(id)
        return None if live is None else live.error

    def note(self, id: int, refused: bool) -> None:
        """A token of the request was drawn without a mask, which refused it or not."""
        self.counts["tokens_redrawn"] += refused
        live = self._live.get(id)
        if live is not None:
            live.refusals = (live.refusals << 1 | refused) & (1 << WATCHED) - 1

    def refuses_often(self, id: int) -> bool:
        """Whether more than half of its last WATCHED tokens were refused, so that its masks had better be computed
        beside the forward: a mask after it holds up the whole step."""
        live = self._live.get(id)
        return live is not None and live.refusals.bit_count() > WATCHED // 2

    def counters(self) -> dict[str, float]:
        """Totals, and percentiles of the last steps: mask_us is what the masks of a step took, mask_wait_us how long
        the step waited for them."""
        out = dict(self.counts)
        for name, values in (("mask_us", self._mask_us), ("mask_wait_us", self._wait_us)):
            if values:
                ordered = sorted(values)
                out[f"{name}_p50"] = ordered[len(ordered) // 2]
                out[f"{name}_p99"] = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        return out

    # -- the process

    def _spawn(self) -> None:
        self._decoder = self._decoder or msgspec.msgpack.Decoder(FromProcess)
        with tempfile.TemporaryFile() as file:  # no name, gone with the last process that has it
            nbytes = self._max_lines * self.line_nbytes
            file.truncate(nbytes + WORDS_BYTES)
            self._map = mmap.mmap(file.fileno(), nbytes + WORDS_BYTES)
            self.memory = memoryview(self._map)
            self._words, self._num_steps, self._ahead = self.memory[nbytes:].cast("q"), 0, None
            self.is_up = False
            self._words[WHOSE] = NOBODY
            ours, theirs = socket.socketpair()
            shared = {"memory": os.dup(file.fileno())}
            if ASKS_IN_MEMORY:
                self._wake = os.eventfd(0)
                shared["wake"] = os.dup(self._wake)
            try:
                for descriptor in (theirs.fileno(), *shared.values()):
                    os.set_inheritable(descriptor, True)
                arguments = [
                    "--fd",
                    theirs.fileno(),
                    *(word for name, descriptor in shared.items() for word in (f"--{name}", descriptor)),
                    "--lines",
                    self._max_lines,
                    "--vocab",
                    self._vocab_size,
                    "--eos",
                    ",".join(map(str, sorted(self._eos_ids))),
                    "--model",
                    self._model,
                ]
                environment = dict(os.environ)
                environment.pop("ZSE_API_KEY", None)
                environment["PYTHONPATH"] = env.python_path()
                self._pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, *self._command, *map(str, arguments)],
                    environment,
                    setpgroup=0,
                    setsigmask=(),
                )
            finally:
                for descriptor in shared.values():
                    os.close(descriptor)
                theirs.close()
        self._pipe, self._received = ours, b""
        self._poll = select.poll()
        self._poll.register(ours.fileno(), select.POLLIN)
        self._started_at = self._used_at = time.monotonic()

    def stop(self) -> None:
        """End the process. Requests that are open are forgotten."""
        self._live.clear()
        self._end()

    def _end(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return
        pipe.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        # It ends by itself, but not while it compiles; its checker ends with it.
        try:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # somebody else reaped it

    def _restart(self, why: str) -> None:
        """Begin anew after a crash: every open request's grammar again, and all its tokens; but not of a request whose
        mask was being computed for the second time, which would end it again."""
        self._end()
        suspect, self._suspect = self._suspect, self._words[WHOSE]
        if suspect == self._suspect != NOBODY:
            self._live.pop(suspect, None)
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < WINDOW_S] + [now]
        self.counts["grammar_process_restarts"] += 1
        logging.getLogger("zse.engine").error("the grammar process is restarted: %s", why)
        if len(self._restarts) > MAX_RESTARTS:
            self._settled += [(id, _lost()) for id in self._compiling]
            self._restarts.clear()
            return
        self._spawn()
        for id, live in self._live.items():
            live.sent = live.start
            self._send(Open(id, live.structure, live.tenant, checks=True))
        if self._asked is not None:
            self._send_step(self._asked)

    def _send_step(self, asks: list[MaskAsk]) -> None:
        jobs = []
        for request, line, drafts, drawn, known in asks:
            live, new = self._live.get(request.id), []
            if live is not None:
                tokens, sent = request.tokens, live.sent
                if sent < 0:
                    live.start = sent = request.prompt_len
                count = len(tokens)
                live.sent = max(sent, count + len(known))
                if sent < count:
                    new = tokens[sent:].tolist()
                if known:
                    new += known[max(0, sent - count) :]
            jobs.append(MaskJob(request.id, new, line, list(drafts), list(drawn)))
        self._num_steps += 1
        self._send(MaskStep(jobs, self._num_steps, self._looks_ahead and len(jobs) <= MOST_LOOKED_AHEAD))

    def _send(self, message: object) -> None:
        if self._pipe is None:
            return
        data = _encode(message)
        try:
            self._pipe.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        except OSError:
            pass  # the next receive finds it gone, and restarts it

    def _receive(self, timeout: float) -> None:
        """Take what is there; waits for the first message only."""
        try:
            while (message := self._next(timeout)) is not None:
                if isinstance(message, Opened):
                    self._on_opened(message)
                elif message.number == self._num_steps:
                    self._stepped = message
                    return
                timeout = 0.0
        except (EOFError, OSError):
            self._restart("it ended")

    def _next(self, timeout: float) -> Any:
        """The next message, or None where none comes in `timeout` seconds. Raises EOFError, OSError."""
        data = self._received
        while self._pipe is not None:
            end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big") if len(data) >= LENGTH_BYTES else READ_BYTES
            if len(data) >= end:
                self._received = data[end:]
                return self._decoder.decode(memoryview(data)[LENGTH_BYTES:end])
            try:
                more = self._pipe.recv(READ_BYTES, socket.MSG_DONTWAIT)
                if not more:
                    raise EOFError
                data = self._received = data + more
            except BlockingIOError:
                if timeout <= 0.0 or not self._poll.poll(1000 * timeout):
                    return None
        return None

    def _on_opened(self, message) -> None:
        live = self._live.get(message.id)
        if live is None:
            return
        self.counts["grammar_compile_ms"] += message.compile_ms
        is_new, self.is_up = message.id in self._compiling, True
        self._compiling.discard(message.id)
        if message.error:
            self.counts["grammars_refused"] += 1
            live.error = RequestError(one_line(message.error), code=message.code, param="structure")
            self._settled.append((message.id, live.error))
        elif is_new:
            self.counts["grammars_compiled" if message.compile_ms else "grammars_cached"] += 1
            self._settled.append((message.id, None))


def _stuck(reason: str) -> RequestError:
    return RequestError(f"the grammar cannot go on: {one_line(reason)}", code="schema_too_complex", param="structure")


def _lost() -> RequestError:
    return RequestError("the grammar of this request was lost", status=500, type="server_error", code="internal_error")
