"""What an MCP server says of its tools and answers to a call, checked: it is a stranger's."""

from typing import Any, NamedTuple

import msgspec

from zse.errors import RequestError
from zse.server.mcp.session import McpError, words_of
from zse.server.requests.conversation import PARAMETERS
from zse.server.tools.calls import is_name

MAX_TOOLS, MAX_PAGES, MAX_DESCRIPTION = 256, 32, 4096


class McpTool(NamedTuple):
    """name: as the server calls it. schema: of its arguments, an object's."""

    label: str
    name: str
    description: str
    schema: dict


class CallResult(NamedTuple):
    """output: text, of `was_cut` its beginning and a note. is_error: the tool, or the server, failed."""

    output: str
    is_error: bool = False
    was_cut: bool = False


def read_tools(label: str, listed: list[Any]) -> tuple[dict[str, McpTool], list[str]]:
    """Tools by name, and a line for each that is left out. Of two with one name the first counts."""
    found: dict[str, McpTool] = {}
    left: list[str] = []
    for entry in listed:
        name: Any = entry.get("name") if isinstance(entry, dict) else None
        if not is_name(name):
            left.append(f"{words_of(name)[:64]!r} is no name that models can write")
        elif name in found:
            left.append(f"a second tool is called {name}")
        else:
            about = entry.get("description")
            schema = entry.get("inputSchema", {})
            try:
                PARAMETERS.check(schema, "inputSchema")
            except RequestError as error:
                left.append(f"{name}: {error.message}")
                continue
            text = about[:MAX_DESCRIPTION] if isinstance(about, str) else ""
            found[name] = McpTool(label, name, text, {"type": "object", "properties": {}} | schema)
    return found, left


def read_result(result: dict, max_bytes: int) -> CallResult:
    """The text of a result: what is no text is named. Raises McpError."""
    content = result.get("content", [])
    if not isinstance(content, list):
        raise McpError("the result of the call has no content")
    text = "\n".join(_part(part) for part in content[:1024])
    if not content and result.get("structuredContent") is not None:
        text = msgspec.json.encode(result["structuredContent"]).decode()
    return bounded(text, max_bytes, result.get("isError") is True)


def bounded(text: str, max_bytes: int, is_error: bool = False) -> CallResult:
    """A result of at most so many bytes of the text; one that is cut says so behind it."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return CallResult(data.decode(), is_error)
    kept = data[:max_bytes].decode("utf-8", "ignore")
    return CallResult(f"{kept}\n[cut: {max_bytes} of {len(data)} bytes]", is_error, True)


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        raise McpError("the result of the call has a part that is no object")
    kind, resource = part.get("type"), part.get("resource")
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "resource" and isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return resource["text"]
    if kind == "resource_link":
        return words_of(part.get("uri"))
    return f"[left out: {words_of(kind)[:32]} of {words_of(part.get('mimeType', 'an unknown type'))[:64]}]"
