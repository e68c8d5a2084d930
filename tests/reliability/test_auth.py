"""Keys: every route with every kind of key, wrong keys, key files, keys that end while they are used, quotas, what strangers see."""

import asyncio
import concurrent.futures
import logging
import os
import random
import time
from functools import partial

import pytest
from harness import chat_body, read_reply, request, rest_of, wait_for

from zse.errors import ConfigError
from zse.server import key_watch
from zse.server.admission import Bucket
from zse.server.auth import MAX_ADDRESSES, WRONG_KEYS_PER_MINUTE, KeyCheck, WrongKeys, network
from zse.server.database import keys as stored_keys
from zse.server.database.connection import Database
from zse.server.errors import APIError
from zse.server.key_watch import KeyWatch
from zse.server.keys import OWNER, Access, Key, Quota, read_file
from zse.server.routes.table import ROUTES
from zse.server.served import ModelSpec

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


MESSAGES = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
PARTS = [("purpose", "user_data"), ("file", "x")]
FORM = "".join(
    f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in PARTS
).encode()
FORM += b"--b--"
# (method, path): scope, a body that works. A route that is not here fails the test.
SCOPES = {
    ("POST", CHAT): ("user", chat_body("a")),
    ("POST", TEXT): ("user", {"prompt": "a"}),
    ("POST", "/v1/embeddings"): ("user", {"input": "a"}),
    ("POST", "/v1/rerank"): ("user", {"query": "a", "documents": ["b"], "method": "embedding"}),
    ("POST", "/v2/rerank"): ("user", {"query": "a", "documents": ["b"], "method": "embedding"}),
    ("POST", "/v1/score"): ("user", {"text_1": "a", "text_2": "b", "method": "embedding"}),
    ("POST", "/tokenize"): ("user", {"prompt": "a"}),
    ("POST", "/detokenize"): ("user", {"tokens": [65]}),
    ("POST", "/v1/responses"): ("user", {"input": "a"}),
    ("POST", "/v1/responses/input_tokens"): ("user", {"input": "a"}),
    ("GET", "/v1/responses/{response}"): ("owned", None),
    ("DELETE", "/v1/responses/{response}"): ("owned", None),
    ("GET", "/v1/responses/{response}/input_items"): ("owned", None),
    ("POST", "/v1/responses/{response}/cancel"): ("owned", None),
    ("POST", "/v1/files"): ("list", FORM),
    ("GET", "/v1/files"): ("list", None),
    ("POST", "/v1/batches"): ("list", {"endpoint": TEXT, "completion_window": "24h"}),
    ("GET", "/v1/batches"): ("list", None),
    ("GET", "/v1/batches/{batch}"): ("owned", None),
    ("POST", "/v1/batches/{batch}/cancel"): ("owned", {}),
    ("GET", "/v1/files/{file}"): ("owned", None),
    ("GET", "/v1/files/{file}/content"): ("owned", None),
    ("DELETE", "/v1/files/{file}"): ("owned", None),
    ("POST", "/v1/rag/documents"): ("unserved", FORM),
    ("GET", "/v1/rag/documents"): ("unserved", None),
    ("GET", "/v1/rag/documents/{document}"): ("unserved", None),
    ("DELETE", "/v1/rag/documents/{document}"): ("unserved", None),
    ("POST", "/v1/rag/search"): ("unserved", {"query": "a"}),
    ("POST", "/v1/rag/ask"): ("unserved", {"query": "a"}),
    ("GET", "/v1/mcp/tools"): ("list", None),
    ("POST", "/v1/mcp/call"): ("owned", {"server_label": "a", "name": "b"}),
    ("GET", "/v1/sessions"): ("list", None),
    ("GET", "/v1/sessions/{session}"): ("owned", None),
    ("DELETE", "/v1/sessions/{session}"): ("owned", None),
    ("GET", "/v1/chats"): ("list", None),
    ("GET", "/v1/chats/{chat}"): ("owned", None),
    ("POST", "/v1/chats/{chat}"): ("owned", {"version": 1}),
    ("DELETE", "/v1/chats/{chat}"): ("owned", None),
    ("POST", "/v1/messages"): ("user", MESSAGES),
    ("POST", "/v1/messages/count_tokens"): ("user", {"model": "fake", "messages": MESSAGES["messages"]}),
    ("POST", "/api/chat"): ("user", {"model": "fake", "messages": MESSAGES["messages"]}),
    ("POST", "/api/generate"): ("user", {"model": "fake", "prompt": "a"}),
    ("POST", "/api/embed"): ("user", {"model": "fake", "input": "a"}),
    ("POST", "/api/embeddings"): ("user", {"model": "fake", "prompt": "a"}),
    ("POST", "/api/show"): ("user", {"model": "fake"}),
    ("GET", "/api/tags"): ("list", None),
    ("GET", "/api/ps"): ("list", None),
    ("GET", "/api/version"): ("public", None),
    ("GET", "/v1/models"): ("list", None),
    ("GET", "/v1/models/{model}"): ("user", None),
    ("GET", "/admin/keys"): ("admin", None),
    ("POST", "/admin/keys"): ("admin", {"name": "new"}),
    ("POST", "/admin/keys/update"): ("admin", {"name": "stored", "weight": 2}),
    ("POST", "/admin/keys/rotate"): ("admin", {"name": "stored-expired"}),
    ("POST", "/admin/keys/usage"): ("admin", {}),
    ("POST", "/admin/audit"): ("admin", {}),
    ("POST", "/admin/keys/revoke"): ("admin", {"name": "stored-revoked"}),
    ("GET", "/admin/adapters"): ("admin", None),
    ("POST", "/admin/adapters"): ("admin", {"name": "new", "path": "/adapter"}),
    ("POST", "/admin/adapters/upload"): ("refused", FORM),
    ("DELETE", "/admin/adapters/{adapter}"): ("missing", None),
    ("POST", "/admin/adapters/unload"): ("admin", {"name": "new"}),
    ("GET", "/admin/logs"): ("admin", None),
    ("GET", "/metrics"): ("admin", None),
    ("GET", "/health"): ("public", None),
    ("GET", "/health/live"): ("public", None),
    ("GET", "/health/ready"): ("public", None),
    ("GET", "/version"): ("public", None),
    ("GET", "/openapi.json"): ("public", None),
    ("GET", "/"): ("public", None),
    ("GET", "/page/{file}"): ("public", None),
    ("GET", "/admin/models"): ("admin", None),
    ("POST", "/admin/models"): ("admin", {"model": "fake"}),
    ("POST", "/admin/models/{model}/load"): ("admin", {}),
    ("POST", "/admin/models/{model}/unload"): ("admin", {}),
    ("POST", "/admin/models/{model}/pull"): ("admin", {}),
    ("POST", "/api/pull"): ("admin", {"model": "fake"}),
    ("DELETE", "/api/delete"): ("admin", {"model": "fake"}),
    ("DELETE", "/admin/models/{model}"): ("admin", None),
}
# Kind of key: status by scope. "other" is another tenant's key, for a model that is not served here.
STATUS = {
    "none": {"public": 200, "list": 401, "user": 401, "admin": 401},
    "bad": {"public": 200, "list": 401, "user": 401, "admin": 401},
    "expired": {"public": 200, "list": 401, "user": 401, "admin": 401},
    "revoked": {"public": 200, "list": 401, "user": 401, "admin": 401},
    "other": {"public": 200, "list": 200, "user": 403, "admin": 403},
    "no routes": {"public": 200, "list": 403, "user": 403, "admin": 403},
    "user": {"public": 200, "list": 200, "user": 200, "admin": 403},
    "admin": {"public": 200, "list": 200, "user": 200, "admin": 200},
}
# Keys of the database, by the kind that they are like.
STORED = {
    "stored": ("user", {}),
    "stored other": ("other", {"models": ["gone"]}),
    "stored no routes": ("no routes", {"routes": []}),
    "stored expired": ("expired", {"expires": 1.0}),
    "stored revoked": ("revoked", {}),
    "stored admin": ("admin", {"admin": True}),
}
# What is a tenant's: nobody has one that is not there.
STATUS = {kind: of | {"owned": 404 if of["list"] == 200 else of["list"]} for kind, of in STATUS.items()}
# This server keeps no documents.
STATUS = {kind: of | {"unserved": 400 if of["list"] == 200 else of["list"]} for kind, of in STATUS.items()}
# Of an admin's key, too: the form is another route's, the adapter is not there.
for _of in STATUS.values():
    _of |= {
        name: status if _of["admin"] == 200 else _of["admin"] for name, status in (("refused", 400), ("missing", 404))
    }
