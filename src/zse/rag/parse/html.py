"""HTML → blocks. The scanner reads each character once: the standard library's takes time that grows with the square of tags that
never end. Scripts, styles and navigation are dropped; what is left is text, markup of no kind comes out."""

import codecs
import html
import re

from zse.rag.documents import DocumentError, ParsedDocument, ParseLimits, TextBlock
from zse.rag.parse.text import decode, title_of

_TAG = re.compile(r"</?([a-zA-Z][^\s/>]*+)((?:[^>\"']++|\"[^\"]*+\"|'[^']*+')*+)>")
_TAG_START = re.compile(r"</?[a-zA-Z]")
_ATTRIBUTE = re.compile(
    r"\b(alt|charset|content|start)\s*+=\s*+(?:\"([^\"]*+)\"|'([^']*+)'|([^\s\"'>]++))", re.IGNORECASE
)
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE)
_BREAK = "\0"  # a line's end that was asked for: decode() leaves none of these in a text
_LONG_REFERENCE = re.compile(r"&#(?:\d{8,}|[xX][0-9a-fA-F]{8,});?")
MAX_ODD_TAGS = 50  # whose quotes are never closed: after so many quotes count no longer
_RAW = {
    name: re.compile(f"</{name}(?=[\\s/>])", re.IGNORECASE)
    for name in "script style noscript template svg math iframe object select title textarea xmp".split()
}
_BLOCKS = set(
    "address article aside blockquote body caption center dd details dialog div dl dt fieldset figcaption figure footer form header "
    "hgroup hr html main menu p section summary legend optgroup option".split()
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_ENDS_NAVIGATION = {"main", "article", "h1"}  # where the end of one was forgotten
CODECS = (
    ["cp125" + str(number) for number in range(9)]
    + ["iso8859-" + str(number) for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 14, 15, 16)]
    + ["koi8-r", "koi8-u", "gb18030", "gbk", "gb2312", "big5", "shift_jis", "euc-jp", "euc-kr", "mac-roman"]
)


def load() -> None:
    """What a document may name as its encoding is imported before the process closes itself in."""
    for name in CODECS:
        codecs.lookup(name)


def parse(data: bytes, name: str, limits: ParseLimits) -> ParsedDocument:
    """The title is that of the head, else the first heading."""
    text, warnings = _decoded(data)
    reader = _Reader(limits)
    reader.read(text)
    if not reader.blocks:
        reader = _Reader(limits, drops_navigation=False)
        reader.read(text)
    headings = (block.text for block in reader.blocks if block.kind == "heading")
    return ParsedDocument("html", reader.title or title_of(next(headings, "")), reader.blocks, warnings=warnings)


def _decoded(data: bytes) -> tuple[str, list[str]]:
    match = _CHARSET.search(data[:4096])
    if match and not data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        try:
            codec = codecs.lookup(match[1].decode("ascii")).name
            if codec in {codecs.lookup(known).name for known in CODECS}:
                return decode(data.decode(codec, "replace").encode("utf-8"))
        except LookupError:
            pass
    return decode(data)


def _unescape(text: str) -> str:
    if "&#" in text:
        text = _LONG_REFERENCE.sub("\ufffd", text)  # a number that int() would not read
    return html.unescape(text)


def _attributes(source: str) -> dict[str, str]:
    return {
        match[1].lower(): _unescape(match[2] or match[3] or match[4] or "") for match in _ATTRIBUTE.finditer(source)
    }


