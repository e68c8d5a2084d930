"""The error contract: every field at its bounds, strict JSON, authentication, and what no error may hold."""

import base64
import json
import re
import time

import pytest
from harness import chat_body, request

from zse.server import errors
from zse.server.auth import WrongKeys
from zse.server.routes.table import ROUTES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LEAK = re.compile(
    r"0x[0-9a-f]{6,}|Traceback|/(usr|home|root|tmp|work)/|\.py\b|<[a-z_.]+ object|\bdict\b|\bNoneType\b|"
    r"\bsite-packages\b|msgspec|asyncio"
)


def check(reply, status: int, code: str, param: str | None = "any") -> None:
    """An answer of the contract."""
    assert reply.status == status, reply
    if type(reply.json["error"]) is str:  # Ollama's
        assert reply.json["code"] == code and not LEAK.search(reply.json["error"]), reply.json
        return
    about = {"error"} if reply.json.get("type") != "error" else {"error", "type"}  # Anthropic's
    assert set(reply.json) == about and set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["code"] == code, reply.error
    assert param == "any" or reply.error["param"] == param, reply.error
    expected, kind, retry = errors.CODES[code]
    assert reply.status == expected
    assert reply.error["type"] == kind if len(about) == 1 else "request-id" in reply.headers
    assert ("x-should-retry" in reply.headers) is (not retry)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    assert not LEAK.search(reply.error["message"]), reply.error


