"""Where keys and values lie in device memory, and how whole pages of them move: to other pages, to the host and back.

A page is one or several blocks (pages.py), one behind the other. A block holds BLOCK tokens of every layer (of a group,
in models with windowed layers: groups.py): its parts are K of layer 0, V of layer 0, K of layer 1, ..., each of
num_kv_heads * head_dim * BLOCK elements, and in 8 bits BLOCK scales a head (kernels/kv_pages.py, where a block is
called a page). Of multi-head latent attention a layer has one part: its values are the beginnings of its keys. Memory
is touched page by page, so what is resident follows what is in use (one array a layer would touch 2 * num_layers
places, with huge pages 2 MiB each, for the first token).

Kernels see layer l's keys as an array [parts, num_kv_heads, head_dim, BLOCK] (on a GPU [parts, num_kv_heads, BLOCK,
head_dim], like the values everywhere) that starts at the layer's first part, and find block b at index
b * parts_of[group]: page tables hold these numbers, one for each BLOCK tokens, not page numbers (`table_entries`).
"""

import ctypes
from _thread import allocate_lock  # a start does without the module threading
from array import array
from math import lcm, prod
from typing import Any, NamedTuple

from zse.cache.groups import MAX_WASTE, Layers, one_group
from zse.cache.pages import BLOCK, check_page_size
from zse.dtypes import ITEM_BYTES
from zse.errors import ConfigError
from zse.kernels.kv_pages import latent_shape, pages_shape
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from zse.cache.states import StateCache

# What a cache can be made of → the dtype of its Tensors.
KV_DTYPES = {"f16": "f16", "f32": "f32", "bf16": "bf16", "int8": "i8", "fp8": "e4m3"}
STATE_TRANSFERS = ("state", "state out", "state in")  # see zse.cache.states.StateSlots
GROW_BYTES = 256 << 20  # of device memory at once: a GPU maps it in about a millisecond
# Of host memory at once: page-locking takes about 0.3 ms a MiB, which a step must not wait for in full. As many bytes as two large
# pages or more: memory that is taken so is zeroed and locked faster.
CHUNK_BYTES = 32 << 20


