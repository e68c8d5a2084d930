"""Layers whose weights stay in page-locked memory of the host, because the device has no room for them: every step
copies them, one ahead of the layer that is computed, into layer slots that they take turns in.

The planner asks when it records a step. A layer's copy may begin when the layer that was in its slot before has been
computed; the layer waits for its own copy. Steps follow each other in one stream, so the first copies of a step need to
wait for no more."""

from zse.models.weight_plan import LAYER_SLOTS, ModelPlan
from zse.runtime.fetch import await_fetch, fetch
from zse.tensor import Tensor


class HostLayers:
    """memory: of the host, plan.host_bytes; buffer: of the model, with the layer slots at its end."""

    def __init__(self, plan: ModelPlan, buffer, memory):
        self.memory = memory
        self._numbers = {layer: number for number, layer in enumerate(plan.host_layers)}
        self._copies: list[tuple[Tensor, Tensor]] = []  # into the slot, from the host
        sizes, at = plan.layer_bytes, 0
        first = buffer.nbytes - plan.memory_bytes["layer slots"]
        for number, layer in enumerate(plan.host_layers):
            slot = Tensor(buffer, (sizes[layer],), "u8", first + number % LAYER_SLOTS * plan.slot_bytes)
            self._copies.append((slot, Tensor(memory, (sizes[layer],), "u8", at)))
            at += sizes[layer]

    def begin(self, recorder) -> None:
        """Before the first layer."""
        for number in range(min(LAYER_SLOTS, len(self._copies))):
            self._fetch(recorder, number)

    def before(self, recorder, layer: int) -> None:
        """Before this layer's launches."""
        number = self._numbers.get(layer)
        if number is not None:
            await_fetch(recorder, number % LAYER_SLOTS)

    def after(self, recorder, layer: int) -> None:
        """Behind this layer's launches: its slot is the next one's."""
        number = self._numbers.get(layer)
        if number is not None and number + LAYER_SLOTS < len(self._copies):
            self._fetch(recorder, number + LAYER_SLOTS)

    def _fetch(self, recorder, number: int) -> None:
        fetch(recorder, number % LAYER_SLOTS, *self._copies[number])
