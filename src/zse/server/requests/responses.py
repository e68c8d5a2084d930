"""The fields of OpenAI's Responses API, and the chat request that they mean."""

from collections.abc import Mapping
from typing import Any

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
from zse.sampling.params import MAX_LOGPROBS
from zse.server.requests import image_parts, mcp, queries
from zse.server.requests.completions import METADATA, MODEL, USER, Completion, read_chat_of
from zse.server.requests.conversation import (
    DATA_URI,
    DETAIL,
    FILE_ID,
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    NAME,
    PARAMETERS,
)
from zse.server.requests.forms import EFFORTS
from zse.server.tools.calls import load_object

# What items of earlier answers hold that says nothing here.
_FOREIGN = """id status phase annotations logprobs caller namespace encrypted_content summary type allowed_callers defer_loading
    output_schema async async_ created_by name""".split()
_ID = String(256, empty=False)
LOGPROBS = "message.output_text.logprobs"
REFERENCE = "item_reference"


def _object(**fields: Field) -> Object:
    return Object(fields, tuple(set(_FOREIGN) - fields.keys()))


_TEXT_PART = _object(text=Field(String(), required=True))
_IMAGE_PART = _object(image_url=Field(DATA_URI), detail=DETAIL, file_id=FILE_ID)


def _parts(*kinds: str) -> Custom:
    """A text, or parts of these types → the text; parts of which some are images stay a list, as the API has them."""

    def check(value: Any, path: str) -> str | list[dict]:
        if type(value) is str:
            return value
        parts: list[dict] = []
        for index, part in enumerate(expect(list, value, path)):
            here = f"{path}[{index}]"
            kind = expect(dict, part, here).get("type")
            if kind not in kinds:
                message = f"'{here}.type' must be one of: {', '.join(kinds)}."
                raise refused("unsupported_parameter", message, here + ".type")
            if kind == "input_image":
                given = _IMAGE_PART.check(part, here)
                image_parts.image(given["image_url"], given["file_id"], here, f"{here}.image_url")  # one of both
                names = ("image_url", "file_id")
                parts.append({"type": kind} | {name: given[name] for name in names if given[name] is not None})
            else:
                parts.append({"type": "input_text", "text": _TEXT_PART.check(part, here)["text"]})
        if any(part["type"] == "input_image" for part in parts):
            return parts
        return "".join(part["text"] for part in parts)

    return Custom(check, {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})


# By type: what an item of the input holds.
_ITEMS = {
    "message": _object(
        role=Field(OneOf(("user", "assistant", "system", "developer")), required=True),
        content=Field(_parts("input_text", "output_text", "text", "input_image"), required=True),
    ),
    "reasoning": _object(content=Field(_parts("reasoning_text"), default="")),
    "function_call": _object(
        call_id=Field(_ID, required=True), name=Field(NAME, required=True), arguments=Field(String(), required=True)
    ),
    "function_call_output": _object(
        call_id=Field(_ID, required=True),
        output=Field(_parts("input_text", "output_text", "text", "input_image"), required=True),
    ),
    # An item of a stored response, which stands in its place.
    REFERENCE: _object(id=Field(_ID, required=True)),
    **mcp.items(tuple(_FOREIGN)),
}


def _item(value: Any, path: str) -> dict:
    is_named = "id" in expect(dict, value, path) and not value.keys() - {"id", "type"}
    kind = value.get("type") or (REFERENCE if is_named else "message")
    if type(kind) is not str or kind not in _ITEMS:
        message = f"'{path}.type' must be one of: {', '.join(_ITEMS)}."
        raise refused("unsupported_parameter", message, path + ".type")
    return _ITEMS[kind].check(value, path) | {"type": kind}


_INPUT = Array(Custom(_item, {"anyOf": [item.schema for item in _ITEMS.values()]}), MAX_MESSAGES + MAX_CALLS, 1)


def _input(value: Any, path: str) -> list[dict]:
    return [{"type": "message", "role": "user", "content": value}] if type(value) is str else _INPUT.check(value, path)


