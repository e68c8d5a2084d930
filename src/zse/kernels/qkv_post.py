"""What stands between the q, k, v projections and attention: QK-norm (of a head, or of the whole vector as in OLMo 2),
V's norm (Gemma 4), RoPE (rotate-half), and writing K and V to pages."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels import attention_cases
from zse.kernels.kv_pages import BLOCK, PACKED, SCALE_BYTES, head_dim_of, pack_head, packed_error, pages_shape
from zse.kernels.op import Case, Cost, HostArray, Op, OutputSpec, Tolerance, check, later, require
from zse.kernels.quantize import MANY_ROWS
from zse.lazy import numpy as np
from zse.runtime.args import Args
from zse.runtime.symbol import most_of
from zse.tensor import Tensor

LANES = 8  # head dimensions and halves of rotary dimensions are multiples of 8
MAX_HEAD_DIM = 512
KV_DTYPES = {"f16": zl.f16, "f32": zl.f32, **PACKED}
GPU_WARP, GPU_THREADS = 32, 128
# What a kernel of a GPU for many tokens takes: heads turned as a whole, in pages that are not packed.
MANY_HEADS, MANY_PAGES, MANY_NORMS = (64, 128, 256), ("bf16", "f16"), ("plain", "norm")
MANY = [f"qkv_post_{pages}_{norm}" for pages in MANY_PAGES for norm in MANY_NORMS]
MANY_CASES = (
    (64, 64, 5, 1, "many"),
    (128, 128, 15, 3, "many"),
    (128, 128, 6, 2, "many norm"),
    (256, 256, 20, 2, "many norm"),
)
ROWS_THREADS = 192  # of it: twelve heads of 128, three times of which are the 36 of a 7B model


class Form(NamedTuple):
    """What differs by kind of device. pages: dtypes of pages. q_out: dtype of the queries. head_dim: the largest, of a
    form that is not "values" (on a GPU larger ones take registers of every warp). walk: (query heads, KV heads, tokens,
    whether K and V are written) → the arguments that tell the kernel which heads a block does, and the grid."""

    pages: tuple[str, ...]
    q_out: str
    head_dim: int
    walk: Callable[[int, int, Any, bool], tuple[dict[str, int], tuple]]


FORMS = {
    "cpu": Form(
        tuple(KV_DTYPES),
        "f32",
        MAX_HEAD_DIM,
        lambda heads, kv_heads, tokens, writes: (
            {"kv_heads": kv_heads, "group": heads // kv_heads, "writes": int(writes)},
            (kv_heads, tokens),
        ),
    ),
    "gpu": Form(
        ("bf16", "f16", *PACKED),
        "bf16",
        256,
        lambda heads, kv_heads, tokens, writes: (
            {"heads": heads, "kv_heads": kv_heads if writes else 0},
            (tokens, -(-(heads + 2 * kv_heads * writes) * GPU_WARP // GPU_THREADS)),
        ),
    ),
}
# None, of every head of q and k, of all heads together, of every head of q and k and, without a weight, of v.
NORMS = ("plain", "norm", "whole", "values")


def largest_head(form: str) -> int:
    """The largest head_dim of a form of NORMS on a GPU."""
    return MAX_HEAD_DIM if form == "values" else FORMS["gpu"].head_dim


@zl.inline
def head_factor(x, width, eps):
    """1 / sqrt(mean(x^2) + eps) of one head, or of a token's heads together."""
    sums = zl.f32.x(LANES)(0)
    for i in range(0, width, LANES):
        value = zl.load(x + i, LANES)
        sums = zl.fma(value, value, sums)
    return 1.0 / zl.sqrt(zl.reduce_add(sums) / zl.f32(width) + eps)


