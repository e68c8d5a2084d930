"""Engine processes of the simulated world: the real engine and scheduler on a device that remembers what stands in each slot."""

import random
from collections import deque

from simulator import EOS, VOCAB, FakeDevice, FlakyAllocator, Simulation, chain, said_after

from zse.cache.groups import PageGeometry
from zse.cache.pages import HostPool
from zse.cache.prefix import PrefixCache
from zse.engine import offload, serving
from zse.engine.core import Engine
from zse.engine.integrity import IntegrityWatch
from zse.engine.messages import Fatal, FrameReader, LoadModel, Parked, Ready, ServerGone, ToEngine, TokenLogprob, encode
from zse.scheduler.feature import Feature
from zse.scheduler.options import SchedulingPolicy
from zse.scheduler.scheduler import Scheduler

IDS = 257  # the text model's bytes and one more; the device says tokens below VOCAB
PAGE_BYTES = 64


class Runner:
    """What Engine asks of a runner. Borrows the checks of batches from the scheduler's simulator."""

    inspect, pages_of = Simulation.inspect, Simulation.pages_of

    def __init__(self, world, rng: random.Random, scheduler: Scheduler, allocator, device: FakeDevice):
        self.world, self.rng, self.scheduler, self.allocator, self.device = world, rng, scheduler, allocator, device
        self.page_size, self.runs_ahead = device.page_size, rng.random() < 0.5
        self.step_s = rng.choice((0.001, 0.005, 0.05))
        self.flight: list = []
        self.nan_rate, self.busy_s = 0.0, 0.0

    def submit(self, batch):
        self.inspect(batch)
        poisoned = {entry.request.id for entry in batch.entries if self.rng.random() < self.nan_rate}
        self.world.num_poisoned += len(poisoned)
        sampled = self.device.run(batch, poisoned)
        wanted = [entry.request.params.logprobs for entry in batch.entries for _ in range(entry.samples)]
        handle = [
            (
                token,
                None if count is None else TokenLogprob(-0.5, [((token + i) % VOCAB, -0.5 - i) for i in range(count)]),
            )
            for (token, _), count in zip(sampled, wanted, strict=True)
        ]
        self.flight.append((batch, handle))
        self.world.note("batch", [(entry.request.id, entry.start, entry.count) for entry in batch.entries])
        return handle

    def collect(self, handle):
        assert self.flight[0][1] is handle, "batches are collected in their order"
        del self.flight[0]
        self.busy_s += self.step_s
        self.world.clock.busy_s += self.step_s
        return handle

    def record_ahead(self) -> bool:
        return False

    def close(self) -> None:
        return