_FUNCTION = _object(
    type=Field(OneOf(("function",)), required=True),
    name=Field(NAME, required=True),
    description=Field(String(16384)),
    parameters=Field(PARAMETERS, default={"type": "object", "properties": {}}),
    strict=Field(Boolean(), default=False),
)


def _tool(value: Any, path: str) -> dict:
    is_mcp = expect(dict, value, path).get("type") == "mcp"
    return (mcp.TOOL if is_mcp else _FUNCTION).check(value, path)


_TOOL = Custom(_tool, {"anyOf": [_FUNCTION.schema, mcp.TOOL.schema]})
_MODES = OneOf(("none", "auto", "required"))
_NAMED = Object({"type": Field(OneOf(("function",)), required=True), "name": Field(NAME, required=True)})


def _choice(value: Any, path: str) -> str | dict:
    return _NAMED.check(value, path) if type(value) is dict else _MODES.check(value, path)


_ANY = Custom(lambda value, path: value, {})
_FORMAT = Object(
    {
        "type": Field(OneOf(("text", "json_object", "json_schema")), required=True),
        "name": Field(String(64)),
        "description": Field(String(16384)),
        "schema": Field(_ANY),
        "strict": Field(Boolean(), default=False),
    }
)
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")

FIELDS: Fields = {
    "model": MODEL,
    "input": Field(
        Custom(_input, {"anyOf": [{"type": "string"}, _INPUT.schema]}),
        "A text, or items: messages, reasoning, function calls and their outputs.",
        required=True,
    ),
    "instructions": Field(String(), "A system message before the input."),
    "max_output_tokens": Field(Integer(1), "Most tokens to generate, reasoning included."),
    "stream": Field(Boolean(), "Answer as server-sent events.", False),
    "stream_options": Field(Object({"include_obfuscation": Field(None, harmless=(None, False))}), "Nothing to choose."),
    "temperature": Field(Number(0, 2), "As in chat completions."),
    "top_p": Field(Number(0, 1, above_low=True), "As in chat completions."),
    "top_logprobs": Field(Integer(0, MAX_LOGPROBS), f"Alternatives for each token; with {LOGPROBS} in include."),
    "include": Field(
        Array(OneOf(_INCLUDED), len(_INCLUDED)), f"{LOGPROBS}; reasoning.encrypted_content, which there is none of.", []
    ),
    "tools": Field(
        Array(_TOOL, MAX_TOOLS),
        "Functions that the model may call, up to 128, and MCP servers of the operator's; OpenAI's own tools are refused.",
        [],
    ),
    "tool_choice": Field(
        Custom(_choice, {"anyOf": [_MODES.schema, _NAMED.schema]}),
        'auto, none, required or {"type": "function", "name": …}.',
    ),
    "parallel_tool_calls": Field(Boolean(), "false ends the answer behind its first call.", True),
    "max_tool_calls": Field(Integer(1, 1000), "Most calls of MCP servers' tools (else 32)."),
    "text": Field(
        Object({"format": Field(_FORMAT), "verbosity": Field(None, harmless=(None, "medium"))}),
        "format: text, json_object, or json_schema with name, schema and strict.",
        {"format": None},
    ),
    "reasoning": Field(
        Object(
            {
                "effort": Field(OneOf(tuple(EFFORTS))),
                "summary": Field(OneOf(("auto", "concise", "detailed"))),
                "generate_summary": Field(OneOf(("auto", "concise", "detailed"))),
            }
        ),
        "effort: as reasoning_effort of chat completions; the reasoning itself is given, no summary of it.",
        {"effort": None},
    ),
    "previous_response_id": Field(_ID, "A stored response of yours: its conversation comes before the input."),
    "store": Field(Boolean(), "Keep the answer for 30 days; needs a server with a database.", False),
    "conversation": Field(None, "Not supported."),
    "prompt": Field(None, "Not supported."),
    "background": Field(None, "Not supported.", harmless=(None, False)),
    "truncation": Field(None, "Not supported.", harmless=(None, "disabled")),
    "metadata": METADATA,
    "user": USER,
    "safety_identifier": Field(String(512), "As user."),
    "prompt_cache_key": Field(String(512), "Accepted; prompts are matched by content, no key is needed."),
    "prompt_cache_retention": Field(String(64), "Accepted; cached prompts stay as long as there is room."),
    "service_tier": Field(OneOf(("auto", "default")), "There is one tier; the answer says default."),
}
# Of POST /v1/responses/input_tokens.
COUNTED: Fields = {
    name: FIELDS[name]
    for name in (
        *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning"),
        *("previous_response_id", "conversation", "truncation"),
    )
}
_INCLUDE: Fields = {"include[]": Field(FIELDS["include"].kind, "What is in answers anyway.", [])}
STORED, ITEMS = _INCLUDE, queries.PAGE | _INCLUDE  # what may be asked of a stored response, and of its items


