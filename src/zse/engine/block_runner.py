"""Runs the block that predicts behind a model (zse.models.next_token) between the model's steps, on what they leave: the stream
behind the last layer, which stands until the next step begins."""

from array import array
from collections.abc import Sequence
from typing import Any

from zse.engine.config import ResolvedConfig
from zse.engine.runner import Runner
from zse.engine.step import FilledStep
from zse.scheduler.batch import Batch, Entry
from zse.tensor import Taken, Tensor

AGAIN = "again"  # recordings that begin with the block's own states


class BlockRunner(Runner):
    """A Runner of the block. model: the Runner of the model, whose logits it writes over. Entries' requests have a `shift`: the
    place in the reply of their first token, less 1: random numbers are those of the reply."""

    def __init__(self, device, block, config: ResolvedConfig, model: Runner):
        super().__init__(device, block, config, grouped=False, logits=model.logits)
        self._model_hidden = model.planner.hidden
        self._rows: Sequence[int] = ()
        count = config.max_tokens_per_step
        self._stagings = [device.staging(4 * count, label="step") for _ in self._sets]
        self._places = [staging.host[: 4 * count].cast("i") for staging in self._stagings]
        rows = self.size_for("decode", config.max_rows)
        sizes = [size for size in self.planner.sizes if size <= rows]
        kinds = [f"decode {AGAIN}", "mixed", "decode"]
        self._wanted_first = [
            (kind, size, number)
            for size in sizes
            for number in range(len(self._sets))
            for kind in kinds
            if size > 1 or kind != "mixed"
        ]

    @property
    def num_recorded(self) -> int:
        """Recordings so far: a step that makes one takes long."""
        return len(self._graphs)

    def run_pairs(self, entries: list[Entry], rows: Sequence[int], again: bool = False) -> list[tuple[int, object]]:
        """Run entries whose tokens stand behind the states in `rows`: of the model's last step, or (again) of this runner's. What
        is sampled, as collect() gives it."""
        self._rows, self._variant = rows, f" {AGAIN}" if again else ""
        return self.run(Batch(entries, 0, []))

    def fill(self, batch: Batch, masked: bool = False) -> FilledStep:
        step = super().fill(batch, masked)
        self._places[step.buffers.number][: len(self._rows)] = array("i", self._rows)
        requests: list[Any] = [entry.request for entry in batch.entries if entry.samples]
        for line, request in enumerate(requests):
            step.buffers.sampler.draw_again(line, request.shift)
        return step

    def _taken(self, recorder, parts: list[str], number: int) -> Taken:
        staging, again = self._stagings[number], AGAIN in parts
        recorder.upload(staging)
        rows = Tensor(staging.buffer, (self.config.max_tokens_per_step,), "i32")
        return Taken((self.planner.hidden if again else self._model_hidden,), rows, again)
