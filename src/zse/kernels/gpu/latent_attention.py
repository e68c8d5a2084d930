"""latent_attention on a GPU with mma.sync: FlashAttention 2 (Dao 2023) over keys whose beginnings are their values.

A block takes up to 64 query rows (heads of one token, or of neighbours), whose queries stay in shared memory, and walks
its part of the keys in blocks that cp.async brings while the one before is multiplied. A pair of warps has 16 rows:
both compute their scores, each adds up half of the values' columns (rank / 2 x 16 f32 in registers). With few tokens a
sequence's keys are shared among `splits` blocks, as evenly as its length allows, and latent_merge joins their sums."""

from math import prod
from typing import Any, NamedTuple

from zse import kernel as zl
from zse.errors import UnsupportedError
from zse.kernels.gpu.attention_mma import key_operands, query_fragments, value_operands
from zse.kernels.gpu.attention_parts import FLOOR, KV_TYPES, LOG2E, multiply, pack_pair
from zse.kernels.gpu.attention_tiles import row_sum, softmax
from zse.kernels.gpu.kv8 import is_packed, item_nbytes
from zse.kernels.kv_pages import BLOCK, SCALE_BYTES
from zse.kernels.latent_post import check_latent
from zse.kernels.op import check, require
from zse.runtime.args import Args
from zse.tensor import Tensor

THREADS = 256
ROWS = 64
SIZES = ((512, 64), (256, 64), (256, 32))  # rank and rotary: DeepSeek's and GLM's, Mistral's, MiniCPM's
RECORDS = 256  # tokens x splits
MAX_SPLITS = 128
SPLIT_TOKENS = 16  # recordings up to this size share a sequence's keys
SPLIT_KEYS = 64  # a split has a multiple of these


class LatentBatch(zl.Record):
    """The parameters of latent_attention_mma. group: heads of a block. beta, length: scores are multiplied with 1 +
    beta * ln(1 + position // length), the query's. KEYS are in shared memory at once, STAGES times."""

    q: zl.Ptr[zl.f32, "const"]
    q_rotated: zl.Ptr[zl.f32, "const"]
    pages: zl.Ptr[zl.u8, "const"]
    page_table: zl.Ptr[zl.i32, "const"]
    token_row: zl.Ptr[zl.i32, "const"]
    positions: zl.Ptr[zl.i32, "const"]
    out: zl.Ptr[zl.f32]
    partial: zl.Ptr[zl.f32]
    tokens: zl.i32
    max_pages: zl.i32
    heads: zl.i32
    group: zl.i32
    splits: zl.i32
    scale: zl.f32
    beta: zl.f32
    length: zl.i32
    RANK: zl.static
    ROTARY: zl.static
    KV: zl.static
    KEYS: zl.static
    STAGES: zl.static


class LatentLayout(NamedTuple):
    """What attention_mma's and attention_prefill's functions ask for."""

    softcap: float
    window: int
    scale: Any
    D: int
    item: int
    stride: int  # bytes of a key in shared memory; the padding keeps ldmatrix free of bank conflicts
    query_stride: int
    F: Any
    KV: Any


@zl.inline
def layout_of(p):
    width, item = p.RANK + p.ROTARY, item_nbytes(p.KV)
    F = zl.f16 if p.KV is zl.f16 else zl.bf16
    return LatentLayout(0.0, 0, p.scale, width, item, width * item + 16, width * 2 + 16, F, p.KV)


