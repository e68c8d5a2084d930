"""The route table. A path may hold one {name}, which takes what stands there, slashes included.

A route names its handler, whose module is imported with its first request: a start waits for those of completions only.
"""

from functools import cache, cached_property
from importlib import import_module
from typing import Any

import msgspec

import zse.server.routes.completions
import zse.server.routes.info  # noqa: F401
from zse.sampling.fields import Fields
from zse.server.errors import ANTHROPIC, OLLAMA, OPENAI

# Who may call: anybody; when the server has keys, the holder of one; or of one whose line says admin (--api-key is
# one).
PUBLIC, USER, ADMIN = "public", "user", "admin"


class Route(msgspec.Struct, frozen=True, dict=True):
    """function: "MODULE.NAME" in zse.server.routes, a coroutine function of the App and the APIRequest. doc: what it
    answers, in docs/api.md and the OpenAPI document. fields: "MODULE.NAME" in zse.server.requests, the table of what a
    body may hold; "": the route takes none. api: whose way of writing errors it has, of zse.server.errors. verb: its
    method; "": POST with a body, GET without. What changes something takes a body or is no POST: a browser asks before
    it lets another site's page send those. media: the type of an answer that is not streamed. query: as `fields`, of
    what may stand behind a "?".
    upload: `fields` are those of a form with files (multipart/form-data) of at most so many bytes, which the handler
    reads while it arrives (zse.server.uploads); 0: of JSON. file: with `upload`: JSON is taken too, and what is neither
    that nor a form is the file itself; what else is asked then stands in the query. queued: a model answers, so that there must be room in the
    queue."""

    path: str
    scope: str
    function: str
    doc: str
    fields: str = ""
    api: str = OPENAI
    media: str = "application/json"
    verb: str = ""
    query: str = ""
    upload: int = 0
    file: bool = False
    queued: bool = True

    @cached_property
    def method(self) -> str:
        return self.verb or ("POST" if self.fields else "GET")

    @cached_property
    def body_type(self) -> str:
        """The media type of bodies that hold `fields`."""
        return "multipart/form-data" if self.upload and not self.file else "application/json"

    @cached_property
    def is_queued(self) -> bool:
        """Whether a request of it takes a place in the queue."""
        return self.queued and bool(self.fields) and self.scope == USER and not self.upload

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
_ADAPTER = "adapters.UPLOAD"
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
    Route(
        "/v1/rag/documents",
        USER,
        "documents.add",
        "a document is there, in its passages; JSON, the file itself or a form with it",
        "documents.UPLOAD",
        query="documents.OPTIONS",
        upload=256 << 20,
        file=True,
        queued=False,
    ),
    Route("/v1/rag/documents", USER, "documents.listed", "your documents", query="documents.LISTED"),
    Route("/v1/rag/documents/{document}", USER, "documents.retrieve", "a document, and how far it is"),
    Route("/v1/rag/documents/{document}", USER, "documents.delete", "it is gone", verb="DELETE"),
    Route("/v1/rag/search", USER, "documents.search", "passages of your documents", "documents.SEARCH"),
    Route("/v1/rag/ask", USER, "documents.ask", "an answer from your documents, which it cites", "documents.ASK"),
    Route("/v1/responses", USER, "responses.responses", "an answer of items", "responses.FIELDS"),
    Route(
        "/v1/responses/input_tokens",
        USER,
        "responses.input_tokens",
        "the tokens of such a request's prompt",
        "responses.COUNTED",
    ),
    Route("/v1/responses/{response}", USER, "responses.retrieve", "a stored response", query="responses.STORED"),
    Route("/v1/responses/{response}", USER, "responses.delete", "it is gone", verb="DELETE"),
    Route(
        "/v1/responses/{response}/input_items",
        USER,
        "responses.input_items",
        "the items that it answered",
        query="responses.ITEMS",
    ),
    Route("/v1/responses/{response}/cancel", USER, "responses.cancel", "refused: all of them are over", verb="POST"),
    Route("/v1/files", USER, "files.create", "keeps a file", "files.UPLOAD", upload=(512 << 20) + (64 << 10)),
    Route("/v1/files", USER, "files.listed", "the files", query="files.LIST"),
    Route("/v1/files/{file}", USER, "files.retrieve", "what is known of a file"),
    Route("/v1/files/{file}/content", USER, "files.content", "its content", media="application/octet-stream"),
    Route("/v1/files/{file}", USER, "files.delete", "it is gone", verb="DELETE"),
    Route("/v1/batches", USER, "batches.create", "runs the requests of a file", "batches.CREATE", queued=False),
    Route("/v1/batches", USER, "batches.listed", "the batches, the last first", query="queries.LAST_FIRST"),
    Route("/v1/batches/{batch}", USER, "batches.retrieve", "how far a batch is"),
    Route("/v1/batches/{batch}/cancel", USER, "batches.cancel", "ends a batch", verb="POST"),
    Route("/v1/sessions", USER, "sessions.listed", "the sessions, the last used first", query="queries.LAST_FIRST"),
    Route("/v1/sessions/{session}", USER, "sessions.retrieve", "a session with its conversation"),
    Route("/v1/sessions/{session}", USER, "sessions.delete", "it is gone", verb="DELETE"),
    Route("/v1/chats", USER, "chats.listed", "the web page's chats, the last changed first", query="chats.LIST"),
    Route("/v1/chats/{chat}", USER, "chats.retrieve", "a chat with its messages"),
    Route("/v1/chats/{chat}", USER, "chats.change", "makes or changes it, where nobody did so before", "chats.CHAT"),
    Route("/v1/chats/{chat}", USER, "chats.delete", "it is gone", verb="DELETE"),
    Route("/v1/mcp/tools", USER, "mcp.tools", "the tools of the operator's MCP servers"),
    Route("/v1/mcp/call", USER, "mcp.call", "what one of them answers to a call", "mcp.CALL"),
    Route(
        "/v1/messages", USER, "messages.messages", "an answer, for Anthropic's clients", "messages.FIELDS", ANTHROPIC
    ),
    Route(
        "/v1/messages/count_tokens",
        USER,
        "messages.count_tokens",
        "the tokens of such a request's prompt",
        "messages.COUNTED",
        ANTHROPIC,
    ),
    Route("/api/chat", USER, "ollama.chat", "an answer, for Ollama's clients", "ollama.CHAT", OLLAMA),
    Route("/api/generate", USER, "ollama.generate", "an answer to a prompt", "ollama.GENERATE", OLLAMA),
    Route("/api/embed", USER, "ollama.embed", "vectors of texts", "ollama.EMBED", OLLAMA),
    Route("/api/embeddings", USER, "ollama.embeddings", "a text's vector, the older form", "ollama.EMBEDDINGS", OLLAMA),
    Route("/api/show", USER, "ollama.show", "what is known of a model", "ollama.SHOW", OLLAMA),
    Route("/api/tags", USER, "ollama.tags", "the models that are served", api=OLLAMA),
    Route("/api/ps", USER, "ollama.running", "those that are loaded", api=OLLAMA),
    Route("/api/pull", ADMIN, "ollama_store.pull", "fetches a model and serves it", "ollama.PULL", OLLAMA),
    Route(
        "/api/delete",
        ADMIN,
        "ollama_store.delete",
        "deletes a model from the store",
        "ollama.DELETE",
        OLLAMA,
        verb="DELETE",
    ),
    Route("/api/version", PUBLIC, "ollama.version", "the version", api=OLLAMA),
    Route("/v1/models", USER, "info.models", "the models that are served, each with its `state`"),
    Route("/v1/models/{model}", USER, "info.model", "one model"),
    Route(
        "/admin/models", ADMIN, "models.listed", "models that are served, with state and progress; those of the store"
    ),
    Route("/admin/models", ADMIN, "models.add", "serves one more model of the store", "models.ADD"),
    Route(
        "/admin/models/{model}",
        ADMIN,
        "models.remove",
        "serves a model no more; requests that run end first",
        verb="DELETE",
    ),
    Route("/admin/models/{model}/load", ADMIN, "models.load", "loads a model now", "models.LOAD"),
    Route(
        "/admin/models/{model}/pull",
        ADMIN,
        "models.pull",
        "fetches a model into the store, as `zse pull`",
        "models.PULL",
    ),
    Route("/admin/models/{model}/unload", ADMIN, "models.unload", "ends a model's engine", "models.UNLOAD"),
    Route("/tokenize", USER, "tokenize.tokenize", "the token ids of a text or conversation, as vLLM has it", _TOKENIZE),
    Route("/detokenize", USER, "tokenize.detokenize", "the text of token ids", "tokenize.DETOKENIZE_FIELDS"),
    Route("/health", PUBLIC, "info.ready", "as /health/ready"),
    Route("/health/live", PUBLIC, "info.live", "200 while the server process answers"),
    Route("/health/ready", PUBLIC, "info.ready", _READY),
    Route("/version", PUBLIC, "info.version", "the version"),
    Route("/admin/keys", ADMIN, "keys.listed", "the keys of the database, without their text"),
    Route("/admin/keys", ADMIN, "keys.create", "a new key, whose text is in no other answer", "keys.CREATE"),
    Route("/admin/keys/update", ADMIN, "keys.update", "a key with other settings", "keys.UPDATE"),
    Route("/admin/keys/rotate", ADMIN, "keys.rotate", "a key with a new text; the old one ends", "keys.WHICH"),
    Route("/admin/keys/revoke", ADMIN, "keys.revoke", "a key that ends now", "keys.WHICH"),
    Route("/admin/keys/usage", ADMIN, "keys.used", "what keys used: tokens, times, costs", "keys.USAGE"),
    Route("/admin/audit", ADMIN, "keys.audit", "who changed which key", "keys.AUDIT"),
    Route("/admin/adapters", ADMIN, "adapters.listed", "the LoRA adapters of the models"),
    Route("/admin/adapters", ADMIN, "adapters.load", "one more, which requests may name", "adapters.LOAD"),
    Route("/admin/adapters/upload", ADMIN, "adapters.upload", "one more, sent as a form", _ADAPTER, upload=4 << 30),
    Route("/admin/adapters/{adapter}", ADMIN, "adapters.delete", "deletes an uploaded one", verb="DELETE"),
    Route("/admin/adapters/unload", ADMIN, "adapters.unload", "one less", "adapters.UNLOAD"),
    Route("/admin/logs", ADMIN, "logs.recent", "the newest records of the server's log", query="queries.LOGS"),
    Route("/metrics", ADMIN, "metrics.metrics", _METRICS, media="text/plain"),
    Route("/openapi.json", PUBLIC, "openapi.openapi", "this API as an OpenAPI 3.1 document"),
    Route("/", PUBLIC, "web_page.index", "the web page", media="text/html"),
    Route("/page/{file}", PUBLIC, "web_page.file", "its scripts and styles", media="text/javascript"),
)

# Whose bodies may have images.
WITH_IMAGES = """/v1/chat/completions /v1/responses /v1/responses/input_tokens /v1/messages /v1/messages/count_tokens /api/chat
    /api/generate /tokenize /v1/chats/{chat}""".split()
# Routes by path and method; paths with a name as (before it, the name, behind it), those with something behind it first.
BY_PATH: dict[str, dict[str, Route]] = {}
for _route in ROUTES:
    BY_PATH.setdefault(_route.path, {})[_route.method] = _route
WITH_NAME = sorted(
    (tuple(path.replace("}", "{").split("{")) for path in BY_PATH if "{" in path), key=lambda parts: -len(parts[2])
)
