"""The messages of a chat request: what they may hold, and what the chat template gets of them."""

from zse.server.errors import APIError
from zse.server.fields import Field, array, one_of, read_fields, string, wrong_type
from zse.server.tools.fields import tool_calls

MAX_MESSAGES = 2048


def _content(value, path) -> str:
    """Text, or an array of text parts, which are joined."""
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(path, "a string or an array of parts", value)
    texts = []
    for index, part in enumerate(value):
        here = f"{path}[{index}]"
        if type(part) is not dict:
            raise wrong_type(here, "an object", part)
        if part.get("type") in ("image_url", "input_audio", "file", "refusal"):
            raise APIError("unsupported_parameter", f"'{here}.type': only text parts are supported.", here + ".type")
        texts.append(read_fields(_TEXT_PART, part, here + ".")["text"])
    return "".join(texts)


_TEXT_PART = {"type": Field(one_of("text"), "", required=True), "text": Field(string(), "", required=True)}
_MESSAGE = {
    "role": Field(one_of("system", "developer", "user", "assistant", "tool"), "", required=True),
    "content": Field(_content, ""),
    "name": Field(string(64), ""),
    "tool_calls": Field(tool_calls, ""),
    "tool_call_id": Field(string(256, empty=False), ""),
    "reasoning_content": Field(string(), ""),
    "reasoning": Field(string(), ""),
    # What clients send back of an answer they received.
    "refusal": Field(None, ""),
    "audio": Field(None, ""),
    "annotations": Field(None, "", harmless=(None, [])),
    "function_call": Field(None, ""),
}
_ONLY = {"tool_calls": "assistant", "reasoning_content": "assistant", "reasoning": "assistant", "tool_call_id": "tool"}


def _message(value, path) -> dict:
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    if value.get("role") == "function":
        raise APIError("unsupported_parameter", f"'{path}.role': function is not supported, use tool.", path + ".role")
    message = read_fields(_MESSAGE, value, path + ".")
    role = "system" if message["role"] == "developer" else message["role"]
    for field, owner in _ONLY.items():
        if message[field] and role != owner:
            raise APIError(
                "invalid_value", f"'{path}.{field}' belongs to messages of the role {owner}.", f"{path}.{field}"
            )
    for field in ("content", "tool_call_id") if role == "tool" else ("content",) if role != "assistant" else ():
        if message[field] is None:
            raise APIError("missing_required_parameter", f"'{path}.{field}' is required.", f"{path}.{field}")
    out = {"role": role, "content": message["content"] or ""}
    for field in ("name", "tool_calls", "tool_call_id"):
        if message[field]:
            out[field] = message[field]
    reasoning = message["reasoning_content"] or message["reasoning"]
    if reasoning:
        out["reasoning_content"] = reasoning
    return out


def messages(value, path) -> list[dict]:
    """Messages for the template. A tool's result gets the name of the function, which some templates write."""
    out = array(_message, MAX_MESSAGES, 1)(value, path)
    names = {}
    for message in out:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return out