class Mover:
    """Pages between device, host and files. In a file stands the number of a page whose content the world keeps."""

    page_nbytes = PAGE_BYTES
    can_fill_pages = False

    def __init__(self, world, device: FakeDevice):
        self._kept, self._device = world.pages, device
        self._views: dict[int, bytearray] = {}

    def _as_bytes(self, content) -> bytes:
        self._kept.append(content)
        return len(self._kept).to_bytes(8, "little") * (PAGE_BYTES // 8)

    def read_slot(self, slot: int) -> bytes:
        return self._as_bytes(self._device.host[slot])

    def read_page(self, page: int) -> bytes:
        at = slice(page * self._device.page_size, (page + 1) * self._device.page_size)
        return self._as_bytes((self._device.slots[at], self._device.spoilt[at]))

    def slot_view(self, slot: int) -> memoryview:
        self._views[slot] = bytearray(PAGE_BYTES)
        return memoryview(self._views[slot])

    def take_read(self) -> None:
        """What was read to slots stands there."""
        for slot, content in self._views.items():
            number = int.from_bytes(content[:8], "little")
            if not 0 < number <= len(self._kept) or content != content[:8] * (PAGE_BYTES // 8):
                continue
            slots, spoilt = self._kept[number - 1]
            # A spoilt page may be nobody's: requests of other engines have other numbers.
            self._device.host[slot] = slots, [-1 if number < 0 else 1 << 40 for number in spoilt]
            self._device.num_spoilt += any(number >= 0 for number in spoilt)
        self._views.clear()

    def run(self, transfers) -> None:
        self._device.transfer(transfers)

    def settle(self) -> None:
        return


class Drafts(Feature):
    """Right and wrong drafts for requests that decode."""

    reads_tokens = True

    def __init__(self, scheduler: Scheduler, rng: random.Random):
        self.scheduler, self.rng = scheduler, rng

    def before_schedule(self, now: float) -> list:
        for request in self.scheduler.decoding():
            if request.drafts is not None and self.rng.random() < 0.5:
                # As the device would say them, the last one perhaps not.
                history, drafts = request.tokens.tolist(), []
                link = 0
                for token in history:
                    link = chain(token, link)
                for _ in range(self.rng.randint(0, 4)):
                    drafts.append(said_after(request.seed, link))
                    link = chain(drafts[-1], link)
                if drafts and self.rng.random() < 0.5:
                    drafts[-1] = self.rng.randrange(VOCAB)
                request.drafts = drafts
        return []


class InlineThread:
    """In place of the thread that writes files: the world lets it run."""

    def __init__(self, target, **options):
        self.run = target

    def start(self) -> None:
        return

    def join(self, timeout: float) -> None:
        self.run()


class EngineProcess:
    """What zse.engine.process.EngineProcess is, and its socket, and the process behind both."""

    def __init__(self, world, parked: bool = False):
        self.world, self.loop, self.rng = world, world.loop, random.Random(world.rng.getrandbits(64))
        self.load: list[str] | None = None
        self.pid, self.started, self.sock = len(world.processes) + 1, world.clock.now, self
        self.status: int | None = None
        self.engine: Engine | None = None
        self.frozen_until = 0.0
        self._protocol, self._early = None, bytearray()
        self._in, self._out = bytearray(), bytearray()
        self._reader, self._inbox = FrameReader(ToEngine), deque()
        self._closed = self._server_closed = self._closing = False
        self._turns, self._timer, self._idle_s = None, None, 0.0
        self.is_parked = self._parks = False
        world.processes.append(self)
        if parked:
            self._parks = True
            self.loop.call_later(0.1, self._park)
        else:
            self.loop.call_later(self.rng.choice((0.01, 0.3, 2.0)), self._load)

    # -- as the server sees it

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.end(-9)

    def attach(self, factory):
        """loop.create_connection(sock=process.sock)."""
        self._protocol = factory()
        self._protocol.connection_made(self)
        if self._early:
            self.loop.call_soon(self._protocol.data_received, bytes(self._early))
        if self._closed:
            self.loop.call_soon(self._protocol.connection_lost, None)
        return self, self._protocol

    def write(self, data: bytes) -> None:
        if not self._in:
            self.loop.call_later(0.0002, self._take)
        self._in += data

    def is_closing(self) -> bool:
        return self._closed

    def abort(self) -> None:
        if not self._closing and self._protocol is not None:
            self._closing = self._closed = True
            self.loop.call_soon(self._protocol.connection_lost, None)
        self._server_closed = True
        self._wake(0.0)

    def setblocking(self, flag: bool) -> None:
        return

    def recv(self, size: int) -> bytes:
        return bytes(self._early)

    def close(self) -> None:
        self._server_closed = True

    # -- as the engine sees its socket

    def receive(self, timeout: float):
        if self._server_closed and not self._inbox:
            return None
        messages = list(self._inbox)
        self._inbox.clear()
        self._idle_s = 0.0 if messages else timeout
        return messages

    def send(self, *messages) -> None:
        if self._server_closed:
            raise ServerGone("the server process is gone")
        self._deliver(b"".join(map(encode, messages)))

    def _deliver(self, data: bytes) -> None:
        if self._protocol is None:
            self._early += data
            return
        if not self._out:
            self.loop.call_later(0.0002, self._arrive)
        self._out += data

    def _arrive(self) -> None:
        """What was sent so far, or a part of it."""
        count = self.rng.randint(1, len(self._out)) if self.rng.random() < 0.2 else len(self._out)
        data = bytes(self._out[:count])
        del self._out[:count]
        if self._out:
            self.loop.call_later(0.0002, self._arrive)
        if not self._closing:
            self._protocol.data_received(data)

    def _take(self) -> None:
        data = bytes(self._in)
        self._in.clear()
        if self.status is not None:
            return
        self._inbox += self._reader.feed(data)
        if self._parks and self._inbox:
            message = self._inbox.popleft()
            assert isinstance(message, LoadModel)
            self._parks = self.is_parked = False
            self.loop.call_later(self.rng.choice((0.01, 0.3)), self._load)
        elif self._turns is not None and self._idle_s:
            self._wake(0.0)

    # -- its life

    def _park(self) -> None:
        if self.status is None and self._parks:
            self.is_parked = True
            self._deliver(encode(Parked(phases_ms={})))

    def _load(self) -> None:
        if self.status is not None:
            return
        world, rng = self.world, self.rng
        fault = world.load_fault()
        if fault == "die":
            self.end(-11)
            return
        if fault:
            self._deliver(encode(Fatal(message="a load that fails", code=fault)))
            self.end(1)
            return
        self.engine = build_engine(world, rng)
        scheduler = self.engine.scheduler
        self.send(
            Ready(
                model="fake",
                max_context=min(scheduler.max_context, scheduler.cache.capacity),
                max_rows=scheduler.max_rows,
                num_pages=scheduler.cache.allocator.num_pages,
                memory_bytes={"kv": 1},
                phases_ms={},
                page_size=scheduler.cache.page_size,
            )
        )
        self._turns = serving.turns(self.engine, self)
        self._wake(0.0)

    def _wake(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(delay, self._turn)

    def _turn(self) -> None:
        if self.status is not None or self._turns is None:
            return
        if self.loop.time() < self.frozen_until:
            self._wake(self.frozen_until - self.loop.time())
            return
        runner, self._idle_s = self.engine.runner, 0.0
        runner.busy_s = self.world.clock.busy_s = 0.0
        try:
            next(self._turns)
        except StopIteration:
            self.end(0)
            return
        except ServerGone:
            self.end(0)
            return
        self.world.after_step(self)
        self._wake(max(1e-5, runner.busy_s, self._idle_s))

    def end(self, status: int) -> None:
        """The process is gone, its socket with it."""
        if self.status is not None:
            return
        self.status = status
        if self.engine is not None:
            disk = self.engine._features.get("disk")
            if status == 0:
                self.engine.close()
            elif disk is not None:
                disk._files.close()  # as the process's end does
        self._turns = None
        self.close_socket()
        self.world.note("process ended", (self.pid, status))

    def close_socket(self) -> None:
        if not self._closed:
            self._closed = True
            if self._protocol is not None:
                self.loop.call_later(0.0003, self._lost)

    def _lost(self) -> None:
        if self._out:  # what was sent before arrives before
            self.loop.call_later(0.0003, self._lost)
        elif not self._closing:
            self._closing = True
            self._protocol.connection_lost(None)

    def noise(self) -> None:
        """Bytes that are no message, as of a process whose memory is overwritten."""
        self._deliver(self.rng.choice((b"\xff" * 9, b"\x04\0\0\0\xc1abc", b"\x01\0\0\0\x80")))


def build_engine(world, rng: random.Random) -> Engine:
    page_size = rng.choice((16, 16, 32))
    num_pages, max_rows = rng.randint(12, 40), rng.randint(1, 6)
    geometry = PageGeometry(page_size=page_size)
    allocator = FlakyAllocator(num_pages, rng)
    has_prefix = rng.random() < 0.8
    host = HostPool(rng.choice((0, 4, 40)))
    scheduler = Scheduler(
        num_pages=num_pages,
        max_rows=max_rows,
        max_tokens=max_rows + rng.randint(0, 40),
        max_context=rng.choice((100, 180)),
        vocab_size=IDS,
        eos_ids=frozenset((EOS,)),
        max_waiting=rng.choice((3, 100)),
        allocator=allocator,
        max_drafts=rng.choice((0, 0, 5)),
        prefix_cache=PrefixCache(num_pages, rng.choice(("lru", "lfu", "smart")), page_size) if has_prefix else None,
        host=host,
        geometry=geometry,
        policy=SchedulingPolicy(reserve_output=rng.random() < 0.5, mixed_ratio=rng.choice((0.0, 3.0))),
    )
    device = FakeDevice(num_pages, max_rows, geometry)
    runner = Runner(world, rng, scheduler, allocator, device)
    engine = Engine(scheduler, runner, clock=lambda: world.clock.now)
    engine.integrity = IntegrityWatch(scheduler, lambda: world.clock.now)
    if scheduler.max_drafts:
        engine.use("speculation", Drafts(scheduler, rng))
    if has_prefix and host.num_slots and world.has_disk:
        files = world.page_files(page_size)
        if files is not None:
            engine.use("disk", offload.DiskTier(engine, Mover(world, device), files))
    return engine
