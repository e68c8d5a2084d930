"""What requests say of MCP servers: the tools and items of the Responses API, and the body of POST /v1/mcp/call."""

import hashlib
from collections.abc import Mapping
from typing import Any

from zse.sampling.fields import (
    Array,
    Boolean,
    Custom,
    Field,
    Fields,
    Object,
    OneOf,
    String,
    expect,
    refused,
    wrong_type,
)
from zse.server.tools.calls import load_object

_LABEL, _TOOL_NAME, _ID = String(64, empty=False), String(64, empty=False), String(256, empty=False)
_ANY = Custom(lambda value, path: value, {})
ALWAYS, NEVER = "always", "never"

CALL: Fields = {
    "server_label": Field(_LABEL, "The server, as the operator's file calls it.", required=True),
    "name": Field(_TOOL_NAME, "Of the tool.", required=True),
    "arguments": Field(Custom(lambda value, path: expect(dict, value, path), {"type": "object"}), "An object.", {}),
}


def _names(value: Any, path: str) -> list[str]:
    """Names of tools: a list, or {"tool_names": a list}."""
    if type(value) is dict:
        given = Object({"tool_names": Field(Array(_TOOL_NAME, 256), default=[]), "read_only": Field(None)})
        return given.check(value, path)["tool_names"]
    return Array(_TOOL_NAME, 256).check(value, path)


_APPROVAL = Object({name: Field(Custom(_names, {})) for name in (ALWAYS, NEVER)})


def _approval(value: Any, path: str) -> str | dict:
    """always, never, or which tools."""
    if type(value) not in (str, dict):
        raise wrong_type(path, "always, never or an object", value)
    return OneOf((ALWAYS, NEVER)).check(value, path) if type(value) is str else _APPROVAL.check(value, path)


def _own_servers(value: Any, path: str) -> None:
    if value is not None:
        message = f"'{path}': this server uses the MCP servers of its operator only; name one in server_label."
        raise refused("unsupported_parameter", message, path)


TOOL = Object(
    {
        "type": Field(OneOf(("mcp",)), required=True),
        "server_label": Field(_LABEL, required=True),
        "allowed_tools": Field(Custom(_names, {})),
        "require_approval": Field(Custom(_approval, {})),
        "server_description": Field(String(16384)),
        **{
            name: Field(Custom(_own_servers, {}))
            for name in ("server_url", "connector_id", "authorization", "headers", "tunnel_id")
        },
    },
    ("allowed_callers", "defer_loading"),
)


def items(more: tuple[str, ...]) -> dict[str, Object]:
    """By type: what items of MCP hold. more: other keys that may stand in them."""
    more = tuple({*more} - {"id"})
    call = {
        "id": Field(_ID, required=True),
        "server_label": Field(_LABEL, required=True),
        "name": Field(_TOOL_NAME, required=True),
        "arguments": Field(String(), required=True),
    }
    return {
        "mcp_list_tools": Object(
            {
                "id": Field(_ID),
                "server_label": Field(_LABEL, required=True),
                "tools": Field(Custom(lambda value, path: expect(list, value, path), {}), required=True),
                "error": Field(_ANY),
            },
            more,
        ),
        "mcp_call": Object(
            call | {"output": Field(String()), "error": Field(_ANY), "approval_request_id": Field(_ID)}, more
        ),
        "mcp_approval_request": Object(call, more),
        "mcp_approval_response": Object(
            {
                "id": Field(_ID),
                "approval_request_id": Field(_ID, required=True),
                "approve": Field(Boolean(), required=True),
                "reason": Field(String(16384)),
            },
            more,
        ),
    }


def call_id(id: str) -> str:
    """The id of the call that an item is: nine letters, which every chat template takes."""
    return hashlib.sha256(id.encode()).hexdigest()[:9]


def _object_text(arguments: str) -> str:
    """What a template can take: models write other things, too."""
    try:
        load_object(arguments)
    except ValueError:
        return "{}"
    return arguments


def error_text(error: Any) -> str:
    """What the model reads of an error, ours or as another server wrote it."""
    if type(error) is str:
        return error
    if type(error) is not dict:
        return ""
    parts = error.get("content")
    texts = (
        [part.get("text") for part in parts if type(part) is dict] if type(parts) is list else [error.get("message")]
    )
    return "\n".join(text for text in texts if type(text) is str)


def as_calls(listed: list[dict], names: Mapping[tuple[str, str], str] | None = None) -> list[dict]:
    """The items with those of MCP as function calls and their outputs, as the model sees them. A call that waits for
    approval, or was approved and has not run, is left out. names: of functions, by (server, tool); others are as the tool's."""
    answers = {one["approval_request_id"]: one for one in listed if one["type"] == "mcp_approval_response"}
    out = []
    for one in listed:
        kind, output = one["type"], None
        if kind == "mcp_call":
            output = one["output"] if one["output"] is not None else error_text(one["error"]) or "it failed"
        elif kind == "mcp_approval_request" and one["id"] in answers and not answers[one["id"]]["approve"]:
            reason = answers[one["id"]]["reason"]
            output = "The user refused this call" + (f": {reason}" if reason else ".")
        if output is not None:
            name = (names or {}).get((one["server_label"], one["name"]), one["name"])
            called = {"call_id": call_id(one["id"]), "name": name, "arguments": _object_text(one["arguments"])}
            out.append({"type": "function_call"} | called)
            out.append({"type": "function_call_output", "call_id": called["call_id"], "output": output})
        elif not kind.startswith("mcp_"):
            out.append(one)
    return out


def approved(listed: list[dict]) -> list[dict]:
    """Approval requests among the items that were granted and whose calls have not run. Raises RequestError: an answer
    to none."""
    asked = {one["id"]: one for one in listed if one["type"] == "mcp_approval_request"}
    run = {one["approval_request_id"] for one in listed if one["type"] == "mcp_call"}
    found: dict[str, dict] = {}
    for one in listed:
        if one["type"] == "mcp_approval_response":
            id = one["approval_request_id"]
            if id not in asked:
                message = (
                    "An mcp_approval_response answers no mcp_approval_request of the input or of previous_response_id."
                )
                raise refused("invalid_value", message, "input")
            if one["approve"] and id not in run:
                found[id] = asked[id]
    return list(found.values())
