"""Text boxes of a page → its reading order: columns by white space that no line crosses, rows of tables, lines, paragraphs.

A page is read from top to bottom in bands. A band has columns as long as some vertical strip stays white in all of its lines; a line
that covers every strip, such as a heading over two columns, ends it. Lengths are points of the page, y grows upwards."""

import re
import statistics
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

GAP = 0.9  # of a line's height: a wider gap between words may separate columns, a smaller one does not
MAX_DEPTH = 4  # columns in columns
BOLD, MONO = 1, 2  # bits of Box.style
_MARK = re.compile(r"(?:[•◦▪▸●○■□‣⁃∙·–—*+-]|\(?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{1,5})[.)])$")
_ITEM = re.compile(r"([•◦▪▸●○■□‣⁃∙·*+–—-]|\(?(?:\d{1,3}|[a-zA-Z])[.)])\s+\S")
_HYPHENS = ("-", "\u00ad", "\u2010")
SOFT_HYPHEN = "\u00ad"
_AROUND_WORDS = ".,;:!?()[]\"'“”‘’"
_HYPHENATED_WORD = re.compile(r"\w{1,40}(?:-\w{1,40}){1,4}")


Hyphenated = frozenset[str]  # words, in lower case, that have a hyphen within a line


def hyphenated_words(boxes: Iterable["Box"]) -> Hyphenated:
    """Those of a document's boxes."""
    return frozenset(word.lower() for box in boxes if "-" in box.text for word in _HYPHENATED_WORD.findall(box.text))


class Box:
    """A run of words on one line. size: of its font, as drawn; height: what the font may reach up and down, which differs from font
    to font of one size."""

    __slots__ = ("height", "size", "style", "text", "x0", "x1", "y0", "y1")

    def __init__(self, x0: float, y0: float, x1: float, y1: float, text: str, style: int = 0, size: float = 0.0):
        self.x0, self.y0, self.x1, self.y1, self.text, self.style = x0, y0, x1, y1, text, style
        self.height = y1 - y0
        self.size = size or self.height


class Paragraph(NamedTuple):
    """Lines that belong together. kind: "paragraph", "list", "table" (a row), "code". size: of its font; is_bold: all of it;
    is_first: the first row of a table. y: of its top; goes_on: whether it ends as if it went on elsewhere."""

    kind: str
    text: str
    size: float
    is_bold: bool
    num_lines: int
    y: float
    is_first: bool = False
    goes_on: bool = False


def _is_beside(one: Box, other: Box) -> bool:
    """Whether they stand on one line: they share half of the lower one's height."""
    shared = min(one.y1, other.y1) - max(one.y0, other.y0)
    return shared >= 0.5 * min(one.height, other.height)


def join_words(words: list[Box]) -> list[Box]:
    """Words in the order of the file → runs of words with usual gaps between them."""
    boxes: list[Box] = []
    last = None
    for word in words:
        if last is not None and last.style == word.style:
            gap = word.x0 - last.x1
            if -0.5 * word.height < gap < GAP * last.height and _is_beside(last, word):
                last.text += (" " if gap > 0.08 * word.height else "") + word.text
                last.x1 = max(last.x1, word.x1)
                if word.height > last.height:
                    last.y0, last.y1, last.height = word.y0, word.y1, word.height
                continue
        boxes.append(word)
        last = word
    return boxes


def rows_of(boxes: list[Box]) -> list[list[Box]]:
    """Lines from top to bottom, each from left to right. Runs that touch are one; so is an item's mark with what follows."""
    rows: list[list[Box]] = []
    for box in sorted(boxes, key=lambda box: -(box.y0 + box.y1)):
        if rows and _is_beside(rows[-1][0], box):
            rows[-1].append(box)
        else:
            rows.append([box])
    for row in rows:
        if len(row) < 2:
            continue
        row.sort(key=attrgetter("x0"))
        merged = [row[0]]
        for box in row[1:]:
            last = merged[-1]
            gap = box.x0 - last.x1
            height = max(last.height, box.height)
            if gap < GAP * height or (gap < 4 * height and _MARK.match(last.text)):
                longer = last if len(last.text) > len(box.text) else box
                space = " " if gap > 0.08 * height else ""
                x1, text = max(last.x1, box.x1), last.text + space + box.text
                joint = Box(last.x0, longer.y0, x1, longer.y1, text, last.style & box.style, longer.size)
                merged[-1] = joint
            else:
                merged.append(box)
        row[:] = merged
    return rows


# -- bands and columns

Spans = list[tuple[float, float]]


