"""The fields of a chat request that hold its conversation: messages, tools and the calls that messages remember."""

from typing import Any

import msgspec

from zse.sampling.fields import (
    Array,
    Boolean,
    Custom,
    Field,
    Fields,
    Matching,
    Object,
    OneOf,
    String,
    expect,
    refused,
    shown,
    too_long,
    wrong_type,
)
from zse.server.requests import image_parts
from zse.server.tools.calls import is_name, load_object

MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_CALLS = 128
MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
# Keys that clients leave in messages, parts, tools and calls that they got from other servers, or mean for them:
# accepted, unused. litellm, LangChain, the Vercel AI SDK, OpenRouter and Anthropic's SDK write these. Unknown keys of
# the request itself are refused.
FOREIGN_KEYS = tuple(
    """provider_specific_fields cache_control reasoning_details thinking_blocks id timestamp created_at status metadata
    additional_kwargs response_metadata usage_metadata providerOptions provider_options experimental_providerMetadata
    citations signature phase""".split()
)
_TYPES = OneOf(("string", "number", "integer", "boolean", "array", "object", "null"))
_REQUIRED = Array(String(), 4096)
# Keys of a schema below which schemas stand: by name, in a list, or one.
_PARTS = (
    dict.fromkeys(("properties", "$defs", "definitions", "patternProperties"), dict)
    | dict.fromkeys(("anyOf", "oneOf", "allOf"), list)
    | dict.fromkeys(("items", "additionalProperties", "not"), object)
)


class ToolChoice(msgspec.Struct, frozen=True):
    """mode: none, auto, required, or named: the function `name`. is_given: by the request."""

    mode: str = "auto"
    name: str = ""
    is_given: bool = False

    def __str__(self) -> str:
        return self.mode if self.is_given else ""


# -- tools


def _name(value: Any, path: str) -> str:
    String(64, empty=False).check(value, path)
    if not is_name(value):
        raise refused("invalid_value", f"'{path}' must be letters, digits, '_', '-' and '.'.", path)
    return value


def _parameters(value: Any, path: str) -> dict:
    """A JSON schema of an object: its shape is checked where templates and parsers read it."""
    expect(dict, value, path)
    if len(msgspec.json.encode(value)) > MAX_SCHEMA_BYTES:
        raise too_long(path, f"at most {MAX_SCHEMA_BYTES} bytes")
    if value.get("type", "object") != "object":
        raise refused("invalid_value", f"'{path}.type' must be object.", path + ".type")
    _check_schema(value, path, 0)
    return value


def _check_schema(value: Any, path: str, depth: int) -> None:
    if type(value) is bool and depth:
        return
    if type(value) is not dict:
        raise wrong_type(path, "a JSON schema (an object)", value)
    if depth > MAX_SCHEMA_DEPTH:
        raise too_long(path, f"at most {MAX_SCHEMA_DEPTH} levels")
    kinds = value.get("type")
    if kinds is not None:
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            _TYPES.check(kind, path + ".type")
    for key in filter(_PARTS.__contains__, value):
        here, below = f"{path}.{key}", value[key]
        if _PARTS[key] is dict:
            parts = [(f"{here}.{shown(name)}", part) for name, part in expect(dict, below, here).items()]
        elif _PARTS[key] is list:
            parts = [(f"{here}[{index}]", part) for index, part in enumerate(expect(list, below, here))]
        else:  # items may be a list of schemas, which is not looked into
            parts = [] if key == "items" and type(below) is list else [(here, below)]
        for where, part in parts:
            _check_schema(part, where, depth + 1)
    if "required" in value:
        _REQUIRED.check(value["required"], path + ".required")
    if "enum" in value:
        expect(list, value["enum"], path + ".enum")


