"""Idempotency-Key: the kept answer, one request at a time, tenants, what is not kept, bounds, a restart."""

import json
from functools import partial

import openai
import pytest
from harness import chat_body, request, wait_for
from test_stored_keys import bearer, make

from zse.server.database import answers
from zse.server.database.answers import KEPT_S, KeptAnswer
from zse.server.database.connection import Database

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "server.db")


@pytest.fixture
def keys(path) -> list[str]:
    """Two of one tenant, one of another, an admin's."""
    with Database(path) as database:
        return [
            make(database, "a"),
            make(database, "b", tenant="a"),
            make(database, "c"),
            make(database, "d", admin=True),
        ]


@pytest.fixture
def server(own_server, path, keys):
    return own_server(database=path)


@pytest.fixture
def ask(server, keys):
    """(body, Idempotency-Key, which key, route) → the reply."""

    def post(body: dict, key: str = "k1", who: int = 0, route: str = CHAT, **headers):
        return server.post(route, body, bearer(keys[who]) | {"idempotency-key": key} | headers)

    return post


def test_the_official_client_gets_the_same_answer(server, keys):
    with openai.OpenAI(base_url=server.base + "/v1", api_key=keys[0], timeout=20, max_retries=0) as client:

        def create(text: str):
            messages = [{"role": "user", "content": text}]
            return client.chat.completions.with_raw_response.create(
                model="fake", messages=messages, extra_headers={"Idempotency-Key": "one"}
            )

        first, again = create("hi"), create("hi")
        assert first.content == again.content and again.headers["idempotent-replayed"] == "true"
        assert "idempotent-replayed" not in first.headers
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            create("ho")
        assert caught.value.code == "idempotency_key_reused" and caught.value.param == "Idempotency-Key"
        assert caught.value.response.headers["x-should-retry"] == "false"
    assert server.call(lambda: server.pool.default.statistics.completion_tokens) == 3  # of one answer
    server.assert_quiet()


def test_it_is_of_a_tenant_and_a_route(ask):
    body = {"model": "fake", "prompt": "a", "max_tokens": 4}
    first = ask(body, route=TEXT)
    assert ask(body, route=TEXT, who=1).body == first.body  # another key of the tenant
    other = ask(body, route=TEXT, who=2)
    assert other.status == 200 and other.json["id"] != first.json["id"]
    assert ask(chat_body("a")).status == 422
    assert ask({**body, "max_tokens": 5}, route=TEXT, who=2).status == 422
    for route, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/messages", {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "a"}], "stream": False}),
        ("/tokenize", {"prompt": "a"}),
    ):
        first, again = ask(body, route, route=route), ask(body, route, route=route)
        assert first.status == 200 and again.body == first.body and "idempotent-replayed" in again.headers, route
        assert again.headers["content-type"] == first.headers["content-type"]


def test_it_is_of_a_session(ask):
    """The header that names one is a part of the request."""
    first, again = (ask(chat_body("a"), **{"zse-session-id": "one"}) for _ in range(2))
    assert first.status == 200 and again.body == first.body
    for other in ({"zse-session-id": "two"}, {}):
        assert ask(chat_body("a"), **other).error["code"] == "idempotency_key_reused"


def test_one_at_a_time(server, ask, keys):
    body = chat_body("!stall")
    with server.connect() as held:
        held.sendall(request("POST", CHAT, body, bearer(keys[0]) | {"idempotency-key": "k1"}))
        wait_for(lambda: server.state()["choices"] == 1)
        second = ask(body)
        assert (second.status, second.error["code"]) == (409, "idempotency_key_in_use")
        assert second.headers["retry-after"] == "1" and "x-should-retry" not in second.headers
        assert ask(chat_body("a"), who=2).status == 200  # another tenant's key of the same name
    server.assert_quiet()
    assert ask(chat_body("other")).status == 200  # its client left: nothing was kept
    assert not server.call(lambda: server.app.running_keys)


def test_what_fails_is_not_kept(server, ask, monkeypatch):
    assert ask(chat_body("a", temperature=9)).status == 400
    assert ask(chat_body("!tokens=9 !nan=3")).status == 500
    with monkeypatch.context() as patch:
        patch.setattr(
            answers, "keep", lambda connection, **values: connection.execute("INSERT INTO nothing VALUES (1)")
        )
        assert ask(chat_body("a")).error["code"] == "storage_unavailable"
    assert ask(chat_body("b")).status == 200 and not server.call(lambda: server.app.running_keys)


def test_what_is_refused(own_server, ask, keys):
    for body, route in ((chat_body("a", stream=True), CHAT), ({"model": "fake", "prompt": "a"}, "/api/generate")):
        reply = ask(body, route=route)
        assert reply.status == 400 and b"Idempotency-Key: a streamed answer is not kept" in reply.body
    assert ask({"name": "new"}, route="/admin/keys", who=3).error["param"] == "Idempotency-Key"
    for key in ("", "x" * 256, "a\tb", "\xe9", "a\x7fb"):
        assert ask(chat_body("a"), key).status == 400, key
    assert ask(chat_body("a"), "x" * 255).status == 200
    reply = own_server().post(CHAT, chat_body("a"), {"idempotency-key": "k"})
    assert reply.status == 400 and "--database" in reply.error["message"]


def test_it_outlives_the_server(own_server, path, keys):
    headers = bearer(keys[0]) | {"idempotency-key": "k"}
    first = own_server(database=path).post(CHAT, chat_body("a"), headers)
    again = own_server(database=path).post(CHAT, chat_body("a"), headers)
    assert again.body == first.body and json.loads(again.body)["id"] == first.json["id"]


def test_room_is_made_by_the_oldest_and_for_one_tenant(path, monkeypatch):
    monkeypatch.setattr(answers, "MOST_BYTES", 100)
    with Database(path) as database:

        def keep(tenant: str, key: str, now: float, size: int) -> None:
            answer = KeptAnswer(b"", "text/plain", b"x" * size)
            database.now(partial(answers.keep, tenant=tenant, key=key, answer=answer, now=now))

        def there(tenant: str, now: float) -> str:
            finds = {key: partial(answers.find, tenant=tenant, id=key, now=now) for key in "abcdef"}
            return "".join(key for key, find in finds.items() if database.now(find, writes=False))

        keep("u", "a", 0.0, 90)
        for index, key in enumerate("abcd"):
            keep("t", key, float(index), 30)
        assert there("t", 5.0) == "bcd" and there("u", 5.0) == "a"
        keep("t", "b", 5.0, 20)  # in the place of the one that it has
        keep("t", "e", 6.0, 101)
        assert there("t", 7.0) == "bcd" and there("u", 7.0) == "a"
        keep("t", "f", KEPT_S + 5.5, 10)
        assert there("t", 7.0) == "f" and there("u", 7.0) == ""  # deleted, not only hidden
