"""What stands before the layers of a step of one token as one launch: its inputs come over from the host, pages that are new
enter the table, the token enters the history, attention is cut into tasks, the position's rotations are made.

Each of these is a microsecond of work behind a launch, and a copy between launches costs 6 us more, for nothing overlaps
with it; so blocks read what they need where the host has written it, each for itself, and some copy the rest for what comes
later (an H200, us of a step of 1,270: 15 for the copies of inputs and results, 10 for five launches).
"""

from zse import kernel as zl
from zse.kernels.begin_token import OWN, THREADS
from zse.kernels.gpu import attention_plan as plans
from zse.kernels.gpu.step import rope_row
from zse.kernels.kv_pages import BLOCK


class BeginParams(zl.Record):
    """host, here: the step's inputs, in memory of the host and of the device. count, index, value, token: where in them, in
    words, zse.kernels.page_table has its arguments, and the token's id, position, row and source lie; nothing is behind
    these. table, size: the page table; sampled, history, max_pages, blocks_per_page: of zse.kernels.feed. plan, window,
    heads, blocks, capacity: of attention_plan. inv_freq, out, pairs, mscale, beta, length: of zse.kernels.rope."""

    host: zl.Ptr[zl.u32, "const"]
    here: zl.Ptr[zl.u32]
    count: zl.i32
    index: zl.i32
    value: zl.i32
    token: zl.i32
    table: zl.Ptr[zl.i32]
    size: zl.i32
    sampled: zl.Ptr[zl.i32, "const"]
    history: zl.Ptr[zl.i32]
    max_pages: zl.i32
    blocks_per_page: zl.i32
    plan: zl.Ptr[zl.i32]
    window: zl.i32
    heads: zl.i32
    blocks: zl.i32
    capacity: zl.i32
    inv_freq: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    pairs: zl.i32
    mscale: zl.f32
    beta: zl.f32
    length: zl.i32


@zl.inline
def enter(words, p):
    """The token, once the page table has what is new in it."""
    t = zl.thread_index()
    token = words[0] + 0
    if words[3] >= 0:
        token = p.sampled[words[3]]
    for at in zl.unroll(range(t, words[4], zl.target.threads), 1):
        place = zl.i32(p.host[p.index + at])
        if place >= 0 and place < p.size:
            p.table[place] = zl.i32(p.host[p.value + at])
    zl.barrier()
    if t == 0:
        zl.store(zl.cast_ptr(p.here, zl.i32) + p.token, zl.make_vector(token, *words[1:4]))
        if p.blocks_per_page > 0:
            block = p.table[zl.i64(words[2]) * p.max_pages + words[1] // BLOCK]
            p.history[zl.i64(block // p.blocks_per_page) * BLOCK + words[1] % BLOCK] = token


@zl.inline
def plan_token(row, position, p):
    """attention_plan() of one token alone, by a block."""
    begin, end = plans.key_range(position, 1, p.window)
    keys = end - begin
    span = plans.best_span(
        [keys, zl.i32(1), plans.ceil_divide(keys, plans.CHUNK), plans.ceil_divide(keys, plans.SEGMENT)], keys, p
    )
    parts = plans.parts_of(begin, end, 1, span, 0, p.capacity)
    for which in range(zl.thread_index(), parts, zl.target.threads):
        here = p.plan + plans.HEADER + which * plans.TASK
        plans.write_task(here, zl.i32(0), zl.i32(1), row, position, begin, end, which, parts, zl.i32(0), span)
    if zl.thread_index() == 0:
        p.plan[0] = parts
        p.plan[1] = 0


@zl.kernel
def begin_token(p: BeginParams):
    """Grid (OWN + blocks that copy)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    t, block = zl.thread_index(), zl.block_index(0)
    heard = zl.shared_array(zl.u32, 5)
    if block >= OWN:
        first, step = (block - OWN) * zl.target.threads + t, (zl.num_blocks(0) - OWN) * zl.target.threads
        for at in zl.unroll(range(first, p.token // 4, step), 1):
            zl.store(p.here + at * 4, zl.load(p.host + at * 4, 4))
    else:
        # By one thread each: a block's threads all at the host's memory take 30 us.
        if t == 0:
            four = zl.load(p.host + p.token, 4)
            for i in zl.static(range(4)):
                heard[i] = four[i]
        if t == zl.target.warp:
            heard[4] = p.host[p.count]
        zl.barrier()
        words = [zl.i32(heard[i]) for i in zl.static(range(5))]
        if block == 0:
            enter(words, p)
        elif block == 1:
            plan_token(words[2], words[1], p)
        else:
            rope_row(words[1], p.out, p)


def variants(target) -> list[zl.Variant]:
    """Hopper's: nothing else was measured."""
    return [zl.Variant("begin_token", begin_token, threads=THREADS)] if target.arch == 90 else []
