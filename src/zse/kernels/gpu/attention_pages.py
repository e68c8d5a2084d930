"""The loading side of the decode kernel: a warp's way through the pages of its block's work items.

It runs ahead of the computing side by as many pages as the ring has slots, across work items: the task after the next
one and the page numbers of the next one are loaded while pages of this one are copied, so that no load waits for
another.
"""

from zse import kernel as zl
from zse.kernels.gpu.attention_plan import HEADER, TASK, divide
from zse.kernels.gpu.kv8 import page_nbytes
from zse.kernels.kv_pages import BLOCK

# Variables of the loading side: the work item, its next page, pages, end, first page, place in the page table, head,
# first key that this step writes; the ring's slot; whether grid_wait() was called; the same of the item after it, and
# that one's row.
WORK, NEXT, COUNT, END, FIRST, TABLE, HEAD, FRESH, SLOT, WAITED, IDS = range(11)
IDS2, BEGIN2, END2, ROW2, FRESH2, BEGIN3, END3, ROW3, FRESH3 = range(11, 20)
NUM_VARIABLES = 20


@zl.inline
def read_item(item, work, p):
    """The task of a work item, into eight variables."""
    place = p.plan + (HEADER + min(divide(work, p.by_heads), p.tasks_room - 1) * TASK)
    who = zl.load(place, 4)
    keys = zl.load(place + 4, 4)
    for i in zl.static(range(4)):
        item[i] = who[i] + 0
        item[4 + i] = keys[i] + 0


@zl.inline
def read_entry(state, work, p):
    """What the loading side needs of a work item, into the places of the third: loads that nothing waits for yet, not
    even the number of items (behind the last there is whatever an earlier step left)."""
    item = p.plan + (HEADER + min(divide(work, p.by_heads), p.tasks_room - 1) * TASK)
    who = zl.load(item, 4)
    keys = zl.load(item + 4, 2)
    state[ROW3] = who[2] + 0
    state[FRESH3] = who[3] + 0
    state[BEGIN3] = keys[0] + 0
    state[END3] = keys[1] + 0


@zl.inline
def page_ids(table, count, first, p):
    """Page numbers of this warp's pages first … first + 31, one a lane."""
    mine = first + zl.lane_index()
    return p.page_table[table + (mine if mine < count else 0) * p.walkers]


@zl.inline
def first_column(begin, size, p):
    """Where this warp's part of a head begins that begins at `begin`; size: of a part."""
    return begin if p.together == 1 else begin + zl.warp_index() % p.together * size


@zl.inline
def walker_of(p):
    """Which of the block's walks through the pages this warp takes part in."""
    return zl.warp_index() if p.together == 1 else zl.warp_index() // p.together


@zl.inline
def shift_entry(state, work, p):
    """The third work item becomes the second, whose page numbers start to come."""
    state[BEGIN2] = state[BEGIN3] + 0
    state[END2] = state[END3] + 0
    state[ROW2] = state[ROW3] + 0
    state[FRESH2] = state[FRESH3] + 0
    W = p.walkers
    if work < p.total:
        first = state[BEGIN2] // BLOCK + walker_of(p)
        last = (state[END2] - 1) // BLOCK
        state[IDS2] = page_ids(state[ROW2] * p.max_pages + min(first, last), (last - first + W) // W, 0, p)


@zl.inline
def next_item(state, p):
    """Moves the loading side to the second work item."""
    W = p.walkers
    state[WORK] += zl.num_blocks(0)
    state[HEAD] = state[WORK] - divide(state[WORK], p.by_heads) * p.kv_heads
    state[FIRST] = state[BEGIN2] // BLOCK + walker_of(p)
    state[END] = state[END2] + 0
    state[COUNT] = ((state[END2] + BLOCK - 1) // BLOCK - state[FIRST] + W - 1) // W
    state[TABLE] = state[ROW2] * p.max_pages + state[FIRST]
    state[FRESH] = state[FRESH2] + 0
    state[IDS] = state[IDS2] + 0
    state[NEXT] = 0
    shift_entry(state, state[WORK] + zl.num_blocks(0), p)
    read_entry(state, state[WORK] + zl.num_blocks(0) * 2, p)


@zl.inline
def load_page(state, p):
    """Starts the copy of this warp's next page, if there is one, into the ring's next slot: keys, values, and in 8 bits
    their scales."""
    lane = zl.lane_index()
    D, ITEM, STRIDE = p.D, p.item, p.stride
    while state[NEXT] >= state[COUNT] and state[WORK] < p.total:
        if ITEM == 1 and state[WORK] + zl.num_blocks(0) >= p.total:
            # No more: the ring has more slots than a short task has pages, and next_item() waits for loads.
            state[WORK] += zl.num_blocks(0)
        else:
            next_item(state, p)
    if state[WORK] < p.total:
        if state[NEXT] % 32 == 0 and state[NEXT] > 0:
            state[IDS] = page_ids(state[TABLE], state[COUNT], state[NEXT], p)
        page = state[FIRST] + state[NEXT] * p.walkers
        if p.heads is not None:
            valid = min(state[END], state[FRESH]) - page * BLOCK  # what this step writes the block makes itself
        else:
            if state[WAITED] == 0 and (page + 1) * BLOCK > state[FRESH] - p.fresh_before:
                zl.grid_wait()
                state[WAITED] = 1
            valid = state[END] - page * BLOCK
        number = zl.shuffle(state[IDS], state[NEXT] % 32)
        at = (zl.i64(number) * p.page_heads + divide(state[HEAD], p.by_share)) * page_nbytes(D, ITEM)
        slot = p.ring + state[SLOT] * p.slot_bytes
        pieces = p.columns * ITEM // 16  # of a row
        for part in zl.static(range(2)):
            pages = p.v_pages if part else p.k_pages
            lines = pages + (first_column(at, p.columns * ITEM, p) + lane * 16)
            whole = slot + (part * BLOCK * STRIDE + lane // pieces * STRIDE + lane % pieces * 16)
            for e in zl.static(range(BLOCK * pieces // 32)):
                if 32 % pieces == 0:
                    row = lane // pieces + e * (32 // pieces)
                    place = whole + e * (32 // pieces) * STRIDE
                else:
                    row = (e * 32 + lane) // pieces
                    place = slot + ((part * BLOCK + row) * STRIDE + (e * 32 + lane) % pieces * 16)
                zl.copy_async(place, lines + e * (512 * p.together), 16, zl.i32(16) if row < valid else zl.i32(0))
            if ITEM == 1 and lane // BLOCK == part:
                scales = pages + (at + BLOCK * D + lane % BLOCK * 4)
                to = slot + (2 * BLOCK * STRIDE + lane * 4)
                zl.copy_async(to, scales, 4, zl.i32(4) if lane % BLOCK < valid else zl.i32(0))
        state[NEXT] += 1
        state[SLOT] = 0 if state[SLOT] == p.STAGES - 1 else state[SLOT] + 1
    zl.copy_commit()


@zl.inline
def start_loading(state, begin, step, p):
    """The first pages of this block's work. The plan, the page table and pages that earlier steps wrote are read before
    grid_wait(): attention_plan lets later kernels start only when it is done, and so is all that stands before it."""
    state[WORK] = begin - step
    read_entry(state, begin, p)
    shift_entry(state, begin, p)
    read_entry(state, begin + step, p)
    for _ in zl.static(range(p.STAGES - 1)):
        load_page(state, p)
    if state[WAITED] == 0:
        zl.grid_wait()
        state[WAITED] = 1
