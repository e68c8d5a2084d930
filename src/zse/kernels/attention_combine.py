"""Attention's segments merged where they were computed apart (attention_kernels.py), and the list of its kernels."""

from zse import kernel as zl
from zse.kernels.attention import KV_DTYPES, MAX_RANK, SEEING_ROWS, SEGMENT
from zse.kernels.attention_kernels import FLOOR, SEES, attention_tile, with_sink, write_row
from zse.kernels.kv_pages import BLOCK
from zse.kernels.softmax import weight_of


class CombineParams(zl.Record):
    """Parameters of attention_combine."""

    positions: zl.Ptr[zl.i32, "const"]
    sinks: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    oq: zl.Ptr[zl.i8]
    oscale: zl.Ptr[zl.f32]
    osum: zl.Ptr[zl.f32]
    partial: zl.Ptr[zl.f32, "const"]
    has_sinks: zl.i64
    max_segments: zl.i64
    splits: zl.i64
    heads: zl.i64
    head_dim: zl.i64
    window: zl.i64
    INT8: zl.static


@zl.kernel
def attention_combine(p: CombineParams):
    """Grid (query heads, tokens): merge the segments of one query row, in order. Nothing to do when splits is 1."""
    if p.splits == 1:
        return
    L = zl.target.lanes
    num_keys = zl.i64(p.positions[zl.block_index(1)]) + 1
    first = max(num_keys - p.window, 0) // SEGMENT if p.window > 0 else zl.i64(0)
    place = zl.block_index(1) * p.heads + zl.block_index(0)
    state = zl.local_array(zl.f32, MAX_RANK)  # what latent_attention.py leaves is merged here, too
    for d in range(0, p.head_dim, L):
        zl.store(state + d, zl.f32.x(L)(0))
    maximum_ = zl.f32(FLOOR)
    total = zl.f32(0)
    for index in range(first, (num_keys - 1) // SEGMENT + 1):
        record = p.partial + (place * p.max_segments + index) * (p.head_dim + BLOCK)
        peak = record[p.head_dim]
        new = max(maximum_, peak)
        rescale = weight_of(maximum_ - new)
        factor = weight_of(peak - new)
        total = zl.fma(total, rescale, record[p.head_dim + 1] * factor)
        for d in range(0, p.head_dim, L):
            zl.store(state + d, zl.fma(zl.load(state + d, L), rescale, zl.load(record + d, L) * factor))
        maximum_ = new
    write_row(p, state, with_sink(p, zl.block_index(0), maximum_, total), place * p.head_dim)


def variants(target):
    return [
        zl.Variant(
            f"attention_{'sees_' if rows == SEES else ''}{name}_r{rows or SEEING_ROWS}_{form}",
            attention_tile,
            {"R": rows or SEEING_ROWS, "KV": dtype, "INT8": form == "int8", "SEES": rows == SEES},
        )
        for name, dtype in KV_DTYPES.items()
        for rows in (2, 3, 4, SEES)
        for form in ("f32", "int8")
    ] + [
        zl.Variant(f"attention_combine_{form}", attention_combine, {"INT8": form == "int8"}) for form in ("f32", "int8")
    ]
