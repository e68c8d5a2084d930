"""Collectives through memory that the ranks' processes share, and between hosts over sockets (runtime/csrc/collective.h).

In a recording they are launches as others are: the device's threads copy, wait and add, without Python. A rank that does not come
within the group's time, has ended or has left ends the group on every rank; the replay then raises GroupError."""

import ctypes
import os
import sys
import time

from zse.dtypes import ITEM_BYTES
from zse.errors import GroupError
from zse.runtime import native
from zse.runtime.args import Args
from zse.runtime.symbol import most_of, product

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from zse.parallel.group import RankGroup
    from zse.runtime.device import Recorder
    from zse.tensor import OwnRows, Tensor

# Most bytes of one rank's part: 8,192 tokens of 8,192 f32. Only what was written is resident.
MAX_BYTES = 256 << 20
# A decode step's part: 16 rows of 4,096 f32. Up to here one barrier and every rank adding all parts is faster than two
# barriers and each rank adding its share.
SMALL_BYTES = 256 << 10
# A pause is 40 to 140 cycles: a rank that is some tens of microseconds behind is waited for without the system's help. With
# more ranks than cores the one that is waited for may need the core of the one that waits.
SPINS, CROWDED_SPINS = 2000, 20
LOOK_MS = 50
CLOSED, CLOSED_LOOKS = 5, 10
TYPES = {"f32": 0, "bf16": 1}
SOURCES = [["group", "ptr"], ["x", "ptr"], ["out", "ptr"], ["count", "i64"], ["width", "i64"]]
PARAMS = {
    "reduce": [["group", "ptr"], ["x", "ptr"], ["out", "ptr"], ["count", "i64"], ["type", "i64"]],
    "gather": [["group", "ptr"], ["x", "ptr"], ["out", "ptr"], ["rows", "i64"], ["widths", "ptr"]],
    "broadcast": [["group", "ptr"], ["x", "ptr"], ["nbytes", "i64"]],
    "spread": [*SOURCES, ["place", "ptr"], ["own", "i64"], ["wanted", "ptr"]],
    "collect": [*SOURCES, ["place", "ptr"], ["own", "i64"], ["wanted", "ptr"], ["rows", "ptr"]],
    "send": [["group", "ptr"], ["x", "ptr"], ["nbytes", "i64"]],
    "receive": [["group", "ptr"], ["x", "ptr"], ["nbytes", "i64"]],
}
# Of one host, and of several; there the host's ranks have their sum before it is sent.
PHASES = {name: ("publish", "combine", "finish") for name in ("reduce", "gather", "broadcast", "spread", "collect")}
FAR_PHASES = {name: ("publish", "exchange", "combine", "finish") for name in ("reduce", "gather", "broadcast")}
FAR_PHASES["reduce"] = ("publish", "combine", "exchange", "finish")
WHY = {
    1: "{culprit} has ended",
    2: "{culprit} has left the group",
    3: "waited {timeout:g} s for {culprit} (ZSE_GROUP_TIMEOUT_S)",
    4: "another rank ended the group because of {culprit}",
    CLOSED: "the host of {culprit} closed the connection",
    6: "a message of {culprit}'s host was changed on its way",
}


def shared_bytes(size: int, nodes: int = 1) -> int:
    """Bytes of the memory that a host's ranks share, of `size` ranks on so many hosts; what is not written costs none."""
    return native.runtime().zse_group_bytes(size, nodes, MAX_BYTES, SMALL_BYTES)


def symbols_of(name: str, nodes: int) -> tuple[str, ...]:
    """The kernels of a collective between ranks of so many hosts."""
    phases = (PHASES if nodes == 1 else FAR_PHASES).get(name)
    return (f"zse_group_{name}",) if phases is None else tuple(f"zse_group_{name}_{phase}" for phase in phases)


