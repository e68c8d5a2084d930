"""The schema of the values that another schema does not allow, where JSON schema has words for them."""

from collections.abc import Callable
from typing import Any

MAX_NEGATED = 8  # branches of a oneOf of which each is joined with the negation of all others
_MAX_DEPTH = 8
_MAX_WORD_CHARACTERS = 400  # of strings that are excluded together
# Keywords that say nothing about which values are valid.
SILENT = frozenset("title description examples default $schema $id $comment deprecated readOnly writeOnly".split())
_TYPES = ("string", "number", "boolean", "null", "array", "object")


def resolved(schema: Any, root: dict) -> dict:
    """What a schema refers to within `root`, if it does; {} for what is no object."""
    for _ in range(8):  # references of references
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        target: Any = root
        for name in schema["$ref"][2:].split("/"):
            target = target.get(name) if isinstance(target, dict) else None
        schema = target
    return schema if isinstance(schema, dict) else {}


def texts(value: Any) -> set[str]:
    """A text, or those of a list; empty for what holds anything else."""
    values = value if isinstance(value, list) else [value]
    return set(values) if all(isinstance(item, str) for item in values) else set()


def negated(schema: Any, root: dict, depth: int = _MAX_DEPTH) -> Any:
    """A schema of exactly the values that `schema` does not allow; None where there is none. root: for references."""
    if isinstance(schema, bool):
        return not schema
    if isinstance(schema, dict) and "$ref" in schema:
        schema = resolved(schema, root) or None
    if not isinstance(schema, dict) or not depth:
        return None
    found: list = []
    for key, value in schema.items():
        if key in SILENT:
            continue
        rule = _RULES.get(key)
        against = rule(value, lambda part: negated(part, root, depth - 1)) if rule is not None else None
        if against is None:
            return None
        found += against
    return {"anyOf": found} if len(found) != 1 else found[0] if found else False


def _type(value: Any, negate: Callable) -> list | None:
    kinds = texts(value)
    if not kinds or "integer" in kinds and "number" not in kinds:
        return None
    rest = [kind for kind in _TYPES if kind not in kinds]
    return [{"type": rest}] if rest else []


def _required(value: Any, negate: Callable) -> list | None:
    if not isinstance(value, list):
        return None
    return [{"type": "object", "properties": {name: False}} for name in value]


def _properties(value: Any, negate: Callable) -> list | None:
    if not isinstance(value, dict):
        return None
    against = {name: negate(part) for name, part in value.items()}
    if None in against.values():
        return None
    return [
        {"type": "object", "required": [name], "properties": {name: part}}
        for name, part in against.items()
        if part is not False
    ]


def _values(value: Any, negate: Callable) -> list | None:
    values = value if isinstance(value, list) else None
    if values is None or any(isinstance(item, dict | list) for item in values):
        return None
    words = [item for item in values if isinstance(item, str)]
    numbers = sorted({item for item in values if isinstance(item, int | float) and not isinstance(item, bool)})
    if sum(map(len, words)) > _MAX_WORD_CHARACTERS:
        return None
    flags = [item for item in values if isinstance(item, bool)]
    met = {"string": words, "number": numbers, "boolean": flags, "null": None in values}
    found: list = [{"type": [kind for kind in _TYPES if not met.get(kind)]}]
    if words:
        found.append({"type": "string", "pattern": f"^({_other(words)})$"})
    if numbers:
        edges = [None, *numbers, None]
        for low, high in zip(edges, edges[1:], strict=False):
            part: dict = {"type": "number"}
            part |= {} if low is None else {"exclusiveMinimum": low}
            part |= {} if high is None else {"exclusiveMaximum": high}
            found.append(part)
    if len({*flags}) == 1:
        found.append({"const": not flags[0]})
    return found


def _other(words: list[str]) -> str:
    """A regular expression of all texts but these."""
    heads: dict[str, list[str]] = {}
    for word in words:
        if word:
            heads.setdefault(word[0], []).append(word[1:])
    own = "".join(f"\\x{{{ord(head):x}}}" for head in heads)
    rest = f"[^{own}](.|\\n)*" if heads else "(.|\\n)+"
    parts = [rest, *(f"\\x{{{ord(head):x}}}({_other(tails)})" for head, tails in heads.items())]
    return "|".join([*parts, *([] if "" in words else [""])])


def _each(value: Any, negate: Callable) -> list | None:
    """Of anyOf: none of them."""
    against = [negate(part) for part in value] if isinstance(value, list) else [None]
    return None if None in against else [{"allOf": against}]


def _some(value: Any, negate: Callable) -> list | None:
    """Of allOf: not all of them."""
    against = [negate(part) for part in value] if isinstance(value, list) else [None]
    return None if None in against else [part for part in against if part is not False]


def _bound(kind: str, other: str, step: int = 0) -> Callable:
    def rule(value: Any, negate: Callable) -> list | None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return [] if step and value + step < 0 else [{"type": kind, other: value + step}]

    return rule


_RULES: dict[str, Callable[[Any, Callable], list | None]] = {
    "type": _type,
    "required": _required,
    "properties": _properties,
    "enum": _values,
    "const": lambda value, negate: _values([value], negate),
    "not": lambda value, negate: [value],
    "anyOf": _each,
    "allOf": _some,
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"),
    "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
    "items": lambda value, negate: [{"type": "array", "minItems": 1}] if value is False else None,
    "definitions": lambda value, negate: [],
    "$defs": lambda value, negate: [],
}
