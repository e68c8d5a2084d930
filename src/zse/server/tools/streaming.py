"""Calls while they are written: the name as soon as it is known, the arguments piece by piece.

A Watch reads along in a block of blocks.py that is not complete yet. Where arguments are JSON, what comes out is the
model's own text, as far as it is one object; where they are XML, each parameter when it is closed. Python calls give their
name early and their arguments at the end.
"""

import re
from collections.abc import Callable, Mapping

import msgspec

from zse.server.tools.calls import ToolCall


class CallPart(msgspec.Struct, frozen=True):
    """A piece of a call. name: of a call that begins with it, else "". arguments: text that follows what came before. id:
    of a call that begins; "" until it is given."""

    name: str
    arguments: str
    id: str = ""


_KEY = r'\s*"(?:arguments|parameters)"\s*:\s*'
_OBJECT = r'[\s,;\[\]}]*\{\s*"name"\s*:\s*"([A-Za-z0-9_.-]{1,64})"\s*,' + _KEY
# What stands before a call's arguments, by format; the group is its name. Compiled when a Watch needs one: re keeps it.
_HEADS = {
    "hermes": _OBJECT,
    "llama3_json": _OBJECT,
    "gemma": _OBJECT,
    "mistral": rf"(?:{_OBJECT})|\s*([A-Za-z0-9_.-]{{1,64}})\s*(?:\[CALL_ID\]\w*)?\s*\[ARGS\]\s*",
    "deepseek": r"(?:\s|```)*(?:<｜tool▁call▁end｜>)?\s*<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>([A-Za-z0-9_.-]{1,64})"
    r"\n```json\s*|([A-Za-z0-9_.-]{1,64})<｜tool▁sep｜>\s*)",
    "qwen3_coder": r"\s*<function=([^>\s]{1,64})>",
    "pythonic": r"\s*\[?\s*([A-Za-z0-9_.]{1,64})\(",
}
_BEGINNING = 512  # characters in which a head has to have matched


class Watch:
    """One block. form: a name of PARSERS; functions: name → schema; most: calls that may come. read: as of the block, for
    formats whose arguments are not JSON."""

    def __init__(
        self, form: str, functions: Mapping[str, dict], most: int, read: Callable[[str], list[ToolCall] | None]
    ):
        self._head = re.compile(_HEADS[form])
        self._form, self._functions, self._most, self._read = form, functions, most, read
        self._at = 0  # what has been looked at
        self._sent = 0  # of the arguments, in the text (JSON), or of their JSON (XML)
        self._inside = False
        self._depth = 0
        self._quoted = self._escaped = self._dead = False
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
        if calls and self.begun and self._form in ("qwen3_coder", "pythonic"):
            rest = calls[0].arguments[len(self.arguments[0]) :]
            if rest and calls[0].arguments.startswith(self.arguments[0]):
                self._put(rest, out)
        return out

    def _begin(self, text: str, out: list[CallPart]) -> bool:
        head = self._head.match(text, self._at) if len(self.begun) < self._most else None
        name = next(group for group in head.groups() if group) if head is not None else ""
        is_json = self._form not in ("qwen3_coder", "pythonic")
        if head is None or name not in self._functions or is_json and text[head.end() : head.end() + 1] != "{":
            # More text may make it one: "function<sep>" is the head of the function called so, or of another.
            self._dead = len(self.begun) >= self._most or len(text) - self._at > _BEGINNING
            return False
        self.begun.append(name)
        self.arguments.append("")
        out.append(CallPart(name, ""))
        self._at = self._sent = head.end()
        self._inside, self._depth = True, 0
        return True

    def _continue_arguments(self, text: str, out: list[CallPart]) -> bool:
        """More of the arguments; whether they ended."""
        if self._form == "pythonic":
            self._dead = True
            return False
        if self._form == "qwen3_coder":
            self._parameters(text, out)
            return False
        at, ended = self._at, False
        while at < len(text) and not ended:
            character = text[at]
            at += 1
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                ended = not self._depth
        if at > self._sent:
            self._put(text[self._sent : at], out)
        self._at = self._sent = at
        self._inside = not ended
        return ended

    def _parameters(self, text: str, out: list[CallPart]) -> None:
        end = text.rfind("</parameter>") + len("</parameter>")
        if end <= self._at:
            return
        self._at = end
        calls = self._read(text[:end] + "\n</function>")
        if calls:
            whole = calls[0].arguments[:-1]
            if whole.startswith(self.arguments[0]) and len(whole) > len(self.arguments[0]):
                self._put(whole[len(self.arguments[0]) :], out)

    def _put(self, arguments: str, out: list[CallPart]) -> None:
        self.arguments[-1] += arguments
        out.append(CallPart("", arguments))


def broken_off(watch: Watch) -> list[ToolCall]:
    """The calls of a block that was none in the end, as far as they came out."""
    return [
        ToolCall(name, arguments, is_streamed=True)
        for name, arguments in zip(watch.begun, watch.arguments, strict=True)
    ]