STATUS |= {kind: STATUS[like] for kind, (like, _) in STORED.items()}
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


def test_every_route_with_every_kind_of_key(own_server, tmp_path, monkeypatch):
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    keys = (
        Key("a", "user"),
        Key("b", "other", access=Access(models=frozenset(("gone",)))),
        Key("c", "no routes".replace(" ", "-"), access=Access(routes=frozenset())),
        Key("d", "expired", expires=time.time() - 1),
        Key("d", "revoked"),
        Key("e", "admin", access=OWNER),
    )
    texts = {kind: kind.replace(" ", "-") for kind in STATUS}
    with Database(str(tmp_path / "server.db")) as database:
        for kind, (_, settings) in STORED.items():
            make = partial(stored_keys.create, name=texts[kind], actor="test", **settings)
            texts[kind] = database.now(make)[1]
        database.now(partial(stored_keys.revoke, name="stored-revoked", actor="test"))
    server = own_server(key=keys, database=str(tmp_path / "server.db"))
    server.app.wrong_keys = WrongKeys(1 << 20)
    server.call(lambda: server.watch.give(None, tuple(key for key in keys if key.key != "revoked"), {}))
    made, adapters = iter(range(1000)), []
    assert SCOPES.keys() == {(route.method, route.path) for route in ROUTES}
    found, expected = {}, {}
    said: dict[str, set[bytes]] = {}  # by how the route writes errors
    apis = {(route.method, route.path): route.api for route in ROUTES}
    for path in dict.fromkeys(path for _, path in SCOPES):
        methods = {method: SCOPES[method, path] for method in METHODS if (method, path) in SCOPES}
        scope = next(iter(methods.values()))[0]
        for method in METHODS:
            for kind, statuses in STATUS.items():
                headers = {} if kind == "none" else bearer(texts[kind])
                body = next(iter(methods.values()))[1] if method not in methods else methods[method][1]
                server.call(lambda: server.pool.add(ModelSpec(("fake",), "fake")))  # again, where it was removed
                if (method, path) in (("POST", "/admin/keys"), ("POST", "/admin/adapters")):
                    body = body | {"name": f"new{next(made)}"}
                if path == "/admin/adapters/unload" and kind in ("admin", "stored admin"):
                    body = {"name": adapters.pop() if method == "POST" else "new"}
                sent = body if method == "POST" or method in methods else None
                if (method, path) == ("POST", "/v1/batches"):
                    form = headers | {"content-type": "multipart/form-data; boundary=b"}
                    file = server.post("/v1/files", FORM.replace(b"user_data", b"batch"), form).json
                    sent = body | {"input_file_id": file.get("id", "file-none")}
                if sent is FORM:
                    headers |= {"content-type": "multipart/form-data; boundary=b"}
                if method == "HEAD":
                    headers |= {"connection": "close"}  # the length of what is not sent
                reply = server.raw(
                    request(
                        method,
                        path.replace("{model}", "fake").replace("{file}", "app.js").replace("{chat}", "c"),
                        sent,
                        headers,
                    )
                )
                if (method, path, reply.status) == ("POST", "/admin/adapters", 200):
                    adapters.append(reply.json["name"])
                status = statuses[scope]
                if method not in methods and (method != "HEAD" or "GET" not in methods):
                    status = 405 if scope == "public" or statuses["list"] != 401 else 401
                found[method, path, kind] = reply.status
                expected[method, path, kind] = status
                if reply.status == 401:
                    said.setdefault(apis[next(iter(methods)), path], set()).add(reply.body)
                if reply.status == 405:
                    assert {*methods} <= {*reply.headers["allow"].split(", ")}
    assert found == expected
    assert {len(bodies - {b""}) for bodies in said.values()} == {1}  # no cause is told apart
    for kind in STATUS:
        headers = {} if kind == "none" else bearer(texts[kind])
        assert server.get("/v1/file/../models", headers).status == 404


