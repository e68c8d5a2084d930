"""The ranks of an engine whose model is shared (docs/design/0011-several-devices.md): how rank 0 starts the others and tells them
what to replay, and what these do.

Everything that rank 0 replays with collectives in it goes to the others as a Replay: which recording, its symbols, and the inputs, which
they write where theirs are read. They have no scheduler and sample nothing."""

import contextlib
import os
from _thread import allocate_lock  # a start does without the module threading
from collections import deque
from typing import Any, NamedTuple

import msgspec

import zse
from zse.engine import forwards, messages, process, rendezvous
from zse.engine.config import EngineConfig, ResolvedConfig
from zse.engine.rank_messages import (
    AdapterPart,
    Discard,
    FilesDone,
    FillSlot,
    ForgetAdapter,
    KeepAdapter,
    Key,
    Move,
    OfFiles,
    RankLoaded,
    RecordAhead,
    Replay,
    ToLeader,
    ToRank,
    WriteTable,
)
from zse.engine.rank_options import num_ranks
from zse.errors import ConfigError, DeviceError, GroupError, ZSEError
from zse.lazy import logging, select
from zse.lora.targets import Image
from zse.parallel.group import RankGroup
from zse.runtime import probe
from zse.runtime.bindings import cuda as cuda_driver
from zse.scheduler.feature import Feature

PART_BYTES = 16 << 20  # of an adapter, in a message
END_S = 2.0  # for ranks that are to end
# What ranks must agree on, and take the least of.
LEAST = ("max_context", "max_rows", "max_tokens_per_step", "page_size")
SLOTS = ("host_slots", "state_slots", "host_states")


class Hello(msgspec.Struct):
    """What a rank says of itself. files: size and time of change of the model's. settings: of LEAST; tokens: that its KV pages hold;
    host_slots, state_slots, host_states: as ResolvedConfig has them."""

    version: str
    files: list[tuple[int, int]]
    device: str
    kv_dtype: str
    activations: str
    settings: dict[str, int]
    tokens: int
    host_slots: int
    state_slots: int = 0
    host_states: int = 0
    isa: str = ""  # of a CPU's kernels


