"""Causal attention over paged latents (DeepSeek-V2, arXiv 2405.04434, absorbed form): all heads share one key a token,
whose first `rank` numbers are its value, so that queries come and results go in the latents' space.

A CPU's block takes one tile: heads of neighbouring tokens, as attention_kernels.py has it, whose softmax, sums over
values and merging of segments serve here too. Pages have tokens as lines: scores are dot products along lanes."""

from typing import Any

from zse import kernel as zl
from zse.kernels import attention_kernels as tiles
from zse.kernels.attention import KV_DTYPES, MAX_RANK, MAX_ROWS, SEGMENT, split_args
from zse.kernels.kv_pages import BLOCK, SCALE_BYTES, widen
from zse.kernels.latent_post import check_latent
from zse.kernels.op import Op, cases_of, check, later, launcher, require
from zse.runtime.args import Args

ROWS = 4  # query rows that a pass computes together


class LatentTile(zl.Record):
    """Parameters of latent_attention_tile. group: heads of a block. splits: 1, or at least the number of segments."""

    q: zl.Ptr[zl.f32, "const"]
    q_rotated: zl.Ptr[zl.f32, "const"]
    pages: zl.Ptr[zl.u8, "const"]
    page_table: zl.Ptr[zl.i32, "const"]
    token_row: zl.Ptr[zl.i32, "const"]
    positions: zl.Ptr[zl.i32, "const"]
    out: zl.Ptr[zl.f32]
    partial: zl.Ptr[zl.f32]
    tokens: zl.i64
    max_pages: zl.i64
    max_segments: zl.i64
    splits: zl.i64
    heads: zl.i64
    group: zl.i64
    head_dim: zl.i64
    rotary: zl.i64
    scale: zl.f32
    beta: zl.f32
    length: zl.i64
    R: zl.static
    KV: zl.static