PARAMETERS = Custom(_parameters, {"type": "object"})
NAME = Custom(_name, {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"})
_TOOL = Object(
    {
        "type": Field(OneOf(("function",)), required=True),
        "function": Field(
            Object(
                {
                    "name": Field(NAME, required=True),
                    "description": Field(String(16384)),
                    "parameters": Field(PARAMETERS),
                    "strict": Field(Boolean(), default=False),
                },
                FOREIGN_KEYS,
            ),
            required=True,
        ),
    },
    FOREIGN_KEYS,
)
_TOOLS = Array(_TOOL, MAX_TOOLS)


def _tools(value: Any, path: str) -> list[dict]:
    """The tools as templates expect them: description only where one was given, parameters always."""
    out: list[dict] = []
    for index, tool in enumerate(_TOOLS.check(value, path)):
        given = tool["function"]
        if any(given["name"] == other["function"]["name"] for other in out):
            path = f"{path}[{index}].function.name"
            raise refused("invalid_value", f"'{path}' is the name of an earlier tool.", path)
        function = {"name": given["name"]}
        if given["description"] is not None:
            function["description"] = given["description"]
        function["parameters"] = given["parameters"] or {"type": "object", "properties": {}}
        if given["strict"]:
            function["strict"] = True
        out.append({"type": "function", "function": function})
    return out


_MODES = OneOf(("none", "auto", "required"))
_NAMED = Object(
    {
        "type": Field(OneOf(("function",)), required=True),
        "function": Field(Object({"name": Field(NAME, required=True)}), required=True),
    }
)


def _tool_choice(value: Any, path: str) -> ToolChoice:
    if type(value) is dict:
        return ToolChoice("named", _NAMED.check(value, path)["function"]["name"], True)
    return ToolChoice(_MODES.check(value, path), is_given=True)


# -- messages


def _arguments(value: Any, path: str) -> dict:
    """A JSON object as text → the object, as templates expect it."""
    try:
        return load_object(String().check(value, path))
    except ValueError:
        raise refused("invalid_value", f"'{path}' must be a JSON object as a string.", path) from None


_CALLED: Fields = {
    "name": Field(NAME, required=True),
    "arguments": Field(Custom(_arguments, {"type": "string"}), required=True),
}
_CALLS = Array(
    Object(
        {
            "id": Field(String(256, empty=False), required=True),
            "type": Field(OneOf(("function",)), default="function"),
            "index": Field(Custom(lambda value, path: value, {})),
            "function": Field(Object(_CALLED, FOREIGN_KEYS), required=True),
        },
        FOREIGN_KEYS,
    ),
    MAX_CALLS,
)


def _tool_calls(value: Any, path: str) -> list[dict]:
    """Calls that an assistant message of the history holds."""
    return [{"id": call["id"], "type": "function", "function": call["function"]} for call in _CALLS.check(value, path)]


_TEXT_PART = Object(
    {"type": Field(OneOf(("text",)), required=True), "text": Field(String(), required=True)}, FOREIGN_KEYS
)


# What checks one comes with the first of them: a start does without.
DATA_URI = Custom(
    lambda value, path: image_parts.data_uri(value, path),
    {"type": "string", "pattern": "^data:image/(png|jpeg|jpg|webp);base64,[A-Za-z0-9+/]+={0,2}$"},
)
DETAIL = Field(OneOf(("auto", "low", "high", "original")))  # the model's own size is used
FILE_ID = Field(Matching("file-[0-9a-f]{1,64}", "the id of a file of yours"))
_OBJECT = Object({"url": Field(DATA_URI), "file_id": FILE_ID, "detail": DETAIL}, FOREIGN_KEYS)
_ADDRESS = Custom(  # the address alone, as LangChain writes it and vLLM takes it, or an object
    lambda value, path: _OBJECT.check({"url": value} if type(value) is str else value, path),
    {"anyOf": [_OBJECT.schema, DATA_URI.schema]},
)
_IMAGE_PART = Object(
    {"type": Field(OneOf(("image_url",)), required=True), "image_url": Field(_ADDRESS, required=True)}, FOREIGN_KEYS
)


def has_images(messages: list[dict]) -> bool:
    """Whether the content of a checked message is a list of parts, of which some are images."""
    return any(type(message["content"]) is list for message in messages)


def _content(value: Any, path: str) -> str | list[dict]:
    """Text, or an array of parts: text, which is joined, and images, with which the parts stay a list (image_parts.py)."""
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(path, "a string or an array of parts", value)
    parts: list[dict] = []
    for index, part in enumerate(value):
        here = f"{path}[{index}]"
        kind = expect(dict, part, here).get("type")
        if type(kind) is str and kind not in ("text", "image_url"):
            message = f"'{here}.type': only parts of text and images are supported."
            raise refused("unsupported_parameter", message, here + ".type")
        if kind == "image_url":
            address = _IMAGE_PART.check(part, here)["image_url"]
            parts.append(image_parts.image(address["url"], address["file_id"], here, f"{here}.image_url.url"))
        elif text := _TEXT_PART.check(part, here)["text"]:
            if parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += text
            else:
                parts.append({"type": "text", "text": text})
    if any(part["type"] == "image" for part in parts):
        return parts
    return parts[0]["text"] if parts else ""


_PART = {"anyOf": [_TEXT_PART.schema, _IMAGE_PART.schema]}
CONTENT = Custom(_content, {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "maxItems": 1 << 16}]})
_MESSAGE = Object(
    {
        "role": Field(OneOf(("system", "developer", "user", "assistant", "tool")), required=True),
        "content": Field(CONTENT),
        "name": Field(String(64)),
        "tool_calls": Field(Custom(_tool_calls, _CALLS.schema)),
        "tool_call_id": Field(String(256, empty=False)),
        "reasoning_content": Field(String()),
        "reasoning": Field(String()),
        # What clients send back of an answer they received.
        "refusal": Field(None),
        "audio": Field(None),
        "annotations": Field(None, harmless=(None, [])),
        "function_call": Field(None),
    },
    FOREIGN_KEYS,
)
_ONLY = {"tool_calls": "assistant", "reasoning_content": "assistant", "reasoning": "assistant", "tool_call_id": "tool"}
_NEEDED = {"assistant": (), "tool": ("content", "tool_call_id")}


