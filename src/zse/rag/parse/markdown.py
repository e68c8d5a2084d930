"""Markdown → blocks (CommonMark 0.31 and GitHub's tables, as far as reading order and structure want it): each line is read once."""

import re

from zse.rag.documents import ParsedDocument, ParseLimits, TextBlock
from zse.rag.parse.text import decode, title_of

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*))?$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_RULE = re.compile(r" {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$")
_ITEM = re.compile(r"([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)")
_DELIMITERS = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$")
# Each ends at the next of its own marks, so that a text of one mark costs no more than any other.
_INLINE = (
    ("](", re.compile(r"!?\[([^\[\]]{0,2000})\]\([^()]{0,2000}\)"), r"\1"),
    ("**", re.compile(r"\*\*(?=\S)([^*\n]{1,2000})\*\*"), r"\1"),
    ("__", re.compile(r"(?<!\w)__(?=\S)([^_\n]{1,2000})__(?!\w)"), r"\1"),
    ("*", re.compile(r"(?<![\w*])\*(?=[^\s*])([^*\n]{1,2000})\*(?![\w*])"), r"\1"),
    ("_", re.compile(r"(?<!\w)_(?=[^\s_])([^_\n]{1,2000})_(?!\w)"), r"\1"),
    ("~~", re.compile(r"~~(?=\S)([^~\n]{1,2000})~~"), r"\1"),
    ("`", re.compile(r"(`{1,3})([^`\n]{1,2000})\1"), r"\2"),
)
_MARKS = re.compile(r"[\[*_~`]")


def plain(text: str) -> str:
    """A text without its inline marks: a link is its words, an image what it says in their place."""
    if _MARKS.search(text) is None:
        return text
    for sign, pattern, by in _INLINE:
        if sign in text:
            text = pattern.sub(by, text)
    return text


def without_comments(text: str) -> str:
    """HTML's comments become blanks of the same length, so that places stay; one without an end is text."""
    parts, at = [], 0
    while (start := text.find("<!--", at)) >= 0 and (end := text.find("-->", start + 4)) >= 0:
        comment = text[start : end + 3]
        parts += [text[at:start], "\n".join(" " * len(line) for line in comment.split("\n"))]
        at = end + 3
    return "".join([*parts, text[at:]])


def cells(line: str) -> str:
    """A row of a table as its cells with " | " between them."""
    line = line.strip()
    if line.startswith("|"):
        line = line[1:]
    if line.endswith("|") and not line.endswith("\\|"):
        line = line[:-1]
    parts = line.replace("\\|", "\0").split("|")
    return " | ".join(plain(part.strip()).replace("\0", "|") for part in parts)