@zl.inline
def latent_pages(p, row, num_keys):
    """A sequence's pages; values are the beginnings of the keys."""
    STORED = zl.u8 if p.KV is zl.e4m3 else p.KV
    width = p.head_dim + p.rotary
    stored = zl.cast_ptr(p.pages, STORED)
    size = width * BLOCK + (2 * SCALE_BYTES if tiles.is_scaled(p.KV) else 0)
    table = p.page_table + zl.i64(row) * p.max_pages
    return tiles.HeadPages(table, zl.i64(0), (num_keys - 1) // BLOCK, stored, stored, size, width, p.KV)


@zl.inline
def dots(sums, queries, lines, first, end, line, KEYS, KV):
    """sums[r][t] += q_r · key t over the numbers first .. end - 1, which lie at `lines` for tokens `line` numbers
    apart."""
    L = zl.target.lanes
    for d in range(first, end, L):
        keys = [widen(zl.load(lines + t * line + d, L), KV) for t in zl.static(range(KEYS))]
        for r in zl.static(range(len(queries))):
            query = zl.load(queries[r] + (d - first), L)
            for t in zl.static(range(KEYS)):
                sums[r][t] = zl.fma(query, keys[t], sums[r][t])


@zl.inline
def latent_scores(p, pages, segment, queries, turned, scales, scores):
    """The scores of a segment's keys for R query rows, times `scales`. Those of a page that no token has are computed
    and hidden later."""
    L = zl.target.lanes
    KEYS = 4 if L == 16 else 2  # R * KEYS sums in registers: AVX2 has 16, the others 32
    before, after = tiles.units_of(p, pages)
    for key in range(segment.begin, segment.stop, KEYS):
        page = pages.keys + tiles.page_offset(pages, key // BLOCK)
        lines = page + key % BLOCK * pages.line
        sums = [[zl.f32.x(L)(0) for _ in range(KEYS)] for _ in range(p.R)]
        dots(sums, queries, lines, 0, p.head_dim, pages.line, KEYS, p.KV)
        if tiles.is_scaled(p.KV):
            units = zl.cast_ptr(page + pages.line * BLOCK, zl.f32) + key % BLOCK
            for r in zl.static(range(p.R)):
                for t in zl.static(range(KEYS)):
                    sums[r][t] = sums[r][t] * (units[t] * before)
            rest = [[zl.f32.x(L)(0) for _ in range(KEYS)] for _ in range(p.R)]
            dots(rest, turned, lines, p.head_dim, p.head_dim + p.rotary, pages.line, KEYS, p.KV)
            for r in zl.static(range(p.R)):
                for t in zl.static(range(KEYS)):
                    sums[r][t] = zl.fma(rest[r][t], zl.splat(units[BLOCK + t] * before, L), sums[r][t])
        else:
            dots(sums, turned, lines, p.head_dim, p.head_dim + p.rotary, pages.line, KEYS, p.KV)
        for r in zl.static(range(p.R)):
            for t in zl.static(range(KEYS)):
                scores[r * SEGMENT + key - segment.start + t] = zl.reduce_add(sums[r][t]) * (scales[r] * after)


@zl.inline
def attend(p, pages, segment, token, first_head, group, rows, sub, work):
    """Query rows sub .. sub + R - 1 of a tile over a segment; beyond the last one the last is computed again and its
    copies are dropped."""
    L, R = zl.target.lanes, p.R
    VECTORS = 2 if L == 8 else 4  # sums in registers, as above
    which = [min(sub + r, rows - 1) for r in zl.static(range(R))]
    places = [(token + which[r] // group) * p.heads + first_head + which[r] % group for r in zl.static(range(R))]
    queries = [p.q + places[r] * p.head_dim for r in zl.static(range(R))]
    turned = [p.q_rotated + places[r] * p.rotary for r in zl.static(range(R))]
    places_of = [zl.i64(p.positions[token + which[r] // group]) for r in zl.static(range(R))]
    scales = [p.scale * (1.0 + p.beta * zl.log(zl.f32(1 + places_of[r] // p.length))) for r in zl.static(range(R))]
    latent_scores(p, pages, segment, queries, turned, scales, work.scores)
    for r in zl.static(range(R)):
        for hidden in range(max(places_of[r] + 1, segment.begin), segment.padded):
            work.scores[r * SEGMENT + hidden - segment.start] = tiles.MASKED
    tiles.add_values(p, pages, segment, sub, work, VECTORS)


@zl.kernel
def latent_attention_tile(p: LatentTile):
    """Grid (blocks of heads, tokens, splits)."""
    L = zl.target.lanes
    first_head = zl.block_index(0) * p.group
    group = min(p.group, p.heads - first_head)
    token = zl.block_index(1)
    row = p.token_row[token]
    position = zl.i64(p.positions[token])
    tile = MAX_ROWS // p.group
    if token > 0 and position % tile != 0:
        if p.token_row[token - 1] == row:
            return  # another token leads this tile
    count = zl.i64(1)
    room = min(tile - position % tile, p.tokens - token)
    while count < room and p.token_row[token + count] == row:
        count += 1
    num_keys = zl.i64(p.positions[token + count - 1]) + 1
    first_segment = zl.i64(0)
    last_segment = (num_keys - 1) // SEGMENT
    if p.splits > 1:
        if zl.block_index(2) > last_segment:
            return
        first_segment = zl.block_index(2)
        last_segment = zl.block_index(2)
    rows = count * group
    pages = latent_pages(p, row, num_keys)
    work = tiles.TileWork(
        zl.local_array(zl.f32, ROWS * SEGMENT),
        zl.local_array(zl.f32, (MAX_ROWS + ROWS) * MAX_RANK),
        zl.local_array(zl.f32, MAX_ROWS + ROWS),
        zl.local_array(zl.f32, MAX_ROWS + ROWS),
    )
    for i in range(0, (rows + p.R - 1) // p.R * p.R):
        work.maxima[i] = tiles.FLOOR
        work.totals[i] = 0.0
        for d in range(0, p.head_dim, L):
            zl.store(work.state + i * p.head_dim + d, zl.f32.x(L)(0))
    for index in range(first_segment, last_segment + 1):
        segment = tiles.segment_of(index, zl.i64(0), num_keys, pages)
        for sub in range(0, rows, p.R):
            attend(p, pages, segment, token, first_head, group, rows, sub, work)
    for i in range(rows):
        place = (token + i // group) * p.heads + first_head + i % group
        state = work.state + i * p.head_dim
        if p.splits > 1:
            record = p.partial + (place * p.max_segments + first_segment) * (p.head_dim + BLOCK)
            for d in range(0, p.head_dim, L):
                zl.store(record + d, zl.load(state + d, L))
            record[p.head_dim] = work.maxima[i]
            record[p.head_dim + 1] = work.totals[i]
        else:
            inverse = 1.0 / work.totals[i]
            for d in range(0, p.head_dim, L):
                zl.store(p.out + place * p.head_dim + d, zl.load(state + d, L) * inverse)


def head_blocks(heads: int) -> int:
    """Blocks that a token's heads are shared among."""
    return -(-heads // MAX_ROWS)


def _latent_attention(
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
    splits: Any = 1,
    partial=None,
    temperature: tuple = (0.0, 1),
) -> None:
    """Causal attention of M tokens, whose latents are already in their pages.

    q f32 [M, H * rank], q_rotated f32 [M, H * rotary]: what meets the latents and the keys that turn. pages [P, 16,
    rank + rotary], f16 or f32, or packed i8 or e4m3 (kv_pages.py); page_table i32 [rows, max_pages]; token_row,
    positions i32 [M] (tokens of a row stand together, positions ascending by one); out f32 [M, H * rank]. scale: of the
    scores. temperature: (beta, length): times 1 + beta * ln(1 + position // length) of the query's. splits: int or Sym,
    from Planner.symbols(); other than 1 it needs partial, f32 of partial_shape(). rank and rotary are multiples of 16,
    rank at most 512."""
    tokens, width = q.shape
    line = check_latent("latent_attention", pages, page_table, token_row, positions, tuple(KV_DTYPES), tokens)
    rank = width // heads
    rotary = line - rank
    for name, size in (("rank", rank), ("dimensions that turn", rotary)):
        require(
            size % 16 == 0 and 0 < size <= MAX_RANK, f"latent_attention: {name} {size}: not a multiple of 16 up to 512"
        )
    check("latent_attention q", q, "f32", tokens, heads * rank)
    check("latent_attention q_rotated", q_rotated, "f32", tokens, heads * rotary)
    check("latent_attention out", out, "f32", tokens, heads * rank)
    blocks = head_blocks(heads)
    common = dict(positions=positions, out=out, heads=heads, head_dim=rank)
    common |= split_args("latent_attention", splits, partial, page_table, heads, rank)
    args = Args(
        **common,
        q=q,
        q_rotated=q_rotated,
        pages=pages,
        page_table=page_table,
        token_row=token_row,
        tokens=tokens,
        max_pages=page_table.shape[1],
        group=-(-heads // blocks),
        rotary=rotary,
        scale=float(scale),
        beta=float(temperature[0]),
        length=temperature[1],
    )
    recorder.launch(f"latent_attention_{pages.dtype}", args, (blocks, tokens, splits))
    if splits != 1:
        args = Args(**common, oq=None, oscale=None, osum=None, window=0, sinks=None, has_sinks=0)
        recorder.launch("attention_combine_f32", args, (heads, tokens))


latent_attention = launcher(cpu=_latent_attention, gpu=later("gpu.latent_attention", "record"))


def _variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"latent_attention_{name}", latent_attention_tile, {"R": ROWS, "KV": dtype})
        for name, dtype in KV_DTYPES.items()
    ]


LATENT_ATTENTION = Op(
    "latent_attention",
    _variants,
    latent_attention,
    later("latent_cases", "attention_reference"),
    cases_of(cpu=later("latent_cases", "cpu_cases"), gpu=later("latent_cases", "gpu_cases")),
    later("latent_cases", "attention_cost"),
    later("gpu.latent_attention", "variants"),
)
