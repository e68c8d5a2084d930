"""qkv_post and attention of a decode step of few tokens in one launch, on a GPU with matrix instructions
(kernels/gpu/attention_heads.py)."""

from functools import cache
from typing import Any

from zse.kernels import attention_cases, gpu
from zse.kernels.kv_pages import BLOCK, head_dim_of
from zse.kernels.op import Case, Cost, HostArray, Op, OutputSpec, Tolerance, cases_of, check, later, require
from zse.kernels.qkv_post import QKV_POST, sources
from zse.lazy import numpy as np
from zse.quant import pack
from zse.runtime.args import Args

FEW_TOKENS = 8  # of a recording, at most: every block makes its queries


@cache
def _kernels() -> tuple[Any, Any, Any, int]:
    """What this needs of lazy modules, whose names cost 2 us each: how attention is recorded, symbols, sizes of heads and groups."""
    found = gpu.attention_heads
    return gpu.attention.record_attention, found.symbol_of, found.HEAD_DIMS, found.GROUP


def takes(device, tokens: int, pages, group: int, rotary: int, q_norm) -> bool:
    """Whether heads_attention() takes heads. tokens: of the recording, at most; pages: of the values; group: query heads of a KV
    head; rotary: dimensions that are turned."""
    if device.kernels != "gpu" or device.simt or pages.dtype != "bf16" or tokens > FEW_TOKENS:
        return False
    (_, _, head_dims, most), head_dim = _kernels(), head_dim_of(pages)
    is_one = head_dim in head_dims and rotary == head_dim and group <= most
    return is_one and (q_norm is None or q_norm.shape == (head_dim,))


def heads_attention(
    recorder,
    qkv,
    q_norm,
    k_norm,
    table,
    k_pages,
    v_pages,
    page_table,
    token_row,
    positions,
    out,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    eps: float = 0.0,
    sinks=None,
    scratch=None,
    keeps_records: bool = False,
    blocks: Any = None,
) -> None:
    """Writes the K and V of M tokens, of a row each, into their pages, and their attention into out bf16 [M, Hq * D].

    qkv, q_norm, k_norm, table, k_pages, v_pages, page_table, token_row, positions, eps: as qkv_post() takes them, pages
    bf16, D 64 or 128, all of it turned, norms of each head or none, Hq / Hk at most 8. scale, window, softcap, sinks,
    scratch: as attention() on a GPU takes them (gpu/attention.py), with longest_run 1. keeps_records: what a row's tasks,
    where they are several, leave in the scratch is not merged into out. blocks: of the grid, a number or symbol (None: as of the scratch)."""
    kv_heads, head_dim = v_pages.shape[1], head_dim_of(v_pages)
    tokens, width = out.shape
    require(table is not None, "heads_attention: heads are turned")
    group = width // (kv_heads * head_dim)
    require(takes(recorder.device, 1, v_pages, group, table.shape[1], q_norm), "heads_attention: other heads")
    require((q_norm is None) == (k_norm is None), "heads_attention: q_norm and k_norm go together")
    for norm in (q_norm, k_norm):
        if norm is not None:
            check("heads_attention q_norm, k_norm", norm, "f32", head_dim)
    check("heads_attention table", table, "f32", tokens, head_dim)
    q, k, v, strides = sources(qkv, tokens, width, kv_heads * head_dim)
    made_of = Args(q=q, k=k, v=v, **dict(zip(("q_stride", "k_stride", "v_stride"), strides, strict=True)))
    made_of |= dict(q_norm=q_norm, k_norm=k_norm, table=table, eps=float(eps), keeps_records=int(keeps_records))
    record, symbol_of, _, _ = _kernels()
    record(
        recorder,
        None,
        k_pages,
        v_pages,
        page_table,
        token_row,
        positions,
        out,
        scale,
        window,
        softcap,
        scratch,
        longest_run=1,
        sinks=sinks,
        heads=(made_of, symbol_of(head_dim, "plain" if q_norm is None else "norm"), blocks),
    )


