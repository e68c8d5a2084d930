"""What a request may ask of the form of its answer."""

from collections.abc import Mapping
from typing import Any

import msgspec

from zse.errors import RequestError

JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, LARK, GBNF, TEXT = (
    "json_object",
    "json_schema",
    "regex",
    "choice",
    "lark",
    "gbnf",
    "text",
)
KINDS = (JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, LARK, GBNF, TEXT)
MAX_SOURCE_BYTES = 64 << 10
# White space between the parts of JSON: a space, or a line and its indentation; an end to models that only write lines.
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,24}"


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Reasoning that stands before the answer, which the grammar does not see. opening, closing: its marks. is_open:
    the prompt ends inside it. budget: tokens after which the closing mark is forced; None: none."""

    opening: str
    closing: str
    is_open: bool = False
    budget: int | None = None


class Structure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The form of an answer. kind: of KINDS; source: the JSON schema, regular expression, JSON array of choices or
    grammar (Lark as llguidance reads it, or llama.cpp's GBNF) as text; "" for json_object and text (any text: only
    `thinking` counts). lenient: keywords of a schema that are not implemented are passed over, not refused."""

    kind: str
    source: str = ""
    lenient: bool = False
    thinking: Thinking | None = None


MAX_CHOICES = 4096
_NAMES = ("json", "regex", "choice", "grammar")


def read_structure(fields: Mapping[str, Any], path: str = "structure", thinking: Thinking | None = None) -> Structure:
    """The Structure of {"json": schema (an object, its text, or true: any object)} or {"regex": …}, {"choice":
    [texts]}, {"grammar": Lark or GBNF}: exactly one of them. Raises RequestError that names the field below `path`."""
    unknown = next((name for name in fields if name not in _NAMES), None)
    if unknown is not None:
        shown = unknown if len(unknown) <= 64 and unknown.isprintable() else "(unprintable)"
        raise _error(
            f"Unknown field '{path}.{shown}'; known: {', '.join(_NAMES)}.", f"{path}.{shown}", "unknown_parameter"
        )
    given = [name for name in _NAMES if fields.get(name) is not None]
    if len(given) != 1:
        raise _error(f"'{path}' must hold exactly one of {', '.join(_NAMES)}.", path, "invalid_value")
    name, path = given[0], f"{path}.{given[0]}"
    value = fields[name]
    if name == "json":
        return _json(value, path, thinking)
    if name == "choice":
        if type(value) not in (list, tuple) or not all(type(word) is str for word in value):
            raise _error(f"'{path}' must be an array of strings.", path, "invalid_type")
        if not value or "" in value:
            raise _error(f"'{path}' must hold texts, none of them empty.", path, "invalid_value")
        if len(value) > MAX_CHOICES:
            raise _error(f"'{path}' must have at most {MAX_CHOICES} items.", path, "array_above_max_length")
        kind, source = CHOICE, _text(list(value), path)
    else:
        if type(value) is not str:
            raise _error(f"'{path}' must be a string.", path, "invalid_type")
        if not value.strip():
            raise _error(f"'{path}' must not be empty.", path, "invalid_value")
        kind, source = REGEX if name == "regex" else GBNF if "::=" in value else LARK, value
    return checked(Structure(kind=kind, source=source, thinking=thinking), path)


def _json(value: Any, path: str, thinking: Thinking | None) -> Structure:
    if value is True:
        return Structure(kind=JSON_OBJECT, thinking=thinking)
    if type(value) is str:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
            raise _error(f"'{path}' is not JSON: {error}.", path, "invalid_schema") from None
    if type(value) is not dict:
        raise _error(f"'{path}' must be a JSON schema (an object).", path, "invalid_type")
    return checked(Structure(kind=JSON_SCHEMA, source=_text(value, path), thinking=thinking), path)


def _text(value: Any, path: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeEncodeError):
        raise _error(
            f"'{path}' cannot be read: nested too deeply, or not Unicode.", path, "schema_too_complex"
        ) from None


def checked(structure: Structure, path: str = "structure") -> Structure:
    """The same structure. Raises RequestError for a source that is refused unread."""
    if len(structure.source) > MAX_SOURCE_BYTES or len(structure.source.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
        raise _error(f"'{path}' is longer than {MAX_SOURCE_BYTES >> 10} KiB.", path, "schema_too_complex")
    return structure


def _error(message: str, path: str, code: str) -> RequestError:
    return RequestError(message, code=code, param=path)
