"""The machine under every tool parser: text comes in pieces, content and calls come out.

A parser is a table of blocks. Outside of a block text is content, held back only as long as it could begin a block;
inside, it is kept until the block is complete, and then it is calls or, unchanged, content. So a malformed call loses
nothing, and how the text was cut into pieces changes nothing. The work is linear in the text.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from zse.server.tools.calls import ToolCall

SPACE = " \t\r\n"
MORE, NEVER = None, -1
_MAX_HEAD = 256  # characters before the bracket of a Balanced block
_MAX_CLOSINGS = 16  # closing marks tried, when the text before one is no call yet: it may stand in a string


class Until:
    """The end of a block with a closing mark."""

    def __init__(self, closing: str):
        self._closing, self._from = closing, 0

    def find(self, text: str, start: int) -> int | None:
        """Where the block ends, MORE or NEVER. text: the block so far, opening included; start: behind the opening."""
        at = text.find(self._closing, max(self._from, start))
        self._from = max(start, len(text) - len(self._closing) + 1) if at < 0 else at + len(self._closing)
        return MORE if at < 0 else at + len(self._closing)


class Balanced:
    """The end of a block that is one bracket of JSON or Python. quotes: what strings are quoted with. head: whether a
    word may stand before a `{`."""

    def __init__(self, quotes: str = '"', head: bool = False):
        self._quotes, self._head = quotes, head
        self._at = -1
        self._begun = self._escaped = False
        self._open: list[str] = []
        self._quote = ""

    def find(self, text: str, start: int) -> int | None:
        at = max(self._at, start)
        while at < len(text):
            character = text[at]
            at += 1
            if not self._begun:
                self._begun = character == "{" or character == "[" and not text[start : at - 1].strip()
                if self._begun:
                    self._open.append(character)
                elif not self._head and character not in SPACE or at - start > _MAX_HEAD:
                    return NEVER
            elif self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in self._quotes:
                self._quote = character
            elif character in "([{":
                self._open.append(character)
            elif character in ")]}":
                if self._open.pop() + character not in ("()", "[]", "{}"):
                    return NEVER
                if not self._open:
                    return at
        self._at = at
        return MORE


def _is_in_string(body: str, calls: list[ToolCall] | None) -> bool:
    """Whether what is no call yet ends in a string that is open: by the quotes that no backslash precedes."""
    return calls is None and bool(body.count('"') - body.count('\\"') & 1)


class Block(msgspec.Struct, frozen=True):
    """opening: begins it. read: (the text between opening and closing, functions) → calls, or None. closing: "" when the end
    is that of a bracket, with the quotes and head of Balanced. bare: the opening is a part of what is read, and counts only
    where the answer begins or behind a call. known: only calls of functions that the request names are calls. is_inside:
    (the text before a closing mark, its calls) → whether the mark stands in an argument, so that the block goes on. whole:
    without its closing mark it holds no call."""

    opening: str
    read: Callable[[str, dict], list[ToolCall] | None]
    closing: str = ""
    quotes: str = '"'
    head: bool = False
    bare: bool = False
    known: bool = False
    is_inside: Callable[[str, list[ToolCall] | None], bool] = _is_in_string
    whole: bool = False

    def end(self) -> Until | Balanced:
        """What finds its end."""
        return Until(self.closing) if self.closing else Balanced(self.quotes, self.head)


class BlockParser:
    """push() pieces of text, then finish(); both give strings (content) and Calls. functions: what the request offers, name →
    JSON schema of its parameters. separators: characters that may stand between calls. make_watch: (function that reads a
    block's text) → a Watch (streaming.py), which gives parts of calls before the block is complete."""

    def __init__(
        self,
        blocks: Sequence[Block],
        functions: dict[str, dict],
        separators: str = "",
        make_watch: Callable[[Callable], Any] | None = None,
    ):
        self._blocks, self._functions, self._separators = blocks, functions, separators
        self._make_watch = make_watch
        self._text = ""  # not yet decided
        self._lead = ""  # space before the block, which goes if the block is calls
        self._block: Block | None = None
        self._watch: Any = None
        self._end: Until | Balanced | None = None
        self._tries = 0
        self._fresh = True  # nothing but space since the beginning or the last call
        self._called = False
        self._is_space = True

    def push(self, text: str) -> list[str | ToolCall]:
        self._text += text
        out: list[str | ToolCall] = []
        if self._is_space and not text.strip(SPACE):
            return out  # a long run of it is not searched again and again
        while self._in_block(out) if self._block is not None else self._outside(out):
            pass
        self._is_space = self._block is None and not self._text.strip(SPACE)
        return out

    def finish(self) -> list[str | ToolCall]:
        """What is left when no more text comes: a last block without its closing mark is read as if it had it."""
        out: list[str | ToolCall] = []
        if self._block is not None:
            body = self._text if self._block.bare else self._text[len(self._block.opening) :]
            calls = self._read(self._block, body)
            cut_off = self._block.whole or self._block.is_inside(body, calls)
            self._settle(out, None if cut_off else calls, len(self._text))
        rest, self._text = self._text, ""
        if rest and not (self._fresh and self._called and not rest.strip(SPACE + self._separators)):
            out.append(rest)
        return out

    def _outside(self, out: list) -> bool:
        text, space = self._text, self._spaces()
        begun = len(text) - len(text.lstrip(space))
        found: tuple[int, Block] | None = None
        for block in self._blocks:
            at = (
                (begun if self._fresh and text.startswith(block.opening, begun) else -1)
                if block.bare
                else text.find(block.opening)
            )
            if at >= 0 and (found is None or at < found[0]):
                found = at, block
        if found is None:
            self._release(out, len(text) - self._num_held(text))
            return False
        at, block = found
        before = text[:at].rstrip(space if begun >= at else SPACE)
        self._lead, self._text = text[len(before) : at], text[at:]
        self._emit(out, before)
        self._block, self._end, self._tries = block, block.end(), 0
        if self._make_watch is not None:
            self._watch = self._make_watch(lambda body: block.read(body, self._functions))
        return True

    def _spaces(self) -> str:
        return SPACE + self._separators if self._fresh and self._called else SPACE

    def _num_held(self, text: str) -> int:
        """Characters at the end that may begin a block, and the space before them."""
        held = max(
            (
                size
                for block in self._blocks
                if not block.bare
                for size in range(1, len(block.opening))
                if text.endswith(block.opening[:size])
            ),
            default=0,
        )
        rest = text[: len(text) - held]
        # Separators are space only directly behind a call.
        if not rest.strip(self._spaces()):
            return len(text)
        return len(text) - len(rest.rstrip(SPACE))

    def _release(self, out: list, count: int) -> None:
        self._emit(out, self._text[:count])
        self._text = self._text[count:]

    def _emit(self, out: list, text: str) -> None:
        if text:
            self._fresh = False
            out.append(text)

    def _in_block(self, out: list) -> bool:
        block, text = self._block, self._text
        assert block is not None and self._end is not None
        start = 0 if block.bare else len(block.opening)
        end = self._end.find(text, start)
        if self._watch is not None and end != NEVER:
            out += self._watch.feed(text[start:end])
        if end is MORE:
            return False
        if end == NEVER:
            self._settle(out, None, len(block.opening))
            return True
        body = text[start : end - len(block.closing)]
        self._tries += 1
        calls = self._read(block, body)
        if block.closing and self._tries < _MAX_CLOSINGS and block.is_inside(body, calls):
            return True
        self._settle(out, calls, end)
        return True

    def _read(self, block: Block, body: str) -> list[ToolCall] | None:
        calls = block.read(body, self._functions)
        if calls is not None and block.known and not all(call.name in self._functions for call in calls):
            return None
        return calls

    def _settle(self, out: list, calls: list[ToolCall] | None, end: int) -> None:
        """Leave the block, which ends at `end` of the text."""
        watch, self._watch = self._watch, None
        if watch is not None and watch.begun:
            out += watch.finish(calls)
            begun = len(watch.begun)
            # What came out cannot be taken back: a block that is no call in the end is a call that broke off.
            calls = (
                watch.broken_off()
                if calls is None
                else [msgspec.structs.replace(call, is_streamed=index < begun) for index, call in enumerate(calls)]
            )
        if calls is None:
            self._emit(out, self._lead + self._text[:end])
        else:
            out += calls
            self._fresh = self._called = True
        self._text, self._lead, self._block, self._end = self._text[end:], "", None, None
