"""Attention for GPUs without matrix instructions in the language (HIP, Metal): one block is one token's query head.

The warps take 32 keys in turn. A lane computes one key's score; the weights then go around the warp while the lanes add up 32 neighbouring
dimensions of the values at a time. Running maxima as in Milakov and Gimelshein 2018; the warps' parts are merged in their order. What a
row gets depends on its own position only, so that it is the same bits alone, batched and in chunks.
"""

from zse import kernel as zl
from zse.kernels.gpu.attention_plan import HEAD_DIMS
from zse.kernels.gpu.kv8 import is_packed, page_nbytes
from zse.kernels.kv_pages import BLOCK, PACKED

THREADS = 128
LOG2E = 1.4426950408889634
FLOOR = -1.0e30  # the running maximum before any key
KV_TYPES = {"bf16": zl.bf16, "f16": zl.f16, **PACKED}


@zl.kernel
def attention_simple(
    q: zl.Ptr[zl.bf16, "const"],
    k_pages: zl.Ptr["KV", "const"],
    v_pages: zl.Ptr["KV", "const"],
    page_table: zl.Ptr[zl.i32, "const"],
    token_row: zl.Ptr[zl.i32, "const"],
    positions: zl.Ptr[zl.i32, "const"],
    out: zl.Ptr[zl.bf16],
    max_pages: zl.i32,
    kv_heads: zl.i32,
    group: zl.i32,
    scale: zl.f32,
    window: zl.i32,
    softcap: zl.f32,
    D: zl.static,
    KV: zl.static,
):
    """Grid (query heads, tokens)."""
    warps = zl.target.threads // zl.target.warp
    columns = D // 32
    query = zl.shared_array(zl.f32, D)
    parts = zl.shared_array(zl.f32, warps * D)
    maxima = zl.shared_array(zl.f32, warps)
    masses = zl.shared_array(zl.f32, warps)
    zl.grid_launch_dependents()
    zl.grid_wait()
    lane = zl.lane_index()
    warp = zl.warp_index()
    head = zl.block_index(0) // group
    token = zl.block_index(1)
    place = (zl.i64(token) * (kv_heads * group) + zl.block_index(0)) * D
    position = positions[token]
    begin = max(position + 1 - window, 0) if window > 0 else zl.i32(0)
    table = page_table + zl.i64(token_row[token]) * max_pages
    for d in range(zl.thread_index(), D, zl.target.threads):
        query[d] = zl.f32(q[place + d])
    zl.barrier()

    high = zl.f32(FLOOR)
    mass = zl.f32(0)
    acc = [zl.f32(0) for c in zl.static(range(columns))]
    for base in range(begin + warp * 32, position + 1, warps * 32):
        key = min(base + lane, position)
        slot = (table[key // BLOCK] * kv_heads + head) * BLOCK + key % BLOCK
        if is_packed(KV):
            at = zl.i64(slot // BLOCK) * page_nbytes(D, 1)
            keys = k_pages + (at + slot % BLOCK * D)
            key_scale = scale * zl.cast_ptr(k_pages + (at + BLOCK * D), zl.f32)[slot % BLOCK]
            value_scale = zl.cast_ptr(v_pages + (at + BLOCK * D), zl.f32)[slot % BLOCK]
        else:
            keys = k_pages + zl.i64(slot) * D
            key_scale = scale
        score = zl.f32(0)
        for d in zl.unroll(range(0, D, 8), 4):
            values = zl.convert(zl.load(keys + d, 8), zl.f32)
            for half in zl.static(range(2)):
                wanted = zl.load(query + d + half * 4, 4)
                for e in zl.static(range(4)):
                    score = zl.fma(values[half * 4 + e], wanted[e], score)
        score = score * key_scale
        if softcap > 0.0:
            score = zl.tanh(score / softcap) * softcap
        score = score * LOG2E if base + lane <= position else zl.f32(FLOOR)
        new = max(high, zl.warp_max(score))
        shrink = zl.exp2(high - new)
        weight = zl.exp2(score - new) if base + lane <= position else zl.f32(0)
        high = new + 0.0
        mass = zl.fma(mass, shrink, weight)
        for c in zl.static(range(columns)):
            acc[c] = acc[c] * shrink
        if is_packed(KV):
            weight = weight * value_scale
        for k in range(0, min(32, position + 1 - base)):
            share = zl.shuffle(weight, k)
            its_slot = zl.shuffle(slot, k)
            if is_packed(KV):
                row = v_pages + (zl.i64(its_slot // BLOCK) * page_nbytes(D, 1) + (its_slot % BLOCK * D + lane))
            else:
                row = v_pages + (zl.i64(its_slot) * D + lane)
            for c in zl.static(range(columns)):
                acc[c] = zl.fma(share, zl.f32(row[c * 32]), acc[c])
    mass = zl.warp_sum(mass)
    if lane == 0:
        maxima[warp] = high
        masses[warp] = mass
    for c in zl.static(range(columns)):
        parts[warp * D + c * 32 + lane] = acc[c]
    zl.barrier()
    top = maxima[0]
    for n in zl.static(range(1, warps)):
        top = max(top, maxima[n])
    total = zl.f32(0)
    factors = [zl.exp2(maxima[n] - top) for n in zl.static(range(warps))]
    for n in zl.static(range(warps)):
        total = zl.fma(masses[n], factors[n], total)
    for d in range(zl.thread_index(), D, zl.target.threads):
        value = zl.f32(0)
        for n in zl.static(range(warps)):
            value = zl.fma(parts[n * D + d], factors[n], value)
        out[place + d] = zl.convert(value / total, zl.bf16)


def symbol_of(kv: str, head_dim: int) -> str:
    return f"attention_simple_{kv}_d{head_dim}"


def simple_variants(target) -> list[zl.Variant]:
    """head_dim x dtype of the pages."""
    return [
        zl.Variant(symbol_of(name, dim), attention_simple, {"D": dim, "KV": dtype}, threads=THREADS)
        for name, dtype in KV_TYPES.items()
        for dim in HEAD_DIMS
    ]
