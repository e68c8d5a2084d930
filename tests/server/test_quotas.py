"""Quotas of keys: exact under a virtual clock, told in headers, settled with what was used."""

import concurrent.futures
import contextlib
import random

import openai
import pytest
from harness import Admitted, chat_body, fixed_bounds, request, wait_for
from test_errors import check

from zse.server.admission import KEPT_SHARE, AdmissionControl
from zse.server.errors import APIError
from zse.server.keys import OWNER, Key, Quota

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def limiter(**quota) -> tuple[AdmissionControl, Clock, str]:
    clock = Clock()
    return (AdmissionControl(fixed_bounds(1 << 20, 1 << 20), {}, {"a": Quota(**quota)}, clock), clock, "a")


def passes(limiter: AdmissionControl, of, count: int) -> int:
    passed = 0
    for _ in range(count):
        try:
            Admitted(limiter, of)
            passed += 1
        except APIError as error:
            assert (error.status, error.type, error.code) == (429, "requests", "rate_limit_exceeded")
    return passed


def test_requests_a_minute():
    limits, clock, of = limiter(rpm=60)
    assert passes(limits, of, 1000) == 60
    clock.now += 0.5
    assert passes(limits, of, 10) == 0
    clock.now += 0.5
    assert passes(limits, of, 10) == 1
    clock.now += 30
    assert passes(limits, of, 1000) == 30
    clock.now += 3600
    assert passes(limits, of, 1000) == 60
    clock.now -= 3600  # a clock that jumps back neither unlocks nor locks out for ever
    assert passes(limits, of, 1000) == 0
    clock.now += 3600 + 1
    assert passes(limits, of, 1000) == 1
    assert passes(limits, "b", 1000) == 1000


def test_the_wait_is_told_and_is_enough():
    limits, clock, of = limiter(rpm=7)
    for _ in range(30):
        try:
            Admitted(limits, of)
        except APIError as error:
            headers = dict(error.headers)
            wait_ms = int(headers["retry-after-ms"])
            assert 0 < wait_ms <= 1000 * int(headers["retry-after"])
            clock.now += wait_ms / 1000 + 0.001
            passed = Admitted(limits, of)
    assert dict(passed.request.more_headers)["x-ratelimit-limit-requests"] == "7"


def test_tokens_are_reserved_and_settled():
    limits, clock, of = limiter(tpm=1000)
    first = Admitted(limits, of)
    first.reserve(1, 0, 800)
    with pytest.raises(APIError) as caught:
        Admitted(limits, of).reserve(1, 0, 300)
    assert (caught.value.type, caught.value.status) == ("tokens", 429)
    assert int(dict(caught.value.headers)["retry-after"]) == 6  # 100 tokens at 1,000 a minute
    first.leave(100)  # 900 are left
    with pytest.raises(APIError):
        Admitted(limits, of).reserve(1, 0, 5000)  # takes all of it, and it is not full
    clock.now += 6
    second = Admitted(limits, of)
    second.reserve(1, 0, 5000)
    assert dict(second.request.more_headers)["x-ratelimit-remaining-tokens"] == "0"
    second.leave(5000)  # 4,000 below: four minutes until anything goes
    clock.now += 239
    with pytest.raises(APIError):
        Admitted(limits, of).reserve(1, 0, 1)
    clock.now += 2
    Admitted(limits, of).reserve(1, 0, 1)
    clock.now += 3600
    Admitted(limits, of).leave(0)
    Admitted(limits, of).reserve(1, 0, 1000)


def test_a_new_quota_forgives_nothing():
    limits, clock, of = limiter(rpm=10, concurrency=2)
    assert passes(limits, of, 100) == 10
    limits.replace({}, {"a": Quota(rpm=20)})
    assert passes(limits, of, 100) == 0
    clock.now += 60
    assert passes(limits, of, 100) == 20
    limits.replace({}, {"b": Quota(rpm=1)})
    assert passes(limits, of, 100) == 100


def test_answers_at_once():
    limits, _, of = limiter(concurrency=4)
    first = Admitted(limits, of)
    first.reserve(3, 0, 10)
    with pytest.raises(APIError):
        Admitted(limits, of).reserve(2, 0, 10)
    Admitted(limits, of).reserve(1, 0, 10)
    first.leave(10)
    Admitted(limits, of).reserve(3, 0, 10)
    with pytest.raises(APIError, match="asks for 5 answers .* this key may have 4 at once") as caught:
        Admitted(limits, of).reserve(5, 0, 10)
    assert caught.value.status == 400  # no wait helps: a line of a batch would wait till its window ends


