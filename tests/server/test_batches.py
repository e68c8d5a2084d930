"""Batches by the official client: results in files, errors with their lines, cancelling, ends, keys, quotas, a restart, a full disk;
and that other requests do not wait for them."""

import json
import os
import time
from functools import partial

import openai
import pytest
from harness import Harness, wait_for
from test_files import contents, upload
from test_lifecycle import start  # noqa: F401
from test_stored_keys import bearer, make

from zse.server import batch_job, batch_lines
from zse.server import files as stores
from zse.server.database import batches as rows
from zse.server.database import keys as stored_keys
from zse.server.database.connection import Database

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SLOW = "!tokens=2000 !ms=5"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "server.db")


@pytest.fixture
def keys(path) -> list[str]:
    with Database(path) as database:
        return [
            make(database, "a"),
            make(database, "b", tenant="a"),
            make(database, "c"),
            make(database, "d", concurrency=2),
        ]


@pytest.fixture
def server(own_server, path, keys):
    return own_server(database=path)


@pytest.fixture
def client(server, keys):
    with openai.OpenAI(base_url=server.base + "/v1", api_key=keys[0], timeout=20, max_retries=0) as client:
        yield client
    server.assert_quiet()


def line(number: int, text: str = "", url: str = TEXT, **fields) -> dict:
    body = {"model": "fake", "prompt": text or f"say {number}"} | fields
    return {"custom_id": f"id{number}", "method": "POST", "url": url, "body": body}


def jsonl(lines) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def begin(client, lines, endpoint: str = TEXT, **fields):
    data = lines if isinstance(lines, bytes) else jsonl(lines)
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client, batch, timeout: float = 15.0):
    wait_for(lambda: client.batches.retrieve(batch.id).status in ENDED, timeout)
    return client.batches.retrieve(batch.id)


def results(client, id: str | None) -> list[dict]:
    return [json.loads(text) for text in client.files.content(id).text.splitlines()] if id else []


def rows_of(path: str) -> list[tuple]:
    with Database(path) as database:
        return database.now(lambda c: c.execute("SELECT batch, line FROM batch_lines").fetchall(), writes=False)


