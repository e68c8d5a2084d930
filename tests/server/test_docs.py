"""docs/api.md names every route, field and error code, with the defaults that the code has."""

from pathlib import Path

import pytest

from zse.server.engine_counters import COUNTERS
from zse.server.errors import CODES
from zse.server.measure_schemas import EMBEDDINGS, RERANK, SCORE
from zse.server.routes.table import ROUTES
from zse.server.schemas import CHAT, COMPLETIONS, describe

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_route_is_documented():
    for route in ROUTES:
        assert f"| `{route.method} {route.path}` |" in TEXT


@pytest.mark.parametrize(
    "heading,fields",
    [
        ("## POST /v1/chat/completions", CHAT),
        ("## POST /v1/completions", COMPLETIONS),
        ("## POST /v1/embeddings", EMBEDDINGS),
        ("## POST /v1/rerank", RERANK),
        ("## POST /v1/score", SCORE),
    ],
)
def test_every_field_is_documented(heading, fields):
    section = TEXT.split(heading, 1)[1].split("\n## ", 1)[0]
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
