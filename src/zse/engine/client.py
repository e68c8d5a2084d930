"""The server's end of the engine: supervision of the process, requests, and what can be said about its health.

State of a request has one writer, EngineClient: `requests` holds every id that the engine still owes an event.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable

import msgspec

from zse.engine.channel import Channel, Owed
from zse.engine.messages import (
    AdapterLoaded,
    Ask,
    Cancel,
    Cancelled,
    DropSession,
    Failed,
    Fatal,
    FrameReader,
    FromEngine,
    Heartbeat,
    ImageInput,
    LoadAdapter,
    LoadModel,
    Measured,
    Ready,
    Searched,
    Shutdown,
    StepTokens,
    Submit,
    Tokens,
    UnloadAdapter,
    encode,
)
from zse.engine.process import EngineProcess
from zse.errors import EngineError, RequestError
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.options import DEFAULT, RequestOptions

log = logging.getLogger("zse.engine")

NO_IMAGES: list[ImageInput] = []
STARTING, READY, RESTARTING, DOWN, STOPPING = "starting", "ready", "restarting", "down", "stopping"
UNLOADED = "unloaded"  # no process: nobody has asked for the model yet, or it was evicted
RESTART_BUDGET, RESTART_WINDOW_S = 5, 600.0
RETRY_DOWN_S = 60.0  # where an engine that is down is tried again
SILENT_S = 8.0  # without a frame (a heartbeat is due each second) the engine counts as frozen: not ready
STUCK_S = 30.0  # without a step while rows run: not ready
STOP_S = 4.0  # asked to exit, it may write what is cached (engine/offload.py: CLOSE_S); killed then
KILL_S = 60.0  # silent this long with work to do: killed and restarted


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


def _refusal(event: Failed) -> RequestError:
    fields = {name: getattr(event, name) for name in ("status", "type", "code", "param")}
    return RequestError(event.message, **fields)


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
        self.requests: dict[int, Owed] = {}
        self.cancelled: dict[int, Owed] = {}  # the engine has yet to say what it computed for them
        self._next_id = 1
        self._loads: dict[int, asyncio.Future[AdapterLoaded]] = {}  # of adapters, that the engine has yet to answer
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
        self._process = process
        self._task = loop.create_task(self._supervise(process))

    async def started(self) -> Ready:
        """The first start's Ready message. Raises EngineStartError when it failed."""
        assert self._ready is not None, "start() comes first"
        return await asyncio.shield(self._ready)

    async def wait_ready(self) -> None:
        """Wait for the first start, for a request. Raises RequestError when that failed, and while the engine restarts,
        is down or stops."""
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
            try:
                fault = await self._link.lost
            finally:
                watchdog.cancel()
            self._link, self.heartbeat = None, Heartbeat(0, 0, 0, 0)  # nothing runs or waits in it any more
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
        """Kill an engine that owes anything and has been silent for KILL_S: no quota is reserved for longer."""
        while True:
            await asyncio.sleep(1.0)
            is_owing = self.requests or self.cancelled
            if self.state == READY and is_owing and time.monotonic() - self._last_frame > KILL_S:
                log.error("the engine has been silent for %.0f s with work to do: killing it", KILL_S)
                process.kill()
                return

    async def stop(self) -> None:
        """Fail what is left, ask the engine to exit, kill it after STOP_S seconds (one that loads after half of them), reap it."""
        patience = STOP_S if self.state == READY else STOP_S / 2
        self.fail_requests(shutting_down_error())
        self.state = STOPPING
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(shutting_down_error())
        if self._link is not None:
            self._link.send(Shutdown())
        if self._process is not None:
            deadline = time.monotonic() + patience
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            self._process.kill()
            while self._process.poll() is None:
                await asyncio.sleep(0.005)
        if self._task is not None:
            self._task.cancel()

    async def unload(self) -> None:
        """End the process; its memory is free when this returns. start() may follow. A start that goes on has failed,
        requests end with engine_restarting."""
        self.state = STOPPING
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineStartError("it was unloaded before it was ready", 1))
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
        self,
        channel: Channel,
        key: int,
        prompt: list[int],
        params: SamplingParams | Ask | BeamParams,
        options: RequestOptions = DEFAULT,
        images: list[ImageInput] = NO_IMAGES,
    ) -> None:
        """Send a request: its events come from the channel's next(), under `key`. Raises RequestError when the engine
        is not ready."""
        if channel.failure is not None:
            raise channel.failure
        if self.state != READY or self._link is None:
            raise self._unavailable()
        if key and options.max_wait_s is not None:  # of several sequences the first says whether they begin in time
            options = msgspec.structs.replace(options, max_wait_s=None)
        request_id = channel.ids[key] = self._next_id
        self._next_id += 1
        self.requests[request_id] = Owed(channel, key, len(prompt))
        channel.owed += 1
        if len(self.requests) == 1:
            self._last_step = time.monotonic()  # the age of the last step counts from when there is work
        self._link.send(Submit(request_id, prompt, params, options, images))

    def cancel(self, request_id: int) -> None:
        """Tell the engine to drop a request. Events that are on the way are counted and dropped."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.cancelled[request_id] = request
            if self._link is not None:  # else the engine has just died: _fail_all() follows
                self._link.send(Cancel(request_id))

    # Adapters

    async def load_adapter(self, path: str) -> AdapterLoaded:
        """Have the engine read a LoRA adapter. Raises RequestError: 422 for a folder that it cannot use."""
        if self.state != READY or self._link is None:
            raise self._unavailable()
        id, self._next_id = self._next_id, self._next_id + 1
        future = self._loads[id] = asyncio.get_running_loop().create_future()
        self._link.send(LoadAdapter(id, path))
        return await future

    def unload_adapter(self, adapter: str) -> None:
        """No request will name it any more."""
        if self._link is not None:
            self._link.send(UnloadAdapter(adapter))

    def drop_session(self, session: str) -> None:
        """Forget what was computed for a session (RequestOptions.session) alone."""
        if self._link is not None:
            self._link.send(DropSession(session))

    def _adapter_read(self, id: int, found: AdapterLoaded | RequestError) -> None:
        future = self._loads.pop(id)
        if future.done():
            return  # nobody waits any more
        if isinstance(found, AdapterLoaded):
            future.set_result(found)
        else:
            future.set_exception(found)

    def fail_requests(self, error: RequestError) -> None:
        """Cancel every request; each channel gets `error`."""
        for request_id, request in list(self.requests.items()):
            self.cancel(request_id)
            request.channel.push(request.key, error)

    def _fail_all(self, error: RequestError) -> None:
        """The engine is gone: nothing is known of its requests but what it told."""
        for id in list(self._loads):
            self._adapter_read(id, error)
        requests, cancelled, self.requests, self.cancelled = self.requests, self.cancelled, {}, {}
        for request in requests.values():
            request.channel.push(request.key, error)
        for request in (*requests.values(), *cancelled.values()):
            request.channel.end(request.computed)

    def _receive(self, message: object) -> None:
        self._last_frame = time.monotonic()
        if isinstance(message, StepTokens):
            self._last_step = self._last_frame
            for request_id, token in zip(message.ids, message.tokens, strict=True):
                request = self.requests.get(request_id)
                if request is None:
                    self._receive_event(Tokens(request_id, [token]))
                else:
                    request.computed = (request.computed or request.num_prompt) + 1
                    request.channel.push(request.key, Tokens(request_id, [token]))
        elif isinstance(message, AdapterLoaded):
            self._adapter_read(message.id, message)
        elif isinstance(message, Failed) and message.id in self._loads:
            self._adapter_read(message.id, _refusal(message))
        elif isinstance(message, Tokens | Measured | Searched | Failed | Cancelled):
            self._receive_event(message)
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

    def _receive_event(self, event: Tokens | Measured | Searched | Failed | Cancelled) -> None:
        """What the engine says of one request. What it cost counts also where nobody listens any more."""
        request = self.requests.get(event.id)
        owed = request or self.cancelled.get(event.id)
        if isinstance(event, Tokens):
            is_last, cost = event.finish is not None, len(event.tokens)
            if owed is not None and not owed.computed:
                cost += owed.num_prompt - event.cached_tokens
        else:
            is_last, cost = True, event.num_tokens if isinstance(event, Measured) else event.computed
            cost -= owed.computed if owed is not None else 0
        if owed is not None:  # else it had its last word before
            owed.computed += max(cost, 0)
            if is_last:
                (self.cancelled if request is None else self.requests).pop(event.id)
                owed.channel.end(owed.computed)
        if isinstance(event, Cancelled):
            return
        if request is None:
            self.num_late_events += 1
        elif isinstance(event, Failed):
            request.channel.push(request.key, _refusal(event))
        else:
            self._last_step = self._last_frame
            request.channel.push(request.key, event)

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
