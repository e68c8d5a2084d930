"""Where experts are that have places on the device by turns (`--expert-memory`): how many places a size pays for, their
stacks behind the other weights, the experts' own place in the host's memory, and what is copied from there.

Layers whose experts have equal matrices are a group with one stack of places: `slots` of each layer, and behind these
spill places for the experts - slots that one layer may need beside them. Of L layers that makes (L - 1) * slots +
experts."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from zse.errors import ConfigError, MemoryPlanError
from zse.models.weight_plan import (
    ALIGN,
    MatrixPlan,
    ModelPlan,
    VectorPlan,
    aligned,
    memory_bytes_of,
    placed_bytes,
    weight_at,
)
from zse.tensor import Tensor, Weight

LABEL = "expert places"
MIB = 1 << 20


class Stacks(NamedTuple):
    """Experts' matrices and biases by their names."""

    weights: dict[str, Weight]
    vectors: dict[str, Tensor]

    def beside(self, weights: dict[str, Weight], vectors: dict[str, Tensor]) -> "Stacks":
        """These and others."""
        return Stacks(weights | self.weights, vectors | self.vectors)

    def add(self, layer: int, other: "Stacks") -> None:
        """Those of a layer, which has them by their names' ends."""
        self.weights.update({f"layers.{layer}.{suffix}": weight for suffix, weight in other.weights.items()})
        self.vectors.update({f"layers.{layer}.{suffix}": vector for suffix, vector in other.vectors.items()})

    def tensors(self, name: str) -> Iterable[Tensor]:
        """The planes of a matrix, or a bias."""
        return self.weights[name].planes.values() if name in self.weights else [self.vectors[name]]


class ExpertGroup(NamedTuple):
    """layers, ascending; matrices and vectors: of the experts of the first one."""

    layers: tuple[int, ...]
    matrices: tuple[MatrixPlan, ...]
    vectors: tuple[VectorPlan, ...]


def is_of_experts(part: MatrixPlan | VectorPlan) -> bool:
    """Whether it is a stack of experts' matrices, or of their biases."""
    return part.parts[0].role.experts > 0


def groups_of(plan: ModelPlan) -> list[ExpertGroup]:
    """The layers with experts, by what theirs are made of."""
    matrices: dict[int, list[MatrixPlan]] = {}
    vectors: dict[int, list[VectorPlan]] = {}
    for matrix in filter(is_of_experts, plan.matrices):
        matrices.setdefault(_layer(matrix), []).append(matrix)
    for vector in filter(is_of_experts, plan.vectors):
        vectors.setdefault(_layer(vector), []).append(vector)
    groups: dict[tuple, ExpertGroup] = {}
    for layer, found in matrices.items():
        biases = vectors.get(layer, [])
        kind = *((_suffix(each), each.shape, each.scheme, each.layout) for each in found), *map(_bias_of, biases)
        group = groups.get(kind, ExpertGroup((), tuple(found), tuple(biases)))
        groups[kind] = group._replace(layers=(*group.layers, layer))
    return list(groups.values())


def _layer(part: MatrixPlan | VectorPlan) -> int:
    return int(part.name.split(".")[1])


def _suffix(part: MatrixPlan | VectorPlan) -> str:
    return part.name.split(".")[2]


def _bias_of(vector: VectorPlan) -> tuple[str, int]:
    return _suffix(vector), vector.size


