"""The server's end of the engine: supervision of the process, requests, and what can be said about its health.

State of a request has one writer, EngineClient: `requests` holds every id that the engine still owes an event.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from zse.engine.framing import FrameReader, encode
from zse.engine.messages import (
    Ask,
    Cancel,
    Failed,
    Fatal,
    FromEngine,
    Heartbeat,
    LoadModel,
    Measure,
    Measured,
    Ready,
    Search,
    Searched,
    Shutdown,
    StepTokens,
    Submit,
    Tokens,
)
from zse.engine.process import EngineProcess
from zse.errors import EngineError, RequestError
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.options import DEFAULT, RequestOptions

log = logging.getLogger("zse.engine")

STARTING, READY, RESTARTING, DOWN, STOPPING = "starting", "ready", "restarting", "down", "stopping"
UNLOADED = "unloaded"  # no process: nobody has asked for the model yet, or it was evicted
RESTART_BUDGET, RESTART_WINDOW_S = 5, 600.0
RETRY_DOWN_S = 60.0  # where an engine that is down is tried again
SILENT_S = 8.0  # without a frame (a heartbeat is due each second) the engine counts as frozen: not ready
STUCK_S = 30.0  # without a step while rows run: not ready
KILL_S = 60.0  # silent this long with work to do: killed and restarted
# Events that a request may have waiting for a reader that has been behind for STALL_S, and for one that is behind at all: a step of
# 64 answers with log-probabilities is 30 KB, and a reader is behind for some ms now and then.
STREAM_BYTES, MOST_STREAM_BYTES, STALL_S = 256 << 10, 1 << 20, 0.25

Asked = SamplingParams | Ask | BeamParams
MESSAGES: dict[type, Callable] = {SamplingParams: Submit, Ask: Measure, BeamParams: Search}  # by what is asked


class EngineStartError(EngineError):
    """The first start failed. exit_code: what `zse serve` exits with; code: as ZSEError's; died: the process ended
    without saying why."""

    def __init__(self, message: str, exit_code: int, code: str = "", died: bool = False):
        super().__init__(message)
        self.exit_code, self.code, self.died = exit_code, code, died


def _error(code: str, message: str, status: int = 503, type: str = "server_error") -> RequestError:
    return RequestError(message, status=status, type=type, code=code)


def restarting_error() -> RequestError:
    return _error("engine_restarting", "The engine stopped and is being restarted; try again in a moment.")


def shutting_down_error() -> RequestError:
    return _error("shutting_down", "The server is shutting down.")


class Channel:
    """The events of one HTTP request's engine requests, in order of arrival, each under the caller's key.

    stalled_s: for how long the reader of a stream has been behind. Then not more than STREAM_BYTES (MOST_STREAM_BYTES) wait here:
    a reader that is slower than that is cut off, the engine never waits. What waits because this process is behind, or for
    an answer that is not streamed, is bounded by the answer's length.
    """

    def __init__(self, client: "EngineClient"):
        self._client = client
        self._events: deque[tuple[int, Tokens | Measured | Searched | RequestError, int]] = deque()  # and bytes
        self._bytes = 0
        self._waiter: asyncio.Future | None = None
        self.ids: dict[int, int] = {}  # key → engine request id, while running
        self._overflow: RequestError | None = None
        self.stalled_s: Callable[[], float] = lambda: 0.0

    async def complete(
        self, prompts: list[list[int]], params: Sequence[Ask | BeamParams], options: RequestOptions = DEFAULT
    ) -> list[Any]:
        """The Measured or Searched of each prompt, in their order. The channel must have no other request. Raises the
        RequestError of the first that failed; close() cancels what is left, as always."""
        for key, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            self._client.submit(self, key, prompt, wanted, options)
        results = dict([await self.next() for _ in prompts])
        return [results[key] for key in range(len(prompts))]

    def cancel(self, key: int) -> None:
        """Stop one request (a stop string was found). Idempotent; events of it that are on the way are dropped."""
        request_id = self.ids.pop(key, None)
        if request_id is not None:
            self._client.cancel(request_id)

    def close(self) -> None:
        """Cancel whatever still runs. Call it in a `finally`."""
        for key in list(self.ids):
            self.cancel(key)
        self._events.clear()

    async def next(self) -> tuple[int, Any]:
        """The next event (Tokens, or Measured of a job) and its key. Raises the RequestError that the engine or the
        supervisor gave instead."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        key, event, size = self._events.popleft()
        self._bytes -= size
        if isinstance(event, RequestError):
            raise event
        return key, event

    def push(self, key: int, event: Tokens | Measured | Searched | RequestError) -> None:
        """Called by the client only."""
        if not isinstance(event, Tokens) or event.finish is not None:
            self.ids.pop(key, None)
        size = 0
        if isinstance(event, Tokens):
            size = 64 + 16 * len(event.tokens) + sum(64 + 64 * len(entry.top) for entry in event.logprobs or ())
            waiting = self._bytes + size
            patience_s = STALL_S if waiting <= MOST_STREAM_BYTES else 0.0
            if waiting > STREAM_BYTES and self._overflow is None and self.stalled_s() > patience_s:
                self.close()
                size = self._bytes = 0
                event = self._overflow = _error(
                    "request_timeout", "The client reads too slowly.", 408, "invalid_request_error"
                )
        self._bytes += size
        self._events.append((key, event, size))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Link(asyncio.Protocol):
    """The socket to one engine process. `lost` resolves when it is closed or can no longer be trusted."""

    def __init__(self, receive: Callable[[object], None]):
        self._receive, self._reader = receive, FrameReader(FromEngine)
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except EngineError as error:
            self._end(f"sent {error}")
            return
        for message in messages:
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("")

    def _end(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        if self._transport is not None:
            self._transport.abort()

    def send(self, message: object) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))


