"""PDF → blocks in reading order: pages → words → columns, lines and paragraphs (layout.py) → headings, without running heads."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable

from zse.rag.documents import DocumentError, ParsedDocument, ParseLimits, TextBlock
from zse.rag.parse import layout
from zse.rag.parse.layout import MONO, Box, Paragraph
from zse.rag.parse.pdf_bounds import check
from zse.rag.parse.pdfium import PdfFile, load
from zse.rag.parse.text import title_of

__all__ = ["load", "parse"]
EDGE = 0.12  # of a page's height, at its top and bottom: where running heads and page numbers stand
MAX_HEADING_CHARACTERS, MAX_HEADING_LINES = 200, 3
LARGER = 1.1  # than the body: a heading
MAX_LEVELS = 6
_NUMBER = re.compile(r"\d+|\b[ivxlcdm]+\b", re.IGNORECASE)


def parse(
    data: bytes,
    name: str,
    limits: ParseLimits,
    password: str = "",
    send_image: Callable[[int, bytes], None] | None = None,
) -> ParsedDocument:
    """The title is that of the file's properties, else the first heading. send_image: takes page and PNG of pages without text."""
    check(data, limits)
    with PdfFile(data, password) as file:
        num_pages, title = file.num_pages, title_of(file.title())
        if num_pages > limits.max_pages:
            raise DocumentError(f"the PDF has more than {limits.max_pages} pages")
        pages, warnings = _read_pages(file, num_pages, limits, send_image)
    _drop_running_heads(pages)
    body = _body_size(pages)
    if _is_mono(pages):
        for page in pages:
            for box in page.boxes:
                box.style &= ~MONO
    blocks = _blocks(pages, body)
    title = title or title_of(next((block.text for block in blocks if block.kind == "heading"), ""))
    return ParsedDocument("pdf", title, blocks, num_pages, warnings)


class _Page:
    """number: from 1. boxes: its runs of words; sideways: words that stand on their side."""

    __slots__ = ("boxes", "height", "number", "sideways")

    def __init__(self, number: int, height: float, boxes: list[Box], sideways: list[str]):
        self.number, self.height, self.boxes, self.sideways = number, height, boxes, sideways


def _read_pages(
    file: PdfFile, num_pages: int, limits: ParseLimits, send_image: Callable[[int, bytes], None] | None
) -> tuple[list[_Page], list[str]]:
    pages: list[_Page] = []
    damaged, empty, left, num_images = [], [], limits.max_text_bytes, 0
    for index in range(num_pages):
        try:
            with file.page(index) as page:
                words, sideways = page.words()
                if not words and not sideways and page.has_images:
                    if send_image is not None and num_images < limits.max_ocr_pages:
                        send_image(index + 1, page.png())
                        num_images += 1
                    else:
                        empty.append(index + 1)
        except DocumentError as error:
            if error.code != "unprocessable_file":
                raise
            damaged.append(index + 1)
            continue
        left -= sum(len(word.text) for word in words) + sum(map(len, sideways))
        if left < 0:
            raise DocumentError(f"the PDF has more than {limits.max_text_bytes >> 20} MiB of text", "request_too_large")
        pages.append(_Page(index + 1, page.height, layout.join_words(words), sideways))
    warnings = [
        f"{len(numbers)} of {num_pages} pages {what}, the first is {numbers[0]}"
        for numbers, what in ((damaged, "are damaged"), (empty, "are images without text and were not read by OCR"))
        if numbers
    ]
    return pages, warnings


# -- running heads


def _drop_running_heads(pages: list[_Page]) -> None:
    """Lines at a page's top or bottom that stand at the same height on many pages, but for their numbers, are no text of it. Books
    have other ones on left and right pages and in each chapter: three or four pages are enough."""
    if len(pages) < 3:
        return
    seen: Counter[tuple[str, int]] = Counter()
    where: dict[int, list[tuple[tuple[str, int], Box]]] = defaultdict(list)
    for page in pages:
        edges = [box for box in page.boxes if box.y0 > (1 - EDGE) * page.height or box.y1 < EDGE * page.height]
        for row in layout.rows_of(edges):
            text = " ".join(box.text for box in row)
            key = _NUMBER.sub("#", text).strip(), round(row[0].y0 / 4)
            where[page.number].append((key, Box(0, row[0].y0, 0, row[0].y1, "")))
        seen.update({key for key, _ in where[page.number]})
    least = 3 if len(pages) < 12 else 4
    # A line may be a dot off from page to page: neighbours of a height count as the same.
    running = {key for key in seen if sum(seen[key[0], key[1] + near] for near in (-1, 0, 1)) >= least}
    for page in pages:
        dropped = [(box.y0, box.y1) for key, box in where[page.number] if key in running]
        if dropped:
            page.boxes = [
                box
                for box in page.boxes
                if not any(min(box.y1, y1) - max(box.y0, y0) >= 0.5 * (box.y1 - box.y0) for y0, y1 in dropped)
            ]


# -- headings


def _body_size(pages: list[_Page]) -> float:
    """The size of most of the text."""
    sizes: Counter[float] = Counter()
    for page in pages:
        for box in page.boxes:
            sizes[round(box.size, 1)] += len(box.text)
    return max(sizes, key=sizes.__getitem__, default=0.0)


def _is_mono(pages: list[_Page]) -> bool:
    """Whether a typewriter wrote most of it: then its font says nothing of code."""
    mono = sum(len(box.text) for page in pages for box in page.boxes if box.style & MONO)
    return 2 * mono > sum(len(box.text) for page in pages for box in page.boxes)


def _is_heading(paragraph: Paragraph, body: float) -> bool:
    if paragraph.kind not in ("paragraph", "list") or paragraph.num_lines > MAX_HEADING_LINES:
        return False
    if len(paragraph.text) > MAX_HEADING_CHARACTERS or not any(map(str.isalpha, paragraph.text)):
        return False
    if paragraph.size >= LARGER * body:
        return True
    return paragraph.is_bold and paragraph.size >= 0.95 * body and paragraph.text[-1] not in ".,;:"


def _blocks(pages: list[_Page], body: float) -> list[TextBlock]:
    hyphenated = layout.hyphenated_words(box for page in pages for box in page.boxes)
    read = [(page, layout.read(page.boxes, hyphenated)) for page in pages]
    bold = sum(len(one.text) for _, found in read for one in found if one.is_bold)
    all_bold = 2 * bold > sum(len(one.text) for _, found in read for one in found)
    sizes_of_headings: Counter[float] = Counter()
    headings: set[int] = set()
    for _, found in read:
        for one in found:
            if _is_heading(one._replace(is_bold=one.is_bold and not all_bold), body):
                headings.add(id(one))
                sizes_of_headings[round(max(one.size, body), 1)] += 1
    levels: dict[float, int] = {}
    for size in sorted(sizes_of_headings, reverse=True):  # sizes that differ by less than 4 % are one level
        near = next((level for other, level in levels.items() if other <= 1.04 * size), None)
        levels[size] = near or min(len(set(levels.values())) + 1, MAX_LEVELS)
    blocks: list[TextBlock] = []
    for page, found in read:
        for one in found:
            if not one.text.strip():
                continue
            if id(one) in headings:
                level = levels[round(max(one.size, body), 1)]
                blocks.append(TextBlock("heading", one.text, level, page.number))
            else:
                level = 1 if one.kind == "table" and one.is_first else 0
                blocks.append(TextBlock(one.kind, one.text, level, page.number))  # type: ignore[arg-type]
        if page.sideways:
            blocks.append(TextBlock("paragraph", " ".join(page.sideways), 0, page.number))
    return blocks
