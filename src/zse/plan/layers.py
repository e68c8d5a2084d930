"""Records a forward layer by layer, so that what a layer's products take in can be looked at (engine/calibrate.py)."""

from collections.abc import Callable

from zse.plan.record import Planner, Run
from zse.plan.trace import Node
from zse.tensor import Tensor

Tap = Callable[[Run, Node], None]


class LayerPlanner(Planner):
    """Steps are of `max_tokens` tokens, no fewer."""

    @property
    def carried(self) -> Tensor:
        """u8: all that goes from one layer to the next: the stream, and what is still to be added to it."""
        return Tensor(self.scratch, (self._carried_bytes,), "u8")

    def record_beginning(self, recorder) -> None:
        """What comes before the first layer. It leaves the tables of rotations too, for all layers of steps with these
        positions."""
        run = Run(self, recorder, self.buffers, self.max_tokens, self.max_tokens)
        run.play(self._begin, self._place(self._begin, self.max_tokens), "", run.tokens)
        self._record_ropes(run)

    def record_layer(self, recorder, layer: int, tap: Tap | None = None) -> Run:
        """One layer. tap(run, node) is called before each product is recorded, whose inputs are in run.t: it may finish
        run.recorder and put another in its place, so that they can be read between the two graphs."""
        run = Run(self, recorder, self.buffers, self.max_tokens, self.max_tokens)
        run.layer, run.prefix, run.tap = layer, f"layers.{layer - 1}.", tap
        run.use_states(1)
        part = self._layers[layer]
        run.play(part, self._place(part, self.max_tokens), f"layers.{layer}.", run.tokens)
        return run