def _united(spans: Spans, row: list[Box], gap: float) -> Spans:
    """Where the spans or the row have text: spans with less than `gap` between them are one."""
    united: Spans = []
    for x0, x1 in sorted([*spans, *((box.x0, box.x1) for box in row)]):
        if united and x0 - united[-1][1] < gap:
            if x1 > united[-1][1]:
                united[-1] = united[-1][0], x1
        else:
            united.append((x0, x1))
    return united


def _bands(rows: list[list[Box]]) -> Iterator[tuple[list[list[Box]], Spans]]:
    """(rows, columns): with one column where no strip stays white."""
    band: list[list[Box]] = []
    spans: Spans = []
    for row in rows:
        gap = GAP * max(box.height for box in row)
        united = _united(spans, row, gap)
        is_lost = len(united) == 1 and (len(spans) > 1 or (len(row) > 1 and band))
        if band and is_lost:
            yield band, spans
            band, spans = [], _united([], row, gap)
        else:
            spans = united
        band.append(row)
    if band:
        yield band, spans


def _columns(band: list[list[Box]], spans: Spans) -> list[list[Box]]:
    columns: list[list[Box]] = [[] for _ in spans]
    for row in band:
        for box in row:
            columns[
                next(index for index, (_, x1) in enumerate(spans) if box.x0 < x1 or index == len(spans) - 1)
            ].append(box)
    return columns


def _is_prose(columns: list[list[Box]], spans: Spans) -> bool:
    """Whether lines fill two columns or more, as those of a table's cells do not."""
    filled = 0
    for column, (x0, x1) in zip(columns, spans):
        if len(column) < 3:
            continue
        width = statistics.median(box.x1 - box.x0 for box in column)
        filled += width >= 0.7 * (x1 - x0) and statistics.median(len(box.text) for box in column) >= 18
    return filled >= 2


def read(boxes: list[Box], hyphenated: Hyphenated = frozenset(), depth: int = 0) -> list[Paragraph]:
    """The paragraphs and rows of the boxes in reading order. hyphenated: what keeps its hyphen at a line's end."""
    found: list[Paragraph] = []
    lines: list[list[Box]] = []  # of bands with one column, that follow each other
    for band, spans in _bands(rows_of(boxes)):
        num_split = sum(len(row) > 1 for row in band)
        if len(spans) == 1 or depth >= MAX_DEPTH:
            lines += band
            continue
        columns = _columns(band, spans)
        if not _is_prose(columns, spans):
            if num_split >= 2 and 2 * num_split >= len(band):
                first, last = _table_rows(band)
                found += _paragraphs(lines + band[:first], hyphenated)
                found += _table(band[first:last], spans, hyphenated)
                lines = band[last:]
                continue
            if num_split <= 1 and len(band) < 3:
                lines += band
                continue
        found += _paragraphs(lines, hyphenated)
        lines = []
        for column in columns:
            part = read(column, hyphenated, depth + 1)
            if part and found and _joins(found[-1], part[0]):
                found[-1] = _joined(found[-1], part[0], hyphenated)
                part = part[1:]
            found += part
    return found + _paragraphs(lines, hyphenated)


def _joins(one: Paragraph, other: Paragraph) -> bool:
    """Whether a paragraph goes on at the top of the next column."""
    return one.goes_on and one.kind in ("paragraph", "list") and other.kind == "paragraph" and other.text[:1].islower()


def _joined(one: Paragraph, other: Paragraph, hyphenated: Hyphenated) -> Paragraph:
    return one._replace(
        text=join_lines([one.text, other.text], hyphenated),
        num_lines=one.num_lines + other.num_lines,
        goes_on=other.goes_on,
    )


def _table_rows(band: list[list[Box]]) -> tuple[int, int]:
    """Where the table begins and ends in its band: a caption above it or text far below it may leave the same strips white."""
    first, last = 0, len(band)
    while len(band[first]) == 1:
        first += 1
    usual = statistics.median(above[0].y0 - below[0].y0 for above, below in zip(band[first:], band[first + 1 :]))
    for index in range(first + 1, last):
        if len(band[index]) == 1 and band[index - 1][0].y0 - band[index][0].y0 > 1.6 * usual:
            if not any(len(row) > 1 for row in band[index:]):
                return first, index
    return first, last


def _table(band: list[list[Box]], spans: Spans, hyphenated: Hyphenated) -> list[Paragraph]:
    """Its rows. A line without a first cell, close under the one before, goes on with that one's cells."""
    rows: list[tuple[list[str], float, bool]] = []
    bottom = 0.0
    for row in band:
        cells = [""] * len(spans)
        for index, column in enumerate(_columns([row], spans)):
            cells[index] = " ".join(box.text for box in column)
        top, height = max(box.y1 for box in row), max(box.height for box in row)
        if rows and not cells[0] and bottom - top < 0.5 * height:
            before = rows[-1][0]
            for index, cell in enumerate(cells):
                before[index] = (
                    join_lines([before[index], cell], hyphenated) if before[index] and cell else before[index] or cell
                )
        else:
            rows.append((cells, top, all(box.style & BOLD for box in row)))
        bottom = min(box.y0 for box in row)
    return [
        Paragraph("table", " | ".join(cells).rstrip(" |").replace(SOFT_HYPHEN, "-"), 0.0, is_bold, 1, top, not number)
        for number, (cells, top, is_bold) in enumerate(rows)
    ]


