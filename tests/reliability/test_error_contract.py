"""The error contract, row by row: what is sent, and the status, type, code, param and headers that come back; and what no message
of any of them holds. Rows of things that do not exist here (uploads, adapters: 422) are not in it; what a grammar
compiler refuses is in tests/server/test_structured.py."""

import re

import pytest
from harness import Harness, Reply, Scheduled, chat_body, read_reply, request, wait_for

from zse.http.listener import Limits
from zse.server import errors
from zse.server.keys import OWNER, Access, Key, Quota

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
INVALID, SERVER = "invalid_request_error", "server_error"
KEYS = (
    Key("a", "user"),
    Key("a", "old", expires=1.0),
    Key("b", "narrow", access=Access(models=frozenset(("gone",)), routes=frozenset((CHAT, TEXT)))),
    Key("r", "rpm", None, Quota(rpm=1, tpm=100_000)),
    Key("t", "tpm", None, Quota(rpm=1000, tpm=100)),
    Key("c", "one", None, Quota(concurrency=1)),
    Key("w", "admin", access=OWNER),
)
# Of Python, of this machine, of SQL: nothing of the inside stands in a message.
LEAK = re.compile(
    r"0x[0-9a-f]{6,}|Traceback|(^|[\s'\"(])/(usr|home|root|tmp|work|etc|proc|dev|var|opt)/|\.pyc?\b|<[A-Za-z_.]+ (object|at) |<class|"
    r"\bdict\b|\bNoneType\b|\bTrue\b|\bFalse\b|\bNone\b|\w+Error\b|\w+Exception\b|site-packages|msgspec|asyncio|errno|"
    r"\bSELECT\b|\bINSERT\b|sqlite|\{'|b'"
)


class World:
    """The servers that the rows need."""

    def __init__(self):
        limits = Limits(head_s=0.5, body_idle_s=0.5)
        self.server = Harness(key=KEYS, limits=limits, hosts=frozenset({"localhost"}))
        self.queue = Scheduled("--rows 1 --step-ms 5")

    def close(self) -> None:
        self.server.close()
        self.queue.close()

    def post(self, body, path: str = CHAT, key: str = "user", **headers: str | None) -> Reply:
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.server.post(path, body, {"authorization": f"Bearer {key}"} | more)

    def raw(self, head: bytes, body: bytes = b"") -> Reply:
        return self.server.raw(head.replace(b"\n", b"\r\n").replace(b"|", b"") + b"\r\n\r\n" + body)

    def held(self, key: str) -> Reply:
        """A request while another one of the key's runs."""
        with self.server.connect() as sock:
            header = {"authorization": f"Bearer {key}"}
            sock.sendall(request("POST", CHAT, chat_body("!stall"), header))
            wait_for(lambda: self.server.state()["requests"])
            reply = self.post(chat_body("a"), key=key)
        self.server.assert_quiet()
        return reply

    def state(self, set, unset) -> Reply:
        self.server.call(set)
        try:
            return self.post(chat_body("a"))
        finally:
            self.server.call(unset)

    def late(self) -> Reply:
        """A request whose deadline passes while it waits for a row."""
        with self.queue.connect() as sock:
            sock.sendall(request("POST", TEXT, {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}))
            wait_for(lambda: self.queue.engine.heartbeat.running)
            return self.queue.post(TEXT, {"prompt": "b", "deadline_ms": 50})

    def crash(self, **fields) -> Reply:
        reply = self.post(chat_body("!tokens=100 !crash=3", **fields))
        wait_for(lambda: self.server.engine.state == "ready", 10)
        return reply

    def bug(self) -> Reply:
        model = self.server.call(lambda: self.server.pool.default.text.result())
        model.encode_chat = lambda *given: {}["/tmp/secret.py"]
        try:
            return self.post(chat_body("a"))
        finally:
            del model.encode_chat


@pytest.fixture(scope="module")
def world():
    made = World()
    yield made
    made.close()


def field(**change):
    """A chat with these fields."""
    return lambda world: world.post(chat_body("hi") | change)


def of_text(**change):
    return lambda world: world.post({"prompt": "hi"} | change, TEXT)


def body(data: bytes):
    return lambda world: world.post(data)


def http(head: str, sent: bytes = b""):
    """The lines of a head."""
    return lambda world: world.raw(head.encode("latin-1"), sent)


