"""The admin's routes: keys made, changed and ended over HTTP; what they used; what a disk that fails does to them."""

import re
import sqlite3
import time

import pytest
from harness import chat_body, request, rest_of, wait_for
from test_errors import check
from test_stored_keys import bearer, path, zse_keys  # noqa: F401

from zse.server.database import connection, keys
from zse.server.requests import keys as fields

CHAT, KEYS = "/v1/chat/completions", "/admin/keys"
OWNER = bearer("owner")


@pytest.fixture
def admin(own_server, path):  # noqa: F811
    """A server with a database, whose own key is "owner"."""
    return own_server(key="owner", database=path)


def test_a_key_from_its_making_to_its_end(admin, path):  # noqa: F811
    settings = {
        "tenant": "t",
        "models": ["fake"],
        "routes": [CHAT],
        "rpm": 50,
        "expires": time.time() + 600,
        "weight": 2,
    }
    made = admin.post(KEYS, {"name": "a", **settings}, OWNER)
    assert made.status == 200 and made.json["state"] == "valid"
    text = made.json["key"]
    assert re.fullmatch(r"zse-[\w-]{43}", text) and text.startswith(made.json["prefix"])
    assert {name: made.json[name] for name in settings} == settings and "digest" not in made.json
    body = chat_body("hi", max_tokens=4)
    reply = admin.post(CHAT, body, bearer(text))
    assert reply.status == 200 and reply.headers["x-ratelimit-limit-requests"] == "50"
    told = reply.json["usage"]["completion_tokens"]
    assert admin.get("/v1/models", bearer(text)).status == 403 and admin.get(KEYS, bearer(text)).status == 403
    changed = admin.post(f"{KEYS}/update", {"name": "a", "rpm": 7, "clear": ["routes", "expires"]}, OWNER).json
    assert (changed["rpm"], changed["routes"], changed["expires"], changed["models"]) == (7, None, None, ["fake"])
    reply = admin.get("/v1/models", bearer(text))  # at once
    assert reply.status == 200 and reply.headers["x-ratelimit-limit-requests"] == "7"
    stream = admin.connect()
    stream.sendall(request("POST", CHAT, chat_body("!tokens=100000 !ms=5", max_tokens=3000, stream=True), bearer(text)))
    stream.recv(1 << 12)
    fresh = admin.post(f"{KEYS}/rotate", {"name": made.json["prefix"]}, OWNER).json["key"]
    rest = rest_of(stream)
    stream.close()
    assert b'"code":"invalid_api_key"' in rest
    assert [admin.post(CHAT, body, bearer(key)).status for key in (text, fresh)] == [401, 200]
    ended = admin.post(f"{KEYS}/revoke", {"name": "a"}, OWNER).json
    assert ended["state"] == "revoked" and admin.post(CHAT, body, bearer(fresh)).status == 401
    (listed,) = admin.get(KEYS, OWNER).json["data"]
    assert listed == {name: value for name, value in ended.items() if name != "key"}
    wait_for(lambda: sum(row["requests"] for row in used(admin)) == 3)
    (row,) = used(admin, name="a")
    assert (row["tenant"], row["key"], row["model"]) == ("t", "a", "fake")
    assert row["completion_tokens"] > 2 * told  # two answers, and what there was of the stream
    lines = admin.post("/admin/audit", {}, OWNER).json["data"]
    assert [line["action"] for line in lines] == [f"keys.{what}" for what in ("revoke", "rotate", "update", "create")]
    assert {line["actor"] for line in lines} == {"default"} and lines[2]["detail"]["rpm"] == 7
    older = admin.post("/admin/audit", {"last": 1, "before": lines[1]["id"]}, OWNER).json["data"]
    assert older == [lines[2]] and text not in str(lines)
    admin.assert_quiet()


def used(server, **body) -> list[dict]:
    return server.post(f"{KEYS}/usage", body, OWNER).json["data"]


