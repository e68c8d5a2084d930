"""A clock that nothing but an event loop moves, and sockets that exist in it only."""

import asyncio
import contextlib
import os
import random
import time
from types import SimpleNamespace

HIGH_WATER, LOW_WATER = 64 << 10, 16 << 10  # as asyncio's
EPOCH = 1_800_000_000.0


class Clock:
    """now: seconds of the monotonic clock. wall_offset: of the wall clock, which may jump. busy_s: of the process that runs now."""

    def __init__(self, seed: int):
        self.now, self.wall_offset, self.busy_s = 1000.0, EPOCH, 0.0
        self._random = random.Random(f"{seed} urandom")

    @contextlib.contextmanager
    def installed(self):
        """Meanwhile the time and os.urandom are ours."""

        def no_sleep(seconds):
            raise AssertionError("the one thread sleeps")

        ours = {
            "monotonic": lambda: self.now,
            "perf_counter": lambda: self.now + self.busy_s,
            "time": lambda: self.now + self.wall_offset,
            "sleep": no_sleep,
        }
        real = {name: getattr(time, name) for name in ours}
        urandom, os.urandom = os.urandom, self._random.randbytes
        for name, function in ours.items():
            setattr(time, name, function)
        try:
            yield
        finally:
            os.urandom = urandom
            for name, function in real.items():
                setattr(time, name, function)


class Loop(asyncio.BaseEventLoop):
    """Runs what is ready, then moves the clock to the next timer. Executors run their work at once, a moment later.

    listen: factories of the listening sockets' protocols. signals: handlers by number."""

    def __init__(self, clock: Clock, rng: random.Random):
        super().__init__()
        self.clock, self.rng = clock, rng
        self._selector = self
        self.listeners: list = []
        self.signals: dict[int, tuple] = {}
        self.errors: list[dict] = []
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    def time(self) -> float:
        return self.clock.now

    def select(self, timeout: float | None) -> list:
        assert timeout is not None, "nothing will ever happen again"
        self.clock.now += timeout
        return []

    def abandon(self) -> None:
        """End whatever still waits in it after a walk that failed."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks or {self.create_task(asyncio.sleep(0))}, timeout=100.0)
            for task in asyncio.all_tasks():
                task._log_destroy_pending = False

        self.run_until_complete(end())

    def _process_events(self, events) -> None:
        return

    def _write_to_self(self) -> None:
        return

    def run_in_executor(self, executor, function, *arguments):
        future = self.create_future()

        def work():
            if future.cancelled():
                return
            try:
                result = function(*arguments)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self.rng.random() * 0.01, work)
        return future

    async def create_server(self, factory, *, sock, backlog):
        self.listeners.append(factory)
        return SimpleNamespace(close=lambda: factory in self.listeners and self.listeners.remove(factory))

    async def create_connection(self, factory, *, sock):
        return sock.attach(factory)

    def add_signal_handler(self, number, callback, *arguments) -> None:
        self.signals[number] = (callback, arguments)

    def remove_signal_handler(self, number) -> bool:
        return self.signals.pop(number, None) is not None

    def signal(self, number: int) -> None:
        callback, arguments = self.signals[number]
        callback(*arguments)


class Wire:
    """One TCP connection: the server's transport at one end, the client's socket at the other.

    rate: bytes a second that the client reads; 0: none. received: what it has. ended: the server has ended its side. gone: nothing
    comes or goes any more."""

    def __init__(self, loop: Loop, rng: random.Random, protocol, address: str, rate: float = 1e9):
        self.loop, self.rng, self.protocol, self.address, self.rate = loop, rng, protocol, address, rate
        self.received, self.ended, self.gone = bytearray(), False, False
        self.news = asyncio.Event()
        self._out, self._in = bytearray(), bytearray()
        self._is_paused = self._reads_paused = self._eof = self._closing = self._flowing = self._left = False
        self._fin = self._vanished = False
        self.num_writes_after_end = 0
        protocol.connection_made(self)

    # -- the server's transport

    def get_extra_info(self, name: str):
        return {"peername": (self.address, 1), "socket": SimpleNamespace(setsockopt=lambda *option: None)}.get(name)

    def get_write_buffer_size(self) -> int:
        return len(self._out)

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes) -> None:
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._closing or not data:
            return
        self._out += data
        if len(self._out) > HIGH_WATER and not self._is_paused:
            self._is_paused = True
            self.protocol.pause_writing()
        self._flow()

    def write_eof(self) -> None:
        self._eof = True
        self._flow()

    def pause_reading(self) -> None:
        self._reads_paused = True

    def resume_reading(self) -> None:
        if self._reads_paused:
            self._reads_paused = False
            self.loop.call_soon(self._arrive)

    def abort(self) -> None:
        self._lose(None)

    def close(self) -> None:
        """Once what is buffered is sent."""
        self._closing = True
        if not self._out:
            self._lose(None)

    def _lose(self, error) -> None:
        self._closing = True
        if self._left:
            return
        self._left = True
        self._out.clear()
        self.loop.call_soon(self.protocol.connection_lost, error)
        if not self._vanished:
            self.gone = True
            self.news.set()

    def _flow(self) -> None:
        if not self._flowing and not self._vanished and self.rate:
            self._flowing = True
            self.loop.call_later(self.rng.random() * 0.002 if self.rate > 1e6 else 0.1, self._deliver)

    def _deliver(self) -> None:
        self._flowing = False
        if self.gone or self._vanished:
            return
        count = len(self._out) if self.rate > 1e6 else max(1, int(self.rate * 0.1))
        piece = bytes(self._out[:count])
        del self._out[:count]
        self.received += piece
        if self._is_paused and len(self._out) <= LOW_WATER:
            self._is_paused = False
            self.protocol.resume_writing()
        if self._out:
            self._flow()
        elif self._eof or self._closing:
            self.ended = True
            if self._closing:
                self._lose(None)
        self.news.set()

    # -- the client's socket

    def send(self, data: bytes, cuts: int = 0) -> None:
        """In `cuts` + 1 pieces, some time apart."""
        places = sorted(self.rng.randrange(len(data) + 1) for _ in range(cuts))
        delay = 0.0
        for start, end in zip([0, *places], [*places, len(data)]):
            delay += self.rng.random() * 0.003
            self.loop.call_later(delay, self._receive, data[start:end])

    def _receive(self, data: bytes) -> None:
        self._in += data
        self._arrive()

    def _arrive(self) -> None:
        if self._in and not self._reads_paused and not self._left and not self._closing:
            data = bytes(self._in)
            self._in.clear()
            self.protocol.data_received(data)
        if self._fin and not self._in and not self._left and not self._closing and not self._reads_paused:
            if not self.protocol.eof_received():
                self.close()

    def fin(self) -> None:
        """The client closes: what it has sent arrives first, what is sent to it goes nowhere."""

        def close():
            self._fin = True
            self.rate = 1e9
            self._flow()
            self._arrive()

        self.loop.call_later(0.01, close)

    def reset(self) -> None:
        self._lose(ConnectionResetError())

    def vanish(self, kernel_s: float) -> None:
        """The client's machine is gone; the server's kernel finds out after a while."""
        self._vanished = True
        self.loop.call_later(kernel_s, self._lose, TimeoutError())