def check_responses(body: dict) -> dict:
    """The checked fields of the body of POST /v1/responses. Raises RequestError."""
    return Object(FIELDS).check(body, "")


def check_counted(body: dict) -> dict:
    """The checked fields of the body of POST /v1/responses/input_tokens, and the others as they are left out. Raises
    RequestError."""
    return {name: field.default for name, field in FIELDS.items()} | Object(COUNTED).check(body, "")


def check_items(items: list[dict]) -> list[dict]:
    """Items of a stored response, as those of a request are checked. Raises RequestError: more than one may have."""
    return _INPUT.check(items, "previous_response_id")


def completion_of(values: dict, items: list[dict], names: Mapping[tuple[str, str], str] | None = None) -> Completion:
    """The chat request that the fields mean; items: of the conversation. names: as mcp.as_calls. Raises
    RequestError."""
    chat = {
        "model": values["model"],
        "messages": _conversation(values["instructions"], mcp.as_calls(items, names)),
        "max_tokens": values["max_output_tokens"],
        "stream": values["stream"],
        "service_tier": values["service_tier"],
        "parallel_tool_calls": values["parallel_tool_calls"],
        "reasoning_effort": values["reasoning"]["effort"],
        "logprobs": LOGPROBS in values["include"],
    }
    if values["top_logprobs"] is not None:
        if values["top_logprobs"] and not chat["logprobs"]:
            raise refused("invalid_value", f"'top_logprobs' needs {LOGPROBS} in 'include'.", "top_logprobs")
        chat["top_logprobs"] = values["top_logprobs"]
    chat |= {name: values[name] for name in ("temperature", "top_p") if values[name] is not None}
    form = values["text"]["format"]
    if form is not None:
        chat["response_format"] = _response_format(form)
    if values["tools"]:
        chat["tools"] = [
            {
                "type": "function",
                "function": {name: tool[name] for name in ("name", "description", "parameters", "strict")},
            }
            for tool in values["tools"]
        ]
    choice = values["tool_choice"]
    if choice is not None and (choice != "auto" or values["tools"]):  # which answers to requests without tools say, too
        named = type(choice) is dict
        chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if named else choice
    return read_chat_of(chat, "reasoning.effort", "text.format", "input")


def _response_format(form: dict) -> dict:
    """The same as a chat request has it."""
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    for name in ("name", "schema"):
        if form[name] is None:
            raise refused("missing_required_parameter", f"'text.format.{name}' is required.", f"text.format.{name}")
    schema = {name: form[name] for name in ("name", "description", "schema", "strict")}
    return {"type": "json_schema", "json_schema": schema}


