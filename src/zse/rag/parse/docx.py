"""DOCX (ISO/IEC 29500, WordprocessingML) → blocks: headings by their styles, lists, tables and text boxes in order, footnotes last.

XML is read by expat as it is unpacked; a document type, with which entities come, is refused. Removed text of tracked changes is left
out. Pages are those that the program that saved the file saw, where it says so."""

import xml.parsers.expat
from collections.abc import Callable

from zse.rag.documents import BlockKind, DocumentError, ParsedDocument, ParseLimits, TextBlock
from zse.rag.parse.archive import Archive
from zse.rag.parse.text import title_of

_MAIN = "word/document.xml"
_COMPOUND_FILE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # old .doc, and what Word encrypts
_WORD = (
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "http://purl.oclc.org/ooxml/wordprocessingml/main",
)
_CODE_STYLES = ("code", "preformatted", "source", "verbatim")
_SKIPPED = {"Fallback", "moveFrom", "del", "instrText", "delText", "rPrChange", "pPrChange"}
MAX_CODE = 20_000  # characters of one block: paragraphs are appended to it one by one
MAX_LEVEL = 9  # outline levels that there are


def _local(name: str) -> str:
    return name.rpartition(" ")[2]


def _read_xml(archive: Archive, name: str, limits: ParseLimits, start: Callable, end: Callable, text: Callable) -> None:
    """Call start(local name, attributes by local name), end(local name) and text(str) for a part. DocumentError: it is no XML."""
    parser = xml.parsers.expat.ParserCreate(namespace_separator=" ")
    depth = 0

    def begins(element: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > 4 * limits.max_depth:  # a table in a text box in a table's cell has 30
            raise DocumentError(f"{name} is nested more than {4 * limits.max_depth} deep")
        start(_local(element), {_local(key): value for key, value in attributes.items()})

    def ends(element: str) -> None:
        nonlocal depth
        depth -= 1
        end(_local(element))

    def refuse(*_: object) -> None:
        raise DocumentError(f"{name} has a document type, which a DOCX has not")

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = begins, ends, text
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    parser.buffer_text = True
    try:
        for piece in archive.stream(name):
            parser.Parse(piece, False)
        parser.Parse(b"", True)
    except xml.parsers.expat.ExpatError as error:
        raise DocumentError(f"{name} is damaged: {xml.parsers.expat.errors.messages[error.code]}") from None
    except (LookupError, ValueError):
        raise DocumentError(f"{name} has an encoding that is not read") from None


class _Styles:
    """Style id → (name, level of a heading or -1, id that it is based on)."""

    def __init__(self) -> None:
        self.styles: dict[str, list] = {}
        self._open: list = ["", -1, ""]

    def start(self, name: str, attributes: dict[str, str]) -> None:
        value = attributes.get("val", "")
        if name == "style":
            self._open = self.styles[attributes.get("styleId", "")] = ["", -1, ""]
        elif name == "name":
            self._open[0] = value.lower()
        elif name == "basedOn":
            self._open[2] = value
        elif name == "outlineLvl" and value.isdecimal() and int(value[:2]) < MAX_LEVEL:
            self._open[1] = int(value[:2]) + 1

    def heading(self, id: str) -> int:
        """Its level, 0 where it is none."""
        for _ in range(12):
            name, level, base = self.styles.get(id, (id.lower(), -1, ""))
            if level > 0:
                return level
            if name.startswith("heading") and name[7:].strip().isdecimal():
                return min(max(int(name[7:].strip()[:2]), 1), MAX_LEVEL)
            if name == "title":
                return 1
            if not base:
                return 0
            id = base
        return 0

    def name(self, id: str) -> str:
        return self.styles.get(id, (id.lower(), -1, ""))[0]


class _Numbering:
    """Which lists count: (number id, level) → whether its items have numbers."""

    def __init__(self) -> None:
        self._formats: dict[str, dict[int, str]] = {}
        self._abstract: dict[str, str] = {}
        self._open, self._number, self._level = "", "", 0
        self._counters: dict[tuple[str, int], int] = {}

    def start(self, name: str, attributes: dict[str, str]) -> None:
        value = attributes.get("val", "")
        if name == "abstractNum":
            self._open, self._number = attributes.get("abstractNumId", ""), ""
        elif name == "num":
            self._number = attributes.get("numId", "")
        elif name == "abstractNumId" and self._number:
            self._abstract[self._number] = value
        elif name == "lvl":
            level = attributes.get("ilvl", "0")
            self._level = int(level) if level.isdecimal() and len(level) < 3 else 0
        elif name == "numFmt":
            self._formats.setdefault(self._open, {})[self._level] = value

    def mark(self, number: str, level: int) -> str:
        """Of the next item of a list: "-" or its number."""
        kind = self._formats.get(self._abstract.get(number, ""), {}).get(level, "bullet")
        if kind in ("bullet", "none"):
            return "-"
        self._counters[number, level] = count = self._counters.get((number, level), 0) + 1
        for deeper in range(level + 1, 10):
            self._counters.pop((number, deeper), None)
        return f"{count}."


class _Paragraph:
    __slots__ = ("ilvl", "level", "number", "page", "parts", "style")

    def __init__(self, page: int):
        self.parts: list[str] = []
        self.style = self.number = ""
        self.level, self.ilvl, self.page = 0, 0, page


class _Table:
    def __init__(self) -> None:
        self.rows: list[tuple[str, bool]] = []
        self.cells: list[str] = []
        self.cell: list[str] = []
        self.is_header = False


class _Body:
    """Reads the main part, and footnotes the same way."""

    def __init__(self, styles: _Styles, numbering: _Numbering, limits: ParseLimits):
        self.styles, self.numbering, self.limits = styles, numbering, limits
        self.blocks: list[TextBlock] = []
        self.title, self.page, self.has_pages = "", 1, False
        self._paragraphs: list[_Paragraph] = []
        self._tables: list[_Table] = []
        self._skipped, self._in_text = 0, False
        self._left = limits.max_text_bytes

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if self._skipped or name in _SKIPPED:
            self._skipped += 1
            return
        paragraph = self._paragraphs[-1] if self._paragraphs else None
        value = attributes.get("val", "")
        if name == "p":
            self._paragraphs.append(_Paragraph(self.page))
        elif name == "tbl":
            self._tables.append(_Table())
        elif name == "tblHeader" and self._tables and value not in ("0", "false"):
            self._tables[-1].is_header = True
        elif name == "lastRenderedPageBreak":
            self.page, self.has_pages = self.page + 1, True
            if paragraph is not None and not paragraph.parts:
                paragraph.page = self.page
        elif paragraph is None:
            return
        elif name == "t":
            self._in_text = True
        elif name in ("tab", "ptab"):
            paragraph.parts.append("\t")
        elif name in ("br", "cr"):
            paragraph.parts.append("\n")
        elif name == "noBreakHyphen":
            paragraph.parts.append("\u2011")
        elif name == "pStyle":
            paragraph.style = value
        elif name == "numId":
            paragraph.number = value
        elif name == "ilvl":
            paragraph.ilvl = int(value) if value.isdecimal() and len(value) < 3 else 0
        elif name == "outlineLvl" and value.isdecimal() and int(value[:2]) < MAX_LEVEL:
            paragraph.level = int(value[:2]) + 1

    def end(self, name: str) -> None:
        if self._skipped:
            self._skipped -= 1
        elif name == "t":
            self._in_text = False
        elif name == "p" and self._paragraphs:
            self._end_paragraph(self._paragraphs.pop())
        elif name == "tc" and self._tables:
            table = self._tables[-1]
            table.cells.append(" ".join(" ".join(table.cell).split()))
            table.cell = []
        elif name == "tr" and self._tables:
            table = self._tables[-1]
            table.rows.append((" | ".join(table.cells), table.is_header))
            table.cells, table.is_header = [], False
        elif name == "tbl" and self._tables:
            self._end_table(self._tables.pop())

    def text(self, data: str) -> None:
        if self._in_text and not self._skipped and self._paragraphs:
            self._left -= len(data)
            if self._left < 0:
                raise DocumentError("the document has more text than its limits allow", "request_too_large")
            self._paragraphs[-1].parts.append(data)

    def _add(self, kind: BlockKind, text: str, level: int, page: int) -> None:
        self.blocks.append(TextBlock(kind, text, level, page))
        if len(self.blocks) > self.limits.max_blocks:
            raise DocumentError(f"the document has more than {self.limits.max_blocks} paragraphs", "request_too_large")

    def _end_paragraph(self, paragraph: _Paragraph) -> None:
        text = "".join(paragraph.parts)
        if self._tables:
            self._tables[-1].cell.append(text)
            return
        style = self.styles.name(paragraph.style)
        if any(word in style for word in _CODE_STYLES):
            last = self.blocks[-1] if self.blocks else None
            if last is not None and last.kind == "code" and last.page == paragraph.page and len(last.text) < MAX_CODE:
                last.text += "\n" + text.rstrip()
            elif text.strip():
                self._add("code", text.rstrip(), 0, paragraph.page)
            return
        text = "\n".join(line for line in (" ".join(line.split()) for line in text.split("\n")) if line)
        if not text:
            return
        level = paragraph.level or self.styles.heading(paragraph.style)
        if level:
            if style == "title" and not self.title:
                self.title = title_of(text)
            self._add("heading", text.replace("\n", " "), level, paragraph.page)
        elif (paragraph.number and paragraph.number != "0") or style.startswith("list"):
            mark = self.numbering.mark(paragraph.number, paragraph.ilvl) if paragraph.number else "-"
            self._add("list", f"{mark} {text}", min(paragraph.ilvl, 9), paragraph.page)
        else:
            self._add("paragraph", text, 0, paragraph.page)

    def _end_table(self, table: _Table) -> None:
        if self._tables:  # in another one's cell
            self._tables[-1].cell += [row for row, _ in table.rows]
            return
        rows = [(row, is_header) for row, is_header in table.rows if row.strip(" |")]
        for index, (row, is_header) in enumerate(rows):
            names = is_header or (index == 0 and len(rows) > 1 and " | " in row)
            self._add("table", row, 1 if names and index == 0 else 0, self.page)


def parse(data: bytes, name: str, limits: ParseLimits) -> ParsedDocument:
    """The title is that of the document's properties, else of the style "Title", else the first heading."""
    if data.startswith(_COMPOUND_FILE):
        raise DocumentError("the file is an old .doc, or a DOCX with a password: save it as DOCX without one")
    archive = Archive(data, limits)
    if _MAIN not in archive:
        raise DocumentError(f"the archive is no DOCX: it has no {_MAIN}")
    styles, numbering = _Styles(), _Numbering()
    for part, reader in (("word/styles.xml", styles.start), ("word/numbering.xml", numbering.start)):
        if part in archive:
            _read_xml(archive, part, limits, reader, lambda name: None, lambda text: None)
    body = _Body(styles, numbering, limits)
    _read_xml(archive, _MAIN, limits, body.start, body.end, body.text)
    blocks, num_pages = body.blocks, body.page if body.has_pages else 0
    if not num_pages:
        for block in blocks:
            block.page = 0
    for part in ("word/footnotes.xml", "word/endnotes.xml"):
        if part in archive:
            notes = _Body(styles, numbering, limits)
            _read_xml(archive, part, limits, notes.start, notes.end, notes.text)
            for block in notes.blocks:
                block.page = 0
            blocks += notes.blocks
    title = _property_title(archive, limits) or body.title
    title = title or title_of(next((block.text for block in blocks if block.kind == "heading"), ""))
    return ParsedDocument("docx", title, blocks, num_pages)


def _property_title(archive: Archive, limits: ParseLimits) -> str:
    found: list[str] = []
    inside = False

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal inside
        inside = name == "title"

    def end(name: str) -> None:
        nonlocal inside
        inside = False

    if "docProps/core.xml" in archive:
        _read_xml(archive, "docProps/core.xml", limits, start, end, lambda text: found.append(text) if inside else None)
    return title_of("".join(found))
