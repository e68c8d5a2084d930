"""Stored responses by the official client: conversations that go on, pages of items, tenants, bounds, a disk that fails, a restart."""

import json
import time
from functools import partial

import openai
import pytest
from harness import read_reply, request
from test_anthropic import WEATHER
from test_lifecycle import start  # noqa: F401
from test_stored_keys import bearer, make

from zse.server.database import responses
from zse.server.database.connection import Database
from zse.server.database.responses import KEPT_S, StoredResponse

PATH = "/v1/responses"
TEMPLATE = "{{ tools }} <tool_call> </think>"
TOOL = {"type": "function", "name": "weather", "parameters": WEATHER["input_schema"], "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "server.db")


@pytest.fixture
def keys(path) -> list[str]:
    """Two of one tenant, one of another."""
    with Database(path) as database:
        return [make(database, "a"), make(database, "b", tenant="a"), make(database, "c")]


@pytest.fixture
def server(own_server, path, keys):
    return own_server(database=path, template=TEMPLATE)


@pytest.fixture
def client(server, keys):
    with openai.OpenAI(base_url=server.base + "/v1", api_key=keys[0], timeout=20, max_retries=0) as client:
        yield client


def prompt(*lines: str) -> int:
    return len("\n".join((*lines, "assistant:")).encode())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_goes_on(client, streamed):
    def create(text: str, **fields):
        if not streamed:
            return client.responses.create(model="fake", input=text, **fields)
        with client.responses.stream(model="fake", input=text, **fields) as stream:
            for _ in stream:
                pass
            return stream.get_final_response()

    first = create("one", store=True, instructions="x")
    kept = client.responses.retrieve(first.id)
    assert first.store is True and (kept.output_text, kept.usage, kept.status) == ("one", first.usage, "completed")
    assert streamed or kept.to_dict() == first.to_dict()
    second = create("two", store=True, previous_response_id=first.id)
    assert second.previous_response_id == first.id and second.output_text == "two"
    # What the first one was told by its instructions is its own.
    assert second.usage.input_tokens == prompt("user:one", "assistant:one", "user:two")
    third = create("three", previous_response_id=second.id, instructions="y")
    said = ("system:y", "user:one", "assistant:one", "user:two", "assistant:two", "user:three")
    assert third.usage.input_tokens == prompt(*said) and third.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))  # the client asks for each page
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "one"),
        ("assistant", "one"),
        ("user", "two"),
    ]
    latest = client.responses.input_items.list(second.id, limit=1)
    assert latest.data[0].id == items[-1].id and latest.has_more


def test_calls_and_reasoning_go_on(client):
    text = f"<think>\nlook\n</think>\nOne moment.\n{CALL}"
    first = client.responses.create(model="fake", input=text, tools=[TOOL], store=True)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "user:14 degrees"}
    options = dict(model="fake", tools=[TOOL], store=True, previous_response_id=first.id)
    second = client.responses.create(input=[result], **options)
    items = [{"role": "user", "content": text}, *(item.model_dump(exclude_none=True) for item in first.output), result]
    whole = client.responses.create(model="fake", tools=[TOOL], input=items)
    assert second.output_text == whole.output_text == "14 degrees"
    assert second.usage.input_tokens == whole.usage.input_tokens
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert len({item.id for item in listed}) == 5 and listed[-1].output == "user:14 degrees"


def test_items_are_named_by_what_is_stored(client):
    """As the AI SDK sends a conversation: items that an answer had by their ids alone."""
    text = f"<think>\nlook\n</think>\nOne moment.\n{CALL}"
    first = client.responses.create(model="fake", input=text, tools=[TOOL], store=True)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "user:14 degrees"}
    names = [{"type": "item_reference", "id": item.id} for item in first.output]
    said = [{"role": "user", "content": text}, *(item.model_dump(exclude_none=True) for item in first.output), result]
    whole = client.responses.create(model="fake", tools=[TOOL], input=said)
    second = client.responses.create(model="fake", tools=[TOOL], input=[said[0], *names, result], store=True)
    assert second.output_text == whole.output_text == "14 degrees"
    assert second.usage.input_tokens == whole.usage.input_tokens
    listed = client.responses.input_items.list(second.id, order="asc").data
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item.type for item in listed] == kinds  # what they were, not their names
    # Those of a request, too, of several responses, and without a type.
    names = [{"id": listed[0].id}, *names, {"type": "item_reference", "id": listed[-1].id}, {"id": second.output[0].id}]
    third = client.responses.create(model="fake", tools=[TOOL], input=[*names, {"role": "user", "content": "more"}])
    again = [*said, {"role": "assistant", "content": "14 degrees"}, {"role": "user", "content": "more"}]
    assert (
        third.usage.input_tokens == client.responses.create(model="fake", tools=[TOOL], input=again).usage.input_tokens
    )
    behind = client.responses.create(
        model="fake", tools=[TOOL], input=[{"id": second.output[0].id}, again[-1]], previous_response_id=first.id
    )
    assert behind.usage.input_tokens < third.usage.input_tokens


