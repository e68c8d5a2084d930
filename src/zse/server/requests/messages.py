"""The fields of Anthropic's Messages API, and the chat request that they mean."""

from typing import Any

import msgspec

from zse.sampling.fields import (
    Array,
    Boolean,
    Custom,
    Field,
    Fields,
    Integer,
    Number,
    Object,
    OneOf,
    String,
    expect,
    refused,
)
from zse.sampling.params import MAX_STOPS
from zse.server.requests.completions import MODEL, Completion, read_chat_of
from zse.server.requests.conversation import MAX_MESSAGES, MAX_TOOLS, NAME, PARAMETERS
from zse.server.requests.image_parts import SOURCE

# What clients write for Anthropic's own service beside blocks and tools: accepted, unused.
_FOREIGN = """cache_control citations caller toolset_name defer_loading eager_input_streaming input_examples allowed_callers
    signature id""".split()
_ID = String(256, empty=False)
_ANY = Custom(lambda value, path: expect(dict, value, path), {"type": "object"})


def _kind(name: str, /, **fields: Field) -> Object:
    return Object({"type": Field(OneOf((name,)), required=True)} | fields, tuple(set(_FOREIGN) - fields.keys()))


_TEXT = _kind("text", text=Field(String(), required=True))


def _by_type(kinds: dict[str, Object], unknown: str) -> Custom:
    """Objects of several kinds, told apart by their type. unknown: what to say of another type."""

    def check(value: Any, path: str) -> dict:
        kind = expect(dict, value, path).get("type")
        if type(kind) is str and kind not in kinds:
            raise refused("unsupported_parameter", f"'{path}.type': {unknown}.", path + ".type")
        known = kinds[kind] if type(kind) is str else next(iter(kinds.values()))  # which refuses what is no text
        return known.check(value, path)

    return Custom(check, {"anyOf": [kind.schema for kind in kinds.values()]})


def _blocks(kinds: dict[str, Object], unknown: str) -> Custom:
    """A text, or blocks → blocks."""
    array = Array(_by_type(kinds, unknown), 4096)

    def check(value: Any, path: str) -> list[dict]:
        return [{"type": "text", "text": value}] if type(value) is str else array.check(value, path)

    return Custom(check, {"anyOf": [{"type": "string"}, array.schema]})


_ONLY_TEXT = "only text is supported here"
_IMAGE = _kind("image", source=Field(SOURCE, required=True))
_CONTENT = {
    "text": _TEXT,
    "image": _IMAGE,
    "thinking": _kind("thinking", thinking=Field(String(), required=True)),
    "redacted_thinking": _kind("redacted_thinking", data=Field(String())),
    "tool_use": _kind(
        "tool_use", id=Field(_ID, required=True), name=Field(NAME, required=True), input=Field(_ANY, required=True)
    ),
    "tool_result": _kind(
        "tool_result",
        tool_use_id=Field(_ID, required=True),
        content=Field(_blocks({"text": _TEXT, "image": _IMAGE}, "only text and images are supported here"), default=[]),
        is_error=Field(Boolean(), default=False),
    ),
}
_MESSAGE = Object(
    {
        "role": Field(OneOf(("user", "assistant", "system")), required=True),
        "content": Field(
            _blocks(_CONTENT, "only text, image, thinking, tool_use and tool_result blocks are supported"),
            required=True,
        ),
    },
    ("id",),
)
_TOOL = Object(
    {
        "type": Field(OneOf(("custom",)), default="custom"),
        "name": Field(NAME, required=True),
        "description": Field(String(16384)),
        "input_schema": Field(PARAMETERS, required=True),
        "strict": Field(Boolean(), default=False),
    },
    (*_FOREIGN,),
)
_CHOICE = Object(
    {
        "type": Field(OneOf(("auto", "any", "tool", "none")), required=True),
        "name": Field(NAME),
        "disable_parallel_tool_use": Field(Boolean(), default=False),
    }
)
_THINKING = Object(
    {
        "type": Field(OneOf(("enabled", "disabled", "adaptive")), required=True),
        "budget_tokens": Field(Integer(1, 1 << 24)),
        "display": Field(None, harmless=(None, "summarized")),
    }
)
_FORMAT = Object(
    {"type": Field(OneOf(("json_schema",)), required=True), "schema": Field(_ANY, required=True)}, ("name", "strict")
)
_OUTPUT = Object({"effort": Field(OneOf(("low", "medium", "high", "xhigh", "max"))), "format": Field(_FORMAT)})
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

COUNTED: Fields = {
    "model": msgspec.structs.replace(MODEL, required=True),
    "messages": Field(Array(_MESSAGE, MAX_MESSAGES, 1), "The conversation, up to 2,048 messages.", required=True),
    "system": Field(_blocks({"text": _TEXT}, _ONLY_TEXT), "What stands before it.", []),
    "tools": Field(Array(_TOOL, MAX_TOOLS), "What the model may call, up to 128; Anthropic's own tools are refused."),
    "tool_choice": Field(_CHOICE, "auto, any, tool (with its name) or none; disable_parallel_tool_use."),
    "thinking": Field(_THINKING, "enabled (with budget_tokens), disabled or adaptive, which leaves it to the model."),
    "output_config": Field(_OUTPUT, "effort, which the chat template sees; format: a JSON schema of the answer."),
    "cache_control": Field(_ANY, "Accepted; prompts are cached as long as there is room."),
    "context_management": Field(_ANY, "Accepted; the conversation is used as it is sent."),
}
FIELDS: Fields = COUNTED | {
    "max_tokens": Field(Integer(1), "Most tokens to generate.", required=True),
    "stream": Field(Boolean(), "Answer as server-sent events.", False),
    "stop_sequences": Field(Array(String(256, empty=False), MAX_STOPS), "Texts that end the answer, up to 16."),
    "temperature": Field(Number(0, 2), "As in chat completions."),
    "top_p": Field(Number(0, 1, above_low=True), "As in chat completions."),
    "top_k": Field(Integer(0), "As in chat completions."),
    "metadata": Field(Object({"user_id": Field(String(512))}), "Accepted, not used."),
    "service_tier": Field(OneOf(("auto", "standard_only")), "There is one tier."),
    "container": Field(None, "Not supported."),
    "mcp_servers": Field(None, "Not supported.", harmless=(None, [])),
}


