"""latent_post on a GPU: a warp is one head's query, or the token's latent and key."""

from zse import kernel as zl
from zse.kernels.attention import MAX_RANK
from zse.kernels.gpu.attention_parts import KV_TYPES
from zse.kernels.gpu.kv8 import is_packed
from zse.kernels.gpu.qkv_post import begin_packed, put, put_packed, whole_factor
from zse.kernels.kv_pages import BLOCK, SCALE_BYTES
from zse.kernels.latent_post import LatentPost

THREADS = 128
HELD = MAX_RANK // 64  # pairs of neighbours of a latent that a lane has
TURNED = MAX_RANK // 4 // 64  # and of what turns


@zl.inline
def turned_pair(x, table, at, p):
    """Numbers `at` and `at` + 1 of rope(x), whose halves are what turns together."""
    half = p.rotary // 2
    second = at >= half
    i = at - half if second else at
    values = [zl.f32(0), zl.f32(0)]
    for u in zl.static(range(2)):
        a = x[2 * (i + u)] if p.PAIRS else x[i + u]
        b = x[2 * (i + u) + 1] if p.PAIRS else x[half + i + u]
        c = table[i + u]
        s = table[half + i + u]
        values[u] = zl.fma(b, c, a * s) if second else zl.fma(a, c, b * s * -1.0)
    return values


@zl.inline
def write_line(pairs, size, out, scale, p):
    """`size` numbers, lane by lane pairs of neighbours that are zero where there is none, as stored numbers with one
    scale."""
    if is_packed(p.KV):
        inverse = begin_packed(pairs, scale, p.KV)
    for n, pair in zl.static(enumerate(pairs)):
        at = zl.lane_index() * 2 + n * 64
        if at < size:
            if is_packed(p.KV):
                put_packed(out + at, pair, inverse, p.KV)
            else:
                put(out + at, pair[0], pair[1], p.KV)


@zl.inline
def write_latent(x, out, scale, p):
    """The normed latent."""
    factor = whole_factor(x, p.rank, p.eps)
    pairs = [[zl.f32(0) for u in zl.static(range(2))] for _ in zl.static(range(HELD))]
    for n in zl.static(range(HELD)):
        at = zl.lane_index() * 2 + n * 64
        if at < p.rank:
            values = zl.load(x + at, 2)
            weight = zl.load(p.norm + at, 2)
            for u in zl.static(range(2)):
                pairs[n][u] = values[u] * factor * weight[u]
    write_line(pairs, p.rank, out, scale, p)


@zl.inline
def write_key(x, table, out, scale, p):
    """The key that turns."""
    pairs = [[zl.f32(0) for u in zl.static(range(2))] for _ in zl.static(range(TURNED))]
    for n in zl.static(range(TURNED)):
        at = zl.lane_index() * 2 + n * 64
        if at < p.rotary:
            values = turned_pair(x, table, at, p)
            for u in zl.static(range(2)):
                pairs[n][u] = values[u] + 0.0
    write_line(pairs, p.rotary, out, scale, p)


@zl.kernel
def latent_post_gpu(p: LatentPost):
    """Grid (tokens, (heads + 1) / warps of a block)."""
    zl.grid_wait()
    zl.grid_launch_dependents()
    token = zl.block_index(0)
    head = zl.block_index(1) * (zl.target.threads // zl.target.warp) + zl.warp_index()
    table = p.table + zl.i64(token) * p.rotary
    if head > p.heads:
        return
    if head < p.heads:
        at = zl.i64(token) * p.heads + head
        query = p.q + (at * p.head_dim + (p.head_dim - p.rotary))
        for n in zl.static(range(TURNED)):
            e = zl.lane_index() * 2 + n * 64
            if e < p.rotary:
                values = turned_pair(query, table, e, p)
                zl.store(p.q_out + (at * p.rotary + e), zl.make_vector(values[0], values[1]))
        return
    width = p.rank + p.rotary
    x = p.kv + zl.i64(token) * width
    position = p.positions[token]
    slot = position % BLOCK
    page = zl.i64(p.page_table[zl.i64(p.token_row[token]) * p.max_pages + position // BLOCK])
    scale = None
    key_scale = None
    if is_packed(p.KV):
        begin = p.pages + page * (width * BLOCK + 2 * SCALE_BYTES)
        scale = zl.cast_ptr(begin + width * BLOCK, zl.f32) + slot
        key_scale = scale + BLOCK
        out = zl.cast_ptr(begin + slot * width, p.KV)
    else:
        out = zl.cast_ptr(p.pages, p.KV) + (page * BLOCK + slot) * width
    write_latent(x, out, scale, p)
    write_key(x + p.rank, table, out + p.rank, key_scale, p)


def latent_post_variants(target) -> list[zl.Variant]:
    """dtype of the pages x what turns together."""
    return [
        zl.Variant(
            f"latent_post_{name}_{form}", latent_post_gpu, {"KV": dtype, "PAIRS": form == "pairs"}, threads=THREADS
        )
        for name, dtype in KV_TYPES.items()
        for form in ("pairs", "halves")
    ]
