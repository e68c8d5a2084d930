"""Streams between a model's layers that a step leaves behind, side by side, for what drafts with them (zse.models.eagle3)."""

from collections.abc import Sequence

from zse.kernels import join
from zse.plan.place import new_tensor
from zse.plan.record import Planner, Run
from zse.plan.trace import Node
from zse.tensor import Tensor


class KeptStreams:
    """layers: those whose inputs are kept, the number of layers standing for what the last one gives. streams: f32 [max_tokens,
    layers * hidden_size], whole behind a step until the next one begins. It is a Run's tap: in a layer's launches its input is complete before
    the first product, and not changed yet."""

    def __init__(self, planner: Planner, layers: Sequence[int]):
        self._hidden, self._layers = planner.hidden, layers
        width = len(layers) * planner.config.hidden_size
        self.streams = new_tensor(planner.device, "scratch", "f32", planner.max_tokens, width)
        self._before = -1  # the layer whose input was looked at last

    def begin(self) -> "KeptStreams":
        """Before the layers of a recording."""
        self._before = -1
        return self

    def __call__(self, run: Run, node: Node) -> None:
        if run.layer > self._before and run.prefix == f"layers.{run.layer}.":
            self._before = run.layer
            self._copy(run, run.layer)

    def end(self, run: Run, logits: Tensor) -> Tensor:
        """Behind the end of a recording, which adds what the last layer left; its logits."""
        self._copy(run, run.planner.config.num_layers)
        return logits

    def _copy(self, run: Run, layer: int) -> None:
        for number, each in enumerate(self._layers):
            if each == layer:
                width = self._hidden.shape[1]
                join.join(run.recorder, run.of(self._hidden), None, run.of(self.streams), number * width, 0.0)
