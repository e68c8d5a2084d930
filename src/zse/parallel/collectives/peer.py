"""Collectives between GPUs that can write each other's memory: kernels of zse.kernels.gpu.all_reduce in the recording.

Each rank has a buffer that all others map (CUDA's and HIP's IPC); how kernels meet there says zse.kernels.gpu.peers, how a pipeline's
ranks hand on what they computed zse.kernels.gpu.peer_messages. A thread
watches the ranks' processes: when one ends, kernels that wait for it stop, and whoever waits for the replay gets GroupError."""

import ctypes
import os
import struct
import threading

from zse import env
from zse.dtypes import ITEM_BYTES
from zse.errors import ConfigError, DeviceError, GroupError
from zse.kernels.gpu import gemm_push, peer_messages, peer_rows, peers
from zse.kernels.norm import TARGETS, norm_vectors
from zse.kernels.op import check
from zse.lazy import select
from zse.parallel.collectives import host
from zse.runtime import gpu_memory
from zse.runtime.args import Args
from zse.runtime.symbol import Sym, ceil_div, most_of, product

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from zse.parallel.group import RankGroup
    from zse.runtime.device import Recorder
    from zse.runtime.symbol import Size
    from zse.tensor import OwnRows, Tensor

SMALL_THREADS, LARGE_THREADS = 256, 512  # of the kernels
BOX_BYTES = 32 << 20  # of a large exchange at once: longer parts are several launches
# Ranks → up to how many bytes of a part one-way exchanges are faster than meetings: every rank sends its part twice as wide
# to each other one. Two ranks, NVLink of two H100s: 1 MiB takes 9.8 us, and 16.2 with a meeting (benchmarks/LOG.md); of more
# ranks by the bytes.
EXACT_WIDTH = 8  # rows that are so narrow are sums of squares (zse.kernels.whole_norm), which stay f32
SMALL_BYTES = {2: 1 << 20, 3: 512 << 10, 4: 512 << 10}
SMALL_BYTES_OF_MORE = 256 << 10
LARGE_BLOCKS = 96
# That send, of two ranks, and as many that add: two fit on a multiprocessor. FLAGS have no room for warps of more.
PAIR_BLOCKS = peers.MAX_BLOCKS
SENT = ("f32", "bf16", "int8")  # as what ranks send their parts of what is larger
CYCLES_PER_S = 2_000_000_000  # of a GPU's clock, about: a wait's limit need not be exact
MESSAGE_BLOCKS = 32  # of a message: who waits should not take a GPU's memory for polling
LAYOUT = 3  # of the buffer and its flags: ranks must have the same


def buffer_words(size: int) -> tuple[int, int, int]:
    """(inbox, outbox, all) of a rank's buffer, in words of 8 bytes. A box has room for a last tile of every rank."""
    inbox = push_slots(size) + 3 * peers.SMALL_VALUES // 2
    box = (BOX_BYTES + size * LARGE_THREADS * 32 + 4096) // 8
    return inbox, inbox + box, inbox + 2 * box


def push_slots(size: int) -> int:
    """Where in a rank's buffer, in words of 8 bytes, the slots of gemm_push begin: two of the other rank's, by turns, and its own one."""
    return peers.HEADER_BYTES // 8 + (2 * size + 1) * peers.SMALL_VALUES