# Wrong keys


def test_wrong_keys_of_an_address():
    now = [0.0]
    wrong = WrongKeys(clock=lambda: now[0])
    assert WRONG_KEYS_PER_MINUTE == 200

    def tries(address: str, count: int) -> int:
        """How many of them were told that they are wrong."""
        told = 0
        for _ in range(count):
            try:
                wrong.count(address)
                told += 1
            except APIError as error:
                assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "requests")
                assert int(dict(error.headers)["retry-after-ms"]) > 0
        return told

    assert tries("192.0.2.1", 1000) == 200 and tries("192.0.2.2", 1000) == 200
    assert tries("::ffff:192.0.2.1", 10) == 0  # the same address
    assert tries("2001:db8:0:1::1", 150) == 150 and tries("2001:db8:0:1:ffff::2", 150) == 50  # one /64
    assert tries("2001:db8:0:2::1", 300) == 200
    now[0] += 30
    assert tries("192.0.2.1", 1000) == 100
    now[0] += 3600
    assert tries("192.0.2.1", 1000) == 200
    now[0] -= 1800
    assert tries("192.0.2.1", 100) == 0
    assert wrong.num_wrong == 1000 + 1000 + 10 + 300 + 300 + 1000 + 1000 + 100


def test_the_table_of_addresses_is_bounded():
    now = [0.0]
    wrong = WrongKeys(clock=lambda: now[0])
    started = time.process_time()
    refused = 0
    for index in range(100_000):
        try:
            wrong.count(f"2001:db8:{index >> 16:x}:{index & 0xFFFF:x}::1")
        except APIError:
            refused += 1
    assert len(wrong.buckets) == MAX_ADDRESSES
    assert refused == 100_000 - MAX_ADDRESSES - WRONG_KEYS_PER_MINUTE  # all others share one allowance
    assert time.process_time() - started < 5
    now[0] += 61
    wrong.count("192.0.2.1")
    assert len(wrong.buckets) == 1


