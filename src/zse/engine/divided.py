"""A runner whose rank computes the attention of requests of its own (attention data parallel, docs/design/0011-several-devices.md):
which tokens of a step these are, and where pages lie. A step's inputs are the same on all ranks; each finds its own in them."""

from typing import Any

from zse.cache import divided
from zse.cache.layout import PageMover
from zse.engine import forwards
from zse.engine.runner import Runner
from zse.scheduler.batch import Batch


class RankMover(PageMover):
    """Runs this rank's transfers."""

    rank = 0

    def run(self, transfers: list[tuple[str, int, int]]) -> None:
        if self._told is not None:
            self._told(transfers)
        self.run_own(divided.of_rank(transfers, self.rank))


class DividedRunner(Runner):
    """As Runner."""

    mover_class = RankMover
    pages: RankMover

    def __init__(self, device: Any, model: Any, config: Any, **options: Any):
        super().__init__(device, model, config, **options)
        self.rank = self.pages.rank = model.share.rank
        self.kv.first_page = self.rank * config.num_pages

    def fill(self, batch: Batch, masked: bool = False) -> Any:
        step = super().fill(batch, masked)
        owners = step.buffers.inputs.owners
        for entry in batch.entries:
            owners[entry.request.row] = entry.rank
        return step._replace(symbols=self.localize(step.key, step.symbols))

    def localize(self, key: tuple[str, int, int], symbols: dict[str, int]) -> dict[str, int]:
        """The inputs of a recording are there: find this rank's tokens; the recording's symbols then."""
        if "own" not in symbols:
            return symbols
        inputs = self.forwards.inputs if key[0] in forwards.KINDS else self._sets[key[2]].inputs
        return symbols | {"own": inputs.fill_own(key[1], symbols["tokens"], self.rank)}