@zl.inline
def rotate(x, weight, factor, table, out, head_dim, rotary, NORM):
    """out = rope(x, or x * factor * weight) of one head; dimensions from `rotary` on are not turned."""
    half = rotary // 2
    for i in range(0, half, LANES):
        a = zl.load(x + i, LANES)
        b = zl.load(x + half + i, LANES)
        if NORM:
            a = a * factor * zl.load(weight + i, LANES)
            b = b * factor * zl.load(weight + half + i, LANES)
        c = zl.load(table + i, LANES)
        s = zl.load(table + half + i, LANES)
        zl.store(out + i, a * c - b * s)
        zl.store(out + half + i, b * c + a * s)
    for j in range(rotary, head_dim, LANES):
        rest = zl.load(x + j, LANES)
        if NORM:
            rest = rest * factor * zl.load(weight + j, LANES)
        zl.store(out + j, rest)


@zl.inline
def write_pages(key, row, k_pages, v_pages, place, slot, head_dim, KV):
    """A token's key and value of one head into `slot` of the block `place` (counted in heads)."""
    if KV is zl.i8 or KV is zl.e4m3:
        STORED = zl.u8 if KV is zl.e4m3 else zl.i8
        at = place * (head_dim * BLOCK + SCALE_BYTES)
        stored = zl.local_array(STORED, MAX_HEAD_DIM)
        pack_head(key, stored, zl.cast_ptr(k_pages + at + head_dim * BLOCK, zl.f32) + slot, head_dim, LANES, KV)
        column = zl.cast_ptr(k_pages, STORED) + at + slot
        for e in range(head_dim):
            column[e * BLOCK] = stored[e]
        pack_head(
            row,
            zl.cast_ptr(v_pages, STORED) + at + slot * head_dim,
            zl.cast_ptr(v_pages + at + head_dim * BLOCK, zl.f32) + slot,
            head_dim,
            LANES,
            KV,
        )
    else:
        start = place * head_dim * BLOCK
        keys = zl.cast_ptr(k_pages, KV) + start + slot  # [head_dim, BLOCK]: this token's keys have stride BLOCK
        values = zl.cast_ptr(v_pages, KV) + start + slot * head_dim
        narrow = zl.local_array(KV, MAX_HEAD_DIM)
        for d in range(0, head_dim, LANES):
            zl.store(narrow + d, zl.convert(zl.load(key + d, LANES), KV))
            zl.store(values + d, zl.convert(zl.load(row + d, LANES), KV))
        for e in range(head_dim):
            keys[e * BLOCK] = narrow[e]


class QKVPost(zl.Record):
    """What the kernels of all devices take; then each has its own. Q: type of q_out. KV: of the pages. NORM: "plain",
    "norm" (of each head of q and k), "values" (of v too), "whole" (of all heads together). q_step: from a head of q to
    the next, twice head_dim where a gate stands between them."""

    q: zl.Ptr[zl.f32, "const"]
    k: zl.Ptr[zl.f32, "const"]
    v: zl.Ptr[zl.f32, "const"]
    q_stride: zl.index
    q_step: zl.index
    k_stride: zl.index
    v_stride: zl.index
    q_norm: zl.Ptr[zl.f32, "const"]
    k_norm: zl.Ptr[zl.f32, "const"]
    q_table: zl.Ptr[zl.f32, "const"]
    table: zl.Ptr[zl.f32, "const"]
    q_out: zl.Ptr["Q"]
    k_pages: zl.Ptr[zl.u8]
    v_pages: zl.Ptr[zl.u8]
    page_table: zl.Ptr[zl.i32, "const"]
    max_pages: zl.index
    token_row: zl.Ptr[zl.i32, "const"]
    positions: zl.Ptr[zl.i32, "const"]
    Q: zl.static
    KV: zl.static
    NORM: zl.static


class HeadsPost(QKVPost):
    """writes: 0 for the query heads alone."""

    kv_heads: zl.i64
    group: zl.i64
    writes: zl.i64
    head_dim: zl.i64
    rotary: zl.i64
    eps: zl.f32


