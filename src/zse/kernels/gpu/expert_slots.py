"""Experts that have places on the device by turns (zse.models.host_experts): between a layer's routing and its products
one block gives places to the experts that tokens have chosen, and as many blocks as there are multiprocessors copy what
is not there from the host.

A layer has slots, which keep an expert until others need them, the one first that no token has chosen for longest. When
every slot is of an expert that this step needs, what is left goes to spill places, which all layers use in turn and
nothing keeps. Tasks name places from then on, so products know of none of this: a place is an expert of a stack that is
as long as there are places."""

from zse import kernel as zl
from zse.kernels.gpu.route import lanes_below
from zse.kernels.op import check, require
from zse.runtime.args import Args
from zse.tensor import MAX_EXPERTS

PLACE_THREADS = 256
COPY_THREADS = 256
# 16-byte loads of a thread in flight: of 132 blocks 2 MiB together, and the link has 0.1 MiB on its way (55 GB/s times
# 2 us).
HELD = 4
NEVER = 1 << 30  # the age of an empty slot, above all others'


class PlaceParams(zl.Record):
    """tasks i32 [num_tasks, 3], sorted by expert, empty ones last: experts become places. slot_of i32 [experts],
    expert_of i32 [slots]: -1 without; age i32 [slots]: steps since a token chose it. copies i32 [1 + 2 * experts]: how
    many, then expert and place of each. counts i64 [3]: experts that were there, that a slot was given to, and that
    were spilled; told: the same in memory of the host."""

    tasks: zl.Ptr[zl.i32]
    slot_of: zl.Ptr[zl.i32]
    expert_of: zl.Ptr[zl.i32]
    age: zl.Ptr[zl.i32]
    copies: zl.Ptr[zl.i32]
    counts: zl.Ptr[zl.i64]
    told: zl.Ptr[zl.i64]
    num_tasks: zl.i32
    experts: zl.i32
    slots: zl.i32
    first_slot: zl.i32
    first_spill: zl.i32


@zl.inline
def mark_used(p, used, thread):
    """used[e]: whether a task is of expert e. Of each expert's tasks the first one says so."""
    for t in range(thread, p.num_tasks, zl.target.threads):
        task = p.tasks + t * 3
        if task[2] > task[1]:
            before = zl.i32(-1)
            if t > 0:
                before = task[-3]
            if before != task[0]:
                used[task[0]] = 1


@zl.inline
def number_missing(p, used, rank, totals, lane):
    """rank[e]: of the experts that are used and have no slot, in their order; totals: how many these are, and all that
    are used."""
    missing, every = zl.i32(0), zl.i32(0)
    for first in range(0, p.experts, zl.target.warp):
        e = first + lane
        is_used, is_missing = zl.i32(0), zl.i32(0)
        if e < p.experts:
            is_used = used[e] + 0
            if p.slot_of[e] < 0:
                is_missing = is_used + 0
        votes = zl.ballot(is_missing != 0)
        if is_missing != 0:
            rank[e] = missing + lanes_below(votes, lane)
        missing += zl.i32(zl.popcount(votes))
        every += zl.i32(zl.popcount(zl.ballot(is_used != 0)))
    if lane == 0:
        totals[0] = missing
        totals[1] = every


@zl.inline
def order_victims(p, free, victims, thread):
    """victims: the slots that may be given away, oldest first, of equal ones the first."""
    for s in range(thread, p.slots, zl.target.threads):
        mine = free[s]
        if mine >= 0:
            before = zl.i32(0)
            for other in range(p.slots):
                theirs = free[other]
                if theirs > mine:
                    before += 1
                if theirs == mine and other < s:
                    before += 1
            victims[before] = s


@zl.inline
def take_place(p, e, rank, victims, available):
    """A place for an expert that has none: the oldest slot, or a spill place."""
    place = p.first_spill + (rank - available)
    if rank < available:
        slot = victims[rank]
        old = p.expert_of[slot]
        if old >= 0:
            p.slot_of[old] = -1
        p.expert_of[slot] = e
        p.slot_of[e] = slot
        place = p.first_slot + slot
    p.copies[1 + rank * 2] = e
    p.copies[2 + rank * 2] = place
    return place


