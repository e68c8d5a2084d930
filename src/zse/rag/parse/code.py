"""Source code → its functions and classes, whatever the language: what begins at the margin goes to where the next begins there."""

import re

from zse.rag.documents import ParsedDocument, ParseLimits, TextBlock
from zse.rag.parse.text import decode, title_of

LONG = 4000  # characters: such a block is cut where its own parts begin
# What at the margin belongs to what stands before it, and what to what follows.
_GOES_ON = re.compile(
    r"[)\]}]|(?:else|elif|except|finally|catch|end|fi|done|esac|then|do|begin|where|in)\b|#(?:else|elif|endif)"
)
_BELONGS_TO_NEXT = re.compile(r"@|#\[|//|/\*|\*|#|--|;|\"\"\"|'''|<!--|template\b")


def parse(data: bytes, name: str, limits: ParseLimits) -> ParsedDocument:
    """Blocks in the file's order, with its line ends and indentation. The title is its name."""
    text, warnings = decode(data)
    blocks = []
    for start, part in _parts(text, 0):
        pieces = _parts(part, start, indent=_indent_of_body(part)) if len(part) > LONG else [(start, part)]
        for at, piece in pieces:
            kept = piece.strip("\n").rstrip()
            if kept.strip():
                blocks.append(TextBlock("code", kept, start=at + len(piece) - len(piece.lstrip("\n"))))
    return ParsedDocument("code", title_of(name), blocks, warnings=warnings)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _indent_of_body(part: str) -> int:
    """The smallest indentation but none: of what a class or a module holds."""
    return min(
        (indent for line in part.split("\n")[:2000] if (indent := _indent(line)) and not line.isspace()), default=0
    )


def _parts(text: str, start: int, indent: int = 0) -> list[tuple[int, str]]:
    """(start, part) between the lines with at most `indent` before them that begin something: behind a blank line, or behind one that
    closes a block. What is said before a definition, such as its comment, goes with it."""
    cuts, at, was_blank, was_close, pending = [0], 0, False, False, -1
    for line in text.split("\n"):
        bare = line.strip()
        if bare:
            begins = _indent(line) <= indent and not _GOES_ON.match(bare)
            if begins and (was_blank or was_close):
                if pending < 0:
                    cuts.append(at)
                pending = at if _BELONGS_TO_NEXT.match(bare) else -1
            elif pending >= 0 and begins and not _BELONGS_TO_NEXT.match(bare):
                pending = -1
            was_close = _indent(line) <= indent and (bare[0] in "}])" or bare in ("end", "end;"))
            was_blank = False
        else:
            was_blank = True
            pending = -1
        at += len(line) + 1
    return [(start + begin, text[begin:end]) for begin, end in zip(cuts, [*cuts[1:], len(text)]) if end > begin]
