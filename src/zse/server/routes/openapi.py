"""GET /openapi.json: the API as an OpenAPI 3.1 document, made of the route table, the tables of fields and the error
table."""

import re
from functools import cache

import msgspec

from zse import __version__
from zse.http.exchange import Response
from zse.sampling.fields import Object
from zse.server.api_request import APIRequest
from zse.server.errors import ANTHROPIC, CODES, OLLAMA, OPENAI
from zse.server.routes import table

_TEXT = {"type": "string"}
_ERROR: dict = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"], "description": "The JSON path of the field, where there is one."},
                "code": {"enum": [*CODES, None]},
            },
        }
    },
}


_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}} | _ERROR["properties"],
}
_OLLAMA_ERROR = {
    "type": "object",
    "required": ["error", "code"],
    "properties": {"error": _TEXT, "code": _ERROR["properties"]["error"]["properties"]["code"]},
}
_ERRORS = {
    OPENAI: ("Error", _ERROR),
    ANTHROPIC: ("AnthropicError", _ANTHROPIC_ERROR),
    OLLAMA: ("OllamaError", _OLLAMA_ERROR),
}


async def openapi(app, request: APIRequest) -> Response:
    """GET /openapi.json"""
    return Response(200, encoded())


@cache
def encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> dict:
    """The OpenAPI document."""
    paths: dict[str, dict] = {}
    for route in table.ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ZSE",
            "version": __version__,
            "description": "Open-weight language models behind an OpenAI-compatible API.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(_ERRORS.values()),
            "responses": {
                name: {
                    "description": "A refusal or failure; the code says which.",
                    "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
                }
                for name, _ in _ERRORS.values()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: table.Route) -> dict:
    content: dict = {route.media: {"schema": {"type": "object"} if route.media == "application/json" else _TEXT}}
    operation: dict = {
        "summary": route.doc,
        "operationId": re.sub(r"[^a-z0-9]+", "_", f"{route.method} {route.path}".lower()).strip("_"),
        "responses": {
            "200": {"description": route.doc, "content": content},
            "default": {"$ref": f"#/components/responses/{_ERRORS[route.api][0]}"},
        },
    }
    if route.scope != table.PUBLIC:
        # A server without keys asks for none.
        operation["security"] = [{"key": []}, {}]
    names = re.findall(r"\{(\w+)\}", route.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    if route.query:
        fields = table.resolve("requests", route.query)
        parameters += [{"name": name, "in": "query", "schema": field.schema} for name, field in fields.items()]
        if "stream" in fields:
            content["text/event-stream"] = {}
    if parameters:
        operation["parameters"] = parameters
    if route.fields:
        body = route.body
        kinds = {route.body_type: {"schema": Object(body).schema}}
        if route.file:
            kinds["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": kinds}
        if "stream" in body:
            content["application/x-ndjson" if route.api == OLLAMA else "text/event-stream"] = {}
    return operation