@zl.kernel
def place_experts(p: PlaceParams):
    """One block."""
    zl.grid_launch_dependents()
    used = zl.shared_array(zl.i32, MAX_EXPERTS)
    rank = zl.shared_array(zl.i32, MAX_EXPERTS)  # then the place
    free = zl.shared_array(zl.i32, MAX_EXPERTS)
    victims = zl.shared_array(zl.i32, MAX_EXPERTS)
    totals = zl.shared_array(zl.i32, 2)
    thread = zl.thread_index()
    zl.grid_wait()
    for e in range(thread, p.experts, zl.target.threads):
        used[e] = 0
    zl.barrier()
    mark_used(p, used, thread)
    zl.barrier()
    for s in range(thread, p.slots, zl.target.threads):
        expert, age = p.expert_of[s], p.age[s]
        if expert >= 0:
            if used[expert] != 0:
                age = zl.i32(-1)
        free[s] = age
    if zl.warp_index() == 0:
        number_missing(p, used, rank, totals, zl.lane_index())
    zl.barrier()
    missing, every = totals[0], totals[1]
    available = p.slots - (every - missing)
    if missing > 0:
        order_victims(p, free, victims, thread)
    zl.barrier()
    for e in range(thread, p.experts, zl.target.threads):
        if used[e] != 0:
            slot = p.slot_of[e]
            place = p.first_slot + slot
            if slot < 0:
                place = take_place(p, e, rank[e], victims, available)
            rank[e] = place
    zl.barrier()
    for s in range(thread, p.slots, zl.target.threads):
        expert = p.expert_of[s]
        if expert >= 0:
            p.age[s] = zl.i32(0) if used[expert] != 0 else min(p.age[s] + 1, NEVER - 1)
    for t in range(thread, p.num_tasks, zl.target.threads):
        task = p.tasks + t * 3
        if task[2] > task[1]:
            task[0] = rank[task[0]]
    if thread == 0:
        kept = min(missing, available)
        p.copies[0] = missing
        add_count(p, 0, every - missing)
        add_count(p, 1, kept)
        add_count(p, 2, missing - kept)


@zl.inline
def add_count(p, at, number):
    """The host reads what it is told whenever it wants."""
    total = p.counts[at] + zl.i64(number)
    p.counts[at] = total
    p.told[at] = total


class CopyParams(zl.Record):
    """copies: as of PlaceParams. segments i64 [num_segments, 3], of each plane: where the first expert's is in `host`,
    where the first place's is in `pool`, and the bytes of one, a multiple of 4."""

    copies: zl.Ptr[zl.i32, "const"]
    segments: zl.Ptr[zl.i64, "const"]
    host: zl.Ptr[zl.u8, "const"]
    pool: zl.Ptr[zl.u8]
    num_segments: zl.i32


@zl.inline
def copy_words(to, source, count, first, step):
    """`count` vectors of 16 bytes, every `step`-th of them from `first` on by this thread."""
    for at in range(first, count, step * HELD):
        held = [zl.u32.x(4)(0) for _ in zl.static(range(HELD))]
        for i in zl.static(range(HELD)):
            if at + i * step < count:
                held[i] = zl.load(source + (at + i * step) * 4, 4)
        for i in zl.static(range(HELD)):
            if at + i * step < count:
                zl.store(to + (at + i * step) * 4, held[i])


@zl.kernel
def copy_experts(p: CopyParams):
    """Grid (any number of blocks)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    blocks = zl.num_blocks(0)
    step = blocks * zl.target.threads
    for copy in range(p.copies[0]):
        expert, place = zl.i64(p.copies[1 + copy * 2]), zl.i64(p.copies[2 + copy * 2])
        for segment in range(p.num_segments):
            nbytes = p.segments[segment * 3 + 2]
            source = zl.cast_ptr(p.host + (p.segments[segment * 3] + expert * nbytes), zl.u32)
            to = zl.cast_ptr(p.pool + (p.segments[segment * 3 + 1] + place * nbytes), zl.u32)
            # Small planes are some blocks' work: of each plane others'.
            block = (zl.block_index(0) + copy * 5 + segment * 17) % blocks
            first = block * zl.target.threads + zl.thread_index()
            if nbytes % 16 == 0:
                copy_words(to, source, zl.i32(nbytes // 16), first, step)
            else:
                for at in range(first, zl.i32(nbytes // 4), step):
                    to[at] = source[at]


def variants(target) -> list[zl.Variant]:
    return [
        zl.Variant("copy_experts", copy_experts, threads=COPY_THREADS),
        zl.Variant("place_experts", place_experts, threads=PLACE_THREADS),
    ]


def launch(recorder, tasks, tables: dict, first: tuple[int, int], host, pool) -> None:
    """Record both. tasks i32 [N, 3]: of a Routing, whose experts become places. tables: slot_of, expert_of, age,
    copies, counts, told and segments, as the kernels take them. first: the layer's slot, and the spill place; host,
    pool: buffers of the experts and of the places."""
    (experts,), (slots,) = tables["slot_of"].shape, tables["expert_of"].shape
    require(slots <= experts <= MAX_EXPERTS, f"place_experts: {slots} slots of {experts} experts; up to {MAX_EXPERTS}")
    check("place_experts tasks", tasks, "i32", None, 3)
    check("place_experts age", tables["age"], "i32", slots)
    check("place_experts copies", tables["copies"], "i32", 1 + 2 * experts)
    for name in ("counts", "told"):
        check(f"place_experts {name}", tables[name], "i64", 3)
    check("copy_experts segments", tables["segments"], "i64", None, 3)
    tables = dict(tables)
    segments = tables.pop("segments")
    sizes = dict(num_tasks=tasks.shape[0], experts=experts, slots=slots, first_slot=first[0], first_spill=first[1])
    recorder.launch("place_experts", Args(tasks=tasks, **tables, **sizes), (1,))
    args = Args(copies=tables["copies"], segments=segments, host=host, pool=pool, num_segments=segments.shape[0])
    recorder.launch("copy_experts", args, (recorder.device.num_sms,))
