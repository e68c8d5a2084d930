"""Thirty JSON schemas, and a validator of what they use."""

import json
import re

_TEXT = {"type": "string", "maxLength": 6}


def _object(properties, required=None, **more):
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": list(properties) if required is None else required,
    } | more


SCHEMAS = {
    "string": _TEXT,
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    "integer": {"type": "integer", "minimum": -5, "maximum": 120},
    "above": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 13},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum": {"enum": ["red", 7, None, {"a": [1]}]},
    "const": {"const": {"kind": "x"}},
    "types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 9},
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    "least": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, _TEXT], "items": False, "minItems": 2},
    "matrix": {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "empty object": _object({}),
    "person": _object({"name": _TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    "optional": _object({"a": {"type": "boolean"}, "b": {"type": "null"}, "c": _TEXT}, ["b"]),
    "nested": _object({"inner": _object({"deep": _object({"x": {"type": "boolean"}})})}),
    "map": {
        "type": "object",
        "patternProperties": {"^[a-c]{1,2}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1, "maximum": 3}]},
    "one of": {
        "oneOf": [
            _object({"kind": {"const": "a"}, "x": {"type": "boolean"}}),
            _object({"kind": {"const": "b"}, "y": {"type": "null"}}),
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "reference": {
        "$defs": {"flag": {"type": "boolean"}},
        "type": "array",
        "items": {"$ref": "#/$defs/flag"},
        "maxItems": 3,
    },
    "tree": {
        "$defs": {
            "node": _object(
                {
                    "leaf": {"type": "boolean"},
                    "next": {"anyOf": [{"type": "null"}, {"type": "null"}, {"$ref": "#/$defs/node"}]},
                }
            )
        },
        "$ref": "#/$defs/node",
    },
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "time and flag": _object({"at": {"type": "string", "format": "time"}, "ok": {"type": "boolean"}}),
    "choices": _object(
        {"size": {"enum": ["S", "M", "L"]}, "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}}
    ),
    "quotes": _object({'say "hi"': {"const": 'a"b\\c'}}),
}


def problem(value, schema, root=None) -> str | None:
    """Why `value` is not valid, or None. Knows the keywords that SCHEMAS has."""
    root = schema if root is None else root
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part]
        return problem(value, target, root)
    if "const" in schema and value != schema["const"]:
        return f"{value!r} is not the constant"
    if "enum" in schema and value not in schema["enum"]:
        return f"{value!r} is not in the enum"
    for key, wanted in (
        ("anyOf", lambda good: good >= 1),
        ("oneOf", lambda good: good == 1),
        ("allOf", lambda good: good == len(schema.get("allOf", ()))),
    ):
        if key in schema and not wanted(sum(problem(value, other, root) is None for other in schema[key])):
            return f"{value!r} does not fit {key}"
    kinds = schema.get("type")
    if kinds is not None and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return f"{value!r} is no {kinds}"
    if isinstance(value, str):
        return _text_problem(value, schema)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_problem(value, schema)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30):
            return f"{len(value)} items"
        first = schema.get("prefixItems", [])
        pairs = list(zip(value, first, strict=False))
        if isinstance(schema.get("items"), dict):
            pairs += [(item, schema["items"]) for item in value[len(first) :]]
        elif schema.get("items") is False and len(value) > len(first):
            return "too many items"
        return next((found for item, of in pairs if (found := problem(item, of, root))), None)
    if isinstance(value, dict):
        return _object_problem(value, schema, root)
    return None


def _object_problem(value, schema, root):
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if missing := set(schema.get("required", ())) - set(value):
        return f"without {missing}"
    if len(value) > schema.get("maxProperties", 1 << 30):
        return "too many properties"
    for name, item in value.items():
        patterns = schema.get("patternProperties", {})
        of = properties.get(name, next((of for pattern, of in patterns.items() if re.search(pattern, name)), others))
        if of is False:
            return f"unknown {name!r}"
        if of is not True and (found := problem(item, of, root)):
            return found
    return None


def _is(value, kind) -> bool:
    types = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return (
        isinstance(value, int) and not isinstance(value, bool) if kind == "integer" else isinstance(value, types[kind])
    )


_FORMATS = {
    "date": r"\d{4}-\d\d-\d\d",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)",
}


def _text_problem(value, schema):
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30):
        return f"{len(value)} characters"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return f"{value!r} is not {schema['pattern']}"
    if "format" in schema and not re.fullmatch(_FORMATS[schema["format"]], value):
        return f"{value!r} is no {schema['format']}"
    return None


def _number_problem(value, schema):
    if not schema.get("minimum", -1e99) <= value <= schema.get("maximum", 1e99):
        return f"{value} is out of range"
    if not schema.get("exclusiveMinimum", -1e99) < value < schema.get("exclusiveMaximum", 1e99):
        return f"{value} is out of the open range"
    if "multipleOf" in schema and value % schema["multipleOf"]:
        return f"{value} is no multiple"
    return None


def check_text(text: str, schema: dict) -> None:
    found = problem(json.loads(text), schema)
    assert found is None, f"{found}: {text}"