class _Reader:
    def __init__(self, limits: ParseLimits, drops_navigation: bool = True):
        self.limits, self._drops_navigation = limits, drops_navigation
        self.blocks: list[TextBlock] = []
        self.title = ""
        self._parts: list[str] = []  # of the block that is open
        self._kind, self._level, self._mark = "paragraph", 0, ""
        self._lists: list[int] = []  # the number of the last item, -1 where items have none
        self._pre = self._tables = self._navigation = 0
        self._cells: list[str] = []
        self._cell_heads = self._in_head = self._in_cell = False
        self._row_is_open = False

    def read(self, text: str) -> None:
        at, odd = 0, 0
        while True:
            start = text.find("<", at)
            if start < 0:
                self._text(text[at:])
                break
            if start > at:
                self._text(text[at:start])
            at, odd = self._markup(text, start, odd)
        self._close()
        self._end_row()

    def _markup(self, text: str, start: int, odd: int) -> tuple[int, int]:
        """(where what begins at `start` ends, how many tags had quotes without an end)."""
        following = text[start + 1 : start + 2]
        if following in ("!", "?"):
            comment = text.startswith("<!--", start)
            end = text.find("-->" if comment else ">", start + (4 if comment else 2))
            if end < 0:
                return len(text), odd  # as a browser does: all that follows is in the comment
            return end + (3 if comment else 1), odd
        if _TAG_START.match(text, start) is None:
            self._text("<")
            return start + 1, odd
        match = _TAG.match(text, start) if odd < MAX_ODD_TAGS else None
        if match is not None:
            end, name, source = match.end(), match[1], match[2]
        else:
            odd += 1
            end = text.find(">", start) + 1
            if not end:
                return len(text), odd
            inner = text[start + 1 : end - 1].lstrip("/")
            name, _, source = inner.partition(" ")
            name = name.split("/")[0].strip() or "a"
        name = name.lower()
        if following == "/":
            self._end(name)
            return end, odd
        raw = _RAW.get(name)
        if raw is not None and not source.endswith("/"):
            close = raw.search(text, end)
            inside = text[end : close.start() if close else len(text)]
            if name == "title" and not self.title:
                self.title = title_of(_unescape(inside))
            elif name in ("textarea", "xmp"):
                self._text(inside)
            return (text.find(">", close.end()) + 1 or len(text)) if close else len(text), odd
        self._start(name, source)
        return end, odd

    # -- what the tags mean

    def _text(self, text: str) -> None:
        if not (self._navigation and self._drops_navigation):
            self._parts.append(text)

    def _start(self, name: str, source: str) -> None:
        if name == "nav":
            self._navigation += 1
        elif name in _ENDS_NAVIGATION:
            self._navigation = 0
        if name in ("br", "wbr"):
            self._text(_BREAK if name == "br" else "")
        elif name == "img":
            self._text(f" {_attributes(source).get('alt', '')} ")
        elif name == "table":
            self._start_table()
        elif self._tables:
            self._start_in_table(name)
        elif name in _HEADINGS:
            self._close("heading", _HEADINGS[name])
        elif name in ("ul", "ol", "menu", "dir"):
            self._close()
            start = _attributes(source).get("start", "1")
            first = int(start) if start.isdecimal() and len(start) < 9 else 1
            if len(self._lists) < self.limits.max_depth:
                self._lists.append(first - 1 if name == "ol" else -1)
        elif name == "li":
            mark = "-"
            if self._lists and self._lists[-1] >= 0:
                self._lists[-1] += 1
                mark = f"{self._lists[-1]}."
            self._close("list", min(max(len(self._lists) - 1, 0), 9), mark)
        elif name in ("pre", "listing"):
            self._close("code")
            self._pre += 1
        elif name in _BLOCKS:
            self._block()

    def _block(self) -> None:
        """A paragraph begins or ends. A list's item stays one as long as it has no text."""
        if self._kind == "list" and not "".join(self._parts).strip():
            return
        if not self._pre:
            self._close()

    def _end(self, name: str) -> None:
        if name == "nav":
            self._navigation = max(0, self._navigation - 1)
        elif name == "table":
            self._end_table()
        elif self._tables:
            if name in ("td", "th", "tr"):
                self._end_cell()
            if name == "tr":
                self._end_row()
            elif name == "thead":
                self._end_row()
                self._in_head = False
            elif name in _BLOCKS or name in _HEADINGS or name == "li":
                self._parts.append(" ")
        elif name in ("ul", "ol", "menu", "dir"):
            self._close()
            if self._lists:
                self._lists.pop()
        elif name in ("pre", "listing"):
            self._close()
            self._pre = max(0, self._pre - 1)
        elif name in _HEADINGS or name == "li" or name in _BLOCKS:
            if name == "p" or name in _HEADINGS or name == "li":
                self._close()
            else:
                self._block()

    # -- blocks

    def _close(self, kind: str = "paragraph", level: int = 0, mark: str = "") -> None:
        """The open block ends, and one of this kind begins."""
        text = _unescape("".join(self._parts))
        if self._kind == "code":
            text = text.replace(_BREAK, "\n").strip("\n").rstrip()
        else:
            lines = (" ".join(line.split()) for line in text.split(_BREAK))
            text = "\n".join(line for line in lines if line)
        if text.strip():
            self._add(TextBlock(self._kind, f"{self._mark} {text}" if self._mark else text, self._level))  # type: ignore[arg-type]
        self._parts = []
        self._kind, self._level, self._mark = kind, level, mark

    def _add(self, block: TextBlock) -> None:
        self.blocks.append(block)
        if len(self.blocks) > self.limits.max_blocks:
            raise DocumentError(f"the document has more than {self.limits.max_blocks} paragraphs", "request_too_large")

    # -- tables: the outermost one's rows; what lies deeper is text of its cells

    def _start_table(self) -> None:
        if not self._tables:
            self._close()
            self._cells, self._cell_heads, self._in_head = [], True, False
        self._tables += 1

    def _start_in_table(self, name: str) -> None:
        if self._tables == 1 and name in ("td", "th"):
            self._end_cell()
            self._in_cell = True
            self._cell_heads = self._cell_heads and name == "th"
        elif self._tables == 1 and name == "tr":
            self._end_row()
        elif self._tables == 1 and name == "thead":
            self._in_head = True
        elif self._tables == 1 and name == "tbody":
            self._end_row()
            self._in_head = False
        elif name in _BLOCKS or name in _HEADINGS or name in ("li", "tr", "td", "th", "pre", "ul", "ol"):
            self._parts.append(" ")

    def _end_cell(self) -> None:
        if self._tables != 1:
            self._parts.append(" ")
            return
        text = " ".join(_unescape("".join(self._parts)).replace(_BREAK, " ").split())
        self._parts = []
        if self._in_cell or text:
            self._cells.append(text)
        self._in_cell = False

    def _end_row(self) -> None:
        if self._tables != 1:
            return
        self._end_cell()
        line = " | ".join(self._cells)
        if line.strip(" |"):
            is_head = self._in_head or (self._cell_heads and len(self._cells) > 1)
            self._add(TextBlock("table", line, 1 if is_head else 0))
        self._cells, self._cell_heads = [], True

    def _end_table(self) -> None:
        if self._tables == 1:
            self._end_row()
        self._tables = max(0, self._tables - 1)
