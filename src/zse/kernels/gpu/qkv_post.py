"""QK-norm, rotation and the writing of keys and values to their pages, on a GPU: a warp is one head of one token."""

from zse import kernel as zl
from zse.kernels.gpu.kv8 import is_packed
from zse.kernels.kv_pages import BLOCK, LARGEST, PACKED, SCALE_BYTES
from zse.kernels.qkv_post import GPU_THREADS, NORMS

MAX_HEAD_DIM = 256
KV_TYPES = {"bf16": zl.bf16, "f16": zl.f16, **PACKED}
PAIRS = MAX_HEAD_DIM // 128  # pairs of two neighbours a lane has of half a head
REST = MAX_HEAD_DIM // 64  # of what is not rotated


@zl.inline
def put(out, a, b, T):
    """Two neighbours, as T."""
    zl.store(out, zl.convert(zl.make_vector(a, b), T))


@zl.inline
def begin_packed(pairs, scale, T):
    """Writes the scale of a warp's values, f32 pairs that are zero where they are none, and gives what makes them stored
    numbers. As in kv_pages.pack_head the peak is found on bit patterns, so that NaN and infinity survive into the scale."""
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


@zl.inline
def rotate(x, weight, whole, table, out, scale, head_dim, rotary, eps, T, NORM):
    """out = rope(x), or rope(rmsnorm(x) * weight), as T: one head, two neighbours of each half a lane. whole: the factor
    of a norm over all heads. scale: where that of a T in 8 bits goes, else None."""
    lane = zl.lane_index()
    half = rotary // 2
    at = [lane * 2 + p * 64 for p in zl.static(range(PAIRS))]
    low = [[zl.f32(0) for u in zl.static(range(2))] for p in zl.static(range(PAIRS))]
    high = [[zl.f32(0) for u in zl.static(range(2))] for p in zl.static(range(PAIRS))]
    rest = [[zl.f32(0) for u in zl.static(range(2))] for p in zl.static(range(REST))]
    for p in zl.static(range(PAIRS)):
        if at[p] < half:
            a = zl.load(x + at[p], 2)
            b = zl.load(x + half + at[p], 2)
            for u in zl.static(range(2)):
                low[p][u] = a[u] + 0.0
                high[p][u] = b[u] + 0.0
    if rotary < head_dim:
        for p in zl.static(range(REST)):
            if rotary + lane * 2 + p * 64 < head_dim:
                a = zl.load(x + (rotary + lane * 2 + p * 64), 2)
                for u in zl.static(range(2)):
                    rest[p][u] = a[u] + 0.0
    if NORM == "whole":
        factor = whole
    if NORM == "norm":
        squares = zl.f32(0)
        for values in zl.static(low + high + rest):
            for u in zl.static(range(2)):
                squares = zl.fma(values[u], values[u], squares)
        factor = zl.rsqrt(zl.warp_sum(squares) / zl.f32(head_dim) + eps)
    for p in zl.static(range(PAIRS)):
        if at[p] < half:
            c = zl.load(table + at[p], 2)
            s = zl.load(table + half + at[p], 2)
            if NORM != "plain":
                first = zl.load(weight + at[p], 2)
                second = zl.load(weight + half + at[p], 2)
                for u in zl.static(range(2)):
                    low[p][u] = low[p][u] * factor * first[u]
                    high[p][u] = high[p][u] * factor * second[u]
            if is_packed(T):
                for u in zl.static(range(2)):
                    turned = low[p][u] * c[u] - high[p][u] * s[u]
                    high[p][u] = high[p][u] * c[u] + low[p][u] * s[u]
                    low[p][u] = turned
            else:
                put(out + at[p], low[p][0] * c[0] - high[p][0] * s[0], low[p][1] * c[1] - high[p][1] * s[1], T)
                put(out + half + at[p], high[p][0] * c[0] + low[p][0] * s[0], high[p][1] * c[1] + low[p][1] * s[1], T)
    if rotary < head_dim:
        for p in zl.static(range(REST)):
            place = rotary + lane * 2 + p * 64
            if place < head_dim:
                if NORM != "plain":
                    first = zl.load(weight + place, 2)
                    for u in zl.static(range(2)):
                        rest[p][u] = rest[p][u] * factor * first[u]
                if not is_packed(T):
                    put(out + place, rest[p][0], rest[p][1], T)
    if is_packed(T):
        inverse = begin_packed(low + high + rest, scale, T)
        for p in zl.static(range(PAIRS)):
            if at[p] < half:
                put_packed(out + at[p], low[p], inverse, T)
                put_packed(out + half + at[p], high[p], inverse, T)
        for p in zl.static(range(REST)):
            if rotary + lane * 2 + p * 64 < head_dim:
                put_packed(out + (rotary + lane * 2 + p * 64), rest[p], inverse, T)


