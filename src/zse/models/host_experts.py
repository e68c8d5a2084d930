"""Experts that stay in page-locked memory of the host, because the device has no room for all (`--expert-memory`), and
the places on the device that they take by turns.

Layers whose experts have equal matrices are a group: their places are one stack, of which each layer has `slots` that
keep experts between steps, and behind these all layers of the group share spill places, as many as a step may need that
finds every slot of its layer taken. So a step always has room for all experts of a layer, and no results depend on what
was there. Behind each choice of experts the recording has two launches (zse.kernels.gpu.expert_slots) that fetch what
is missing and let the layer's tasks name places. All is in the order of the compute stream: no step waits for the host,
and no place is written while a step may still read it."""

import ctypes
from array import array
from typing import NamedTuple

from zse.kernels.gpu import expert_slots
from zse.models import expert_places
from zse.models.weight_plan import ModelPlan
from zse.tensor import Routing, Tensor

COUNTS = 3  # of a layer: experts that were there, that came into a slot, and that came into a spill place


class LayerTables(NamedTuple):
    """What the launches of a layer take. expert_bytes: of one expert."""

    tables: dict[str, Tensor]
    first: tuple[int, int]
    expert_bytes: int


class HostExperts:
    """plan: with expert_slots; buffer: of the model, with the places at its end; memory: of the host,
    expert_places.host_bytes(plan). places: what steps multiply with; stored: where it is loaded to."""

    def __init__(self, device, plan: ModelPlan, buffer, memory):
        self.memory, self._buffer = memory, buffer
        self.places, self.stored = (
            expert_places.place_experts(plan, buffer),
            expert_places.place_host_experts(plan, memory),
        )
        experts, slots = expert_places.experts_of(plan), plan.expert_slots
        found = list(expert_places.segments_of(plan, self.places, self.stored))
        numbers = {layer: number for number, layer in enumerate(sorted(layer for _, layer, _ in found))}
        self._told = device.host_memory(8 * COUNTS * len(numbers), "expert counts")
        words = experts + 2 * slots
        state = Tensor(device.alloc(4 * words * len(numbers), "expert tables"), (len(numbers) * words,), "i32")
        device.write(state, array("i", [-1] * (experts + slots) + [expert_slots.NEVER] * slots) * len(numbers))
        counts = device.alloc(8 * COUNTS * len(numbers), "expert tables")
        copies = Tensor(device.alloc(4 * (1 + 2 * experts), "expert tables"), (1 + 2 * experts,), "i32")
        self.layers: dict[int, LayerTables] = {}
        for group, layer, segments in found:
            number, base = numbers[layer], 4 * words * numbers[layer]
            rows = len(segments) // 3
            table = Tensor(device.alloc(8 * len(segments), "expert tables"), (rows, 3), "i64")
            device.write(table, array("q", segments))
            tables = dict(
                slot_of=Tensor(state.buffer, (experts,), "i32", base),
                expert_of=Tensor(state.buffer, (slots,), "i32", base + 4 * experts),
                age=Tensor(state.buffer, (slots,), "i32", base + 4 * (experts + slots)),
                copies=copies,
                counts=Tensor(counts, (COUNTS,), "i64", 8 * COUNTS * number),
                told=Tensor(self._told, (COUNTS,), "i64", 8 * COUNTS * number),
                segments=table,
            )
            first = group.layers.index(layer) * slots, len(group.layers) * slots
            self.layers[layer] = LayerTables(tables, first, sum(segments[2::3]))

    def record(self, recorder, layer: int, routing: Routing) -> None:
        """Behind the launch that chooses."""
        found = self.layers.get(layer)
        if found is not None:
            expert_slots.launch(recorder, routing.tasks, found.tables, found.first, self.memory, self._buffer)

    def counts(self) -> dict[int, list[int]]:
        """Of each layer COUNTS totals, as far as its steps have come."""
        told = (ctypes.c_int64 * (COUNTS * len(self.layers))).from_address(self._told.address)
        return {layer: list(told[COUNTS * n : COUNTS * (n + 1)]) for n, layer in enumerate(sorted(self.layers))}