class EngineClient:
    """Supervises one engine process and multiplexes requests onto it. Used from one event loop.

    respawn: starts a new process. After RESTART_BUDGET restarts within RESTART_WINDOW_S it is down and says why.
    tries_again: every RETRY_DOWN_S from then on. on_down: called when it is down.
    """

    def __init__(
        self,
        respawn: Callable[[], EngineProcess],
        tries_again: bool = False,
        on_down: Callable[[], None] = lambda: None,
    ):
        self._respawn, self._tries_again, self._on_down = respawn, tries_again, on_down
        self.state = UNLOADED
        self.reason = ""  # why it is not ready, in words for a user
        self.info: Ready | None = None
        self.heartbeat = Heartbeat(0, 0, 0, 0)
        self.num_restarts = 0
        self.num_late_events = 0
        self.requests: dict[int, tuple[Channel, int]] = {}
        self._next_id = 1
        self._link: _Link | None = None
        self._process: EngineProcess | None = None
        self._task: asyncio.Task | None = None
        self._ready: asyncio.Future[Ready] | None = None  # of the start that goes on, or was the last
        self._fatal: Fatal | None = None
        self._restarts: deque[float] = deque()
        self._last_frame = self._last_step = time.monotonic()

    # Life of the process

    def start(self, process: EngineProcess) -> None:
        """Take over a process that has been spawned already. Returns at once; await started(). Also after unload() and
        after a failed start."""
        loop = asyncio.get_running_loop()
        self.state, self.reason = STARTING, ""
        self._ready = loop.create_future()
        self._ready.add_done_callback(lambda future: future.cancelled() or future.exception())  # "never retrieved"
        self._task = loop.create_task(self._supervise(process))

    async def started(self) -> Ready:
        """The first start's Ready message. Raises EngineStartError when it failed."""
        assert self._ready is not None, "start() comes first"
        return await asyncio.shield(self._ready)

    async def wait_ready(self) -> None:
        """Wait for the first start, for a request. Raises RequestError when that failed, and while the engine restarts, is
        down or stops."""
        with contextlib.suppress(EngineStartError):
            if self.state == STARTING:
                await self.started()
        if self.state != READY:
            raise self._unavailable()

    def _unavailable(self) -> RequestError:
        if self.state == STOPPING:
            return shutting_down_error()
        if self.state == DOWN:
            later = "is tried again every minute" if self._tries_again else "is not started again"
            return _error("engine_unavailable", f"The engine failed and {later}.")
        return restarting_error()

    async def _supervise(self, process: EngineProcess) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._process, self._fatal = process, None
            self._last_frame = self._last_step = time.monotonic()
            _, self._link = await loop.create_connection(lambda: _Link(self._receive), sock=process.sock)
            if process.load is not None:
                self._link.send(LoadModel(process.load))
            watchdog = loop.create_task(self._watch(process))
            fault = await self._link.lost
            watchdog.cancel()
            self._link = None
            description = await self._reap(process, fault)
            self.reason = self._fatal.message if self._fatal else description
            if self.state == STOPPING:
                return
            first_start = self.state == STARTING
            self.state = RESTARTING
            self._fail_all(restarting_error())
            if first_start:
                self.state = DOWN
                exit_code, code = (self._fatal.exit_code, self._fatal.code) if self._fatal else (1, "")
                assert self._ready is not None
                self._ready.set_exception(EngineStartError(self.reason, exit_code, code, self._fatal is None))
                return
            log.error("the engine process stopped: %s", self.reason)
            delay = self._restart_delay(time.monotonic())
            if delay is None:
                self.state = DOWN
                self.reason = f"{RESTART_BUDGET} restarts within {RESTART_WINDOW_S:.0f} s; last: {self.reason}"
                log.error("the engine is down: %s", self.reason)
                self._on_down()
                if not self._tries_again:
                    return
                delay = RETRY_DOWN_S
            await asyncio.sleep(delay)
            self.num_restarts += 1
            log.warning(
                "restarting the engine (%d of %d within %.0f s)", len(self._restarts), RESTART_BUDGET, RESTART_WINDOW_S
            )
            process = self._respawn()

    def _restart_delay(self, now: float) -> float | None:
        """Seconds until the next start, or None when the budget is spent."""
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= RESTART_BUDGET:
            return None
        self._restarts.append(now)
        return 0.25 * (2 ** (len(self._restarts) - 1) - 1)  # 0, 0.25, 0.75, 1.75, 3.75

    async def _reap(self, process: EngineProcess, fault: str) -> str:
        """Make sure that it is gone; returns what happened to it."""
        for _ in range(100):
            if process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        else:
            process.kill()
            while process.poll() is None:
                await asyncio.sleep(0.01)
            fault = fault or "closed its socket and did not exit"
        code = process.poll() or 0
        if fault:
            return f"the engine process {fault}"
        if code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process exited with code {code}"

    async def _watch(self, process: EngineProcess) -> None:
        """Kill an engine that owes events and has been silent for KILL_S."""
        while True:
            await asyncio.sleep(1.0)
            if self.state == READY and self.requests and time.monotonic() - self._last_frame > KILL_S:
                log.error("the engine has been silent for %.0f s with work to do: killing it", KILL_S)
                process.kill()
                return

    async def stop(self, timeout: float = 2.0) -> None:
        """Fail what is left, ask the engine to exit, kill it after `timeout` seconds, reap it."""
        self.fail_requests(shutting_down_error())
        self.state = STOPPING
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(shutting_down_error())
        if self._link is not None:
            self._link.send(Shutdown())
        if self._process is not None:
            deadline = time.monotonic() + timeout
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            self._process.kill()
            while self._process.poll() is None:
                await asyncio.sleep(0.005)
        if self._task is not None:
            self._task.cancel()

    async def unload(self) -> None:
        """End the process of an engine that owes nothing; its memory is free when this returns. start() may follow."""
        self.state = STOPPING
        if self._process is not None:
            self._process.kill()  # nothing to be finished: killing is quicker than asking
            while self._process.poll() is None:
                await asyncio.sleep(0.002)
        if self._task is not None:
            if self._link is None:  # it waits for its next try
                self._task.cancel()
            await asyncio.wait([self._task])
        self._fail_all(restarting_error())
        self.state = UNLOADED

    def kill(self) -> None:
        """Immediately, for the second signal."""
        if self._process is not None:
            self._process.kill()

    # Requests

    def submit(
        self, channel: Channel, key: int, prompt: list[int], params: Asked, options: RequestOptions = DEFAULT
    ) -> None:
        """Send a request: its events come from the channel's next(), under `key`. Raises RequestError when the engine is
        not ready."""
        if self.state != READY or self._link is None:
            raise self._unavailable()
        request_id = channel.ids[key] = self._next_id
        self._next_id += 1
        self.requests[request_id] = (channel, key)
        if len(self.requests) == 1:
            self._last_step = time.monotonic()  # the age of the last step counts from when there is work
        self._link.send(MESSAGES[type(params)](request_id, prompt, params, options))

    def cancel(self, request_id: int) -> None:
        """Forget a request and tell the engine. Events that are on the way are counted and dropped."""
        if self.requests.pop(request_id, None) is not None and self._link is not None:
            self._link.send(Cancel(request_id))

    def fail_requests(self, error: RequestError) -> None:
        """Cancel every request; each channel gets `error`."""
        if self._link is not None:
            for request_id in self.requests:
                self._link.send(Cancel(request_id))
        self._fail_all(error)

    def _fail_all(self, error: RequestError) -> None:
        requests, self.requests = self.requests, {}
        for channel, key in requests.values():
            channel.push(key, error)

    def _receive(self, message: object) -> None:
        self._last_frame = time.monotonic()
        if isinstance(message, StepTokens):
            self._last_step = self._last_frame
            requests = self.requests
            for request_id, token in zip(message.ids, message.tokens, strict=True):
                request = requests.get(request_id)
                if request is None:
                    self.num_late_events += 1
                else:
                    request[0].push(request[1], Tokens(request_id, [token]))
        elif isinstance(message, Tokens | Measured | Searched | Failed):
            request = self.requests.get(message.id)
            if request is None:
                self.num_late_events += 1
                return
            channel, key = request
            if isinstance(message, Failed):
                del self.requests[message.id]
                channel.push(
                    key,
                    RequestError(
                        message.message,
                        status=message.status,
                        type=message.type,
                        code=message.code,
                        param=message.param,
                    ),
                )
                return
            self._last_step = self._last_frame
            if not isinstance(message, Tokens) or message.finish is not None:
                del self.requests[message.id]
            channel.push(key, message)
        elif isinstance(message, Heartbeat):
            if message.steps != self.heartbeat.steps or not (message.running or message.waiting):
                self._last_step = self._last_frame
            self.heartbeat = message
        elif isinstance(message, Ready):
            self.info, self.reason = message, ""
            if self.state in (STARTING, RESTARTING, DOWN):
                self.state = READY
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Fatal):
            self._fatal = message

    # Health

    def health(self) -> tuple[bool, str]:
        """(can it answer a request now, why not)."""
        now = time.monotonic()
        if self.state != READY:
            # Nothing of self.reason: it may hold paths, and anybody may ask for the health.
            return False, {
                STARTING: "the engine is loading the model",
                UNLOADED: "the model is not loaded",
                RESTARTING: "the engine is restarting",
                STOPPING: "the server is shutting down",
                DOWN: "the engine is down",
            }[self.state]
        if now - self._last_frame > SILENT_S:
            return False, f"the engine has been silent for {now - self._last_frame:.0f} s"
        if self.requests and now - self._last_step > STUCK_S:
            return False, f"the engine has made no step for {now - self._last_step:.0f} s"
        return True, ""

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the engine last made progress; 0 without work."""
        return time.monotonic() - self._last_step if self.requests else 0.0
