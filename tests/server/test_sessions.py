"""Sessions: conversations that the server keeps, by OpenAI's and Anthropic's clients and by hand; tenants, bounds, what fails or leaves, ends."""

import time
from functools import partial

import anthropic
import openai
import pytest
from harness import Scheduled, chat_body, read_reply, request, wait_for
from test_stored_keys import bearer
from test_stored_responses import CALL, TEMPLATE, TOOL, keys, path, prompt  # noqa: F401

from zse.server.database import sessions
from zse.server.database.connection import Database, StorageError

CHAT, TEXT, PATH = "/v1/chat/completions", "/v1/completions", "/v1/sessions"


@pytest.fixture
def server(own_server, path, keys):  # noqa: F811
    return own_server(database=path, template=TEMPLATE)


@pytest.fixture
def me(keys):  # noqa: F811
    return bearer(keys[0])


@pytest.fixture
def client(server, keys):  # noqa: F811
    with openai.OpenAI(base_url=server.base + "/v1", api_key=keys[0], timeout=20, max_retries=0) as client:
        yield client


def said(server, headers, id: str = "s") -> list[tuple[str, str]]:
    found = server.get(f"{PATH}/{id}", headers).json
    assert found["object"] == "session" and found["id"] == id
    return [(message["role"], message["content"]) for message in found["messages"]]


def chat(server, headers, text: str, id: str = "s", **fields):
    return server.post(CHAT, chat_body(text, session_id=id, **fields), headers)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_goes_on(client, server, me, streamed):
    def ask(text: str, *before: dict, **fields) -> openai.types.CompletionUsage:
        messages = [*before, {"role": "user", "content": text}]
        options = dict(model="fake", messages=messages, extra_body={"session_id": "my-Session_1"} | fields)
        if not streamed:
            return client.chat.completions.create(**options).usage
        chunks = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        return list(chunks)[-1].usage

    ask("one", {"role": "system", "content": "x"})
    usage = ask("two")
    assert usage.prompt_tokens == prompt("system:x", "user:one", "assistant:one", "user:two")
    # Other instructions take the place of the first ones.
    usage = ask("three", {"role": "system", "content": "yyy"}, session_ttl=60)
    before = ("system:yyy", "user:one", "assistant:one", "user:two", "assistant:two", "user:three")
    assert usage.prompt_tokens == prompt(*before)
    kept = server.get(f"{PATH}/my-Session_1", me).json
    assert [f"{message['role']}:{message['content']}" for message in kept["messages"]] == [*before, "assistant:three"]
    assert kept["turns"] == 3 and kept["bytes"] > 100
    assert abs(kept["expires_at"] - time.time() - 60) < 10 and abs(kept["last_used_at"] - time.time()) < 10


def test_texts_go_on_too(client, server, me):
    for text, tokens in (("ab", 2), ("cd", 6), ("ef", 14)):  # the fake model repeats the prompt
        reply = client.completions.create(model="fake", prompt=text, max_tokens=64, extra_body={"session_id": "t"})
        assert reply.usage.prompt_tokens == tokens
    assert server.get(f"{PATH}/t", me).json["text"] == 2 * (2 * (2 * "ab" + "cd") + "ef")
    reply = chat(server, me, "x", "t")
    assert (reply.status, reply.error["param"]) == (400, "session_id") and "holds a text" in reply.error["message"]


def test_calls_and_their_results_go_on(client, server, me):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": TOOL["parameters"]}}]
    ask = partial(client.chat.completions.create, model="fake", tools=tools, extra_body={"session_id": "s"})
    first = ask(messages=[{"role": "user", "content": f"<think>\nlook\n</think>\nOne moment.\n{CALL}"}])
    call = first.choices[0].message.tool_calls[0]
    second = ask(messages=[{"role": "tool", "tool_call_id": call.id, "content": "user:14 degrees"}])
    assert second.choices[0].message.content == "14 degrees"
    kept = server.get(f"{PATH}/s", me).json["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant", "tool", "assistant"]
    assert kept[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"place":"Rome"}'}
    assert kept[1]["reasoning_content"].strip() == "look" and kept[2]["name"] == "weather"
    # What is shown is what requests write.
    assert server.post(CHAT, {"messages": kept[:3], "tools": tools}, me).json["usage"]["prompt_tokens"] == (
        second.usage.prompt_tokens
    )


