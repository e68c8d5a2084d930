"""Fields of requests. One declaration of a field is its check, its row in docs/api.md, its JSON schema in the OpenAPI
document and its command-line option.

A kind's (Integer, Number, …) `check` takes a value and its JSON path. It returns the value to use, or raises a
RequestError of the API's contract. `schema` describes the same values as JSON Schema (2020-12)."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from zse.errors import RequestError

CHAT, COMPLETIONS, EMBEDDINGS, RERANK, SCORE = ROUTES = ("chat", "completions", "embeddings", "rerank", "score")
Params = TypeVar("Params", bound=msgspec.Struct)
_TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    tuple: "an array",
    dict: "an object",
}


def refused(code: str, message: str, path: str) -> RequestError:
    """The 400 of a value that is refused."""
    return RequestError(message, code=code, param=path)


def wrong_type(path: str, wanted: str, value: object) -> RequestError:
    name = _TYPE_NAMES.get(type(value)) or f"a {type(value).__name__}"
    return refused("invalid_type", f"'{path}' must be {wanted}, not {name}.", path)


def expect(kind: type, value: Any, path: str) -> Any:
    """The value, which must be of this JSON type."""
    if type(value) is not kind:
        raise wrong_type(path, _TYPE_NAMES[kind], value)
    return value


def too_long(path: str, bound: str) -> RequestError:
    return refused("array_above_max_length", f"'{path}' must have {bound}.", path)


def shown(name: str) -> str:
    """A name that the user sent, for a message: bounded, because it comes back in the answer."""
    return name if len(name) <= 64 and name.isprintable() else "(unprintable)"


class Kind(msgspec.Struct, frozen=True):
    """What values a field takes."""

    def check(self, value: Any, path: str) -> Any:
        raise NotImplementedError

    @property
    def schema(self) -> dict:
        """JSON Schema of the values."""
        raise NotImplementedError


_LEAST, _MOST = -1 << 63, (1 << 63) - 1


class Integer(Kind, frozen=True):
    """An integer within [low, high]; None: of 64 bits. floor: smaller values mean the same as it. 3.0 is one, as in JSON
    schemas."""

    low: int | None = None
    high: int | None = None
    floor: int | None = None

    def check(self, value, path):
        if type(value) is float and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise wrong_type(path, "an integer", value)
        value = value.__index__()
        # 1e308 is an integer, too, and no message to the engine holds it.
        low, high = _LEAST if self.low is None else self.low, _MOST if self.high is None else self.high
        if not low <= value <= high:
            raise _out_of_range(path, low, high if value > high else self.high)
        return value if self.floor is None else max(self.floor, value)

    @property
    def schema(self):
        low, high = _LEAST if self.low is None else self.low, _MOST if self.high is None else self.high
        return {"type": "integer", "minimum": low, "maximum": high}


class Number(Kind, frozen=True):
    """A number within [low, high], or (low, high] when above_low. NaN is outside of every range."""

    low: float
    high: float
    above_low: bool = False

    def check(self, value, path):
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise wrong_type(path, "a number", value)
        if not self.low <= value <= self.high or self.above_low and value == self.low:
            raise _out_of_range(path, self.low, self.high, self.above_low)
        return float(value)

    @property
    def schema(self):
        return {"type": "number", "exclusiveMinimum" if self.above_low else "minimum": self.low, "maximum": self.high}


def _out_of_range(path: str, low, high, above_low: bool = False) -> RequestError:
    bounds = [f"greater than {low}" if above_low else f"at least {low}"] if low is not None else []
    bounds += [f"at most {high}"] if high is not None else []
    return refused("out_of_range", f"'{path}' must be {' and '.join(bounds)}.", path)


class Boolean(Kind, frozen=True):
    def check(self, value, path):
        return expect(bool, value, path)

    @property
    def schema(self):
        return {"type": "boolean"}


class String(Kind, frozen=True):
    """max_length in characters."""

    max_length: int = 1 << 30
    empty: bool = True

    def check(self, value, path):
        expect(str, value, path)
        if not value and not self.empty:
            raise refused("invalid_value", f"'{path}' must not be empty.", path)
        if len(value) > self.max_length:
            raise too_long(path, f"at most {self.max_length} characters")
        return value

    @property
    def schema(self):
        most = {} if self.max_length == 1 << 30 else {"maxLength": self.max_length}
        return {"type": "string"} | ({} if self.empty else {"minLength": 1}) | most


class Matching(Kind, frozen=True):
    """A string that a regular expression matches; it must be `meaning`."""

    pattern: str
    meaning: str

    def check(self, value, path):
        if re.fullmatch(self.pattern, expect(str, value, path)) is None:
            raise refused("invalid_value", f"'{path}' must be {self.meaning}.", path)
        return value

    @property
    def schema(self):
        return {"type": "string", "pattern": f"^{self.pattern}$"}


class OneOf(Kind, frozen=True):
    """One of some texts."""

    choices: tuple[str, ...]

    def check(self, value, path):
        expect(str, value, path)
        if value not in self.choices:
            raise refused("invalid_value", f"'{path}' must be one of: {', '.join(self.choices)}.", path)
        return value

    @property
    def schema(self):
        return {"type": "string", "enum": list(self.choices)}


class Array(Kind, frozen=True):
    item: Kind
    max_length: int
    min_length: int = 0

    def check(self, value, path):
        if type(value) not in (list, tuple):
            raise wrong_type(path, "an array", value)
        if len(value) > self.max_length:
            raise too_long(path, f"at most {self.max_length} items")
        if len(value) < self.min_length:
            raise refused("invalid_value", f"'{path}' must hold at least {self.min_length} item(s).", path)
        check = self.item.check
        return [check(item, f"{path}[{index}]") for index, item in enumerate(value)]

    @property
    def schema(self):
        least = {"minItems": self.min_length} if self.min_length else {}
        return {"type": "array", "items": self.item.schema, "maxItems": self.max_length} | least


class OneOrMore(Array, frozen=True):
    """A text alone, or an array of them; the value is a list."""

    def check(self, value, path):
        return [self.item.check(value, path)] if type(value) is str else Array.check(self, value, path)

    @property
    def schema(self):
        return {"anyOf": [self.item.schema, Array(self.item, self.max_length, self.min_length).schema]}


class Custom(Kind, frozen=True):
    """Values that a function checks and converts: (value, path) → the value to use."""

    check: Callable[[Any, str], Any]  # type: ignore[assignment]  # a function takes the place of the method
    described: Any

    @property
    def schema(self):
        return self.described


def _labels(value: Any, path: str) -> dict[str, str]:
    expect(dict, value, path)
    if len(value) > 16:
        raise too_long(path, "at most 16 entries")
    for key, item in value.items():
        String(64).check(key, path)
        String(512).check(item, f"{path}.{key}" if len(key) <= 64 else path)
    return value


# The `metadata` of OpenAI's API.
LABELS = Custom(_labels, {"type": "object", "additionalProperties": String(512).schema, "maxProperties": 16})


class Field(msgspec.Struct, frozen=True):
    """One field of a request.

    Args:
        kind: what values it takes; None: the field is known and not supported, and only `harmless` values, which ask for
            nothing, are accepted.
        doc: its meaning, one line.
        default: its value where it is left out or null.
        routes: those of ROUTES that accept it.
        option: the metavariable of its command-line option; "": it has none.
    """

    kind: Kind | None
    doc: str = ""
    default: Any = None
    required: bool = False
    harmless: tuple = (None,)
    routes: tuple[str, ...] = (CHAT, COMPLETIONS)
    option: str = ""

    @property
    def schema(self) -> dict:
        about: dict = {"description": self.doc} if self.doc else {}
        if self.kind is None:
            return about | {"enum": list(self.harmless)}
        if type(self.default) in (bool, int, float, str) and self.default != "":
            about["default"] = self.default
        return (self.kind.schema if self.required else _or_null(self.kind.schema)) | about


def _or_null(schema: dict) -> dict:
    """null counts as a field that is left out."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}