@pytest.mark.parametrize(
    "address,expected",
    [
        ("127.0.0.1", b"\x7f\0\0\1"),
        ("::ffff:127.0.0.1", b"\x7f\0\0\1"),
        ("::1", bytes(8)),
        ("fe80::1%eth0", b"\xfe\x80" + bytes(6)),
        ("", b""),
        ("/run/zse.sock", b""),
        ("not:an:address", b""),
    ],
)
def test_networks(address, expected):
    assert network(address) == expected


def test_wrong_keys_over_http(own_server):
    server = own_server(key=(Key("a", "right"), Key("w", "watch", access=OWNER)))
    statuses = []
    with server.connect() as sock:
        for index in range(260):
            sock.sendall(request("GET", "/v1/models", None, bearer(f"wrong{index}")))
            reply = read_reply(sock)
            statuses.append(reply.status)
            if index % 20 == 0:
                sock.sendall(request("GET", "/v1/models", None, bearer("right")))
                assert read_reply(sock).status == 200
    count = statuses.count(401)
    assert 200 <= count < 220 and statuses == [401] * 200 + statuses[200:] and statuses.count(429) == 260 - count
    assert (
        reply.error["type"] == "requests" and "retry-after" in reply.headers and "right" not in reply.error["message"]
    )
    assert server.get("/v1/models").status == 401  # no key is no wrong key
    assert server.post(CHAT, chat_body("a"), bearer("right")).status == 200
    assert f"zse_wrong_keys_total {260}\n" in server.get("/metrics", bearer("watch")).body.decode()


