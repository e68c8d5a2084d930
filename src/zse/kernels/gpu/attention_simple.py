"""Attention for GPUs without matrix instructions in the language (HIP, Metal), and of heads that are too small for them:
one block is one token's query head.

The warps take 32 keys in turn. A lane computes one key's score; the weights then go around the warp while the lanes add
up 32 neighbouring dimensions of the values at a time. Running maxima as in Milakov and Gimelshein 2018; the warps'
parts are merged in their order. What a row gets depends on its own position only, so that it is the same bits alone,
batched and in chunks."""

from zse import kernel as zl
from zse.kernels.gpu.attention_parts import FLOOR, KV_TYPES, LOG2E, with_sink
from zse.kernels.gpu.attention_plan import HEAD_DIMS, SMALL, WIDE
from zse.kernels.gpu.kv8 import is_packed, page_nbytes
from zse.kernels.kv_pages import BLOCK

THREADS = 128
SMALL_KV = ("bf16", "f16")
SIMPLE_DIMS = (SMALL, *HEAD_DIMS, WIDE)


class SimpleAttentionParams(zl.Record):
    """The parameters of attention_simple."""

    q: zl.Ptr[zl.bf16, "const"]
    k_pages: zl.Ptr["KV", "const"]
    v_pages: zl.Ptr["KV", "const"]
    page_table: zl.Ptr[zl.i32, "const"]
    token_row: zl.Ptr[zl.i32, "const"]
    positions: zl.Ptr[zl.i32, "const"]
    out: zl.Ptr[zl.bf16]
    max_pages: zl.i32
    kv_heads: zl.i32
    group: zl.i32
    scale: zl.f32
    window: zl.i32
    softcap: zl.f32
    sinks: zl.Ptr[zl.f32, "const"]
    has_sinks: zl.i32
    sees: zl.Ptr[zl.i32, "const"]
    has_sees: zl.i32
    D: zl.static
    KV: zl.static


