"""The route table. A path may end in {name}, which takes the rest of it, slashes included.

A route names its handler, whose module is imported with its first request: a start waits for those of completions only.
"""

from collections.abc import Awaitable, Callable
from functools import cache
from importlib import import_module
from typing import Any

import msgspec

import zse.server.routes.completions
import zse.server.routes.info  # noqa: F401
from zse.http.exchange import Response
from zse.sampling.fields import Fields
from zse.server.api_request import APIRequest

# Who may call: anybody; when the server has keys, the holder of one; or of one whose line says admin (--api-key is one).
PUBLIC, USER, ADMIN = "public", "user", "admin"

Handler = Callable[[object, APIRequest], Awaitable[Response | None]]


class Route(msgspec.Struct, frozen=True):
    """function: "MODULE.NAME" in zse.server.routes. doc: what it answers, in docs/api.md and the OpenAPI document. fields:
    "MODULE.NAME" in zse.server.requests, the table of what a body may hold; "": the route takes none."""

    method: str
    path: str
    scope: str
    function: str
    doc: str
    fields: str = ""

    @property
    def body(self) -> Fields:
        """The table that `fields` names."""
        return found("requests", self.fields)


@cache
def found(package: str, name: str) -> Any:
    """What MODULE.NAME is in zse.server.PACKAGE."""
    module, _, attribute = name.partition(".")
    return getattr(import_module(f"zse.server.{package}.{module}"), attribute)


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        USER,
        "completions.chat",
        "an answer to a conversation",
        "completions.CHAT_FIELDS",
    ),
    Route(
        "POST",
        "/v1/completions",
        USER,
        "completions.text",
        "a continuation of text or token ids",
        "completions.COMPLETIONS_FIELDS",
    ),
    Route("POST", "/v1/embeddings", USER, "embeddings.embeddings", "vectors of texts", "measures.EMBEDDINGS_FIELDS"),
    Route(
        "POST",
        "/v1/rerank",
        USER,
        "relevance.rerank",
        "documents in the order in which they fit a query",
        "measures.RERANK_FIELDS",
    ),
    Route("POST", "/v2/rerank", USER, "relevance.rerank", "the same, for Cohere's clients", "measures.RERANK_FIELDS"),
    Route("POST", "/v1/score", USER, "relevance.score", "how well texts fit each other", "measures.SCORE_FIELDS"),
    Route("GET", "/v1/models", USER, "info.models", "the models that are served, each with its `state`"),
    Route("GET", "/v1/models/{model}", USER, "info.model", "one model"),
    Route("GET", "/health/live", PUBLIC, "info.live", "200 while the server process answers"),
    Route(
        "GET",
        "/health/ready",
        PUBLIC,
        "info.ready",
        "200 when a request sent now would be answered, else 503 with the reason",
    ),
    Route("GET", "/version", PUBLIC, "info.version", "the version"),
    Route(
        "GET",
        "/metrics",
        ADMIN,
        "metrics.metrics",
        "counts and times in Prometheus' text format; needs an admin's key, if there are keys",
    ),
    Route("GET", "/openapi.json", PUBLIC, "openapi.openapi", "this API as an OpenAPI 3.1 document"),
)

_exact: dict[str, dict[str, Route]] = {}
_prefixed: list[tuple[str, str, dict[str, Route]]] = []
for _route in ROUTES:
    _prefix, _brace, _name = _route.path.partition("{")
    if _brace:
        _methods = next((methods for prefix, _, methods in _prefixed if prefix == _prefix), None)
        if _methods is None:
            _methods = {}
            _prefixed.append((_prefix, _name.rstrip("}"), _methods))
        _methods[_route.method] = _route
    else:
        _exact.setdefault(_route.path, {})[_route.method] = _route


def find(path: str) -> tuple[dict[str, Route], dict[str, str]] | None:
    """Routes by method and path parameters for a percent-decoded path; None when it is unknown."""
    methods = _exact.get(path)
    if methods is not None:
        return methods, {}
    for prefix, name, methods in _prefixed:
        if path.startswith(prefix) and len(path) > len(prefix):
            return methods, {name: path[len(prefix) :]}
    return None


def allowed(methods: dict[str, Route]) -> str:
    """The Allow header."""
    return ", ".join(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))
