"""Attention of many query tokens with mma.sync, where there is no wgmma.

Tiles, masks and softmax are those of attention_tiles.py (FlashAttention 2, Dao 2023): eight warps of 16 query rows
share blocks of 64 keys that cp.async brings; while one block's scores are computed its values are on their way, and the
next keys under P V. Of heads of 512 a tile has half of the rows: two warps compute the scores of the same 16, and each
adds up half of the values' dimensions."""

from zse import kernel as zl
from zse.kernels.gpu import attention_tiles as tiling
from zse.kernels.gpu.attention_pages import first_column
from zse.kernels.gpu.attention_parts import FLOOR, KV_TYPES, multiply, pack_pair
from zse.kernels.gpu.attention_plan import WIDE, head_dims, prefill_rows, warps_of_head
from zse.kernels.gpu.kv8 import is_packed, item_nbytes, page_nbytes, scales_of_columns, two_pairs
from zse.kernels.kv_pages import BLOCK

THREADS = 256
BLOCK_KEYS = (64, 32, 16)


class MmaBatch(tiling.TileBatch):
    """The tiles, and the variant: KEYS keys are in shared memory at once."""

    KEYS: int

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return prefill_rows(self.D)

    @property
    def together(self) -> int:
        """Warps that share rows."""
        return warps_of_head(self.D)

    @property
    def columns(self) -> int:
        """Dimensions of the values that a warp adds up."""
        return self.D // self.together

    @property
    def item(self) -> int:
        return item_nbytes(self.KV)

    @property
    def stride(self) -> int:
        """Bytes of a row in shared memory; the padding keeps ldmatrix free of bank conflicts."""
        return self.D * self.item + 16

    @property
    def query_stride(self) -> int:
        return self.D * 2 + 16

    @property
    def F(self):
        """What is multiplied."""
        return zl.f16 if self.KV is zl.f16 else zl.bf16


@zl.inline
def load_queries(q, place, token, head, rows, p):
    """The tile's rows of Q into shared memory as F; rows that are none become zeros."""
    pieces = p.D // 8
    for e in zl.unroll(range(zl.thread_index(), p.rows * pieces, THREADS), 2):
        row = e // pieces
        x = e % pieces
        which = row if row < rows else 0
        line = q + tiling.query_place(which, token, head, p)
        words = zl.bitcast(zl.load(line + x * 8, 8), zl.u32.x(4))
        if p.F is zl.f16:
            words = zl.bitcast(zl.convert(zl.convert(zl.bitcast(words, zl.bf16.x(8)), zl.f32), zl.f16), zl.u32.x(4))
        if row >= rows:
            words = zl.u32.x(4)(0)
        zl.store(zl.cast_ptr(place + (row * p.query_stride + x * 16), zl.u32), words)