def test_thousands_of_keys_take_no_longer_than_one():
    few, many = KeyCheck([Key("a", "k")]), KeyCheck([Key(f"t{index}", f"k{index}") for index in range(4096)])

    def seconds(check: KeyCheck) -> float:
        best = 1e9
        for _ in range(5):
            started = time.process_time()
            for index in range(1000):
                check.find(f"Bearer wrong{index}")
            best = min(best, time.process_time() - started)
        return best

    assert seconds(many) < 4 * seconds(few)
    assert many.find("Bearer k4095")[0] == "t4095" and many.find("bearer  k1")[0] == "t1"


# The key file


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o666, 0o602, 0o610])
def test_a_key_file_of_others_is_refused(tmp_path, mode):
    path, link = tmp_path / "keys", tmp_path / "link"
    path.touch(0o600)
    path.write_text("a sk-hidden\n")
    link.symlink_to(path)
    assert read_file(str(link))[0].tenant == "a"  # a symlink's own mode says nothing
    path.chmod(mode)
    for name in (path, link):
        with pytest.raises(ConfigError) as caught:
            read_file(str(name))
        message = str(caught.value)
        assert f"chmod 600 {name}" in message and f"{mode:04o}" in message
        assert "\n" not in message and "hidden" not in message


def test_a_group_may_read_what_root_owns(tmp_path, monkeypatch):
    """As Kubernetes mounts a secret of mode 0400 for a pod with fsGroup."""
    if os.geteuid():
        pytest.skip("needs a file of root's")
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text("a sk-hidden\n")
    path.chmod(0o440)
    with pytest.raises(ConfigError):
        read_file(str(path))  # root itself needs no group
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert read_file(str(path))[0].tenant == "a"
    for mode in (0o444, 0o460, 0o450):
        path.chmod(mode)
        with pytest.raises(ConfigError):
            read_file(str(path))


def test_keys_from_a_pipe():
    ours, theirs = os.pipe()
    os.write(theirs, b"a sk-a\n")
    os.close(theirs)
    assert read_file(f"/dev/fd/{ours}")[0].tenant == "a"
    os.close(ours)