# -- lines and paragraphs


def join_lines(lines: list[str], hyphenated: Hyphenated = frozenset()) -> str:
    """Lines as one text: a word that was cut at a line's end is whole again."""
    parts = []
    for line, following in zip(lines, [*lines[1:], ""]):
        if not line.endswith(_HYPHENS):
            parts += [line, " "]
            continue
        if following[:1].islower() and line[-2:-1].isalpha():
            head, tail = line[:-1].rpartition(" ")[2], following.partition(" ")[0]
            keeps = f"{head}-{tail}".strip(_AROUND_WORDS).lower() in hyphenated
            parts += [line[:-1], "-" if keeps else ""]
        else:
            parts += [line[:-1], "-", " "]
    return "".join(parts).rstrip()


class _Line(NamedTuple):
    text: str
    x0: float
    x1: float
    y0: float
    y1: float
    height: float
    size: float
    style: int


def _line(row: list[Box]) -> _Line:
    widest = max(row, key=lambda box: len(box.text))
    style = BOLD | MONO
    for box in row:
        style &= box.style
    text = "  ".join(box.text for box in row)
    return _Line(text, row[0].x0, row[-1].x1, widest.y0, widest.y1, widest.height, widest.size, style)


def _leading(lines: list[_Line]) -> float:
    """The usual distance of baselines."""
    distances = [
        above.y0 - below.y0
        for above, below in zip(lines, lines[1:])
        if 0 < above.y0 - below.y0 < 3 * max(above.height, 1)
    ]
    if not distances:
        return 0.0
    return sorted(distances)[len(distances) // 3]


def _begins(line: _Line, last: _Line, first: _Line, leading: float, left: float, right: float) -> bool:
    """Whether a line begins a paragraph under `last`; first: of the open paragraph."""
    distance = last.y0 - line.y0
    if distance > 1.35 * max(leading, 0.9 * last.height) or distance < 0:
        return True
    if abs(line.size - last.size) > 0.15 * last.size or (line.style ^ last.style) & (BOLD | MONO):
        return True
    if line.style & MONO:
        return False
    if _ITEM.match(line.text) and not (line.x0 > first.x0 + 0.5 * line.height and not _ITEM.match(first.text)):
        return True
    if _ITEM.match(first.text) and line.x0 > first.x0 + 0.3 * line.height:
        return False
    if line.x0 > left + 0.8 * line.height and last.x0 <= left + 0.4 * line.height:
        return True  # the first line is indented
    ends = last.text.rstrip("\"'”’)»")[-1:] in tuple(".!?:…。")
    return ends and last.x1 < right - 0.2 * (right - left) and not line.text[:1].islower()


def _paragraphs(rows: list[list[Box]], hyphenated: Hyphenated) -> list[Paragraph]:
    lines = [_line(row) for row in rows]
    if not lines:
        return []
    left, right = min(line.x0 for line in lines), max(line.x1 for line in lines)
    leading = _leading(lines)
    groups = [[lines[0]]]
    for last, line in zip(lines, lines[1:]):
        if _begins(line, last, groups[-1][0], leading, left, right):
            groups.append([line])
        else:
            groups[-1].append(line)
    return [_paragraph(group, hyphenated) for group in groups]


def _paragraph(lines: list[_Line], hyphenated: Hyphenated) -> Paragraph:
    first, last = lines[0], lines[-1]
    size = statistics.median(line.size for line in lines)
    is_bold = all(line.style & BOLD for line in lines)
    if first.style & MONO:
        margin = min(line.x0 for line in lines)
        width = max(0.1, (first.x1 - first.x0) / max(1, len(first.text)))
        text = "\n".join(" " * min(40, round((line.x0 - margin) / width)) + line.text for line in lines)
        return Paragraph("code", text.replace(SOFT_HYPHEN, "-"), size, is_bold, len(lines), first.y1)
    text = join_lines([line.text for line in lines], hyphenated)
    goes_on = last.text[-1:] not in tuple(".!?:;…。")
    kind = "list" if _ITEM.match(text) else "paragraph"
    return Paragraph(kind, text, size, is_bold, len(lines), first.y1, goes_on=goes_on)