@zl.inline
def load_block(pages, place, table, block, seen, last, head, p):
    """Starts the copy of one block of keys or values, in 8 bits with their scales behind them; rows behind the last key
    become zeros, and so do those before page `seen`: what a window has passed may be another sequence's by now."""
    D, KEYS, item = p.D, p.KEYS, p.item
    pieces = D * item // 16
    for e in zl.static(range(0, KEYS * pieces, THREADS)):
        piece = e + zl.thread_index()
        r = piece // pieces
        key = block * KEYS + r
        page = table[max(min(key, last) // BLOCK, seen)]
        if e + THREADS <= KEYS * pieces or piece < KEYS * pieces:
            inside = r % BLOCK * (D * item) + piece % pieces * 16
            source = pages + ((zl.i64(page) * p.kv_heads + head) * page_nbytes(D, item) + inside)
            count = zl.i32(16) if key <= last and key >= seen * BLOCK else zl.i32(0)
            zl.copy_async(place + (r * p.stride + piece % pieces * 16), source, 16, count)
    if item == 1 and zl.thread_index() < KEYS:
        one = block * KEYS + zl.thread_index()
        its_page = table[max(min(one, last) // BLOCK, seen)]
        source = pages + ((zl.i64(its_page) * p.kv_heads + head) * page_nbytes(D, item) + BLOCK * D + one % BLOCK * 4)
        count = zl.i32(4) if one <= last and one >= seen * BLOCK else zl.i32(0)
        zl.copy_async(place + (KEYS * p.stride + zl.thread_index() * 4), source, 4, count)
    zl.copy_commit()


@zl.inline
def query_fragments(place, kd, STRIDE, ITEM):
    """16 rows x 16 dimensions as an A operand; k permuted as 8-bit keys have it. place: of this warp's row 0."""
    lane = zl.lane_index()
    if ITEM == 2:
        words = zl.ldmatrix(zl.cast_ptr(place + lane % 16 * STRIDE + lane // 16 * 16 + kd * 32, zl.u16), 4)
        frags = [words[0], words[1], words[2], words[3]]
    else:
        low = zl.load(zl.cast_ptr(place + lane // 4 * STRIDE + lane % 4 * 8 + kd * 32, zl.u32), 2)
        high = zl.load(zl.cast_ptr(place + (lane // 4 + 8) * STRIDE + lane % 4 * 8 + kd * 32, zl.u32), 2)
        frags = [low[0], high[0], low[1], high[1]]
    return frags


@zl.inline
def key_operands(place, kd, STRIDE, KV):
    """16 keys x 16 dimensions as two B operands of 8 keys. place: of the first key."""
    lane = zl.lane_index()
    if not is_packed(KV):
        words = zl.ldmatrix(
            zl.cast_ptr(place + (lane % 8 + lane // 16 * 8) * STRIDE + lane // 8 % 2 * 16 + kd * 32, zl.u16), 4
        )
        first = [words[0], words[1]]
        second = [words[2], words[3]]
    else:
        words = zl.ldmatrix(zl.cast_ptr(place + lane % 16 * STRIDE + kd * 16, zl.u16), 2)
        low0, high0 = two_pairs(words[0], KV)
        low1, high1 = two_pairs(words[1], KV)
        first = [low0, high0]
        second = [low1, high1]
    return first, second


@zl.inline
def value_operands(place, d, STRIDE, KV):
    """16 keys x 16 dimensions as two B operands of 8 dimensions; of 8-bit values the even and the odd ones."""
    lane = zl.lane_index()
    if not is_packed(KV):
        words = zl.ldmatrix(zl.cast_ptr(place + lane % 16 * STRIDE + lane // 16 * 16 + d * 32, zl.u16), 4, True)
        first = [words[0], words[1]]
        second = [words[2], words[3]]
    else:
        words = zl.ldmatrix(zl.cast_ptr(place + lane % 16 * STRIDE + d * 16, zl.u16), 2, True)
        even0, odd0 = two_pairs(zl.prmt(words[0], words[0], 0x3120), KV)
        even1, odd1 = two_pairs(zl.prmt(words[1], words[1], 0x3120), KV)
        first = [even0, even1]
        second = [odd0, odd1]
    return first, second


@zl.inline
def compute_scores(queries, keys, p):
    """Of this warp's 16 rows with the block's keys: [8 keys][4] f32."""
    N, STRIDE = p.KEYS // 8, p.stride
    scores = [[zl.f32(0) for u in zl.static(range(4))] for n in zl.static(range(N))]
    for kd in zl.static(range(p.D // 16)):
        a = query_fragments(queries, kd, p.query_stride, p.item)
        for n in zl.static(range(N // 2)):
            first, second = key_operands(keys + n * 16 * STRIDE, kd, STRIDE, p.KV)
            multiply(scores[2 * n], a, first, p.F)
            multiply(scores[2 * n + 1], a, second, p.F)
    scale_columns(scores, keys, p)
    return scores


@zl.inline
def scale_columns(scores, block, p):
    """In 8 bits: scores or weights times the scales of the block's keys or values."""
    if is_packed(p.KV):
        for n in zl.static(range(p.KEYS // 8)):
            scales = scales_of_columns(block + p.KEYS * p.stride, n * 8)
            for u in zl.static(range(4)):
                scores[n][u] = scores[n][u] * scales[u % 2]


@zl.inline
def add_values(acc, scores, values, p):
    """acc += P V. values: of this warp's first dimension."""
    scale_columns(scores, values, p)
    for n in zl.static(range(p.KEYS // 16)):
        weights = [
            pack_pair(scores[2 * n + u // 2][u % 2 * 2], scores[2 * n + u // 2][u % 2 * 2 + 1], p.F)
            for u in zl.static(range(4))
        ]
        for d in zl.static(range(p.columns // 16)):
            first, second = value_operands(values + n * 16 * p.stride, d, p.stride, p.KV)
            multiply(acc[2 * d], weights, first, p.F)
            multiply(acc[2 * d + 1], weights, second, p.F)


@zl.inline
def write_rows(acc, running, first, rows, token, head, p):
    """The two rows of a thread, from row `first` on."""
    j = zl.lane_index() % 4
    high, sums, _ = running
    for h in zl.static(range(2)):
        r = first + 8 * h
        inverse = 1.0 / tiling.sum_with_sink(sums[h], high[h], r, head, p)
        if r < rows:
            place = first_column(p.out, p.columns, p) + tiling.query_place(r, token, head, p)
            for d in zl.static(range(p.columns // 16)):
                c = [acc[2 * d + u // 2][2 * h + u % 2] * inverse for u in zl.static(range(4))]
                if p.item == 2:
                    zl.store(place + d * 16 + j * 2, zl.convert(zl.make_vector(c[0], c[1]), zl.bf16))
                    zl.store(place + d * 16 + 8 + j * 2, zl.convert(zl.make_vector(c[2], c[3]), zl.bf16))
                else:
                    zl.store(place + d * 16 + j * 4, zl.convert(zl.make_vector(c[0], c[2], c[1], c[3]), zl.bf16))


@zl.kernel
def attention_prefill_mma(
    q: zl.Ptr[zl.bf16, "const"],
    k_pages: zl.Ptr[zl.u8, "const"],
    v_pages: zl.Ptr[zl.u8, "const"],
    params: tiling.PrefillParams,
    KEYS: zl.static,
):
    """A persistent grid over the plan's tiles x kv heads."""
    zl.grid_launch_dependents()
    stride = params.D * 2 + 16
    item = item_nbytes(params.KV)
    queries = zl.shared_array(zl.u8, prefill_rows(params.D) * stride, align=128)
    keys = zl.shared_array(zl.u8, block_nbytes(params.D, item, KEYS), align=128)
    values = zl.shared_array(zl.u8, block_nbytes(params.D, item, KEYS), align=128)
    is_shared = warps_of_head(params.D) == 2
    warp = zl.warp_index() // 2 if is_shared else zl.warp_index()
    mine = warp * 16 + zl.lane_index() // 4
    zl.grid_wait()
    p = MmaBatch(**vars(tiling.batch_of(params)), KEYS=KEYS)
    for turn in range(0, p.total, zl.num_blocks(0)):
        work = tiling.work_of(turn)
        if work >= p.total:
            break
        token, rows, position, last, table, head = tiling.tile_at(tiling.tile_of(work, p), work, p)
        seen = (max(position + 1 - p.window, 0) if p.window > 0 else zl.i32(0)) // BLOCK
        begin = seen * BLOCK // KEYS
        end = last // KEYS
        load_block(k_pages, keys, table, begin, seen, last, head, p)
        load_block(v_pages, values, table, begin, seen, last, head, p)
        load_queries(q, queries, token, head, rows, p)
        factor = tiling.factor_of(p)
        sight = tiling.sight_of(mine, rows, token, position, p)
        acc = [[zl.f32(0) for u in zl.static(range(4))] for d in zl.static(range(p.columns // 8))]
        high = [zl.f32(FLOOR) for h in zl.static(range(2))]
        sums = [zl.f32(0) for h in zl.static(range(2))]
        shrink = [zl.f32(0) for h in zl.static(range(2))]
        for block in zl.unroll(range(begin, end + 1), 1):
            zl.copy_wait(1)
            zl.barrier()
            scores = compute_scores(queries + warp * 16 * p.query_stride, keys, p)
            zl.barrier()
            if block < end:
                load_block(k_pages, keys, table, block + 1, seen, last, head, p)
            else:
                zl.copy_commit()
            tiling.softmax(sum(scores, []), sight, (high, sums, shrink), block * KEYS, factor, p, acc)
            zl.copy_wait(1)
            zl.barrier()
            add_values(acc, scores, values + zl.warp_index() % 2 * (p.columns * item) if is_shared else values, p)
            zl.barrier()
            if block < end:
                load_block(v_pages, values, table, block + 1, seen, last, head, p)
            else:
                zl.copy_commit()
        zl.copy_wait(0)
        write_rows(acc, (high, sums, shrink), mine, rows, token, head, p)
        zl.barrier()


def mma_symbol(kv: str, head_dim: int) -> str:
    return f"attention_mma_{kv}_d{head_dim}"


def block_nbytes(head_dim: int, item: int, keys: int) -> int:
    """Shared memory of a block of keys or of values, with the scales of numbers in 8 bits."""
    return keys * (head_dim * item + 16) + (4 * keys if item == 1 else 0)


def keys_of_block(target, kv: str, head_dim: int) -> int:
    """Keys that are in shared memory at once, beside the tile's queries: as many of BLOCK_KEYS as a block has room for,
    with the sums of wide heads as many as leave no register over."""
    room = target.shared_limit - prefill_rows(head_dim) * (head_dim * 2 + 16)
    item = item_nbytes(KV_TYPES[kv])
    choices = BLOCK_KEYS[warps_of_head(head_dim) - 1 :]
    return next(keys for keys in choices if 2 * block_nbytes(head_dim, item, keys) <= room)


def mma_variants(target) -> list[zl.Variant]:
    """head_dim x dtype of the pages, where attention_prefill.py and attention_packed.py have no kernels."""
    if not target.has("mma_sync"):
        return []
    return [
        zl.Variant(
            mma_symbol(name, dim),
            attention_prefill_mma,
            {"D": dim, "KV": dtype, "KEYS": keys_of_block(target, name, dim)},
            threads=THREADS,
        )
        for name, dtype in KV_TYPES.items()
        for dim in head_dims(name)
        if dim == WIDE or target.arch != 90
    ]