def block_nbytes(config, dtype: str = "f16", groups: Layers | None = None) -> int:
    """Bytes of one block: K and V of BLOCK tokens in all layers of a ModelConfig, or in a group of them.
    ConfigError."""
    if dtype not in KV_DTYPES:
        raise ConfigError(f"KV cache dtype {dtype!r}: expected one of {', '.join(KV_DTYPES)}")
    groups = groups or one_group(config)
    groups = tuple(filter(None, groups))  # a pipeline's rank may have no layers of one
    sizes = [layer_nbytes(config, dtype, layers[0]) for layers in groups]
    most = max(len(layers) * size for layers, size in zip(groups, sizes, strict=True))
    # Every group finds its blocks at multiples of its own parts.
    whole = lcm(*(_part_nbytes(config, dtype, layers[0]) for layers in groups))
    nbytes = -(-most // whole) * whole
    if nbytes > most / (1 - MAX_WASTE):
        raise ConfigError(
            f"KV cache dtype {dtype!r}: heads of this model's two sizes do not share pages in it; use f16"
        )
    return nbytes


def parts_of(config, dtype: str, groups: Layers) -> list[int]:
    """How many parts of its layers' size a block has, for each group."""
    nbytes, first = block_nbytes(config, dtype, groups), next(filter(None, groups))
    return [nbytes // _part_nbytes(config, dtype, (layers or first)[0]) for layers in groups]


def layer_nbytes(config, dtype: str, layer: int) -> int:
    """Bytes of what a layer has in a block."""
    return len(layer_parts(config, KV_DTYPES[dtype], layer)) * _part_nbytes(config, dtype, layer)


def _part_nbytes(config, dtype: str, layer: int) -> int:
    kind = KV_DTYPES[dtype]
    return prod(layer_parts(config, kind, layer)[0]) * ITEM_BYTES[kind]


def layer_parts(config, kind: str, layer: int, kernels: str = "cpu") -> tuple[tuple[int, ...], ...]:
    """Shapes of what a layer has in a block, of equal sizes: its keys first, its values last. kind: dtype of the
    Tensors; kernels: of the device."""
    if config.latent is not None:
        return (latent_shape(config.latent.width, kind),)
    heads, dim = config.kv_heads_of(layer), config.head_dim_of(layer)
    return tuple((heads, *pages_shape(dim, kind, keys, kernels)) for keys in (True, False))


class KVCache:
    """`num_pages` pages of `page_size` tokens in one buffer. keys[l] and values[l]: Tensors of layer l for the kernels
    (those of an earlier layer where it has none, None of a layer without attention); see the module for their numbering. groups: layers with a page table
    of their own (default: all have one); group_of[l]: which. Buffers are zero-filled. What is not written costs no
    memory: on a CPU pages become resident when first written, on a GPU `map_to` maps more of the buffer's addresses."""

    def __init__(
        self, device, config, num_pages: int, dtype: str = "f16", groups: Layers | None = None, page_size: int = BLOCK
    ):
        if num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, got {num_pages}")
        check_page_size(page_size)
        self.num_pages, self.dtype = num_pages, dtype
        self.first_page = 0  # of a rank that has pages of its own, among all ranks'
        self.blocks_per_page = page_size // BLOCK
        self.num_blocks = num_pages * self.blocks_per_page
        groups = groups or one_group(config)
        self.num_groups = len(groups)
        nbytes = block_nbytes(config, dtype, groups)
        self.page_nbytes = nbytes * self.blocks_per_page
        kind = self.kind = KV_DTYPES[dtype]  # of the tensors
        self.parts_of = parts_of(config, dtype, groups)
        self.parts_per_block = self.parts_of[0]
        self.buffer = device.alloc_growing(first_nbytes(self.nbytes), self.nbytes, label="kv cache")
        places = {layer: (group, place) for group, layers in enumerate(groups) for place, layer in enumerate(layers)}
        self.group_of: list[int] = []
        self.keys: list[Tensor | None] = []
        self.values: list[Tensor | None] = []
        for layer in range(config.num_layers):
            if config.kv_layer(layer) < 0:
                self.group_of.append(-1)
                self.keys.append(None)
                self.values.append(None)
                continue
            group, place = places[config.kv_layer(layer)]
            part, parts = nbytes // self.parts_of[group], layer_parts(config, kind, layer, device.kernels)
            count = (self.num_blocks - 1) * self.parts_of[group] + 1  # the last block's part is the last index
            first, last = len(parts) * place, len(parts) * (place + 1) - 1
            self.group_of.append(group)
            self.keys.append(Tensor(self.buffer, (count, *parts[0]), kind, first * part))
            self.values.append(Tensor(self.buffer, (count, *parts[-1]), kind, last * part))

    def number_from(self, first_page: int) -> None:
        """Page tables have numbers of all ranks' pages, of which these begin at `first_page`."""
        self.first_page, shift = first_page, first_page * self.page_nbytes
        self.keys, self.values = (
            [tensor and tensor._replace(offset=tensor.offset - shift) for tensor in tensors]
            for tensors in (self.keys, self.values)
        )

    def map_to(self, page: int) -> None:
        """Have memory for pages up to number `page`. DeviceError when there is none."""
        end = (page + 1) * self.page_nbytes
        if end > self.buffer.nbytes:
            self.buffer.grow(min(-(-end // GROW_BYTES) * GROW_BYTES, self.nbytes))

    def discard(self, first: int, count: int) -> None:
        """Give back the memory of pages that nobody has, on a CPU; nothing of another rank's."""
        first -= self.first_page
        if 0 <= first < self.num_pages:
            self.buffer.discard(first * self.page_nbytes, count * self.page_nbytes)

    def table_entry(self, pages: list[int], block: int, group: int = 0) -> int:
        """What a group's page table holds for one block of a sequence that has `pages`."""
        count = self.blocks_per_page
        return (pages[block // count] * count + block % count) * self.parts_of[group]

    def table_entries(self, pages: list[int], first: int, end: int, group: int = 0) -> array:
        """What a group's page table holds for the blocks first .. end - 1 of a sequence that has `pages`: an array of
        i32."""
        count, parts = self.blocks_per_page, self.parts_of[group]
        if count == 1:
            return array("i", [page * parts for page in pages[first:end]])
        start = first // count
        firsts = [page * count * parts for page in self.pages_of(pages, first, end)]
        entries = array("i", bytes(4 * count * len(firsts)))
        for index in range(count):
            offset = index * parts
            entries[index::count] = array("i", [at + offset for at in firsts])
        return entries[first - start * count : end - start * count]

    def pages_of(self, pages: list[int], first: int, end: int) -> list[int]:
        """Those of a sequence's `pages` that have its blocks first .. end - 1."""
        return pages[first // self.blocks_per_page : -(-end // self.blocks_per_page)]

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_nbytes


def first_nbytes(nbytes: int) -> int:
    """Bytes that a GPU maps at once of a cache of `nbytes`."""
    return min(nbytes, GROW_BYTES)


class HostSlots:
    """`count` slots of `nbytes` each. Memory is taken by the chunk of `per_chunk` slots, when a slot of it is first used, or
    ahead of that, by any thread."""

    def __init__(self, device, nbytes: int, count: int):
        self.nbytes, self.count = nbytes, count
        self._device = device
        self.per_chunk = max(1, CHUNK_BYTES // nbytes)
        self._chunks: dict[int, Any] = {}
        self._taking: dict[int, Any] = {}

    @property
    def taken_nbytes(self) -> int:
        """Bytes of host memory that it has."""
        return sum(chunk.nbytes for chunk in list(self._chunks.values()))

    def address(self, slot: int) -> int:
        """Where the slot is. Raises DeviceError when there is no memory for it."""
        if slot >= self.count:
            raise IndexError(f"host slot {slot} of {self.count}")
        number, place = divmod(slot, self.per_chunk)
        return (self._chunks.get(number) or self.take(number)).address + place * self.nbytes

    def take(self, number: int) -> "Any":
        """The memory (Device.host_memory) of the chunk of this number. DeviceError."""
        with self._taking.setdefault(number, allocate_lock()):
            chunk = self._chunks.get(number)
            if chunk is None:
                slots = min(self.per_chunk, self.count - number * self.per_chunk)
                chunk = self._chunks[number] = self._device.host_memory(slots * self.nbytes, "kv host", for_copies=True)
            return chunk

    def reserve(self) -> None:
        """Take all memory."""
        for number in range(-(-self.count // self.per_chunk)):
            self.take(number)

    def close(self) -> None:
        for chunk in self._chunks.values():
            chunk.free()
        self._chunks.clear()


class PageMover:
    """Runs transfers (scheduler.Batch.transfers) behind what was submitted to the device before.

    host_slots, host_states: places of the host for pages and states. history: i32 [num_blocks, BLOCK], the tokens of each block on a GPU, which go with it; None on a CPU. states: the
    StateCache of a model with a state. told(transfers): called before they run, for ranks that have pages of their own."""

    def __init__(
        self,
        device,
        kv: KVCache,
        history: Tensor | None = None,
        states: "StateCache | None" = None,
        told: "Callable[[list], None] | None" = None,
        host_slots: int = 0,
        host_states: int = 0,
    ):
        self._device, self._kv, self._states, self._told = device, kv, states, told
        # (start, bytes of a page) of what makes up a page.
        self._parts = [(kv.buffer.address, kv.page_nbytes)]
        if history is not None:
            self._parts.append((history.address, 4 * BLOCK * kv.blocks_per_page))
        self.page_nbytes = sum(nbytes for _, nbytes in self._parts)
        self.slots = HostSlots(device, self.page_nbytes, host_slots)
        self.state_slots = None if states is None else HostSlots(device, states.slot_nbytes, host_states)

    def run(self, transfers: list[tuple[str, int, int]]) -> None:
        """In this order. Raises DeviceError."""
        if self._told is not None:
            self._told(transfers)
        for kind, source, target in transfers:
            if kind == "copy":
                self._kv.map_to(target)
                for start, nbytes in self._parts:
                    self._device.copy(start + target * nbytes, start + source * nbytes, nbytes)
            elif kind in STATE_TRANSFERS:
                self._move_state(kind, source, target)
            elif kind == "out":
                at = self.slots.address(target)
                for start, nbytes in self._parts:
                    self._device.copy_out(at, start + source * nbytes, nbytes)
                    at += nbytes
            else:
                self._kv.map_to(target)
                at = self.slots.address(source)
                for start, nbytes in self._parts:
                    self._device.copy_in(start + target * nbytes, at, nbytes)
                    at += nbytes

    @property
    def host(self) -> list[HostSlots]:
        """The slots of pages, and those of states where there are some."""
        return [self.slots] if self.state_slots is None else [self.slots, self.state_slots]

    def reserve(self) -> None:
        """Take the host memory of all slots."""
        for slots in self.host:
            slots.reserve()

    def _move_state(self, kind: str, source: int, target: int) -> None:
        states, host, device = self._states, self.state_slots, self._device
        assert states is not None and host is not None
        if kind == "state":
            device.copy(states.address(target), states.address(source), states.slot_nbytes)
        elif kind == "state out":
            device.copy_out(host.address(target), states.address(source), states.slot_nbytes)
        else:
            device.copy_in(states.address(target), host.address(source), states.slot_nbytes)

    def settle(self) -> None:
        """Until the transfers so far are done."""
        self._device.read(_Range(self._kv.buffer.address, 4))

    def read_page(self, page: int) -> bytes:
        """What belongs to a page, after all that was submitted."""
        return b"".join(self.read_part(page, number) for number in range(len(self._parts)))

    def read_part(self, page: int, number: int) -> bytes:
        """As read_page(): 0: its keys and values, 1: its tokens, on a GPU."""
        start, nbytes = self._parts[number]
        return self._device.read(_Range(start + page * nbytes, nbytes))

    def read_slot(self, slot: int) -> bytes:
        """What the host has in a slot: see settle()."""
        return ctypes.string_at(self.slots.address(slot), self.page_nbytes)

    @property
    def can_fill_pages(self) -> bool:
        """Whether the host may write into pages: a CPU's, which are in one piece."""
        return self._device.shares_memory and len(self._parts) == 1

    def page_view(self, page: int) -> memoryview:
        """The memory of a page that no batch uses; see can_fill_pages."""
        self._kv.map_to(page)
        return _view(self._kv.buffer.address + page * self.page_nbytes, self.page_nbytes)

    def slot_view(self, slot: int) -> memoryview:
        """The memory of a host slot, to be written while no transfer still has to read it: see settle()."""
        return _view(self.slots.address(slot), self.page_nbytes)

    def read_state(self, slot: int) -> bytes:
        """What a slot of the device holds, after all that was submitted."""
        assert self._states is not None
        return self._device.read(_Range(self._states.address(slot), self._states.slot_nbytes))

    def read_host_state(self, slot: int) -> bytes:
        """What the host has in a slot for a state: see settle()."""
        assert self._states is not None and self.state_slots is not None
        return ctypes.string_at(self.state_slots.address(slot), self._states.slot_nbytes)

    def host_state_view(self, slot: int) -> memoryview:
        """As slot_view() of a slot for a state."""
        assert self._states is not None and self.state_slots is not None
        return _view(self.state_slots.address(slot), self._states.slot_nbytes)

    def close(self) -> None:
        for slots in self.host:
            slots.close()


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class _Range(NamedTuple):
    """Device memory by address."""

    address: int
    nbytes: int
