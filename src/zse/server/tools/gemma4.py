"""Gemma 4's calls: <|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>, texts between two <|"|>. Source: its chat
template."""

import json

from zse.server.tools.blocks import SPACE
from zse.server.tools.calls import ToolCall, load_json, make_call, whole
from zse.server.tools.readers import ClosedCalls

OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MAX_DEPTH = 64  # of objects and lists in each other
_DECODER = json.JSONDecoder(strict=False)


class Gemma4Calls(ClosedCalls):
    """One call up to its mark."""

    def __init__(self, functions: dict[str, dict]):
        super().__init__(functions, CLOSING)

    def _take(self, text: str) -> bool:
        call = read_call(text)
        self.parts = whole([call] if call else [])
        return call is not None

    def _is_in_text(self, text: str, at: int) -> bool:
        return text.count(QUOTE, 0, at) % 2 == 1


def read_call(text: str) -> ToolCall | None:
    """The call that the text between the marks is, or None."""
    head, brace, rest = text.strip(SPACE).partition("{")
    if not brace or not head.startswith("call:"):
        return None
    try:
        arguments, end = _object(rest, 0, 0)
    except (ValueError, IndexError):
        return None
    return make_call(head.removeprefix("call:").strip(SPACE), arguments) if not rest[end:].strip(SPACE) else None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


def _quoted(text: str, at: int) -> tuple[str, int]:
    end = text.index(QUOTE, at + len(QUOTE))
    return text[at + len(QUOTE) : end], end + len(QUOTE)


def _object(text: str, at: int, depth: int) -> tuple[dict, int]:
    """Behind a brace: the object, and where it ends."""
    found: dict = {}
    at = _skip(text, at)
    while text[at] != "}":
        if text.startswith(QUOTE, at):
            key, at = _quoted(text, at)
        elif text[at] == '"':
            key, at = _DECODER.raw_decode(text, at)
        else:
            end = text.index(":", at)
            key, at = text[at:end].strip(SPACE), end
        at = _skip(text, at)
        if text[at] != ":" or key in found:
            raise ValueError
        found[key], at = _value(text, _skip(text, at + 1), depth + 1)
        at = _next(text, at, "}")
    return found, at + 1


def _next(text: str, at: int, closing: str) -> int:
    """Where the next member begins, or the closing bracket stands."""
    at = _skip(text, at)
    if text[at] == ",":
        return _skip(text, at + 1)
    if text[at] != closing:
        raise ValueError
    return at


def _value(text: str, at: int, depth: int):
    if depth > MAX_DEPTH:
        raise ValueError
    if text.startswith(QUOTE, at):
        return _quoted(text, at)
    if text[at] == '"':
        return _DECODER.raw_decode(text, at)
    if text[at] == "{":
        return _object(text, at + 1, depth)
    if text[at] == "[":
        found, at = [], _skip(text, at + 1)
        while text[at] != "]":
            value, at = _value(text, at, depth + 1)
            found.append(value)
            at = _next(text, at, "]")
        return found, at + 1
    end = at
    while text[end] not in ",}]":
        end += 1
    word = text[at:end].strip(SPACE)
    return None if word == "None" else load_json(word), end
