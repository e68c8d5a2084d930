"""JSON schemas in the keywords that llguidance knows, with the meaning that they had."""

from collections.abc import Callable
from typing import Any

# Keywords that hold schemas: by name, in a list, one.
_NAMED = frozenset("properties patternProperties $defs definitions dependencies dependentSchemas".split())
_LISTED = frozenset("anyOf oneOf allOf prefixItems".split())
_SINGLE = frozenset("items additionalProperties not".split())
MAX_BRANCHES = 100  # of a oneOf, each compared with each
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
    """The schema without formats that are notes, dependencies as anyOf, and oneOf as anyOf where its branches exclude
    each other."""
    return rewritten(schema, lambda part: _expressed(part, schema))


def _expressed(part: dict, root: dict) -> dict:
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
        known = [{"type": part.get("type")} | _resolved(branch, root) for branch in branches]
        if all(_exclude(one, other, root) for number, one in enumerate(known) for other in known[:number]):
            rules.append({"anyOf": part.pop("oneOf")})
    others = part.get("allOf")
    return part | {"allOf": [*(others if isinstance(others, list) else ()), *rules]} if rules else part


def _resolved(schema: Any, root: dict) -> dict:
    """What a schema refers to within `root`, if it does; {} for what is no object."""
    for _ in range(8):  # references of references
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        target: Any = root
        for name in schema["$ref"][2:].split("/"):
            target = target.get(name) if isinstance(target, dict) else None
        schema = target
    return schema if isinstance(schema, dict) else {}


def _exclude(first: dict, second: dict, root: dict) -> bool:
    """Whether no value is of both: they have other types, or require a property that has other texts."""
    kinds = [_texts(part.get("type")) for part in (first, second)]
    if all(kinds) and not kinds[0] & kinds[1] and not {"number", "integer"} <= kinds[0] | kinds[1]:
        return True
    if {"object"} not in kinds:
        return False
    properties = [_resolved(part.get("properties"), root) for part in (first, second)]
    for name in _texts(first.get("required")) & _texts(second.get("required")):
        found = [_resolved(of.get(name), root) for of in properties]
        values = [_texts(of.get("enum", of.get("const"))) for of in found]
        if all(values) and not values[0] & values[1]:
            return True
    return False


def _texts(value: Any) -> set[str]:
    """A text, or those of a list; empty for what holds anything else."""
    values = value if isinstance(value, list) else [value]
    return set(values) if all(isinstance(item, str) for item in values) else set()