class _Reader:
    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.blocks: list[TextBlock] = []
        self.kept: list[str] = []  # lines of the block that is being read
        self.kind, self.level, self.start = "paragraph", 0, 0
        self.title = ""

    def close(self) -> None:
        """The block that was being read ends."""
        if self.kept:
            text = plain("\n".join(self.kept)).strip()
            if text:
                self.blocks.append(TextBlock(self.kind, text, self.level, start=self.start))  # type: ignore[arg-type]
            self.kept = []
        self.kind, self.level = "paragraph", 0

    def heading(self, level: int, text: str, start: int) -> None:
        self.close()
        text = plain(text.strip().rstrip("#").strip() if text.rstrip().endswith(" " + "#" * level) else text.strip())
        if text:
            self.blocks.append(TextBlock("heading", text, level, start=start))
            if level == 1 and not self.title:
                self.title = title_of(text)

    def read(self) -> None:
        lines, at, index = self.lines, 0, 0
        if lines[0].rstrip() == "---":
            index = self._front_matter()
            at = sum(len(line) + 1 for line in lines[:index])
        while index < len(lines):
            line = lines[index]
            used = self._code(index, at) or self._table(index, at) or self._line(line, at)
            for passed in lines[index : index + used]:
                at += len(passed) + 1
            index += used
        self.close()

    def _front_matter(self) -> int:
        """How many lines the YAML between two lines of `---` takes. Its title is the document's."""
        for index, line in enumerate(self.lines[1:200], 1):
            if line.rstrip() in ("---", "..."):
                for entry in self.lines[1:index]:
                    key, colon, value = entry.partition(":")
                    if colon and key.strip() == "title":
                        self.title = title_of(value.strip().strip("\"'"))
                kept = "\n".join(self.lines[1:index]).strip()
                if kept:
                    self.blocks.append(TextBlock("code", kept, start=len(self.lines[0]) + 1))
                return index + 1
        return 0

    def _code(self, index: int, at: int) -> int:
        line = self.lines[index]
        match = _FENCE.match(line)
        if match is None:
            return 0
        mark = match[1]
        if mark[0] == "`" and "`" in line[match.end() :]:
            return 0
        self.close()
        end = index + 1
        while end < len(self.lines):
            closing = self.lines[end].strip()
            if closing.startswith(mark) and not closing.strip(mark[0]):
                break
            end += 1
        text = "\n".join(self.lines[index + 1 : end])
        if text.strip():
            self.blocks.append(TextBlock("code", text.rstrip(), start=at + len(line) + 1))
        return min(end + 1, len(self.lines)) - index

    def _table(self, index: int, at: int) -> int:
        lines = self.lines
        if "|" not in lines[index] or index + 1 >= len(lines) or "-" not in lines[index + 1]:
            return 0
        if _DELIMITERS.match(lines[index + 1]) is None or lines[index].strip().startswith("#"):
            return 0
        if lines[index + 1].count("|") == 0 and lines[index].strip().strip("|").count("|"):
            return 0
        self.close()
        end = index
        while end < len(lines) and "|" in lines[end]:
            if end != index + 1:
                text = cells(lines[end])
                if text.strip(" |"):
                    self.blocks.append(TextBlock("table", text, 1 if end == index else 0, start=at))
            at += len(lines[end]) + 1
            end += 1
        return max(end, index + 2) - index

    def _line(self, line: str, at: int) -> int:
        bare = line.lstrip()
        if not bare:
            self.close()
            return 1
        first = bare[0]
        if first == "#" and (match := _HEADING.match(line)):
            self.heading(len(match[1]), match[2] or "", at)
            return 1
        if first in "=-" and self.kept and self.kind == "paragraph" and (match := _SETEXT.match(line)):
            text, start = " ".join(self.kept), self.start
            self.kept = []
            self.heading(1 if match[1][0] == "=" else 2, text, start)
            return 1
        if first in "-*_" and _RULE.match(line):
            self.close()
            return 1
        if (first in "-*+" or first.isdigit()) and (match := _ITEM.match(line)):
            self.close()
            self.kind, self.level, self.start = "list", min(len(match[1].expandtabs(4)) // 2, 9), at
            mark = match[2] if match[2][0].isdigit() else "-"
            self.kept = [f"{mark} {line[match.end() :]}"]
            return 1
        if line.startswith(("    ", "\t")) and not self.kept:
            self.kind, self.start = "code", at
        if self.kind == "code":
            if line.startswith(("    ", "\t")):
                self.kept.append(line.expandtabs(4)[4:])
                return 1
            self.close()
        if first == ">":
            bare = bare.lstrip("> ")
            if not bare:
                self.close()
                return 1
        if not self.kept:
            self.start = at
        self.kept.append(bare.rstrip())
        return 1


def parse(data: bytes, name: str, limits: ParseLimits) -> ParsedDocument:
    """The title is that of the front matter, else the first heading of the first level, else the first block."""
    text, warnings = decode(data)
    reader = _Reader(without_comments(text))
    reader.read()
    title = reader.title or (title_of(reader.blocks[0].text) if reader.blocks else "")
    return ParsedDocument("markdown", title, reader.blocks, warnings=warnings)