def _reference(qkv, q_norm, k_norm, table, k_pages, v_pages, eps=0.0, **paged):
    """Queries, keys and values rounded to bf16 once, as they are in pages. paged: as of attention()."""
    where = (paged[name] for name in ("page_table", "token_row", "positions"))
    made = QKV_POST.reference(qkv, q_norm, k_norm, table, k_pages, v_pages, *where, eps)
    q, keys, values = (HostArray("bf16", pack.f32_to_bf16(part.astype(np.float32))) for part in made.values())
    attended = attention_cases.attention_reference(q, keys, values, **paged)
    return attended | {name: made[name] for name in ("k_pages", "v_pages")}


def _cases(rng):
    near = Tolerance(6e-3, 6e-3, "weights and the result rounded to bf16 (2^-9), sums of some hundred values near 1")
    stored = Tolerance(1e-6, 1.1 * 2.0**-8, "rounded once to bf16")
    for lengths, heads, kv_heads, head_dim, norm, options in (
        ([1, 16, 17, 301, 1024], 28, 4, 128, False, {}),
        ([1030], 28, 4, 128, False, {}),
        ([5, 2100], 8, 2, 128, True, {}),
        ([640, 33, 4097], 32, 8, 128, True, {"window": 300}),
        ([1, 701], 9, 3, 64, False, {"softcap": 20.0}),
        ([300, 15, 2501], 16, 2, 64, False, {"sinks": True, "window": 128}),
        ([129, 1500], 15, 5, 64, True, {"sinks": True}),
        ([300, 16], 3, 3, 128, False, {}),
    ):
        runs, options = [(length - 1, 1) for length in lengths], dict(options)
        batch: dict[str, Any] = attention_cases.gpu_batch(rng, runs, heads, kv_heads, head_dim, "bf16")
        tokens, widths = len(runs), (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        parts = [rng.standard_normal((tokens, width)).astype(np.float32) for width in widths]
        angle = rng.uniform(-3, 3, (tokens, head_dim // 2))
        weights = [(1 + rng.standard_normal(head_dim) / 4).astype(np.float32) if norm else None for _ in range(2)]
        if options.pop("sinks", False):
            batch["sinks"] = (rng.standard_normal(heads) * 3).astype(np.float32)
        del batch["q"]
        pages = {name: batch.pop(name) for name in ("k_pages", "v_pages")}
        for row, length in enumerate(lengths):  # what stands where the step writes must not be read
            page, slot = batch["page_table"][row, (length - 1) // BLOCK], (length - 1) % BLOCK
            for array in pages.values():
                array.array[page, :, slot] = 0x7FFF
        inputs = {
            "qkv": tuple(parts) if head_dim == 64 else np.concatenate(parts, axis=1),
            "q_norm": weights[0],
            "k_norm": weights[1],
            "table": np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32),
        }
        outputs = {
            name: OutputSpec(array.array.shape, "bf16", stored, inout=array.array) for name, array in pages.items()
        }
        yield Case(
            f"{lengths} {heads}/{kv_heads} D={head_dim}{' norm' if norm else ''} {options}",
            inputs | batch,
            outputs | {"out": OutputSpec((tokens, widths[0]), "bf16", near)},
            {"scale": head_dim**-0.5, "eps": 1e-6} | options,
        )


def _cost(case: Case) -> Cost:
    tokens, width = case.outputs["out"].shape
    kv_heads, head_dim = case.outputs["v_pages"].shape[1], head_dim_of(case.outputs["v_pages"])
    window = case.options.get("window", 0)
    keys = [int(position) + 1 for position in case.inputs["positions"]]
    seen = sum(min(key, window) if window else key for key in keys)
    written = tokens * (width + 2 * kv_heads * head_dim)
    return Cost(seen * 4 * kv_heads * head_dim + written * 8, seen * width * 4 + written * 3)


HEADS_ATTENTION = Op(
    "heads_attention",
    lambda target: [],
    heads_attention,
    _reference,
    cases_of(cpu=lambda rng: iter(()), gpu=_cases),
    _cost,
    later("gpu.attention_decode", "heads_variants"),
)
