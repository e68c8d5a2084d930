"""The web page's chats on the server: versions, lists and searches, tenants, what is refused, room."""

from functools import partial

import pytest
from harness import request
from test_stored_keys import bearer
from test_stored_responses import keys, path  # noqa: F401

from zse.server.database import chats
from zse.server.database.connection import Database

PATH = "/v1/chats"
ROOT = {"parent": -1, "role": "root"}


@pytest.fixture
def server(own_server, path, keys):  # noqa: F811
    return own_server(database=path)


@pytest.fixture
def me(keys):  # noqa: F811
    return bearer(keys[0])


def tree(*texts: str) -> list[dict]:
    return [ROOT, *({"parent": number, "role": "user", "content": text} for number, text in enumerate(texts))]


def test_versions_tell_who_was_first(server, me):
    answer = {"parent": 1, "role": "assistant", "content": "<b>", "model": "fake", "usage": {"completion_tokens": 3}}
    again = answer | {"reasoning": "r", "calls": [{"id": "c", "name": "f", "arguments": "{"}], "first_ms": 1.5}
    messages = [ROOT, {"parent": 0, "role": "user", "content": "hi", "shown": 1}, answer, again]
    made = server.post(f"{PATH}/a-1", {"version": 0, "title": "<i>T", "messages": messages}, me).json
    assert (made["id"], made["object"], made["version"], made["title"]) == ("a-1", "chat", 1, "<i>T")
    found = server.get(f"{PATH}/a-1", me).json
    assert found["version"] == 1 and [{"shown": 0} | message for message in messages] == [
        {name: value for name, value in message.items() if name != "usage"}
        | ({"usage": {"completion_tokens": 3}} if "usage" in message else {})
        for message in found["messages"]
    ]
    renamed = server.post(f"{PATH}/a-1", {"version": 1, "title": "U"}, me).json
    assert (renamed["version"], renamed["title"], renamed["bytes"]) == (2, "U", made["bytes"])
    for version in (0, 1, 3):  # of another tab
        reply = server.post(f"{PATH}/a-1", {"version": version, "messages": tree("x")}, me)
        assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (409, "conflict", "false")
    assert server.post(f"{PATH}/a-1", {"version": 2, "messages": tree("x")}, me).json["title"] == "U"
    assert server.raw(request("DELETE", f"{PATH}/a-1", None, me)).json["deleted"] is True
    for reply in (
        server.get(f"{PATH}/a-1", me),
        server.raw(request("DELETE", f"{PATH}/a-1", None, me)),
        server.post(f"{PATH}/a-1", {"version": 3, "title": "x"}, me),
    ):
        assert (reply.status, reply.error["code"]) == (404, "not_found")


def test_lists_have_pages_and_searches(server, me):
    for id, title in (("a", "Über 100%"), ("b", "under"), ("c", "ÜBER_x"), ("d", "")):
        assert server.post(f"{PATH}/{id}", {"version": 0, "title": title, "messages": tree("x")}, me).status == 200

    def ids(query: str) -> str:
        return "".join(row["id"] for row in server.get(f"{PATH}?{query}", me).json["data"])

    assert (
        server.post(f"{PATH}/d", {"version": 1, "title": "renamed"}, me).status == 200
    )  # which is no reason to go first
    assert server.post(f"{PATH}/a", {"version": 1, "messages": tree("y")}, me).status == 200
    page = server.get(f"{PATH}?limit=3", me).json
    assert [row["id"] for row in page["data"]] == ["a", "d", "c"] and page["has_more"]
    assert ids(f"limit=3&after={page['last_id']}") == "b" and ids("after=b") == ""
    assert (
        ids("search=%C3%BCber") == "ac"
        and ids("search=%25") == "a"
        and ids("search=_") == "c"
        and ids("search=zz") == ""
    )
    assert ids("search=%C3%BCber&after=a") == "c"
    for query, param in (("after=z", "after"), ("search=" + "x" * 201, "search"), ("x=1", "x")):
        assert server.get(f"{PATH}?{query}", me).error["param"] == param