def restarting(world) -> Reply:
    engine = world.server.engine
    return world.state(lambda: setattr(engine, "state", "restarting"), lambda: setattr(engine, "state", "ready"))


def draining(world) -> Reply:
    app = world.server.app
    return world.state(lambda: setattr(app, "draining", True), lambda: setattr(app, "draining", False))


def full(world) -> Reply:
    """Of several tenants one that has nothing there would get in."""
    control = world.server.app.admission

    def hold(choices: int) -> None:
        control.choices = control.tenants["a"].choices = choices

    return world.state(lambda: hold(1000), lambda: hold(0))


def twice(world) -> Reply:
    world.server.get("/v1/models", {"authorization": "Bearer rpm"})
    return world.server.get("/v1/models", {"authorization": "Bearer rpm"})


def half(data: bytes):
    def send(world) -> Reply:
        with world.server.connect() as sock:
            sock.sendall(data)
            return read_reply(sock)

    return send


AUTHORIZED = "\nHost: localhost\nAuthorization: Bearer user\nContent-Type: application/json"
POST = f"POST {CHAT} HTTP/1.1" + AUTHORIZED
LENGTH = {"www-authenticate": "Bearer"}
RETRY = {"retry-after": r"\d+", "retry-after-ms": r"\d+"}
CLOSED = {"connection": "close"}
FINAL = {"x-should-retry": "false"}
LIMITS = RETRY | {
    f"x-ratelimit-{what}-{kind}": r"[\d.]+s?"
    for what in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
}
STOPS = tuple("abcdefghijklmnopq")  # 17: one too many
TOOL = {"type": "function", "function": {"name": "f"}}