@zl.inline
def load_queries(place, token, first_head, group, rows, p, a):
    """The tile's rows into shared memory as F; rows that are none become zeros."""
    pairs = a.D // 2
    for e in range(zl.thread_index(), ROWS * pairs, THREADS):
        row = e // pairs
        d = e % pairs * 2
        which = row if row < rows else 0
        at = zl.i64(token + which // group) * p.heads + (first_head + which % group)
        line = p.q + (at * p.RANK + d) if d < p.RANK else p.q_rotated + (at * p.ROTARY + (d - p.RANK))
        both = zl.load(line, 2)
        word = pack_pair(both[0], both[1], a.F) if row < rows else zl.u32(0)
        zl.store(zl.cast_ptr(place + (row * a.query_stride + d * 2), zl.u32), word)


@zl.inline
def load_keys(place, table, key, last, p, a):
    """Starts the copy of the KEYS keys from `key` on, in 8 bits with their scales behind them; those behind `last`
    become zeros."""
    pieces = a.D * a.item // 16
    nbytes = BLOCK * a.D * a.item + (2 * SCALE_BYTES if a.item == 1 else 0)
    for e in range(zl.thread_index(), p.KEYS * pieces, THREADS):
        r = e // pieces
        mine = key + r
        page = table[min(mine, last) // BLOCK]
        source = p.pages + (zl.i64(page) * nbytes + (mine % BLOCK * (a.D * a.item) + e % pieces * 16))
        zl.copy_async(place + (r * a.stride + e % pieces * 16), source, 16, zl.i32(16) if mine <= last else zl.i32(0))
    if a.item == 1 and zl.thread_index() < 2 * p.KEYS:
        one = key + zl.thread_index() % p.KEYS
        its_page = table[min(one, last) // BLOCK]
        inside = BLOCK * a.D + zl.thread_index() // p.KEYS * SCALE_BYTES + one % BLOCK * 4
        source = p.pages + (zl.i64(its_page) * nbytes + inside)
        to = place + (p.KEYS * a.stride + zl.thread_index() * 4)
        zl.copy_async(to, source, 4, zl.i32(4) if one <= last else zl.i32(0))
    zl.copy_commit()


@zl.inline
def add_scores(scores, queries, keys, first, count, p, a):
    """scores [8 keys][4] += queries · keys over `count` times 16 numbers, from the `first` 16 on."""
    for kd in zl.unroll(range(first, first + count), 2):
        frags = query_fragments(queries, kd, a.query_stride, a.item)
        for n in zl.static(range(p.KEYS // 16)):
            one, other = key_operands(keys + n * 16 * a.stride, kd, a.stride, a.KV)
            multiply(scores[2 * n], frags, one, a.F)
            multiply(scores[2 * n + 1], frags, other, a.F)


@zl.inline
def scale_columns(scores, scales, p):
    """Scores or weights times a scale for each key."""
    for n in zl.static(range(p.KEYS // 8)):
        both = zl.load(zl.cast_ptr(scales, zl.f32) + (n * 8 + zl.lane_index() % 4 * 2), 2)
        for u in zl.static(range(4)):
            scores[n][u] = scores[n][u] * both[u % 2]


@zl.inline
def scores_of(queries, keys, p, a):
    """Of this warp's 16 rows with the block's keys: [8 keys][4] f32."""
    scores = [[zl.f32(0) for u in zl.static(range(4))] for n in zl.static(range(p.KEYS // 8))]
    add_scores(scores, queries, keys, 0, p.RANK // 16, p, a)
    if is_packed(p.KV):
        turned = [[zl.f32(0) for u in zl.static(range(4))] for n in zl.static(range(p.KEYS // 8))]
        add_scores(turned, queries, keys, p.RANK // 16, p.ROTARY // 16, p, a)
        scale_columns(scores, keys + p.KEYS * a.stride, p)
        scale_columns(turned, keys + (p.KEYS * a.stride + 4 * p.KEYS), p)
        for n in zl.static(range(p.KEYS // 8)):
            for u in zl.static(range(4)):
                scores[n][u] = scores[n][u] + turned[n][u]
    else:
        add_scores(scores, queries, keys, p.RANK // 16, p.ROTARY // 16, p, a)
    return scores


@zl.inline
def add_values(acc, scores, values, p, a):
    """acc += P V, of this warp's half of the columns."""
    if is_packed(p.KV):
        scale_columns(scores, values + p.KEYS * a.stride, p)
    mine = values + zl.warp_index() // 4 * (p.RANK // 2 * a.item)
    for n in zl.static(range(p.KEYS // 16)):
        weights = [
            pack_pair(scores[2 * n + u // 2][u % 2 * 2], scores[2 * n + u // 2][u % 2 * 2 + 1], a.F)
            for u in zl.static(range(4))
        ]
        for d in zl.static(range(p.RANK // 32)):
            first, second = value_operands(mine + n * 16 * a.stride, d, a.stride, a.KV)
            multiply(acc[2 * d], weights, first, a.F)
            multiply(acc[2 * d + 1], weights, second, a.F)


@zl.inline
def write_rows(acc, high, sums, token, first_head, group, rows, split, p, a):
    """The two rows of a thread: the result, or what latent_merge reads."""
    j = zl.lane_index() % 4
    column = zl.warp_index() // 4 * (p.RANK // 2)
    for h in zl.static(range(2)):
        total = row_sum(sums[h])
        row = zl.warp_index() % 4 * 16 + zl.lane_index() // 4 + 8 * h
        if row < rows:
            at = zl.i64(token + row // group) * p.heads + (first_head + row % group)
            factor = 1.0 / total if p.splits == 1 else zl.f32(1)
            line = p.out + at * p.RANK
            if p.splits > 1:
                line = p.partial + (at * p.splits + split) * (p.RANK + BLOCK)
                if column == 0 and j == 0:
                    line[p.RANK] = high[h]
                    line[p.RANK + 1] = total
            place = line + column
            for d in zl.static(range(p.RANK // 32)):
                c = [acc[2 * d + u // 2][2 * h + u % 2] * factor for u in zl.static(range(4))]
                if a.item == 2:
                    zl.store(place + (d * 16 + j * 2), zl.make_vector(c[0], c[1]))
                    zl.store(place + (d * 16 + 8 + j * 2), zl.make_vector(c[2], c[3]))
                else:
                    zl.store(place + (d * 16 + j * 4), zl.make_vector(c[0], c[2], c[1], c[3]))


@zl.inline
def split_keys(num_keys, splits):
    """Keys of a split."""
    return ((num_keys + splits - 1) // splits + SPLIT_KEYS - 1) // SPLIT_KEYS * SPLIT_KEYS


@zl.kernel
def latent_attention_mma(p: LatentBatch):
    """Grid (blocks of heads, tokens, splits)."""
    zl.grid_launch_dependents()
    a = layout_of(p)
    scales = 8 * p.KEYS if a.item == 1 else 0
    queries = zl.shared_array(zl.u8, ROWS * a.query_stride, align=128)
    ring = zl.shared_array(zl.u8, p.STAGES * (p.KEYS * a.stride + scales), align=128)
    zl.grid_wait()
    first_head = zl.block_index(0) * p.group
    group = min(p.group, p.heads - first_head)
    token = zl.block_index(1)
    row = p.token_row[token]
    position = p.positions[token]
    tile = ROWS // p.group if p.splits == 1 else 1
    if token > 0 and position % tile != 0 and p.token_row[max(token - 1, 0)] == row:
        return  # another token leads this tile
    count = zl.i32(1)
    room = min(tile - position % tile, p.tokens - token)
    while count < room and p.token_row[min(token + count, p.tokens - 1)] == row:
        count += 1
    rows = count * group
    num_keys = position + count
    begin = zl.i32(0)
    end = num_keys + 0
    if p.splits > 1:
        span = split_keys(num_keys, p.splits)
        begin = zl.block_index(2) * span
        end = min(begin + span, num_keys)
        if begin >= num_keys:
            return
    table = p.page_table + zl.i64(row) * p.max_pages
    last = end - 1
    load_keys(ring, table, begin, last, p, a)
    load_queries(queries, token, first_head, group, rows, p, a)
    mine = zl.warp_index() % 4 * 16 + zl.lane_index() // 4
    limits = [position + min(mine + 8 * h, rows - 1) // group for h in zl.static(range(2))]
    factors = [zl.fma(zl.log(zl.f32(1 + limit // p.length)), p.beta, 1.0) for limit in limits]
    limits = [min(limit, last) for limit in limits]
    acc = [[zl.f32(0) for u in zl.static(range(4))] for d in zl.static(range(p.RANK // 16))]
    high = [zl.f32(FLOOR) for h in zl.static(range(2))]
    sums = [zl.f32(0) for h in zl.static(range(2))]
    shrink = [zl.f32(0) for h in zl.static(range(2))]
    stage = zl.i32(0)
    for key in zl.unroll(range(begin, end, p.KEYS), 1):
        here = ring + stage * (p.KEYS * a.stride + scales)
        if p.STAGES > 1:
            stage = 1 - stage
            load_keys(ring + stage * (p.KEYS * a.stride + scales), table, min(key + p.KEYS, last), last, p, a)
            zl.copy_wait(1)
        else:
            zl.copy_wait(0)
        zl.barrier()
        scores = scores_of(queries + zl.warp_index() % 4 * 16 * a.query_stride, here, p, a)
        if p.beta != 0.0:
            for n in zl.static(range(p.KEYS // 8)):
                for u in zl.static(range(4)):
                    scores[n][u] = scores[n][u] * factors[u // 2]
        softmax(sum(scores, []), (limits, None), (high, sums, shrink), key, p.scale * LOG2E, a, acc)
        add_values(acc, scores, here, p, a)
        zl.barrier()
        if p.STAGES == 1 and key + p.KEYS < end:
            load_keys(ring, table, key + p.KEYS, last, p, a)
    zl.copy_wait(0)
    write_rows(acc, high, sums, token, first_head, group, rows, zl.block_index(2), p, a)


@zl.kernel
def latent_merge(
    positions: zl.Ptr[zl.i32, "const"],
    partial: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.f32],
    heads: zl.i32,
    rank: zl.i32,
    splits: zl.i32,
):
    """Grid (heads, tokens): the sums of a row's splits, in order."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    num_keys = positions[zl.block_index(1)] + 1
    span = split_keys(num_keys, splits)
    parts = (num_keys + span - 1) // span
    at = zl.i64(zl.block_index(1)) * heads + zl.block_index(0)
    records = partial + at * splits * (rank + BLOCK)
    top = zl.f32(FLOOR)
    for n in range(0, parts):
        top = max(top, records[n * (rank + BLOCK) + rank])
    total = zl.f32(0)
    for n in range(0, parts):
        total = zl.fma(records[n * (rank + BLOCK) + rank + 1], zl.exp2(records[n * (rank + BLOCK) + rank] - top), total)
    for d in range(zl.thread_index(), rank, zl.target.threads):
        value = zl.f32(0)
        for n in range(0, parts):
            line = records + n * (rank + BLOCK)
            value = zl.fma(line[d], zl.exp2(line[rank] - top), value)
        out[at * rank + d] = value / total


class LatentScratch(NamedTuple):
    """partial: f32 [RECORDS or fewer, heads, rank + 16], the sums of splits. segments: the most splits that a sequence
    can have."""

    partial: Tensor
    segments: int

    @classmethod
    def allocate(cls, device, config, max_tokens: int, max_context: int) -> "LatentScratch":
        segments = min(-(-max_context // SPLIT_KEYS), MAX_SPLITS)
        shape = min(RECORDS, min(max_tokens, SPLIT_TOKENS) * segments), config.num_heads, config.latent.rank + BLOCK
        return cls(Tensor(device.alloc(4 * prod(shape), label="scratch"), shape, "f32"), segments)

    def sharing(self, max_tokens: int) -> dict[str, Any]:
        """What latent_attention() takes in recordings of up to max_tokens tokens."""
        splits = min(self.segments, self.partial.shape[0] // max_tokens) if max_tokens <= SPLIT_TOKENS else 1
        return {"splits": max(splits, 1), "partial": self.partial}


def record(
    recorder,
    q,
    q_rotated,
    pages,
    page_table,
    token_row,
    positions,
    out,
    heads: int,
    scale: float,
    splits: int = 1,
    partial=None,
    temperature: tuple = (0.0, 1),
) -> None:
    """latent_attention() on a GPU: pages bf16, f16, i8 or e4m3, of SIZES; splits: a number, with partial f32 of tokens
    * splits records or more."""
    tokens, width = q.shape
    line = check_latent("latent_attention", pages, page_table, token_row, positions, tuple(KV_TYPES), tokens)
    rank = width // heads
    if (rank, line - rank) not in SIZES:
        raise UnsupportedError(
            "latent attention on a GPU (--device cpu takes more): rank and rotary", (rank, line - rank), SIZES
        )
    if recorder.device.simt:
        raise UnsupportedError("latent attention: device", "one without mma.sync", ["an NVIDIA GPU", "--device cpu"])
    check("latent_attention q", q, "f32", tokens, width)
    check("latent_attention q_rotated", q_rotated, "f32", tokens, heads * (line - rank))
    check("latent_attention out", out, "f32", tokens, width)
    require(splits == 1 or partial is not None, "latent_attention: splits other than 1 need partial")
    blocks = -(-heads // ROWS)
    args = Args(
        q=q,
        q_rotated=q_rotated,
        pages=pages,
        page_table=page_table,
        token_row=token_row,
        positions=positions,
        out=out,
        partial=partial,
        tokens=tokens,
        max_pages=page_table.shape[1],
        heads=heads,
        group=-(-heads // blocks),
        splits=splits,
        scale=float(scale),
        beta=float(temperature[0]),
        length=temperature[1],
    )
    recorder.launch(f"latent_attention_{pages.dtype}_{rank}_{line - rank}", args, (blocks, tokens, splits))
    if splits > 1:
        args = Args(positions=positions, partial=partial, out=out, heads=heads, rank=rank, splits=splits)
        recorder.launch("latent_merge", args, (heads, tokens))


def stages_of(target, rank: int, rotary: int, item: int) -> dict[str, int]:
    """Keys that are in shared memory at once, and how often, beside the tile's queries."""
    width = rank + rotary
    for keys, stages in ((32, 2), (32, 1), (16, 1)):
        block = keys * (width * item + 16) + (8 * keys if item == 1 else 0)
        if ROWS * (width * 2 + 16) + stages * block <= target.shared_limit:
            break
    return {"KEYS": keys, "STAGES": stages}


def variants(target) -> list[zl.Variant]:
    """dtype of the pages x sizes."""
    if not target.has("mma_sync"):
        return []
    made = [
        zl.Variant(
            f"latent_attention_{name}_{rank}_{rotary}",
            latent_attention_mma,
            {"RANK": rank, "ROTARY": rotary, "KV": dtype, **stages_of(target, rank, rotary, item_nbytes(dtype))},
            threads=THREADS,
        )
        for name, dtype in KV_TYPES.items()
        for rank, rotary in SIZES
    ]
    return [*made, zl.Variant("latent_merge", latent_merge, threads=128)]