@zl.inline
def places_of(pages, page, head, slot, kv_heads, head_dim, KV):
    """Where a token's keys or values of one head stand, and their scale; None without one."""
    if is_packed(KV):
        begin = pages + (zl.i64(page) * kv_heads + head) * (BLOCK * head_dim + SCALE_BYTES)
        scale = zl.cast_ptr(begin + BLOCK * head_dim, zl.f32) + slot
        place = zl.cast_ptr(begin + slot * head_dim, KV)
    else:
        scale = None
        place = zl.cast_ptr(pages, KV) + ((zl.i64(page) * kv_heads + head) * BLOCK + slot) * head_dim
    return place, scale


@zl.kernel
def qkv_post_gpu(
    q: zl.Ptr[zl.f32, "const"],
    k: zl.Ptr[zl.f32, "const"],
    v: zl.Ptr[zl.f32, "const"],
    q_stride: zl.i32,
    k_stride: zl.i32,
    v_stride: zl.i32,
    q_norm: zl.Ptr[zl.f32, "const"],
    k_norm: zl.Ptr[zl.f32, "const"],
    q_table: zl.Ptr[zl.f32, "const"],
    table: zl.Ptr[zl.f32, "const"],
    q_out: zl.Ptr[zl.bf16],
    k_pages: zl.Ptr[zl.u8],
    v_pages: zl.Ptr[zl.u8],
    page_table: zl.Ptr[zl.i32, "const"],
    max_pages: zl.i32,
    token_row: zl.Ptr[zl.i32, "const"],
    positions: zl.Ptr[zl.i32, "const"],
    heads: zl.i32,
    kv_heads: zl.i32,
    head_dim: zl.i32,
    rotary: zl.i32,
    eps: zl.f32,
    KV: zl.static,
    NORM: zl.static,
):
    """Grid (tokens, heads of q, k and v / warps of a block)."""
    # In this order as measured: attention reads the plan and the pages of earlier steps before its grid_wait().
    zl.grid_wait()
    zl.grid_launch_dependents()
    token = zl.block_index(0)
    head = zl.block_index(1) * (zl.target.threads // zl.target.warp) + zl.warp_index()
    if head >= heads + 2 * kv_heads:
        return
    whole = None
    weight = q_norm
    if head < heads:
        if NORM == "whole":
            whole = whole_factor(q + zl.i64(token) * q_stride, heads * head_dim, eps)
            weight = q_norm + head * head_dim
        rotate(
            q + zl.i64(token) * q_stride + head * head_dim,
            weight,
            whole,
            q_table + zl.i64(token) * rotary,
            q_out + (zl.i64(token) * heads + head) * head_dim,
            None,
            head_dim,
            rotary,
            eps,
            zl.bf16,
            NORM,
        )
        return
    position = positions[token]
    page = page_table[zl.i64(token_row[token]) * max_pages + position // BLOCK]
    lane = zl.lane_index()
    if head < heads + kv_heads:
        at = head - heads
        out, scale = places_of(k_pages, page, at, position % BLOCK, kv_heads, head_dim, KV)
        key = k + zl.i64(token) * k_stride + at * head_dim
        cosines = table + zl.i64(token) * rotary
        weight = k_norm
        if NORM == "whole":
            whole = whole_factor(k + zl.i64(token) * k_stride, kv_heads * head_dim, eps)
            weight = k_norm + at * head_dim
        rotate(key, weight, whole, cosines, out, scale, head_dim, rotary, eps, KV, NORM)
    else:
        at = head - heads - kv_heads
        out, scale = places_of(v_pages, page, at, position % BLOCK, kv_heads, head_dim, KV)
        row = v + zl.i64(token) * v_stride + at * head_dim
        if is_packed(KV):
            pairs = [[zl.f32(0) for u in zl.static(range(2))] for p in zl.static(range(REST))]
            for p in zl.static(range(REST)):
                if lane * 2 + p * 64 < head_dim:
                    a = zl.load(row + (lane * 2 + p * 64), 2)
                    for u in zl.static(range(2)):
                        pairs[p][u] = a[u] + 0.0
            inverse = begin_packed(pairs, scale, KV)
            for p in zl.static(range(REST)):
                if lane * 2 + p * 64 < head_dim:
                    put_packed(out + (lane * 2 + p * 64), pairs[p], inverse, KV)
        else:
            for p in zl.static(range(REST)):
                place = lane * 2 + p * 64
                if place < head_dim:
                    a = zl.load(row + place, 2)
                    put(out + place, a[0], a[1], KV)


def qkv_post_variants(target) -> list[zl.Variant]:
    """dtype of the pages x with or without QK-norm."""
    return [
        zl.Variant(f"qkv_post_{name}_{form}", qkv_post_gpu, {"KV": dtype, "NORM": form}, threads=GPU_THREADS)
        for name, dtype in KV_TYPES.items()
        for form in NORMS
    ]