class Watched:
    """A server whose key file is watched."""

    def __init__(self, own_server, path, text: str, period_s: float, monkeypatch):
        monkeypatch.setattr(key_watch, "PERIOD_S", period_s)
        self.path = path
        path.touch(0o600)
        path.write_text(text)
        keys = read_file(str(path))
        self.server = own_server(key=keys)
        self.watch = KeyWatch(self.server.app, str(path), keys)
        self.task = None

        def start() -> None:
            self.task = asyncio.get_running_loop().create_task(self.watch.run())

        self.server.call(start)

    def close(self) -> None:
        self.server.call(self.task.cancel)

    def replace(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.touch(0o600)
        new.write_text(text)
        new.rename(self.path)

    def status(self, key: str) -> int:
        return self.server.get("/v1/models", bearer(key)).status


@pytest.fixture
def watched(own_server, tmp_path, monkeypatch):
    made = []

    def make(text: str, period_s: float = key_watch.PERIOD_S) -> Watched:
        made.append(Watched(own_server, tmp_path / "keys", text, period_s, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_revoked_key_ends_within_a_second(watched):
    """Its next request on an open connection, and what runs: a stream with an error event, whole answers with 401."""
    assert key_watch.PERIOD_S <= 1
    one = watched("a sk-old\na sk-other\nb sk-b\n")
    server = one.server
    body = chat_body("!tokens=100000 !ms=5", max_tokens=3000)
    streams = {key: server.connect() for key in ("sk-old", "sk-other", "sk-b")}
    for key, sock in streams.items():
        sock.sendall(request("POST", CHAT, body | {"stream": True}, bearer(key)))
        sock.recv(1 << 12)
    whole = server.connect()
    whole.sendall(request("POST", CHAT, body, bearer("sk-old")))
    wait_for(lambda: server.state()["requests"] == 4)
    one.replace("a sk-new\na sk-other\nb sk-b\n")
    revoked = time.monotonic()
    streams["sk-old"].settimeout(3)
    rest = rest_of(streams["sk-old"])
    assert time.monotonic() - revoked < 1.5
    assert b'"code":"invalid_api_key"' in rest and b"[DONE]" not in rest
    assert read_reply(whole).status == 401
    assert [one.status(key) for key in ("sk-old", "sk-new", "sk-other", "sk-b")] == [401, 200, 200, 200]
    assert server.state()["requests"] == 2  # the others' run on
    for sock in (*streams.values(), whole):
        sock.close()
    one.close()
    server.assert_quiet()


def test_a_stream_ends_with_its_key(watched):
    one = watched("a sk-a\nb sk-b\n", 0.1)
    expires = time.time() + 0.6
    keys = (Key("a", "sk-a", expires=expires), Key("b", "sk-b"))
    one.server.call(lambda: one.server.app.replace_keys(keys, {}))
    reply = one.server.post(
        CHAT, chat_body("!tokens=100000 !ms=5", max_tokens=3000, stream=True), bearer("sk-a"), timeout=5
    )
    assert expires <= time.time() < expires + 1
    assert reply.events[-1]["error"]["code"] == "invalid_api_key" and len(reply.events) > 10
    assert [one.status(key) for key in ("sk-a", "sk-b")] == [401, 200]


def test_a_broken_file_changes_nothing_and_is_one_line(watched, caplog):
    caplog.set_level(logging.WARNING, "zse.server")
    one = watched("a sk-a\n", 0.05)

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "the keys stay as they were" in record.getMessage()]

    for count, text in enumerate(("a sk-new extra words\n", "", "a sk-new sk-secret\n"), 1):
        one.replace(text)
        wait_for(lambda count=count: len(told()) >= count)
        time.sleep(0.3)
        assert len(told()) == count, told()
        assert [one.status(key) for key in ("sk-a", "sk-new")] == [200, 401]
    one.path.unlink()
    wait_for(lambda: "No such file" in told()[-1])
    one.path.touch(0o644)
    one.path.write_text("a sk-new\n")
    wait_for(lambda: "chmod 600" in told()[-1])
    assert one.status("sk-a") == 200
    one.path.chmod(0o600)
    wait_for(lambda: one.status("sk-new") == 200)
    assert "sk-" not in caplog.text


def test_a_change_within_one_tick_of_the_files_time_is_seen(watched):
    """Same size, same time: a file that was young when it was read is read again."""
    one = watched("a sk-1\n", 0.05)
    for number in (2, 3):
        stamp = time.time()
        one.path.write_text(f"a sk-{number}\n")
        os.utime(one.path, (stamp, stamp))
        wait_for(lambda number=number: one.status(f"sk-{number}") == 200, 2)


def test_a_file_that_is_at_rest_is_not_read(watched, monkeypatch):
    one = watched("a sk-a\n", 0.05)
    os.utime(one.path, (1e9, 1e9))
    reads = []
    real = key_watch.read_file
    monkeypatch.setattr(key_watch, "read_file", lambda path: reads.append(path) or real(path))
    monkeypatch.setattr(key_watch.KeyWatch, "_file_state", lambda self: (1e9, 7, 0o600, 1, 1))
    time.sleep(0.5)
    assert len(reads) <= 2


# Quotas


def test_a_thousand_parallel_requests(own_server):
    """rpm=60 under a clock that stands still: exactly 60, whatever the routes; then one for each second."""
    server = own_server(key=(Key("a", "ka", None, Quota(rpm=60)),), max_choices=2000)
    now = [time.monotonic() + 100]
    server.call(lambda: setattr(server.app.admission, "clock", lambda: now[0]))

    def some(seed: int) -> list[int]:
        draw, statuses = random.Random(seed), []
        with server.connect() as sock:
            for _ in range(25):
                if draw.random() < 0.5:
                    sock.sendall(request("GET", "/v1/models", None, bearer("ka")))
                else:
                    sock.sendall(request("POST", TEXT, {"prompt": "a", "max_tokens": 1}, bearer("ka")))
                statuses.append(read_reply(sock).status)
        return statuses

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        statuses = [status for part in pool.map(some, range(40)) for status in part]
    assert len(statuses) == 1000 and statuses.count(200) == 60 and statuses.count(429) == 940
    now[0] += 3.0
    assert some(99).count(200) == 3


def test_no_clock_that_jumps_moves_a_quota(own_server, monkeypatch):
    """NTP, a suspended machine, a wrong date: quotas and wrong keys go by the monotonic clock."""
    server = own_server(key=(Key("a", "ka", None, Quota(rpm=5)), Key("b", "kb", expires=time.time() + 600)))
    real, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])
    passed = 0
    for jump[0] in (0.0, 3600.0, -3600.0, 0.5, 1e9, 0.0):
        passed += [server.get("/v1/models", bearer("ka")).status for _ in range(4)].count(200)
    assert passed == 5


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_never_gives_more_than_its_rate(seed):
    """Random amounts at random times of a clock that also stands still and jumps: what passes within any time is at most a
    full bucket and what flowed in."""
    draw = random.Random(seed)
    now, rate = 0.0, draw.choice((1, 7, 60, 1000))
    bucket, taken, latest = Bucket(rate, now), [], 0.0
    for _ in range(600):
        now += draw.choice((0.0, 0.001, 0.5, 30.0, 3600.0, -1.0, -3600.0)) * draw.random()
        latest = max(latest, now)
        amount = draw.choice((1, 1, rate / 3, rate))
        if bucket.wait_s(amount, now) <= 0:
            bucket.level -= amount
            taken.append((latest, amount))
    for first, (start, _) in enumerate(taken):
        total = 0.0
        for at, amount in taken[first:]:
            total += amount
            assert total <= rate + (at - start) * rate / 60 + 1e-6
    assert bucket.wait_s(1, latest + 60) <= 0  # nobody is locked out


