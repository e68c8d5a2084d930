"""The route table. A path may end in {name}, which takes the rest of it, slashes included.

A route names its handler, whose module is imported with its first request: a start waits for those of completions only.
"""

from collections.abc import Awaitable, Callable
from importlib import import_module

import msgspec

import zse.server.routes.completions
import zse.server.routes.info  # noqa: F401
from zse.http.exchange import Response
from zse.server.api_request import APIRequest

# Who may call: anybody; when the server has keys, the holder of one; or of one whose line says admin (--api-key is one).
PUBLIC, USER, ADMIN = "public", "user", "admin"

Handler = Callable[[object, APIRequest], Awaitable[Response | None]]


class Route(msgspec.Struct, frozen=True):
    """function: "MODULE.NAME" in zse.server.routes."""

    method: str
    path: str
    scope: str
    function: str

    @property
    def handler(self) -> Handler:
        module, _, name = self.function.partition(".")
        return getattr(import_module(f"zse.server.routes.{module}"), name)


ROUTES = (
    Route("POST", "/v1/chat/completions", USER, "completions.chat"),
    Route("POST", "/v1/completions", USER, "completions.text"),
    Route("POST", "/v1/embeddings", USER, "embeddings.embeddings"),
    Route("POST", "/v1/rerank", USER, "relevance.rerank"),
    Route("POST", "/v2/rerank", USER, "relevance.rerank"),
    Route("POST", "/v1/score", USER, "relevance.score"),
    Route("GET", "/v1/models", USER, "info.models"),
    Route("GET", "/v1/models/{model}", USER, "info.model"),
    Route("GET", "/health/live", PUBLIC, "info.live"),
    Route("GET", "/health/ready", PUBLIC, "info.ready"),
    Route("GET", "/version", PUBLIC, "info.version"),
    Route("GET", "/metrics", ADMIN, "metrics.metrics"),
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
