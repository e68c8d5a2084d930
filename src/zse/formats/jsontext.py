"""JSON from files that are not trusted: duplicate keys, deep nesting and wrong types are FormatErrors."""

import json

from zse.errors import FormatError
from zse.formats.file import read_whole

MAX_JSON_BYTES = 1 << 24  # parsed, JSON takes up to ten times its size


def _unique(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} stands twice")
            seen.add(key)
    return result


def _no_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def parse_object(data: bytes, path: str, offset: int, field: str) -> dict:
    """The JSON object in `data`, which lies at `offset` of `path`. NaN and Infinity are refused."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: also bad UTF-8 and numbers of over 4,300 digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FormatError(path, offset, field, f"is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise FormatError(path, offset, field, "is not a JSON object")
    return value


def read_object(path: str, field: str) -> dict:
    """The JSON object that is the whole file `path`."""
    return parse_object(read_whole(path, field, MAX_JSON_BYTES), path, 0, field)