@zl.inline
def score_of(query, slot, p):
    """(score of the key in `slot` before its mask, scale of its value)."""
    value_scale = None
    if is_packed(p.KV):
        at = zl.i64(slot // BLOCK) * page_nbytes(p.D, 1)
        keys = p.k_pages + (at + slot % BLOCK * p.D)
        key_scale = p.scale * zl.cast_ptr(p.k_pages + (at + BLOCK * p.D), zl.f32)[slot % BLOCK]
        value_scale = zl.cast_ptr(p.v_pages + (at + BLOCK * p.D), zl.f32)[slot % BLOCK]
    else:
        keys = p.k_pages + zl.i64(slot) * p.D
        key_scale = p.scale
    score = zl.f32(0)
    for d in zl.unroll(range(0, p.D, 8), 4):
        values = zl.convert(zl.load(keys + d, 8), zl.f32)
        for half in zl.static(range(2)):
            wanted = zl.load(query + d + half * 4, 4)
            for e in zl.static(range(4)):
                score = zl.fma(values[half * 4 + e], wanted[e], score)
    score = score * key_scale
    if p.softcap > 0.0:
        score = zl.tanh(score / p.softcap) * p.softcap
    return score, value_scale


@zl.inline
def add_values(acc, weight, slot, count, p):
    """acc += the values of the warp's `count` keys, lane by lane, times their weights."""
    for k in range(0, count):
        share = zl.shuffle(weight, k)
        its_slot = zl.shuffle(slot, k)
        if is_packed(p.KV):
            place = zl.i64(its_slot // BLOCK) * page_nbytes(p.D, 1) + (its_slot % BLOCK * p.D + zl.lane_index())
            row = p.v_pages + place
        else:
            row = p.v_pages + (zl.i64(its_slot) * p.D + zl.lane_index())
        for c in zl.static(range(p.D // 32)):
            acc[c] = zl.fma(share, zl.f32(row[c * 32]), acc[c])


@zl.inline
def merge_warps(acc, high, mass, place, p):
    """The warps' parts, in their order, become the row of out."""
    warps = zl.target.threads // zl.target.warp
    parts = zl.shared_array(zl.f32, warps * p.D)
    maxima = zl.shared_array(zl.f32, warps)
    masses = zl.shared_array(zl.f32, warps)
    warp = zl.warp_index()
    mass = zl.warp_sum(mass)
    if zl.lane_index() == 0:
        maxima[warp] = high
        masses[warp] = mass
    for c in zl.static(range(p.D // 32)):
        parts[warp * p.D + c * 32 + zl.lane_index()] = acc[c]
    zl.barrier()
    top = maxima[0]
    for n in zl.static(range(1, warps)):
        top = max(top, maxima[n])
    total = zl.f32(0)
    factors = [zl.exp2(maxima[n] - top) for n in zl.static(range(warps))]
    for n in zl.static(range(warps)):
        total = zl.fma(masses[n], factors[n], total)
    total = with_sink(total, top, zl.block_index(0), p)
    for d in range(zl.thread_index(), p.D, zl.target.threads):
        value = zl.f32(0)
        for n in zl.static(range(warps)):
            value = zl.fma(parts[n * p.D + d], factors[n], value)
        p.out[place + d] = zl.convert(value / total, zl.bf16)


@zl.kernel
def attention_simple(p: SimpleAttentionParams):
    """Grid (query heads, tokens)."""
    warps = zl.target.threads // zl.target.warp
    query = zl.shared_array(zl.f32, p.D)
    zl.grid_launch_dependents()
    zl.grid_wait()
    lane = zl.lane_index()
    head = zl.block_index(0) // p.group
    token = zl.block_index(1)
    place = (zl.i64(token) * (p.kv_heads * p.group) + zl.block_index(0)) * p.D
    position = p.positions[token]
    begin = max(position + 1 - p.window, 0) if p.window > 0 else zl.i32(0)
    end = position + 1
    if p.has_sees > 0:
        end = p.sees[token] + 1
    table = p.page_table + zl.i64(p.token_row[token]) * p.max_pages
    for d in range(zl.thread_index(), p.D, zl.target.threads):
        query[d] = zl.f32(p.q[place + d])
    zl.barrier()

    high = zl.f32(FLOOR)
    mass = zl.f32(0)
    acc = [zl.f32(0) for c in zl.static(range(p.D // 32))]
    for base in range(begin + zl.warp_index() * 32, end, warps * 32):
        key = min(base + lane, end - 1)
        slot = (table[key // BLOCK] * p.kv_heads + head) * BLOCK + key % BLOCK
        score, value_scale = score_of(query, slot, p)
        score = score * LOG2E if base + lane < end else zl.f32(FLOOR)
        new = max(high, zl.warp_max(score))
        shrink = zl.exp2(high - new)
        weight = zl.exp2(score - new) if base + lane < end else zl.f32(0)
        high = new + 0.0
        mass = zl.fma(mass, shrink, weight)
        for c in zl.static(range(p.D // 32)):
            acc[c] = acc[c] * shrink
        if is_packed(p.KV):
            weight = weight * value_scale
        add_values(acc, weight, slot, min(32, end - base), p)
    merge_warps(acc, high, mass, place, p)


def symbol_of(kv: str, head_dim: int) -> str:
    return f"attention_simple_{kv}_d{head_dim}"


def simple_variants(target) -> list[zl.Variant]:
    """head_dim x dtype of the pages; where there are others only small heads."""
    return [
        zl.Variant(symbol_of(name, dim), attention_simple, {"D": dim, "KV": dtype}, threads=THREADS)
        for name, dtype in KV_TYPES.items()
        for dim in (SIMPLE_DIMS if target.has("simt") else (SMALL,))
        if target.has("simt") or name in SMALL_KV
    ]