def _conversation(instructions: str | None, items: list[dict]) -> list[dict]:
    """Messages of a chat request: an assistant's reasoning, text and calls in a row are one. Images of calls' outputs, which
    chat messages of tools cannot have, are shown by the user behind all outputs in a row."""
    out: list[dict] = []
    shown: list[dict] = []
    if instructions:
        out.append({"role": "system", "content": instructions})
    for item in items:
        kind, last = item["type"], out[-1] if out and out[-1]["role"] == "assistant" else None
        if shown and kind != "function_call_output":
            is_said = kind == "message" and item["role"] == "user"
            said = _as_list(_chat_content(item["content"])) if is_said else []
            out.append({"role": "user", "content": shown + said})
            shown = []
            if is_said:
                continue
        if kind == "function_call_output":
            parts = _as_list(_chat_content(item["output"]))
            shown += (part for part in parts if part["type"] == "image_url")
            text = "".join(part["text"] for part in parts if part["type"] == "text")
            out.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            if (
                role == "system" and type(item["content"]) is str and out and out[-1]["role"] == role
            ):  # many templates take one
                out[-1]["content"] += "\n\n" + item["content"]
            else:
                out.append({"role": role, "content": _chat_content(item["content"])})
        else:
            if kind == "message" and last is not None and "tool_calls" in last and type(item["content"]) is str:
                # Text behind calls, whose results come next: templates want them behind the calls' message.
                last["content"] += ("\n" if last["content"] else "") + item["content"]
                continue
            if last is None or kind != "function_call" and (last["content"] or "tool_calls" in last):
                last = {"role": "assistant", "content": ""}
                out.append(last)
            if kind == "message":
                last["content"] = _chat_content(item["content"])
            elif kind == "reasoning":
                last["reasoning_content"] = last.get("reasoning_content", "") + item["content"]
            else:
                function = {"name": item["name"], "arguments": _arguments(item["arguments"])}
                last.setdefault("tool_calls", []).append(
                    {"id": item["call_id"], "type": "function", "function": function}
                )
    return [*out, {"role": "user", "content": shown}] if shown else out


def _arguments(text: str) -> str:
    """Of a call that broke off, which an answer's items have as far as it came, those that templates can show: none."""
    try:
        load_object(text)
    except ValueError:
        return "{}"
    return text


def _as_list(content: str | list[dict]) -> list[dict]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _chat_content(content: str | list[dict]) -> str | list[dict]:
    """As a chat request has it."""
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] == "input_text"
        else {"type": "image_url", "image_url": {"url": part.get("image_url"), "file_id": part.get("file_id")}}
        for part in content
    ]


_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}
_PREFIXES |= {
    "mcp_call": "mcp_",
    "mcp_list_tools": "mcpl_",
    "mcp_approval_request": "mcpr_",
    "mcp_approval_response": "mcpa_",
}


def shown_items(items: list[dict], response_id: str) -> list[dict]:
    """Items of the request of a stored response, as the API lists them."""
    out = []
    for index, item in enumerate(items):
        kind = item["type"]
        more: dict = {"id": f"{_PREFIXES[kind]}{response_id.removeprefix('resp_')}_in{index}", "status": "completed"}
        if kind == "message":
            parts = item["content"]
            if item["role"] == "assistant":
                parts = [{"type": "output_text", "text": parts, "annotations": [], "logprobs": []}]
            elif type(parts) is str:
                parts = [{"type": "input_text", "text": parts}]
            more["content"] = parts
        elif kind == "reasoning":
            more |= {"summary": [], "content": [{"type": "reasoning_text", "text": item["content"]}]}
        if item.get("id"):  # MCP's items refer to each other
            more = {"id": item["id"]}
        out.append(item | more)
    return out


def _shown_tool(tool: dict) -> dict:
    names = ("type", "server_label", "allowed_tools", "require_approval") if tool["type"] == "mcp" else _FUNCTION.fields
    return {name: tool[name] for name in names}


def shown(values: dict) -> dict:
    """What an answer repeats of the request."""
    form = values["text"]["format"] or {"type": "text"}
    return {
        "instructions": values["instructions"],
        "max_output_tokens": values["max_output_tokens"],
        "max_tool_calls": values["max_tool_calls"],
        "metadata": values["metadata"] or {},
        "parallel_tool_calls": values["parallel_tool_calls"],
        "reasoning": {"effort": values["reasoning"]["effort"], "summary": None},
        "text": {"format": {name: value for name, value in form.items() if value is not None}},
        "tool_choice": "auto" if values["tool_choice"] is None else values["tool_choice"],
        "tools": [_shown_tool(tool) for tool in values["tools"]],
        "top_logprobs": values["top_logprobs"] or 0,
        "user": values["user"],
        "previous_response_id": values["previous_response_id"],
        "store": values["store"],
        "background": False,
        "truncation": "disabled",
        "service_tier": "default",
    }