class PeerCollectives:
    """Made by all ranks together. GroupError where ranks differ, DeviceError where their GPUs do not reach each other."""

    def __init__(self, group: "RankGroup", device: "Any"):
        if group.size > peers.MAX_RANKS:
            raise DeviceError(f"{group.size} ranks: kernels of peers are for up to {peers.MAX_RANKS} GPUs")
        self._sent = env.get("ZSE_ALL_REDUCE") or ("f32" if group.exact else "bf16")
        if self._sent not in SENT:
            raise ConfigError(f"ZSE_ALL_REDUCE={self._sent}: expected one of {', '.join(SENT)}")
        self._group, self._device, self._joins = group, device, env.get("ZSE_JOINED_SUMS") == "1"
        self._inbox, self._outbox, words = buffer_words(group.size)
        self._world = next(world for world in peers.WORLDS if world >= group.size)
        self._opened: list[gpu_memory.PeerMemory] = []
        self._buffer: Any = None
        self._addresses = self._map(group, device, 8 * words)
        self._stop_memory = device.host_memory(4096, "peers")
        self._stop_word = ctypes.c_uint32.from_address(self._stop_memory.address)
        self._wake: tuple[int, int] | None = None
        self._watcher: threading.Thread | None = None

    def _map(self, group: "RankGroup", device: "Any", nbytes: int) -> list[int]:
        """The addresses of all ranks' buffers, once every rank has all of them. What one cannot do, all learn."""
        problem, exported = "", b""
        try:
            self._buffer = device.alloc(nbytes, "peers")
            device.synchronize()  # it is zeroed
            exported = gpu_memory.export_buffer(self._buffer)
        except DeviceError as error:
            problem = f"rank {group.rank}: {error}"
        addresses = []
        for rank, told in enumerate(group.exchange(struct.pack("<IQ", LAYOUT, nbytes) + exported)):
            if struct.unpack("<IQ", told[:12]) != (LAYOUT, nbytes):
                raise GroupError(f"rank {rank} has another version of zse than rank {group.rank}: its buffers differ")
            if problem or len(told) == 12:
                continue
            if rank == group.rank:
                addresses.append(self._buffer.address)
            else:
                try:
                    self._opened.append(gpu_memory.PeerMemory(device, told[12:]))
                    addresses.append(self._opened[-1].address)
                except DeviceError as error:
                    problem = f"the GPU of rank {group.rank} does not reach that of rank {rank}: {error}"
        problems = [text.decode() for text in group.exchange(problem.encode()) if text]
        if problems:
            self._unmap()
            self._buffer = None
            raise DeviceError(problems[0])
        return addresses

    # -- of a recording

    def all_reduce(self, recorder: "Recorder", x: "Tensor", out: "Tensor") -> None:
        """As RankGroup's: f32 or bf16, rows of a multiple of 8 numbers; out may be x."""
        host.check_sum(x, out)
        width = product(x.shape[1:])
        if width % 8:
            raise ValueError(f"all_reduce of rows of {width} numbers: multiples of 8")
        largest, form = most_of(width * x.shape[0], recorder.maxima), "large"
        if largest * ITEM_BYTES[x.dtype] <= self.small_bytes:
            form = "small"
        elif x.dtype == "f32" and self._sent == "int8" and width % 32 == 0:
            form = "int8"
        elif x.dtype == "f32" and self._sent == "bf16" and width > EXACT_WIDTH:
            form = "small half" if 2 * largest <= self.small_bytes else "large half"
        self.reduce_by(form, recorder, x, out)

    def reduce_by(self, form: str, recorder: "Recorder", x: "Tensor", out: "Tensor") -> None:
        """Record all_reduce by a form: "small" (up to 4 * SMALL_VALUES bytes that are sent), "large", of f32 alone "small half" and
        "large half", which are sent as bf16, and "int8" (rows of a multiple of 32 numbers)."""
        count, item = product(x.shape), ITEM_BYTES[x.dtype]
        size, _, sent = form.partition(" ")
        if form == "int8":
            size, sent = "large", form
        largest = most_of(count, recorder.maxima)
        in_place = (x.buffer, x.offset) == (out.buffer, out.offset)
        args = self._common() | dict(x=x, out=out, count=count, in_place=int(in_place))
        symbol = f"all_reduce_{size}_{sent or x.dtype}_{self._world}"
        if size == "small":
            blocks = self._small_blocks(count) if isinstance(count, Sym) else ceil_div(count, 4 * SMALL_THREADS)
            self._launch(recorder, symbol, args | dict(begin=0, most=0), blocks)
            return
        most = BOX_BYTES // item
        # Numbers of a block at once: of two ranks each adds all, half of the blocks, else each a share.
        pairs = sent != "int8" and self._group.size == 2
        tile = LARGE_THREADS * (peers.TILES * 16 // (2 if sent else item) if pairs else 8 * self._group.size)
        for begin in range(0, largest, most):
            blocks = -(-min(most, largest - begin) // tile)
            grid = min(PAIR_BLOCKS, blocks) * (1 if in_place else 2) if pairs else min(LARGE_BLOCKS, blocks)
            self._launch(recorder, symbol, args | dict(begin=begin, most=most), grid)

    def joins(self, rows: int, width: int) -> str:
        """As what parts of a sum go to the only other rank in the launch of the norm that follows, of at most so many rows: "f32" or
        "half", as all_reduce() would send them; or "": that is a launch of its own."""
        if not self._joins or self._group.size != 2 or width % 8 or not norm_vectors(width):
            return ""
        forms = {"f32": 4} | ({"half": 2} if self._sent == "bf16" and width > EXACT_WIDTH else {})
        return next((form for form, nbytes in forms.items() if nbytes * rows * width <= self.small_bytes), "")

    def sum_norm(
        self, recorder: "Recorder", x: "Tensor", part: "Tensor", weight: "Tensor", out: "Any", eps: float
    ) -> None:
        """Record: x f32 [tokens, width] += the sum of all ranks' part f32; out = the RMSNorm of x times weight, bf16 or fp8. Of what
        joins(), and the bits of all_reduce() and add_rmsnorm()."""
        rows, width = x.shape
        form = self.joins(most_of(rows, recorder.maxima), width)
        for name, tensor, shape in (
            ("x", x, (rows, width)),
            ("part", part, (rows, width)),
            ("weight", weight, (width,)),
        ):
            check(f"sum_norm {name}", tensor, "f32", *shape)
        if not form or tuple(out.shape) != (rows, width):
            raise ValueError(f"sum_norm of {x.shape} into {tuple(out.shape)}")
        result, targets = TARGETS["gpu"](out, rows, width, "rms")
        args = self._common() | dict(x=x, delta=part, weight=weight, width=width, eps=float(eps)) | targets
        self._launch(recorder, f"sum_norm_{form}_{result}", args, rows)

    def pushes(self, rows: int, width: int) -> bool:
        """Whether a product may push its part, of at most so many rows, to where pushed_norm() adds both."""
        fits = rows <= gemm_push.ROWS and 2 * gemm_push.ROWS * width <= 4 * peers.SMALL_VALUES
        return self.joins(rows, width) == "half" and fits and width % 16 == 0

    def slots(self, turn: int) -> "tuple[dict[str, int], dict[str, int]]":
        """Addresses of the slots of a turn, 0 and 1: where a product pushes, and where pushed_norm() finds what both ranks did."""
        size, step = self._group.size, 4 * peers.SMALL_VALUES
        here, there = (self._addresses[r] + 8 * push_slots(size) for r in (self._group.rank, 1 - self._group.rank))
        mine = here + 2 * step
        return {"mine": mine, "theirs": there + turn * step}, {"mine": mine, "theirs": here + turn * step}

    def pushed_norm(
        self, recorder: "Recorder", turn: int, x: "Tensor", weight: "Tensor | None", out: "Any", eps: float
    ) -> None:
        """Record: x f32 [tokens, width] += what both ranks pushed in this turn; then, unless out is None, as sum_norm()."""
        rows, width = x.shape
        check("pushed_norm x", x, "f32", rows, width)
        result, targets = TARGETS["gpu"](out, rows, width, "rms")
        args = self._common() | dict(x=x, delta=None, weight=weight, width=width, eps=float(eps)) | targets
        self._launch(recorder, f"pushed_norm_{result}", args | self.slots(turn)[1], rows)

    def _small_blocks(self, count: Sym) -> "Size":
        """Blocks for a number of 4-number pieces that is known at replay: rows of any width take whole blocks."""
        per_row = -(-count.factor // (4 * SMALL_THREADS))
        return Sym(count.name, count.divisor, per_row)

    def gather(
        self, recorder: "Recorder", x: "Tensor", out: "Tensor", widths: "Sequence[int]", every: bool = False
    ) -> None:
        """As RankGroup's, every: all_gather(); widths are multiples of 16 bytes."""
        host.check_gather(x, out, widths, self._group.rank, every)
        item, rows = ITEM_BYTES[x.dtype], x.shape[0]
        if any(width * item % 16 for width in widths):
            raise ValueError(f"gather of {x.dtype} {x.shape}: widths {tuple(widths)}, multiples of 16 bytes")
        widths = [width * item // 4 for width in widths]  # in words
        wide = [*widths, *[0] * (peers.MAX_RANKS - len(widths))]
        most = BOX_BYTES // (4 * max(1, sum(widths if every else widths[1:])))
        if not most:
            raise ValueError(f"a row of {sum(widths):,} words is longer than {BOX_BYTES:,} bytes")
        args = self._common() | dict(x=x, out=out, rows=rows, every=int(every))
        args |= {f"width{r}": width for r, width in enumerate(wide)}
        for begin in range(0, most_of(rows, recorder.maxima), most):
            blocks = min(
                LARGE_BLOCKS, -(-max(widths) * min(most, most_of(rows, recorder.maxima)) // (4 * LARGE_THREADS))
            )
            self._launch(recorder, f"gather_peers_{self._world}", args | dict(begin=begin, most=most), max(1, blocks))

    def broadcast(self, recorder: "Recorder", x: "Tensor") -> None:
        """As RankGroup's: whole words of 4 bytes, at most BOX_BYTES."""
        nbytes = product(x.shape[1:]) * ITEM_BYTES[x.dtype] * x.shape[0]
        largest = most_of(nbytes, recorder.maxima)
        if largest > BOX_BYTES or product(x.shape[1:]) * ITEM_BYTES[x.dtype] % 4:
            raise ValueError(f"broadcast of {largest:,} bytes: whole words of 4, at most {BOX_BYTES:,}")
        count = Sym(nbytes.name, nbytes.divisor, nbytes.factor // 4) if isinstance(nbytes, Sym) else nbytes // 4
        blocks = max(1, min(LARGE_BLOCKS, largest // (4 * LARGE_THREADS)))
        self._launch(recorder, f"broadcast_peers_{self._world}", self._common() | dict(x=x, count=count), blocks)

    def spread_rows(
        self, recorder: "Recorder", x: "Tensor", out: "Tensor", own: "OwnRows", wanted: "Tensor | None" = None
    ) -> None:
        """As RankGroup's: rows of whole 16 bytes."""
        host.check_spread(x, out, own)
        nbytes = product(x.shape[1:]) * ITEM_BYTES[x.dtype]
        if nbytes % 16:
            raise ValueError(f"spread_rows of {x.dtype} {x.shape}: rows of whole 16 bytes")
        places = self._row_args(x, out, own, out.shape[0], wanted)
        self._exchange_rows(recorder, "spread_rows", "", nbytes // 4, BOX_BYTES // nbytes, places)

    def collect_sums(
        self, recorder: "Recorder", x: "Tensor", out: "Tensor", own: "OwnRows", wanted: "Tensor | None" = None
    ) -> None:
        """As RankGroup's: rows of a multiple of 8 numbers. What is too large to go one way as f32 is sent as bf16, but with `exact`."""
        host.check_collect(x, out, own)
        width = product(x.shape[1:])
        if width % 8:
            raise ValueError(f"collect_sums of rows of {width} numbers: multiples of 8")
        is_small = 4 * width * most_of(x.shape[0], recorder.maxima) <= self._small_rows_bytes
        form, nbytes = ("_f32", 4 * width) if is_small or self._sent == "f32" else ("_half", 2 * width)
        most = BOX_BYTES // (nbytes * max(1, self._group.size - 1))
        places = self._row_args(x, out, own, x.shape[0], wanted)
        self._exchange_rows(recorder, "collect_sums", form, width, most, places)

    def _row_args(self, x: "Tensor", out: "Tensor", own: "OwnRows", count: "Size", wanted: "Tensor | None") -> "dict":
        places = dict(x=x, out=out, owner=own.owner, place=own.place, count=count)
        return self._common() | places | dict(wanted=wanted, chooses=int(wanted is not None))

    def _exchange_rows(
        self, recorder: "Recorder", name: str, form: str, width: int, most: int, args: "dict[str, Any]"
    ) -> None:
        """width: words or numbers of a row; most: rows that the inbox has room for."""
        count, args = args["count"], args | {"width": width}
        rows = most_of(count, recorder.maxima)
        if rows * width * (2 if form == "_half" else 4) <= self._small_rows_bytes:
            numbers = count * width
            blocks = self._small_blocks(numbers) if isinstance(numbers, Sym) else ceil_div(numbers, 4 * SMALL_THREADS)
            self._launch(recorder, f"{name}_small{form}_{self._world}", args | dict(begin=0, most=rows), blocks)
            return
        for begin in range(0, rows, most):
            here = min(most, rows - begin)
            blocks = min(LARGE_BLOCKS, here, -(-here * width // (8 * LARGE_THREADS)))
            symbol = f"{name}_large{form}_{self._world}"
            self._launch(recorder, symbol, args | dict(begin=begin, most=most), blocks)

    @property
    def _small_rows_bytes(self) -> int:
        """The largest exchange of rows that goes one way."""
        return min(self.small_bytes, 4 * (peers.SMALL_VALUES - peer_rows.GREETING))

    def fits(self, recorder: "Recorder", x: "Tensor") -> bool:
        """Whether messages of x go this way: rows of whole 16 bytes, and all of it into the two boxes, so that a sender need not wait
        for who receives, which may wait for what is sent behind it."""
        width, largest = product(x.shape[1:]) * ITEM_BYTES[x.dtype], most_of(x.shape[0], recorder.maxima)
        return width % 16 == 0 and width * largest <= 2 * BOX_BYTES

    def send(self, recorder: "Recorder", x: "Tensor", name: str = "send") -> None:
        """As RankGroup's, of what fits()."""
        if not self.fits(recorder, x):
            raise ValueError(f"{name} of {x.dtype} {x.shape}: rows of whole 16 bytes, at most {2 * BOX_BYTES:,} in all")
        count, most = product((*x.shape, ITEM_BYTES[x.dtype])), BOX_BYTES // 4
        words = Sym(count.name, count.divisor, count.factor // 4) if isinstance(count, Sym) else count // 4
        largest = most_of(words, recorder.maxima)
        for begin in range(0, largest, most):
            blocks = -(-min(most, largest - begin) // (4 * peer_messages.THREADS))
            args = self._common() | dict(x=x, count=words, begin=begin, most=most)
            self._launch(recorder, f"{name}_peer_{self._world}", args, min(MESSAGE_BLOCKS, blocks))

    def receive(self, recorder: "Recorder", x: "Tensor") -> None:
        """As RankGroup's, of what fits()."""
        self.send(recorder, x, "receive")

    @property
    def small_bytes(self) -> int:
        """The largest part that goes one way, with its flag in every word."""
        return min(SMALL_BYTES.get(self._group.size, SMALL_BYTES_OF_MORE), 4 * peers.SMALL_VALUES)

    def _common(self) -> "dict[str, Any]":
        """Arguments of PeerParams."""
        absent = [None] * (peers.MAX_RANKS - self._group.size)
        return {f"peer{r}": address for r, address in enumerate([*self._addresses, *absent])} | dict(
            own=self._buffer,
            stop=self._stop_memory,
            patience=int(self._group.timeout_s * CYCLES_PER_S),
            rank=self._group.rank,
            size=self._group.size,
            inbox=self._inbox,
            outbox=self._outbox,
        )

    def _launch(self, recorder: "Recorder", symbol: str, args: "dict[str, Any]", grid: "Size") -> None:
        recorder.launch(symbol, Args(**args), grid)
        if self.check not in recorder.checks:
            recorder.checks.append(self.check)

    # -- faults

    def watch(self, descriptors: "Sequence[int]") -> None:
        """Stop kernels that wait as soon as one of these becomes readable: its process has ended."""
        if descriptors:
            self._wake = os.pipe()
            self._watcher = threading.Thread(target=self._look, args=(tuple(descriptors),), daemon=True, name="ranks")
            self._watcher.start()

    def _look(self, descriptors: "tuple[int, ...]") -> None:
        waiting, wake = select.poll(), self._wake[0] if self._wake else -1
        for descriptor in (*descriptors, wake):
            waiting.register(descriptor, select.POLLIN)
        if wake not in {descriptor for descriptor, _ in waiting.poll()}:
            self._stop()

    def _stop(self) -> None:
        """Kernels that wait for other ranks end."""
        if not getattr(self._device, "closed", False):
            self._stop_word.value = self._stop_word.value or peers.STOPPED_BY_HOST

    def check(self) -> None:
        """GroupError when a kernel stopped waiting."""
        stopped = self._stop_word.value
        if stopped:
            self._group.look()  # knows how a process ended
            why = (
                "another rank has ended"
                if stopped == peers.STOPPED_BY_HOST
                else f"waited {self._group.timeout_s:g} s for the other GPUs (ZSE_GROUP_TIMEOUT_S)"
            )
            raise GroupError(f"rank {self._group.rank} of {self._group.size}: {why}")

    def _unmap(self) -> None:
        for memory in self._opened:
            memory.close()
        self._opened.clear()

    def close(self) -> None:
        """Stop watching and give the others' memory back, before the device is closed. This rank's goes with its device: others
        may still have it. Closing twice does nothing."""
        # A process's socket closes before the process ends. Who heard of it first closes here, and what the driver is asked for then
        # would wait for kernels that wait for that process, as long as their patience lasts.
        self._stop()
        if self._wake is not None and self._watcher is not None:
            os.write(self._wake[1], b".")
            self._watcher.join()
            for descriptor in self._wake:
                os.close(descriptor)
            self._wake = None
        self._unmap()
