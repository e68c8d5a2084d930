"""JSON request bodies, stricter than JSON parsers are: no duplicate keys, no depth above 64, no integer beyond 64
bits, no NaN or Infinity, valid UTF-8. Only C-speed passes over the bytes.
"""

import re

import msgspec

from zse.http.exchange import HTTPError

MAX_DEPTH = 64
MAX_STRINGS = 200_000
MAX_CONTAINERS = 50_000  # the API's largest request (2,048 messages of many parts) has fewer; each costs Python time
_LONG_NUMBER = re.compile(rb"-?\d{19,}(?![\d.eE])")
_DEPTH_STEP = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"{}[]"))
_DIGITS_TO_ZERO = bytes(ord("0") if ord("0") <= byte <= ord("9") else ord(" ") for byte in range(256))

_decoder = msgspec.json.Decoder()


def _refuse(reason: str) -> HTTPError:
    return HTTPError("invalid_json", f"The request body is not valid JSON: {reason}.")


def _count_members(value: object) -> int:
    """Object members below `value`, by containers only (depth is bounded before this runs)."""
    if type(value) is dict:
        return len(value) + sum(_count_members(item) for item in value.values() if type(item) in (dict, list))
    return sum(_count_members(item) for item in value if type(item) in (dict, list)) if type(value) is list else 0


def _without_strings(data: bytes) -> bytes:
    """Valid JSON without its string literals: numbers and structure. Escapes go first, so every quote is a border."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if data.count(b'"') > 2 * MAX_STRINGS:
        raise _refuse(f"it holds more than {MAX_STRINGS} strings")
    return b"".join(data.split(b'"')[::2])


def _check_depth(bare: bytes) -> None:
    depth = 0
    for byte in bare.translate(None, _NOT_STRUCTURE):
        depth += _DEPTH_STEP[byte]
        if depth > MAX_DEPTH:
            raise _refuse(f"it is nested deeper than {MAX_DEPTH} levels")


def _check_integers(bare: bytes) -> None:
    for match in _LONG_NUMBER.finditer(bare):
        if match.start() and bare[match.start() - 1] in b".eE+0123456789":  # the fraction of a float
            continue
        digits = match.group().lstrip(b"-").lstrip(b"0")  # compared as text: int() refuses thousands of digits
        if len(digits) > 19 or len(digits) == 19 and digits > b"9223372036854775808":
            raise _refuse("an integer is beyond 2^63")


def parse(data: bytes) -> dict:
    """The object in `data`. Raises HTTPError invalid_json, or invalid_type when it is JSON but no object."""
    if not data.strip():
        raise _refuse("it is empty")
    try:
        data.decode("utf-8")
        value = _decoder.decode(data)
    except UnicodeDecodeError as error:
        raise _refuse(f"invalid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _refuse(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except msgspec.DecodeError as error:
        raise _refuse(str(error).removeprefix("JSON is malformed: ").split(" - at ")[0].rstrip(".")) from None
    bare = _without_strings(data)
    opened = bare.count(b"{") + bare.count(b"[")
    if opened > MAX_CONTAINERS:
        raise _refuse(f"it holds more than {MAX_CONTAINERS} objects and arrays")
    if opened > MAX_DEPTH:
        _check_depth(bare)
    if b"0" * 19 in bare.translate(_DIGITS_TO_ZERO):
        _check_integers(bare)
    if bare.count(b":") != _count_members(value):
        raise _refuse("a key occurs twice in one object")
    if type(value) is not dict:
        raise HTTPError("invalid_type", "The request body must be a JSON object.")
    return value
