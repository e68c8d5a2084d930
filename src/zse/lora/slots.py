"""Adapters in device memory: slots of one size, whose matrices the launches of a step with adapters read
(zse.kernels.adapter)."""

from array import array
from collections.abc import Collection
from functools import cache
from typing import Any

from zse.kernels.adapter import RANK_STEP, Place, Slots
from zse.lora import shares
from zse.lora.targets import Image, Targets
from zse.plan.trace import Adapted
from zse.tensor import Tensor

LABEL = "adapters"


class AdapterSlots:
    """Device memory of `number` adapters of up to `rank`, and which one each slot has.

    every: all that an adapter of this model may change; adapted: what those that were kept so far change; version:
    counts how often that grew. images: those that requests may name, by id. kept: ids of those that requests in rows
    have, fewer than there are slots or as many; the scheduler's. share: zse.models.shares.ModelShare where the targets are one
    rank's, and ranks: the zse.engine.ranks.Ranks, which do the same; whole: the targets of all of the model, which adapters are
    read for. The runner is its one writer."""

    def __init__(self, device, targets: Targets, number: int, rank: int, share: Any = None, ranks: Any = None):
        self._device, self.targets, self._share = device, targets, share
        self.whole = targets if share is None else Targets(share.whole)
        self._told = ranks
        self.rank = rank = -(-rank // RANK_STEP) * RANK_STEP
        self.every, self.adapted = Adapted(targets.members, rank), Adapted(frozenset(), rank)
        self.version = 0
        size, products = targets.size * rank, len(targets.by_name)
        self._matrices = Tensor(device.alloc(2 * number * size, label=LABEL), (number, size), "f16")
        self._ranks = Tensor(device.alloc(4 * number, label=LABEL), (number,), "i32")
        self._scales = Tensor(device.alloc(4 * number * products, label=LABEL), (number, products), "f32")
        self.place = cache(self._place)
        self.images: dict[str, Image] = {}
        self.kept: Collection[str] = ()
        self._slot_of: dict[str, int] = {}  # by an adapter's id, least recently used first
        self._free = list(range(number - 1, -1, -1))
        self.num_loads = 0

    @property
    def number(self) -> int:
        return self._ranks.shape[0]

    @property
    def resident(self) -> tuple[str, ...]:
        """The adapters that have a slot."""
        return tuple(self._slot_of)

    def tensors(self, of_row: Tensor) -> Slots:
        """What launches take. of_row: i32, the slot of each row."""
        return Slots(self._matrices, self._ranks, self._scales, of_row, self.rank)

    def _place(self, layer: int, members: tuple[str, ...]) -> Place:
        """Of products that share an input."""
        found = [self.targets.by_name[layer, name] for name in members]
        return Place(found[0].down, found[0].up, found[0].product, tuple(target.rows for target in found))

    def keep(self, image: Image) -> bool:
        """Requests may name an adapter from now on. Whether recordings have to add more than before."""
        if self._told is not None:
            self._told.keep_adapter(image)
        if self._share is not None:
            image = shares.cut(image, self.whole, self.targets, self._share)
        self.images[image.id] = image
        if image.members <= self.adapted.members:
            return False
        self.adapted = Adapted(self.adapted.members | image.members, self.rank)
        self.version += 1
        return True

    def slot_of(self, id: str) -> int:
        """The slot of an adapter that a request in a row has; it is loaded if need be, in the place of the least
        recently used one that none has."""
        slot = self._slot_of.pop(id, None)
        if slot is None:
            if not self._free:
                self._free.append(self._slot_of.pop(next(other for other in self._slot_of if other not in self.kept)))
            slot = self._free.pop()
            if self._told is not None:
                self._told.fill_slot(slot, id)
            self.fill(slot, id)
        self._slot_of[id] = slot
        return slot

    def forget(self, id: str) -> None:
        """No request has this adapter, and none will."""
        if self._told is not None:
            self._told.forget_adapter(id)
        self.images.pop(id, None)
        slot = self._slot_of.pop(id, None)
        if slot is not None:
            self._free.append(slot)

    def fill(self, slot: int, id: str) -> None:
        """Write an adapter that was kept into a slot."""
        image = self.images[id]
        matrices, scales = self._matrices, self._scales
        line = 2 * matrices.shape[1] * slot
        for at, data in image.parts:
            self._device.write(Tensor(matrices.buffer, (len(data) // 2,), "f16", line + 2 * at), data)
        place = Tensor(scales.buffer, scales.shape[1:], "f32", 4 * scales.shape[1] * slot)
        self._device.write(place, image.scales)
        self._device.write(Tensor(self._ranks.buffer, (1,), "i32", 4 * slot), array("i", [image.rank]).tobytes())
        self.num_loads += 1