@pytest.mark.parametrize("id", ["msg_{}_7", "msg_{}_in1", "{}", "msg_0_0", "rs__0", "x" * 256])
def test_items_that_are_not_there(client, server, keys, id):
    first = client.responses.create(model="fake", input="one", store=True)
    name = {"type": "item_reference", "id": id.format(first.id.removeprefix("resp_"))[:256]}
    own = {"type": "item_reference", "id": first.output[0].id}
    with pytest.raises(openai.NotFoundError, match="no such stored item") as caught:
        client.responses.create(model="fake", input=[own, name])
    assert caught.value.param == "input[1].id"
    reply = server.post(PATH, {"input": [own]}, bearer(keys[2]))  # another tenant's
    assert (reply.status, reply.error["param"]) == (404, "input[0].id")


def test_prompts_are_counted(client, server, keys, own_server):
    def count(**fields) -> int:
        found = client.responses.input_tokens.count(model="fake", **fields)
        assert found.object == "response.input_tokens"
        return found.input_tokens

    first = client.responses.create(model="fake", input="one", store=True)
    for fields in (
        {"input": "two"},
        {"input": "two", "instructions": "x", "tools": [TOOL], "tool_choice": "required"},
        {"input": "two", "previous_response_id": first.id},
        {"input": [{"role": "user", "content": "one"}, {"type": "item_reference", "id": first.output[0].id}]},
        {"input": "two", "text": {"format": {"type": "json_object"}}, "reasoning": {"summary": "auto"}},
    ):
        assert (
            count(**fields) == client.responses.create(model="fake", max_output_tokens=1, **fields).usage.input_tokens
        )
    path = PATH + "/input_tokens"
    for body, param in (
        ({"input": "a", "store": True}, "store"),
        ({"input": "a", "tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        ({}, "input"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ):
        reply = server.post(path, body, bearer(keys[0]))
        assert reply.status in (400, 404) and reply.error["param"] == param
    plain = own_server()
    for body, param in (
        ({"input": "a", "previous_response_id": "x"}, "previous_response_id"),
        ({"input": [{"id": "x"}]}, "input[0]"),
    ):
        for where in (path, PATH):
            reply = plain.post(where, body)
            assert (reply.status, reply.error["param"]) == (400, param) and "--database" in reply.error["message"]


def test_what_was_deleted_is_gone(client):
    first = client.responses.create(model="fake", input="one", store=True)
    second = client.responses.create(model="fake", input="two", store=True, previous_response_id=first.id)
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    assert client.responses.retrieve(second.id).output_text == "two"
    assert len(client.responses.input_items.list(second.id).data) == 1
    with pytest.raises(openai.NotFoundError, match="one before it is gone") as caught:
        client.responses.create(model="fake", input="three", previous_response_id=second.id)
    assert caught.value.param == "previous_response_id"


def test_tenants_do_not_see_each_others(client, server, keys):
    response = client.responses.create(model="fake", input="one", store=True)
    here, items = f"{PATH}/{response.id}", f"{PATH}/{response.id}/input_items"
    body = {"input": "x", "previous_response_id": response.id}
    other, unknown = bearer(keys[2]), f"{PATH}/resp_{'0' * 24}"
    assert server.get(here, other).body == server.get(unknown, other).body
    for reply in (server.get(here, other), server.get(items, other), server.post(PATH, body, other)):
        assert reply.status == 404 and response.id not in reply.body.decode()
    with pytest.raises(openai.NotFoundError), client.with_options(api_key=keys[2]) as stranger:
        stranger.responses.delete(response.id)
    assert server.get(here, bearer(keys[1])).json["id"] == response.id  # another key of the tenant
    assert server.post(PATH, body, bearer(keys[1])).status == 200


@pytest.mark.parametrize(
    "query, param",
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=a", "limit"),
        ("limit=" + "9" * 6000, "limit"),
        ("order=up", "order"),
        ("after=nothing", "after"),
        ("after=", "after"),
        ("limit=1&limit=2", "limit"),
        ("include%5B%5D=x", "include[][0]"),
        ("include%5B%5D=message.output_text.logprobs&limit%5B%5D=1", "limit[]"),
        ("%ff=1", ""),
        ("&".join(f"a{index}=1" for index in range(40)), ""),
    ],
)
def test_queries_that_are_refused(client, server, keys, query, param):
    id = client.responses.create(model="fake", input="one", store=True).id
    reply = server.get(f"{PATH}/{id}/input_items?{query}", bearer(keys[0]))
    assert (reply.status, reply.error["param"]) == (400, param)
    assert server.get(f"{PATH}/{id}?stream=true", bearer(keys[0])).error["param"] == "stream"


def test_what_is_included_is_there(client, server, keys):
    included = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    kept = client.responses.create(model="fake", input="one", store=True, include=included)
    assert client.responses.retrieve(kept.id, include=included).to_dict() == kept.to_dict()
    assert client.responses.input_items.list(kept.id, include=included).data[0].content[0].text == "one"


def test_what_is_over_is_not_cancelled(client):
    kept = client.responses.create(model="fake", input="one", store=True)
    with pytest.raises(openai.BadRequestError, match="is over"):
        client.responses.cancel(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_1")


def test_a_server_without_a_database_refuses_to_store(own_server):
    server = own_server()
    for name, value in (("store", True), ("previous_response_id", "resp_1")):
        reply = server.post(PATH, {"input": "a", name: value})
        assert (reply.status, reply.error["param"]) == (400, name) and "--database" in reply.error["message"]
    assert server.get(f"{PATH}/resp_1").status == 404


def test_an_answer_that_cannot_be_stored_is_an_error(server, keys, client, monkeypatch):
    def full(connection, **values):
        connection.execute("INSERT INTO nothing VALUES (1)")

    monkeypatch.setattr(responses, "store", full)
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="fake", input="a", store=True)
    assert (caught.value.status_code, caught.value.code) == (503, "storage_unavailable")
    reply = server.post(PATH, {"input": "a", "store": True, "stream": True}, bearer(keys[0]))
    assert b"storage_unavailable" in reply.body and b"response.completed" not in reply.body
    assert client.responses.create(model="fake", input="a").output_text == "a"


def row(id: str, previous: str = "", created: float = 1.0, size: int = 10) -> StoredResponse:
    return StoredResponse(id, previous, created, b"x" * size, b"")


def test_room_is_made_by_the_oldest_and_for_one_tenant(path, monkeypatch):
    monkeypatch.setattr(responses, "MOST_BYTES", 100)
    with Database(path) as database:

        def store(tenant: str, now: float, **values) -> None:
            database.now(partial(responses.store, tenant=tenant, response=row(created=now, **values), now=now))

        def there(tenant: str, now: float = 20.0) -> str:
            find = lambda c, id: responses.find(c, tenant, id, now)  # noqa: E731
            return "".join(id for id in "abcdefghijklm" if database.now(partial(find, id=id), writes=False))

        for index, id in enumerate("abcdefghij"):
            store("t", float(index), id=id)
        store("u", 0.5, id="a", size=90)
        assert there("t") == "abcdefghij"
        store("t", 10.0, id="k", previous="a")  # a is used again
        assert there("t") == "acdefghijk"
        store("t", 11.0, id="l", size=75)
        assert there("t") == "akl" and there("u") == "a"
        with pytest.raises(Exception, match="at most 100"):
            store("t", 12.0, id="m", size=101)
        assert there("t", KEPT_S + 10.5) == "l" and there("u", KEPT_S + 1) == ""
        store("u", KEPT_S + 10.5, id="b")
        left = "SELECT tenant, count(*), sum(size) FROM responses GROUP BY 1"
        counted = "SELECT tenant, bytes FROM stored WHERE kind = 'responses'"
        rows = database.now(lambda c: c.execute(left).fetchall() + c.execute(counted).fetchall(), writes=False)
        assert rows == [("t", 1, 75), ("u", 1, 10), ("t", 75), ("u", 10)]  # those that had ended are deleted


def test_a_conversation_is_bounded(client, monkeypatch):
    monkeypatch.setattr(responses, "CONVERSATION_BYTES", 3000)
    id = None
    with pytest.raises(openai.APIStatusError) as caught:
        for _ in range(10):
            id = client.responses.create(model="fake", input="a", store=True, previous_response_id=id).id
    assert (caught.value.status_code, caught.value.param) == (413, "previous_response_id")
    large = client.responses.create(model="fake", input="b" * 2000, store=True).output[0].id
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model="fake", input=[{"type": "item_reference", "id": large}])
    assert (caught.value.status_code, caught.value.param) == (413, "input")
    small = {
        "type": "item_reference",
        "id": client.responses.create(model="fake", input="c" * 400, store=True).output[0].id,
    }
    assert client.responses.create(model="fake", input=[small] * 3).status == "completed"
    for call in (client.responses.create, client.responses.input_tokens.count):
        with pytest.raises(openai.APIStatusError) as caught:
            call(model="fake", input=[small] * 100)  # few bytes that would be many
        assert (caught.value.status_code, caught.value.param) == (413, "input")
    assert client.responses.input_items.list(id).data


def test_what_was_answered_outlives_a_kill(start, path, keys):  # noqa: F811
    """The whole of it, and the answer of its Idempotency-Key."""
    headers = bearer(keys[0]) | {"idempotency-key": "k"}
    body = {"input": "one", "store": True}
    process = start("--database", path)
    with process.send(request("POST", PATH, body, headers)) as sock:
        first = read_reply(sock)
    process.popen.kill()
    process = start("--database", path)
    with process.send(request("POST", PATH, body, headers)) as sock:
        assert read_reply(sock).body == first.body
    with process.send(request("GET", f"{PATH}/{first.json['id']}", None, headers)) as sock:
        assert read_reply(sock).json == first.json


def test_they_outlive_the_server(own_server, path, keys):
    stored = own_server(database=path).post(PATH, {"input": "one", "store": True}, bearer(keys[0])).json
    again = own_server(database=path)
    assert again.get(f"{PATH}/{stored['id']}", bearer(keys[0])).json == stored
    assert stored["created_at"] <= time.time() and json.dumps(stored).count("one") == 1