# name: (what is sent, status, type, code, param, headers that there must be)
ROWS = {
    # 400: no JSON
    **{
        f"json: {name}": (body(data), 400, INVALID, "invalid_json", None, FINAL)
        for name, data in {
            "no JSON": b"{",
            "bad UTF-8": b'{"model":"\xff"}',
            "duplicate key": b'{"model":"a","model":"b"}',
            "deep": b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
            "NaN": b'{"temperature":NaN}',
            "Infinity": b'{"temperature":-Infinity}',
            "beyond 2^63": b'{"seed":9223372036854775809}',
        }.items()
    },
    # 400: fields
    "wrong type": (field(temperature="1"), 400, INVALID, "invalid_type", "temperature", FINAL),
    "wrong type below": (field(stop=["a", 1]), 400, INVALID, "invalid_type", "stop[1]", FINAL),
    "unknown enum": (field(reasoning_effort="much"), 400, INVALID, "invalid_value", "reasoning_effort", FINAL),
    "missing": (body(b"{}"), 400, INVALID, "missing_required_parameter", "messages", FINAL),
    "unsupported": (field(store=True), 400, INVALID, "unsupported_parameter", "store", FINAL),
    "unknown": (field(frobnicate=1), 400, INVALID, "unknown_parameter", "frobnicate", FINAL),
    **{
        f"range: {name} {value}": (field(**{name: value} | more), 400, INVALID, "out_of_range", name, FINAL)
        for name, value, more in (
            ("temperature", -0.1, {}),
            ("temperature", 2.1, {}),
            ("top_p", 0, {}),
            ("top_p", 1.1, {}),
            ("n", 17, {}),
            ("top_logprobs", 21, {"logprobs": True}),
            ("max_tokens", 0, {}),
        )
    },
    "range: best_of": (of_text(best_of=17), 400, INVALID, "out_of_range", "best_of", FINAL),
    **{
        f"long: {name}": (field(**{name: value}), 400, INVALID, "array_above_max_length", name, FINAL)
        for name, value in {
            "stop": STOPS,
            "logit_bias": {str(index): 0 for index in range(1025)},
            "messages": [{"role": "user", "content": ""}] * 2049,
            "tools": [TOOL] * 129,
            "metadata": {str(index): "" for index in range(17)},
        }.items()
    },
    "long: stop's item": (field(stop="a" * 257), 400, INVALID, "array_above_max_length", "stop", FINAL),
    "token id: prompt": (of_text(prompt=[1, 260]), 400, INVALID, "invalid_token_id", "prompt", FINAL),
    "token id: logit_bias": (field(logit_bias={"260": 1}), 400, INVALID, "invalid_token_id", "logit_bias", FINAL),
    "token id: stop": (field(stop_token_ids=[260]), 400, INVALID, "invalid_token_id", "stop_token_ids", FINAL),
    "context": (field(max_tokens=4096), 400, INVALID, "context_length_exceeded", "messages", FINAL),
    "schema": (
        field(structured_outputs={"grammar": "a" * 70_000}),
        400,
        INVALID,
        "schema_too_complex",
        "structured_outputs.grammar",
        FINAL,
    ),
    "dimensions": (
        lambda world: world.post({"input": "a", "dimensions": 9_999_999}, "/v1/embeddings"),
        400,
        INVALID,
        "out_of_range",
        "dimensions",
        FINAL,
    ),
    # 401 to 405
    **{
        f"key: {name}": (
            lambda world, name=name: world.post(chat_body("a"), authorization=name),
            401,
            INVALID,
            "invalid_api_key",
            None,
            LENGTH | FINAL,
        )
        for name in (None, "Bearer wrong", "Bearer old", "Basic user", "user")
    },
    "scope: model": (
        lambda world: world.post(chat_body("a"), key="narrow"),
        403,
        "permission_error",
        "insufficient_permissions",
        "model",
        FINAL,
    ),
    "scope: route": (
        lambda world: world.post({"input": "a"}, "/v1/embeddings", "narrow"),
        403,
        "permission_error",
        "insufficient_permissions",
        None,
        FINAL,
    ),
    "scope: admin": (
        lambda world: world.server.get("/metrics", {"authorization": "Bearer user"}),
        403,
        "permission_error",
        "insufficient_permissions",
        None,
        FINAL,
    ),
    "no model": (field(model="/etc/passwd"), 404, INVALID, "model_not_found", "model", FINAL),
    "no route": (lambda world: world.server.get("/v1/nothing"), 404, INVALID, "not_found", None, FINAL),
    "method": (
        lambda world: world.server.get(CHAT, {"authorization": "Bearer user"}),
        405,
        INVALID,
        "method_not_allowed",
        None,
        FINAL | {"allow": "POST"},
    ),
    "conflict": (
        lambda world: world.post({"model": "other", "name": "fake"}, "/admin/models", "admin"),
        409,
        INVALID,
        "conflict",
        None,
        FINAL,
    ),
    "pull": (
        lambda world: world.post({}, "/admin/models/gone/pull", "admin"),
        502,
        SERVER,
        "pull_failed",
        "model",
        FINAL,
    ),
    "media type": (
        lambda world: world.post(b"a=1", content_type="text/plain"),
        415,
        INVALID,
        "unsupported_media_type",
        None,
        FINAL,
    ),
    "no length": (http(POST), 411, INVALID, "length_required", None, FINAL),
    # 408, 413, 414, 431
    "slow head": (half(b"GET /v1/models HTTP/1.1\r\nHo"), 408, INVALID, "request_timeout", None, CLOSED),
    "half a body": (
        half(request("POST", CHAT, chat_body("a"), {"authorization": "Bearer user"})[:-5]),
        408,
        INVALID,
        "request_timeout",
        None,
        CLOSED,
    ),
    "large, as declared": (
        http(POST + "\nContent-Length: 99999999"),
        413,
        INVALID,
        "request_too_large",
        None,
        CLOSED | FINAL,
    ),
    "large, as read": (
        http(
            POST.replace("/chat", "") + "\nTransfer-Encoding: chunked",
            b"300000\r\n" + b"a" * 0x300000 + b"\r\n0\r\n\r\n",
        ),
        413,
        INVALID,
        "request_too_large",
        None,
        CLOSED | FINAL,
    ),
    "long header": (http("GET / HTTP/1.1\nHost: a\nA: " + "a" * 17000), 431, INVALID, "header_too_large", None, CLOSED),
    "many headers": (http("GET / HTTP/1.1\nHost: a" + "\nA: b" * 101), 431, INVALID, "header_too_large", None, CLOSED),
    "long target": (http("GET /" + "a" * 9000 + " HTTP/1.1\nHost: a"), 414, INVALID, "uri_too_long", None, CLOSED),
    # 400 of HTTP itself
    **{
        f"http: {name}": (http(head), 400, INVALID, "invalid_http", None, CLOSED | FINAL)
        for name, head in {
            "length and coding": POST + "\nContent-Length: 2\nTransfer-Encoding: chunked",
            "two lengths": POST + "\nContent-Length: 2\nContent-Length: 3",
            "sign": POST + "\nContent-Length: +2",
            "space": POST + "\nContent-Length: 1 2",
            "hex": POST + "\nContent-Length: 0x2",
            "NUL": "GET / HTTP/1.1\nHost: localhost\nA: \0",
            "folded": "GET / HTTP/1.1\nHost: localhost\nA: b\n c",
            "no Host": "GET /version HTTP/1.1\nA: b",
            "bad Host": "GET /version HTTP/1.1\nHost: a/b",
            "other Host": "GET /version HTTP/1.1\nHost: evil.example",
        }.items()
    },
    "http: bare LF": (
        lambda world: world.server.raw(b"GET /version HTTP/1.1\nHost: localhost\n\n"),
        400,
        INVALID,
        "invalid_http",
        None,
        CLOSED | FINAL,
    ),
    # 429
    "rpm": (twice, 429, "requests", "rate_limit_exceeded", None, LIMITS),
    "tpm": (
        lambda world: (
            [world.post(chat_body("a", max_tokens=90), key="tpm") for _ in range(2)][0]
            and world.post(chat_body("a", max_tokens=3000), key="tpm")
        ),
        429,
        "tokens",
        "rate_limit_exceeded",
        None,
        LIMITS,
    ),
    "concurrency": (lambda world: world.held("one"), 429, "requests", "rate_limit_exceeded", None, RETRY),
    # 5xx
    "queue": (full, 503, SERVER, "overloaded", None, RETRY),
    "draining": (draining, 503, SERVER, "shutting_down", None, RETRY),
    "restarting": (restarting, 503, SERVER, "engine_restarting", None, RETRY),
    "crash": (lambda world: world.crash(), 503, SERVER, "engine_restarting", None, RETRY),
    "deadline": (World.late, 504, SERVER, "timeout", "deadline_ms", FINAL),
    "bug": (World.bug, 500, SERVER, "internal_error", None, FINAL),
    "NaN": (lambda world: world.post(chat_body("!nan=0")), 500, SERVER, "numerical_error", None, FINAL),
}