# What strangers see


def test_readiness_says_little_to_strangers(own_server):
    server = own_server(key=(Key("a", "user"), Key("w", "watch", access=OWNER)))
    proxied = {"x-forwarded-for": "192.0.2.7"}
    full = server.get("/health/ready").json
    assert full["status"] == "ready" and "last_step_age_s" in full and "waiting" in full
    for headers in (proxied, proxied | bearer("user"), proxied | bearer("wrong"), {"via": "1.1 x"} | bearer("user")):
        for path in ("/health/ready", "/health"):
            reply = server.get(path, headers)
            assert reply.status == 200 and reply.json == {"status": "ready"}
    assert server.get("/health/ready", proxied | bearer("watch")).json.keys() == full.keys()
    server.call(lambda: setattr(server.app, "draining", True))
    try:
        stranger, local = server.get("/health/ready", proxied), server.get("/health/ready")
        assert stranger.status == local.status == 503 and stranger.headers["retry-after"] == "1"
        assert stranger.json.keys() == {"status", "error"} and stranger.error["message"] == "Not ready."
        assert "shutting down" in local.error["message"]
    finally:
        server.call(lambda: setattr(server.app, "draining", False))


def test_an_address_that_is_not_this_machines_is_a_stranger(own_server):
    server = own_server(key=(Key("a", "user"),))
    with server.connect() as sock:
        sock.sendall(request("GET", "/health/live"))
        read_reply(sock)
        for address, knows in (("192.0.2.7", False), ("::ffff:127.0.0.1", True), ("::1", True), ("2001:db8::1", False)):
            server.call(lambda address=address: [setattr(one, "client", address) for one in server.server.connections])
            sock.sendall(request("GET", "/health/ready"))
            assert ("steps" in read_reply(sock).json) is knows