def test_what_is_refused(admin):
    assert admin.post(KEYS, {"name": "a"}, OWNER).status == 200
    check(admin.post(KEYS, {"name": "a"}, OWNER), 409, "conflict", "name")
    for what in ("update", "rotate", "revoke"):
        check(admin.post(f"{KEYS}/{what}", {"name": "none"}, OWNER), 404, "not_found", "name")
    admin.post(f"{KEYS}/revoke", {"name": "a"}, OWNER)
    check(admin.post(f"{KEYS}/rotate", {"name": "a"}, OWNER), 409, "conflict", "name")
    for body, code, param in (
        ({}, "missing_required_parameter", "name"),
        ({"name": "a b"}, "invalid_value", "name"),
        ({"name": "../x"}, "invalid_value", "name"),
        ({"name": "b", "rpm": -1}, "out_of_range", "rpm"),
        ({"name": "b", "weight": 0}, "out_of_range", "weight"),
        ({"name": "b", "routes": ["/metrics"]}, "invalid_value", "routes[0]"),
        ({"name": "b", "expires": "soon"}, "invalid_type", "expires"),
        ({"name": "b", "admin": 1}, "invalid_type", "admin"),
        ({"name": "b", "digest": "x"}, "unknown_parameter", "digest"),
        ({"name": "b", "key": "mine"}, "unknown_parameter", "key"),
    ):
        check(admin.post(KEYS, body, OWNER), 400, code, param)
    check(admin.post(f"{KEYS}/usage", {"by": "week"}, OWNER), 400, "invalid_value", "by")
    check(admin.post("/admin/audit", {"last": 0}, OWNER), 400, "out_of_range", "last")
    check(admin.post(KEYS, b"{}", OWNER | {"content-type": "text/plain"}), 415, "unsupported_media_type", None)
    assert [key["name"] for key in admin.get(KEYS, OWNER).json["data"]] == ["a"]


def test_a_server_without_a_database_says_so(own_server):
    server = own_server(key="owner")
    check(server.get(KEYS, OWNER), 404, "not_found", None)
    check(server.post(KEYS, {"name": "a"}, OWNER), 404, "not_found", None)


def test_the_routes_set_what_the_command_sets():
    assert {*fields.SETTINGS} == {*keys.CHANGEABLE}


def test_a_full_queue_keeps_no_admin_out(own_server, path):  # noqa: F811
    server = own_server(key="owner", database=path, max_choices=1)
    with server.connect() as sock:
        sock.sendall(request("POST", CHAT, chat_body("!stall"), OWNER))
        wait_for(lambda: server.state()["choices"] == 1)
        assert server.post(CHAT, chat_body("hi"), OWNER).status == 503
        assert server.post(KEYS, {"name": "a"}, OWNER).status == 200
    server.assert_quiet()


@pytest.mark.parametrize("text", ["database or disk is full", "disk I/O error", "attempt to write a readonly database"])
def test_a_disk_that_fails_is_told_and_known_keys_go_on(admin, path, monkeypatch, text):  # noqa: F811
    key = admin.post(KEYS, {"name": "a"}, OWNER).json["key"]
    real = connection._commit

    def fails(opened, jobs):
        opened.execute("BEGIN IMMEDIATE")
        for job in jobs:
            job.work(opened)
        raise sqlite3.OperationalError(text)

    monkeypatch.setattr(connection, "_commit", fails)
    for body, where in (({"name": "b"}, KEYS), ({"name": "a"}, f"{KEYS}/revoke"), ({"name": "a"}, f"{KEYS}/rotate")):
        reply = admin.post(where, body, OWNER)
        check(reply, 503, "storage_unavailable", None)
        assert text not in reply.error["message"] and reply.headers["retry-after"] == "5"
    assert admin.post(CHAT, chat_body("hi"), bearer(key)).status == 200
    assert [listed["state"] for listed in admin.get(KEYS, OWNER).json["data"]] == ["valid"]  # reads go on
    monkeypatch.setattr(connection, "_commit", real)
    assert admin.post(KEYS, {"name": "b"}, OWNER).status == 200  # without a restart
    assert admin.post(f"{KEYS}/revoke", {"name": "a"}, OWNER).status == 200
    assert admin.post(CHAT, chat_body("hi"), bearer(key)).status == 401
    wait_for(lambda: sum(row["requests"] for row in used(admin)) == 1)
