"""Nothing of a tenant reaches another: a canary in every prompt, through cache hits, preemption, aborts, drafts and a crash.

The device says what stands in the KV slots that the scheduler gave it (scheduled_engine.py): a wrong page shows.
"""

import asyncio
import json
import logging
import os
import random
import re
import signal

from harness import request, wait_for

from zse.server.keys import OWNER, Key

TEXT = "/v1/completions"
OWNER_KEY = Key("owner", "sk-owner", access=OWNER)
TENANTS = [Key(f"tenant{number}", f"sk-{number:032x}") for number in range(1, 7)]
COMMON = "You are a helpful assistant. Answer in one word, and never tell the password to anybody. "
COUNT = int(os.environ.get("ZSE_TEST_CANARIES", "100"))  # 100,000 is the nightly number


def bearer(key: Key) -> dict[str, str]:
    return {"authorization": f"Bearer {key.key}"}


def cached(server, key: Key, prompt: str, **fields) -> int:
    reply = server.post(TEXT, {"prompt": prompt, "max_tokens": 2, **fields}, bearer(key)).json
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_nobody_hits_what_others_have_cached(scheduled):
    server = scheduled(key=(*TENANTS, OWNER_KEY))
    for key in TENANTS:
        assert cached(server, key, COMMON) == 0
        assert cached(server, key, COMMON) > len(COMMON) - 17
        assert cached(server, key, COMMON, cache_salt="mine") == 0
        assert cached(server, key, COMMON, cache_salt="mine") > 0
        assert cached(server, key, COMMON, cache_salt="other") == 0
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": COMMON}]}, bearer(TENANTS[0]))
    assert chat.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # In streams, and in the metrics.
    events = server.post(
        TEXT,
        {"prompt": COMMON, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        bearer(TENANTS[0]),
    ).events
    count = events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert count > 0
    page = server.get("/metrics", bearer(OWNER_KEY)).body.decode()
    total = float(re.search(r"^zse_cached_prompt_tokens_total\{.*\} (.*)$", page, re.M)[1])
    assert total >= count + 6 * 2 * (len(COMMON) - 17) and "sk-" not in page
    cached_of = [
        float(value)
        for value in re.findall(r'^zse_tenant_cached_prompt_tokens_total\{tenant="tenant.*\} (.*)$', page, re.M)
    ]
    assert len(cached_of) == 6 and sum(cached_of) == total
    assert server.get("/metrics", bearer(TENANTS[0])).status == 403


def test_no_canary_is_seen_by_others(scheduled, caplog):
    """Few pages, none kept free for replies, so that requests are preempted and cached prefixes evicted; replies repeat their
    prompts, so that drafts are verified; a third leave; the engine dies once."""
    caplog.set_level(logging.DEBUG)
    server = scheduled(
        "--pages 40 --context 512 --rows 6 --step-ms 0.5 --reserve-output False --drafts 4",
        key=(*TENANTS, OWNER_KEY),
        max_choices=1 << 10,
    )
    draw = random.Random(COUNT)
    secrets = {key.tenant: f"{draw.getrandbits(128):032x}" for key in TENANTS}
    seen: list[tuple[Key, str, bytes]] = []  # who asked, the prompt, all that came back

    async def ask(key: Key) -> None:
        prompt = COMMON[: draw.randrange(len(COMMON))] + secrets[key.tenant] + "x" * draw.randrange(60)
        stream = draw.random() < 0.5
        fields = {"prompt": prompt, "stream": stream, "max_tokens": draw.randrange(1, 200), "n": draw.choice((1, 1, 2))}
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("POST", TEXT, fields, bearer(key) | {"connection": "close"}))
        leaves = draw.random() < 0.3
        try:
            data = await (reader.read(draw.randrange(1, 3000)) if leaves else reader.read())
        except ConnectionError:
            data = b""
        writer.close()
        if not leaves:
            seen.append((key, prompt, data))

    async def run() -> None:
        jobs = iter(range(COUNT))

        async def worker() -> None:
            for number in jobs:
                if number == COUNT // 2:
                    os.kill(server.engine._process.pid, signal.SIGKILL)
                while server.engine.state != "ready":
                    await asyncio.sleep(0.02)
                await ask(draw.choice(TENANTS))

        await asyncio.gather(*(worker() for _ in range(16)))

    asyncio.run(run())
    wait_for(lambda: server.engine.state == "ready")
    answered = 0
    for key, prompt, data in seen:
        for tenant, secret in secrets.items():
            assert tenant == key.tenant or secret.encode() not in data
        if b"HTTP/1.1 200" not in data or b'{"error"' in data:
            assert b"engine_restarting" in data or b"engine_unavailable" in data, data
            continue
        answered += 1
        for text in texts(data):
            assert prompt.startswith(text)
    assert answered > len(seen) / 2
    server.assert_quiet()
    counters = server.engine.heartbeat.counters
    assert counters["preemptions"] and counters["cancelled"] and counters["accepted_tokens"]
    said = caplog.text + server.get("/metrics", bearer(OWNER_KEY)).body.decode()
    assert not any(secret in said for secret in secrets.values()) and "sk-" not in said


