"""What must hold of documents while something goes wrong: restarts, kills, deletions beside searches, a busy event loop, tenants that flood."""

import json
import os
import random
import signal
import threading
import time

import pytest
from harness import Harness, read_reply, request, wait_for
from test_documents import ALICE, BOB, ROUTE, SEARCH, bearer, own, ready  # noqa: F401
from test_lifecycle import Process

from zse.server import ingest, retrieval, vectors
from zse.server.work import MOST_THREADS

SEED = int(os.environ.get("ZSE_TEST_SEED", "1"))
KILLS = int(os.environ.get("ZSE_TEST_KILLS", "5"))


def paragraphs(word: str, count: int) -> str:
    """So many passages of 32 tokens at most: the fake tokenizer's are bytes."""
    return "\n\n".join(f"{word} number {number:05d}." for number in range(count))


def small(text: str, id: str, **more) -> dict:
    return {"text": text, "id": id, "name": f"{id}.txt", "chunk_tokens": 32, "overlap_tokens": 0} | more


def test_a_restart_goes_on_with_the_vectors(own, monkeypatch):  # noqa: F811
    made, let = [], threading.Event()
    rows = vectors.Embedder._rows

    async def counted(self, served, group, account):
        while len(made) >= 3 and not let.is_set():
            await vectors.asyncio.sleep(0.01)
        made.append(group.first)
        return await rows(self, served, group, account)

    monkeypatch.setattr(vectors.Embedder, "_rows", counted)
    server = own()
    document = server.post(ROUTE, small(paragraphs("wool", 90), "wool")).json
    assert document["status"] == "indexing" and document["num_chunks"] >= 90
    wait_for(lambda: server.get(f"{ROUTE}/wool").json["vectors"]["done"] == 3 * vectors.GROUP)
    # It is searched by its words meanwhile.
    found = server.post(SEARCH, {"query": "wool 00085"}).json
    assert "00085" in found["data"][0]["text"] and "48 of" in found["notes"][0]
    server = own()
    let.set()
    assert server.get(ROUTE).status == 200
    assert ready(server, "wool")["vectors"]["done"] == document["num_chunks"]
    assert made == list(range(0, document["num_chunks"], vectors.GROUP))  # none twice
    assert server.post(SEARCH, {"query": "wool 00085"}).json["notes"] == []


def test_another_model_makes_other_vectors(own, monkeypatch):  # noqa: F811
    server = own()
    server.post(ROUTE, small(paragraphs("wool", 20), "wool"))
    ready(server, "wool")
    monkeypatch.setattr(vectors, "_revision", lambda path: "another")
    holds = threading.Event()
    rows = vectors.Embedder._rows

    async def held(self, served, group, account):
        while not holds.is_set():
            await vectors.asyncio.sleep(0.01)
        return await rows(self, served, group, account)

    monkeypatch.setattr(vectors.Embedder, "_rows", held)
    server = own()
    found = server.post(SEARCH, {"query": "wool"}).json
    assert found["data"] and found["stages"] == ["bm25", "tfidf"] and "another model" in found["notes"][0]
    holds.set()
    ready(server, "wool")
    assert server.post(SEARCH, {"query": "wool"}).json["stages"] == ["bm25", "tfidf", "dense"]


def test_a_passage_without_numbers_is_found_by_its_words(own):  # noqa: F811
    server = own()
    server.post(ROUTE, small("Some !nan wool.\n\nSome fine cotton.", "mixed"))
    assert ready(server, "mixed")["vectors"] == {"done": 2, "total": 2}
    assert "wool" in server.post(SEARCH, {"query": "wool", "stages": ["bm25"]}).json["data"][0]["text"]


def test_searches_beside_changes_see_one_version(own):  # noqa: F811
    server = own()
    versions = 12
    server.post(ROUTE, small(paragraphs("v0 wool", 20), "d"))
    wrong, over = [], threading.Event()

    def look() -> None:
        while not over.is_set():
            reply = server.post(SEARCH, {"query": "wool", "top_k": 50})
            if reply.status != 200:
                wrong.append(reply.body)
                continue
            seen = {(hit["version"], hit["text"].split()[0]) for hit in reply.json["data"]}
            if len(seen) > 1:
                wrong.append(seen)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(1, versions):
        if version % 4 == 0:
            assert server.raw(request("DELETE", f"{ROUTE}/d")).status == 200
        assert server.post(ROUTE, small(paragraphs(f"v{version} wool", 20), "d")).status == 200
    over.set()
    for thread in threads:
        thread.join(20)
    assert not wrong, wrong[:3]


