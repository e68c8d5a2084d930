"""docs/api.md names every route, field and error code, with the defaults that the code has."""

from pathlib import Path

import pytest

from zse.sampling.fields import describe
from zse.server.engine_counters import COUNTERS
from zse.server.errors import CODES
from zse.server.requests import (
    adapters,
    batches,
    chats,
    documents,
    files,
    keys,
    mcp,
    messages,
    models,
    ollama,
    queries,
    responses,
)
from zse.server.requests.completions import CHAT_FIELDS, COMPLETIONS_FIELDS
from zse.server.requests.measures import EMBEDDINGS_FIELDS, RERANK_FIELDS, SCORE_FIELDS
from zse.server.routes.table import ROUTES

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_route_is_documented():
    for route in ROUTES:
        assert f"| `{route.method} {route.path}` | {route.doc} |" in TEXT


@pytest.mark.parametrize(
    "heading,fields",
    [
        ("## POST /v1/chat/completions", CHAT_FIELDS),
        ("## POST /v1/completions", COMPLETIONS_FIELDS),
        ("## POST /v1/embeddings", EMBEDDINGS_FIELDS),
        ("## POST /v1/responses", responses.FIELDS),
        ("## POST /v1/mcp/call", mcp.CALL),
        ("## POST /v1/messages", messages.FIELDS),
        ("## POST /api/chat", ollama.CHAT),
        ("## POST /v1/files", files.UPLOAD),
        ("## POST /v1/batches", batches.CREATE),
        ("## POST /v1/chats/{chat}", chats.CHAT),
        ("## GET /admin/logs", queries.LOGS),
        ("### POST /admin/models\n", models.ADD),
        ("### POST /admin/models/{model}/load", models.LOAD),
        ("### POST /admin/models/{model}/pull", models.PULL),
        ("### POST /admin/models/{model}/unload", models.UNLOAD),
        ("## POST /v1/rag/documents", documents.UPLOAD),
        ("## POST /v1/rag/search", documents.SEARCH),
        ("## POST /v1/rag/ask", documents.ASK),
        ("## POST /v1/rerank", RERANK_FIELDS),
        ("## POST /v1/score", SCORE_FIELDS),
        ("## POST /admin/keys", keys.CREATE),
        ("## POST /admin/keys/usage", keys.USAGE),
        ("## POST /admin/adapters", adapters.LOAD),
        ("### POST /admin/adapters/upload", adapters.UPLOAD),
    ],
)
def test_every_field_is_documented(heading, fields):
    section = TEXT.split(heading, 1)[1].split("\n## ", 1)[0].split("\n### ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {default} | {doc} |" for name, default, doc in describe(fields)]


def test_every_counter_of_the_engine_is_documented():
    rows = [
        line for line in TEXT.split("## Metrics", 1)[1].split("\n## ", 1)[0].splitlines() if line.startswith("| `zse")
    ]
    assert rows == [f"| `zse_engine_{name}` | {kind} | {help} |" for name, (kind, help) in COUNTERS.items()]


def test_every_error_code_is_documented():
    rows = [line for line in TEXT.split("## Errors", 1)[1].split("\n## ", 1)[0].splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{code}` | {status} | {kind} | {'yes' if retry else 'no'} |"
        for code, (status, kind, retry) in CODES.items()
    ]
