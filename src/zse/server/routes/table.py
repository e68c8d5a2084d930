"""The route table. A path may end in {name}, which takes the rest of it, slashes included.

A route names its handler, whose module is imported with its first request: a start waits for those of completions only.
"""

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

import msgspec

import zse.server.routes.completions
import zse.server.routes.info  # noqa: F401
from zse.sampling.fields import Fields, shown

# Who may call: anybody; when the server has keys, the holder of one; or of one whose line says admin (--api-key is one).
PUBLIC, USER, ADMIN = "public", "user", "admin"


class Route(msgspec.Struct, frozen=True):
    """function: "MODULE.NAME" in zse.server.routes, a coroutine function of the App and the APIRequest. doc: what it answers,
    in docs/api.md and the OpenAPI document. fields: "MODULE.NAME" in zse.server.requests, the table of what a body may hold;
    "": the route takes none, and its method is GET."""

    path: str
    scope: str
    function: str
    doc: str
    fields: str = ""

    @property
    def method(self) -> str:
        return "POST" if self.fields else "GET"

    @property
    def body(self) -> Fields:
        """The table that `fields` names."""
        return resolve("requests", self.fields)


@cache
def resolve(package: str, name: str) -> Any:
    """What MODULE.NAME is in zse.server.PACKAGE."""
    module, _, attribute = name.partition(".")
    return getattr(import_module(f"zse.server.{package}.{module}"), attribute)


_CHAT, _COMPLETIONS, _EMBEDDINGS = (
    "completions.CHAT_FIELDS",
    "completions.COMPLETIONS_FIELDS",
    "measures.EMBEDDINGS_FIELDS",
)
_TOKENIZE = "tokenize.TOKENIZE_FIELDS"
_RERANK, _SCORE = "measures.RERANK_FIELDS", "measures.SCORE_FIELDS"
_READY = (
    "200 when a request sent now would be answered, else 503; this machine and an admin's key see why, and the activity"
)
_METRICS = "counts and times in Prometheus' text format; needs an admin's key, if there are keys"

ROUTES = (
    Route("/v1/chat/completions", USER, "completions.chat", "an answer to a conversation", _CHAT),
    Route("/v1/completions", USER, "completions.text", "a continuation of text or token ids", _COMPLETIONS),
    Route("/v1/embeddings", USER, "embeddings.embeddings", "vectors of texts", _EMBEDDINGS),
    Route("/v1/rerank", USER, "relevance.rerank", "documents in the order in which they fit a query", _RERANK),
    Route("/v2/rerank", USER, "relevance.rerank", "the same, for Cohere's clients", _RERANK),
    Route("/v1/score", USER, "relevance.score", "how well texts fit each other", _SCORE),
    Route("/v1/models", USER, "info.models", "the models that are served, each with its `state`"),
    Route("/v1/models/{model}", USER, "info.model", "one model"),
    Route("/tokenize", USER, "tokenize.tokenize", "the token ids of a text or conversation, as vLLM has it", _TOKENIZE),
    Route("/detokenize", USER, "tokenize.detokenize", "the text of token ids", "tokenize.DETOKENIZE_FIELDS"),
    Route("/health", PUBLIC, "info.ready", "as /health/ready"),
    Route("/health/live", PUBLIC, "info.live", "200 while the server process answers"),
    Route("/health/ready", PUBLIC, "info.ready", _READY),
    Route("/version", PUBLIC, "info.version", "the version"),
    Route("/metrics", ADMIN, "metrics.metrics", _METRICS),
    Route("/openapi.json", PUBLIC, "openapi.openapi", "this API as an OpenAPI 3.1 document"),
)

_BY_PATH: dict[str, dict[str, Route]] = {}
for _route in ROUTES:
    _BY_PATH.setdefault(_route.path, {})[_route.method] = _route
_WITH_NAME = [path.partition("{") for path in _BY_PATH if "{" in path]


def find(path: str) -> tuple[dict[str, Route], dict[str, str]] | None:
    """Routes by method and path parameters for a percent-decoded path; None when it is unknown. A slash at the end and a /v1 that
    is left out, or there twice, are forgiven: clients differ in what they take for the base URL."""
    bare = path.rstrip("/")
    while bare.startswith("/v1/"):
        bare = bare[3:]
    for known in (bare, "/v1" + bare):
        for prefix, brace, name in _WITH_NAME:
            if known.startswith(prefix) and len(known) > len(prefix):
                return _BY_PATH[prefix + brace + name], {name.rstrip("}"): known[len(prefix) :]}
        if known in _BY_PATH:
            return _BY_PATH[known], {}
    return None


def unknown(path: str) -> str:
    """What to say of a path that is unknown: those that there are, the one that it resembles first."""
    near = get_close_matches("/v1" + path.removeprefix("/v1"), _BY_PATH, 1, 0.8)
    listed = ", ".join(f"{route.method} {route.path}" for route in ROUTES)
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"There is no route {shown(path)}. {meant}There are: {listed}. The base URL ends in /v1."


def allowed(methods: dict[str, Route]) -> str:
    """The Allow header."""
    return ", ".join(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))
