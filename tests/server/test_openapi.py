"""GET /openapi.json is a valid OpenAPI document, and what it says of bodies is what the server does."""

import pytest
from harness import chat_body
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from test_errors import CHAT_ONLY, COMMON, TEXT_ONLY

from zse.server.requests import adapters, keys, messages, models, ollama, responses
from zse.server.requests.completions import CHAT_FIELDS, COMPLETIONS_FIELDS
from zse.server.requests.measures import EMBEDDINGS_FIELDS, RERANK_FIELDS, SCORE_FIELDS
from zse.server.routes.table import ROUTES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FIELDS = {
    CHAT: CHAT_FIELDS,
    TEXT: COMPLETIONS_FIELDS,
    "/v1/embeddings": EMBEDDINGS_FIELDS,
    "/v1/responses": responses.FIELDS,
    "/v1/messages": messages.FIELDS,
    "/v1/messages/count_tokens": messages.COUNTED,
    "/api/chat": ollama.CHAT,
    "/api/generate": ollama.GENERATE,
    "/api/embed": ollama.EMBED,
    "/admin/models": models.ADD,
    "/admin/models/{model}/load": models.LOAD,
    "/admin/models/{model}/unload": models.UNLOAD,
    "/admin/models/{model}/pull": models.PULL,
    "/api/pull": ollama.PULL,
    "/v1/rerank": RERANK_FIELDS,
    "/v1/score": SCORE_FIELDS,
    "/admin/keys": keys.CREATE,
    "/admin/keys/update": keys.UPDATE,
    "/admin/keys/usage": keys.USAGE,
    "/admin/audit": keys.AUDIT,
    "/admin/adapters": adapters.LOAD,
    "/admin/adapters/unload": adapters.UNLOAD,
}


@pytest.fixture(scope="module")
def document(server):
    reply = server.get("/openapi.json")
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    return reply.json


def schema_of(document, path):
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_the_document_is_valid(document):
    OpenAPIV31SpecValidator(document).validate()
    assert document["openapi"] == "3.1.0"


def test_every_route_is_in_it(document):
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert found == {(route.method, route.path) for route in ROUTES}
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        assert ("security" in operation) is (route.scope != "public")
        assert ("requestBody" in operation) is bool(route.fields)


@pytest.mark.parametrize("path", FIELDS)
def test_its_bodies_are_the_tables(document, path):
    assert schema_of(document, path)["properties"].keys() == FIELDS[path].keys()
    for name, field in FIELDS[path].items():
        shown = schema_of(document, path)["properties"][name]
        assert shown.get("description", "") == field.doc
        assert (name in schema_of(document, path).get("required", ())) is field.required


def test_no_schema_is_empty_where_a_kind_is_known():
    for fields in FIELDS.values():
        for name, field in fields.items():
            assert field.kind is None or set(field.schema) - {"description"}, name


# A schema says which values a field takes, not which fields go together.
REFUSED = [
    (path, *case[:2])
    for path, cases in ((CHAT, CHAT_ONLY), (TEXT, TEXT_ONLY))
    for case in COMMON + cases
    if case[1] in ("invalid_type", "out_of_range", "unknown_parameter") and len(case[0]) == 1
]
RELATED = ("best_of", "max_tokens", "tools", "messages", "structured_outputs")


@pytest.mark.parametrize("path,change,code", REFUSED)
def test_the_schema_refuses_types_and_ranges_that_the_server_refuses(document, path, change, code):
    base = chat_body("hi") if path == CHAT else {"model": "fake", "prompt": "hi"}
    refused = not Draft202012Validator(schema_of(document, path)).is_valid(base | change)
    assert refused or next(iter(change)) in RELATED


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_the_server_takes_the_schema_takes(server, document, path):
    values = [None, True, 0, 1, -1, 0.5, "a", [], [1], ["a"], {}, {"a": 1}]
    validator = Draft202012Validator(schema_of(document, path))
    base = chat_body("hi") if path == CHAT else {"model": "fake", "prompt": "hi"}
    for name in (name for name, field in FIELDS[path].items() if field.kind is not None):
        for value in values:
            if server.post(path, base | {name: value}).status == 200:
                assert validator.is_valid(base | {name: value}), (name, value)