def read_messages(body: dict) -> Completion:
    """Check the body of POST /v1/messages. Raises RequestError."""
    values = Object(FIELDS).check(body, "")
    chat = _chat(values) | {
        "max_tokens": values["max_tokens"],
        "stream": values["stream"],
        "stop": values["stop_sequences"] or None,
    }
    for name in ("temperature", "top_p", "top_k"):
        if values[name] is not None:
            chat[name] = values[name]
    return read_chat_of(chat, "thinking", "output_config.format", "messages")


def read_counted(body: dict) -> Completion:
    """Check the body of POST /v1/messages/count_tokens. Raises RequestError."""
    return read_chat_of(_chat(Object(COUNTED).check(body, "")), "thinking", "output_config.format", "messages")


def _chat(values: dict) -> dict:
    """The body of a chat request that means the same. Raises RequestError."""
    thinking, output = values["thinking"], values["output_config"] or {}
    variables: dict = {}
    chat = {"model": values["model"], "messages": _conversation(values), "chat_template_kwargs": variables}
    chat["continue_final_message"] = values["messages"][-1]["role"] == "assistant"  # the answer's beginning
    if output.get("effort") is not None:
        variables["reasoning_effort"] = {"xhigh": "high", "max": "high"}.get(output["effort"], output["effort"])
    if thinking is not None and thinking["type"] != "adaptive":
        enabled = variables["enable_thinking"] = thinking["type"] == "enabled"
        if enabled != (thinking["budget_tokens"] is not None):
            path = "thinking.budget_tokens"
            raise refused("invalid_value", f"'{path}' belongs to 'thinking' of the type enabled.", path)
        chat["thinking_budget"] = thinking["budget_tokens"] if enabled else 0
    if output.get("format") is not None:
        schema = {"name": "answer", "schema": output["format"]["schema"], "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if values["tools"]:
        chat["tools"] = [
            {
                "type": "function",
                "function": {name: tool[name] for name in ("name", "description", "strict")}
                | {"parameters": tool["input_schema"]},
            }
            for tool in values["tools"]
        ]
    choice = values["tool_choice"]
    if choice is not None:
        if (choice["type"] == "tool") != (choice["name"] is not None):
            path = "tool_choice.name"
            raise refused("invalid_value", f"'{path}' belongs to 'tool_choice' of the type tool.", path)
        named = {"type": "function", "function": {"name": choice["name"]}}
        chat["tool_choice"] = _CHOICES.get(choice["type"], named)
        chat["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return chat


def _conversation(values: dict) -> list[dict]:
    """The messages as a chat request has them: results of tools are messages, turns of one role in a row are one."""
    out: list[dict] = []
    if values["system"]:
        out.append({"role": "system", "content": _joined(values["system"])})
    for index, message in enumerate(values["messages"]):
        role = message["role"]
        shown: list[
            dict
        ] = []  # images of results, which chat messages of tools cannot have: the user shows them behind all results
        for position, block in enumerate(message["content"]):
            if block["type"] == "tool_result":
                shown += (part for part in block["content"] if part["type"] == "image")
            else:
                _add_all(out, role, shown)
            owner = {"tool_result": "user", "image": "user", "text": role}.get(block["type"], "assistant")
            if owner != role:
                path = f"messages[{index}].content[{position}]"
                raise refused("invalid_value", f"'{path}' belongs to messages of the role {owner}.", path)
            _add(out, role, block)
        _add_all(out, role, shown)
        if not message["content"]:
            _turn(out, role)
    return out


def _joined(blocks: list[dict]) -> str:
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _add_all(out: list[dict], role: str, blocks: list[dict]) -> None:
    """Add the blocks, and leave none of them."""
    while blocks:
        _add(out, role, blocks.pop(0))


def _turn(out: list[dict], role: str) -> dict:
    """The last message, if it is of that role; or a new one."""
    if not out or out[-1]["role"] != role:
        out.append({"role": role, "content": ""})
    return out[-1]


def _add(out: list[dict], role: str, block: dict) -> None:
    kind = block["type"]
    if kind == "tool_result":
        text = _joined(block["content"])
        text = f"Error: {text}" if block["is_error"] else text
        out.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        return
    turn = _turn(out, role)
    if kind == "image" or type(turn["content"]) is list:
        if type(turn["content"]) is str:
            turn["content"] = [{"type": "text", "text": turn["content"]}] if turn["content"] else []
        image = {"type": "image_url", "image_url": block.get("source")}
        turn["content"].append({"type": "text", "text": block["text"]} if kind == "text" else image)
    elif kind == "text":
        turn["content"] += ("\n" if turn["content"] else "") + block["text"]
    elif kind == "thinking":
        turn["reasoning_content"] = turn.get("reasoning_content", "") + block["thinking"]
    elif kind == "tool_use":
        function = {"name": block["name"], "arguments": msgspec.json.encode(block["input"]).decode()}
        turn.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
