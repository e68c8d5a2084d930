"""The small kernels of a step: its token ids, copies of rows, rotary tables."""

from zse.kernel import (
    Ptr,
    Variant,
    block_index,
    cos,
    f32,
    fma,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    kernel,
    load,
    round_even,
    sin,
    store,
    target,
    thread_index,
    u32,
)

FEED_THREADS = 128
COPY_THREADS = 256
ROPE_THREADS = 128
PAGE = 16
# 2 pi in three parts of 24 bits each (Cody and Waite): with fused multiply-adds the reduction is exact to f32.
TWO_PI = (6.2831854820251465, -1.7484555314695172e-07, -6.8604980400235275e-15)


@kernel
def feed_tokens_gpu(
    token_ids: Ptr[i32],
    source: Ptr[i32, "const"],
    sampled: Ptr[i32, "const"],
    positions: Ptr[i32, "const"],
    token_row: Ptr[i32, "const"],
    page_table: Ptr[i32, "const"],
    history: Ptr[i32],
    count: i32,
    max_pages: i32,
    blocks_per_page: i32,
):
    """Grid (chunks of tokens)."""
    grid_launch_dependents()
    grid_wait()
    at = block_index(0) * target.threads + thread_index()
    if at < count:
        token = token_ids[at]
        place = source[at]
        if place >= 0:
            token = sampled[place]
            token_ids[at] = token
        if blocks_per_page > 0:
            position = positions[at]
            block = page_table[i64(token_row[at]) * max_pages + position // PAGE]
            history[i64(block // blocks_per_page) * PAGE + position % PAGE] = token


@kernel
def gather_rows_gpu(x: Ptr[u32, "const"], rows: Ptr[i32, "const"], out: Ptr[u32], words: i32):
    """Grid (rows); rows of `words` 4-byte words."""
    grid_launch_dependents()
    grid_wait()
    t = thread_index()
    source = x + i64(rows[block_index(0)]) * words
    destination = out + i64(block_index(0)) * words
    if words % 4 == 0:
        for k in range(t * 4, words, target.threads * 4):
            store(destination + k, load(source + k, 4))
    else:
        for k in range(t, words, target.threads):
            destination[k] = source[k]


@kernel
def rope_table_gpu(positions: Ptr[i32, "const"], inv_freq: Ptr[f32, "const"], out: Ptr[f32], half: i32, mscale: f32):
    """Grid (tokens). The angle is the f32 product that the models were trained with, brought into [-pi, pi]."""
    # In this order: what starts after this kernel may rely on all kernels before it (attention reads its plan early).
    grid_wait()
    grid_launch_dependents()
    position = f32(positions[block_index(0)])
    row = out + i64(block_index(0)) * 2 * half
    for i in range(thread_index(), half, target.threads):
        angle = inv_freq[i] * position
        turns = round_even(angle * (1 / 6.283185307179586)) * -1.0
        reduced = fma(turns, TWO_PI[2], fma(turns, TWO_PI[1], fma(turns, TWO_PI[0], angle)))
        row[i] = cos(reduced) * mscale
        row[half + i] = sin(reduced) * mscale


def feed_variants(target):
    return [Variant("feed_tokens", feed_tokens_gpu, threads=FEED_THREADS)]


def gather_variants(target):
    return [Variant("gather_rows", gather_rows_gpu, threads=COPY_THREADS)]


def rope_variants(target):
    return [Variant("rope_table", rope_table_gpu, threads=ROPE_THREADS)]
