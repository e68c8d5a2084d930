"""Checks of one JSON field each: check(value, path) returns the value to use or raises the contract's APIError."""

from collections.abc import Callable
from typing import Any

import msgspec

from zse.server.errors import APIError

Check = Callable[[Any, str], Any]
_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


class Field(msgspec.Struct, frozen=True):
    """One field of a request. check None: the field is known but not supported, and only `harmless` values (which
    change nothing) are accepted. doc: one line for docs/api.md."""

    check: Check | None
    doc: str
    default: object = None
    required: bool = False
    harmless: tuple = (None,)


def wrong_type(path: str, wanted: str, value: object) -> APIError:
    return APIError("invalid_type", f"'{path}' must be {wanted}, not {_NAMES[type(value)]}.", path)


def read_fields(fields: dict[str, Field], body: dict, prefix: str = "") -> dict:
    """The checked values of all fields, defaults filled in (null counts as absent). Raises APIError with the path."""
    for name in body:
        if name not in fields:
            # Fields are named to the user, who sent them; the length is bounded because they come back in the answer.
            shown = name if len(name) <= 64 and name.isprintable() else "(unprintable)"
            raise APIError("unknown_parameter", f"Unknown field '{prefix}{shown}'.", prefix + shown)
    values = {}
    for name, field in fields.items():
        value, path = body.get(name), prefix + name
        if field.check is None:
            if value not in field.harmless:
                raise APIError("unsupported_parameter", f"'{path}' is not supported by this server.", path)
        elif value is not None:
            values[name] = field.check(value, path)
        elif field.required:
            raise APIError("missing_required_parameter", f"'{path}' is required.", path)
        else:
            values[name] = field.default
    return values


def integer(low: int | None = None, high: int | None = None) -> Check:
    def check(value, path):
        if type(value) is not int:
            raise wrong_type(path, "an integer", value)
        if low is not None and value < low or high is not None and value > high:
            raise _out_of_range(path, low, high)
        return value

    return check


def number(low: float, high: float, above_low: bool = False) -> Check:
    """A JSON number within [low, high], or (low, high] when above_low."""

    def check(value, path):
        if type(value) not in (int, float):
            raise wrong_type(path, "a number", value)
        if not low <= value <= high or above_low and value == low:
            raise _out_of_range(path, low, high, above_low)
        return float(value)

    return check


def _out_of_range(path, low, high, above_low=False) -> APIError:
    bounds = [f"greater than {low}" if above_low else f"at least {low}"] if low is not None else []
    bounds += [f"at most {high}"] if high is not None else []
    return APIError("out_of_range", f"'{path}' must be {' and '.join(bounds)}.", path)


def boolean(value, path):
    if type(value) is not bool:
        raise wrong_type(path, "a boolean", value)
    return value


def string(max_length: int = 1 << 30, empty: bool = True) -> Check:
    def check(value, path):
        if type(value) is not str:
            raise wrong_type(path, "a string", value)
        if not value and not empty:
            raise APIError("invalid_value", f"'{path}' must not be empty.", path)
        if len(value) > max_length:
            raise too_long(path, f"at most {max_length} characters")
        return value

    return check


def one_of(*choices: str) -> Check:
    def check(value, path):
        if type(value) is not str:
            raise wrong_type(path, "a string", value)
        if value not in choices:
            raise APIError("invalid_value", f"'{path}' must be one of: {', '.join(choices)}.", path)
        return value

    return check


def array(check_item: Check, max_length: int, min_length: int = 0) -> Check:
    def check(value, path):
        if type(value) is not list:
            raise wrong_type(path, "an array", value)
        if len(value) > max_length:
            raise too_long(path, f"at most {max_length} items")
        if len(value) < min_length:
            raise APIError("invalid_value", f"'{path}' must hold at least {min_length} item(s).", path)
        return [check_item(item, f"{path}[{index}]") for index, item in enumerate(value)]

    return check


def mapping(value, path, max_length: int) -> dict:
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    if len(value) > max_length:
        raise too_long(path, f"at most {max_length} entries")
    return value


def too_long(path: str, bound: str) -> APIError:
    return APIError("array_above_max_length", f"'{path}' must have {bound}.", path)


_stop_item = string(256, empty=False)


def stop(value, path) -> tuple[str, ...]:
    """A string or up to four of them."""
    if type(value) is str:
        return (_stop_item(value, path),)
    return tuple(array(_stop_item, 4)(value, path))


def metadata(value, path) -> dict:
    for key, item in mapping(value, path, 16).items():
        string(64)(key, path)
        string(512)(item, f"{path}.{key}" if len(key) <= 64 else path)
    return value


def logit_bias(value, path) -> dict[int, float]:
    """Keys are token ids as strings, values within [-100, 100]; ids are compared with the vocabulary later."""
    out = {}
    for key, bias in mapping(value, path, 1024).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise APIError("invalid_token_id", f"A key of '{path}' is not a token id.", path)
        out[int(key)] = number(-100, 100)(bias, f"{path}.{key}")
    return out


def token_ids(max_length: int) -> Check:
    return array(token_id, max_length)


def token_id(value, path) -> int:
    if type(value) is not int:
        raise wrong_type(path, "an integer", value)
    if not 0 <= value < 1 << 31:
        raise APIError("invalid_token_id", f"'{path}' is not a token id.", path)
    return value
