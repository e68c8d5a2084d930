"""Keys of several tenants: who is who, whose share of the queue is whose, and that nobody learns of the others."""

import json
import os
import select

import pytest
from harness import Admitted, chat_body, fixed_bounds, read_reply, request, wait_for

from zse.errors import ConfigError
from zse.http.listener import Limits
from zse.server.admission import AdmissionControl
from zse.server.auth import SECRET_FILE, CacheSalts, KeyCheck, kept_secret
from zse.server.errors import APIError
from zse.server.keys import OWNER, USER_ROUTES, Access, Caller, Key, Quota, quotas, read_file, weights
from zse.server.routes.table import ROUTES
from zse.server.work import OTHERS, Tenants

CHAT = "/v1/chat/completions"
KEYS = (Key("alice", "sk-alice"), Key("bob", "sk-bob"), Key("alice", "sk-new"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_file(tmp_path):
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text("# who may\n\nalice sk-a\nbob\tsk-b 2.5\n  alice sk-c\nc k 2 rpm=60 tpm=9\nd j concurrency=4\n")
    keys = read_file(str(path))
    assert keys == (
        Key("alice", "sk-a"),
        Key("bob", "sk-b", 2.5),
        Key("alice", "sk-c"),
        Key("c", "k", 2, Quota(60, 9)),
        Key("d", "j", None, Quota(concurrency=4)),
    )
    assert weights(keys) == {"alice": 1.0, "bob": 2.5, "c": 2, "d": 1.0} and "sk-" not in repr(keys)
    assert weights(keys, {"alice": 3.0, "bob": 3.0}) == {"alice": 3.0, "bob": 2.5, "c": 2, "d": 1.0}
    assert quotas(keys) == {"c": Quota(60, 9), "d": Quota(concurrency=4)}
    path.write_text("a rpm\nb a=b==\n", "utf-8-sig")
    assert [key.key for key in read_file(str(path))] == ["rpm", "a=b=="]
    path.write_text("s3cret\n")
    assert read_file(str(path)) == (Key("default", "s3cret"),)
    path.write_text(
        "a k admin\na j models=m,n routes=/v1/score,/v1/models/{model} expires=2027-01-31\n"
        "b l 2 expires=2027-01-31T12:30Z rpm=3 admin\n"
    )
    assert read_file(str(path)) == (
        Key("a", "k", access=OWNER),
        Key(
            "a",
            "j",
            access=Access(False, frozenset("mn"), frozenset(("/v1/score", "/v1/models/{model}"))),
            expires=1801353600.0,
        ),
        Key("b", "l", 2, Quota(3), OWNER, 1801353600.0 + 12.5 * 3600),
    )
    assert sorted({route.path for route in ROUTES if route.scope == "user"}) == USER_ROUTES


@pytest.mark.parametrize(
    "text,part",
    [
        ("", "no key in it"),
        ("# a\n", "no key in it"),
        ("a b 1 1", "line 1: not NAME KEY"),
        ("a b xyz=1", "line 1: not NAME KEY"),
        ("a b rpm=1 rpm=2", "line 1: not NAME KEY"),
        ("a b rpm=0", "line 1: rpm must"),
        ("a b tpm=-1", "line 1: tpm must"),
        ("a b tpm=1e9", "line 1: tpm must"),
        ("a b rpm=10000000000", "line 1: rpm must"),
        ("a b admin admin", "line 1: not NAME KEY"),
        ("a b models=", "line 1: models must"),
        ("a b models=x,", "line 1: models must"),
        ("a b models=x models=y", "line 1: not NAME KEY"),
        ("a b routes=/metrics", "line 1: routes must"),
        ("a b routes=/v1/chat", "line 1: routes must"),
        ("a b expires=tomorrow", "line 1: expires must"),
        ("a b expires=2027-02-30", "line 1: expires must"),
        ("a b expires=2027-01-01 expires=2028-01-01", "line 1: not NAME KEY"),
        ("a k rpm=1\na j", "line 2: a has another weight or quota"),
        ("a b\na/b c", "line 2: the name"),
        ("a b 0", "line 1: the weight"),
        ("a b nan", "line 1: the weight"),
        ("a b x", "line 1: the weight"),
        ("a b 1001", "line 1: the weight"),
        ("a k\nb k", "line 2: this key"),
        ("a k 1\na j 2", "line 2: a has another weight"),
        ("a \x01", "line 1: a key must"),
        ("k admin", "line 1: the second word is no key"),
        ("k # mine", "line 1: the second word is no key"),
        ("k #mine", "line 1: the second word is no key"),
        ("k rpm=60", "line 1: the second word is no key"),
        ("k 2.5", "line 1: the second word is no key"),
        ("a ké", "line 1: a key must"),
        ("a " + "k" * 4097, "line 1: a key must"),
        ("\n".join(f"t{i} k{i}" for i in range(4097)), "line 4097: more than 4096"),
        (" " * (1 << 20) + "k", "larger than"),
    ],
)
def test_a_bad_key_file_is_one_line_without_the_key(tmp_path, text, part):
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_file(str(path))
    assert part in str(caught.value) and "\n" not in str(caught.value)
    assert not any(word in str(caught.value).split() for word in ("k", "j", "ké"))


def test_keys_name_their_tenant():
    check = KeyCheck(KEYS)
    assert [check.check(f"Bearer {key.key}")[0] for key in KEYS] == ["alice", "bob", "alice"]
    for wrong in (None, "", "Bearer", "Bearer sk-ali", "Bearer sk-alicee", "Basic sk-alice", "sk-alice", "Bearer \xff"):
        with pytest.raises(APIError):
            check.check(wrong)
    assert KeyCheck().check(None) == Caller("", OWNER)


def test_a_key_that_has_expired_is_no_key():
    now = [1000.0]
    check = KeyCheck((Key("a", "sk-a", expires=1000.5), Key("a", "sk-b")), lambda: now[0])
    assert check.check("Bearer sk-a")[0] == "a"
    refusals = []
    for now[0], key in ((1000.5, "sk-a"), (0.0, "sk-none")):
        with pytest.raises(APIError) as caught:
            check.check(f"Bearer {key}")
        refusals.append((caught.value.status, caught.value.code, caught.value.message))
    assert refusals[0] == refusals[1] and refusals[0][0] == 401
    now[0] = 1e12
    assert check.check("Bearer sk-b")[0] == "a"


def test_what_a_key_may_do(own_server):
    """Every kind of key at what it may not do: 403, and nothing about what there is."""
    server = own_server(
        key=(
            Key("owner", "owner", access=OWNER),
            Key("a", "user"),
            Key("b", "embed", access=Access(routes=frozenset(("/v1/embeddings",)))),
            Key("c", "fake", access=Access(models=frozenset(("fake", "gone")))),
            Key("d", "other", access=Access(models=frozenset(("gone",)))),
        )
    )

    def status(key: str, path: str, body=None) -> tuple[int, str | None]:
        reply = server.get(path, bearer(key)) if body is None else server.post(path, body, bearer(key))
        if reply.status == 403:
            assert reply.error["type"] == "permission_error" and reply.headers["x-should-retry"] == "false"
        return reply.status, reply.error["code"] if reply.status >= 400 else None

    denied = 403, "insufficient_permissions"
    assert status("owner", "/metrics") == (200, None)
    for key in ("user", "embed", "fake", "other"):
        assert status(key, "/metrics") == denied
    embed = {"input": "a"}
    assert status("embed", "/v1/embeddings", embed) == status("user", "/v1/embeddings", embed) == (200, None)
    for path, body in ((CHAT, chat_body("a")), ("/v1/models", None), ("/v1/models/fake", None), ("/v1/score", {})):
        assert status("embed", path, body) == denied
    assert status("fake", CHAT, chat_body("a")) == status("fake", "/v1/embeddings", embed) == (200, None)
    for name in ("fake", "nothing"):  # one that is served and one that is not look alike
        assert status("other", CHAT, chat_body("a", model=name)) == denied
        assert status("other", f"/v1/models/{name}") == denied
    assert status("other", CHAT, chat_body("a")) == denied and status("other", "/v1/embeddings", embed) == denied
    assert (
        status("other", "/v1/models/gone")
        == status("fake", CHAT, chat_body("a", model="gone"))
        == (404, "model_not_found")
    )
    assert status("fake", "/v1/models/else") == denied and status("user", "/v1/models/else") == (404, "model_not_found")
    listed = {key: len(server.get("/v1/models", bearer(key)).json["data"]) for key in ("user", "fake", "other")}
    assert listed == {"user": 1, "fake": 1, "other": 0}


def test_usage_of_a_bounded_number_of_tenants():
    tenants = Tenants(2)
    for name in ("a", "b", "c", "d", "a"):
        tenants[name].requests += 1
        tenants[name].limited += name == "d"
    assert {name: usage.requests for name, usage in tenants.items()} == {"a": 2, "b": 1, OTHERS: 2}
    assert tenants[OTHERS].limited == 1


def test_metrics_by_tenant(own_server):
    server = own_server(key=(*KEYS, Key("owner", "own", access=OWNER)))
    for key, count in (("sk-alice", 3), ("sk-new", 1), ("sk-bob", 2)):
        for _ in range(count):
            assert server.post(CHAT, chat_body("abc"), bearer(key)).status == 200
    server.post("/v1/embeddings", {"input": [65, 66]}, bearer("sk-bob"))
    server.post(CHAT, chat_body("abc"), bearer("wrong"))
    server.assert_quiet()
    page = server.get("/metrics", bearer("own")).body.decode()
    found = dict(line.rpartition(" ")[::2] for line in page.splitlines() if line.startswith("zse_tenant_"))
    assert found['zse_tenant_requests_total{tenant="alice"}'] == "4"
    assert found['zse_tenant_requests_total{tenant="bob"}'] == "3"
    assert found['zse_tenant_completion_tokens_total{tenant="alice"}'] == "16"
    prompt = int(found['zse_tenant_prompt_tokens_total{tenant="alice"}'])
    assert int(found['zse_tenant_prompt_tokens_total{tenant="bob"}']) == prompt // 2 + 2
    assert found['zse_tenant_requests_refused_total{tenant="bob"}'] == "0" and "sk-" not in page


def test_salts_differ_by_tenant_and_by_the_clients_salt():
    salts = CacheSalts(b"secret")
    pairs = [("a", ""), ("b", ""), ("a", "x"), ("b", "x"), ("", "ax"), ("ax", ""), ("", "")]
    made = [salts.salt(*pair) for pair in pairs]
    assert len(set(made)) == len(pairs) and made == [salts.salt(*pair) for pair in pairs]
    assert made == [CacheSalts(b"secret").salt(*pair) for pair in pairs]
    assert CacheSalts().salt("a") != CacheSalts().salt("a")


def test_a_secret_is_kept_for_a_cache_that_is_kept(tmp_path):
    folder = tmp_path / "cache"
    made = {kept_secret(str(folder))}
    secret = folder / SECRET_FILE
    assert made == {kept_secret(str(folder))} == {secret.read_bytes()} and len(secret.read_bytes()) == 32
    assert os.listdir(folder) == [SECRET_FILE] and secret.stat().st_mode & 0o777 == 0o600
    for damage, part in (
        (lambda: secret.chmod(0o640), "read by others"),
        (lambda: secret.write_bytes(b"x"), "damaged"),
    ):
        secret.chmod(0o600)
        damage()
        with pytest.raises(ConfigError) as caught:
            kept_secret(str(folder))
        assert part in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        kept_secret(str(tmp_path / "file"))


def test_a_cache_that_can_be_kept_nowhere_is_told_by_its_option(tmp_path):
    (tmp_path / "file").touch()
    for folder, reason in (("file", "is no folder"), ("file/below", "Not a directory")):
        with pytest.raises(ConfigError, match=f"^--cache-disk {tmp_path / folder}: {reason}$"):
            kept_secret(str(tmp_path / folder))


def test_each_request_reaches_the_engine_with_its_tenant(own_server):
    server = own_server(key=KEYS)
    seen = []
    link = server.engine._link
    send, link.send = link.send, lambda message: (seen.append(message), send(message))
    for key, fields in (("sk-alice", {}), ("sk-bob", {}), ("sk-new", {}), ("sk-alice", {"cache_salt": "x"})):
        for path, body in (
            (CHAT, chat_body("hi", **fields)),
            ("/v1/completions", {"prompt": "hi", "stream": True, **fields}),
        ):
            assert server.post(path, body, bearer(key)).status == 200
    found = [(message.options.tenant, message.options.cache_salt) for message in seen if hasattr(message, "prompt")]
    assert [tenant for tenant, _ in found] == ["alice", "alice", "bob", "bob"] + ["alice"] * 4
    alice, bob, again, salted = (found[index][1] for index in (0, 2, 4, 6))
    assert alice == again and len({alice, bob, salted}) == 3 and all(salt for _, salt in found)


def reserve(queue: AdmissionControl, choices: int, tokens: int, tenant: str):
    return Admitted(queue, tenant).reserve(choices, tokens)


def test_shares_of_the_queue():
    """Half is kept by weight (a 1, b 3: 10 and 30 of 80), the rest is for whoever comes."""
    queue = AdmissionControl(fixed_bounds(80, 8000), {"a": 1.0, "b": 3.0})

    def fill(tenant: str) -> int:
        count = 0
        while True:
            try:
                reserve(queue, 1, 1, tenant)
            except APIError as error:
                assert (error.status, error.code) == (503, "overloaded")
                return count
            count += 1

    assert fill("a") == 80 - 30 and fill("b") == 30 and fill("a") == 0
    queue = AdmissionControl(fixed_bounds(80, 8000), {"a": 1.0, "b": 3.0})
    assert fill("b") == 70 and fill("a") == 10 and queue.choices == 80
    alone = AdmissionControl(fixed_bounds(80, 8000), {"a": 1.0})
    for _ in range(80):
        reserve(alone, 1, 1, "a")
    with pytest.raises(APIError):
        reserve(alone, 1, 0, "a")


def test_shares_of_the_queued_tokens():
    queue = AdmissionControl(fixed_bounds(1000, 1000), {"a": 1.0, "b": 1.0})
    first = reserve(queue, 1, 700, "a")
    with pytest.raises(APIError):
        reserve(queue, 1, 100, "a")  # 250 are kept for b
    ticket = reserve(queue, 1, 5000, "b")  # its only one
    for tenant in ("a", "b", "stranger"):
        with pytest.raises(APIError):
            reserve(queue, 1, 1, tenant)
    ticket.hold(1, 0)
    reserve(queue, 1, 40, "a")
    first.leave(0)
    first.leave(0)
    ticket.leave(0)
    assert (queue.choices, queue.queued_tokens) == (1, 40)
    held = {name: (tenant.choices, tenant.queued) for name, tenant in queue.tenants.items()}
    assert held.pop("a") == (1, 40) and set(held.values()) == {(0, 0)}


def test_a_flood_leaves_room_for_others(own_server):
    server = own_server(key=(KEYS[0], Key("bob", "sk-bob", access=OWNER)), max_choices=16)
    held = []
    for _ in range(14):
        sock = server.connect()
        sock.sendall(request("POST", CHAT, chat_body("!stall"), bearer("sk-alice")))
        held.append(sock)
    wait_for(lambda: server.state()["choices"] == 12)  # 16, and 4 kept for bob
    refused = server.post(CHAT, chat_body("hi"), bearer("sk-alice"))
    assert refused.status == 503 and refused.headers["retry-after"] and "bob" not in refused.error["message"]
    assert server.post(CHAT, chat_body("hi"), bearer("sk-bob")).json["choices"][0]["message"]["content"] == "hi"
    assert sum(read_reply(sock).status == 503 for sock in held[12:]) == 2
    for sock in held:
        sock.close()
    server.assert_quiet()
    page = server.get("/metrics", bearer("sk-bob")).body.decode()
    assert "zse_requests_refused_total 3\n" in page and "sk-" not in page
    assert 'zse_tenant_requests_refused_total{tenant="alice"} 3\n' in page
    assert 'zse_tenant_requests_refused_total{tenant="bob"} 0\n' in page


def test_one_key_s_bodies_leave_room_for_the_others(own_server):
    """36 connections that each trickled a body of 2 MiB gave everybody else 503 for a minute."""
    keys = (KEYS[0], KEYS[1])
    server = own_server(key=keys, limits=Limits(body_bytes=1 << 16, all_bodies_bytes=1 << 18))
    head = request("POST", CHAT, b" " * (1 << 16), bearer("sk-alice"))[: -(1 << 16)]
    held = []
    for _ in range(12):
        held.append(server.connect())
        held[-1].sendall(head + b" " * 60_000)
    wait_for(lambda: len(server.call(lambda: set(server.server.connections))) == 12)
    wait_for(lambda: server.server.bodies.total >= 2 * 60_000)
    refused = [sock for sock in held if select.select([sock], [], [], 0.5)[0]]
    assert len(refused) >= 8 and all(read_reply(sock).status == 503 for sock in refused)
    assert server.post(CHAT, json.dumps(chat_body("hi")).encode() + b" " * 20_000, bearer("sk-bob")).status == 200
    for sock in held:
        sock.close()
    server.assert_quiet()


def test_a_large_body_is_not_read_for_a_request_that_is_refused(own_server):
    server = own_server(key=(Key("alice", "sk-alice", quota=Quota(rpm=1)),))
    assert server.post(CHAT, chat_body("hi"), bearer("sk-alice")).status == 200
    with server.connect() as sock:
        sock.sendall(request("POST", CHAT, b" " * (1 << 20), bearer("sk-alice"))[: -(1 << 20)])
        reply = read_reply(sock)
        assert reply.status == 429 and reply.headers["retry-after"] and reply.headers["connection"] == "close"
    server.assert_quiet()


def metrics(server) -> dict[str, float]:
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_count_what_requests_did(own_server):
    server = own_server()
    server.chat("abc")  # 3 tokens and the end token
    server.chat("abcdef", stream=True, n=2, max_tokens=2)
    server.complete("!cached " + "a" * 32, max_tokens=1)
    assert server.chat("!nan=0").status == 500
    assert server.chat("").status == 200
    sock = server.connect()
    sock.sendall(request("POST", CHAT, chat_body("!tokens=1000 !ms=5", stream=True)))
    sock.recv(1000)
    sock.close()
    server.assert_quiet()
    found = metrics(server)
    assert not any(name.startswith("zse_tenant_") for name in found)  # nobody's key is no tenant
    model = 'model="fake"'
    reasons = {
        reason: found.get(f'zse_answers_total{{{model},reason="{reason}"}}')
        for reason in ("stop", "length", "error", "cancelled")
    }
    assert reasons == {"stop": 2, "length": 3, "error": 1, "cancelled": 1}
    assert found[f"zse_cached_prompt_tokens_total{{{model}}}"] == 32
    tokens = found[f"zse_completion_tokens_total{{{model}}}"]
    assert tokens > 4 + 4 + 1 + 1  # and some of the client that left
    assert found[f"zse_time_to_first_token_seconds_count{{{model}}}"] == 5
    assert found[f"zse_request_seconds_count{{{model}}}"] == 6
    assert found[f"zse_time_between_tokens_seconds_count{{{model}}}"] == tokens - 6  # but the first of each answer
    for name in ("zse_time_to_first_token_seconds", "zse_time_between_tokens_seconds", "zse_request_seconds"):
        buckets = [value for line, value in found.items() if line.startswith(name + "_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == found[f"{name}_count{{{model}}}"]
    assert found['zse_http_responses_total{route="/v1/chat/completions",status="500"}'] == 1
    assert found['zse_http_responses_total{route="/v1/completions",status="200"}'] == 1


def test_answers_carry_fingerprint_tier_and_usage(server):
    whole = server.chat("hi", service_tier="auto", seed=3).json
    assert whole["service_tier"] == "default" and whole["system_fingerprint"].startswith("fp_")
    assert "service_tier" not in server.chat("hi").json
    for chat in (True, False):
        ask = server.chat if chat else server.complete
        *events, last, done = ask("hi", stream=True, stream_options={"include_usage": True}).events
        assert done == "[DONE]" and last["choices"] == []
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert {event["system_fingerprint"] for event in [*events, last]} == {whole["system_fingerprint"]}
        assert all(event["usage"] is None for event in events)