def test_a_batch_and_its_files(client, server, path):
    lines = [line(n, max_tokens=4) for n in range(40)]
    lines[7]["body"]["temperature"] = 9  # refused when it runs
    lines[9]["custom_id"] = "ä\n"
    made = begin(
        client, lines, metadata={"what": "test"}, output_expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (made.status, made.object, made.endpoint, made.completion_window) == ("validating", "batch", TEXT, "24h")
    assert made.expires_at == made.created_at + 86400 and made.metadata == {"what": "test"} and made.errors is None
    done = ended(client, made)
    assert done.status == "completed" and (
        done.request_counts.total,
        done.request_counts.completed,
        done.request_counts.failed,
    ) == (40, 39, 1)
    assert (
        made.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at and done.cancelled_at is None
    )
    output = results(client, done.output_file_id)
    assert [one["custom_id"] for one in output] == [one["custom_id"] for n, one in enumerate(lines) if n != 7]
    first = output[0]
    assert first["id"].startswith("batch_req_") and first["error"] is None and len({one["id"] for one in output}) == 39
    assert first["response"]["status_code"] == 200 and first["response"]["request_id"].startswith("req_")
    assert (
        first["response"]["body"]["choices"][0]["text"] == "say "
        and first["response"]["body"]["object"] == "text_completion"
    )
    (bad,) = results(client, done.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"], bad["response"]["body"]["error"]["param"]) == (
        "id7",
        400,
        "temperature",
    )
    card = client.files.retrieve(done.output_file_id)
    assert (
        card.purpose == "batch_output"
        and card.filename == f"{done.id}_output.jsonl"
        and card.expires_at == card.created_at + 7200
    )
    wait_for(lambda: rows_of(path) == [])
    assert len(contents(path)) == 4  # with the lock: nothing is left beside the three files
    # What they took is counted as any request's.
    wait_for(lambda: server.app.tenants["a/a"].requests > 40)
    assert server.app.tenants["a/a"].completion_tokens >= 39
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(done.id)


@pytest.mark.parametrize(
    "url, body, kind",
    [
        (CHAT, {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}, "chat.completion"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "list"),
        ("/v1/responses", {"input": "hi", "store": True}, "response"),
    ],
)
def test_every_endpoint(client, url, body, kind):
    done = ended(client, begin(client, [{"custom_id": "x", "method": "POST", "url": url, "body": body}], url))
    (one,) = results(client, done.output_file_id)
    assert done.error_file_id is None and one["response"]["body"]["object"] == kind
    if url == "/v1/responses":
        assert client.responses.retrieve(one["response"]["body"]["id"]).output_text == "hi"


BAD = {
    "no JSON": (b"{", "invalid_json_line", None),
    "no object": (b"[]", "invalid_json_line", None),
    "no UTF-8": (b'{"custom_id": "\xff"}', "invalid_json_line", None),
    "deep": (b"[" * 100_000, "invalid_json_line", None),
    "field missing": ({"custom_id": "x", "method": "POST", "url": TEXT}, "invalid_json_line", None),
    "field unknown": (line(5) | {"more": 1}, "invalid_json_line", None),
    "wrong type": (line(5) | {"custom_id": 5}, "invalid_json_line", None),
    "no id": (line(5) | {"custom_id": ""}, "invalid_custom_id", "custom_id"),
    "long id": (line(5) | {"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
    "twice": (line(0), "duplicate_custom_id", "custom_id"),
    "url": (line(5, url=CHAT), "invalid_url", "url"),
    "method": (line(5) | {"method": "GET"}, "invalid_method", "method"),
    "stream": (line(5, stream=True), "unsupported_parameter", "body.stream"),
    "model": (line(5, model="gone"), "model_not_found", "body.model"),
    "body": (line(5) | {"body": []}, "invalid_request", "body"),
    "long": (line(5, "x" * (2 << 20)), "line_too_long", None),
}


def test_a_bom_before_the_first_line(client):
    done = ended(client, begin(client, b"\xef\xbb\xbf" + jsonl([line(0), line(1)])))
    assert (done.status, done.request_counts.completed) == ("completed", 2)
    done = ended(client, begin(client, jsonl([line(0)]) + b"\xef\xbb\xbf" + jsonl([line(1)])))
    assert (done.status, done.errors.data[0].line) == ("failed", 2)


def test_lines_that_are_wrong(client):
    made = {name: begin(client, jsonl([line(0), b"", bad])) for name, (bad, _, _) in BAD.items()}
    for name, (_, code, param) in BAD.items():
        done = ended(client, made[name])
        (problem,) = done.errors.data
        assert (name, done.status, problem.code, problem.param, problem.line) == (name, "failed", code, param, 3)
        assert problem.message and done.output_file_id is None is done.error_file_id and done.failed_at


def test_how_many_lines_and_errors(client, monkeypatch):
    short = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}\n'
    done = ended(client, begin(client, b"".join(short % n for n in range(batch_lines.MAX_LINES + 1))))
    assert [(problem.code, problem.line) for problem in done.errors.data] == [("too_many_lines", 50_001)]
    done = ended(client, begin(client, b"x\n" * 1000))
    assert len(done.errors.data) == batch_lines.MAX_ERRORS and done.errors.data[-1].line == 100
    assert [problem.code for problem in ended(client, begin(client, b" \n\n")).errors.data] == ["empty_file"]


def test_what_is_no_batch(client, server, keys, own_server):
    file = client.files.create(file=b"x", purpose="user_data")
    create = partial(client.batches.create, endpoint=TEXT, completion_window="24h")
    for id in (file.id, "file-none"):
        with pytest.raises(openai.NotFoundError) as caught:
            create(input_file_id=id)
        assert caught.value.param == "input_file_id"
    good = client.files.create(file=jsonl([line(1)]), purpose="batch").id
    for change in (
        {"completion_window": "1h"},
        {"endpoint": "/v1/rerank"},
        {"metadata": {"a": 1}},
        {"extra_body": {"x": 1}},
    ):
        with pytest.raises(openai.BadRequestError):
            create(input_file_id=good, **change)
    other = {"input_file_id": good, "endpoint": TEXT, "completion_window": "24h"}
    assert server.post("/v1/batches", other, bearer(keys[2])).status == 404  # another tenant's file
    made = create(input_file_id=good)
    for reply in (
        server.get(f"/v1/batches/{made.id}", bearer(keys[2])),
        server.post(f"/v1/batches/{made.id}/cancel", {}, bearer(keys[2])),
        server.get("/v1/batches/batch_none", bearer(keys[0])),
    ):
        assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert server.get("/v1/batches", bearer(keys[2])).json["data"] == []
    bare = own_server()
    for reply in (bare.post("/v1/batches", other), bare.get("/v1/batches"), bare.get("/v1/batches/batch_1")):
        assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
    ended(client, made)


def test_lists(client):
    made = [begin(client, [line(1)]).id for _ in range(4)]
    assert [batch.id for batch in client.batches.list(limit=3)] == made[::-1]
    page = client.batches.list(limit=2, after=made[3])
    assert [batch.id for batch in page.data] == made[2:0:-1] and page.has_more
    with pytest.raises(openai.BadRequestError):
        client.batches.list(after="batch_none")


def test_cancelled_while_it_runs_and_its_file_stays(client, server, path):
    made = begin(client, [line(n, SLOW, max_tokens=2000) if n else line(0) for n in range(50)])
    wait_for(
        lambda: client.batches.retrieve(made.id).request_counts.completed == 1 and server.app.batches.num_running > 1
    )
    with pytest.raises(openai.ConflictError):
        client.files.delete(made.input_file_id)
    waiting = begin(client, [line(n) for n in range(3)])  # behind it
    wait_for(lambda: client.batches.retrieve(waiting.id).status == "in_progress")
    assert client.batches.cancel(waiting.id).status == "cancelling"
    assert ended(client, waiting).status == "cancelled"
    found = client.batches.cancel(made.id)
    assert found.status == "cancelling" and found.cancelling_at
    done = ended(client, made)
    assert done.status == "cancelled" and done.cancelled_at and client.batches.cancel(made.id).status == "cancelled"
    kept, rest = results(client, done.output_file_id), results(client, done.error_file_id)
    assert [one["custom_id"] for one in kept] == ["id0"] and len(rest) == 49
    assert {one["error"]["code"] for one in rest} == {"batch_cancelled"} and rest[0]["response"] is None
    wait_for(lambda: rows_of(path) == [])
    assert client.files.delete(made.input_file_id).deleted


def test_the_window_ends(client, server):
    made = begin(client, [line(n, SLOW, max_tokens=2000) if n else line(0) for n in range(20)])
    wait_for(lambda: client.batches.retrieve(made.id).request_counts.completed == 1)
    (job,) = server.app.batches._jobs.values()
    server.call(lambda: setattr(job, "batch", job.batch._replace(expires=time.time())))
    server.call(job.may_go_on)
    server.call(lambda: [task.cancel() for task in list(job._lines)])
    done = ended(client, made)
    assert done.status == "expired" and done.expired_at
    assert [one["error"]["code"] for one in results(client, done.error_file_id)] == ["batch_expired"] * 19
    assert len(results(client, done.output_file_id)) == 1


def test_its_key_ends(client, server, path, keys):
    made = begin(client, [line(n, SLOW, max_tokens=2000) for n in range(9)])
    wait_for(lambda: server.app.batches.num_running > 1)
    with Database(path) as database:  # as `zse keys` does it
        database.now(partial(stored_keys.rotate, name="a", actor="x"))
    time.sleep(1.3)
    other = openai.OpenAI(base_url=server.base + "/v1", api_key=keys[1], timeout=20, max_retries=0)
    assert other.batches.retrieve(made.id).status == "in_progress"  # its new text is the same key
    with Database(path) as database:
        database.now(partial(stored_keys.revoke, name="a", actor="x"))
    done = ended(other, made)
    assert done.status == "failed" and [problem.code for problem in done.errors.data] == ["invalid_api_key"]
    assert {one["error"]["code"] for one in results(other, done.error_file_id)} == {"invalid_api_key"}
    other.close()


def test_other_requests_go_first(own_server, path, keys):
    """A queue of eight, a batch of slow lines: nobody is refused, a key keeps a place beside its batch, lines have the lowest priority."""
    server = own_server(database=path, max_choices=8)
    server.call(lambda: setattr(server.app.admission.bounds, "num_rows", 8))
    with openai.OpenAI(base_url=server.base + "/v1", api_key=keys[3], timeout=20, max_retries=0) as client:
        seen, most = [], 0

        def begins(job):
            nonlocal most
            most = max(most, server.app.batches.num_running)
            return may(job)

        may, server.app.batches._may_begin = server.app.batches._may_begin, begins
        options = server.app.request_options
        server.app.request_options = lambda request, given: (
            seen.append((request, options(request, given))) or seen[-1][1]
        )
        made = begin(client, [line(n, "!tokens=20 !ms=2", max_tokens=100) for n in range(30)])
        wait_for(lambda: server.app.batches.num_running)
        for _ in range(10):
            assert server.app.batches.num_running <= 1  # of two answers at once
            client.completions.create(model="fake", prompt="quick", max_tokens=2)
        with openai.OpenAI(base_url=server.base + "/v1", api_key=keys[0], timeout=20, max_retries=0) as wide:
            more = begin(wide, [line(n, "!tokens=20 !ms=2", max_tokens=100) for n in range(30)])
            assert ended(wide, more).request_counts.completed == 30
        assert ended(client, made).request_counts.completed == 30
        assert most == 4  # half of the rows
    for request, given in seen:
        assert (given.priority, given.max_wait_s) == (
            (-10, None) if request.identity else (0, 600.0 if given.max_wait_s else None)
        )


def test_lines_wait_where_clients_are_refused(own_server, path, keys, monkeypatch):
    """A rate limit, a queue that is full, an engine that died: no line fails of it."""
    monkeypatch.setitem(batch_job.WAITS_S, "engine_restarting", 0.2)
    with Database(path) as database:
        key = make(database, "slow", tenant="a", rpm=3000)
    server = own_server(database=path)
    with openai.OpenAI(base_url=server.base + "/v1", api_key=key, timeout=20, max_retries=0) as client:
        made = begin(client, [line(n, "!crash=1" if n == 5 else "") for n in range(30)])
        bucket = server.app.admission.tenants["a/slow"].buckets["requests"]
        server.call(lambda: setattr(bucket, "level", 3.0))
        server.call(lambda: setattr(server.app.admission, "choices", 100))
        time.sleep(0.4)
        assert server.app.batches.num_running <= 1
        server.call(lambda: setattr(server.app.admission, "choices", 0))
    with openai.OpenAI(base_url=server.base + "/v1", api_key=keys[0], timeout=20, max_retries=0) as client:
        done = ended(client, made)
        assert (done.request_counts.completed, done.request_counts.failed) == (29, 1)
        (bad,) = results(client, done.error_file_id)
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("id5", 503)  # the engine dies of it each time


def test_a_restart_goes_on(own_server, path, keys):
    """No line that has a result is run again, and each has one."""
    server = Harness(database=path)
    client = openai.OpenAI(base_url=server.base + "/v1", api_key=keys[0], timeout=20, max_retries=0)
    made = begin(client, [line(n, "!tokens=9 !ms=8", max_tokens=60) for n in range(60)])
    wait_for(lambda: client.batches.retrieve(made.id).request_counts.completed > 10)
    server.close()
    kept = {number for _, number in rows_of(path)}
    assert 10 < len(kept) < 60
    again = own_server(database=path)
    ran = []
    answer = again.app.answer_line
    again.app.answer_line = lambda request: ran.append(request) or answer(request)
    client = openai.OpenAI(base_url=again.base + "/v1", api_key=keys[1], timeout=20, max_retries=0)
    done = ended(client, made)
    assert done.request_counts.completed == 60 and len(ran) <= 60 - len(kept)
    assert sorted(one["custom_id"] for one in results(client, done.output_file_id)) == sorted(
        f"id{n}" for n in range(60)
    )
    client.close()


def test_a_full_disk_and_a_quota(client, server, path, monkeypatch):
    monkeypatch.setattr(batch_job, "AGAIN_S", 0.1)
    monkeypatch.setattr("zse.server.batches.LOOK_S", 0.3)

    def full(*arguments):
        raise OSError(28, os.strerror(28))

    fsync = os.fsync
    made = begin(client, [line(n) for n in range(5)])
    monkeypatch.setattr(stores.os, "fsync", full)
    wait_for(lambda: client.batches.retrieve(made.id).request_counts.completed == 5)
    time.sleep(0.5)
    assert client.batches.retrieve(made.id).status == "finalizing"
    monkeypatch.setattr(stores.os, "fsync", fsync)
    done = ended(client, made)
    assert done.status == "completed" and len(results(client, done.output_file_id)) == 5
    file = client.files.create(file=jsonl([line(n, "x" * 300, max_tokens=300) for n in range(8)]), purpose="batch")
    server.app.file_quota = server.database.now(lambda c: rows.files.stored_bytes(c, "a"), writes=False) + 2500
    made = client.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h")
    done = ended(client, made)
    assert done.status == "failed" and [problem.code for problem in done.errors.data] == ["quota_exceeded"]
    kept, rest = results(client, done.output_file_id), results(client, done.error_file_id)
    assert len(kept) == done.request_counts.completed > 0 and len(kept) + len(rest) == 8
    server.app.file_quota += 3000
    with pytest.raises(openai.APIStatusError) as caught:
        begin(client, b"x" * 5000)
    assert caught.value.status_code == 413
    wait_for(lambda: not any(name.endswith(".part") for name in contents(path)))


def test_an_input_that_is_gone(client, server, path):
    file = client.files.create(file=jsonl([line(1)]), purpose="batch")
    os.unlink(f"{path}.files/{file.id}")  # by somebody else
    made = client.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h")
    assert [problem.code for problem in ended(client, made).errors.data] == ["invalid_input_file"]


def test_how_many_batches(client, server, keys, monkeypatch):
    monkeypatch.setattr(rows, "MOST_OPEN", 1)
    made = begin(client, [line(n, SLOW, max_tokens=2000) for n in range(3)])
    with pytest.raises(openai.ConflictError):
        begin(client, [line(1)])
    client.batches.cancel(made.id)
    ended(client, made)
    wait_for(lambda: upload(server, keys[0], ("file", b"x"), ("purpose", b"batch")).status == 200)


def test_of_two_servers_each_runs_those_that_it_got(start, path, keys):  # noqa: F811
    """One after the other: who ran the last one leaves the next to whoever has it."""
    processes = [start("--database", path) for _ in range(2)]
    for number in (0, 1, 0):
        base = f"http://127.0.0.1:{processes[number].port}/v1"
        with openai.OpenAI(base_url=base, api_key=keys[0], timeout=20, max_retries=0) as client:
            assert ended(client, begin(client, [line(1)])).status == "completed"
