"""What the admin's routes accept."""

from typing import Any

from zse.sampling.fields import Array, Boolean, Field, Fields, Integer, Matching, Number, Object, OneOf, String
from zse.server.keys import MAX_QUOTA, MAX_WEIGHT, NAME, USER_ROUTES

NAMED = Matching(NAME.pattern, "1 to 64 letters, digits, '.', '_' and '-'")
_TIME, _PRICE = Number(0.0, 1e11), Number(0.0, 1e9)
_LIMIT = Integer(0, MAX_QUOTA)
SETTINGS: Fields = {
    "tenant": Field(NAMED, "Who owns what its requests leave; the name, where a new key has none."),
    "admin": Field(Boolean(), "It may read the figures of all and change keys."),
    "models": Field(Array(String(256, empty=False), 256), "Names that it may use."),
    "routes": Field(Array(OneOf(tuple(USER_ROUTES)), len(USER_ROUTES)), "Paths that it may use."),
    "weight": Field(Number(0.0, MAX_WEIGHT, above_low=True), "Of its share of queue and engine."),
    "rpm": Field(_LIMIT, "Requests a minute; 0: any number."),
    "tpm": Field(_LIMIT, "Tokens a minute, of prompts and answers; 0: any number."),
    "concurrency": Field(_LIMIT, "Answers at once; 0: any number."),
    "expires": Field(_TIME, "Seconds since 1970, from which on it is no key."),
    "input_price": Field(_PRICE, "Of a million tokens of prompts."),
    "cached_price": Field(_PRICE, "Of those in the prefix cache."),
    "output_price": Field(_PRICE, "Of a million tokens of answers."),
}
_ENDLESS = ("models", "routes", "weight", "expires", "cached_price")  # of which None is no limit
CREATE: Fields = {"name": Field(NAMED, "Of the key; no other has it or had it.", required=True)} | SETTINGS
WHICH: Fields = {"name": Field(String(64, empty=False), "Of the key, or its prefix.", required=True)}
UPDATE: Fields = WHICH | SETTINGS | {"clear": Field(Array(OneOf(_ENDLESS), len(_ENDLESS)), "Settings to take away.")}
USAGE: Fields = {
    "name": Field(NAMED, "Of a key; else all."),
    "since": Field(_TIME, "Seconds since 1970, from whose hour on."),
    "until": Field(_TIME, "Before whose hour."),
    "by": Field(OneOf(("all", "day", "hour")), "A sum for each, or over all of them.", "all"),
}
AUDIT: Fields = {
    "last": Field(Integer(1, 1000), "So many changes, the latest first.", 100),
    "before": Field(Integer(1, 1 << 62), "An id, of which only earlier ones are wanted."),
}


def read_settings(body: dict, fields: Fields) -> tuple[str, dict[str, Any]]:
    """The key's name, and the settings that the body gives. Raises RequestError."""
    values = Object(fields).check(body, "")
    given: dict[str, Any] = {name: values[name] for name in SETTINGS if name in values and body.get(name) is not None}
    return values["name"], dict.fromkeys(values.get("clear") or ()) | given


def read(body: dict, fields: Fields) -> dict[str, Any]:
    """The checked fields. Raises RequestError."""
    return Object(fields).check(body, "")
