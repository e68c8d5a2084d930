"""Tables as text (RFC 4180 and its relatives) → rows."""

import csv
import io
import re

from zse.rag.documents import DocumentError, ParsedDocument, ParseLimits, TextBlock
from zse.rag.parse.text import decode, title_of

MAX_FIELD = 1 << 20  # characters: a quote that is not closed takes all that follows
_BY_EXTENSION = {"tsv": "\t", "tab": "\t", "psv": "|"}
_NUMBER = re.compile(r"[\s+-]*\d[\d.,\s%eE+-]*$")
_QUOTED = re.compile(r'"[^"]*"')


def _delimiter(text: str, name: str) -> str:
    """By the name's extension, else the sign that most of the first lines have equally often."""
    known = _BY_EXTENSION.get(name.rpartition(".")[2].lower())
    if known:
        return known
    lines = [_QUOTED.sub("", line) for line in text[:16384].split("\n")[:30] if line.strip()]
    if len(lines) > 1 and len(text) > 16384:
        lines.pop()  # may be cut
    best, found = 0, ","
    for sign in (",", ";", "\t", "|"):
        counts = [line.count(sign) for line in lines]
        usual = max(set(counts), key=counts.count) if counts else 0
        score = usual and counts.count(usual) * 100 + min(usual, 99)
        if score > best:
            best, found = score, sign
    return found


def _names_columns(first: list[str], second: list[str]) -> bool:
    """Whether a first row is one of names: none is a number or left out, and it is not of one cell alone."""
    return bool(second) and all(cell.strip() and not _NUMBER.match(cell) for cell in first)


def parse(data: bytes, name: str, limits: ParseLimits) -> ParsedDocument:
    """Each row is a block; the first names the columns if none of its cells is a number. What stands in cells is text: no formula is
    evaluated anywhere."""
    text, warnings = decode(data)
    csv.field_size_limit(MAX_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text, name))
    blocks: list[TextBlock] = []
    rows, first = 0, [""]
    try:
        for row in reader:
            line = " | ".join(" ".join(cell.split()) if not cell.isalnum() else cell for cell in row)
            if line.strip(" |"):
                blocks.append(TextBlock("table", line))
                rows += 1
                if rows == 1:
                    first = row
                elif rows == 2 and _names_columns(first, row):
                    blocks[0].level = 1
                if rows > limits.max_blocks:
                    raise DocumentError(f"the table has more than {limits.max_blocks} rows", "request_too_large")
    except csv.Error:
        raise DocumentError(
            f"line {reader.line_num}: a field has more than {MAX_FIELD} characters; is a quote not closed?"
        ) from None
    return ParsedDocument("csv", title_of(name), blocks, warnings=warnings)