def test_tenants_do_not_see_each_others(server, keys, me):  # noqa: F811
    server.post(f"{PATH}/a", {"version": 0, "title": "mine", "messages": tree("x")}, me)
    other = bearer(keys[2])
    assert server.get(f"{PATH}/a", other).body == server.get(f"{PATH}/none", other).body
    assert server.raw(request("DELETE", f"{PATH}/a", None, other)).status == 404
    assert server.post(f"{PATH}/a", {"version": 1, "title": "x"}, other).status == 404
    assert server.get(PATH, other).json["data"] == []
    assert server.post(f"{PATH}/a", {"version": 0, "title": "theirs"}, other).json["version"] == 1  # one of their own
    assert server.get(f"{PATH}/a", bearer(keys[1])).json["title"] == "mine"  # another key of the tenant


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "version"),
        ({"version": -1}, "version"),
        ({"version": 0, "title": "x" * 201}, "title"),
        ({"version": 0, "messages": []}, "messages"),
        ({"version": 0, "messages": [ROOT | {"parent": 0}]}, "messages[0]"),
        ({"version": 0, "messages": [{"parent": -1, "role": "user"}]}, "messages[0]"),
        ({"version": 0, "messages": [ROOT, ROOT]}, "messages[1]"),
        ({"version": 0, "messages": [ROOT, {"parent": 1, "role": "user"}]}, "messages[1]"),
        (
            {"version": 0, "messages": [ROOT, {"parent": 2, "role": "user"}, {"parent": 1, "role": "user"}]},
            "messages[1]",
        ),
        ({"version": 0, "messages": [ROOT | {"shown": 1}, {"parent": 0, "role": "user"}]}, "messages[0].shown"),
        ({"version": 0, "messages": [ROOT, {"parent": 0, "role": "user", "content": {}}]}, "messages[1].content"),
        ({"version": 0, "messages": [ROOT, {"parent": 0, "role": "user", "__proto__": {}}]}, "messages[1].__proto__"),
        ({"version": 0, "messages": [ROOT, {"parent": 0, "role": "tool", "usage": {"x": 1}}]}, "messages[1].usage.x"),
    ],
)
def test_refused(server, me, body, param):
    reply = server.post(f"{PATH}/a", body, me)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert server.get(PATH, me).json["data"] == []


def test_names_and_databases_that_are_refused(server, me, own_server):
    for name in ("a%2Fb", "x" * 65, "%C3%BC", "a b".replace(" ", "%20")):
        assert server.post(f"{PATH}/{name}", {"version": 0}, me).status == 400
    bare = own_server()
    delete = bare.raw(request("DELETE", f"{PATH}/a"))
    for reply in (bare.get(PATH), bare.get(f"{PATH}/a"), bare.post(f"{PATH}/a", {"version": 0}), delete):
        assert reply.status == 400 and "--database" in reply.error["message"]


def test_room_is_made_by_the_oldest_and_for_one_tenant(path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(chats, "MOST_BYTES", 30)
    with Database(path) as database:

        def store(tenant: str, id: str, version: int, now: float, size: int = 10) -> None:
            values = dict(tenant=tenant, id=id, version=version, title="t", body=size * b"x", now=now)
            database.now(partial(chats.store, **values))

        def there(tenant: str) -> str:
            rows = database.now(lambda c: chats.listed(c, tenant, 100, None, ""), writes=False)
            return "".join(card.id for card in rows)

        for number, id in enumerate("abc"):
            store("t", id, 0, float(number))
            store("u", id, 0, float(number))
        store("t", "a", 1, 3.0)
        store("t", "d", 0, 4.0)
        assert there("t") == "dac" and there("u") == "cba"
        with pytest.raises(Exception, match="at most 30"):
            store("t", "a", 2, 5.0, size=31)
        store("t", "a", 2, 5.0, size=25)
        assert there("t") == "a" and there("u") == "cba"
        counted = "SELECT tenant, bytes FROM stored WHERE kind = 'chats'"
        assert database.now(lambda c: dict(c.execute(counted)), writes=False) == {"t": 25, "u": 30}