class HostCollectives:
    """memory: shared_bytes(group.size, group.nodes), zeroed when the first rank maps it. watched: descriptors that become readable when
    their rank ends."""

    def __init__(self, group: "RankGroup", memory: "mmap.mmap"):
        self._group, self._memory, self._runtime = group, memory, native.runtime()
        self._view = (ctypes.c_char * len(memory)).from_buffer(memory)
        spins = SPINS if group.size // group.nodes <= (os.cpu_count() or 1) else CROWDED_SPINS
        self._handle: int | None = self._runtime.zse_group_open(
            ctypes.addressof(self._view),
            group.rank,
            group.size,
            group.nodes,
            MAX_BYTES,
            SMALL_BYTES,
            int(group.timeout_s * 1000),
            spins,
        )
        if not self._handle:
            raise GroupError(f"rank {group.rank} of {group.size}: the group cannot be opened")
        self._pids: Sequence[int] = ()
        self.watched: list[int] = []
        self._widths: dict[tuple[int, ...], ctypes.Array] = {}

    def watch(self, pids: "Sequence[int]") -> None:
        """Notice within 20 ms when one of these processes, the ranks', has ended (Linux 5.3 or later); on other hosts their
        connections say it."""
        self._pids = pids
        for rank, pid in enumerate(pids):
            if rank in self._group.here and rank != self._group.rank and sys.platform == "linux":
                try:
                    self.watched.append(os.pidfd_open(pid))
                except ProcessLookupError:
                    raise GroupError(f"rank {self._group.rank}: rank {rank} (process {pid}) has ended") from None
                except OSError:  # an older kernel, a sandbox: its silence is noticed
                    continue
                self._runtime.zse_group_watch(self.handle, rank, self.watched[-1])

    def link(self, kind: int, node: int, fd: int, keys: bytes) -> None:
        """Of the host's first rank: sums (kind 0), or what ranks send each other (1), go to another host's over this socket."""
        if self._runtime.zse_group_link(self.handle, kind, node, fd, keys):
            raise GroupError(f"rank {self._group.rank}: the connection to host {node} cannot be used")

    # -- of a recording

    def all_reduce(self, recorder: "Recorder", x: "Tensor", out: "Tensor") -> None:
        """As RankGroup's. ValueError for more than MAX_BYTES and for other types than f32 and bf16."""
        check_sum(x, out)
        count = product(x.shape)
        args = Args(group=self.handle, x=x, out=out, count=count, type=TYPES[x.dtype])
        self._record(recorder, "reduce", args, most_of(count, recorder.maxima) * ITEM_BYTES[x.dtype])

    def gather(
        self, recorder: "Recorder", x: "Tensor", out: "Tensor", widths: "Sequence[int]", every: bool = False
    ) -> None:
        """As RankGroup's, of any dtype; every: all_gather(). Errors as of all_reduce."""
        is_read, item = every or not self._group.rank, ITEM_BYTES[x.dtype]
        check_gather(x, out, widths, self._group.rank, every)
        array = self.widths_of([width * item for width in widths])
        places = dict(x=x, out=out if is_read else None)
        args = Args(group=self.handle, rows=x.shape[0], widths=ctypes.addressof(array), **places)
        self._record(recorder, "gather", args, most_of(x.shape[0], recorder.maxima) * max(widths) * item)

    def broadcast(self, recorder: "Recorder", x: "Tensor") -> None:
        """As RankGroup's."""
        nbytes = product((*x.shape, ITEM_BYTES[x.dtype]))
        args = Args(group=self.handle, x=x, nbytes=nbytes)
        self._record(recorder, "broadcast", args, most_of(nbytes, recorder.maxima))

    def spread_rows(
        self, recorder: "Recorder", x: "Tensor", out: "Tensor", own: "OwnRows", wanted: "Tensor | None" = None
    ) -> None:
        """As RankGroup's, of one host."""
        check_spread(x, out, own)
        count, nbytes = out.shape[0], product(x.shape[1:]) * ITEM_BYTES[x.dtype]
        places = dict(x=x, out=out, place=own.place, own=x.shape[0], wanted=wanted)
        args = Args(group=self.handle, count=count, width=nbytes, **places)
        self._record(recorder, "spread", args, most_of(count, recorder.maxima) * nbytes)

    def collect_sums(
        self, recorder: "Recorder", x: "Tensor", out: "Tensor", own: "OwnRows", wanted: "Tensor | None" = None
    ) -> None:
        """As RankGroup's, of one host."""
        check_collect(x, out, own)
        count, width = x.shape
        places = dict(x=x, out=out, place=own.place, own=out.shape[0], wanted=wanted, rows=own.rows)
        args = Args(group=self.handle, count=count, width=width, **places)
        self._record(recorder, "collect", args, most_of(count, recorder.maxima) * 4 * width)

    def send(self, recorder: "Recorder", x: "Tensor", name: str = "send") -> None:
        """As RankGroup's."""
        nbytes = product((*x.shape, ITEM_BYTES[x.dtype]))
        args = Args(group=self.handle, x=x, nbytes=nbytes)
        self._record(recorder, name, args, most_of(nbytes, recorder.maxima))

    def receive(self, recorder: "Recorder", x: "Tensor") -> None:
        """As RankGroup's."""
        self.send(recorder, x, "receive")

    def _record(self, recorder: "Recorder", name: str, args: Args, largest: int) -> None:
        """The launches of a collective, each with a block for each thread. largest: most bytes of a part."""
        check_part(largest)
        device = recorder.device
        symbols = symbols_of(name, self._group.nodes)
        for symbol in symbols if self._group.nodes > 1 else symbols[: 2 + (largest > SMALL_BYTES)]:
            address = ctypes.cast(getattr(self._runtime, symbol), ctypes.c_void_p).value or 0
            device.define(symbol, address, PARAMS[name])  # type: ignore[attr-defined]
            recorder.launch(symbol, args, grid=device.threads)
        if self.check not in recorder.checks:
            recorder.checks.append(self.check)

    def check(self) -> None:
        """GroupError, which says why, when the group has ended."""
        culprit = ctypes.c_int32()
        status = self._runtime.zse_group_status(self.handle, culprit)
        if status:
            self._group.look()  # knows how a process ended
            for _ in range(CLOSED_LOOKS if status == CLOSED else 0):  # another connection says which, a moment later
                time.sleep(LOOK_MS / 1000)
                self._group.look()
            name = f"rank {culprit.value}"
            if self._pids:
                name += f" (process {self._pids[culprit.value]})"
            reason = WHY[status].format(culprit=name, timeout=self._group.timeout_s)
            raise GroupError(f"rank {self._group.rank} of {self._group.size}: {reason}")

    # -- outside of recordings

    def exchange(self, data: bytes) -> list[bytes]:
        """As RankGroup's."""
        eight = [8] * self._group.size
        sizes = [int.from_bytes(size, "little") for size in self._exchange(len(data).to_bytes(8, "little"), eight)]
        found = [b""] * self._group.size
        for start in range(0, max(sizes), MAX_BYTES):
            pieces = [max(0, min(MAX_BYTES, size - start)) for size in sizes]
            for rank, piece in enumerate(self._exchange(data[start : start + MAX_BYTES], pieces)):
                found[rank] += piece
        return found

    def _exchange(self, data: bytes, sizes: "Sequence[int]") -> list[bytes]:
        """Everybody's bytes, of these sizes, on every rank: a gather by this thread, which looks at the group while it
        waits."""
        out = ctypes.create_string_buffer(max(1, sum(sizes)))
        widths = self.widths_of(sizes)
        kept = ctypes.create_string_buffer(data, max(1, len(data)))
        place = ctypes.addressof(out)
        self._run("gather", ctypes.addressof(kept), place, 1, ctypes.addressof(widths))
        if self._group.nodes > 1:  # rank 0 has it
            self._run("broadcast", place, sum(sizes))
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        return [out.raw[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _run(self, name: str, *numbers: int) -> None:
        args, one = (ctypes.c_uint64 * 5)(self.handle, *numbers), (ctypes.c_int64 * 3)(1, 1, 1)
        for index, symbol in enumerate(symbols_of(name, self._group.nodes)):
            began = time.monotonic()
            while index and not (here := self._runtime.zse_group_wait(self.handle, LOOK_MS)):
                self._group.check(began)
            if index and here < 0:
                self.check()
            getattr(self._runtime, symbol)(args, one, ctypes.c_int64(0), ctypes.c_int64(1))
        self.check()

    def close(self) -> None:
        """Leave, and give the memory back: ranks that wait for this one get a GroupError. Its recordings must not be
        replayed any more. Closing twice does nothing."""
        handle, self._handle = self._handle, None
        if handle:
            self._runtime.zse_group_close(handle)
            for fd in self.watched:
                os.close(fd)
            del self._view
            self._memory.close()

    @property
    def handle(self) -> int:
        """C's group. GroupError once it was closed."""
        if self._handle is None:
            raise GroupError(f"rank {self._group.rank} of {self._group.size}: the group was closed")
        return self._handle

    def widths_of(self, widths: "Sequence[int]") -> "ctypes.Array":
        """For C, kept as long as this is."""
        key = tuple(widths)
        if len(key) != self._group.size or min(key) < 0:
            raise ValueError(f"widths {key} of {self._group.size} ranks")
        return self._widths.setdefault(key, (ctypes.c_int64 * len(key))(*key))


def check_sum(x: "Tensor", out: "Tensor") -> None:
    """ValueError for tensors that all_reduce does not take."""
    if (out.shape, out.dtype) != (x.shape, x.dtype) or x.dtype not in TYPES:
        raise ValueError(f"all_reduce of {x.dtype} {x.shape} to {out.dtype} {out.shape}; {', '.join(TYPES)}")


def check_gather(x: "Tensor", out: "Tensor", widths: "Sequence[int]", rank: int, every: bool) -> None:
    """Likewise of gather, to every rank or to rank 0."""
    is_read = every or not rank
    if x.shape[1:] != (widths[rank],) or (is_read and (out.shape[1:], out.dtype) != ((sum(widths),), x.dtype)):
        raise ValueError(f"gather of {x.dtype} {x.shape} to {out.dtype} {out.shape}: widths {tuple(widths)}")


def check_spread(x: "Tensor", out: "Tensor", own: "OwnRows") -> None:
    """Likewise of spread_rows."""
    if (x.shape[1:], x.dtype) != (out.shape[1:], out.dtype) or {own.place.dtype, own.owner.dtype} != {"i32"}:
        raise ValueError(f"spread_rows of {x.dtype} {x.shape} to {out.dtype} {out.shape}")


def check_collect(x: "Tensor", out: "Tensor", own: "OwnRows") -> None:
    """Likewise of collect_sums."""
    if x.shape[1:] != out.shape[1:] or {x.dtype, out.dtype} != {"f32"} or own.rows.dtype != "i32":
        raise ValueError(f"collect_sums of {x.dtype} {x.shape} to {out.dtype} {out.shape}; f32")


def check_part(nbytes: int) -> None:
    """ValueError for a rank's part that the shared memory has no room for."""
    if nbytes > MAX_BYTES:
        raise ValueError(f"a part of {nbytes:,} bytes; ranks share at most {MAX_BYTES:,} at once")
