"""Calls while they are written: the name as soon as it is known, the arguments piece by piece.

A Watch reads along in a block of blocks.py that is not complete yet. Where arguments are JSON, what comes out is the
model's own text, as far as it is one object; where they are XML, each parameter when it is closed. Python calls give their
name early and their arguments at the end.
"""

import re
from collections.abc import Callable, Mapping

import msgspec

from zse.server.tools.blocks import MORE, NEVER, Balanced
from zse.server.tools.calls import ToolCall
from zse.server.tools.parsers import ToolFormat


class CallPart(msgspec.Struct, frozen=True):
    """A piece of a call. name: of a call that begins with it, else "". arguments: text that follows what came before. id:
    of a call that begins; "" until it is given."""

    name: str
    arguments: str
    id: str = ""


_BEGINNING = 512  # characters in which a head has to have matched


class Watch:
    """One block. functions: name → schema; most: calls that may come. read: as of the block, for formats whose arguments are
    not JSON."""

    def __init__(
        self, form: ToolFormat, functions: Mapping[str, dict], most: int, read: Callable[[str], list[ToolCall] | None]
    ):
        self._head, self._kind = re.compile(form.head), form.arguments
        self._functions, self._most, self._read = functions, most, read
        self._at = 0  # what has been looked at
        self._end = Balanced()  # of the arguments, where they are JSON
        self._inside = self._dead = False
        self.begun: list[str] = []  # names of calls that came out
        self.arguments: list[str] = []  # what of each came out

    def feed(self, text: str) -> list[CallPart]:
        """text: of the block so far, behind its opening."""
        out: list[CallPart] = []
        while not self._dead:
            if self._inside:
                if not self._continue_arguments(text, out):
                    break
            elif not self._begin(text, out):
                break
        return out

    def finish(self, calls: list[ToolCall] | None) -> list[CallPart]:
        """The block is over, and was `calls`: what of the arguments of a begun call has not come out yet."""
        out: list[CallPart] = []
        if calls and self.begun and self._kind != "json":
            self._put_rest(calls[0].arguments, out)
        return out

    def _begin(self, text: str, out: list[CallPart]) -> bool:
        head = self._head.match(text, self._at) if len(self.begun) < self._most else None
        name = next(group for group in head.groups() if group) if head is not None else ""
        is_json = self._kind == "json"
        if head is None or name not in self._functions or is_json and text[head.end() : head.end() + 1] != "{":
            # More text may make it one: "function<sep>" is the head of the function called so, or of another.
            self._dead = len(self.begun) >= self._most or len(text) - self._at > _BEGINNING
            return False
        self.begun.append(name)
        self.arguments.append("")
        out.append(CallPart(name, ""))
        self._at, self._end, self._inside = head.end(), Balanced(), True
        return True

    def _continue_arguments(self, text: str, out: list[CallPart]) -> bool:
        """More of the arguments; whether they ended."""
        if self._kind == "python":
            self._dead = True
            return False
        if self._kind == "xml":
            self._parameters(text, out)
            return False
        end = self._end.find(text, self._at)
        self._dead, self._inside = end == NEVER, end is MORE
        if self._dead:
            return False
        self._put(text[self._at : end], out)
        self._at = len(text) if end is MORE else end
        return end is not MORE

    def _parameters(self, text: str, out: list[CallPart]) -> None:
        """Those that another one follows: before that the mark may stand in the value."""
        last = text.rfind("<parameter=", self._at)
        end = len(text[:last].rstrip()) if last >= 0 else 0
        if end <= self._at or not text.endswith("</parameter>", 0, end):
            return
        self._at = end
        calls = self._read(text[:end] + "\n</function>")
        if calls:
            self._put_rest(calls[0].arguments[:-1], out)

    def _put(self, arguments: str, out: list[CallPart]) -> None:
        if arguments:
            self.arguments[-1] += arguments
            out.append(CallPart("", arguments))

    def _put_rest(self, arguments: str, out: list[CallPart]) -> None:
        """Of the first call's arguments so far, what has not come out yet."""
        if arguments.startswith(self.arguments[0]):
            self._put(arguments[len(self.arguments[0]) :], out)

    def broken_off(self) -> list[ToolCall]:
        """The calls of a block that was none in the end, as far as they came out."""
        return [
            ToolCall(name, arguments, is_streamed=True)
            for name, arguments in zip(self.begun, self.arguments, strict=True)
        ]
