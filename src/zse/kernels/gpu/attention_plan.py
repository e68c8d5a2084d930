"""What the attention kernels of a step work on: the batch cut into tasks, on the device, once a step.

Rows (sequences) with few tokens in the batch go to the decode kernel: a *tile* is up to `decode_tokens` neighbouring
tokens of a row. Its keys are summed in a fixed shape: chunks of CHUNK keys, SEGMENT / CHUNK of them in order make a
segment, segments in order the result. Who sums what does not change a bit: a task is a tile's whole range, a segment
or a chunk, whatever keeps this batch's multiprocessors evenly busy, and what is not whole leaves a record that the
last to arrive merges in that shape. Other rows go to the prefill kernel in tiles of `prefill_tokens`. Tiles start at
positions that are multiples of these numbers (or at the row's first token of the batch). Grids of the attention
kernels are constant: they read how much there is to do.
"""

from math import prod
from typing import NamedTuple

from zse import kernel as zl
from zse.dtypes import ITEM_BYTES
from zse.kernels.kv_pages import BLOCK, PACKED
from zse.kernels.op import require
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div
from zse.tensor import Tensor

HEADER = 16  # i32 in front of the tasks: number of tasks, number of prefill tiles
TASK = 8  # i32 of a task
TILE = 4  # i32 of a prefill tile
THREADS = 512
BUCKET_KEYS = 128  # prefill tiles are sorted by this many keys
MAX_RUN = 8  # rows with up to this many tokens in the batch are decoded
CHUNK = 256  # keys
SEGMENT = 1024  # keys
TASK_KEYS = 160  # what a task costs besides its keys, in keys (H200, 2 µs)
ALONE = 0.85  # time of a key where half of the multiprocessors are busy, of that where all are
MAX_RECORDS = 512  # tokens x tasks of tiles that are not whole
ALL = 1 << 20  # keys ahead of a token of an encoder without a window
MAX_PARTS = 4095  # tasks of a tile
HEAD_DIMS = (64, 96, 128, 256)
SMALL = 32  # dimensions of heads of encoders that attention_simple takes on every GPU
PAIRED = (96, 128, 256)  # dimensions of heads whose prompts two blocks of a Hopper cluster compute; of 64 it is slower
WIDE = 512  # dimensions of heads that two warps share; of pages in 16 bits
PREFILL_ROWS = 128  # of a prefill tile


