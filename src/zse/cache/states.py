"""The state of recurrent layers: what a sequence carries from token to token where attention keeps keys of every token.

A slot is the state of one sequence in all layers: the parts of each layer (Decoder.state_parts) one behind the other,
each aligned to ALIGN bytes. Slots lie one behind the other in one buffer, so that a slot moves by one copy."""

from collections.abc import Iterable
from math import prod

from zse.tensor import StatePart, Tensor

ALIGN = 64  # bytes: a cache line, and the widest load of a kernel
Parts = tuple[tuple[str, tuple[int, ...]], ...]


def layers_parts(forward) -> list[Parts]:
    """The parts of every layer of a zse.models.decoder.Decoder. Raises ValueError where they and ModelConfig.mixers do
    not fit."""
    config = forward.config
    found = [tuple(forward.state_parts(config, layer)) for layer in range(config.num_layers)]
    for layer, parts in enumerate(found):
        if bool(parts) != (config.mixer(layer) not in ("attention", "none")):
            raise ValueError(f"layer {layer} ({config.mixer(layer)}) has the state parts {parts}")
    return found


class StateLayout:
    """Where parts lie in a slot. layers: of every layer its parts. places: (layer, name) → the f32 number of the slot
    with which the part begins, and its shape. stride: f32 numbers of a slot; nbytes: its bytes."""

    def __init__(self, layers: Iterable[Parts]):
        self.places: dict[tuple[int, str], tuple[int, tuple[int, ...]]] = {}
        at = 0
        for layer, parts in enumerate(layers):
            for name, shape in parts:
                self.places[layer, name] = at, shape
                at += -(-4 * prod(shape) // ALIGN) * ALIGN // 4
        self.stride, self.nbytes = at, 4 * at


class StateCache:
    """`num_slots` slots in one buffer of the device, zero-filled. tensor: f32 [num_slots, stride]."""

    def __init__(self, device, layout: StateLayout, num_slots: int):
        self.layout, self.num_slots = layout, num_slots
        self.buffer = device.alloc(num_slots * layout.nbytes, label="states")
        self.tensor = Tensor(self.buffer, (num_slots, layout.stride), "f32")

    @property
    def slot_nbytes(self) -> int:
        return self.layout.nbytes

    def part(self, layer: int, name: str) -> StatePart:
        """What a kernel takes as the state of a layer. KeyError where the layer has no such part."""
        place, shape = self.layout.places[layer, name]
        return StatePart(self.tensor, place, shape)

    def address(self, slot: int) -> int:
        """Where a slot begins in device memory."""
        return self.buffer.address + slot * self.layout.nbytes
