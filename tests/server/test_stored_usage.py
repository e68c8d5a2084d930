"""Usage and quotas in the database: nothing is missing, nothing is counted twice, a restart forgives nothing."""

import json
import random
import signal
import sqlite3
import threading
import time

import pytest
from harness import chat_body, read_reply, request, wait_for
from test_lifecycle import start  # noqa: F401
from test_stored_keys import bearer, path, zse_keys  # noqa: F401

from zse.server.admission import AdmissionControl, QueueBounds
from zse.server.database import keys, usage
from zse.server.database.connection import Database, StorageError
from zse.server.keys import Quota

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def used(path: str, *words: str) -> list[dict]:  # noqa: F811
    return json.loads(zse_keys(path, "usage", *words, "--json"))


def test_what_a_client_is_told_is_kept_with_its_cost(own_server, path):  # noqa: F811
    key = zse_keys(path, "create", "a", "--input-price", "2", "--cached-price", "0.5", "--output-price", "10")
    other = zse_keys(path, "create", "b", "--tenant", "a", "--input-price", "1")
    server = own_server(database=path)
    told = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
    for text in ("hello", "hello again", "a third"):
        found = server.post(CHAT, chat_body(text, max_tokens=9), bearer(key)).json["usage"]
        cached = found["prompt_tokens_details"]["cached_tokens"]
        told = {name: told[name] + (cached if name == "cached_tokens" else found[name]) for name in told}
    assert server.post(EMBED, {"input": "abcd"}, bearer(other)).status == 200
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 1 << 20}, bearer(other)).status == 400  # beyond the context
    rows: list[dict] = []

    def both() -> bool:
        rows[:] = used(path)
        return len(rows) == 2 and rows[0]["requests"] == 3 and rows[1]["requests"] == 2

    wait_for(both)
    first, second = rows
    assert (first["tenant"], first["key"], first["model"], first["failed"]) == ("a", "a", "fake", 0)
    assert {name: first[name] for name in told} == told and first["computed_tokens"] > 0
    fresh = told["prompt_tokens"] - told["cached_tokens"]
    assert first["cost"] == pytest.approx(
        (2 * fresh + 0.5 * told["cached_tokens"] + 10 * told["completion_tokens"]) / 1e6
    )
    assert 0 < first["mean_first_token_ms"] <= first["mean_ms"] < 10_000
    assert (second["key"], second["failed"], second["mean_first_token_ms"]) == ("b", 1, None)
    assert second["prompt_tokens"] >= 4 and second["completion_tokens"] == 0
    assert [row["key"] for row in used(path, "b")] == ["b"] and used(path, "none") == []
    (day,) = used(path, "a", "--by", "day")
    assert day["at"] % 86400 == 0 and time.time() - day["at"] < 2 * 86400 and day["requests"] == 3
    assert used(path, "--until", "2020-01-01") == [] and len(used(path, "--since", "2020-01-01")) == 2
    table = zse_keys(path, "usage").splitlines()
    assert table[0].split()[:4] == ["TIME", "TENANT", "KEY", "MODEL"] and table[1].split()[1:4] == ["a", "a", "fake"]


