"""What the routes of the web page's chats accept."""

from typing import Any

from zse.sampling.fields import Array, Custom, Field, Fields, Integer, Number, Object, OneOf, String, refused
from zse.server.requests.conversation import DATA_URI, MAX_CALLS
from zse.server.requests.queries import LAST_FIRST

MAX_MESSAGES = 10_000  # of all branches
MAX_TITLE = 200
_COUNT, _TIME, _TEXT, _NAME = Integer(0, 1 << 53), Number(0.0, 1e12), String(), String(256)
_CALL = Object({"id": Field(_NAME), "name": Field(_TEXT), "arguments": Field(_TEXT)})
_USAGE = Object(
    {
        "prompt_tokens": Field(_COUNT),
        "completion_tokens": Field(_COUNT),
        "total_tokens": Field(_COUNT),
        "prompt_tokens_details": Field(Object({"cached_tokens": Field(_COUNT)})),
        "completion_tokens_details": Field(Object({"reasoning_tokens": Field(_COUNT)})),
    }
)
_CITED = Object(
    {
        "number": Field(_COUNT),
        "document": Field(_NAME),
        "name": Field(_NAME),
        "page": Field(_COUNT),
        "headings": Field(Array(_TEXT, 64)),
        "text": Field(_TEXT),
    }
)
_MESSAGE = Object(
    {
        "parent": Field(Integer(-1, MAX_MESSAGES), required=True),
        "shown": Field(Integer(0, MAX_MESSAGES), default=0),
        "role": Field(OneOf(("root", "user", "assistant", "tool")), required=True),
        "content": Field(_TEXT),
        "images": Field(Array(DATA_URI, 32)),
        "reasoning": Field(_TEXT),
        "calls": Field(Array(_CALL, MAX_CALLS)),
        "call_id": Field(_NAME),
        "name": Field(_TEXT),
        "model": Field(String(512)),
        "finish": Field(_NAME),
        "cited": Field(Array(_CITED, 64)),
        "notes": Field(Array(_TEXT, 16)),
        "error": Field(_TEXT),
        "usage": Field(_USAGE),
        "first_ms": Field(_TIME),
        "per_second": Field(_TIME),
    }
)
_MESSAGES = Array(_MESSAGE, MAX_MESSAGES, 1)


def _messages(value: Any, path: str) -> list[dict]:
    """A tree whose root is the first: each other message stands behind its parent."""
    out = _MESSAGES.check(value, path)
    num_children = [0] * len(out)
    for index, message in enumerate(out):
        is_root, parent, here = index == 0, message["parent"], f"{path}[{index}]"
        if is_root != (message["role"] == "root") or not (parent == -1 if is_root else 0 <= parent < index):
            raise refused("invalid_value", f"'{here}.parent' must be an earlier message, and -1 of the root.", here)
        if not is_root:
            num_children[parent] += 1
    for index, (message, count) in enumerate(zip(out, num_children, strict=True)):
        if message["shown"] >= max(1, count):
            here = f"{path}[{index}].shown"
            raise refused("invalid_value", f"'{here}' must be the number of a message behind it.", here)
    return [{name: field for name, field in message.items() if field is not None} for message in out]


CHAT: Fields = {
    "version": Field(_COUNT, "The one that is changed; 0: a new chat.", required=True),
    "title": Field(String(MAX_TITLE), "What lists show (default: as it is)."),
    "messages": Field(
        Custom(_messages, _MESSAGES.schema),
        "A tree: the root, then messages, each with the number of its parent, and `shown`, which of those behind it is "
        "shown (default: as they are).",
    ),
}
LIST: Fields = LAST_FIRST | {"search": Field(String(MAX_TITLE), "What titles hold.", "")}