class Ranks:
    """This process's place among the ranks, as load.py and the Runner use it: rank 0's Leader, or a Follower."""

    leads = False

    def __init__(self, group: RankGroup, config: EngineConfig):
        self.group, self.config = group, config
        self.is_pipeline = config.pipeline_parallel_size > 1

    @property
    def share(self) -> dict[str, Any]:
        """Whose share of the model is planned (plan_model)."""
        place = {"rank": self.group.rank, "ranks": self.group.size}
        place |= {"whole_experts": self.config.expert_parallel, "pipeline": self.is_pipeline}
        return place | {"whole_attention": self.config.data_parallel_attention}

    def agree(self, device: Any, source: Any, planned: Any, again: Any) -> Any:
        """The MemoryPlan that all ranks have room for. planned: this rank's; again(config): its plan with other settings. Connects
        the group to the device. GroupError where ranks differ in what they must not."""
        self.group.exact = self.config.deterministic
        self.group.connect(device)
        if self.config.data_parallel_attention and not self.group.spreads:  # the plan may be for ranks that do
            planned = again(self.config)
        for _ in range(2):
            told = self._exchange(device, source, planned.config)
            _check_levels(told, planned)
            if len({(hello.tokens, *hello.settings.values()) for hello in told}) == 1:
                return planned._replace(config=_with_least(planned.config, told))
            least = {name: min(hello.settings[name] for hello in told) for name in LEAST}
            tokens = min(hello.tokens for hello in told)
            planned = again(msgspec.structs.replace(self.config, num_pages=max(1, tokens // 16), **least))
        raise GroupError(
            f"the ranks do not agree on the pages of the KV cache ({tokens} tokens): give --num-pages and --page-size"
        )

    def _exchange(self, device: Any, source: Any, used: ResolvedConfig) -> list[Hello]:
        # Of several hosts the rendezvous has compared what the files hold.
        is_one = self.group.nodes == 1
        files = [(stat.st_size, stat.st_mtime_ns * is_one) for stat in (os.fstat(file.fd) for file in source.files)]
        settings = {name: getattr(used, name) for name in LEAST}
        mine = Hello(
            version=zse.__version__,
            files=files,
            device=device.name,
            kv_dtype=used.kv_dtype,
            activations=used.activations,
            settings=settings,
            tokens=used.num_pages * used.page_size,
            host_slots=used.host_slots,
            state_slots=used.state_slots,
            host_states=used.host_states,
            isa=getattr(device, "isa", ""),
        )
        told = [msgspec.msgpack.decode(data, type=Hello) for data in self.group.exchange(msgspec.msgpack.encode(mine))]
        for rank, hello in enumerate(told):
            for name, what in (("version", "version of zse"), ("files", "model"), ("device", "kind of device")):
                if getattr(hello, name) != getattr(told[0], name):
                    found, expected = getattr(hello, name), getattr(told[0], name)
                    raise GroupError(f"rank {rank} has another {what} than rank 0: {found}, not {expected}")
            if (hello.kv_dtype, hello.activations) != (told[0].kv_dtype, told[0].activations):
                raise GroupError(f"rank {rank} computes with {hello.activations} and {hello.kv_dtype}, rank 0 does not")
        return told

    # What rank 0's Runner tells the others; nothing on those.

    def record(self, key: Key) -> None:
        """A recording is about to be made."""

    def replay(
        self, key: Key, symbols: dict[str, int], staging: Any, at: int, end: int, kv: Any, images: Any = ()
    ) -> None:
        """A recording is about to be replayed, with bytes [at, end) of its inputs. images: ImageSets.sent()."""

    def move(self, transfers: "list[tuple[str, int, int]]") -> None:
        """Transfers of pages are about to run."""

    def write_table(self, at: int, entries: Any) -> None:
        """Entries of the page table are about to be written past a step's inputs."""

    def discard(self, first: int, count: int) -> None:
        """The memory of pages is about to be given back."""

    def keep_adapter(self, image: Any) -> None:
        """An adapter (zse.lora.targets.Image) is about to be kept."""

    def forget_adapter(self, id: str) -> None:
        """An adapter is about to be forgotten."""

    def fill_slot(self, slot: int, id: str) -> None:
        """An adapter is about to be written into a slot."""

    def wait_loaded(self) -> None:
        """Until all ranks have their weights."""

    def look(self) -> None:
        """GroupError when another rank has ended."""

    def fail(self) -> None:
        """An error ends this rank, whose device is still open. Rank 0 ends the others; these leave the group as it is, for rank 0 to
        hear of the error first."""

    def close(self) -> None:
        """End the ranks, before the device is closed."""
        self.group.close()


def _check_levels(told: list[Hello], planned: Any) -> None:
    """CPUs of several hosts may have other kernels, whose sums differ in the last bit. What ranks compute each for itself then does,
    too: of a mixture which experts a token goes to."""
    for rank, hello in enumerate(told):
        if hello.isa == told[0].isa:
            continue
        if planned.model.config.moe is not None:
            raise GroupError(
                f"rank {rank} has the kernels of {hello.isa}, rank 0 of {told[0].isa}: give both ZSE_ISA, so that they route alike"
            )
        logging.getLogger("zse.engine").warning(
            "rank %d has the kernels of %s, rank 0 of %s: last bits differ", rank, hello.isa, told[0].isa
        )


def _with_least(used: ResolvedConfig, told: list[Hello]) -> ResolvedConfig:
    """The slots that every rank has."""
    least = {name: min(getattr(hello, name) for hello in told) for name in SLOTS}
    state_bytes = used.state_bytes // used.state_slots * least["state_slots"] if used.state_slots else 0
    return msgspec.structs.replace(used, state_bytes=state_bytes, **least)


class Peer(NamedTuple):
    """A rank that rank 0 started, or that has joined from another host."""

    process: process.EngineProcess | rendezvous.FarRank
    reader: messages.FrameReader


class Leader(Ranks):
    """Rank 0."""

    leads = True

    def __init__(self, group: RankGroup, config: EngineConfig):
        super().__init__(group, config)
        self._peers: list[Peer] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._loaded: set[int] = set()
        self.answers: dict[int, deque[FilesDone]] = {}  # what each rank says
        self._poll = select.poll()
        group.look = self.look

    @classmethod
    def start(cls, config: EngineConfig) -> "Leader":
        """Start the other ranks, which load beside this one. ConfigError, DeviceError."""
        size, device = num_ranks(config), device_of(config)
        first = of_rank(config, device, 0)  # refused before there is a group's memory
        found = cls(RankGroup.create(size, config.nnodes, config.pipeline_parallel_size > 1), first)
        descriptor, far = found.group.descriptor, []
        try:
            if config.nnodes > 1:  # before any rank waits for what is exchanged
                far = rendezvous.assemble(found.group, config)
            os.set_inheritable(descriptor, True)
            for rank in found.group.here[1:]:
                words = [
                    "--rank",
                    str(rank),
                    "--memory",
                    str(descriptor),
                    *of_rank(config, device, rank).to_arguments(),
                ]
                found._add(process.spawn(words))
            while far:
                found._add(far.pop(0))
        except BaseException:
            for joined in far:
                joined.sock.close()
            found.close()
            raise
        os.set_inheritable(descriptor, False)
        return found

    def _add(self, started: process.EngineProcess | rendezvous.FarRank) -> None:
        started.sock.settimeout(self.group.timeout_s)
        self._poll.register(started.sock, select.POLLIN)
        self._peers.append(Peer(started, messages.FrameReader(ToLeader | messages.Fatal)))

    def record(self, key: Key) -> None:
        self._tell(RecordAhead(key))

    def replay(
        self, key: Key, symbols: dict[str, int], staging: Any, at: int, end: int, kv: Any, images: Any = ()
    ) -> None:
        mapped = min(kv.buffer.nbytes // kv.page_nbytes, kv.num_pages) - 1
        self._tell(Replay(key, symbols, at, bytes(staging.host[at:end]), mapped, list(images)))

    def move(self, transfers: "list[tuple[str, int, int]]") -> None:
        if transfers:
            self._tell(Move(list(transfers)))

    def write_table(self, at: int, entries: Any) -> None:
        self._tell(WriteTable(at, memoryview(entries).tobytes()))

    def discard(self, first: int, count: int) -> None:
        self._tell(Discard(first, count))

    def keep_adapter(self, image: Any) -> None:
        for at, data in image.parts:
            for start in range(0, len(data), PART_BYTES):
                self._tell(AdapterPart(at + start // 2, data[start : start + PART_BYTES]))
        self._tell(KeepAdapter(image.id, image.rank, image.scales, sorted(image.members), image.own_rank))

    def forget_adapter(self, id: str) -> None:
        self._tell(ForgetAdapter(id))

    def fill_slot(self, slot: int, id: str) -> None:
        self._tell(FillSlot(slot, id))

    def order(self, message: OfFiles, rank: int = 0) -> None:
        """What the others, or one of them, are to do with their files (engine/rank_files.py)."""
        self._tell(message, rank)

    def listen(self, seconds: float) -> None:
        """Wait so long for a rank to say something; what it says. GroupError as look()."""
        self._poll.poll(1000 * seconds)
        self.look()

    def _tell(self, message: Any, only: int = 0) -> None:
        frame = messages.encode(message)
        for rank, peer in list(enumerate(self._peers, 1))[only - 1 : only] if only else enumerate(self._peers, 1):
            try:
                peer.process.sock.sendall(frame)
            except OSError as error:
                self.look()
                raise GroupError(f"rank {rank} (process {peer.process.pid}) takes no messages: {error}") from None

    def wait_loaded(self) -> None:
        """Each rank reads as long as it must: a disk may take minutes."""
        while len(self._loaded) < len(self._peers):
            self._poll.poll(1000)
            self.look()

    def look(self) -> None:
        readable = {descriptor for descriptor, _ in self._poll.poll(0)}
        for rank, peer in enumerate(self._peers, 1):
            if peer.process.sock.fileno() not in readable:
                continue
            try:
                data = peer.process.sock.recv(1 << 16)
            except OSError:
                data = b""
            for message in peer.reader.feed(data):
                if isinstance(message, messages.Fatal):
                    error = GroupError(f"rank {rank}: {message.message}")
                    error.exit_code, error.code = message.exit_code, message.code
                    raise error
                if isinstance(message, FilesDone):
                    self.answers.setdefault(rank, deque()).append(message)
                else:
                    self._loaded.add(rank)
            if not data:
                raise GroupError(f"rank {rank} (process {peer.process.pid}) {_ended(peer.process)}")

    def fail(self) -> None:
        self.close()

    def close(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.process.sock.close()
        self.group.close()
        for peer in self._peers:
            if peer.process.wait(END_S) is None:
                peer.process.kill()
                peer.process.wait(END_S)
        self._peers.clear()


def _ended(ended: process.EngineProcess | rendezvous.FarRank) -> str:
    if isinstance(ended, rendezvous.FarRank):
        return f"on node {ended.node} has ended, or cannot be reached"
    code = ended.wait(0.5)
    if code is None:
        return "closed its socket"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def device_of(config: EngineConfig) -> str:
    """The kind of device, and its number on rank 0."""
    if config.device != "auto":
        return config.device
    try:
        cuda_driver.CUDADriver()
    except DeviceError:
        return "cpu"
    return "cuda"


def of_rank(config: EngineConfig, device: str, rank: int) -> EngineConfig:
    """A rank's options: a CPU's threads and memory are shared by all, every GPU has a number. ConfigError for more ranks than
    threads."""
    size, (kind, _, number) = num_ranks(config) // config.nnodes, device.partition(":")
    rank %= size  # of this host
    if kind != "cpu":
        return msgspec.structs.replace(config, device=f"{kind}:{int(number or 0) + rank}")
    threads = config.threads or probe.default_threads()
    if config.threads is not None and threads < size:
        raise ConfigError(f"--threads {threads} for {size} ranks: each needs one")
    mine = max(1, threads * (rank + 1) // size - threads * rank // size)
    memory = None if config.max_memory is None else config.max_memory // size
    return msgspec.structs.replace(config, device="cpu", threads=mine, max_memory=memory)


class Follower(Ranks):
    """Another rank, in a process of its own. link: to rank 0."""

    def __init__(self, group: RankGroup, config: EngineConfig, link: messages.FrameSocket):
        super().__init__(group, config)
        self._link = link
        self._tickets: dict[tuple[str, int], Any] = {}  # by the inputs that a replay reads
        self._parts: list[tuple[int, bytes]] = []  # of the adapter that is kept next
        self._sending = allocate_lock()
        self.store: Any = None  # its engine/rank_files.py: RankStore, where pages are kept in files
        group.look = self.look

    @classmethod
    def join(cls, words: list[str], link: messages.FrameSocket) -> "Follower":
        """words: --rank R --memory FD and the engine's options, as Leader.start gives them."""
        config = EngineConfig.from_arguments(words[4:])
        is_ring = config.pipeline_parallel_size > 1
        group = RankGroup.join(int(words[1]), num_ranks(config), int(words[3]), config.nnodes, is_ring)
        return cls(group, config, rendezvous.enter(group, config, ToRank) if config.node_rank else link)

    def tell(self, error: ZSEError) -> None:
        """Rank 0 of another host why this one ends; of this host's it is told by the process."""
        if self.config.node_rank:
            with contextlib.suppress(messages.ServerGone):
                self._link.send(messages.Fatal(str(error), error.exit_code, error.code or ""))

    def answer(self, message: FilesDone) -> None:
        """Tell rank 0, from any thread."""
        with self._sending, contextlib.suppress(messages.ServerGone):  # which run() sees
            self._link.send(message)  # type: ignore[arg-type]

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        super().close()

    def look(self) -> None:
        if self._link.is_hung_up:
            raise GroupError(f"rank {self.group.rank}: rank 0 has ended")

    def run(self, runner: Any) -> None:
        """Do what rank 0 says until it goes. Errors as of the device, GroupError."""
        self._link.send(RankLoaded())  # type: ignore[arg-type]
        while (received := self._link.receive(None)) is not None:
            for message in received:
                self._do(runner, message)

    def _do(self, runner: Any, message: Any) -> None:
        if isinstance(message, Replay):
            self._replay(runner, message)
        elif isinstance(message, OfFiles):
            self.store.do(message)
        elif isinstance(message, RecordAhead):
            runner.followed(message.key)
        elif isinstance(message, Move):
            runner.pages.run(message.transfers)
        elif isinstance(message, Discard):
            runner.kv.discard(message.first, message.count)
        elif isinstance(message, WriteTable):
            runner.write_table(message.at, message.data)
        elif isinstance(message, AdapterPart):
            self._parts.append((message.at, message.data))
        elif isinstance(message, KeepAdapter):
            parts, self._parts = self._parts, []
            members = frozenset(message.members)
            runner.keep_adapter(Image(message.id, message.rank, parts, message.scales, members, message.own_rank))
        elif isinstance(message, ForgetAdapter):
            runner.adapters.forget(message.id)
        else:
            runner.adapters.fill(message.slot, message.id)

    def _replay(self, runner: Any, message: Replay) -> None:
        kind, _, number = message.key
        graph, staging = runner.followed(message.key)
        inputs = kind if kind in forwards.KINDS else "step", number
        before = self._tickets.get(inputs)
        if before is not None:
            before.wait()  # it may still read the inputs
        staging.host[message.at : message.at + len(message.data)] = message.data
        for at, data in message.images:
            runner.images[number].staging.host[at : at + len(data)] = data
        symbols = message.symbols
        if self.is_pipeline:
            runner.localize(message.key)
        if self.config.data_parallel_attention:
            symbols = runner.localize(message.key, symbols)
        runner.kv.map_to(message.mapped)
        self._tickets[inputs] = graph.submit(**{name: symbols[name] for name in graph.symbols})


class RankWatch(Feature):
    """Rank 0's ranks, as a feature of its engine: an idle engine sees that one ended, one that closes ends them."""

    is_live = False  # no step has to do with it

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def idle(self, now: float) -> bool:
        self._ranks.look()
        return False

    def close(self) -> None:
        self._ranks.close()