def _of(matrix: MatrixPlan, places: int, experts: int) -> MatrixPlan:
    """The matrix with so many experts."""
    return matrix._replace(shape=(matrix.shape[0] // experts * places, matrix.shape[1]))


def places_of(group: ExpertGroup, slots: int, experts: int) -> int:
    """On the device."""
    return len(group.layers) * slots + experts - slots


def _stack_bytes(group: ExpertGroup, places: int, experts: int, align: int) -> int:
    matrices = sum(placed_bytes(_of(matrix, places, experts), align) for matrix in group.matrices)
    return matrices + sum(aligned(4 * (vector.size // experts * places), align) for vector in group.vectors)


def places_bytes(plan: ModelPlan, groups: list[ExpertGroup], slots: int) -> int:
    experts = experts_of(plan)
    return sum(_stack_bytes(group, places_of(group, slots, experts), experts, ALIGN[plan.family]) for group in groups)


def experts_of(plan: ModelPlan) -> int:
    """Of a layer; 0 without."""
    return plan.config.moe.num_experts if plan.config.moe is not None else 0


def host_bytes(plan: ModelPlan) -> int:
    """Of the host's memory, where all experts are; 0 where they are on the device."""
    experts, align = experts_of(plan), ALIGN[plan.family]
    groups = groups_of(plan) if plan.expert_slots else []
    return sum(len(group.layers) * _stack_bytes(group, experts, experts, align) for group in groups)


def expert_bytes(plan: ModelPlan) -> int:
    """Of the largest expert."""
    return max(_stack_bytes(group, 1, experts_of(plan), 1) for group in groups_of(plan))


def expectation(plan: ModelPlan, link: float) -> str:
    """What a plan with such places costs, in one line. link: bytes a second from the host to the device."""
    experts, nbytes = experts_of(plan), expert_bytes(plan)
    return (
        f"all experts are in host memory ({host_bytes(plan) >> 20} MiB), {plan.expert_slots} of each layer's {experts} on the device "
        f"({plan.memory_bytes[LABEL] >> 20} MiB with room for a layer's others): one that a step misses is copied, {nbytes / MIB:.1f} MiB "
        f"in {1e3 * nbytes / link:.3f} ms at {link / 1e9:.1f} GB/s (--expert-memory)"
    )


def with_expert_memory(plan: ModelPlan, nbytes: int) -> ModelPlan:
    """The plan with experts in the host's memory and as many places for them on the device as `nbytes` pay for; as it
    is where they pay for all. ConfigError of a model without experts; MemoryPlanError where one layer's do not fit."""
    groups, experts, align = groups_of(plan), experts_of(plan), ALIGN[plan.family]
    if not groups:
        raise ConfigError(
            f"{plan.source.path} has no experts: leave --expert-memory out (--resident-layers is for any model)"
        )
    whole = host_bytes(plan._replace(expert_slots=experts))
    if nbytes >= whole:
        return plan
    slots = bisect_right(range(1, experts), nbytes, key=partial(places_bytes, plan, groups))
    if not slots:
        least = places_bytes(plan, groups, 1) / MIB
        raise MemoryPlanError(
            f"--expert-memory {nbytes / MIB:.0f} MiB: a step may need all {experts} experts of a layer, "
            f"so the least for this model is {math.ceil(least)} MiB"
        )
    matrices = [matrix for matrix in plan.matrices if not is_of_experts(matrix)]
    vectors = [vector for vector in plan.vectors if not is_of_experts(vector)]
    memory = memory_bytes_of(matrices, vectors, plan.orders, align)
    memory[LABEL] = places_bytes(plan, groups, slots)
    return plan._replace(expert_slots=slots, memory_bytes=memory)


def _stack(group: ExpertGroup, places: int, experts: int, align: int, buffer, at: int) -> tuple[Stacks, int]:
    """A group's matrices and vectors with so many experts, by their names' ends, from byte `at` on; where they end."""
    weights, vectors = {}, {}
    for matrix in group.matrices:
        stack = _of(matrix, places, experts)
        weights[_suffix(matrix)] = weight_at(stack, buffer, at, align, None)._replace(shape=matrix.shape)
        at += placed_bytes(stack, align)
    for vector in group.vectors:
        vectors[_suffix(vector)] = Tensor(buffer, (vector.size,), "f32", at)
        at += aligned(4 * (vector.size // experts * places), align)
    return Stacks(weights, vectors), at


def place_experts(plan: ModelPlan, buffer) -> Stacks:
    """What a step multiplies with, at the end of the model's buffer: each layer's matrices, as large as they are, are
    its group's stack of places."""
    experts, align, found = experts_of(plan), ALIGN[plan.family], Stacks({}, {})
    at = sum(plan.memory_bytes.values()) - plan.memory_bytes[LABEL]
    for group in groups_of(plan):
        stacks, at = _stack(group, places_of(group, plan.expert_slots, experts), experts, align, buffer, at)
        for layer in group.layers:
            found.add(layer, stacks)
    return found


def place_host_experts(plan: ModelPlan, memory) -> Stacks:
    """Where experts are loaded to, one layer behind the other in `memory` of the host."""
    experts, align, at, found = experts_of(plan), ALIGN[plan.family], 0, Stacks({}, {})
    for group in groups_of(plan):
        for layer in group.layers:
            stacks, at = _stack(group, experts, experts, align, memory, at)
            found.add(layer, stacks)
    return found


def segments_of(plan: ModelPlan, places: Stacks, stored: Stacks) -> Iterator[tuple[ExpertGroup, int, list[int]]]:
    """(its group, the layer, its segments as zse.kernels.gpu.expert_slots.CopyParams has them, flat) of each layer."""
    experts = experts_of(plan)
    for group in groups_of(plan):
        for layer in group.layers:
            segments: list[int] = []
            parts: list[MatrixPlan | VectorPlan] = [*group.matrices, *group.vectors]
            for part in parts:
                name = f"layers.{layer}.{_suffix(part)}"
                for to, source in zip(places.tensors(name), stored.tensors(name), strict=True):
                    segments += [source.offset, to.offset, source.nbytes // experts]
            yield group, layer, segments
