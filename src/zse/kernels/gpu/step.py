"""The small kernels of a step: its token ids, copies of rows, rotary tables."""

from zse import kernel as zl
from zse.kernels.feed import CHUNKS, Feeding
from zse.kernels.kv_pages import BLOCK
from zse.kernels.layer_inputs import HALF, LayerInputs, NormSum
from zse.kernels.rope import TWO_PI, RopeTable

FEED_THREADS = CHUNKS["gpu"]
COPY_THREADS = 256
ROPE_THREADS = 128
LOGIT_THREADS = 256


@zl.kernel
def feed_tokens_gpu(p: Feeding):
    """Grid (chunks of tokens)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    at = zl.block_index(0) * zl.target.threads + zl.thread_index()
    if at < p.count:
        token = p.token_ids[at]
        place = p.source[at]
        if place >= 0:
            token = p.sampled[place]
            p.token_ids[at] = token
        if p.blocks_per_page > 0:
            position = p.positions[at]
            block = p.page_table[zl.i64(p.token_row[at]) * p.max_pages + position // BLOCK]
            p.history[zl.i64(block // p.blocks_per_page) * BLOCK + position % BLOCK] = token


@zl.kernel
def gather_rows_gpu(x: zl.Ptr[zl.u32, "const"], rows: zl.Ptr[zl.i32, "const"], out: zl.Ptr[zl.u32], words: zl.i32):
    """Grid (rows); rows of `words` 4-byte words."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    t = zl.thread_index()
    source = x + zl.i64(rows[zl.block_index(0)]) * words
    destination = out + zl.i64(zl.block_index(0)) * words
    if words % 4 == 0:
        for k in range(t * 4, words, zl.target.threads * 4):
            zl.store(destination + k, zl.load(source + k, 4))
    else:
        for k in range(t, words, zl.target.threads):
            destination[k] = source[k]


@zl.inline
def rope_row(position, row, p):
    """The rotations of a position, by a block. The angle is the f32 product that the models were trained with, brought into
    [-pi, pi]."""
    factor = p.mscale * (1.0 + p.beta * zl.log(zl.f32(1 + position // p.length)))
    for i in range(zl.thread_index(), p.pairs, zl.target.threads):
        angle = p.inv_freq[i] * zl.f32(position)
        turns = zl.round_even(angle * (1 / 6.283185307179586)) * -1.0
        reduced = zl.fma(turns, TWO_PI[2], zl.fma(turns, TWO_PI[1], zl.fma(turns, TWO_PI[0], angle)))
        row[i] = zl.cos(reduced) * factor
        row[p.pairs + i] = zl.sin(reduced) * factor


@zl.kernel
def rope_table_gpu(p: RopeTable):
    """Grid (tokens)."""
    # In this order: what starts after this kernel may rely on all kernels before it (attention reads its plan early).
    zl.grid_wait()
    zl.grid_launch_dependents()
    rope_row(p.positions[zl.block_index(0)], p.out + zl.i64(zl.block_index(0)) * 2 * p.pairs, p)


@zl.kernel
def scale_logits_gpu(logits: zl.Ptr[zl.f32], width: zl.i32, scale: zl.f32, cap: zl.f32, CAP: zl.static):
    """Grid (chunks of columns, rows)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    row = logits + zl.i64(zl.block_index(1)) * width
    for k in range(
        zl.block_index(0) * zl.target.threads + zl.thread_index(), width, zl.num_blocks(0) * zl.target.threads
    ):
        value = row[k] * scale
        row[k] = zl.tanh(value) * cap if CAP else value


@zl.kernel
def layer_inputs_gpu(p: LayerInputs):
    """Grid (layers, tokens), of one warp each."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    layer, token = zl.block_index(0), zl.i64(zl.block_index(1))
    at = (token * p.layers + layer) * p.width
    squares = zl.f32(0)
    for i in range(zl.thread_index(), p.width, zl.target.threads):
        squares = zl.fma(p.product[at + i], p.product[at + i], squares)
    factor = zl.rsqrt(zl.warp_sum(squares) / zl.f32(p.width) + p.eps)
    to = p.out + (layer * p.stride + token * p.width)
    for i in range(zl.thread_index(), p.width, zl.target.threads):
        to[i] = (p.product[at + i] * factor * p.norm[i] + p.rows[at + i]) * HALF


@zl.kernel
def scale_rows_gpu(x: zl.Ptr[zl.f32], factor: zl.Ptr[zl.f32, "const"], width: zl.i32):
    """Grid (chunks of columns, rows)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    row = x + zl.i64(zl.block_index(1)) * width
    for k in range(
        zl.block_index(0) * zl.target.threads + zl.thread_index(), width, zl.num_blocks(0) * zl.target.threads
    ):
        row[k] = row[k] * factor[0]


@zl.kernel
def norm_sum_gpu(p: NormSum):
    """Grid (rows,), of one warp each."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    at = zl.i64(zl.block_index(0)) * p.width
    of_a, of_b = zl.f32(0), zl.f32(0)
    for k in range(zl.thread_index(), p.width, zl.target.threads):
        of_a = zl.fma(p.a[at + k], p.a[at + k], of_a)
        of_b = zl.fma(p.b[at + k], p.b[at + k], of_b)
    of_a = zl.rsqrt(zl.warp_sum(of_a) / zl.f32(p.width) + p.eps)
    of_b = zl.rsqrt(zl.warp_sum(of_b) / zl.f32(p.width) + p.eps)
    for k in range(zl.thread_index(), p.width, zl.target.threads):
        p.out[at + k] = p.a[at + k] * of_a * p.a_weight[k] + p.b[at + k] * of_b * p.b_weight[k]


@zl.kernel
def scale_choices_gpu(
    ids: zl.Ptr[zl.i32, "const"], weights: zl.Ptr[zl.f32], factors: zl.Ptr[zl.f32, "const"], chosen: zl.i32
):
    """Grid (tokens,), of one warp each."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    first = zl.i64(zl.block_index(0)) * chosen
    for j in range(zl.thread_index(), chosen, zl.target.threads):
        weights[first + j] = weights[first + j] * factors[ids[first + j]]


def norm_sum_variants(target):
    return [zl.Variant("norm_sum", norm_sum_gpu, threads=target.warp)]


def scale_choice_variants(target):
    return [zl.Variant("scale_choices", scale_choices_gpu, threads=target.warp)]


def layer_input_variants(target):
    return [zl.Variant("layer_inputs", layer_inputs_gpu, threads=target.warp)]


def scale_row_variants(target):
    return [zl.Variant("scale_rows", scale_rows_gpu, threads=LOGIT_THREADS)]


def feed_variants(target):
    return [zl.Variant("feed_tokens", feed_tokens_gpu, threads=FEED_THREADS)]


def gather_variants(target):
    return [zl.Variant("gather_rows", gather_rows_gpu, threads=COPY_THREADS)]


def rope_variants(target):
    return [zl.Variant("rope_table", rope_table_gpu, threads=ROPE_THREADS)]


def logit_variants(target):
    return [
        zl.Variant(f"scale_logits{suffix}", scale_logits_gpu, {"CAP": bool(suffix)}, threads=LOGIT_THREADS)
        for suffix in ("", "_cap")
    ]