def test_nothing_is_missing_and_nothing_is_counted_twice(own_server, path):  # noqa: F811
    """Of 600 requests of three keys, a third of whose clients leave, while writes fail now and then: the sums are those of the
    metrics, which count in the process."""
    texts = [zse_keys(path, "create", name) for name in "abc"]
    server = own_server(database=path, max_choices=2000)
    real, draw = usage.write, random.Random(3)
    failed = 0

    def fails(connection, counts, windows):
        nonlocal failed
        real(connection, counts, windows)
        if draw.random() < 0.3:
            failed += 1
            raise sqlite3.OperationalError("database or disk is full")

    usage.write, usage.RETRY_S = fails, 0.02

    def some(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(50):
            text = mine.choice(texts)
            body = chat_body(f"!tokens={mine.randrange(1, 40)}", max_tokens=64, stream=True)
            if mine.random() < 0.33:
                with server.connect() as sock:
                    sock.sendall(
                        request("POST", CHAT, chat_body("!tokens=400 !ms=1", max_tokens=400, stream=True), bearer(text))
                    )
                    sock.recv(1 << 12)
            else:
                assert server.post(CHAT, body, bearer(text)).status == 200

    try:
        threads = [threading.Thread(target=some, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.assert_quiet()
        time.sleep(0.3)
    finally:
        usage.write, usage.RETRY_S = real, 1.0
    counted = server.call(lambda: dict(server.app.tenants))
    wait_for(lambda: sum(row["requests"] for row in used(path)) >= 600)
    rows = used(path)
    assert failed > 3 and sum(row["requests"] for row in rows) == 600
    for row in rows:
        of = counted[f"{row['tenant']}/{row['key']}"]
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "computed_tokens"):
            assert row[name] == getattr(of, name), (row["key"], name)


def test_usage_is_written_within_a_tenth_of_a_second(start, path):  # noqa: F811
    """SIGKILL 100 ms after an answer: it is there. What is in the file then opens and counts whole requests."""
    key = zse_keys(path, "create", "a", "--rpm", "1000")
    for count in range(1, 6):
        process = start("--database", path)
        with process.send(request("POST", TEXT, {"prompt": "abc", "max_tokens": 4}, bearer(key))) as sock:
            told = read_reply(sock).json["usage"]
        time.sleep(0.1)
        process.popen.send_signal(signal.SIGKILL)
        process.finish()
        (row,) = used(path)
        assert row["requests"] == count and row["completion_tokens"] == 4 * count
        assert row["prompt_tokens"] == told["prompt_tokens"] * count


def test_a_quota_survives_a_restart(start, path):  # noqa: F811
    key = zse_keys(path, "create", "a", "--rpm", "6")

    def passes(process) -> int:
        statuses = []
        for _ in range(10):
            with process.send(request("GET", "/v1/models", None, bearer(key))) as sock:
                statuses.append(read_reply(sock).status)
        return statuses.count(200)

    process = start("--database", path)
    assert passes(process) == 6
    for number in (signal.SIGTERM, signal.SIGKILL):
        time.sleep(0.1)
        process.popen.send_signal(number)
        process.finish()
        process = start("--database", path)
        assert passes(process) <= 1  # one comes back in 10 s


def test_windows_come_back_with_time_and_never_more(path):  # noqa: F811
    def control() -> AdmissionControl:
        return AdmissionControl(
            QueueBounds(None, None), {}, {"a/a": Quota(rpm=60, tpm=6000), "b/b": Quota(rpm=60)}, lambda: 5.0
        )

    with Database(path) as database:
        database.now(
            lambda c: usage.write(c, {}, [("a/a", "requests", 10.0, 1000.0), ("a/a", "tokens", -3000.0, 1000.0)])
        )
        database.now(lambda c: usage.write(c, {}, [("gone", "requests", 1.0, 1000.0), ("a/a", "other", 1.0, 1000.0)]))
        for now, requests, tokens in ((1000.0, 10, -3000), (1020.0, 30, -1000), (990.0, 10, -3000), (4600.0, 60, 6000)):
            limits = control()
            database.now(lambda c, limits=limits, now=now: usage.restore(c, limits, lambda: now))
            buckets = limits.tenants["a/a"].buckets
            assert (buckets["requests"].level, buckets["tokens"].level) == (requests, tokens), now
            assert limits.tenants["b/b"].buckets["requests"].level == 60 and "gone" not in limits.tenants
        database.now(lambda c: usage.restore(c, control(), lambda: 1e6))
        assert database.now(lambda c: c.execute("SELECT * FROM windows").fetchall(), writes=False) == []


def test_the_loop_does_not_wait_for_a_slow_disk(own_server, path):  # noqa: F811
    key = zse_keys(path, "create", "a", "--rpm", "100000")
    server = own_server(database=path)
    server.database.submit(lambda connection: time.sleep(1.0))
    server.lag_s, begin = 0.0, time.monotonic()
    for _ in range(5):
        assert server.post(CHAT, chat_body("hi"), bearer(key)).status == 200
    assert time.monotonic() - begin < 0.9 and server.lag_s < 0.3
    wait_for(lambda: [row["requests"] for row in used(path)] == [5])


def test_the_audit_log_says_who_changed_what(path):  # noqa: F811
    text = zse_keys(path, "create", "a", "--rpm", "5", "--models", "m,l")
    zse_keys(path, "update", "a", "--rpm", "none", "--no-admin")
    fresh = zse_keys(path, "rotate", "a")
    zse_keys(path, "revoke", "a")
    zse_keys(path, "revoke", "a")  # says nothing new
    lines = json.loads(zse_keys(path, "audit", "--json"))
    assert [(line["action"], line["subject"], line["actor"]) for line in lines] == [
        (f"keys.{action}", "a", "cli") for action in ("revoke", "rotate", "update", "create")
    ]
    assert lines[2]["detail"] == {"rpm": 0, "admin": False} and lines[3]["detail"] == {"rpm": 5, "models": ["l", "m"]}
    assert text not in str(lines) and fresh not in str(lines) and 0 <= time.time() - lines[0]["at"] < 60
    assert len(zse_keys(path, "audit", "--last", "2").splitlines()) == 3
    with Database(path) as database, pytest.raises(StorageError):
        database.now(lambda c: keys.note(c, "a", "b", None, {}))
