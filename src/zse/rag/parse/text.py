"""Bytes → text, and plain text → paragraphs."""

import re

from zse.rag.documents import DocumentError, ParsedDocument, ParseLimits, TextBlock

_BOMS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*+\n)+")
MAX_TITLE = 200  # characters


def decode(data: bytes) -> tuple[str, list[str]]:
    """(text with "\\n" at its line ends, warnings). A byte-order mark says what it is; else it is UTF-8, and what is not that is taken
    for cp1252, with a warning. DocumentError: a file of a mark's encoding that is none, or binary data."""
    warnings: list[str] = []
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            try:
                text = data[len(mark) :].decode(encoding)
            except UnicodeDecodeError as error:
                where = error.start + len(mark)
                raise DocumentError(f"the file begins as {encoding.upper()}, but is not at byte {where}") from None
            break
    else:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            if 0 in data[:4096]:
                raise DocumentError(
                    "the file is binary, not text: name its kind if it is one of those that are read"
                ) from None
            warnings.append(f"the text is not UTF-8 (byte {error.start}): it was read as Windows-1252")
            try:
                text = data.decode("cp1252")
            except UnicodeDecodeError:
                text = data.decode("latin-1")  # five bytes of cp1252 mean nothing
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        if text.count("\0", 0, 4096) > 16:
            raise DocumentError("the file is binary, not text: name its kind if it is one of those that are read")
        text = text.replace("\0", "\ufffd")
    return text, warnings


def title_of(text: str) -> str:
    """The first MAX_TITLE characters of a line, for a document that has no other title."""
    return " ".join(text[: 4 * MAX_TITLE].split())[:MAX_TITLE]


def paragraphs(text: str, start: int = 0) -> list[TextBlock]:
    """What stands between blank lines. start: of text in the document."""
    blocks, at = [], 0
    ends = [*(match.span() for match in _BLANK_LINES.finditer(text)), (len(text), len(text))]
    for end, after in ends:
        part = text[at:end].rstrip()
        stripped = part.lstrip("\n")
        if stripped and not stripped.isspace():
            blocks.append(TextBlock("paragraph", stripped, start=start + at + len(part) - len(stripped)))
        at = after
    return blocks


def parse(data: bytes, name: str, limits: ParseLimits) -> ParsedDocument:
    """Plain text: its paragraphs. The title is the first line."""
    text, warnings = decode(data)
    blocks = paragraphs(text)
    title = title_of(blocks[0].text.partition("\n")[0]) if blocks else ""
    return ParsedDocument("text", title, blocks, warnings=warnings)
