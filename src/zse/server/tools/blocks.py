"""The machine under every tool parser: text comes in pieces, content and parts of calls come out.

Outside of a block text is content, held back only as long as it could begin a block. Inside, the block's reader decides
(readers.py, xml_calls.py): it gives parts of calls as soon as they are certain, says where the block ends, or that it
holds no call; then it is content. There is no other path: a whole answer is what the parts of a stream make
(calls.py: fold), and how the text was cut into pieces changes nothing. The work is linear in the text.

A call that breaks off, because the text ends or goes on in a way that its format does not have, keeps the arguments
that came until then. They are the beginning of a JSON object, never a complete one. A call of which no argument is
certain yet is content. So is everything behind a call that broke off: nobody can say what of it is still an argument.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from zse.server.tools.calls import CallPart

SPACE = " \t\r\n"
MORE, NEVER = None, -1


class Reader(Protocol):
    """Reads one block. parts: of calls, taken away by whoever calls read(). at: where it has read to; of a block that
    holds no call, what stands before is content, and no other block begins there."""

    parts: list[CallPart]
    at: int

    def read(self, text: str, is_last: bool) -> int | None:
        """text: of the block so far, behind its opening; is_last: no more comes. Where the block ends, MORE, or NEVER
        when it holds no call (no part has come then)."""
        ...


class Block(msgspec.Struct, frozen=True):
    """opening: begins it; "" where any text may. reader: (functions that the request names) → what reads it. keeps: the
    reader gets the opening, too. bare: it counts only where the answer begins or behind a call."""

    opening: str
    reader: Callable[[dict[str, dict]], Reader]
    keeps: bool = False
    bare: bool = False


def ahead(text: str, at: int, word: str, is_last: bool, skipped: str = SPACE) -> int | None:
    """Where the word ends that comes next, behind characters to be skipped; MORE while it may come, NEVER if it does
    not."""
    begin = at
    while begin < len(text) and text[begin] in skipped:
        begin += 1
    if text.startswith(word, begin):
        return begin + len(word)
    return MORE if not is_last and word.startswith(text[begin:]) else NEVER


def held(text: str, marks: Iterable[str]) -> int:
    """Characters at the end that may begin one of the marks."""
    return max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)


class BlockParser:
    """push() pieces of text, then finish(); both give strings (content) and CallParts. functions: what the request
    offers, name → JSON schema of its parameters. separators: characters that may stand between calls."""

    def __init__(self, blocks: Sequence[Block], functions: dict[str, dict], separators: str = ""):
        self._blocks, self._functions, self._separators = blocks, functions, separators
        self._text = ""  # not yet decided; in a block what its reader gets
        self._before = ""  # of a block: space before it and its opening, which are content if it is no call
        self._reader: Reader | None = None
        self._fresh = True  # nothing but space since the beginning or the last call
        self._called = False
        self._is_off = False  # a call broke off
        self._is_space = True

    def push(self, text: str) -> list[str | CallPart]:
        self._text += text
        out: list[str | CallPart] = []
        if self._is_space and not text.strip(SPACE):
            return out  # a long run of it is not searched again and again
        while self._in_block(out, False) if self._reader is not None else self._outside(out):
            pass
        self._is_space = self._reader is None and not self._text.strip(SPACE)
        return out

    def finish(self) -> list[str | CallPart]:
        """What is left when no more text comes."""
        out: list[str | CallPart] = []
        while self._in_block(out, True) if self._reader is not None else self._outside(out):
            pass
        rest, self._text = self._text, ""
        if rest and not (self._fresh and self._called and not rest.strip(SPACE + self._separators)):
            out.append(rest)
        return out

    def _outside(self, out: list) -> bool:
        if self._is_off:
            self._emit(out, self._text)
            self._text = ""
            return False
        text, space = self._text, self._spaces()
        begun = len(text) - len(text.lstrip(space))
        found: tuple[int, Block] | None = None
        for block in self._blocks:
            if block.bare:
                is_here = self._fresh and begun < len(text) and text.startswith(block.opening, begun)
                at = begun if is_here and (block.opening or not self._is_mark(text[begun:])) else -1
            else:
                at = text.find(block.opening)
            if at >= 0 and (found is None or at < found[0]):
                found = at, block
        if found is None:
            count = len(text) - self._num_held(text)
            self._emit(out, text[:count])
            self._text = text[count:]
            return False
        at, block = found
        before = text[:at].rstrip(space if begun >= at else SPACE)
        behind = at + len(block.opening)
        self._before, self._text = text[len(before) : behind], text[at if block.keeps else behind :]
        self._emit(out, before)
        self._reader = block.reader(self._functions)
        self._num_kept = len(block.opening) if block.keeps else 0
        return True

    def _is_mark(self, text: str) -> bool:
        """Whether the text may become the opening of a block."""
        return any(block.opening.startswith(text) for block in self._blocks)

    def _spaces(self) -> str:
        return SPACE + self._separators if self._fresh and self._called else SPACE

    def _num_held(self, text: str) -> int:
        """Characters at the end that may begin a block, and the space before them."""
        rest = text[: len(text) - held(text, (block.opening for block in self._blocks if not block.bare))]
        # Separators are space only directly behind a call.
        if not rest.strip(self._spaces()):
            return len(text)
        return len(text) - len(rest.rstrip(SPACE))

    def _emit(self, out: list, text: str) -> None:
        if text:
            self._fresh = False
            out.append(text)

    def _in_block(self, out: list, is_last: bool) -> bool:
        """Whether the block is over."""
        assert self._reader is not None
        end = self._reader.read(self._text, is_last)
        parts, self._reader.parts = self._reader.parts, []
        out += parts
        if parts:
            self._is_complete = parts[-1].is_last
        if end is MORE:
            return False
        if end == NEVER:
            end = len(self._text) if is_last else max(self._num_kept, self._reader.at)
            self._emit(out, self._before[: len(self._before) - self._num_kept] + self._text[:end])
        else:
            self._called = True
            self._fresh, self._is_off = self._is_complete, not self._is_complete
        self._text, self._reader = self._text[end:], None
        return True
