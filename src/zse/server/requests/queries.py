"""What stands behind the "?" of a request, and pages of lists."""

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from zse.sampling.fields import Array, Boolean, Field, Fields, Integer, Object, OneOf, String, of_text, refused, shown

PAGE: Fields = {
    "limit": Field(Integer(1, 100), "Most that are listed.", 20),
    "order": Field(OneOf(("asc", "desc")), "asc: the oldest first.", "desc"),
    "after": Field(String(256, empty=False), "The id behind which to go on."),
}
LOGS: Fields = {
    "level": Field(OneOf(("debug", "info", "warning", "error")), "Records of this level and above.", "info"),
    "since": Field(Integer(0, 1 << 40), "Seconds since 1970, from which on.", 0),
    "after": Field(Integer(0, 1 << 50), "An id, behind which.", 0),
    "search": Field(String(200), "What the message holds, in whatever case, such as a request's id.", ""),
    "limit": Field(Integer(1, 1000), "Most records: the newest.", 200),
    "stream": Field(Boolean(), "true: as server-sent events, and those that come later too.", False),
}
LAST_FIRST: Fields = {"limit": PAGE["limit"], "after": PAGE["after"]}


def read(query: str, fields: Fields) -> dict[str, Any]:
    """The checked fields, with the defaults of those that are left out. Raises RequestError."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=32, errors="strict")
    except (ValueError, UnicodeDecodeError):
        raise refused("invalid_value", "The query is not of names and values in UTF-8, at most 32.", "") from None
    values: dict[str, Any] = {}
    for name, value in pairs:
        kind = fields[name].kind if name in fields else None
        if isinstance(kind, Array):
            values.setdefault(name, []).append(value)
            continue
        if name in values:
            raise refused("invalid_value", f"'{shown(name)}' stands in the query twice.", shown(name))
        values[name] = of_text(value, kind)
    return Object(fields).check(values, "")


def listed(rows: list | None, limit: int, show: Callable[[Any], dict] = lambda row: row) -> dict:
    """What a list answers of `rows` in their order, each as show() has it, of which there are more where they are more than
    `limit`. Raises RequestError for None: `after` is none of them."""
    if rows is None:
        raise refused("invalid_value", "'after' is no id of this list.", "after")
    shown_rows = [show(row) for row in rows[:limit]]
    return {
        "object": "list",
        "data": shown_rows,
        "first_id": shown_rows[0]["id"] if shown_rows else None,
        "last_id": shown_rows[-1]["id"] if shown_rows else None,
        "has_more": len(rows) > limit,
    }


def page(rows: list[dict], query: dict[str, Any]) -> dict:
    """What a list answers of `rows`, the oldest first. Raises RequestError: `after` is none of them."""
    rows = rows if query["order"] == "asc" else rows[::-1]
    if query["after"] is not None:
        places = [place for place, row in enumerate(rows) if row["id"] == query["after"]]
        return listed(rows[places[0] + 1 :] if places else None, query["limit"])
    return listed(rows, query["limit"])
