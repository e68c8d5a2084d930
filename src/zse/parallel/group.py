"""The ranks that compute one model together, as recordings and starts use them.

    group = RankGroup.create(2)                  # rank 0; ranks get group.descriptor
    group = RankGroup.join(1, 2, descriptor)     # in their own processes
    group.link(1, sock, keys, SUMS)          # of ranks on several hosts, their first ones
    group.connect(device)                    # collectives for the device's kind of memory
    group.all_reduce(recorder, partial, whole)

Ranks call the same things in the same order. Nothing waits for ever: whoever waits calls `check`, which raises GroupError when
another rank ended, and gives up after TIMEOUT_S without progress."""

import mmap
import os
import tempfile
import time

from zse import env
from zse.errors import ConfigError, DeviceError, GroupError
from zse.kernels.gpu import gemm_launch
from zse.lazy import logging
from zse.parallel.collectives import peer, staged
from zse.parallel.collectives.host import HostCollectives, shared_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from zse.runtime.device import Device, Recorder
    from zse.tensor import OwnRows, Tensor

MAX_RANKS = 64
SUMS, STREAM = 0, 1  # what a connection between hosts is for


class RankGroup:
    """rank: of this process, from 0; size: how many there are. descriptor: of the memory that ranks of a host share, for those that
    are started; look: called while this rank waits, raises GroupError when another one ended. nodes: hosts; each has as many ranks,
    here: those of this one. is_ring: whether ranks send to the next one. exact: whether sums must not depend on how many rows there are;
    set before connect()."""

    def __init__(self, rank: int, size: int, descriptor: int, nodes: int = 1, is_ring: bool = False):
        self.rank, self.size, self.descriptor, self.nodes, self.is_ring = rank, size, descriptor, nodes, is_ring
        self.node, each = rank * nodes // size, size // nodes
        self.here = range(self.node * each, (self.node + 1) * each)
        self._sockets: list[Any] = []
        self.look: Callable[[], None] = lambda: None
        self.exact = False
        text = env.get("ZSE_GROUP_TIMEOUT_S")
        if not text.replace(".", "", 1).isdigit() or not 0 < float(text) <= 86400:
            raise ConfigError(f"ZSE_GROUP_TIMEOUT_S={text} is not a number of seconds up to 86400")
        self.timeout_s = float(text)
        self.host = HostCollectives(self, mmap.mmap(descriptor, shared_bytes(size, nodes)))
        self.peers: Any = None  # zse.parallel.collectives.peer.PeerCollectives, of GPUs that reach each other
        self._collectives: Any = None
        self._staged: Any = self.host  # what send and receive go through where peers do not reach each other

    @classmethod
    def create(cls, size: int, nodes: int = 1, is_ring: bool = False) -> "RankGroup":
        """Rank 0 of a new group."""
        return cls(0, size, new_memory(size, nodes), nodes, is_ring)

    @classmethod
    def join(cls, rank: int, size: int, descriptor: int, nodes: int = 1, is_ring: bool = False) -> "RankGroup":
        """Another rank, in a process that inherited the descriptor. GroupError for one of another size."""
        if not 0 < rank < size <= MAX_RANKS or os.fstat(descriptor).st_size != shared_bytes(size, nodes):
            raise GroupError(f"rank {rank} of {size}: the group's memory is not that of such a group")
        return cls(rank, size, descriptor, nodes, is_ring)

    def link(self, node: int, sock: "Any", keys: bytes, kind: int) -> None:
        """What the first rank of this host and that of another exchange goes over this connected socket, which the group closes.
        keys: 16 bytes for what is sent, 16 for what comes. kind: SUMS, STREAM. GroupError."""
        self._sockets.append(sock)
        self.host.link(kind, node, sock.fileno(), keys)

    def connect(self, device: "Device") -> None:
        """Make the collectives of recordings of this device. All ranks must call it. GroupError, DeviceError."""
        self.host.watch([int.from_bytes(pid, "little") for pid in self.exchange(os.getpid().to_bytes(8, "little"))])
        if device.shares_memory:
            self._collectives = self.host
        elif device.shares_buffers and self.nodes > 1:
            self._collectives = self._staged = staged.StagedCollectives(self, device)
        elif device.shares_buffers:
            try:
                self._collectives = self.peers = peer.PeerCollectives(self, device)
                self.peers.watch(self.host.watched)
            except DeviceError as error:  # on all ranks alike
                logging.getLogger("zse.parallel").info("ranks exchange through memory of the host: %s", error)
                self._collectives = staged.StagedCollectives(self, device)
            self._staged = staged.StagedCollectives(self, device)
        else:
            raise GroupError(f"{device.name}: there are no collectives for this device; use --device cpu")

    # -- of a recording

    def all_reduce(self, recorder: "Recorder", x: "Tensor", out: "Tensor") -> None:
        """Record: out = the sum of all ranks' x, f32 or bf16 [tokens, width], added in the order of ranks; x may be out."""
        self._collectives.all_reduce(recorder, x, out)

    def joins(self, rows: int, width: int) -> bool:
        """Whether a sum of at most so many rows and the norm behind it are one launch."""
        return self.peers is not None and self._collectives is self.peers and self.peers.joins(rows, width) != ""

    def sum_norm(
        self, recorder: "Recorder", x: "Tensor", part: "Tensor", weight: "Tensor", out: "Any", eps: float
    ) -> None:
        """Record: the stream x f32 [tokens, width] += the sum of all ranks' part; out = x's RMSNorm times weight, bf16 or fp8. Of what
        joins(); the bits are those of two launches."""
        self.peers.sum_norm(recorder, x, part, weight, out, eps)

    def pushes(self, rows: int, width: int) -> bool:
        """Whether products may write their part where pushed_norm() adds both ranks' (of two GPUs)."""
        return self.joins(rows, width) and self.peers.pushes(rows, width)

    def push(
        self, recorder: "Recorder", turn: int, a: "Tensor", weight: "Any", bias: "Tensor | None", max_tokens: int
    ) -> None:
        """Record a @ weight.T + bias into the slots of this turn, 0 or 1: a turn follows the other one."""
        gemm_launch.launch_push(recorder, a, weight, bias, self.peers.slots(turn)[0], max_tokens)

    def pushed_norm(
        self, recorder: "Recorder", turn: int, x: "Tensor", weight: "Tensor | None", out: "Any", eps: float
    ) -> None:
        """Record, behind push(): x += both ranks' parts; then, unless out is None, as sum_norm()."""
        self.peers.pushed_norm(recorder, turn, x, weight, out, eps)

    def gather(self, recorder: "Recorder", x: "Tensor", out: "Tensor", widths: "Sequence[int]") -> None:
        """Record: on rank 0 out f32 [rows, sum of widths] = the ranks' x f32 [rows, widths[rank]] side by side. Other ranks' out is
        not touched."""
        self._collectives.gather(recorder, x, out, widths)

    def all_gather(self, recorder: "Recorder", x: "Tensor", out: "Tensor", widths: "Sequence[int]") -> None:
        """Record: on every rank out [rows, sum of widths] = the ranks' x [rows, widths[rank]], of any dtype, side by side."""
        self._collectives.gather(recorder, x, out, widths, every=self.nodes == 1)
        if self.nodes > 1:  # what other hosts have came to rank 0
            self._collectives.broadcast(recorder, out)

    def broadcast(self, recorder: "Recorder", x: "Tensor") -> None:
        """Record: x = rank 0's x, of any dtype."""
        self._collectives.broadcast(recorder, x)

    @property
    def spreads(self) -> bool:
        """Whether there are spread_rows() and collect_sums(). Before connect(): whether there will be, if GPUs reach each other."""
        return self.nodes == 1 and not isinstance(self._collectives, staged.StagedCollectives)

    def spread_rows(
        self, recorder: "Recorder", x: "Tensor", out: "Tensor", own: "OwnRows", wanted: "Tensor | None" = None
    ) -> None:
        """Record: on every rank out [tokens, width] = the rows that ranks have, x [own, width] of any dtype, where they belong: row m is row
        place[m] of the rank owner[m]. wanted i32 [tokens]: a bit for each rank that wants a row; others' stays as it is, or not."""
        self._collectives.spread_rows(recorder, x, out, own, wanted)

    def collect_sums(
        self, recorder: "Recorder", x: "Tensor", out: "Tensor", own: "OwnRows", wanted: "Tensor | None" = None
    ) -> None:
        """Record: out f32 [own, width] = the sums of all ranks' x f32 [tokens, width], added in the order of ranks, at this rank's
        rows. wanted: likewise of the ranks that have a part; the owner's counts as it is, all others' are not read."""
        self._collectives.collect_sums(recorder, x, out, own, wanted)

    def send(self, recorder: "Recorder", x: "Tensor") -> None:
        """Record: x, of any dtype, to the next rank (of the last one: rank 0), which need not be there yet."""
        self._link(recorder, x).send(recorder, x)

    def receive(self, recorder: "Recorder", x: "Tensor") -> None:
        """Record: x = what the rank before sent, in the order in which it did, from a tensor of the same shape."""
        self._link(recorder, x).receive(recorder, x)

    def _link(self, recorder: "Recorder", x: "Tensor") -> "Any":
        return self.peers if self.peers is not None and self.peers.fits(recorder, x) else self._staged

    # -- outside of recordings

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order. GroupError."""
        return self.host.exchange(data)

    def check(self, since: float) -> None:
        """Called by who waits, every 50 ms or so. since: time.monotonic() of the last progress. GroupError."""
        self.look()
        if time.monotonic() - since > self.timeout_s:
            raise GroupError(
                f"rank {self.rank} waited {self.timeout_s:g} s for the other ranks of the group (ZSE_GROUP_TIMEOUT_S)"
            )

    def close(self) -> None:
        """Give the shared memory back; before the device is closed. Closing twice does nothing."""
        if self.descriptor >= 0:
            collectives, self._collectives = self._collectives, None
            if collectives not in (None, self.host):
                collectives.close()
            self.host.close()
            os.close(self.descriptor)
            self.descriptor = -1
            for sock in self._sockets:
                sock.close()


def new_memory(size: int, nodes: int = 1) -> int:
    """A descriptor of memory that a host's ranks may share."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("zse-group")
    else:
        descriptor, path = tempfile.mkstemp(prefix="zse-group-")
        os.unlink(path)
    os.ftruncate(descriptor, shared_bytes(size, nodes))
    return descriptor
