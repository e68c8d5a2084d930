"""What stands between the q, k, v projections and attention: QK-norm, RoPE (rotate-half), and writing K and V to
pages."""

from functools import partial

from zse import kernel as zl
from zse.kernels.kv_pages import PACKED, SCALE_BYTES, head_dim_of, pack_head, pack_pages, packed_error, pages_shape
from zse.kernels.op import Case, Cost, Op, Output, Tolerance, check, later, on_gpu, require
from zse.tensor import Tensor

LANES = 8  # head dimensions and halves of rotary dimensions are multiples of 8
PAGE = 16  # tokens of a page
MAX_HEAD_DIM = 256
KV_DTYPES = {"f16": zl.f16, "f32": zl.f32, **PACKED}
GPU_KV_DTYPES = ("bf16", "f16", *PACKED)
GPU_WARP = 32


@zl.inline
def head_factor(x, head_dim, eps):
    """1 / sqrt(mean(x^2) + eps) of one head."""
    sums = zl.f32.x(LANES)(0)
    for i in range(0, head_dim, LANES):
        value = zl.load(x + i, LANES)
        sums = zl.fma(value, value, sums)
    return 1.0 / zl.sqrt(zl.reduce_add(sums) / zl.f32(head_dim) + eps)


@zl.inline
def rotate(x, weight, table, out, head_dim, rotary, eps, NORM):
    """out = rope(x, or rmsnorm(x) * weight) of one head; dimensions from `rotary` on are only copied."""
    if NORM:
        factor = head_factor(x, head_dim, eps)
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