def test_the_event_loop_goes_on(own):  # noqa: F811
    """Two megabytes are cut, stored and searched while a chat is answered."""
    server = own()
    draw = random.Random(SEED)
    words = ["".join(draw.choices("abcdefghij", k=6)) for _ in range(5000)]
    text = "\n\n".join(" ".join(draw.choices(words, k=60)) + "." for _ in range(4500))
    with server.longest_callback() as longest:
        done = []
        body = request("POST", f"{ROUTE}?id=big&name=big.txt", text.encode(), {"content-type": "text/plain"})
        thread = threading.Thread(target=lambda: done.append(server.raw(body, timeout=60)))
        thread.start()
        times = []
        while thread.is_alive():
            begin = time.monotonic()
            assert server.chat("hello").status == 200
            times.append(time.monotonic() - begin)
            time.sleep(0.02)
        thread.join()
    assert done[0].status == 200 and done[0].json["num_chunks"] > 400
    assert longest[0][0] < 0.1, longest
    assert len(times) > 3


def test_a_tenant_that_floods_waits(own, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ingest, "MOST_WAITING", 3)
    held, parse = threading.Event(), ingest.worker.parse_document

    async def slow(source, name, *given, **named):
        while name.startswith("slow") and not held.is_set():
            await vectors.asyncio.sleep(0.01)
        return await parse(source, name, *given, **named)

    monkeypatch.setattr(ingest.worker, "parse_document", slow)
    server = own(key=(ALICE, BOB))
    for number in range(3):
        fields = {"text": f"wool {number}", "name": f"slow{number}.txt", "wait": False}
        assert server.post(ROUTE, fields, bearer(ALICE)).status == 200
    reply = server.post(ROUTE, {"text": "more", "name": "slow.txt"}, bearer(ALICE))
    assert reply.status == 429 and reply.error["code"] == "rate_limit_exceeded"
    assert server.post(ROUTE, {"text": "quick", "name": "q.txt"}, bearer(BOB)).status == 200
    held.set()
    wait_for(lambda: {row["status"] for row in server.get(ROUTE, bearer(ALICE)).json["data"]} == {"ready"})


def test_searches_of_one_tenant_do_not_stand_before_anothers(own, monkeypatch):  # noqa: F811
    order, search = [], retrieval.searching.search

    def slow(connection, indexes, tenant, *given):
        order.append(tenant)
        time.sleep(0.02)
        return search(connection, indexes, tenant, *given)

    server = own(key=(ALICE, BOB))
    for key in (ALICE, BOB):  # both are known to the threads
        assert server.post(ROUTE, {"text": "wool"}, bearer(key)).status == 200
    monkeypatch.setattr(retrieval.searching, "search", slow)
    many = [threading.Thread(target=server.post, args=(SEARCH, {"query": "wool"}, bearer(ALICE))) for _ in range(40)]
    for thread in many:
        thread.start()
    wait_for(lambda: len(order) >= 5)
    before = len(order)
    assert server.post(SEARCH, {"query": "wool"}, bearer(BOB)).status == 200
    assert order.index("bob") - before <= MOST_THREADS and len(order) < 40
    for thread in many:
        thread.join()


def test_a_client_that_leaves_stores_nothing(own, monkeypatch):  # noqa: F811
    begun = threading.Event()

    async def slow(*given, **named):
        begun.set()
        await vectors.asyncio.sleep(30)

    server = own()
    assert server.get(ROUTE).status == 200
    monkeypatch.setattr(ingest.worker, "parse_document", slow)
    sock = server.connect()
    sock.sendall(request("POST", f"{ROUTE}?id=gone", b"wool", {"content-type": "text/plain"}))
    assert begun.wait(5)
    sock.close()
    wait_for(lambda: os.listdir(server.app.documents().ingest.folder) == ["lock"])
    assert server.get(f"{ROUTE}/gone").status == 404
    # And one that leaves in the middle of its file.
    sock = server.connect()
    sock.sendall(request("POST", ROUTE, b"wool", {"content-type": "text/plain", "content-length": "4000000"}))
    wait_for(lambda: len(os.listdir(server.app.documents().ingest.folder)) == 2)
    sock.close()
    wait_for(lambda: os.listdir(server.app.documents().ingest.folder) == ["lock"])


