"""JSON schemas in the keywords that llguidance knows, with the meaning that they had."""

import json
import math
from collections.abc import Callable
from typing import Any

from zse.structured.negation import MAX_NEGATED, SILENT, negated, resolved, texts

# Keywords that hold schemas: by name, in a list, one.
_NAMED = frozenset("properties patternProperties $defs definitions dependencies dependentSchemas".split())
_LISTED = frozenset("anyOf oneOf allOf prefixItems".split())
_SINGLE = frozenset("items additionalProperties not if then else contains propertyNames".split())
MAX_BRANCHES = 100  # of a oneOf, each compared with each
# Keyword, the least and the largest value that leaves an integer of 64 bits.
_BOUNDS = (
    ("minimum", -math.inf, (1 << 63) - 1),
    ("exclusiveMinimum", -math.inf, (1 << 63) - 2),
    ("maximum", -(1 << 63), math.inf),
    ("exclusiveMaximum", 1 - (1 << 63), math.inf),
)
# Others are notes for people.
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())


def rewritten(schema: Any, change: Callable[[dict], dict]) -> Any:
    """The schema with change(part) in the place of each part that is a schema, inner ones first."""
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            value = {name: rewritten(part, change) for name, part in value.items()}
        elif key in _LISTED and isinstance(value, list):
            value = [rewritten(part, change) for part in value]
        elif key in _SINGLE:
            value = rewritten(value, change)
        out[key] = value
    return change(out)


def expressed(schema: Any) -> Any:
    """The schema without formats that are notes; dependencies, not, if, names of properties and oneOf in other words,
    where there are some with the same meaning (negation.py)."""
    return rewritten(schema, lambda part: _expressed(part, schema))


def _expressed(part: dict, root: dict) -> dict:
    _bound(part)
    if part.get("uniqueItems") is False:  # asks for nothing
        del part["uniqueItems"]
    if isinstance(part.get("format"), str) and part["format"] not in _FORMATS:
        del part["format"]
    rules = []
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        if isinstance(part.get(key), dict):
            for name, wanted in part.pop(key).items():
                then = {"required": wanted} if isinstance(wanted, list) else wanted
                rules.append({"anyOf": [{"properties": {name: False}}, then]})
    branches = part.get("oneOf")
    if isinstance(branches, list) and len(branches) <= MAX_BRANCHES:
        alternatives = _one_of(branches, part, root)
        if alternatives is not None:
            del part["oneOf"]
            rules.append({"anyOf": alternatives})
    if isinstance(part.get("not"), dict | bool):
        denied = negated(part["not"], root)
        if denied is not None:
            del part["not"]
            rules.append(denied)
    if "if" in part:
        denied = negated(part["if"], root)
        if denied is not None:
            asked, then, other = (part.pop(key, True) for key in ("if", "then", "else"))
            rules.append({"anyOf": [{"allOf": [asked, then]}, {"allOf": [denied, other]}]})
    else:  # without an `if` they say nothing
        part.pop("then", None)
        part.pop("else", None)
    _named(part)
    if "$ref" in part:  # llguidance takes a note beside a reference for a rule
        part = {key: value for key, value in part.items() if key not in SILENT}
    others = part.get("allOf")
    return part | {"allOf": [*(others if isinstance(others, list) else ()), *rules]} if rules else part


def _bound(part: dict) -> None:
    """Bounds of numbers as llguidance reads them, as doubles: an integer that is none becomes the next one within. ValueError beyond
    64 bits, where it takes the nearest integer of 64 bits, which is not within."""
    kinds = texts(part.get("type"))
    if kinds and not kinds & {"integer", "number"}:
        return
    for key, low, high in _BOUNDS:
        value = part.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not low <= value <= high:
            raise ValueError(f"nothing enforces a {key} beyond integers of 64 bits")
        is_least = high < math.inf
        if (value > float(value)) if is_least else (value < float(value)):
            part[key] = int(math.nextafter(float(value), math.inf if is_least else -math.inf))
        elif isinstance(value, int):
            part[key] = int(float(value))


def _one_of(branches: list, part: dict, root: dict) -> list | None:
    """Branches of which each excludes the others, with the same values as those of oneOf; None when there are none."""
    known = [{"type": part.get("type")} | resolved(branch, root) for branch in branches]
    if all(_exclude(one, other, root) for number, one in enumerate(known) for other in known[:number]):
        return branches
    if len(branches) > MAX_NEGATED:
        return None
    denied = [negated(branch, root) for branch in branches]
    if any(schema is None for schema in denied):
        return None
    return [
        {"allOf": [branch, *(schema for other, schema in enumerate(denied) if other != number)]}
        for number, branch in enumerate(branches)
    ]


def _named(part: dict) -> None:
    """propertyNames as properties or patternProperties, where nothing else says what names there are."""
    names = part.get("propertyNames")
    if not isinstance(names, dict) or part.keys() & {"properties", "patternProperties"}:
        return
    rules, value = (
        {key: names[key] for key in names if key not in SILENT | {"type"}},
        part.get("additionalProperties", {}),
    )
    words = rules.get("enum", [rules["const"]] if "const" in rules else None)
    if not rules:
        del part["propertyNames"]
    elif len(rules) > 1:
        return
    elif isinstance(words, list) and all(isinstance(word, str) for word in words):
        del part["propertyNames"]
        part |= {"properties": dict.fromkeys(words, value), "additionalProperties": False}
    elif isinstance(rules.get("pattern"), str):
        del part["propertyNames"]
        part |= {"patternProperties": {rules["pattern"]: value}, "additionalProperties": False}


def _exclude(first: dict, second: dict, root: dict) -> bool:
    """Whether no value is of both: they have other types or constants, require a property that has other ones, or one
    requires a property that the other does not have."""
    kinds = [texts(part.get("type")) for part in (first, second)]
    if all(kinds) and not kinds[0] & kinds[1] and not {"number", "integer"} <= kinds[0] | kinds[1]:
        return True
    if _differ(first, second):
        return True
    if {"object"} not in kinds:
        return False
    properties = [resolved(part.get("properties"), root) for part in (first, second)]
    required = [texts(part.get("required")) for part in (first, second)]
    for part, own, others in zip((first, second), properties, required[::-1], strict=True):
        if part.get("additionalProperties") is False and "patternProperties" not in part and others - own.keys():
            return True
    both = required[0] & required[1]
    return any(_differ(*(resolved(of.get(name), root) for of in properties)) for name in both)


def _differ(first: dict, second: dict) -> bool:
    """Whether they are constants, and none of both."""
    found = []
    for part in (first, second):
        values = part.get("enum", [part["const"]] if "const" in part else None)
        if not isinstance(values, list):
            return False
        found.append({json.dumps(_same(item), sort_keys=True) for item in values})
    return not found[0] & found[1]


def _same(value: Any) -> Any:
    """1 and 1.0 are one value."""
    if isinstance(value, list):
        return [_same(item) for item in value]
    if isinstance(value, dict):
        return {key: _same(item) for key, item in value.items()}
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else value