def texts(data: bytes) -> list[str]:
    """The answers' texts of a reply, whole or streamed."""
    head, _, body = data.partition(b"\r\n\r\n")
    if b"event-stream" not in head:
        return [choice["text"] for choice in json.loads(body)["choices"]]
    out: dict[int, str] = {}
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                out[choice["index"]] = out.get(choice["index"], "") + choice["text"]
    return list(out.values())


def test_no_document_is_seen_by_others(scheduled, tmp_path, caplog):
    """Each tenant has a document with its secret, under the same id and nearly the same words; all search and ask at once, documents
    come and go, and the engine dies once."""
    caplog.set_level(logging.DEBUG)
    server = scheduled(
        "--pages 200 --context 2048",
        key=(*TENANTS, OWNER_KEY),
        max_choices=1 << 10,
        documents=str(tmp_path / "documents.db"),
    )
    draw = random.Random(COUNT + 1)
    secrets = {key.tenant: f"{draw.getrandbits(128):032x}" for key in TENANTS}
    seen: list[tuple[Key, bytes]] = []

    def document(key: Key) -> dict:
        return {"id": "vault", "name": "vault.txt", "text": f"The password of the vault is {secrets[key.tenant]}."}

    for key in TENANTS:
        assert server.post("/v1/rag/documents", document(key), bearer(key)).status == 200

    async def ask(key: Key) -> None:
        query = draw.choice(("password of the vault", "vault", secrets[draw.choice(TENANTS).tenant][:6]))
        question = {"model": "fake", "messages": [{"role": "user", "content": query}], "max_tokens": 400}
        path, body = draw.choice(
            (
                ("/v1/rag/search", {"query": query, "top_k": 50}),
                ("/v1/rag/search", {"query": query, "stages": ["dense"], "top_k": 50}),
                ("/v1/chat/completions", question | {"rag": {}, "stream": draw.random() < 0.5}),
                ("/v1/rag/ask", {"question": query, "max_answer_tokens": 200}),
                ("/v1/rag/documents", document(key)),
            )
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("POST", path, body, bearer(key) | {"connection": "close"}))
        seen.append((key, await reader.read()))
        writer.close()

    async def run() -> None:
        jobs = iter(range(COUNT))

        async def worker() -> None:
            for number in jobs:
                if number == COUNT // 2:
                    os.kill(server.engine._process.pid, signal.SIGKILL)
                while server.engine.state != "ready":
                    await asyncio.sleep(0.02)
                await ask(draw.choice(TENANTS))

        await asyncio.gather(*(worker() for _ in range(8)))

    asyncio.run(run())
    own = 0
    for key, data in seen:
        own += secrets[key.tenant].encode() in data
        for tenant, secret in secrets.items():
            assert tenant == key.tenant or secret.encode() not in data
    assert own > len(seen) / 4
    wait_for(lambda: server.engine.state == "ready")
    said = caplog.text + server.get("/metrics", bearer(OWNER_KEY)).body.decode()
    assert not any(secret in said for secret in secrets.values())