@zl.kernel
def qkv_post_heads(p: HeadsPost):
    """Grid (kv heads, tokens): a block does one key/value head and the query heads that share it."""
    head = zl.block_index(0)
    token = zl.block_index(1)
    factor = None
    q_weight = p.q_norm
    if p.NORM == "whole":
        factor = head_factor(p.q + token * p.q_stride, p.kv_heads * p.group * p.head_dim, p.eps)
    for j in range(head * p.group, (head + 1) * p.group):
        x = p.q + token * p.q_stride + j * p.q_step
        if p.NORM == "norm" or p.NORM == "values":
            factor = head_factor(x, p.head_dim, p.eps)
        if p.NORM == "whole":
            q_weight = p.q_norm + j * p.head_dim
        out = p.q_out + (token * p.kv_heads * p.group + j) * p.head_dim
        rotate(x, q_weight, factor, p.q_table + token * p.rotary, out, p.head_dim, p.rotary, p.NORM != "plain")
    if p.writes == 0:
        return
    position = zl.i64(p.positions[token])
    slot = position % BLOCK
    page = zl.i64(p.page_table[zl.i64(p.token_row[token]) * p.max_pages + position // BLOCK])
    rotated = zl.local_array(zl.f32, MAX_HEAD_DIM)
    key = p.k + token * p.k_stride + head * p.head_dim
    k_weight = p.k_norm
    k_factor = None
    if p.NORM == "norm" or p.NORM == "values":
        k_factor = head_factor(key, p.head_dim, p.eps)
    if p.NORM == "whole":
        k_factor = head_factor(p.k + token * p.k_stride, p.kv_heads * p.head_dim, p.eps)
        k_weight = p.k_norm + head * p.head_dim
    rotate(key, k_weight, k_factor, p.table + token * p.rotary, rotated, p.head_dim, p.rotary, p.NORM != "plain")
    row = p.v + token * p.v_stride + head * p.head_dim
    if p.NORM == "values":
        normed = zl.local_array(zl.f32, MAX_HEAD_DIM)
        v_factor = head_factor(row, p.head_dim, p.eps)
        for d in range(0, p.head_dim, LANES):
            zl.store(normed + d, zl.load(row + d, LANES) * v_factor)
        write_pages(rotated, normed, p.k_pages, p.v_pages, page * p.kv_heads + head, slot, p.head_dim, p.KV)
        return
    write_pages(rotated, row, p.k_pages, p.v_pages, page * p.kv_heads + head, slot, p.head_dim, p.KV)


def qkv_post(
    recorder,
    qkv,
    q_norm,
    k_norm,
    table,
    q_out,
    k_pages,
    v_pages,
    page_table,
    token_row,
    positions,
    eps: float = 0.0,
    q_table=None,
    v_norm: bool = False,
    gated: bool = False,
) -> None:
    """Writes q_out [M, Hq * D] (f32, on a GPU bf16) and the K and V of M tokens into their pages.

    Args:
        qkv: one f32 Tensor [M, (Hq + 2 Hk) * D], or a tuple of three: [M, Hq * D], [M, Hk * D], [M, Hk * D], of which the
            last two may be the same, or None: nothing is written.
        q_norm, k_norm: RMSNorm before the rotation: f32 [D] of every head, or f32 [Hq * D] and [Hk * D] of all heads
            together; both None: none.
        table: f32 [M, R] of rope_table, R <= D; None: nothing is turned.
        k_pages, v_pages: CPU: [P, Hk, D, 16] and [P, Hk, 16, D], f16 or f32; GPU: both [P, Hk, 16, D], bf16 or f16; or
            both packed i8 or e4m3 (kv_pages.py).
        page_table: i32 [rows, max_pages]; token_row, positions: i32 [M].
        v_norm: RMSNorm of each head of v, without a weight; beside norms of each head of q and k.
        q_table: what q is turned by, if not by `table`: a factor on all of q, where R = D.
        gated: behind each head of q in qkv, whose q is twice as wide, stand D columns that are not read here.
    """
    family = recorder.device.kernels
    kind = FORMS[family]
    kv_heads, head_dim = v_pages.shape[1], head_dim_of(v_pages)
    tokens, q_width = q_out.shape
    rotary, kv_width = 0 if table is None else table.shape[1], kv_heads * head_dim
    writes = isinstance(qkv, Tensor) or qkv[1] is not None
    form = _norm_form(q_norm, head_dim, writes, v_norm, gated)
    limits = ("head_dim", head_dim, MAX_HEAD_DIM if form == "values" else kind.head_dim), ("rotary", rotary, head_dim)
    for name, size, most in limits:
        require(size % 16 == 0 and size <= most, f"qkv_post: {name} {size} is not a multiple of 16 up to {most}")
    require(q_width % kv_width == 0, f"qkv_post: q_out is {q_width} wide, {kv_heads} kv heads of {head_dim}")
    _check_pages(k_pages, v_pages, head_dim, family)
    check("qkv_post q_out", q_out, kind.q_out, tokens, q_width)
    for one in filter(None, (table, q_table)):
        check("qkv_post table", one, "f32", tokens, rotary)
    check("qkv_post page_table", page_table, "i32", None, None)
    for name, tensor in (("token_row", token_row), ("positions", positions)):
        check(f"qkv_post {name}", tensor, "i32", tokens)
    require(not writes or (q_norm is None) == (k_norm is None), "qkv_post: q_norm and k_norm go together")
    for norm, width in ((q_norm, q_width), (k_norm, kv_width)):
        if norm is not None:
            check("qkv_post q_norm, k_norm", norm, "f32", width if form == "whole" else head_dim)
    q, k, v, strides = sources(qkv, tokens, 2 * q_width if gated else q_width, kv_width)
    which, grid = kind.walk(q_width // head_dim, kv_heads, tokens, writes)
    args = Args(
        q=q,
        k=k,
        v=v,
        **dict(zip(("q_stride", "k_stride", "v_stride"), strides, strict=True)),
        q_step=2 * head_dim if gated else head_dim,
        q_norm=q_norm,
        k_norm=k_norm,
        q_table=table if q_table is None else q_table,
        table=table,
        q_out=q_out,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        max_pages=page_table.shape[1],
        token_row=token_row,
        positions=positions,
        **which,
        head_dim=head_dim,
        rotary=rotary,
        eps=float(eps),
    )
    symbol, grid = _of_many(recorder, f"qkv_post_{k_pages.dtype}_{form}", (head_dim, rotary), tokens, grid)
    recorder.launch(symbol, args, grid)


def _of_many(recorder, symbol: str, sizes: tuple[int, int], tokens, grid: tuple) -> tuple[str, tuple]:
    """The symbol and its grid, or those of a GPU's kernel for many tokens where there is one. sizes: head_dim, rotary."""
    taken = recorder.device.kernels == "gpu" and symbol in MANY and sizes in [(size, size) for size in MANY_HEADS]
    is_many = taken and most_of(tokens, recorder.maxima) >= MANY_ROWS
    return (f"{symbol}_many", (tokens,)) if is_many else (symbol, grid)


def _norm_form(q_norm, head_dim: int, writes: bool, v_norm: bool, gated: bool) -> str:
    """Which of NORMS."""
    form = "plain" if q_norm is None else "norm" if q_norm.shape == (head_dim,) else "whole"
    require(not v_norm or form == "norm", "qkv_post: v_norm goes with norms of each head of q and k")
    require(not gated or form != "whole", "qkv_post: gated queries have no norm of all heads together")
    return "values" if v_norm or (form == "norm" and not writes) else form  # the same of q alone


def _check_pages(k_pages, v_pages, head_dim: int, family: str) -> None:
    pages, kv_heads = v_pages.shape[:2]
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        shape = pages_shape(head_dim, k_pages.dtype, tensor is k_pages, family)
        dtypes = FORMS[family].pages if tensor is k_pages else k_pages.dtype
        check(f"qkv_post {name}", tensor, dtypes, pages, kv_heads, *shape)


def sources(qkv, tokens, q_width: int, kv_width: int):
    """(q, k, v, their strides), of joined products or of three."""
    widths = q_width, kv_width, kv_width
    if not isinstance(qkv, Tensor):
        for name, part, width in zip("qkv", qkv, widths, strict=True):
            if part is not None:
                check(f"qkv_post {name}", part, "f32", tokens, width)
        return *qkv, widths
    total = sum(widths)
    check("qkv_post qkv", qkv, "f32", tokens, total)
    starts = 0, q_width, q_width + kv_width
    return *(qkv._replace(offset=qkv.offset + 4 * start) for start in starts), (total,) * 3


def _reference(
    qkv,
    q_norm,
    k_norm,
    table,
    k_pages,
    v_pages,
    page_table,
    token_row,
    positions,
    eps=0.0,
    q_table=None,
    v_norm=False,
    gated=False,
    q_out=None,
):
    k_pages, v_pages = (pages.array if isinstance(pages, HostArray) else pages for pages in (k_pages, v_pages))
    kv_heads, head_dim = v_pages.shape[1], head_dim_of(v_pages)
    token_major = k_pages.shape == v_pages.shape and head_dim != BLOCK
    kv_width = kv_heads * head_dim
    if not isinstance(qkv, tuple):
        qkv = np.split(qkv, [qkv.shape[1] - 2 * kv_width, qkv.shape[1] - kv_width], axis=1)
    alone = qkv[1] is None
    if gated:
        qkv = (qkv[0].reshape(len(qkv[0]), -1, 2, head_dim)[:, :, 0], *qkv[1:])
    q, k, v = (
        np.asarray(part, np.float64).reshape(len(part), -1, head_dim) for part in (qkv[:1] * 3 if alone else qkv)
    )

    def post(x, norm, turns):
        if norm is not None:
            heads = x.shape[1] * head_dim // norm.size  # that have a norm of their own
            parts = x.reshape(len(x), heads, -1)
            parts = parts / np.sqrt((parts * parts).mean(axis=2, keepdims=True) + eps) * norm.astype(np.float64)
            x = parts.reshape(x.shape)
        if turns is None:
            return x
        half = turns.shape[1] // 2
        c, s = (np.asarray(part, np.float64)[:, None] for part in np.split(turns, 2, axis=1))
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=2)

    turned = post(q, q_norm, table if q_table is None else q_table).reshape(len(q), -1)
    if alone:
        return {"q_out": turned}
    rotated = post(k, k_norm, table)
    v = post(v, np.ones(head_dim), None) if v_norm else v
    if k_pages.ndim == 3:  # packed: what is written, without its places
        return {"q_out": turned, "k_pages": rotated, "v_pages": v}
    keys, values = attention_cases.wide_pages(k_pages), attention_cases.wide_pages(v_pages)
    for m, (row, position) in enumerate(zip(token_row, positions, strict=True)):
        page = page_table[row, position // BLOCK]
        if token_major:
            keys[page, :, position % BLOCK] = rotated[m]
        else:
            keys[page, :, :, position % BLOCK] = rotated[m]
        values[page, :, position % BLOCK] = v[m]
    return {"q_out": turned, "k_pages": keys, "v_pages": values}


def _cases(rng, family="cpu"):
    kind = FORMS[family]
    rounding = {"f16": (1e-6, 1.1 * 2.0**-11), "bf16": (1e-6, 1.1 * 2.0**-8)}
    for dtype in kind.pages:
        for head_dim, rotary, heads, kv_heads, norm in (
            (64, 64, 9, 3, ""),
            (256, 256, 4, 1, "norm"),
            (32, 16, 2, 2, "norm"),
            (128, 128, 28, 4, "norm"),
            (80, 80, 2, 1, "q_table"),
            (48, 0, 3, 3, ""),
            (112, 96, 5, 5, "whole"),
            (64, 64, 6, 2, "whole"),
            (MAX_HEAD_DIM, MAX_HEAD_DIM, 4, 2, "values"),
            (48, 48, 6, 2, "values"),
            (MAX_HEAD_DIM, 64, 6, 3, "alone"),
            (256, 64, 4, 2, "gated"),
            (64, 32, 6, 2, "gated"),
            *(MANY_CASES if family == "gpu" and dtype in MANY_PAGES else ()),
        ):
            is_many = norm.startswith("many")
            norm = norm.removeprefix("many").strip()
            tokens, rows, max_pages, pages = (MANY_ROWS + 3, 2, 6, 13) if is_many else (5, 3, 4, 13)
            width, kv_width = heads * head_dim, kv_heads * head_dim
            columns = width * (1 + (norm == "gated")), kv_width, kv_width
            parts = [rng.standard_normal((tokens, w)).astype(np.float32) for w in columns]
            angle = rng.uniform(-3, 3, (tokens, rotary // 2))
            table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
            factors = rng.uniform(0.5, 2, (tokens, 1)).astype(np.float32)
            page_table = rng.permutation(pages)[: rows * max_pages].reshape(rows, max_pages).astype(np.int32)
            kv = [
                attention_cases.random_pages(rng, (pages, kv_heads), head_dim, dtype, keys, family)
                for keys in (True, False)
            ]
            near = Tolerance(1e-6, 2e-6, "norm and rotation in f32")
            stored = (
                near if dtype == "f32" or dtype in PACKED else Tolerance(*rounding[dtype], f"rounded once to {dtype}")
            )
            widths = {"": None, "q_table": None, "whole": (width, kv_width)}.get(norm, (head_dim, head_dim))
            weights = [(1 + rng.standard_normal(w) / 4).astype(np.float32) for w in widths or ()] or [None, None]
            inputs = {
                "qkv": tuple(parts) if head_dim == 64 else np.concatenate(parts, axis=1),
                **({"qkv": (parts[0], parts[1], parts[1])} if norm == "values" and head_dim > 48 else {}),
                **({"qkv": (parts[0], None, None)} if norm == "alone" else {}),
                "q_norm": weights[0],
                "k_norm": weights[1],
                "table": table if rotary else None,
                "q_table": table * factors if norm == "q_table" else None,
                "page_table": page_table,
                "token_row": np.arange(tokens, dtype=np.int32) % 2 if is_many else np.array([0, 0, 1, 2, 2], np.int32),
                "positions": np.array([15, 16, 0, 62, 63], np.int32),
            }
            if is_many:
                inputs["positions"] = 5 + np.arange(tokens, dtype=np.int32) // 2
            outputs = {"q_out": OutputSpec((tokens, width), "float32", near)}
            if kind.q_out == "bf16":
                q_near = Tolerance(*rounding["bf16"], "rounded once to bf16")
                outputs = {"q_out": OutputSpec((tokens, width), "bf16", q_near)}
            for name, array in zip(("k_pages", "v_pages"), kv, strict=True):
                if norm == "alone":
                    inputs[name] = array if dtype not in ("bf16", "e4m3") else HostArray(dtype, array)
                    continue
                error = None
                if dtype in PACKED:
                    places = page_table[inputs["token_row"], inputs["positions"] // BLOCK], inputs["positions"] % BLOCK
                    how = dict(initial=array, dtype=dtype, keys=name == "k_pages", family=family)
                    error = partial(packed_error, **how, pages=places[0], slots=places[1])
                kept = dtype if dtype in ("bf16", "e4m3") else str(array.dtype)
                outputs[name] = OutputSpec(array.shape, kept, stored, inout=array, error=error)
            yield Case(
                f"{dtype} D={head_dim} R={rotary} {heads}/{kv_heads}{norm and ' ' + norm}{' many' * is_many}",
                inputs,
                outputs,
                {"eps": 1e-6, "v_norm": norm == "values", "gated": norm == "gated"},
            )


def _cost(case: Case) -> Cost:
    tokens, width = case.outputs["q_out"].shape
    if "v_pages" not in case.outputs:
        return Cost(tokens * width * 8, tokens * width * 3)
    kv_heads, head_dim = case.outputs["v_pages"].shape[1], head_dim_of(case.outputs["v_pages"])
    item = {"e4m3": 1, "int8": 1, "bf16": 2, "float16": 2}.get(case.outputs["k_pages"].dtype, 4)
    return Cost(tokens * (width * 8 + 2 * kv_heads * head_dim * (4 + item)), tokens * (width + kv_heads * head_dim) * 3)


def _variants(target):
    return [
        zl.Variant(f"qkv_post_{name}_{form}", qkv_post_heads, {"Q": zl.f32, "KV": dtype, "NORM": form})
        for name, dtype in KV_DTYPES.items()
        for form in NORMS
    ]


QKV_POST = Op("qkv_post", _variants, qkv_post, _reference, _cases, _cost, later("gpu.qkv_post", "qkv_post_variants"))