@zl.kernel
def qkv_post_heads(
    q: zl.Ptr[zl.f32, "const"],
    k: zl.Ptr[zl.f32, "const"],
    v: zl.Ptr[zl.f32, "const"],
    q_stride: zl.i64,
    k_stride: zl.i64,
    v_stride: zl.i64,
    q_norm: zl.Ptr[zl.f32, "const"],
    k_norm: zl.Ptr[zl.f32, "const"],
    table: zl.Ptr[zl.f32, "const"],
    q_out: zl.Ptr[zl.f32],
    k_pages: zl.Ptr[zl.u8],
    v_pages: zl.Ptr[zl.u8],
    page_table: zl.Ptr[zl.i32, "const"],
    max_pages: zl.i64,
    token_row: zl.Ptr[zl.i32, "const"],
    positions: zl.Ptr[zl.i32, "const"],
    kv_heads: zl.i64,
    group: zl.i64,
    head_dim: zl.i64,
    rotary: zl.i64,
    eps: zl.f32,
    KV: zl.static,
    NORM: zl.static,
):
    """Grid (kv heads, tokens): a block does one key/value head and the query heads that share it."""
    head = zl.block_index(0)
    token = zl.block_index(1)
    cosines = table + token * rotary
    for j in range(head * group, (head + 1) * group):
        rotate(
            q + token * q_stride + j * head_dim,
            q_norm,
            cosines,
            q_out + (token * kv_heads * group + j) * head_dim,
            head_dim,
            rotary,
            eps,
            NORM,
        )
    position = zl.i64(positions[token])
    slot = position % PAGE
    page = zl.i64(page_table[zl.i64(token_row[token]) * max_pages + position // PAGE])
    rotated = zl.local_array(zl.f32, MAX_HEAD_DIM)
    rotate(k + token * k_stride + head * head_dim, k_norm, cosines, rotated, head_dim, rotary, eps, NORM)
    row = v + token * v_stride + head * head_dim
    if KV is zl.i8 or KV is zl.e4m3:
        STORED = zl.u8 if KV is zl.e4m3 else zl.i8
        at = (page * kv_heads + head) * (head_dim * PAGE + SCALE_BYTES)
        stored = zl.local_array(STORED, MAX_HEAD_DIM)
        pack_head(rotated, stored, zl.cast_ptr(k_pages + at + head_dim * PAGE, zl.f32) + slot, head_dim, LANES, KV)
        column = zl.cast_ptr(k_pages, STORED) + at + slot
        for e in range(head_dim):
            column[e * PAGE] = stored[e]
        pack_head(
            row,
            zl.cast_ptr(v_pages, STORED) + at + slot * head_dim,
            zl.cast_ptr(v_pages + at + head_dim * PAGE, zl.f32) + slot,
            head_dim,
            LANES,
            KV,
        )
    else:
        place = (page * kv_heads + head) * head_dim * PAGE
        keys = zl.cast_ptr(k_pages, KV) + place + slot  # [head_dim, PAGE]: this token's keys have stride PAGE
        values = zl.cast_ptr(v_pages, KV) + place + slot * head_dim
        narrow = zl.local_array(KV, MAX_HEAD_DIM)
        for d in range(0, head_dim, LANES):
            zl.store(narrow + d, zl.convert(zl.load(rotated + d, LANES), KV))
            zl.store(values + d, zl.convert(zl.load(row + d, LANES), KV))
        for e in range(head_dim):
            keys[e * PAGE] = narrow[e]


def qkv_post(
    recorder, qkv, q_norm, k_norm, table, q_out, k_pages, v_pages, page_table, token_row, positions, eps: float = 0.0
) -> None:
    """Writes q_out [M, Hq * D] (f32, on a GPU bf16) and the K and V of M tokens into their pages.

    qkv: one f32 Tensor [M, (Hq + 2 Hk) * D], or a tuple of three: [M, Hq * D], [M, Hk * D], [M, Hk * D]. q_norm,
    k_norm: f32 [D] (RMSNorm of every head before the rotation) or both None. table: f32 [M, R] of rope_table, R <= D.
    CPU: k_pages [P, Hk, D, 16], v_pages [P, Hk, 16, D], f16 or f32; GPU: both [P, Hk, 16, D], bf16 or f16; or both
    packed i8 or e4m3 (kv_pages.py). page_table i32 [rows, max_pages]; token_row,
    positions i32 [M]."""
    gpu = on_gpu(recorder)
    pages, kv_heads = v_pages.shape[:2]
    head_dim = head_dim_of(v_pages)
    tokens, q_width = q_out.shape
    rotary = table.shape[1]
    require(
        head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM,
        f"qkv_post: head_dim {head_dim} is not a multiple of 16 up to 256",
    )
    require(
        rotary % 16 == 0 and rotary <= head_dim,
        f"qkv_post: rotary dimension {rotary} is not a multiple of 16 up to {head_dim}",
    )
    require(
        q_width % (kv_heads * head_dim) == 0, f"qkv_post: q_out is {q_width} wide, {kv_heads} kv heads of {head_dim}"
    )
    kv_width = kv_heads * head_dim
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        shape = pages_shape(head_dim, k_pages.dtype, tensor is k_pages, "gpu" if gpu else "cpu")
        dtypes = (GPU_KV_DTYPES if gpu else tuple(KV_DTYPES)) if tensor is k_pages else k_pages.dtype
        check(f"qkv_post {name}", tensor, dtypes, pages, kv_heads, *shape)
    check("qkv_post q_out", q_out, "bf16" if gpu else "f32", tokens, q_width)
    check("qkv_post table", table, "f32", tokens, rotary)
    check("qkv_post page_table", page_table, "i32", None, None)
    check("qkv_post token_row", token_row, "i32", tokens)
    check("qkv_post positions", positions, "i32", tokens)
    require((q_norm is None) == (k_norm is None), "qkv_post: q_norm and k_norm go together")
    if q_norm is not None:
        check("qkv_post q_norm", q_norm, "f32", head_dim)
        check("qkv_post k_norm", k_norm, "f32", head_dim)
    if not isinstance(qkv, Tensor):
        for name, part, width in zip("qkv", qkv, (q_width, kv_width, kv_width), strict=True):
            check(f"qkv_post {name}", part, "f32", tokens, width)
        bases, strides = list(qkv), [q_width, kv_width, kv_width]
    else:
        total = q_width + 2 * kv_width
        check("qkv_post qkv", qkv, "f32", tokens, total)
        bases = [qkv, *(qkv._replace(offset=qkv.offset + 4 * start) for start in (q_width, q_width + kv_width))]
        strides = [total] * 3
    symbol = f"qkv_post_{k_pages.dtype}_{'norm' if q_norm is not None else 'plain'}"
    norms = [q_norm, k_norm] if q_norm is not None else [0, 0]
    if gpu:
        from zse.kernels.gpu.qkv_post import THREADS as GPU_THREADS

        heads = q_width // head_dim
        recorder.launch(
            symbol,
            [
                *bases,
                *strides,
                *norms,
                table,
                q_out,
                k_pages,
                v_pages,
                0,
                page_table,
                page_table.shape[1],
                token_row,
                positions,
                heads,
                kv_heads,
                head_dim,
                rotary,
                float(eps),
            ],
            (tokens, -(-(heads + 2 * kv_heads) * GPU_WARP // GPU_THREADS)),
        )
        return
    recorder.launch(
        symbol,
        [
            *bases,
            *strides,
            *norms,
            table,
            q_out,
            k_pages,
            v_pages,
            page_table,
            page_table.shape[1],
            token_row,
            positions,
            kv_heads,
            q_width // kv_width,
            head_dim,
            rotary,
            float(eps),
        ],
        (kv_heads, tokens),
    )


def _reference(qkv, q_norm, k_norm, table, k_pages, v_pages, page_table, token_row, positions, eps=0.0, q_out=None):
    import numpy as np

    from zse.kernels.attention_cases import wide_pages

    kv_heads, head_dim = v_pages.shape[1], head_dim_of(v_pages)
    token_major = k_pages.shape == v_pages.shape and head_dim != PAGE
    kv_width = kv_heads * head_dim
    if not isinstance(qkv, tuple):
        qkv = np.split(qkv, [qkv.shape[1] - 2 * kv_width, qkv.shape[1] - kv_width], axis=1)
    q, k, v = (np.asarray(part, np.float64).reshape(len(part), -1, head_dim) for part in qkv)
    half = table.shape[1] // 2
    c, s = (np.asarray(part, np.float64)[:, None] for part in np.split(table, 2, axis=1))

    def post(x, norm):
        if norm is not None:
            x = x / np.sqrt((x * x).mean(axis=2, keepdims=True) + eps) * norm.astype(np.float64)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=2)

    rotated = post(k, k_norm)
    if k_pages.ndim == 3:  # packed: what is written, without its places
        return {"q_out": post(q, q_norm).reshape(len(q), -1), "k_pages": rotated, "v_pages": v}
    keys, values = wide_pages(k_pages), wide_pages(v_pages)
    for m, (row, position) in enumerate(zip(token_row, positions, strict=True)):
        page = page_table[row, position // PAGE]
        if token_major:
            keys[page, :, position % PAGE] = rotated[m]
        else:
            keys[page, :, :, position % PAGE] = rotated[m]
        values[page, :, position % PAGE] = v[m]
    return {"q_out": post(q, q_norm).reshape(len(q), -1), "k_pages": keys, "v_pages": values}


def _cases(rng, family="cpu"):
    import numpy as np

    from zse.kernels.attention_cases import narrow_pages

    gpu = family == "gpu"
    rounding = {"f16": (1e-6, 1.1 * 2.0**-11), "bf16": (1e-6, 1.1 * 2.0**-8)}
    for dtype in GPU_KV_DTYPES if gpu else KV_DTYPES:
        for head_dim, rotary, heads, kv_heads, norm in (
            (64, 64, 9, 3, False),
            (256, 256, 4, 1, True),
            (32, 16, 2, 2, True),
            (128, 128, 28, 4, True),
            (80, 80, 2, 1, False),
        ):
            tokens, rows, max_pages, pages = 5, 3, 4, 13
            width, kv_width = heads * head_dim, kv_heads * head_dim
            parts = [rng.standard_normal((tokens, w)).astype(np.float32) for w in (width, kv_width, kv_width)]
            angle = rng.uniform(-3, 3, (tokens, rotary // 2))
            table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
            page_table = rng.permutation(pages)[: rows * max_pages].reshape(rows, max_pages).astype(np.int32)
            packed = dtype in PACKED
            if packed:
                kv = [
                    pack_pages(rng.standard_normal((pages, kv_heads, PAGE, head_dim)), dtype, keys, family)
                    for keys in (True, False)
                ]
            else:
                kv = [
                    narrow_pages(
                        rng.standard_normal((pages, kv_heads, *pages_shape(head_dim, "f16", keys, family))), dtype
                    )
                    for keys in (True, False)
                ]
            near = Tolerance(1e-6, 2e-6, "norm and rotation in f32")
            stored = near if dtype == "f32" or packed else Tolerance(*rounding[dtype], f"rounded once to {dtype}")
            weights = [(1 + rng.standard_normal(head_dim) / 4).astype(np.float32) if norm else None for _ in range(2)]
            inputs = {
                "qkv": tuple(parts) if head_dim == 64 else np.concatenate(parts, axis=1),
                "q_norm": weights[0],
                "k_norm": weights[1],
                "table": table,
                "page_table": page_table,
                "token_row": np.array([0, 0, 1, 2, 2], np.int32),
                "positions": np.array([15, 16, 0, 62, 63], np.int32),
            }
            q_near = Tolerance(*rounding["bf16"], "rounded once to bf16") if gpu else near
            outputs = {"q_out": Output((tokens, width), "bf16" if gpu else "float32", q_near)}
            for name, array in zip(("k_pages", "v_pages"), kv, strict=True):
                error = None
                if packed:
                    error = partial(
                        packed_error,
                        initial=array,
                        dtype=dtype,
                        keys=name == "k_pages",
                        family=family,
                        pages=page_table[inputs["token_row"], inputs["positions"] // PAGE],
                        slots=inputs["positions"] % PAGE,
                    )
                outputs[name] = Output(
                    array.shape,
                    dtype if dtype in ("bf16", "e4m3") else str(array.dtype),
                    stored,
                    inout=array,
                    error=error,
                )
            yield Case(
                f"{dtype} D={head_dim} R={rotary} {heads}/{kv_heads}{' norm' if norm else ''}",
                inputs,
                outputs,
                {"eps": 1e-6},
            )


def _cost(case: Case) -> Cost:
    tokens, width = case.outputs["q_out"].shape
    kv_heads, head_dim = case.outputs["v_pages"].shape[1], head_dim_of(case.outputs["v_pages"])
    item = {"e4m3": 1, "int8": 1, "bf16": 2, "float16": 2}.get(case.outputs["k_pages"].dtype, 4)
    return Cost(tokens * (width * 8 + 2 * kv_heads * head_dim * (4 + item)), tokens * (width + kv_heads * head_dim) * 3)


def _variants(target):
    return [
        zl.Variant(f"qkv_post_{name}_{form}", qkv_post_heads, {"KV": dtype, "NORM": form == "norm"})
        for name, dtype in KV_DTYPES.items()
        for form in ("plain", "norm")
    ]


QKV_POST = Op("qkv_post", _variants, qkv_post, _reference, _cases, _cost, later("gpu.qkv_post", "qkv_post_variants"))
