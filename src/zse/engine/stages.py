"""A runner whose model is a pipeline's rank (docs/design/0011-several-devices.md): what it records, and where its pages lie.

Pages have the same numbers on all ranks. What page tables hold depends on how many layers a rank has: rank 0's entries are
brought to the rank's own when they come."""

from array import array
from typing import Any

from zse.cache import groups, layout
from zse.engine import forwards, runner
from zse.errors import UnsupportedError
from zse.plan.stages import StagePlanner

SILENT = " silent"  # of a recording without logits: nothing comes back to rank 0, which goes on at once


class StageRunner(runner.Runner):
    """As Runner."""

    planner_class = StagePlanner
    planner: Any

    def __init__(self, device: Any, model: Any, config: Any, **options: Any):
        tower = options.get("tower")
        if tower is not None and tower.forward.tower.deepstack:
            what = f"{config.model}: --pipeline-parallel-size: images that come into several layers"
            raise UnsupportedError(what, model.config.architecture, ["images that come into the first one"])
        super().__init__(device, model, config, **options)
        share, whole = model.share, model.share.whole
        first = share.config_of(0)
        theirs = layout.parts_of(first, config.kv_dtype, groups.group_layers(first, whole))
        self._theirs = theirs if share.rank else self.kv.parts_of

    def fill(self, batch: Any, masked: bool = False) -> Any:
        # " forward": without sampling either.
        self._variant = "" if batch.num_samples else f"{SILENT} forward"
        return super().fill(batch, masked)

    def _graph(self, kind: str, size: int, number: int) -> Any:
        self.planner.returns = SILENT.strip() not in kind.split()
        return super()._graph(kind, size, number)

    @property
    def forwards(self) -> forwards.Forwards:
        self.planner.returns = True  # whatever a job records comes back
        return super().forwards

    def write_table(self, at: int, entries: bytes) -> None:
        group = at // 4 // self._table.group_entries
        mine = array("i", [self._mine(value, group) for value in memoryview(entries).cast("i")])
        super().write_table(at, mine.tobytes())

    def localize(self, key: tuple[str, int, int]) -> None:
        """Inputs of a recording came from rank 0."""
        inputs = self.forwards.inputs if key[0] in forwards.KINDS else self._sets[key[2]].inputs
        for index in range(inputs.page_count[0]):
            group = inputs.page_index[index] // self._table.group_entries
            inputs.page_value[index] = self._mine(inputs.page_value[index], group)

    def _mine(self, entry: int, group: int) -> int:
        return entry // self._theirs[group] * self.kv.parts_of[group]
