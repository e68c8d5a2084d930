"""Which JSON schemas compile in a time that their size bounds: they need no checker (checker.py), whose fork takes 8 ms.

A plain schema has few parts, of keywords that llguidance turns into a bounded number of rules each, and numbers within
bounds: 64 parts of the dearest kind, integers with a minimum and a maximum, take 34 ms and 1 MiB
(tests/structured/test_plain.py tries each kind). What is none has regular expressions, references, multiples, other
schemas in alternatives, or large counts."""

import json
from collections.abc import Callable
from typing import Any

from zse.structured.options import JSON_SCHEMA, Structure

MAX_BYTES, MAX_PARTS = 4096, 64
MAX_COUNT, MAX_NUMBER = 256, 10**9  # of characters or items; of a bound of numbers


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_within(most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and -most <= value <= most


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, list | dict | float)


_KEYWORDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("title", "description", "$schema"), _is_text),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_within(MAX_COUNT)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_within(MAX_NUMBER)),
    "type": lambda value: _is_text(value) or _are_texts(value),
    "required": _are_texts,
    "additionalProperties": lambda value: isinstance(value, bool),
    "const": _is_scalar,
    "enum": lambda value: isinstance(value, list) and all(_is_scalar(item) for item in value),
}


def is_plain(structure: Structure) -> bool:
    """Whether its grammar may be compiled unchecked."""
    if structure.kind != JSON_SCHEMA or len(structure.source) > MAX_BYTES:
        return False
    try:
        parts = [json.loads(structure.source)]
    except (ValueError, RecursionError):
        return False
    for part in parts:  # to which its own are added
        if not isinstance(part, dict) or len(parts) > MAX_PARTS:
            return False
        for key, value in part.items():
            if key == "properties" and isinstance(value, dict):
                parts += value.values()
            elif key == "items":
                parts.append(value)
            elif key not in _KEYWORDS or not _KEYWORDS[key](value):
                return False
    return True