KEYS = (Key("a", "ka", None, Quota(rpm=5, tpm=3000, concurrency=2)), Key("b", "kb"), Key("watch", "kw", access=OWNER))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_over_http(own_server):
    server = own_server(key=KEYS)
    reply = server.post(CHAT, chat_body("hi", max_tokens=20), bearer("ka"))
    assert reply.status == 200 and reply.headers["x-ratelimit-limit-requests"] == "5"
    assert (reply.headers["x-ratelimit-remaining-requests"], reply.headers["x-ratelimit-limit-tokens"]) == ("4", "3000")
    assert reply.headers["x-ratelimit-reset-requests"].endswith("s")
    stream = server.post(CHAT, chat_body("hi", max_tokens=20, stream=True), bearer("ka"))
    assert stream.headers["x-ratelimit-remaining-requests"] == "3"
    assert 2900 < int(stream.headers["x-ratelimit-remaining-tokens"]) < 3000  # the first was settled: some 20 tokens
    assert server.post(EMBED, {"input": "a"}, bearer("ka")).headers["x-ratelimit-remaining-requests"] == "2"
    refused = server.post(TEXT, {"prompt": "a", "max_tokens": 4000}, bearer("ka"))
    assert (refused.status, refused.error["type"]) == (429, "tokens") and int(refused.headers["retry-after-ms"]) > 0
    assert server.post(CHAT, {}, bearer("ka")).status == 400
    limited = server.post(CHAT, chat_body("hi"), bearer("ka"))
    check(limited, 429, "rate_limit_exceeded", None)
    assert 0 < int(limited.headers["retry-after"]) <= 12
    with (
        openai.OpenAI(base_url=server.base + "/v1", api_key="ka", max_retries=0) as client,
        pytest.raises(openai.RateLimitError),
    ):
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "a"}])
    for _ in range(20):
        free = server.post(CHAT, chat_body("hi"), bearer("kb"))
        assert free.status == 200 and not any(name.startswith("x-ratelimit") for name in free.headers)
    check(server.get("/v1/models", bearer("ka")), 429, "rate_limit_exceeded", None)
    assert server.call(lambda: server.pool.default.users) == 0
    assert "zse_requests_limited_total 4\n" in (page := server.get("/metrics", bearer("kw")).body.decode())
    assert 'zse_tenant_requests_limited_total{tenant="a"} 4\n' in page
    assert 'zse_tenant_requests_limited_total{tenant="b"} 0\n' in page


def test_parallel_requests_and_clients_that_leave(own_server):
    server = own_server(key=(Key("a", "ka", None, Quota(rpm=60)), Key("c", "kc", None, Quota(concurrency=2))))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = pool.map(lambda _: server.post(CHAT, chat_body("hi"), bearer("ka")).status, range(150))
    counts = list(replies).count(200)
    assert 60 <= counts <= 64  # one more a second
    held = [server.connect() for _ in range(2)]
    for sock in held:
        sock.sendall(request("POST", CHAT, chat_body("!stall"), bearer("kc")))
    wait_for(lambda: server.state()["choices"] == 2)
    assert server.post(CHAT, chat_body("hi"), bearer("kc")).status == 429
    for sock in held:
        sock.close()
    server.assert_quiet()
    assert server.post(CHAT, chat_body("hi"), bearer("kc")).status == 200


def test_a_query_that_stands_with_each_document_is_reserved_as_often(own_server):
    """3 KB that are 300,000 tokens: refused by the quota before any of them is computed."""
    server = own_server(key=(Key("a", "k", quota=Quota(tpm=20_000)),))
    auth = {"authorization": "Bearer k"}
    assert server.post("/v1/embeddings", {"input": "a" * 300}, auth).status == 200
    body = {"query": "q" * 3000, "documents": ["d"] * 100, "return_documents": False}
    refused = server.post("/v1/rerank", body, auth)
    assert (refused.status, refused.error["type"]) == (429, "tokens") and "may take 302000" in refused.error["message"]
    server.assert_quiet()
    usage = server.app.tenants["a"]
    assert usage.computed_tokens == 300
    # What the refused one had reserved is there again.
    assert server.post("/v1/embeddings", {"input": ["a" * 3000] * 6}, auth).status == 200


@pytest.mark.parametrize("seed", range(10))
def test_what_is_kept_for_others_is_theirs_by_weight(seed):
    """Against the rule, one account after the other: half of the queue by weight, less what each holds."""
    draw = random.Random(seed)
    weights = {f"t{index}": draw.choice((0.01, 1.0, 2.5, 40.0)) for index in range(draw.choice((2, 9, 300)))}
    limits = AdmissionControl(fixed_bounds(10, 1000), weights)
    for _ in range(60):
        if draw.random() < 0.1:
            limits.bounds.set_engine(draw.randrange(1, 5000), draw.randrange(1, 1 << 20))
        if draw.random() < 0.05:
            weights[f"t{draw.randrange(400)}"] = draw.random() + 0.01
            limits.replace(weights, {})
        with contextlib.suppress(APIError):  # the queue is full
            run = Admitted(limits, "stranger" if draw.random() < 0.1 else draw.choice([*weights]))
            run.hold(draw.randrange(20), draw.randrange(3000))
            if draw.random() < 0.6:
                run.hold(0, 0)
        name, share = draw.choice([*weights, "stranger"]), KEPT_SHARE / sum(weights.values())
        kept = [
            sum(
                max(0, int(bound * share * weight) - getattr(limits.tenants[other], held))
                for other, weight in weights.items()
                if other != name
            )
            for bound, held in ((limits.bounds.max_choices, "choices"), (limits.bounds.max_tokens, "queued"))
        ]
        assert limits._kept_from(name) == tuple(kept)


def test_a_request_beyond_the_bounds_locks_no_other_tenant_out():
    limits = AdmissionControl(fixed_bounds(10, 1000), {"a": 1.0, "b": 1.0})
    limits.check_room("a", 50, 5000)  # alone, so it may be larger
    for name, choices, tokens in (("a", 50, 5000), ("b", 0, 0)):
        mine = limits.tenants[name]
        mine.choices, mine.queued = choices, tokens
        limits.loaded[name] = mine
    limits.choices, limits.queued_tokens = 50, 5000
    limits.check_room("b", 1, 100)
    for name in ("a", "stranger"):
        with pytest.raises(APIError, match="queue is full"):
            limits.check_room(name, 1, 100)
    limits.tenants["b"].choices = limits.tenants["b"].queued = 1
    with pytest.raises(APIError, match="queue is full"):
        limits.check_room("b", 1, 100)