def reciprocal31(divisor: int) -> int:
    """What divide() multiplies with; exact for n * divisor < 2^31."""
    return -(-(1 << 31) // divisor)


@zl.inline
def divide(n, reciprocal):
    """n // divisor for n >= 0 and the divisor of reciprocal31(): a division takes a hundred cycles."""
    return zl.i32(zl.u64(zl.u32(n)) * zl.u64(reciprocal) >> 31)


@zl.inline
def block_scan(value, scratch):
    """(sum over the threads before this one, sum over all), by Hillis and Steele's scan within warps."""
    lane = zl.lane_index()
    inclusive = value + 0
    for step in zl.static([1, 2, 4, 8, 16, 32]):
        if step < zl.target.warp:
            before = zl.shuffle_up(inclusive, step)
            inclusive += before if lane >= step else 0
    warps = zl.target.threads // zl.target.warp
    zl.barrier()
    if lane == zl.target.warp - 1:
        scratch[zl.warp_index()] = inclusive
    zl.barrier()
    mine = zl.i32(0)
    total = zl.i32(0)
    for warp in zl.static(range(warps)):
        count = scratch[warp]
        mine += count if zl.warp_index() > warp else 0
        total += count
    return mine + inclusive - value, total


@zl.kernel
def attention_sees(
    token_row: zl.Ptr[zl.i32, "const"],
    positions: zl.Ptr[zl.i32, "const"],
    sees: zl.Ptr[zl.i32],
    tokens: zl.i32,
    ahead: zl.i32,
):
    """The last key that each token of an encoder sees: `ahead` behind its own, at most its sequence's last. Grid (tokens
    by threads)."""
    zl.grid_wait()
    token = zl.block_index(0) * zl.target.threads + zl.thread_index()
    if token < tokens:
        # The last token of the row by bisection: its tokens stand together.
        low = zl.i32(token)
        high = tokens + 0
        while high - low > 1:
            middle = (low + high) // 2
            same = token_row[middle] == token_row[token]
            low = middle if same else low
            high = high if same else middle
        sees[token] = positions[token] + min(ahead, low - token)
    if zl.target.has("pdl"):  # attention reads it before its own grid_wait(); Metal has no fence
        zl.fence()
        zl.barrier()
        zl.grid_launch_dependents()


class PlanParams(zl.Record):
    """The parameters of attention_plan. plan: header; from HEADER on `tasks_room` tasks (token, count, row, position,
    first key, end, first record, tasks of the tile | which << 12 | records are of segments << 24); then prefill tiles
    (token, count, row, position), those with the most keys first. Records are counted in tokens x tasks. heads:
    key/value heads, blocks: of the decode kernel."""

    token_row: zl.Ptr[zl.i32, "const"]
    positions: zl.Ptr[zl.i32, "const"]
    plan: zl.Ptr[zl.i32]
    tokens: zl.i32
    window: zl.i32
    heads: zl.i32
    decode_tokens: zl.i32
    prefill_tokens: zl.i32
    max_run: zl.i32
    blocks: zl.i32
    capacity: zl.i32
    tasks_room: zl.i32


@zl.inline
def tile_at(token, p):
    """(token's row, position, tokens of the tile that it leads or 0, whether the row is decoded)."""
    row = p.token_row[token]
    position = p.positions[token]
    before = zl.i32(0)
    while before <= p.max_run and token - before > 0 and p.token_row[max(token - before - 1, 0)] == row:
        before += 1
    after = zl.i32(1)
    while (
        after + before <= p.max_run
        and token + after < p.tokens
        and p.token_row[min(token + after, p.tokens - 1)] == row
    ):
        after += 1
    decoded = after + before <= p.max_run
    length = p.decode_tokens if decoded else p.prefill_tokens
    count = zl.i32(0)
    if before == 0 or position % length == 0:
        room = min(length - position % length, p.tokens - token)
        count = zl.i32(1)
        if p.token_row[token + room - 1] == row:  # tokens of a row stand together
            count = room + 0
        else:
            while p.token_row[token + count] == row:
                count += 1
    return row, position, count, decoded


@zl.inline
def key_range(position, count, window):
    """(first key, end) of a decode tile; the first key that a window leaves is rounded down to its page."""
    begin = max(position + 1 - window, 0) // BLOCK * BLOCK if window > 0 else zl.i32(0)
    return begin, position + count


@zl.inline
def ceil_divide(n, d):
    return (n + d - 1) // d


@zl.inline
def time_of(tasks, keys, longest, blocks):
    """About how long `tasks` tasks of `keys` keys together take on `blocks` blocks, in keys. longest: of one task."""
    rounds = ceil_divide(tasks, blocks)
    mean = zl.f32(keys) / zl.f32(max(tasks, 1))
    busy = zl.f32(tasks) / zl.f32(max(rounds * blocks, 1))
    return zl.f32(rounds) * (mean + TASK_KEYS) * max(busy, ALONE) + (zl.f32(longest) - mean) * 0.5


@zl.inline
def wanted_parts(begin, end, span):
    """Tasks of a tile whose records all find room. span: keys of a task, 0 for all."""
    return ceil_divide(end - begin, span) if span > 0 else zl.i32(1)


@zl.inline
def parts_of(begin, end, count, span, at, capacity):
    """Tasks of a tile: 1 (whole) where its records find no room."""
    parts = wanted_parts(begin, end, span)
    return parts if parts <= MAX_PARTS and at + parts * count <= capacity else 1


@zl.inline
def best_span(sums, longest, p):
    """sums: keys, tiles, chunks, segments of the batch; longest: keys of a tile."""
    keys = sums[0] * p.heads
    whole = time_of(sums[1] * p.heads, keys, longest, p.blocks)
    by_segment = time_of(sums[3] * p.heads, keys, min(longest, SEGMENT), p.blocks)
    by_chunk = time_of(sums[2] * p.heads, keys, min(longest, CHUNK), p.blocks)
    span = zl.i32(0)
    if by_segment < whole:
        span = zl.i32(SEGMENT)
    if by_chunk < min(by_segment, whole):
        span = zl.i32(CHUNK)
    return span


@zl.inline
def span_of(start, stop, scratch, p):
    """Keys of a task: those of a chunk or a segment, or 0 for a whole tile, whatever is fastest for the whole batch."""
    totals = [zl.i32(0) for _ in zl.static(range(4))]  # keys, tiles, chunks, segments
    longest = zl.i32(0)
    for token in range(start, stop):
        row, position, count, decoded = tile_at(token, p)
        if decoded and count > 0:
            begin, end = key_range(position, count, p.window)
            totals[0] += end - begin
            totals[1] += 1
            totals[2] += ceil_divide(end - begin, CHUNK)
            totals[3] += ceil_divide(end - begin, SEGMENT)
            longest = max(longest, end - begin)
    sums = [block_scan(value, scratch)[1] for value in totals]
    high = zl.warp_max(longest)
    zl.barrier()
    if zl.lane_index() == 0:
        scratch[zl.warp_index()] = high
    zl.barrier()
    for warp in zl.static(range(zl.target.threads // zl.target.warp)):
        high = max(high, scratch[warp])
    return best_span(sums, high, p)


@zl.inline
def first_record(start, stop, span, scratch, p):
    """Where this thread's tiles have their records: behind those that the threads before it want."""
    wanted = zl.i32(0)
    for token in range(start, stop):
        row, position, count, decoded = tile_at(token, p)
        if decoded and count > 0:
            begin, end = key_range(position, count, p.window)
            parts = wanted_parts(begin, end, span)
            wanted += parts * count if parts > 1 else 0
    record, _ = block_scan(wanted, scratch)
    return record


@zl.inline
def bucket_of(position, count, p):
    """Prefill tiles with about as many keys; those with the most come first."""
    keys = min(position, p.window) + count if p.window > 0 else position + count
    return THREADS - 1 - min(keys // BUCKET_KEYS, THREADS - 1)


@zl.inline
def count_work(start, stop, record, span, buckets, scratch, p):
    """(tasks before this thread's, all, prefill tiles). buckets: of prefill tiles, become how many are in those before."""
    tasks = zl.i32(0)
    at = record + 0
    buckets[zl.thread_index()] = 0
    zl.barrier()
    for token in range(start, stop):
        row, position, count, decoded = tile_at(token, p)
        if count > 0:
            if decoded:
                begin, end = key_range(position, count, p.window)
                tasks += parts_of(begin, end, count, span, at, p.capacity)
                parts = wanted_parts(begin, end, span)
                at += parts * count if parts > 1 else 0
            else:
                zl.atomic_add(buckets + bucket_of(position, count, p), 1)
    task, all_tasks = block_scan(tasks, scratch)
    before, all_tiles = block_scan(buckets[zl.thread_index()] + 0, scratch)
    buckets[zl.thread_index()] = before
    zl.barrier()
    return task, all_tasks, all_tiles


@zl.inline
def write_task(here, token, count, row, position, begin, end, which, parts, record, span):
    """Task `which` of the `parts` of a tile."""
    length = span if parts > 1 else end - begin
    zl.store(here, zl.make_vector(token, count, row, position))
    first = begin + which * length
    kind = parts | which << 12 | (zl.i32(1 << 24) if span == SEGMENT else zl.i32(0))
    zl.store(here + 4, zl.make_vector(first, min(first + length, end), record, kind))


@zl.kernel
def attention_plan(p: PlanParams):
    """One block."""
    zl.grid_wait()
    scratch = zl.shared_array(zl.i32, 32)
    buckets = zl.shared_array(zl.i32, THREADS)
    each = (p.tokens + zl.target.threads - 1) // zl.target.threads
    start = zl.thread_index() * each
    stop = min(start + each, p.tokens)
    span = span_of(start, stop, scratch, p)
    record = first_record(start, stop, span, scratch, p)
    task, all_tasks, all_tiles = count_work(start, stop, record, span, buckets, scratch, p)
    if zl.thread_index() == 0:
        p.plan[0] = all_tasks
        p.plan[1] = all_tiles
    task_out = p.plan + HEADER
    tile_out = p.plan + HEADER + p.tasks_room * TASK
    at = record + 0
    for token in range(start, stop):
        row, position, count, decoded = tile_at(token, p)
        if count > 0:
            if decoded:
                begin, end = key_range(position, count, p.window)
                parts = parts_of(begin, end, count, span, at, p.capacity)
                for which in range(parts):
                    write_task(
                        task_out + (task + which) * TASK,
                        token,
                        count,
                        row,
                        position,
                        begin,
                        end,
                        which,
                        parts,
                        at,
                        span,
                    )
                task += parts
                parts = wanted_parts(begin, end, span)
                at += parts * count if parts > 1 else 0
            else:
                tile = zl.atomic_add(buckets + bucket_of(position, count, p), 1)
                zl.store(tile_out + tile * TILE, zl.make_vector(token, count, row, position))
    # Only now: attention reads the plan, and what is written before this kernel, before its own grid_wait().
    zl.fence()
    zl.barrier()
    zl.grid_launch_dependents()


def head_dims(kv: str) -> tuple[int, ...]:
    """What attention has kernels for, with matrix instructions and pages of a dtype."""
    return HEAD_DIMS if kv in PACKED else (*HEAD_DIMS, WIDE)


def warps_of_head(head_dim: int) -> int:
    """Warps that share the dimensions of a head, whose sums would fill the registers of one."""
    return 2 if head_dim >= WIDE else 1


def prefill_rows(head_dim: int) -> int:
    """Query rows (tokens x heads of the group) of a prefill tile."""
    return PREFILL_ROWS // warps_of_head(head_dim)


def prefill_ranks(arch: int, kv: str, head_dim: int) -> int:
    """Blocks of a cluster that compute a prefill tile, of `prefill_rows` query rows for each. kv: type of the pages."""
    return 2 if arch == 90 and kv not in PACKED and head_dim in PAIRED else 1


def decode_columns(head_dim: int) -> int:
    """Query rows (tokens x heads) of a decode tile, at most: what the registers hold."""
    return 8 if head_dim > 128 else 16


def decode_share(group: int, head_dim: int) -> int:
    """Parts that the query heads of a group are cut into, so that one fits a tile."""
    columns = decode_columns(head_dim)
    parts = next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= columns)
    return parts


def decode_tile_tokens(group: int, head_dim: int, longest_run: int | None) -> int:
    """Tokens of a decode tile; each has `group` query rows per key/value head."""
    return 1 if longest_run == 1 else max(1, decode_columns(head_dim) // group)


class AttentionScratch(NamedTuple):
    """Scratch memory of attention on the GPU. plans: window → i32 plan. counters: i32, all zero between launches.
    records: f32 [capacity, heads, head_dim] unnormalised sums; totals: f32 [capacity, heads, 2] maximum (of scores
    times log2 e) and sum. max_run: rows with more tokens are no decode tasks; sees: of encoders, by window the last key
    that each token sees, i32 [tokens]."""

    plans: dict
    counters: Tensor
    records: Tensor
    totals: Tensor
    heads: int
    kv_heads: int
    tasks_room: int
    blocks: int
    max_run: int = MAX_RUN
    sees: dict | None = None

    @property
    def capacity(self) -> int:
        """Tokens x tasks that records have room for."""
        return self.records.shape[0]

    @property
    def head_dim(self) -> int:
        return self.records.shape[2]

    @staticmethod
    def shapes(
        heads: int, head_dim: int, max_tokens: int, max_context: int, causal: bool = True
    ) -> dict[str, tuple[int, ...]]:
        """Shapes by name. max_tokens: of one step; max_context: tokens of a sequence; causal: an encoder's tokens are not
        decoded, and leave no records."""
        capacity = min(MAX_RECORDS, max_tokens * -(-max_context // CHUNK)) if causal else 1
        return {
            "sees": (max_tokens,),
            "plan": (HEADER + (capacity + max_tokens) * TASK + max_tokens * TILE,),
            "counters": (capacity * heads,),
            "records": (capacity, heads, head_dim),
            "totals": (capacity, heads, 2),
        }

    @classmethod
    def allocate(cls, device, config, max_tokens: int, max_context: int) -> "dict[tuple[int, int], AttentionScratch]":
        """Scratch for a ModelConfig's steps of up to max_tokens tokens, of sequences of up to max_context tokens: by KV
        heads and head_dim of its layers."""
        windows: dict[tuple[int, int], set[int]] = {}
        for layer in (layer for layer in range(config.num_layers) if config.kv_layer(layer) >= 0):
            kind = config.kv_heads_of(layer), config.head_dim_of(layer)
            windows.setdefault(kind, set()).add(config.window(layer))
        return {
            kind: cls.make(device, config.num_heads, *kind, sorted(found), max_tokens, max_context, config.causal)
            for kind, found in windows.items()
        }

    @classmethod
    def make(
        cls,
        device,
        heads: int,
        kv_heads: int,
        head_dim: int,
        windows: list[int],
        max_tokens: int,
        max_context: int,
        causal: bool = True,
    ) -> "AttentionScratch":
        """Of layers of one kind. windows: the distinct ones (0: none)."""
        shapes = cls.shapes(heads, head_dim, max_tokens, max_context, causal)

        def new(name: str, dtype: str) -> Tensor:
            return Tensor(device.alloc(prod(shapes[name]) * ITEM_BYTES[dtype], label="scratch"), shapes[name], dtype)

        return cls(
            {window: new("plan", "i32") for window in windows},
            new("counters", "i32"),
            new("records", "f32"),
            new("totals", "f32"),
            heads,
            kv_heads,
            shapes["records"][0] + max_tokens,
            device.num_sms,
            MAX_RUN if causal else 0,
            None if causal else {window: new("sees", "i32") for window in windows},
        )


def plan_attention(
    recorder, scratch: AttentionScratch, token_row, positions, kv: str, longest_run: int | None = None
) -> None:
    """Record the cutting of the batch: token_row, positions i32 [M], as attention() takes them. kv: type of its pages;
    longest_run: the most tokens of one row in this recording, as attention() is given it; None: unknown."""
    tokens = token_row.shape[0]
    for window, sees in (scratch.sees or {}).items():
        args = Args(
            token_row=token_row, positions=positions, sees=sees, tokens=tokens, ahead=window - 1 if window else ALL
        )
        recorder.launch("attention_sees", args, ceil_div(tokens, THREADS))
    if recorder.device.simt or scratch.head_dim == SMALL:
        return  # attention_simple needs no plan
    group = scratch.heads // scratch.kv_heads
    require(positions.shape[0] == tokens, f"plan_attention: {positions.shape[0]} positions of {tokens} tokens")
    ranks = prefill_ranks(recorder.device.arch, kv, scratch.head_dim)
    for window, plan in scratch.plans.items():
        args = Args(
            token_row=token_row,
            positions=positions,
            plan=plan,
            tokens=tokens,
            window=window,
            heads=scratch.kv_heads * decode_share(group, scratch.head_dim),
            decode_tokens=decode_tile_tokens(group, scratch.head_dim, longest_run),
            prefill_tokens=ranks * max(1, prefill_rows(scratch.head_dim) // group),
            max_run=scratch.max_run,
            blocks=scratch.blocks,
            capacity=scratch.capacity,
            tasks_room=scratch.tasks_room,
        )
        recorder.launch("attention_plan", args, 1)


def plan_variants(target) -> list[zl.Variant]:
    """The plan kernel, and what an encoder's tokens see."""
    sees = [zl.Variant("attention_sees", attention_sees, threads=THREADS)]
    return sees if target.has("simt") else [*sees, zl.Variant("attention_plan", attention_plan, threads=THREADS)]
