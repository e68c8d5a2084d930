"""The loading side of the decode kernel: a warp's way through the pages of its block's work items.

It runs ahead of the computing side by as many pages as the ring has slots, across work items: the task after the next
one and the page numbers of the next one are loaded while pages of this one are copied, so that no load waits for
another.
"""

from zse import kernel as zl
from zse.kernels.gpu.attention_plan import HEADER, PAGE, TASK, divide
from zse.kernels.gpu.kv8 import page_nbytes, scales_nbytes

# Variables of the loading side: the work item, its next page, pages, end, first page, place in the page table, head,
# first key that this step writes; the ring's slot; whether grid_wait() was called; the same of the item after it, and
# that one's row.
WORK, NEXT, COUNT, END, FIRST, TABLE, HEAD, FRESH, SLOT, WAITED, IDS = range(11)
IDS2, BEGIN2, END2, ROW2, FRESH2, BEGIN3, END3, ROW3, FRESH3 = range(11, 20)
NUM_VARIABLES = 20


@zl.inline
def read_entry(state, work, plan, by_heads, tasks_room):
    """What the loading side needs of a work item, into the places of the third: loads that nothing waits for yet, not
    even the number of items (behind the last there is whatever an earlier step left)."""
    item = plan + (HEADER + min(divide(work, by_heads), tasks_room - 1) * TASK)
    who = zl.load(item, 4)
    keys = zl.load(item + 4, 2)
    state[ROW3] = who[2] + 0
    state[FRESH3] = who[3] + 0
    state[BEGIN3] = keys[0] + 0
    state[END3] = keys[1] + 0


@zl.inline
def page_ids(page_table, table, count, first, W):
    """Page numbers of this warp's pages first … first + 31, one a lane."""
    mine = first + zl.lane_index()
    return page_table[table + (mine if mine < count else 0) * W]


@zl.inline
def shift_entry(state, page_table, max_pages, work, total, W):
    """The third work item becomes the second, whose page numbers start to come."""
    state[BEGIN2] = state[BEGIN3] + 0
    state[END2] = state[END3] + 0
    state[ROW2] = state[ROW3] + 0
    state[FRESH2] = state[FRESH3] + 0
    if work < total:
        first = state[BEGIN2] // PAGE + zl.warp_index()
        last = (state[END2] - 1) // PAGE
        state[IDS2] = page_ids(page_table, state[ROW2] * max_pages + min(first, last), (last - first + W) // W, 0, W)


@zl.inline
def next_item(state, plan, page_table, max_pages, kv_heads, by_heads, tasks_room, total, W):
    """Moves the loading side to the second work item."""
    state[WORK] += zl.num_blocks(0)
    state[HEAD] = state[WORK] - divide(state[WORK], by_heads) * kv_heads
    state[FIRST] = state[BEGIN2] // PAGE + zl.warp_index()
    state[END] = state[END2] + 0
    state[COUNT] = ((state[END2] + PAGE - 1) // PAGE - state[FIRST] + W - 1) // W
    state[TABLE] = state[ROW2] * max_pages + state[FIRST]
    state[FRESH] = state[FRESH2] + 0
    state[IDS] = state[IDS2] + 0
    state[NEXT] = 0
    shift_entry(state, page_table, max_pages, state[WORK] + zl.num_blocks(0), total, W)
    read_entry(state, state[WORK] + zl.num_blocks(0) * 2, plan, by_heads, tasks_room)


@zl.inline
def load_page(
    state,
    ring,
    keys,
    values,
    plan,
    page_table,
    max_pages,
    kv_heads,
    by_heads,
    tasks_room,
    total,
    fresh_before,
    page_heads,
    by_share,
    D,
    STRIDE,
    ITEM,
    STAGES,
    W,
):
    """Starts the copy of this warp's next page, if there is one, into the ring's next slot: keys, values, and in 8 bits
    their scales."""
    lane = zl.lane_index()
    while state[NEXT] >= state[COUNT] and state[WORK] < total:
        next_item(state, plan, page_table, max_pages, kv_heads, by_heads, tasks_room, total, W)
    if state[WORK] < total:
        if state[NEXT] % 32 == 0 and state[NEXT] > 0:
            state[IDS] = page_ids(page_table, state[TABLE], state[COUNT], state[NEXT], W)
        page = state[FIRST] + state[NEXT] * W
        if state[WAITED] == 0 and (page + 1) * PAGE > state[FRESH] - fresh_before:
            zl.grid_wait()
            state[WAITED] = 1
        valid = state[END] - page * PAGE
        number = zl.shuffle(state[IDS], state[NEXT] % 32)
        at = (zl.i64(number) * page_heads + divide(state[HEAD], by_share)) * page_nbytes(D, ITEM)
        slot = ring + state[SLOT] * (2 * PAGE * STRIDE + scales_nbytes(ITEM))
        pieces = D * ITEM // 16  # of a row
        for part in zl.static(range(2)):
            source = (values if part else keys) + (at + lane * 16)
            if 32 % pieces == 0:
                place = slot + (part * PAGE * STRIDE + lane // pieces * STRIDE + lane % pieces * 16)
                for e in zl.static(range(PAGE * pieces // 32)):
                    row = lane // pieces + e * (32 // pieces)
                    zl.copy_async(
                        place + e * (32 // pieces) * STRIDE,
                        source + e * 512,
                        16,
                        zl.i32(16) if row < valid else zl.i32(0),
                    )
            else:
                for e in zl.static(range(PAGE * pieces // 32)):
                    row = (e * 32 + lane) // pieces
                    zl.copy_async(
                        slot + ((part * PAGE + row) * STRIDE + (e * 32 + lane) % pieces * 16),
                        source + e * 512,
                        16,
                        zl.i32(16) if row < valid else zl.i32(0),
                    )
            if ITEM == 1 and lane // PAGE == part:
                zl.copy_async(
                    slot + (2 * PAGE * STRIDE + lane * 4),
                    (values if part else keys) + (at + PAGE * D + lane % PAGE * 4),
                    4,
                    zl.i32(4) if lane % PAGE < valid else zl.i32(0),
                )
        state[NEXT] += 1
        state[SLOT] = 0 if state[SLOT] == STAGES - 1 else state[SLOT] + 1
    zl.copy_commit()