def test_a_full_disk_keeps_no_part_of_a_document(own, monkeypatch):  # noqa: F811
    server = own()
    assert server.get(ROUTE).status == 200

    def full(*arguments):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(ingest.os, name, full)
            reply = server.post(ROUTE, {"text": "wool", "wait": False})
        assert (reply.status, reply.error["code"]) == (503, "storage_unavailable")
        assert os.listdir(server.app.documents().ingest.folder) == ["lock"]


def ask_process(process: Process, method: str, path: str, body: dict | None = None):
    with process.send(request(method, path, body)) as sock:
        return read_reply(sock)


@pytest.mark.timed
def test_killed_at_random_instants(tmp_path):
    """What was acknowledged is there after each kill, in its old or its new version, and comes to its end."""
    draw = random.Random(SEED)
    path, acknowledged, number = str(tmp_path / "documents.db"), {}, 0
    for _ in range(max(2, KILLS // 2)):
        process = Process("--log-level", "error", "--documents", path)
        over = threading.Event()

        def send() -> None:
            nonlocal number
            while not over.is_set():
                number += 1
                id = f"d{number % 7}"
                text = paragraphs(f"v{number} wool", draw.randrange(1, 60))
                try:
                    reply = ask_process(process, "POST", ROUTE, small(text, id, wait=draw.random() < 0.5))
                except (OSError, AssertionError):
                    return
                if reply.status == 200:
                    acknowledged[id] = number
                elif reply.status != 409:
                    return

        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(draw.uniform(0.2, 1.0))
        process.popen.send_signal(signal.SIGKILL)
        over.set()
        thread.join(20)
        process.popen.communicate()
    process = Process("--log-level", "error", "--documents", path)
    try:
        assert acknowledged

        def rows() -> list[dict]:
            return ask_process(process, "GET", f"{ROUTE}?limit=100").json["data"]

        wait_for(lambda: all(row["status"] == "ready" and "next" not in row for row in rows()), 30)
        assert {row["id"] for row in rows()} >= acknowledged.keys()
        for id, sent in acknowledged.items():
            reply = ask_process(process, "POST", SEARCH, {"query": "wool", "documents": [id], "top_k": 50})
            found = {hit["text"].split()[0] for hit in reply.json["data"]}
            assert len(found) == 1, found  # never parts of two
            # The last one that was acknowledged, or one that was sent after it and stored in the moment of a kill.
            assert int(found.pop()[1:]) >= sent
        assert sorted(os.listdir(path + ".uploads")) == ["lock"]
    finally:
        process.popen.send_signal(signal.SIGTERM)
        code, log = process.finish()
    assert code == 0 and "Traceback" not in log, log


def test_a_server_goes_on_by_itself(tmp_path):
    """Documents that a server left half done are finished by the next one, though nobody asks for them."""
    path = str(tmp_path / "documents.db")
    server = Harness(documents=path)
    server.post(ROUTE, {"text": "wool", "id": "first"})
    server.close()
    token, folder = "ab" * 16, path + ".uploads"
    pending = ingest.PendingDocument(
        token, "", "", "left", ingest.Upload("left.txt", wait=False), 6, b"\0" * 32, time.time(), "fake"
    )
    with open(f"{folder}/{token}.data", "wb") as file:
        file.write(b"cotton")
    with open(f"{folder}/{token}.json", "wb") as file:
        file.write(ingest.msgspec.json.encode(pending))
    with open(f"{folder}/{'cd' * 16}.data", "wb") as file:
        file.write(b"of nobody")
    with open(f"{folder}/{'ef' * 16}.json", "wb") as file:
        file.write(b"damaged")
    process = Process("--log-level", "error", "--documents", path)
    try:
        wait_for(lambda: sorted(os.listdir(folder)) == [f"{'ef' * 16}.json", "lock"], 15)
        reply = ask_process(process, "GET", f"{ROUTE}/left")
        assert reply.json["num_chunks"] == 1, json.dumps(reply.json)
    finally:
        process.popen.send_signal(signal.SIGTERM)
        assert process.finish()[0] == 0