def test_other_apis_name_it_in_a_header(server, keys):  # noqa: F811
    with anthropic.Anthropic(base_url=server.base, api_key=keys[0], max_retries=0) as client:
        ask = partial(client.messages.create, model="fake", max_tokens=64, extra_headers={"ZSE-Session-Id": "h"})
        ask(messages=[{"role": "user", "content": "one"}], system="x")
        reply = ask(messages=[{"role": "user", "content": "two"}], system="x")
    assert reply.usage.input_tokens == prompt("system:x", "user:one", "assistant:one", "user:two")
    me = bearer(keys[0]) | {"zse-session-id": "h"}
    body = {"model": "fake", "messages": [{"role": "user", "content": "three"}], "stream": False}
    assert server.post("/api/chat", body, me).status == 200
    assert [content for role, content in said(server, bearer(keys[0]), "h") if role == "user"] == [
        "one",
        "two",
        "three",
    ]
    for value, fields in (("a b", {}), ("a", {"session_id": "b"}), ("", {})):
        reply = server.post(CHAT, chat_body("x", **fields), me | {"zse-session-id": value})
        assert (reply.status, reply.error["param"]) == (400, "zse-session-id")


def test_one_request_at_a_time(server, me):
    with server.connect() as sock:
        sock.sendall(request("POST", CHAT, chat_body("!tokens=500 !ms=20", session_id="s", stream=True), me))
        assert b"200 OK" in sock.recv(1 << 10)
        for reply in (chat(server, me, "x"), server.raw(request("DELETE", f"{PATH}/s", None, me))):
            assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (409, "conflict", "false")
        assert chat(server, me, "x", "other").status == 200
    # The client has left: nothing of it is kept, and the session is free.
    wait_for(lambda: not server.call(lambda: server.app.running_sessions))
    assert server.get(f"{PATH}/s", me).status == 404
    assert chat(server, me, "one").json["usage"]["prompt_tokens"] == prompt("user:one")
    server.assert_quiet()


def test_what_failed_is_not_kept(server, me, monkeypatch):
    chat(server, me, "one")
    before = server.get(f"{PATH}/s", me).json
    assert chat(server, me, "!nan=0").status == 500
    assert b"numerical_error" in chat(server, me, "!nan=2", stream=True).body
    too_long = chat(server, me, "x" * 9000)
    assert (too_long.status, too_long.error["code"]) == (400, "context_length_exceeded")

    def full(connection, **values):
        raise StorageError("full")

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "store", full)
        assert chat(server, me, "two").error["code"] == "storage_unavailable"
        streamed = chat(server, me, "two", stream=True)
        assert b"storage_unavailable" in streamed.body and b"[DONE]" not in streamed.body
    assert server.get(f"{PATH}/s", me).json == before
    assert chat(server, me, "two").status == 200


def test_tenants_do_not_see_each_others(server, keys, me):  # noqa: F811
    chat(server, me, "one")
    mine, other = bearer(keys[1]), bearer(keys[2])
    assert said(server, mine) == [("user", "one"), ("assistant", "one")]  # another key of the tenant
    assert server.get(f"{PATH}/s", other).body == server.get(f"{PATH}/none", other).body
    for method in ("GET", "DELETE"):
        assert server.raw(request(method, f"{PATH}/s", None, other)).status == 404
    assert chat(server, other, "two").json["usage"]["prompt_tokens"] == prompt("user:two")
    assert server.get(PATH, other).json["data"][0]["turns"] == 1 and said(server, mine)[0] == ("user", "one")
    assert server.raw(request("DELETE", f"{PATH}/s", None, mine)).json == {
        "id": "s",
        "object": "session",
        "deleted": True,
    }
    assert server.get(f"{PATH}/s", me).status == 404 and said(server, other)[0] == ("user", "two")


def test_lists_have_pages(server, me):
    for id in "abcde":
        assert chat(server, me, "x", id).status == 200
    chat(server, me, "y", "b")
    found, after = [], ""
    while after is not None:
        page = server.get(f"{PATH}?limit=2{after and '&after=' + after}", me).json
        found += [row["id"] for row in page["data"]]
        after = page["last_id"] if page["has_more"] else None
    assert "".join(found) == "bedca"
    for query, param in (("after=z", "after"), ("limit=0", "limit"), ("order=asc", "order")):
        reply = server.get(f"{PATH}?{query}", me)
        assert (reply.status, reply.error["param"]) == (400, param)
    assert server.get(f"{PATH}/a?x=1", me).status == 400


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"session_id": "a/b"}, "session_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 65}, "session_id"),
        ({"session_id": 7}, "session_id"),
        ({"session_ttl": 60}, "session_ttl"),
        ({"session_id": "s", "session_ttl": 0}, "session_ttl"),
        ({"session_id": "s", "n": 2}, "n"),
        ({"session_id": "s", "add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"session_id": "s", "continue_final_message": True, "messages": [{"role": "assistant", "content": "a"}]},
            "continue_final_message",
        ),
    ],
)
def test_refused(server, me, fields, param):
    reply = server.post(CHAT, chat_body("x") | fields, me)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert server.get(PATH, me).json["data"] == []


