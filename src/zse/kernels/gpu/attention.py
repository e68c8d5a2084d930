"""The launches of attention on a GPU: which kernels a recording needs, and their arguments."""

from typing import Any

from zse.errors import UnsupportedError
from zse.kernel import Variant
from zse.kernels.gpu import attention_mma, attention_packed, attention_simple
from zse.kernels.gpu import attention_plan as planning
from zse.kernels.gpu.attention_decode import decode_symbol, decode_variants
from zse.kernels.gpu.attention_plan import (
    MAX_RUN,
    PREFILL_ROWS,
    SMALL,
    WIDE,
    decode_columns,
    decode_share,
    head_dims,
    prefill_ranks,
    reciprocal31,
)
from zse.kernels.gpu.attention_prefill import prefill_swizzle, wgmma_symbol, wgmma_variants
from zse.kernels.kv_pages import BLOCK, PACKED, head_dim_of, pages_shape
from zse.kernels.op import check, require
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div, most_of

KV_DTYPES = ("bf16", "f16", *PACKED)
MAX_GROUP = 128  # query heads of a kv head: rows of a prefill tile


def _check(q, k_pages, v_pages, page_table, token_row, positions, out, dims=planning.HEAD_DIMS) -> tuple[int, int]:
    """(head_dim, query heads of a kv head) of tensors that attention takes; q: None where the launch makes it. ValueError,
    TypeError, UnsupportedError."""
    pages, kv_heads = v_pages.shape[:2]
    head_dim = head_dim_of(v_pages)
    tokens, width = (out if q is None else q).shape
    if head_dim not in dims:
        raise UnsupportedError("attention on a GPU (--device cpu takes more): head_dim", head_dim, dims)
    require(width % (kv_heads * head_dim) == 0, f"attention: q is {width} wide, {kv_heads} kv heads of {head_dim}")
    group = width // (kv_heads * head_dim)
    if group > MAX_GROUP:
        raise UnsupportedError("attention: query heads of a kv head", group, [f"1 to {MAX_GROUP}"])
    if q is not None:
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
    return head_dim, group


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
    window: int = 0,
    softcap: float = 0.0,
    scratch: dict[tuple[int, int], planning.AttentionScratch] | None = None,
    longest_run: int | None = None,
    ahead: int = 0,
    sinks=None,
    sees=None,
    heads: tuple[Args, str, Any] | None = None,
) -> None:
    """attention() on a GPU; what is not said here is said there. q, out bf16; both pages [P, Hk, 16, D], bf16 or f16,
    or packed i8 or e4m3; D 64, 96, 128 or 256, with pages in 16 bits 512, of encoders 32; Hq / Hk at most 128.

    scratch: by KV heads and head_dim the AttentionScratch that plan_attention() has filled in this recording with the
    same longest_run (None: made and filled here, for tests), with `sees` one whose max_run is 0; longest_run: the most
    tokens of one row in any run of the recording (None: unknown). ahead: of an encoder, whose scratch is not causal and
    says what is seen. heads: instead of q what the kernel of that symbol makes it of, and its grid (zse.kernels.heads_attention)."""
    device = recorder.device
    dims = head_dims(k_pages.dtype)
    if ahead:
        dims = (SMALL, *planning.HEAD_DIMS)
    dims = attention_simple.SIMPLE_DIMS if device.simt else dims
    head_dim, group = _check(q, k_pages, v_pages, page_table, token_row, positions, out, dims)
    kv_heads, (tokens, width) = v_pages.shape[1], out.shape
    common = dict(
        q=q,
        page_table=page_table,
        out=out,
        max_pages=page_table.shape[1],
        kv_heads=kv_heads,
        group=group,
        scale=float(scale),
        window=window,
        softcap=float(softcap),
        sinks=sinks,
        has_sinks=int(sinks is not None),
    )
    if sinks is not None:
        check("attention sinks", sinks, "f32", width // head_dim)
    paged = dict(k_pages=k_pages, v_pages=v_pages)
    if scratch is None:
        require(isinstance(tokens, int), "attention: a number of tokens that is a symbol needs scratch")
        sizes = width // head_dim, kv_heads, head_dim, [window], tokens, page_table.shape[1] * BLOCK
        found = planning.AttentionScratch.make(device, *sizes, causal=not ahead and sees is None)
        planning.plan_attention(recorder, found, token_row, positions, k_pages.dtype, longest_run)
    else:
        require((kv_heads, head_dim) in scratch, "attention: scratch was made for other heads")
        found = scratch[kv_heads, head_dim]
    require(window in found.plans, f"attention: scratch was made for windows {sorted(found.plans)}, not {window}")
    require(found.heads == width // head_dim, "attention: scratch was made for other heads")
    if ahead:
        require(found.sees is not None, "attention: scratch was made for causal attention")
        sees = found.sees[window]
    elif sees is not None:
        check("attention sees", sees, "i32", tokens)
        require(found.max_run == 0, "attention: scratch decodes, which sees no keys ahead")
    seen = dict(sees=sees, has_sees=int(sees is not None))
    if device.simt or head_dim == SMALL:
        args = Args(**common, **seen, **paged, token_row=token_row, positions=positions)
        recorder.launch(attention_simple.symbol_of(k_pages.dtype, head_dim), args, (kv_heads * group, tokens))
        return
    common |= dict(plan=found.plans[window], tasks_room=found.tasks_room)
    if found.max_run:
        _record_decode(recorder, common, paged, found, longest_run, heads)
    if longest_run is None or longest_run > found.max_run:
        _record_prompts(recorder, common | seen, paged, group, head_dim, found.blocks)


def _record_decode(recorder, common, paged, found: planning.AttentionScratch, longest_run: int | None, made) -> None:
    """The launch for rows with few tokens."""
    kv, head_dim, kv_heads, group = paged["v_pages"].dtype, found.head_dim, common["kv_heads"], common["group"]
    share = decode_share(group, head_dim)
    heads, part = kv_heads * share, group // share
    parts = 1 if longest_run == 1 and part <= 8 else decode_columns(head_dim) // 8
    args = Args(
        **common | dict(kv_heads=heads, group=part),
        **paged,
        counters=found.counters,
        records=found.records,
        totals=found.totals,
        page_heads=kv_heads,
        by_share=reciprocal31(share),
        by_heads=reciprocal31(heads),
        by_group=reciprocal31(part),
        fresh_before=0 if longest_run == 1 else MAX_RUN - 1,
    )
    of_heads, symbol, blocks = made or ({}, decode_symbol(kv, head_dim, parts), None)
    recorder.launch(symbol, Args(**args | of_heads), found.blocks if blocks is None else blocks)


def _record_prompts(recorder, common, paged, group: int, head_dim: int, blocks: int) -> None:
    """The launch for rows with many tokens."""
    device, (pages, kv_heads), kv = recorder.device, paged["v_pages"].shape[:2], paged["k_pages"].dtype
    args = Args(**common, by_heads=reciprocal31(kv_heads), by_group=reciprocal31(group))
    on_hopper = device.arch == 90 and head_dim < WIDE
    if kv not in PACKED and on_hopper:
        swizzle = prefill_swizzle(head_dim)
        for name, tensor in (("k_map", paged["k_pages"]), ("v_map", paged["v_pages"])):
            flat = tensor._replace(shape=(pages * kv_heads * BLOCK, head_dim))
            args[name] = device.tensor_map(flat, (BLOCK, swizzle // 2), swizzle=swizzle)
        # A tile's tokens x heads of a group, of as many tokens as the recording may have.
        q, per_tile = common["q"], max(1, PREFILL_ROWS // group)
        room = (q.buffer.nbytes - q.offset) // (2 * q.shape[1])
        tokens = min(room, most_of(q.shape[0], recorder.maxima))
        args["q_map"] = device.tensor_map(
            q, (per_tile, group, swizzle // 2), swizzle=swizzle, dims=(tokens, kv_heads * group, head_dim)
        )
        ranks = prefill_ranks(device.arch, kv, head_dim)
        args["box_rows"] = per_tile * group
        recorder.launch(wgmma_symbol(kv, head_dim), args, ceil_div(blocks, ranks) * ranks)
    else:
        symbol = attention_packed.packed_symbol if on_hopper else attention_mma.mma_symbol
        recorder.launch(symbol(kv, head_dim), Args(**args, **paged), blocks)


def attention_variants(target) -> list[Variant]:
    """All kernels of attention for a target."""
    everywhere = attention_simple.simple_variants(target) + planning.plan_variants(target)
    if target.has("simt"):
        return everywhere
    return (
        everywhere
        + decode_variants(target)
        + wgmma_variants(target)
        + attention_packed.packed_variants(target)
        + attention_mma.mma_variants(target)
    )
