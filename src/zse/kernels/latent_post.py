"""What stands between the projections and attention where keys and values are latents (DeepSeek-V2, arXiv 2405.04434):
the norm of the latent, RoPE of the key that all heads share and of every query's part that meets it, and the write to
the pages."""

from collections.abc import Callable
from functools import partial
from typing import Any

from zse import kernel as zl
from zse.kernels import attention_cases, latent_cases
from zse.kernels.attention import KV_DTYPES, MAX_RANK
from zse.kernels.kv_pages import BLOCK, PACKED, SCALE_BYTES, latent_shape, pack_head
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.kernels.qkv_post import LANES, head_factor
from zse.lazy import numpy as np
from zse.runtime.args import Args

MAX_WIDTH = MAX_RANK + 128  # numbers of a token in the pages
PAGES = {"cpu": tuple(KV_DTYPES), "gpu": ("bf16", "f16", *PACKED)}  # dtypes by kind of device
GRIDS: dict[str, Callable[[int, Any], tuple]] = {
    "cpu": lambda heads, tokens: (tokens,),
    "gpu": lambda heads, tokens: (tokens, heads // 4 + 1),  # a warp for each head and one for the latent
}


class LatentPost(zl.Record):
    """Parameters of latent_post. PAIRS: neighbours turn together."""

    q: zl.Ptr[zl.f32, "const"]
    kv: zl.Ptr[zl.f32, "const"]
    norm: zl.Ptr[zl.f32, "const"]
    table: zl.Ptr[zl.f32, "const"]
    q_out: zl.Ptr[zl.f32]
    pages: zl.Ptr[zl.u8]
    page_table: zl.Ptr[zl.i32, "const"]
    max_pages: zl.index
    token_row: zl.Ptr[zl.i32, "const"]
    positions: zl.Ptr[zl.i32, "const"]
    heads: zl.index
    head_dim: zl.index
    rank: zl.index
    rotary: zl.index
    eps: zl.f32
    KV: zl.static
    PAIRS: zl.static


@zl.inline
def turn(x, table, out, rotary, PAIRS):
    """out = rope(x): what turns together stands half of it apart there, as it may in x."""
    half = rotary // 2
    for i in range(half):
        a = x[2 * i] if PAIRS else x[i]
        b = x[2 * i + 1] if PAIRS else x[half + i]
        out[i] = a * table[i] - b * table[half + i]
        out[half + i] = b * table[i] + a * table[half + i]


@zl.kernel
def latent_post_token(p: LatentPost):
    """Grid (tokens)."""
    token = zl.block_index(0)
    table = p.table + token * p.rotary
    for head in range(p.heads):
        at = token * p.heads + head
        query = p.q + (at * p.head_dim + p.head_dim - p.rotary)
        turn(query, table, p.q_out + at * p.rotary, p.rotary, p.PAIRS)
    width = p.rank + p.rotary
    x = p.kv + token * width
    line = zl.local_array(zl.f32, MAX_WIDTH)
    factor = head_factor(x, p.rank, p.eps)
    for d in range(0, p.rank, LANES):
        zl.store(line + d, zl.load(x + d, LANES) * factor * zl.load(p.norm + d, LANES))
    turn(x + p.rank, table, line + p.rank, p.rotary, p.PAIRS)
    position = zl.i64(p.positions[token])
    slot = position % BLOCK
    page = zl.i64(p.page_table[zl.i64(p.token_row[token]) * p.max_pages + position // BLOCK])
    if p.KV is zl.i8 or p.KV is zl.e4m3:
        here = p.pages + page * (width * BLOCK + 2 * SCALE_BYTES)
        scales = zl.cast_ptr(here + width * BLOCK, zl.f32) + slot
        stored = zl.cast_ptr(here + slot * width, zl.u8 if p.KV is zl.e4m3 else zl.i8)
        pack_head(line, stored, scales, p.rank, LANES, p.KV)
        pack_head(line + p.rank, stored + p.rank, scales + BLOCK, p.rotary, LANES, p.KV)
    else:
        numbers = zl.cast_ptr(p.pages, p.KV) + (page * BLOCK + slot) * width
        for d in range(0, width, LANES):
            zl.store(numbers + d, zl.convert(zl.load(line + d, LANES), p.KV))


def check_latent(op: str, pages, page_table, token_row, positions, dtypes, tokens) -> int:
    """Numbers of a token in the pages; TypeError or ValueError for what is no batch over them."""
    packed = pages.dtype in PACKED
    width = (pages.shape[-1] - 2 * SCALE_BYTES) // BLOCK if packed else pages.shape[-1]
    check(f"{op} pages", pages, dtypes, None, *latent_shape(width, pages.dtype))
    check(f"{op} page_table", page_table, "i32", None, None)
    for name, tensor in (("token_row", token_row), ("positions", positions)):
        check(f"{op} {name}", tensor, "i32", tokens)
    return width


def latent_post(
    recorder, q, kv, norm, table, q_out, pages, page_table, token_row, positions, heads: int, eps: float, pairs=False
) -> None:
    """Writes q_out f32 [M, H * rotary], the queries' parts that turn, and the latents of M tokens into their pages.

    Args:
        q: f32 [M, H * D], of whose heads the last `rotary` numbers turn.
        kv: f32 [M, rank + rotary]; norm: f32 [rank], RMSNorm of the first; the others turn.
        table: f32 [M, rotary] of rope_table.
        pages: [P, 16, rank + rotary], f16, on a CPU f32, on a GPU bf16; or packed i8 or e4m3 (kv_pages.py).
        page_table: i32 [rows, max_pages]; token_row, positions: i32 [M].
        pairs: neighbours (2i, 2i + 1) turn together, not halves.
    """
    tokens, q_width = q.shape
    family = recorder.device.kernels
    width = check_latent("latent_post", pages, page_table, token_row, positions, PAGES[family], tokens)
    (rank,) = norm.shape
    rotary = width - rank
    require(
        rank % 16 == 0 and 0 < rank <= MAX_RANK, f"latent_post: rank {rank} is not a multiple of 16 up to {MAX_RANK}"
    )
    require(
        rotary % 16 == 0 and 0 < rotary <= MAX_WIDTH - MAX_RANK,
        f"latent_post: {rotary} dimensions that turn: not a multiple of 16 up to {MAX_WIDTH - MAX_RANK}",
    )
    require(heads > 0 and q_width % heads == 0, f"latent_post: q is {q_width} wide, {heads} heads")
    check("latent_post q", q, "f32", tokens, q_width)
    check("latent_post kv", kv, "f32", tokens, width)
    check("latent_post norm", norm, "f32", rank)
    check("latent_post table", table, "f32", tokens, rotary)
    check("latent_post q_out", q_out, "f32", tokens, heads * rotary)
    args = Args(
        q=q,
        kv=kv,
        norm=norm,
        table=table,
        q_out=q_out,
        pages=pages,
        page_table=page_table,
        max_pages=page_table.shape[1],
        token_row=token_row,
        positions=positions,
        heads=heads,
        head_dim=q_width // heads,
        rank=rank,
        rotary=rotary,
        eps=float(eps),
    )
    recorder.launch(f"latent_post_{pages.dtype}_{'pairs' if pairs else 'halves'}", args, GRIDS[family](heads, tokens))


def _reference(q, kv, norm, table, pages, page_table, token_row, positions, heads, eps, pairs=False, q_out=None):
    q, kv, table = (np.asarray(x, np.float64) for x in (q, kv, table))
    rotary, rank = table.shape[1], norm.size
    half = rotary // 2

    def turned(x):
        a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
        c, s = (part.reshape(len(part), *[1] * (x.ndim - 2), half) for part in np.split(table, 2, axis=1))
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    latent = kv[:, :rank]
    latent = latent / np.sqrt((latent * latent).mean(axis=1, keepdims=True) + eps) * norm.astype(np.float64)
    lines = np.concatenate([latent, turned(kv[:, rank:])], axis=1)
    queries = turned(q.reshape(len(q), heads, -1)[..., -rotary:]).reshape(len(q), -1)
    if pages.ndim == 2:  # packed: what is written, without its places
        return {"q_out": queries, "pages": lines}
    wide = attention_cases.wide_pages(pages)
    for line, row, position in zip(lines, token_row, positions, strict=True):
        wide[page_table[row, position // BLOCK], position % BLOCK] = line
    return {"q_out": queries, "pages": wide}


def _cases(rng, family="cpu"):
    for dtype in PAGES[family]:
        for heads, nope, rotary, rank, pairs in (
            (5, 32, 16, 48, False),
            (16, 128, 64, 512, True),
            (3, 16, 32, 256, True),
        ):
            tokens, rows, max_pages, count = 5, 3, 4, 13
            width, packed = rank + rotary, dtype in PACKED
            angle = rng.uniform(-3, 3, (tokens, rotary // 2))
            page_table = rng.permutation(count)[: rows * max_pages].reshape(rows, max_pages).astype(np.int32)
            pages = latent_cases.random_latents(rng, count, rank, rotary, dtype)
            near = Tolerance(1e-6, 2e-6, "norm and rotation in f32")
            rounding = {"f16": 2.0**-11, "bf16": 2.0**-8}.get(dtype)
            stored = Tolerance(1e-6, 1.1 * rounding, f"rounded once to {dtype}") if rounding else near
            inputs = {
                "q": rng.standard_normal((tokens, heads * (nope + rotary))).astype(np.float32),
                "kv": rng.standard_normal((tokens, width)).astype(np.float32),
                "norm": (1 + rng.standard_normal(rank) / 4).astype(np.float32),
                "table": np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32),
                "page_table": page_table,
                "token_row": np.array([0, 0, 1, 2, 2], np.int32),
                "positions": np.array([15, 16, 0, 62, 63], np.int32),
            }
            error = None
            if packed:
                error = partial(latent_cases.packed_latents_error, initial=pages, inputs=inputs, rank=rank, dtype=dtype)
            outputs = {
                "q_out": OutputSpec((tokens, heads * rotary), "float32", near),
                "pages": OutputSpec(
                    pages.shape,
                    dtype if dtype in ("e4m3", "bf16") else pages.dtype.name,
                    stored,
                    inout=pages,
                    error=error,
                ),
            }
            name = f"{dtype} {heads} heads of {nope}+{rotary}, rank {rank}{', pairs' if pairs else ''}"
            yield Case(name, inputs, outputs, {"heads": heads, "eps": 1e-6, "pairs": pairs})


def _cost(case: Case) -> Cost:
    numbers = case.inputs["q"].size + case.inputs["kv"].size
    return Cost(8 * numbers, 6 * numbers)


def _variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"latent_post_{name}_{form}", latent_post_token, {"KV": dtype, "PAIRS": form == "pairs"})
        for name, dtype in KV_DTYPES.items()
        for form in ("pairs", "halves")
    ]


LATENT_POST = Op(
    "latent_post", _variants, latent_post, _reference, _cases, _cost, later("gpu.latent_post", "latent_post_variants")
)
