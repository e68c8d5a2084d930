"""A runner whose rank computes the attention of requests of its own (attention data parallel, docs/design/0011-several-devices.md):
which tokens of a step these are, and where pages lie. A step's inputs are the same on all ranks; each finds its own in them.

Page tables number the pages of all ranks, one rank's behind the other's, for the history of tokens, which lies by page on a GPU, is of
every request. A rank's keys lie as if the pages before its own were there."""

from typing import Any

from zse.cache.layout import HostSlots, KVCache, PageMover
from zse.engine import forwards
from zse.engine.runner import Runner
from zse.engine.step import PageTable, StepInputs
from zse.lazy import ctypes
from zse.scheduler.batch import Batch, Entry


class RankTable(PageTable):
    """Numbers the pages of all ranks."""

    _rank = 0  # whose pages are written

    def write(self, inputs: StepInputs, entry: Entry, length: int) -> None:
        self._rank = entry.rank
        super().write(inputs, entry, length)

    def write_job(self, inputs: StepInputs, row: int, pages: list[int], length: int, first: int, end: int) -> None:
        self._rank = pages.rank  # type: ignore[attr-defined]
        super().write_job(inputs, row, pages, length, first, end)

    def _update(self, inputs: StepInputs, row: int, pages: list[int], first: int, end: int, group: int = 0) -> None:
        base = self._rank * self._kv.num_pages
        super()._update(inputs, row, [page + base for page in pages] if base else pages, first, end, group)


class RankMover(PageMover):
    """Runs this rank's transfers, and of the history, which is of all pages, those of all ranks: it has host slots of its own, one
    rank's behind the other's. What it reads of a page or slot, and has views of, is the keys alone."""

    rank = 0

    def __init__(
        self, device: Any, kv: KVCache, history: Any, states: Any, told: Any, host_slots: int, host_states: int
    ):
        super().__init__(device, kv, history, states, told)
        self.page_nbytes, pools = kv.page_nbytes, 1 if history is None else history.shape[0] // kv.num_blocks
        self._num_slots = host_slots
        self._part_slots = [
            HostSlots(device, nbytes, host_slots * (pools if number else 1))
            for number, (_, nbytes) in enumerate(self._parts)
        ]
        self.slots = self._part_slots[0]

    @property
    def host(self) -> list[HostSlots]:
        return self._part_slots

    def read_page(self, page: int) -> bytes:
        return self.read_part(page, 0)

    def fill_history(self, rank: int, slot: int, tokens: bytes) -> None:
        """The page in this slot of a rank's, whose keys were read from files, has these tokens (i32)."""
        if len(self._parts) > 1:
            slots = self._part_slots[1]
            ctypes.memmove(slots.address(slot + rank * self._num_slots), tokens, min(len(tokens), slots.nbytes))

    def run(self, transfers: list[tuple[str, int, int]]) -> None:
        if self._told is not None:
            self._told(transfers)
        for what, source, target in transfers:
            kind, rank = what.split("@")
            if int(rank) == self.rank and kind != "out":
                self._kv.map_to(target)
            for number, (start, nbytes) in enumerate(self._parts):
                if number or int(rank) == self.rank:
                    of_others = int(rank) if number else 0
                    page, slot = start + of_others * self._kv.num_pages * nbytes, of_others * self._num_slots
                    slots = self._part_slots[number]
                    if kind == "copy":
                        self._device.copy(page + target * nbytes, page + source * nbytes, nbytes)
                    elif kind == "out":
                        self._device.copy_out(slots.address(slot + target), page + source * nbytes, nbytes)
                    else:
                        self._device.copy_in(page + target * nbytes, slots.address(slot + source), nbytes)


class DividedRunner(Runner):
    """As Runner."""

    table_class = RankTable
    mover_class = RankMover
    pages: RankMover

    def __init__(self, device: Any, model: Any, config: Any, **options: Any):
        super().__init__(device, model, config, **options)
        self.rank = self.pages.rank = model.share.rank
        self.kv.number_from(self.rank * config.num_pages)

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