def _message(value: Any, path: str) -> dict:
    if type(value) is dict and value.get("role") == "function":
        raise refused("unsupported_parameter", f"'{path}.role': function is not supported, use tool.", path + ".role")
    message = _MESSAGE.check(value, path)
    role = "system" if message["role"] == "developer" else message["role"]
    for field, owner in _ONLY.items():
        if message[field] and role != owner:
            here = f"{path}.{field}"
            raise refused("invalid_value", f"'{here}' belongs to messages of the role {owner}.", here)
    for field in _NEEDED.get(role, ("content",)):
        if message[field] is None:
            raise refused("missing_required_parameter", f"'{path}.{field}' is required.", f"{path}.{field}")
    if role != "user" and type(message["content"]) is list:
        where = next(part["path"] for part in message["content"] if part["type"] == "image")
        raise refused("unsupported_parameter", f"'{where}': images belong to messages of the role user.", where)
    out = {"role": role, "content": message["content"] or ""}
    for field in ("name", "tool_calls", "tool_call_id"):
        if message[field]:
            out[field] = message[field]
    reasoning = message["reasoning_content"] or message["reasoning"]
    if reasoning:
        out["reasoning_content"] = reasoning
    return out


_MESSAGES = Array(Custom(_message, _MESSAGE.schema), MAX_MESSAGES, 1)


def name_results(out: list[dict]) -> list[dict]:
    """Messages, of which each result of a tool has the name of the function that was called: some templates write it."""
    names = {}
    for message in out:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return out


CONVERSATION: Fields = {
    "messages": Field(
        Custom(lambda value, path: name_results(_MESSAGES.check(value, path)), _MESSAGES.schema),
        "The conversation: role (system, developer, user, assistant, tool) and content (text, or parts of text and images), up to 2,048.",
        required=True,
    ),
    "tools": Field(Custom(_tools, _TOOLS.schema), "Functions that the model may call, up to 128; see Tools."),
    "tool_choice": Field(
        Custom(_tool_choice, {"anyOf": [_MODES.schema, _NAMED.schema]}),
        'auto (with tools the default), none, required, or {"type": "function", "function": {"name": …}}.',
        ToolChoice(),
    ),
    "parallel_tool_calls": Field(Boolean(), "false ends the answer behind its first call.", True),
}