JSON_ERRORS = {
    "empty": b"",
    "space": b"  ",
    "half": b'{"model":',
    "trailing": b"{} {}",
    "comma": b'{"a":1,}',
    "single quotes": b"{'a':1}",
    "duplicate": b'{"model":"fake","model":"fake"}',
    "duplicate below": b'{"messages":[{"role":"user","role":"user"}]}',
    "escaped duplicate": b'{"mod\\u0065l":"a","model":"b"}',
    "deep": b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
    "very deep": b"[" * 100_000,
    "nan": b'{"temperature":NaN}',
    "infinity": b'{"temperature":Infinity}',
    "-infinity": b'{"temperature":-Infinity}',
    "big": b'{"seed":9223372036854775809}',
    "-big": b'{"seed":-9223372036854775809}',
    "huge": b'{"seed":' + b"9" * 5000 + b"}",
    "1e999": b'{"temperature":1e999}',
    "utf-8": b'{"model":"\xff"}',
    "surrogate": b'{"model":"\\ud800"}',
    "overlong": b'{"model":"\xc0\xaf"}',
    "control": b'{"model":"\n"}',
    "leading zero": b'{"seed":01}',
    "utf-16": '{"a":1}'.encode("utf-16"),
    "containers": b'{"a":[' + b"{}," * 60_000 + b"{}]}",
    "strings": b'{"a":[' + b'"",' * 210_000 + b'""]}',
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", JSON_ERRORS)
def test_strict_json(server, path, name):
    check(server.post(path, JSON_ERRORS[name]), 400, "invalid_json", None)


@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"a"', b"true"])
def test_body_must_be_an_object(server, body):
    check(server.post(CHAT, body), 400, "invalid_type", None)


COMMON = [
    ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"xml": "a"}}, "unknown_parameter", "structured_outputs.xml"),
    ({"structured_outputs": {"grammar": "a" * 70_000}}, "schema_too_complex", "structured_outputs.grammar"),
    ({"structured_outputs": []}, "invalid_type", "structured_outputs"),
    ({"guided_guess": {}}, "unknown_parameter", "guided_guess"),
    ({"model": 1}, "invalid_type", "model"),
    ({"model": ""}, "invalid_value", "model"),
    ({"model": "a" * 300}, "array_above_max_length", "model"),
    ({"temperature": -0.1}, "out_of_range", "temperature"),
    ({"temperature": 2.01}, "out_of_range", "temperature"),
    ({"temperature": "1"}, "invalid_type", "temperature"),
    ({"temperature": True}, "invalid_type", "temperature"),
    ({"top_p": 0}, "out_of_range", "top_p"),
    ({"top_p": 1.1}, "out_of_range", "top_p"),
    ({"top_k": -2}, "out_of_range", "top_k"),
    ({"top_k": 1.5}, "invalid_type", "top_k"),
    ({"min_p": -1}, "out_of_range", "min_p"),
    ({"min_p": 1.1}, "out_of_range", "min_p"),
    ({"top_n_sigma": -0.1}, "out_of_range", "top_n_sigma"),
    ({"min_tokens": -1}, "out_of_range", "min_tokens"),
    ({"min_tokens": 1e308}, "out_of_range", "min_tokens"),
    ({"min_tokens": 1 << 63}, "out_of_range", "min_tokens"),
    ({"bad_words": "a"}, "invalid_type", "bad_words"),
    ({"bad_words": ["a", " "]}, "invalid_value", "bad_words"),
    ({"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
    ({"allowed_token_ids": [1 << 20]}, "invalid_token_id", "allowed_token_ids"),
    ({"repetition_penalty": 0}, "out_of_range", "repetition_penalty"),
    ({"presence_penalty": 2.1}, "out_of_range", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "out_of_range", "frequency_penalty"),
    ({"n": 0}, "out_of_range", "n"),
    ({"n": 17}, "out_of_range", "n"),
    ({"n": "1"}, "invalid_type", "n"),
    ({"max_tokens": 0}, "out_of_range", "max_tokens"),
    ({"max_tokens": -1}, "out_of_range", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
    ({"seed": 1.5}, "invalid_type", "seed"),
    ({"stop": ["a"] * 17}, "array_above_max_length", "stop"),
    ({"stop": "a" * 257}, "array_above_max_length", "stop"),
    ({"stop": ["a", "a" * 257]}, "array_above_max_length", "stop[1]"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": [1]}, "invalid_type", "stop[0]"),
    ({"stop": {}}, "invalid_type", "stop"),
    ({"stop_token_ids": [260]}, "invalid_token_id", "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "invalid_token_id", "stop_token_ids[0]"),
    ({"stop_token_ids": "1"}, "invalid_type", "stop_token_ids"),
    ({"logit_bias": {"260": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"x": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "out_of_range", "logit_bias.1"),
    ({"logit_bias": []}, "invalid_type", "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "array_above_max_length", "logit_bias"),
    ({"ignore_eos": 1}, "invalid_type", "ignore_eos"),
    ({"stream": "true"}, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "invalid_type", "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"x": 1}}, "unknown_parameter", "stream_options.x"),
    ({"user": 1}, "invalid_type", "user"),
    ({"frobnicate": 1}, "unknown_parameter", "frobnicate"),
    ({"": 1}, "unknown_parameter", ""),
    ({"a\n": 1}, "unknown_parameter", "(unprintable)"),
    ({"model": "other"}, "model_not_found", "model"),
]
CHAT_ONLY = [
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": {}}, "invalid_type", "messages"),
    ({"messages": ["a"]}, "invalid_type", "messages[0]"),
    ({"messages": [{}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "king", "content": ""}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "function", "content": ""}]}, "unsupported_parameter", "messages[0].role"),
    ({"messages": [{"role": "tool", "content": ""}]}, "missing_required_parameter", "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "tool", "tool_call_id": "a", "content": ""}]}, "unsupported_parameter", "messages[0].role"),
    ({"messages": [{"role": "user", "content": "", "tool_call_id": "a"}]}, "invalid_value", "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "", "reasoning": "a"}]}, "invalid_value", "messages[0].reasoning"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "missing_required_parameter",
        "messages[0].tool_calls[0].function",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[]"}}]}
            ]
        },
        "invalid_value",
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
        "invalid_value",
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
            ]
        },
        "unsupported_parameter",
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "user", "content": 1}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "", "x": 1}]}, "unknown_parameter", "messages[0].x"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "invalid_type", "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "missing_required_parameter",
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "missing_required_parameter",
        "messages[0].content[0].image_url.url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]},
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": ""}] * 2049}, "array_above_max_length", "messages"),
    ({"logprobs": 1}, "invalid_type", "logprobs"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "out_of_range", "top_logprobs"),
    ({"max_completion_tokens": 0}, "out_of_range", "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_completion_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
    ({"tools": {}}, "invalid_type", "tools"),
    ({"tools": [1]}, "invalid_type", "tools[0]"),
    ({"tools": [{"type": "retrieval"}]}, "invalid_value", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value", "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a" * 65}}]},
        "array_above_max_length",
        "tools[0].function.name",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "invalid_value", "tools[1].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        "invalid_type",
        "tools[0].function.strict",
    ),
    *[
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
            code,
            "tools[0].function.parameters" + path,
        )
        for schema, code, path in [
            ([], "invalid_type", ""),
            ({"type": "string"}, "invalid_value", ".type"),
            ({"properties": []}, "invalid_type", ".properties"),
            ({"properties": {"a": {"type": "text"}}}, "invalid_value", ".properties.a.type"),
            ({"properties": {"a": 1}}, "invalid_type", ".properties.a"),
            ({"properties": {"a": {"anyOf": [1]}}}, "invalid_type", ".properties.a.anyOf[0]"),
            ({"required": "a"}, "invalid_type", ".required"),
            ({"title": "x" * 70_000}, "array_above_max_length", ""),
        ]
    ],
    (
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]},
        "array_above_max_length",
        "tools",
    ),
    ({"tool_choice": "auto"}, "invalid_value", "tool_choice"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tool_choice": "maybe"}, "invalid_value", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "invalid_value", "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "missing_required_parameter", "tool_choice.function"),
    (
        {
            "tool_choice": {"type": "function", "function": {"name": "g"}},
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        "invalid_value",
        "tool_choice.function.name",
    ),
    ({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
    ({"functions": [{}]}, "unsupported_parameter", "functions"),
    ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "missing_required_parameter",
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
        "invalid_type",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"title": "x" * 70_000}}}},
        "schema_too_complex",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "invalid_value",
        "structured_outputs",
    ),
    ({"response_format": {"type": "text", "json_schema": {}}}, "unknown_parameter", "response_format.json_schema"),
    (
        {
            "response_format": {"type": "json_object"},
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        "invalid_value",
        "response_format",
    ),
    ({"thinking_budget": -1}, "out_of_range", "thinking_budget"),
    ({"thinking_budget": 5}, "unsupported_parameter", "thinking_budget"),
    ({"reasoning_effort": "much"}, "invalid_value", "reasoning_effort"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"a b": 1}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * 20_000}}, "array_above_max_length", "chat_template_kwargs.a"),
    ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format.type"),
    ({"response_format": {}}, "missing_required_parameter", "response_format.type"),
    ({"reasoning_effort": "low"}, "unsupported_parameter", "reasoning_effort"),
    ({"store": True}, "unsupported_parameter", "store"),
    ({"service_tier": "flex"}, "invalid_value", "service_tier"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"cache_salt": "a" * 257}, "array_above_max_length", "cache_salt"),
    ({"metadata": {str(i): "" for i in range(17)}}, "array_above_max_length", "metadata"),
    ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
    ({"best_of": 2}, "unknown_parameter", "best_of"),
    ({"max_tokens": 4096}, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": "a" * 5000}]}, "context_length_exceeded", "messages"),
]
TEXT_ONLY = [
    ({"prompt": None}, "missing_required_parameter", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": ""}, "invalid_value", "prompt"),
    ({"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
    ({"prompt": 1}, "invalid_type", "prompt"),
    ({"prompt": ["a", 1]}, "invalid_type", "prompt[1]"),
    ({"prompt": [1, "a"]}, "invalid_type", "prompt[1]"),
    ({"prompt": [[1], ["a"]]}, "invalid_type", "prompt[1][0]"),
    ({"prompt": [[]]}, "invalid_value", "prompt[0]"),
    ({"prompt": [None]}, "invalid_type", "prompt[0]"),
    ({"prompt": [1, 260]}, "invalid_token_id", "prompt"),
    ({"prompt": [[1], [260]]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [-1]}, "invalid_token_id", "prompt[0]"),
    ({"prompt": [1 << 40]}, "invalid_token_id", "prompt[0]"),
    ({"prompt": ["a"] * 129}, "array_above_max_length", "prompt"),
    ({"best_of": 17}, "out_of_range", "best_of"),
    ({"n": 3, "best_of": 2}, "out_of_range", "best_of"),
    ({"best_of": 2, "stream": True}, "invalid_value", "best_of"),
    ({"logprobs": 6}, "out_of_range", "logprobs"),
    ({"logprobs": True}, "invalid_type", "logprobs"),
    ({"max_tokens": 0}, "out_of_range", "max_tokens"),
    ({"max_tokens": 0, "echo": True, "stream": True}, "out_of_range", "max_tokens"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "out_of_range", "prompt_logprobs"),
    ({"suffix": "a"}, "unsupported_parameter", "suffix"),
    ({"messages": []}, "unknown_parameter", "messages"),
    ({"max_tokens": 4096}, "context_length_exceeded", "prompt"),
    ({"prompt": [65] * 4096}, "context_length_exceeded", "prompt"),
]


@pytest.mark.parametrize(
    "path,change,code,param",
    [(path, *case) for path, cases in ((CHAT, CHAT_ONLY), (TEXT, TEXT_ONLY)) for case in COMMON + cases],
)
def test_every_field_is_checked(server, path, change, code, param):
    body = (chat_body("hi") if path == CHAT else {"model": "fake", "prompt": "hi"}) | change
    for stream in (
        [False, True]
        if "stream" not in change and "stream_options" not in change and "best_of" not in change
        else [body.get("stream")]
    ):
        reply = server.post(path, body | ({"stream": stream} if stream is not None else {}))
        check(reply, errors.CODES[code][0], code, param)


def test_context_error_has_the_numbers(server):
    message = server.complete("abcd", max_tokens=4093).error["message"]
    assert "4096" in message and "4097" in message and "4 in the prompt" in message
    assert server.complete("abcd", max_tokens=4092).status == 200


def test_every_known_field_either_works_or_is_named(server):
    """Whatever value a field of the tables gets, the answer is 200 or a 400 that names the field."""
    from zse.server.requests.completions import CHAT_FIELDS, COMPLETIONS_FIELDS

    values = [None, True, 0, 1, -1, 0.5, "a", [], [1], ["a"], {}, {"a": 1}]
    for path, fields in ((CHAT, CHAT_FIELDS), (TEXT, COMPLETIONS_FIELDS)):
        for name in fields:
            for value in values:
                body = (chat_body("hi") if path == CHAT else {"model": "fake", "prompt": "hi"}) | {name: value}
                reply = server.post(path, body)
                if reply.status == 200:
                    continue
                assert reply.status == 400 or reply.error["code"] == "model_not_found", (name, value, reply)
                assert (reply.error["param"] or "").startswith(name), (name, value, reply)


def test_harmless_values_of_clients_are_accepted(server):
    echoed = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    body = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            echoed,
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": "bob"},
        ],
        "user": "u",
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        "store": False,
        "tools": [],
        "service_tier": "auto",
        "modalities": ["text"],
        "seed": -1,
        "top_k": -1,
        "logit_bias": {},
        "stop": None,
    }
    assert server.post(CHAT, body).json["choices"][0]["message"]["content"] == "hi"


def test_model_routes(server):
    listed = server.get("/v1/models").json
    assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["fake"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert server.get("/v1/models/fake").json["id"] == "fake"
    assert server.get("/v1/models/f%61ke").json["id"] == "fake"
    check(server.get("/v1/models/org/other"), 404, "model_not_found")
    assert server.get("/v1/models/").json == listed
    assert server.get("/health/live").json == {"status": "ok"}
    assert server.get("/version").json["version"]


METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


def test_route_table_with_every_kind_of_key(own_server):
    """Every route × method × {none, wrong, right key} has exactly one status."""
    server = own_server(key="s3cret-key")
    server.app.wrong_keys = WrongKeys(1 << 20)
    paths: dict[str, list] = {}
    for route in ROUTES:
        # A model that is unloaded and removed is not there for the rest.
        name = "gone" if route.scope == "admin" else "fake"
        path = route.path.replace("{model}", name).replace("{file}", "app.js")
        paths.setdefault(path, []).append(route)
    for path, routes in paths.items():
        for method in METHODS:
            for key, valid in (
                (None, False),
                ("Bearer wrong", False),
                ("s3cret-key", False),
                ("Basic s3cret-key", False),
                ("Bearer s3cret-key", True),
                ("bearer s3cret-key", True),
            ):
                body = b"{}" if method == "POST" else None
                reply = server.raw(request(method, path, body, {"authorization": key}))
                public = routes[0].scope == "public"
                if not public and not valid:
                    check(reply, 401, "invalid_api_key", None)
                    assert reply.headers["www-authenticate"] == "Bearer"
                    assert b"s3cret" not in reply.body
                elif method not in {route.method for route in routes}:
                    check(reply, 405, "method_not_allowed", None)
                else:
                    of_keys = path.startswith(("/admin/keys", "/admin/audit"))  # there is no database
                    status = (
                        404
                        if path.startswith(("/admin/models/gone", "/admin/adapters/{", "/v1/responses/{"))
                        else 400
                        if method == "POST"
                        or path.startswith(("/v1/sessions", "/v1/chats", "/v1/files", "/v1/batches", "/v1/rag"))
                        or "/api/delete" in path
                        else 200
                    )
                    # One wants a body, and gets none here; the other asks a hub that cannot be reached.
                    form = 415 if method == "POST" else status  # it is no form
                    status = {
                        "/v1/files": form,
                        "/admin/adapters/upload": 415,
                        "/api/delete": 415,
                        "/admin/models/gone/pull": 502,
                    }.get(path, status)
                    assert reply.status in ({400, 404} if of_keys else {status})
    check(server.get("/nope"), 404, "not_found", None)


def test_connections_without_a_key_are_limited(own_server):
    from zse.http.listener import Limits

    server = own_server(key="k", limits=Limits(unauthenticated_per_ip=3))
    socks = [server.connect() for _ in range(3)]
    time.sleep(0.05)
    check(server.get("/version"), 503, "overloaded", None)
    for sock in socks:
        sock.close()
    server.assert_quiet()
    assert server.get("/v1/models", {"authorization": "Bearer k"}).status == 200


@pytest.mark.timed
def test_queue_bounds(own_server):
    server = own_server(max_choices=4, max_queue_tokens=1000)
    held = [server.connect() for _ in range(3)]
    for sock in held:
        sock.sendall(request("POST", CHAT, chat_body("!stall")))
    while server.state()["choices"] < 3:
        time.sleep(0.01)
    start = time.perf_counter()
    reply = server.chat("hi", n=2)
    check(reply, 503, "overloaded", None)
    assert reply.headers["retry-after"] == "1" and time.perf_counter() - start < 0.5
    assert server.chat("hi").status == 200
    check(server.chat("a" * 3500), 503, "overloaded", None)  # refused by its bytes, before tokenising
    for sock in held:
        sock.close()
    server.assert_quiet()
    assert server.chat("hi", n=4).status == 200


def test_internal_errors_say_nothing(server):
    text_model = server.call(lambda: server.pool.default.text.result())
    text_model.encode_chat = lambda messages: 1 / 0
    try:
        check(server.chat("hi"), 500, "internal_error", None)
        check(server.chat("hi", stream=True), 500, "internal_error", None)
    finally:
        del text_model.encode_chat
    assert server.chat("hi").status == 200


def test_fuzzed_bodies_never_leak_or_fail(server):
    import random

    draw = random.Random(7)
    seed = json.dumps(chat_body("hi", temperature=0.5, stop=["a"], logit_bias={"5": 1}, logprobs=True)).encode()
    for _ in range(300):
        data = bytearray(seed)
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.choice(b'{}[]":,0123456789abcntfl\\ \xff')
        reply = server.post(CHAT, bytes(data))
        assert reply.status < 500
        if reply.status != 200:
            check(reply, reply.status, reply.error["code"])


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/responses", "input"),
        ("/api/generate", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/api/chat", "messages"),
    ],
)
def test_a_refused_conversation_is_named_as_its_api_has_it(server, path, field):
    """What the chat request is called that is made of it nobody sent."""
    picture = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
    url = f"data:image/png;base64,{picture}"
    long, parts = {
        "/v1/responses": (
            {"input": "a" * 5000},
            {"instructions": "x", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        ),
        "/api/generate": ({"prompt": "a" * 5000}, {"prompt": "a", "system": "x", "images": [picture]}),
    }.get(
        path,
        (
            {"messages": [{"role": "user", "content": "a" * 5000}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]},
        ),
    )
    body = {"model": "fake", "stream": False}
    check(server.post(path, body | long), 400, "context_length_exceeded", field)
    if path != "/api/chat":
        reply = server.post(path, body | parts)
        check(reply, 400, "unsupported_parameter")
        words = reply.json["error"] if field == "prompt" else reply.error["message"]
        named = {"messages": "'messages[0]", "prompt": "'images[0]': "}  # of a prompt, by the field of the images
        assert words.startswith(named.get(field, f"'{field}': ")), words


def test_counting_names_thinking_as_messages_does(server):
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "a"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    for path, more in (("/v1/messages", {"max_tokens": 2000}), ("/v1/messages/count_tokens", {})):
        check(server.post(path, body | more), 400, "unsupported_parameter", "thinking")
