"""What the routes that administer models accept."""

import math
import re
from typing import Any

from zse.sampling.fields import Boolean, Custom, Field, Fields, Object, String, refused, wrong_type

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")


def _seconds(value: Any, path: str) -> float:
    if type(value) in (int, float):
        seconds = float(value)
    elif type(value) is str:
        text = value.strip().lstrip("+-")
        parts = _PART.findall(text)
        if not parts or "".join(map("".join, parts)) != text or len(text) > 64:
            raise refused("invalid_value", f'\'{path}\' must be seconds or a duration such as "5m" or "1h30m".', path)
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
        seconds = -seconds if value.strip().startswith("-") else seconds
    else:
        raise wrong_type(path, "a number of seconds or a duration", value)
    return math.inf if seconds < 0 else seconds


KEEP_ALIVE = Field(
    Custom(_seconds, {"type": ["number", "string"]}),
    "How long the model stays loaded without requests, until it is unloaded: seconds or a duration (5m, 1h30m), 0: not at all, below "
    "0: for ever; instead of --idle-timeout. An admin's key may say so, where there are keys; of others it is not used.",
)
_STREAM = Field(Boolean(), "Answer as server-sent events, with the progress.", False)
ADD: Fields = {
    "model": Field(String(256, empty=False), "A name from the store (`zse ls`).", required=True),
    "name": Field(String(256, empty=False), "What requests call it; left out: the same."),
}
LOAD: Fields = {"keep_alive": KEEP_ALIVE, "stream": _STREAM}
PULL: Fields = {
    "serve": Field(Boolean(), "Serve the model when it is there.", True),
    "force": Field(Boolean(), "Fetch it again even if it is there.", False),
    "stream": _STREAM,
}
UNLOAD: Fields = {"force": Field(Boolean(), "End the requests that use it.", False)}


def read(fields: Fields, body: dict) -> dict:
    """The checked fields. Raises RequestError."""
    return Object(fields).check(body, "")
