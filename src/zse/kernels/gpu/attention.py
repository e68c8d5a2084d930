"""The launches of attention on a GPU: which kernels a recording needs, and their arguments."""

from zse.errors import UnsupportedError
from zse.kernel import Variant
from zse.kernels.gpu.attention_decode import decode_symbol, decode_variants
from zse.kernels.gpu.attention_plan import (
    HEAD_DIMS,
    MAX_RUN,
    PAGE,
    AttentionScratch,
    decode_columns,
    decode_share,
    plan_attention,
    plan_variants,
    reciprocal31,
)
from zse.kernels.kv_pages import PACKED, head_dim_of, pages_shape
from zse.kernels.op import check, require

KV_DTYPES = ("bf16", "f16", *PACKED)
MAX_GROUP = 128  # query heads of a kv head: rows of a prefill tile


def record_attention(
    recorder,
    q,
    k_pages,
    v_pages,
    page_table,
    token_row,
    positions,
    out,
    scale: float,
    window: int,
    softcap: float,
    scratch: AttentionScratch | None,
    longest_run: int | None,
) -> None:
    """attention() on a GPU; see there."""
    device = recorder.device
    pages, kv_heads = v_pages.shape[:2]
    head_dim = head_dim_of(v_pages)
    tokens, width = q.shape
    if head_dim not in HEAD_DIMS:
        raise UnsupportedError("attention on a GPU (--device cpu takes more): head_dim", head_dim, HEAD_DIMS)
    require(width % (kv_heads * head_dim) == 0, f"attention: q is {width} wide, {kv_heads} kv heads of {head_dim}")
    group = width // (kv_heads * head_dim)
    if group > MAX_GROUP:
        raise UnsupportedError("attention: query heads of a kv head", group, [f"1 to {MAX_GROUP}"])
    check("attention q", q, "bf16", tokens, width)
    check("attention out", out, "bf16", tokens, width)
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        check(
            f"attention {name}",
            tensor,
            KV_DTYPES if tensor is k_pages else k_pages.dtype,
            pages,
            kv_heads,
            *pages_shape(head_dim, k_pages.dtype, tensor is k_pages, "gpu"),
        )
    check("attention page_table", page_table, "i32", None, None)
    check("attention token_row", token_row, "i32", tokens)
    check("attention positions", positions, "i32", tokens)
    if device.simt:
        from zse.kernels.gpu import attention_simple

        attention_simple.launch(
            recorder, q, k_pages, v_pages, page_table, token_row, positions, out, group, scale, window, softcap
        )
        return
    if scratch is None:
        require(isinstance(tokens, int), "attention: a number of tokens that is a symbol needs scratch")
        scratch = AttentionScratch.make(
            device, width // head_dim, kv_heads, head_dim, [window], tokens, page_table.shape[1] * PAGE
        )
        plan_attention(recorder, scratch, token_row, positions, longest_run)
    require(window in scratch.plans, f"attention: scratch was made for windows {sorted(scratch.plans)}, not {window}")
    require(
        (scratch.heads, scratch.kv_heads, scratch.head_dim) == (width // head_dim, kv_heads, head_dim),
        "attention: scratch was made for other heads",
    )
    plan, kv = scratch.plans[window], k_pages.dtype
    share = decode_share(group, head_dim)
    heads, part = kv_heads * share, group // share
    parts = 1 if longest_run == 1 and part <= 8 else decode_columns(head_dim) // 8
    recorder.launch(
        decode_symbol(kv, head_dim, parts),
        [
            q,
            k_pages,
            v_pages,
            0,
            page_table,
            plan,
            scratch.counters,
            scratch.records,
            scratch.totals,
            out,
            page_table.shape[1],
            kv_heads,
            reciprocal31(share),
            heads,
            reciprocal31(heads),
            part,
            reciprocal31(part),
            scratch.tasks_room,
            0 if longest_run == 1 else MAX_RUN - 1,
            float(scale),
            window,
            float(softcap),
        ],
        scratch.blocks,
    )
    if longest_run is not None and longest_run <= MAX_RUN:
        return
    common = [
        page_table,
        plan,
        out,
        page_table.shape[1],
        kv_heads,
        reciprocal31(kv_heads),
        group,
        reciprocal31(group),
        scratch.tasks_room,
        float(scale),
        window,
        float(softcap),
    ]
    if kv not in PACKED and device.arch == 90:
        from zse.kernels.gpu.attention_prefill import prefill_swizzle, wgmma_symbol

        swizzle = prefill_swizzle(head_dim)
        maps = [
            device.tensor_map(flat, (PAGE, swizzle // 2), swizzle=swizzle)
            for flat in (tensor._replace(shape=(pages * kv_heads * PAGE, head_dim)) for tensor in (k_pages, v_pages))
        ]
        recorder.launch(wgmma_symbol(kv, head_dim), [q, *maps, *common], scratch.blocks)
    else:
        from zse.kernels.gpu.attention_mma import mma_symbol

        recorder.launch(mma_symbol(kv, head_dim), [q, k_pages, v_pages, 0, *common], scratch.blocks)


def attention_variants(target) -> list[Variant]:
    """All kernels of attention for a target."""
    if target.has("simt"):
        from zse.kernels.gpu.attention_simple import simple_variants

        return simple_variants(target)
    from zse.kernels.gpu.attention_mma import mma_variants
    from zse.kernels.gpu.attention_prefill import wgmma_variants

    return plan_variants(target) + decode_variants(target) + wgmma_variants(target) + mma_variants(target)
