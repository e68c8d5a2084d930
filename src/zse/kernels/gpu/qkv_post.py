"""QK-norm, rotation and the writing of keys and values to their pages, on a GPU: a warp is one head of one token."""

from zse import kernel as zl
from zse.kernels.gpu.attention_parts import KV_TYPES
from zse.kernels.gpu.kv8 import is_packed
from zse.kernels.kv_pages import BLOCK, LARGEST, SCALE_BYTES
from zse.kernels.qkv_post import GPU_THREADS, MANY_NORMS, MANY_PAGES, NORMS, ROWS_THREADS, QKVPost, largest_head

TOGETHER = 3  # heads of a token that a thread of qkv_post_rows has in flight


@zl.inline
def put(out, a, b, T):
    """Two neighbours, as T."""
    zl.store(out, zl.convert(zl.make_vector(a, b), T))


@zl.inline
def begin_packed(pairs, scale, T):
    """Writes the scale of a warp's values, f32 pairs that are zero where they are none, and gives what makes them
    stored numbers. As in kv_pages.pack_head the peak is found on bit patterns, so that NaN and infinity survive into
    the scale."""
    top = zl.i32(0)
    for pair in zl.static(pairs):
        for u in zl.static(range(2)):
            top = max(top, zl.bitcast(pair[u], zl.i32) & 0x7FFFFFFF)
    peak = zl.bitcast(zl.warp_max(top), zl.f32)
    largest = LARGEST["e4m3" if T is zl.e4m3 else "i8"]
    if zl.lane_index() == 0:
        scale[0] = peak / largest
    return zl.where(peak > 1e-30, largest / peak, 0.0)


@zl.inline
def put_packed(out, pair, inverse, T):
    """Two neighbours as stored numbers."""
    values = zl.make_vector(pair[0] * inverse, pair[1] * inverse)
    if T is zl.e4m3:
        zl.store(out, zl.convert(values, zl.e4m3))
    else:
        zl.store(out, zl.narrow_s8(zl.convert(zl.round_even(values), zl.i32)))


@zl.inline
def whole_factor(x, width, eps):
    """1 / sqrt(mean(x^2) + eps) of a token's heads together, by one warp; the warps of a block read the same lines."""
    sums = zl.f32.x(4)(0)
    for i in range(zl.lane_index() * 4, width, zl.target.warp * 4):
        value = zl.load(x + i, 4)
        sums = zl.fma(value, value, sums)
    return zl.rsqrt(zl.warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / zl.f32(width) + eps)


class PostParams(QKVPost):
    """The parameters of qkv_post_gpu."""

    heads: zl.i32
    kv_heads: zl.i32
    head_dim: zl.i32
    rotary: zl.i32
    eps: zl.f32

    @property
    def rest(self) -> int:
        """Pairs of two neighbours that a lane has of what is not rotated, at most; of half of a rotated head half as
        many."""
        return largest_head(self.NORM) // 64