def check_error(error: dict, kind: str, code: str, param: str | None) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (kind, code, param), error
    assert isinstance(error["message"], str) and 10 < len(error["message"]) < 2000
    assert not LEAK.search(error["message"].replace("/etc/passwd", "")), error["message"]
    assert not any(key.key in error["message"].split() for key in KEYS if key.key not in ("user", "old", "one")), error


@pytest.mark.parametrize("name", ROWS)
def test_a_row(world, name):
    send, status, kind, code, param, headers = ROWS[name]
    reply = send(world)
    assert reply.status == status, reply
    assert set(reply.json) == {"error"} and reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    check_error(reply.error, kind, code, param)
    for header, value in headers.items():
        assert re.fullmatch(value, reply.headers.get(header, "")), (header, reply.headers)
    assert ("x-should-retry" in reply.headers) is (not errors.CODES[code][2])


@pytest.mark.parametrize(
    "text,code", [("!tokens=100 !nan=3", "numerical_error"), ("!tokens=100 !crash=3", "engine_restarting")]
)
def test_an_error_within_a_stream_is_its_last_event(world, text, code):
    reply = world.post(chat_body(text, stream=True))
    wait_for(lambda: world.server.engine.state == "ready", 10)
    *events, last = reply.events
    assert reply.status == 200 and events and "[DONE]" not in reply.events and reply.headers["x-request-id"]
    check_error(last["error"], SERVER, code, None)


def test_every_code_of_the_table_has_a_row_or_a_reason():
    elsewhere = {
        "invalid_schema": "tests/server/test_structured.py",
        "no_chat_template": "tests/server",
        "chat_template_refused": "tests/reliability/test_chat_templates.py",
        "chat_template_failed": "tests/reliability/test_chat_templates.py",
        "chat_template_limit": "tests/reliability/test_chat_templates.py",
        "control_tokens_in_text": "tests/server",
        "engine_unavailable": "tests/server/test_lifecycle.py",
        "storage_unavailable": "tests/server/test_admin_keys.py",
        "prefill_only": "tests/server/test_prefill_elsewhere_served.py",
        "conflict": "tests/server/test_admin_keys.py",
        "invalid_multipart": "tests/server/test_files.py",
        "unprocessable_file": "tests/server/test_adapters_served.py",
        "idempotency_key_in_use": "tests/server/test_idempotency.py",
        "idempotency_key_reused": "tests/server/test_idempotency.py",
    }
    assert {row[3] for row in ROWS.values()} | elsewhere.keys() == errors.CODES.keys()
