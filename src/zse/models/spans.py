"""Ranges of rows, columns and heads that ranks have, and which of a file's rows can be read apart."""

from zse.formats.source import FP4_LAYOUTS, IN_TURN, TensorInfo
from zse.quant.scheme import rows_per_line

Span = tuple[int, int]  # start, stop


def spread(total: int, unit: int, size: int) -> list[Span]:
    """[0, total) as `size` spans, as equal as cuts at multiples of `unit` allow; some are empty where these are too few."""
    count = -(-total // unit)
    return [(count * rank // size * unit, min(total, count * (rank + 1) // size * unit)) for rank in range(size)]


def head_spans(heads: int, kv_heads: int, size: int) -> list[Span]:
    """The query heads of each rank: whole groups of a KV head, or where there are more ranks than those a part of one's."""
    group = heads // kv_heads
    if size <= kv_heads:
        return [(start * group, stop * group) for start, stop in spread(kv_heads, 1, size)]
    spans = []
    for kv_head, (first, last) in enumerate(spread(size, 1, kv_heads)):
        spans += [(kv_head * group + start, kv_head * group + stop) for start, stop in spread(group, 1, last - first)]
    return spans


def reads_rows(info: TensorInfo, start: int, stop: int) -> bool:
    """Whether the file stores these rows apart from others."""
    if info.layout == IN_TURN:
        return False
    if info.is_plain or info.layout in FP4_LAYOUTS:
        return True
    if info.parts is not None or info.layout not in ("r16", "rows"):
        return False
    lines = [rows_per_line(plane, info.layout, info.shape[0]) for plane, _, _ in info.placed()]
    return all(start % rows == 0 and (stop % rows == 0 or stop == info.shape[0]) for rows in lines)
