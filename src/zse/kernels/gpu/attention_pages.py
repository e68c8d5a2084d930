"""The loading side of the decode kernel: a warp's way through the pages of its block's work items.

It runs ahead of the computing side by as many pages as the ring has slots, across work items: the task after the next
one and the page numbers of the next one are loaded while pages of this one are copied, so that no load waits for
another.
"""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.gpu.attention_plan import HEADER, TASK, divide
from zse.kernels.gpu.kv8 import page_nbytes, scales_nbytes
from zse.kernels.kv_pages import BLOCK

# Variables of the loading side: the work item, its next page, pages, end, first page, place in the page table, head,
# first key that this step writes; the ring's slot; whether grid_wait() was called; the same of the item after it, and
# that one's row.
WORK, NEXT, COUNT, END, FIRST, TABLE, HEAD, FRESH, SLOT, WAITED, IDS = range(11)
IDS2, BEGIN2, END2, ROW2, FRESH2, BEGIN3, END3, ROW3, FRESH3 = range(11, 20)
NUM_VARIABLES = 20


class PageSource(NamedTuple):
    """What the loading side reads: pages, page table, plan (see attention_decode's parameters), and the warps' ring."""

    keys: Any
    values: Any
    plan: Any
    page_table: Any
    max_pages: Any
    kv_heads: Any
    by_heads: Any
    tasks_room: Any
    total: Any  # work items
    fresh_before: Any
    page_heads: Any
    by_share: Any
    D: int
    ITEM: int  # bytes of a number
    STAGES: int
    W: int  # warps

    @property
    def stride(self) -> int:
        """Bytes of a row in the ring; the padding keeps ldmatrix free of bank conflicts."""
        return self.D * self.ITEM + 16

    @property
    def slot_bytes(self) -> int:
        """Keys, then values, then their scales."""
        return 2 * BLOCK * self.stride + scales_nbytes(self.ITEM)


@zl.inline
def read_entry(state, work, source):
    """What the loading side needs of a work item, into the places of the third: loads that nothing waits for yet, not
    even the number of items (behind the last there is whatever an earlier step left)."""
    item = source.plan + (HEADER + min(divide(work, source.by_heads), source.tasks_room - 1) * TASK)
    who = zl.load(item, 4)
    keys = zl.load(item + 4, 2)
    state[ROW3] = who[2] + 0
    state[FRESH3] = who[3] + 0
    state[BEGIN3] = keys[0] + 0
    state[END3] = keys[1] + 0


@zl.inline
def page_ids(table, count, first, source):
    """Page numbers of this warp's pages first … first + 31, one a lane."""
    mine = first + zl.lane_index()
    return source.page_table[table + (mine if mine < count else 0) * source.W]


@zl.inline
def shift_entry(state, work, source):
    """The third work item becomes the second, whose page numbers start to come."""
    state[BEGIN2] = state[BEGIN3] + 0
    state[END2] = state[END3] + 0
    state[ROW2] = state[ROW3] + 0
    state[FRESH2] = state[FRESH3] + 0
    W = source.W
    if work < source.total:
        first = state[BEGIN2] // BLOCK + zl.warp_index()
        last = (state[END2] - 1) // BLOCK
        state[IDS2] = page_ids(state[ROW2] * source.max_pages + min(first, last), (last - first + W) // W, 0, source)


@zl.inline
def next_item(state, source):
    """Moves the loading side to the second work item."""
    W = source.W
    state[WORK] += zl.num_blocks(0)
    state[HEAD] = state[WORK] - divide(state[WORK], source.by_heads) * source.kv_heads
    state[FIRST] = state[BEGIN2] // BLOCK + zl.warp_index()
    state[END] = state[END2] + 0
    state[COUNT] = ((state[END2] + BLOCK - 1) // BLOCK - state[FIRST] + W - 1) // W
    state[TABLE] = state[ROW2] * source.max_pages + state[FIRST]
    state[FRESH] = state[FRESH2] + 0
    state[IDS] = state[IDS2] + 0
    state[NEXT] = 0
    shift_entry(state, state[WORK] + zl.num_blocks(0), source)
    read_entry(state, state[WORK] + zl.num_blocks(0) * 2, source)


@zl.inline
def load_page(state, ring, source):
    """Starts the copy of this warp's next page, if there is one, into the ring's next slot: keys, values, and in 8 bits
    their scales."""
    lane = zl.lane_index()
    D, ITEM, STRIDE = source.D, source.ITEM, source.stride
    while state[NEXT] >= state[COUNT] and state[WORK] < source.total:
        next_item(state, source)
    if state[WORK] < source.total:
        if state[NEXT] % 32 == 0 and state[NEXT] > 0:
            state[IDS] = page_ids(state[TABLE], state[COUNT], state[NEXT], source)
        page = state[FIRST] + state[NEXT] * source.W
        if state[WAITED] == 0 and (page + 1) * BLOCK > state[FRESH] - source.fresh_before:
            zl.grid_wait()
            state[WAITED] = 1
        valid = state[END] - page * BLOCK
        number = zl.shuffle(state[IDS], state[NEXT] % 32)
        at = (zl.i64(number) * source.page_heads + divide(state[HEAD], source.by_share)) * page_nbytes(D, ITEM)
        slot = ring + state[SLOT] * source.slot_bytes
        pieces = D * ITEM // 16  # of a row
        for part in zl.static(range(2)):
            pages = source.values if part else source.keys
            lines = pages + (at + lane * 16)
            whole = slot + (part * BLOCK * STRIDE + lane // pieces * STRIDE + lane % pieces * 16)
            for e in zl.static(range(BLOCK * pieces // 32)):
                if 32 % pieces == 0:
                    row = lane // pieces + e * (32 // pieces)
                    place = whole + e * (32 // pieces) * STRIDE
                else:
                    row = (e * 32 + lane) // pieces
                    place = slot + ((part * BLOCK + row) * STRIDE + (e * 32 + lane) % pieces * 16)
                zl.copy_async(place, lines + e * 512, 16, zl.i32(16) if row < valid else zl.i32(0))
            if ITEM == 1 and lane // BLOCK == part:
                scales = pages + (at + BLOCK * D + lane % BLOCK * 4)
                to = slot + (2 * BLOCK * STRIDE + lane * 4)
                zl.copy_async(to, scales, 4, zl.i32(4) if lane % BLOCK < valid else zl.i32(0))
        state[NEXT] += 1
        state[SLOT] = 0 if state[SLOT] == source.STAGES - 1 else state[SLOT] + 1
    zl.copy_commit()