Fields = dict[str, Field]


class Object(Kind, frozen=True):
    """An object with these fields; the value is a dict of all of them, with defaults for those that are left out or
    null. Its path is "" where it is the whole body. ignored: other keys that may stand in it and say nothing here.
    Raises unknown_parameter, unsupported_parameter, missing_required_parameter, and what the kinds raise."""

    fields: Fields
    ignored: tuple[str, ...] = ()

    def check(self, value, path):
        expect(dict, value, path)
        prefix, values = path and path + ".", {}
        for name in value:
            if name not in self.fields and name not in self.ignored:
                here = prefix + shown(name)
                raise refused("unknown_parameter", f"Unknown field '{here}'.", here)
        for name, field in self.fields.items():
            item, here = value.get(name), prefix + name
            if field.kind is None:
                if item not in field.harmless:
                    raise refused("unsupported_parameter", f"'{here}' is not supported by this server.", here)
            elif item is not None:
                values[name] = field.kind.check(item, here)
            elif field.required:
                raise refused("missing_required_parameter", f"'{here}' is required.", here)
            else:
                values[name] = field.default
        return values

    @property
    def schema(self):
        required = [name for name, field in self.fields.items() if field.required]
        properties = dict.fromkeys(self.ignored, {}) | {name: field.schema for name, field in self.fields.items()}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return schema | ({"required": required} if required else {})


def of_text(text: str, kind: Kind | None) -> Any:
    """What a text of a query or a form stands for: an integer or a boolean where the kind takes those."""
    if isinstance(kind, Integer) and len(text) < 20 and text.isascii() and text.removeprefix("-").isdecimal():
        return int(text)
    return {"true": True, "false": False}.get(text, text) if isinstance(kind, Boolean) else text


@cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, Field]:
    """The fields that the annotations of a Struct declare, each with the Struct's default. What is annotated without a
    Field, or has no default, is not a part of requests."""
    found, defaults = {}, struct.__struct_defaults__
    for name, default in zip(struct.__struct_fields__[-len(defaults) :], defaults, strict=True):
        field = next((part for part in get_args(struct.__annotations__[name]) if isinstance(part, Field)), None)
        if field is not None:
            found[name] = msgspec.structs.replace(field, default=default)
    return found


def checked(params: Params) -> Params:
    """The same parameters, each value checked by its kind: the edge of those who call the engine in their own process.
    Raises RequestError."""
    changes = {}
    for name, field in fields_of(type(params)).items():
        value = getattr(params, name)
        if value != field.default and field.kind is not None:
            changes[name] = field.kind.check(value, name)
    return msgspec.structs.replace(params, **changes) if changes else params


def describe(fields: Fields) -> list[tuple[str, str, str]]:
    """(name, "required" | "refused" | default, doc) of each field: the tables of docs/api.md."""
    rows = []
    for name, field in fields.items():
        default = "" if field.default in (None, (), "", {}) else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
        default = ", ".join(field.default) if isinstance(field.default, tuple) else default
        rows.append((name, "required" if field.required else "refused" if field.kind is None else default, field.doc))
    return rows
