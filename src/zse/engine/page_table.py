"""The page table on the device: which row stands for which residency, and what of it is written."""

from array import array
from typing import Any

from zse.cache.groups import PageGeometry
from zse.cache.layout import KVCache
from zse.cache.pages import blocks_for
from zse.engine.step import JOB_ROWS, StepInputs
from zse.plan.record import new_tensor
from zse.scheduler.batch import Entry
from zse.scheduler.request import Request
from zse.tensor import Tensor


class PageTable:
    """tensor: i32 [groups * (max_rows + JOB_ROWS), blocks of max_context]: of each group of layers one table behind the
    other, whose last rows no request gets: jobs write their pages there.

    in_place: the host writes entries itself; else they go with a step's inputs. residents: for each row of requests which
    residency it describes (request, its number), and how many of its blocks are written.
    """

    def __init__(self, device, kv: KVCache, pages: PageGeometry, *, max_rows: int, max_context: int, in_place: bool):
        self._device, self._kv, self._pages = device, kv, pages
        self.max_rows, self.max_blocks = max_rows, blocks_for(max_context)
        self._rows = max_rows + JOB_ROWS
        self.tensor = new_tensor(device, "step", "i32", self._rows * kv.num_groups, self.max_blocks)
        self.in_place = in_place
        self._view: Any = self.tensor.view() if in_place else None
        self.residents: list[tuple[Request | None, int, int]] = [(None, 0, 0)] * max_rows

    def write(self, inputs: StepInputs, entry: Entry, length: int) -> None:
        """Bring the request's row up to date for `length` tokens: only what is new since last time."""
        request, windows = entry.request, entry.windows
        row = request.row
        resident, residency, written = self.residents[row]
        if resident is not request or residency != request.residency:
            written = 0
        end = blocks_for(length)
        if end <= written:
            return
        self._update(inputs, row, entry.pages, written, end)
        if self._kv.num_groups > 1:
            assert windows is not None, "the scheduler was made without this model's PageGeometry"
            first = max(written, windows.first * self._kv.blocks_per_page)
            for group, pages in enumerate(windows.pages, 1):
                self._update(inputs, row + group * self._rows, pages, first, end)
        self.residents[row] = (request, request.residency, end)

    def write_job(self, inputs: StepInputs, row: int, pages: list[int], length: int, first: int, end: int) -> None:
        """The entries of blocks first .. end - 1 of a sequence of `length` tokens that runs beside the requests, in row
        0 .. JOB_ROWS - 1, in all groups."""
        for group, table in enumerate(self._pages.tables(pages, length)):
            self._update(inputs, self.max_rows + row + group * self._rows, table, first, end)

    def _update(self, inputs: StepInputs, row: int, pages: list[int], first: int, end: int) -> None:
        """The entries of blocks first .. end - 1 of a sequence that has `pages`."""
        kv, view = self._kv, self._view
        at, count = row * self.max_blocks + first, inputs.page_count[0]
        if end - first == 1 and count < inputs.max_updates:  # as in most steps
            entry = kv.table_entry(pages, first)
            if view is not None:
                view[at] = entry
                return
            inputs.page_index[count], inputs.page_value[count] = at, entry
            inputs.page_count[0] = count + 1
            kv.map_to(pages[first // kv.blocks_per_page])
            return
        entries = kv.table_entries(pages, first, end)
        new = len(entries)
        if view is not None:
            view[at : at + new] = entries
            return
        for page in kv.pages_of(pages, first, end):
            kv.map_to(page)
        if count + new > inputs.max_updates:
            # The pages of a long prompt that was in the prefix cache.
            self._device.write(Tensor(self.tensor.buffer, (new,), "i32", 4 * at), entries)
            return
        inputs.page_index[count : count + new] = array("i", range(at, at + new))
        inputs.page_value[count : count + new] = entries
        inputs.page_count[0] = count + new
