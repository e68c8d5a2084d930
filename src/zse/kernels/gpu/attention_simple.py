"""Attention for GPUs without matrix instructions in the language (HIP, Metal): one block is one token's query head.

The warps take 32 keys in turn. A lane computes one key's score; the weights then go around the warp while the lanes add up 32 neighbouring
dimensions of the values at a time. Running maxima as in Milakov and Gimelshein 2018; the warps' parts are merged in their order. What a
row gets depends on its own position only, so that it is the same bits alone, batched and in chunks.
"""

from zse.kernel import (
    Ptr,
    Variant,
    barrier,
    bf16,
    block_index,
    cast_ptr,
    convert,
    exp2,
    f16,
    f32,
    fma,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    kernel,
    lane_index,
    load,
    shared_array,
    shuffle,
    static,
    tanh,
    target,
    thread_index,
    unroll,
    warp_index,
    warp_max,
    warp_sum,
)
from zse.kernels.gpu.attention_plan import HEAD_DIMS, PAGE
from zse.kernels.gpu.kv8 import is_packed, page_nbytes
from zse.kernels.kv_pages import PACKED

THREADS = 128
LOG2E = 1.4426950408889634
FLOOR = -1.0e30  # the running maximum before any key
KV_TYPES = {"bf16": bf16, "f16": f16, **PACKED}


@kernel
def attention_simple(
    q: Ptr[bf16, "const"],
    k_pages: Ptr["KV", "const"],
    v_pages: Ptr["KV", "const"],
    page_table: Ptr[i32, "const"],
    token_row: Ptr[i32, "const"],
    positions: Ptr[i32, "const"],
    out: Ptr[bf16],
    max_pages: i32,
    kv_heads: i32,
    group: i32,
    scale: f32,
    window: i32,
    softcap: f32,
    D: static,
    KV: static,
):
    """Grid (query heads, tokens)."""
    warps = target.threads // target.warp
    columns = D // 32
    query = shared_array(f32, D)
    parts = shared_array(f32, warps * D)
    maxima = shared_array(f32, warps)
    masses = shared_array(f32, warps)
    grid_launch_dependents()
    grid_wait()
    lane = lane_index()
    warp = warp_index()
    head = block_index(0) // group
    token = block_index(1)
    place = (i64(token) * (kv_heads * group) + block_index(0)) * D
    position = positions[token]
    begin = max(position + 1 - window, 0) if window > 0 else i32(0)
    table = page_table + i64(token_row[token]) * max_pages
    for d in range(thread_index(), D, target.threads):
        query[d] = f32(q[place + d])
    barrier()

    high = f32(FLOOR)
    mass = f32(0)
    acc = [f32(0) for c in static(range(columns))]
    for base in range(begin + warp * 32, position + 1, warps * 32):
        key = min(base + lane, position)
        slot = (table[key // PAGE] * kv_heads + head) * PAGE + key % PAGE
        if is_packed(KV):
            at = i64(slot // PAGE) * page_nbytes(D, 1)
            keys = k_pages + (at + slot % PAGE * D)
            key_scale = scale * cast_ptr(k_pages + (at + PAGE * D), f32)[slot % PAGE]
            value_scale = cast_ptr(v_pages + (at + PAGE * D), f32)[slot % PAGE]
        else:
            keys = k_pages + i64(slot) * D
            key_scale = scale
        score = f32(0)
        for d in unroll(range(0, D, 8), 4):
            values = convert(load(keys + d, 8), f32)
            for half in static(range(2)):
                wanted = load(query + d + half * 4, 4)
                for e in static(range(4)):
                    score = fma(values[half * 4 + e], wanted[e], score)
        score = score * key_scale
        if softcap > 0.0:
            score = tanh(score / softcap) * softcap
        score = score * LOG2E if base + lane <= position else f32(FLOOR)
        new = max(high, warp_max(score))
        shrink = exp2(high - new)
        weight = exp2(score - new) if base + lane <= position else f32(0)
        high = new + 0.0
        mass = fma(mass, shrink, weight)
        for c in static(range(columns)):
            acc[c] = acc[c] * shrink
        if is_packed(KV):
            weight = weight * value_scale
        for k in range(0, min(32, position + 1 - base)):
            share = shuffle(weight, k)
            its_slot = shuffle(slot, k)
            if is_packed(KV):
                row = v_pages + (i64(its_slot // PAGE) * page_nbytes(D, 1) + (its_slot % PAGE * D + lane))
            else:
                row = v_pages + (i64(its_slot) * D + lane)
            for c in static(range(columns)):
                acc[c] = fma(share, f32(row[c * 32]), acc[c])
    mass = warp_sum(mass)
    if lane == 0:
        maxima[warp] = high
        masses[warp] = mass
    for c in static(range(columns)):
        parts[warp * D + c * 32 + lane] = acc[c]
    barrier()
    top = maxima[0]
    for n in static(range(1, warps)):
        top = max(top, maxima[n])
    total = f32(0)
    factors = [exp2(maxima[n] - top) for n in static(range(warps))]
    for n in static(range(warps)):
        total = fma(masses[n], factors[n], total)
    for d in range(thread_index(), D, target.threads):
        value = f32(0)
        for n in static(range(warps)):
            value = fma(parts[n * D + d], factors[n], value)
        out[place + d] = convert(value / total, bf16)


def symbol_of(kv: str, head_dim: int) -> str:
    return f"attention_simple_{kv}_d{head_dim}"


def simple_variants(target) -> list[Variant]:
    """head_dim x dtype of the pages."""
    return [
        Variant(symbol_of(name, dim), attention_simple, {"D": dim, "KV": dtype}, threads=THREADS)
        for name, dtype in KV_TYPES.items()
        for dim in HEAD_DIMS
    ]