@pytest.mark.parametrize("prompt", [["a", "b"], [65, 66]])
def test_refused_texts(server, me, prompt):
    reply = server.post(TEXT, {"prompt": prompt, "session_id": "s"}, me)
    assert (reply.status, reply.error["param"]) == (400, "prompt")


def test_without_a_database(own_server):
    server = own_server()
    replies = [chat(server, {}, "x"), server.get(PATH), server.get(f"{PATH}/s")]
    replies.append(server.raw(request("DELETE", f"{PATH}/s")))
    for reply in replies:
        assert reply.status == 400 and "--database" in reply.error["message"]


def test_bounds_and_ends(server, me, path, monkeypatch):  # noqa: F811
    chat(server, me, "one", session_ttl=1)
    card = server.get(PATH, me).json["data"][0]
    assert card["expires_at"] - card["last_used_at"] == 1
    server.app.session_ttl_s = 5.0  # of the operator: no request gets more
    chat(server, me, "one", "t", session_ttl=900)
    found = server.get(f"{PATH}/t", me).json
    assert found["expires_at"] - found["last_used_at"] == 5
    wait_for(lambda: server.get(f"{PATH}/s", me).status == 404)
    assert chat(server, me, "two").json["usage"]["prompt_tokens"] == prompt("user:two")  # a fresh one
    assert server.get(f"{PATH}/s", me).json["turns"] == 1
    monkeypatch.setattr(sessions, "SESSION_BYTES", 50)
    reply = chat(server, me, "three")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (413, "request_too_large", "session_id")
    monkeypatch.setattr(sessions, "SESSION_BYTES", 1 << 20)
    monkeypatch.setattr("zse.server.sessions.MAX_MESSAGES", 4)
    assert chat(server, me, "three").status == 200
    assert chat(server, me, "four").error["code"] == "array_above_max_length"


def test_room_is_made_by_those_that_nobody_uses(path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sessions, "MOST_BYTES", 30)
    with Database(path) as database:

        def store(tenant: str, id: str, turns: int, now: float) -> None:
            values = dict(tenant=tenant, id=id, body=10 * b"x", turns=turns, now=now, expires=now + 100)
            database.now(partial(sessions.store, **values))

        def there(tenant: str, now: float = 10.0) -> str:
            rows = database.now(lambda c: sessions.listed(c, tenant, 100, None, now), writes=False)
            return "".join(card.id for card in rows)

        for number, id in enumerate("abc"):
            store("t", id, 0, float(number))
            store("u", id, 0, float(number))
        store("t", "a", 1, 3.0)
        store("t", "d", 0, 4.0)
        assert there("t") == "dac" and there("u") == "cba"
        with pytest.raises(Exception, match="changed while"):
            store("t", "a", 1, 5.0)  # of two servers with one database, the second
        with pytest.raises(Exception, match="changed while"):
            store("t", "a", 0, 5.0)
        store("t", "b", 2, 5.0)  # made room for while it was answered: it is whole again
        assert there("t") == "bda"
        store("t", "a", 0, 104.0)  # the one of that name had ended
        assert there("t", 104.5) == "ab" and there("u", 104.5) == ""
        counted = "SELECT tenant, bytes FROM stored WHERE kind = 'sessions'"
        assert database.now(lambda c: dict(c.execute(counted)), writes=False) == {"t": 20, "u": 0}


def test_the_prefix_cache_makes_it_cheap(path, keys, me):  # noqa: F811
    server = Scheduled(database=path)
    try:
        first = chat(server, me, "one " * 20).json["usage"]
        usage = chat(server, me, "two").json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] // 16 * 16
    finally:
        server.close()


def test_they_outlive_the_server(own_server, server, me, path):  # noqa: F811
    headers = me | {"idempotency-key": "k"}
    with server.connect() as sock:
        sock.sendall(request("POST", CHAT, chat_body("one", session_id="s"), headers))
        first = read_reply(sock)
    again = own_server(database=path)
    assert (
        again.post(CHAT, chat_body("one", session_id="s"), headers).body == first.body
    )  # kept; the session is as it was
    assert said(again, me) == [("user", "one"), ("assistant", "one")]
    assert chat(again, me, "two").json["usage"]["prompt_tokens"] == prompt("user:one", "assistant:one", "user:two")
