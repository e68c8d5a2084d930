"""Tools of the operator's MCP servers, for the web page and programs: their list, and one call."""

import asyncio

from zse.http.exchange import Response
from zse.sampling.fields import Object, shown
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.mcp.session import McpError
from zse.server.requests import queries
from zse.server.requests.mcp import CALL

CALL_PATH = "/v1/mcp/call"


def check_access(request: APIRequest) -> None:
    """Raises APIError: a key that is limited to some routes may use tools where this one is among them."""
    routes = request.access.routes
    if routes is not None and CALL_PATH not in routes:
        raise APIError("insufficient_permissions", "This key may not use tools of MCP servers.")


async def tools(app, request: APIRequest) -> Response:
    """GET /v1/mcp/tools"""
    queries.read(request.query, {})
    servers = [] if app.mcp is None else list(app.mcp.by_label.values())

    async def listed(server) -> list[dict]:
        try:
            found = await server.tools()
        except McpError:
            return []  # its state tells
        return [
            {
                "server_label": tool.label,
                "name": tool.name,
                "description": tool.description,
                "input_schema": tool.schema,
                "needs_approval": not server.may_run(tool.name),
            }
            for tool in found.values()
        ]

    parts = await asyncio.gather(*map(listed, servers))
    states = [{"server_label": one.config.label, "state": one.state, "error": one.error or None} for one in servers]
    return Response.json({"object": "list", "data": sum(parts, []), "servers": states})


async def call(app, request: APIRequest) -> Response:
    """POST /v1/mcp/call"""
    values = Object(CALL).check(request.json(), "")
    label, name = values["server_label"], values["name"]
    server = None if app.mcp is None else app.mcp.by_label.get(label)
    if server is None:
        raise APIError("not_found", f"There is no MCP server '{shown(label)}' here.", "server_label")
    try:
        tool = (await server.tools()).get(name)
        if tool is None:
            raise APIError("not_found", f"The MCP server '{label}' has no tool '{shown(name)}'.", "name")
        result = await app.mcp.call(tool, values["arguments"], request.tenant)
        output, is_error, was_cut = result
    except McpError as error:  # it could not be asked for its tools
        output, is_error, was_cut = str(error), True, False
    request.note = f"{label} {name}"
    told = {"server_label": label, "name": name, "output": output, "is_error": is_error, "was_cut": was_cut}
    return Response.json(told)