@zl.inline
def rotate(x, weight, whole, table, out, scale, T, p):
    """out = rope(x), or rope(rmsnorm(x) * weight), as T: one head, two neighbours of each half a lane. whole: the
    factor of a norm over all heads. scale: where that of a T in 8 bits goes, else None."""
    lane = zl.lane_index()
    half = p.rotary // 2
    at = [lane * 2 + n * 64 for n in zl.static(range(p.rest // 2))]
    low = [[zl.f32(0) for u in zl.static(range(2))] for n in zl.static(range(p.rest // 2))]
    high = [[zl.f32(0) for u in zl.static(range(2))] for n in zl.static(range(p.rest // 2))]
    rest = [[zl.f32(0) for u in zl.static(range(2))] for n in zl.static(range(p.rest))]
    for n in zl.static(range(p.rest // 2)):
        if at[n] < half:
            a = zl.load(x + at[n], 2)
            b = zl.load(x + half + at[n], 2)
            for u in zl.static(range(2)):
                low[n][u] = a[u] + 0.0
                high[n][u] = b[u] + 0.0
    if p.rotary < p.head_dim:
        for n in zl.static(range(p.rest)):
            if p.rotary + lane * 2 + n * 64 < p.head_dim:
                a = zl.load(x + (p.rotary + lane * 2 + n * 64), 2)
                for u in zl.static(range(2)):
                    rest[n][u] = a[u] + 0.0
    if p.NORM == "whole":
        factor = whole
    if p.NORM == "norm" or p.NORM == "values":
        squares = zl.f32(0)
        for values in zl.static(low + high + rest):
            for u in zl.static(range(2)):
                squares = zl.fma(values[u], values[u], squares)
        factor = zl.rsqrt(zl.warp_sum(squares) / zl.f32(p.head_dim) + p.eps)
    for n in zl.static(range(p.rest // 2)):
        if at[n] < half:
            c = zl.load(table + at[n], 2)
            s = zl.load(table + half + at[n], 2)
            if p.NORM != "plain":
                first = zl.load(weight + at[n], 2)
                second = zl.load(weight + half + at[n], 2)
                for u in zl.static(range(2)):
                    low[n][u] = low[n][u] * factor * first[u]
                    high[n][u] = high[n][u] * factor * second[u]
            if is_packed(T):
                for u in zl.static(range(2)):
                    turned = low[n][u] * c[u] - high[n][u] * s[u]
                    high[n][u] = high[n][u] * c[u] + low[n][u] * s[u]
                    low[n][u] = turned
            else:
                put(out + at[n], low[n][0] * c[0] - high[n][0] * s[0], low[n][1] * c[1] - high[n][1] * s[1], T)
                put(out + half + at[n], high[n][0] * c[0] + low[n][0] * s[0], high[n][1] * c[1] + low[n][1] * s[1], T)
    if p.rotary < p.head_dim:
        for n in zl.static(range(p.rest)):
            place = p.rotary + lane * 2 + n * 64
            if place < p.head_dim:
                if p.NORM != "plain":
                    first = zl.load(weight + place, 2)
                    for u in zl.static(range(2)):
                        rest[n][u] = rest[n][u] * factor * first[u]
                if not is_packed(T):
                    put(out + place, rest[n][0], rest[n][1], T)
    if is_packed(T):
        inverse = begin_packed(low + high + rest, scale, T)
        for n in zl.static(range(p.rest // 2)):
            if at[n] < half:
                put_packed(out + at[n], low[n], inverse, T)
                put_packed(out + half + at[n], high[n], inverse, T)
        for n in zl.static(range(p.rest)):
            if p.rotary + lane * 2 + n * 64 < p.head_dim:
                put_packed(out + (p.rotary + lane * 2 + n * 64), rest[n], inverse, T)


@zl.inline
def places_of(pages, page, head, slot, p):
    """Where a token's keys or values of one head stand, and their scale; None without one."""
    if is_packed(p.KV):
        begin = pages + (zl.i64(page) * p.kv_heads + head) * (BLOCK * p.head_dim + SCALE_BYTES)
        scale = zl.cast_ptr(begin + BLOCK * p.head_dim, zl.f32) + slot
        place = zl.cast_ptr(begin + slot * p.head_dim, p.KV)
    else:
        scale = None
        place = zl.cast_ptr(pages, p.KV) + ((zl.i64(page) * p.kv_heads + head) * BLOCK + slot) * p.head_dim
    return place, scale


@zl.inline
def write_value(lane, row, out, scale, p):
    """A token's values of one head, as they are or normalized."""
    KV = p.KV
    factor = zl.f32(1)
    if p.NORM == "values":
        squares = zl.f32(0)
        for n in zl.static(range(p.rest)):
            if lane * 2 + n * 64 < p.head_dim:
                a = zl.load(row + (lane * 2 + n * 64), 2)
                for u in zl.static(range(2)):
                    squares = zl.fma(a[u], a[u], squares)
        factor = zl.rsqrt(zl.warp_sum(squares) / zl.f32(p.head_dim) + p.eps)
    if is_packed(KV):
        pairs = [[zl.f32(0) for u in zl.static(range(2))] for _ in zl.static(range(p.rest))]
        for n in zl.static(range(p.rest)):
            if lane * 2 + n * 64 < p.head_dim:
                a = zl.load(row + (lane * 2 + n * 64), 2)
                for u in zl.static(range(2)):
                    pairs[n][u] = a[u] * factor
        inverse = begin_packed(pairs, scale, KV)
        for n in zl.static(range(p.rest)):
            if lane * 2 + n * 64 < p.head_dim:
                put_packed(out + (lane * 2 + n * 64), pairs[n], inverse, KV)
    else:
        for n in zl.static(range(p.rest)):
            place = lane * 2 + n * 64
            if place < p.head_dim:
                a = zl.load(row + place, 2)
                put(out + place, a[0] * factor, a[1] * factor, KV)


@zl.kernel
def qkv_post_gpu(p: PostParams):
    """Grid (tokens, heads of q, k and v / warps of a block)."""
    # In this order as measured: attention reads the plan and the pages of earlier steps before its grid_wait().
    zl.grid_wait()
    zl.grid_launch_dependents()
    token = zl.block_index(0)
    head = zl.block_index(1) * (zl.target.threads // zl.target.warp) + zl.warp_index()
    if head >= p.heads + 2 * p.kv_heads:
        return
    whole = None
    weight = p.q_norm
    if head < p.heads:
        if p.NORM == "whole":
            whole = whole_factor(p.q + zl.i64(token) * p.q_stride, p.heads * p.head_dim, p.eps)
            weight = p.q_norm + head * p.head_dim
        rotate(
            p.q + zl.i64(token) * p.q_stride + head * p.q_step,
            weight,
            whole,
            p.q_table + zl.i64(token) * p.rotary,
            p.q_out + (zl.i64(token) * p.heads + head) * p.head_dim,
            None,
            zl.bf16,
            p,
        )
        return
    position = p.positions[token]
    page = p.page_table[zl.i64(p.token_row[token]) * p.max_pages + position // BLOCK]
    lane = zl.lane_index()
    if head < p.heads + p.kv_heads:
        at = head - p.heads
        out, scale = places_of(p.k_pages, page, at, position % BLOCK, p)
        key = p.k + zl.i64(token) * p.k_stride + at * p.head_dim
        cosines = p.table + zl.i64(token) * p.rotary
        weight = p.k_norm
        if p.NORM == "whole":
            whole = whole_factor(p.k + zl.i64(token) * p.k_stride, p.kv_heads * p.head_dim, p.eps)
            weight = p.k_norm + at * p.head_dim
        rotate(key, weight, whole, cosines, out, scale, p.KV, p)
    else:
        at = head - p.heads - p.kv_heads
        out, scale = places_of(p.v_pages, page, at, position % BLOCK, p)
        row = p.v + zl.i64(token) * p.v_stride + at * p.head_dim
        write_value(lane, row, out, scale, p)


@zl.inline
def source_of(head, token, p):
    """Where a head of q, k or v of a token stands."""
    x = p.q + (zl.i64(token) * p.q_stride + head * p.q_step)
    if head >= p.heads:
        x = p.k + (zl.i64(token) * p.k_stride + (head - p.heads) * p.head_dim)
    if head >= p.heads + p.kv_heads:
        x = p.v + (zl.i64(token) * p.v_stride + (head - (p.heads + p.kv_heads)) * p.head_dim)
    return x


@zl.inline
def put_halves(out, low, high, half, T):
    """Four neighbours of each half of a head, as T."""
    zl.store(out, zl.convert(low, T))
    zl.store(out + half, zl.convert(high, T))


@zl.inline
def head_scale(low, high, lanes, p):
    """1 / rms of the head that `lanes` neighbouring lanes have; all lanes of the warp take part."""
    squares = zl.fma(low, low, high * high)
    total = (squares[0] + squares[1]) + (squares[2] + squares[3])
    for mask in zl.static((1, 2, 4, 8, 16)):
        if mask < lanes:
            total = total + zl.shuffle_xor(total, mask)
    return zl.rsqrt(total / zl.f32(p.head_dim) + p.eps)


@zl.kernel
def qkv_post_rows(p: PostParams):
    """Grid (tokens). Heads of 64, 128 or 256, turned as a whole, of many tokens: head_dim / 8 lanes have a head, four
    neighbours of each half, and a thread the same place of several heads, of which TOGETHER are in flight. A warp for each
    head of a token had 100 instructions and two round trips for 768 bytes."""
    zl.grid_wait()
    zl.grid_launch_dependents()
    t = zl.thread_index()
    token = zl.block_index(0)
    lanes = p.head_dim // 8
    own, at = t // lanes, t % lanes * 4
    half, step = p.head_dim // 2, zl.target.threads // lanes
    count = p.heads + 2 * p.kv_heads
    turn = zl.i64(token) * p.rotary + at
    c, s = zl.load(p.q_table + turn, 4), zl.load(p.q_table + (turn + half), 4)
    weights = [zl.f32.x(4)(1) for _ in zl.static(range(2))]
    if p.NORM != "plain":
        weights = [zl.load(p.q_norm + at, 4), zl.load(p.q_norm + (at + half), 4)]
    slot, page = zl.i32(0), zl.i32(0)
    if p.kv_heads > 0:
        position = p.positions[token]
        page = p.page_table[zl.i64(p.token_row[token]) * p.max_pages + position // BLOCK]
        slot = position % BLOCK
    for first in range(0, count, step * TOGETHER):
        heads = [first + own + u * step for u in zl.static(range(TOGETHER))]
        sources = [source_of(min(head, count - 1), token, p) + at for head in zl.static(heads)]
        lows = [zl.load(source, 4) for source in zl.static(sources)]
        highs = [zl.load(source + half, 4) for source in zl.static(sources)]
        factors = [zl.f32(1) for _ in zl.static(heads)]
        if p.NORM != "plain":
            factors = [head_scale(lows[u], highs[u], lanes, p) for u in zl.static(range(TOGETHER))]
        for u, head in enumerate(heads):
            low, high = lows[u], highs[u]
            if head < p.heads:
                if p.NORM != "plain":
                    low, high = low * factors[u] * weights[0], high * factors[u] * weights[1]
                out = p.q_out + ((zl.i64(token) * p.heads + head) * p.head_dim + at)
                put_halves(out, low * c - high * s, high * c + low * s, half, zl.bf16)
            elif head < p.heads + p.kv_heads:
                if p.NORM != "plain":
                    low = low * factors[u] * zl.load(p.k_norm + at, 4)
                    high = high * factors[u] * zl.load(p.k_norm + (at + half), 4)
                cos, sin = zl.load(p.table + turn, 4), zl.load(p.table + (turn + half), 4)
                out, _ = places_of(p.k_pages, page, head - p.heads, slot, p)
                put_halves(out + at, low * cos - high * sin, high * cos + low * sin, half, p.KV)
            elif head < count:
                out, _ = places_of(p.v_pages, page, head - (p.heads + p.kv_heads), slot, p)
                put_halves(out + at, low, high, half, p.KV)


def qkv_post_variants(target) -> list[zl.Variant]:
    """dtype of the pages x with or without QK-norm."""
    rows = [
        zl.Variant(
            f"qkv_post_{name}_{form}_many",
            qkv_post_rows,
            {"Q": zl.bf16, "KV": KV_TYPES[name], "NORM": form},
            ROWS_THREADS,
        )
        for name in MANY_PAGES
        for form in MANY_NORMS
    ]
    return rows + [
        zl.Variant(
            f"qkv_post_{name}_{form}", qkv_post_gpu, {"Q": zl.bf16, "KV": dtype, "NORM": form}, threads=GPU_THREADS
        )
        for name, dtype in KV_TYPES.items()
        for form in NORMS
    ]
