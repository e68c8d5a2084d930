"""Documents over HTTP: added in every form, listed, searched, cited in answers, replaced, deleted; other tenants see nothing of them."""

import base64
import json
import os
import random
import shlex
import sys
import time
from pathlib import Path

import openai
import pytest
from harness import Harness, request, wait_for

from zse.rag.ocr import OcrCommand
from zse.server.keys import Key

sys.path.append(str(Path(__file__).parents[1] / "rag"))
from pdf_writer import Encryption, Pdf  # noqa: E402

HANDBOOK = "# Notice\n\nThe notice period is ninety days.\n\n# Travel\n\nA night in Zurich costs 210 francs at most.\n"
TABLE = "city,limit\nZurich,210\nOslo,190\n"
ALICE, BOB = Key("alice", "sk-alice"), Key("bob", "sk-bob")
ROUTE, SEARCH = "/v1/rag/documents", "/v1/rag/search"


def bearer(key: Key) -> dict[str, str]:
    return {"authorization": f"Bearer {key.key}"}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A server without keys that has the handbook and a table."""
    server = Harness(documents=str(tmp_path_factory.mktemp("documents") / "documents.db"))
    assert server.post(ROUTE, {"text": HANDBOOK, "name": "handbook.md", "id": "handbook"}).status == 200
    yield server
    server.close()


@pytest.fixture
def own(tmp_path):
    """A factory of servers over one file, the last one first closed."""
    made: list[Harness] = []

    def make(**options) -> Harness:
        while made:
            made.pop().close()
        made.append(Harness(documents=str(tmp_path / "documents.db"), **options))
        return made[0]

    yield make
    for server in made:
        server.close()


def ready(server: Harness, id: str, headers: dict | None = None) -> dict:
    """The document, once its vectors are there."""
    wait_for(lambda: server.get(f"{ROUTE}/{id}", headers).json["status"] == "ready")
    return server.get(f"{ROUTE}/{id}", headers).json


def form(fields: dict[str, str], name: str, data: bytes, media_type: str) -> tuple[bytes, dict]:
    parts = [f'--b\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n' for key, value in fields.items()]
    head = (
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\nContent-Type: {media_type}\r\n\r\n'
    )
    body = "".join(parts).encode() + head.encode() + data + b"\r\n--b--\r\n"
    return body, {"content-type": "multipart/form-data; boundary=b"}


def test_every_form_of_an_upload(library):
    given = {"name": "notes.txt", "metadata": {"team": "blue"}}
    bodies = [
        (ROUTE, json.dumps(given | {"text": "one apple"}).encode(), {"content-type": "application/json"}),
        (
            ROUTE,
            json.dumps(given | {"data": base64.b64encode(b"two pears").decode()}).encode(),
            {"content-type": "application/json"},
        ),
        (f"{ROUTE}?name=notes.txt", b"three plums", {"content-type": "text/plain"}),
        (f"{ROUTE}?name=notes.txt", b"four figs", {"content-type": "application/octet-stream"}),
        (ROUTE, *form({"chunk_tokens": "64", "metadata[team]": "blue"}, "notes.txt", b"five limes", "text/plain")),
    ]
    for path, body, headers in bodies:
        reply = library.raw(request("POST", path, body, headers))
        assert reply.status == 200, reply.body
        document = reply.json
        assert (document["name"], document["kind"], document["version"]) == ("notes.txt", "text", 1)
        assert document["num_chunks"] == 1 and document["outcome"] == "created"
        assert library.get(f"{ROUTE}/{document['id']}").json["sha256"] == document["sha256"]
        assert library.raw(request("DELETE", f"{ROUTE}/{document['id']}")).json["deleted"]
        assert library.get(f"{ROUTE}/{document['id']}").status == 404


@pytest.mark.parametrize(
    "fields,status,param",
    [
        ({}, 400, "text"),
        ({"text": "a", "data": "YQ=="}, 400, "text"),
        ({"data": "not base64"}, 400, "data"),
        ({"text": "a", "id": "../x"}, 400, "id"),
        ({"text": "a", "id": "A" * 65}, 400, "id"),
        ({"text": "a", "name": "a\u202egpj.exe"}, 400, "name"),
        ({"text": "a", "name": "a\x00b"}, 400, "name"),
        ({"text": "a", "name": "x" * 4096}, 400, "name"),
        ({"text": "a", "chunk_tokens": 31}, 400, "chunk_tokens"),
        ({"text": "a", "chunk_tokens": 5000}, 400, "chunk_tokens"),
        ({"text": "a", "chunk_tokens": 64, "overlap_tokens": 32}, 400, "overlap_tokens"),
        ({"text": "a", "overlap_tokens": -1}, 400, "overlap_tokens"),
        ({"text": "a", "kind": "exe"}, 400, "kind"),
        ({"text": "a", "url": "http://x"}, 400, "url"),
        ({"text": "a", "password": "x", "wait": False}, 400, "password"),
        ({"text": "   \n "}, 422, None),
        ({"text": "a", "model": "none"}, 404, "model"),
    ],
)
def test_what_is_refused(library, fields, status, param):
    reply = library.post(ROUTE, fields)
    assert (reply.status, reply.error["param"]) == (status, param), reply.body


def test_files_of_other_sites_are_refused(library):
    """A browser sends plain text and forms to any address without asking."""
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}):
        reply = library.raw(request("POST", ROUTE, b"planted", {"content-type": "text/plain"} | headers))
        assert reply.status == 403
    same = {"content-type": "text/plain", "origin": "http://localhost"}
    reply = library.raw(request("POST", f"{ROUTE}?id=same", b"my own", same))
    assert reply.status == 200 and library.raw(request("DELETE", f"{ROUTE}/same")).status == 200


def test_a_search_explains_itself(library):
    ready(library, "handbook")
    found = library.post(SEARCH, {"query": "notice period", "top_k": 3}).json
    (best, *_), stages = found["data"], {"bm25", "tfidf", "dense"}
    assert best["document"] == "handbook" and "ninety days" in best["text"] and set(best["stages"]) <= stages
    assert best["score"] == pytest.approx(sum(stage["part"] for stage in best["stages"].values()))
    assert found["notes"] == [] and found["stages"] == ["bm25", "tfidf", "dense"]
    for stage in stages:
        alone = library.post(SEARCH, {"query": "notice period", "stages": [stage]}).json
        assert alone["stages"] == [stage] and set(alone["data"][0]["stages"]) == {stage}
    judged = library.post(SEARCH, {"query": "notice", "stages": ["bm25", "rerank"], "rerank_k": 4}).json["data"]
    assert "rerank" in judged[0]["stages"]
    fields = {"query": "notice", "stages": ["bm25", "rerank"], "rerank_by": "likelihood"}
    (likely,) = (hit for hit in library.post(SEARCH, fields).json["data"] if hit["document"] == "handbook")
    assert likely["stages"]["rerank"]["score"] != judged[0]["stages"]["rerank"]["score"]
    assert library.post(SEARCH, {"query": "notice", "fusion": "weights", "weights": {"bm25": 3}}).json["data"]


@pytest.mark.parametrize(
    "fields,param",
    [
        ({}, "query"),
        ({"query": ""}, "query"),
        ({"query": "x", "top_k": 0}, "top_k"),
        ({"query": "x", "top_k": 51}, "top_k"),
        ({"query": "x", "stages": []}, "stages"),
        ({"query": "x", "stages": ["rerank"]}, "stages"),
        ({"query": "x", "stages": ["magic"]}, "stages[0]"),
        ({"query": "x", "weights": {"bm25": -1}}, "weights.bm25"),
        ({"query": "x", "after": "monday"}, "after"),
        ({"query": "x", "documents": ["../a"]}, "documents[0]"),
        ({"query": "x", "limit": 3}, "limit"),
    ],
)
def test_searches_that_are_refused(library, fields, param):
    reply = library.post(SEARCH, fields)
    assert reply.status == 400 and reply.error["param"] == param


def test_filters(library):
    library.post(ROUTE, {"text": "A night in Bergen.", "name": "n.txt", "id": "bergen", "metadata": {"land": "no"}})

    def ids(**fields) -> set[str]:
        return {hit["document"] for hit in library.post(SEARCH, {"query": "night", "top_k": 50, **fields}).json["data"]}

    assert ids() == {"handbook", "bergen"}
    assert (
        ids(documents=["bergen"])
        == ids(documents="bergen")
        == ids(kinds=["text"])
        == ids(metadata={"land": "no"})
        == {"bergen"}
    )
    assert ids(kinds=["markdown"]) == {"handbook"}
    assert ids(metadata={"land": "se"}) == ids(before=1) == ids(after=1e10) == set()
    assert ids(after=time.time() - 600, before=time.time() + 600) == {"handbook", "bergen"}
    library.raw(request("DELETE", f"{ROUTE}/bergen"))
    assert ids() == {"handbook"}


# Answers


def test_an_answer_cites(library):
    """The fake engine repeats the last message: the passages, and what the question says."""
    reply = library.chat("So [1], and [9]?", rag={"query": "notice period"})
    message = reply.json["choices"][0]["message"]
    assert [citation["marker"] for citation in message["citations"]] == ["[1]"] * len(message["citations"])
    last = message["citations"][-1]
    assert message["content"][last["start"] : last["end"]] == "[1]" and last["document"] == "handbook"
    assert "ninety days" in last["text"] and last["name"] == "handbook.md" and last["version"] == 1
    assert reply.json["rag"]["query"] == "notice period" and reply.json["rag"]["passages"][0]["number"] == 1
    assert message["content"].endswith("</passages>\n\nSo [1], and [9]?")
    # Streamed, the same; the citation comes with the end of its marker.
    events = library.chat("So [1], and [9]?", rag={"query": "notice period"}, stream=True).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert (
        events[0]["rag"] == reply.json["rag"]
        and "".join(delta.get("content", "") for delta in deltas) == message["content"]
    )
    assert [citation for delta in deltas for citation in delta.get("citations", [])] == message["citations"]
    assert all(delta["content"].endswith("]") for delta in deltas if "citations" in delta)


def test_passages_are_shown_in_zpf_or_as_they_are(library):
    def shown(**options) -> tuple[str, int]:
        reply = library.chat("So?", rag={"query": "notice period"} | options)
        return reply.json["choices"][0]["message"]["content"], reply.json["rag"]["passage_tokens"]

    (compact, fewer), (whole, more) = shown(), shown(format="plain")
    assert "The notice period" in whole and "The notice period" not in compact and "notice period" in compact
    assert "ninety days" in compact and fewer < more and shown(format="zpf") == (compact, fewer)


def test_an_answer_without_passages_says_so(library):
    reply = library.chat("xylophone", rag={"stages": ["bm25"]}).json
    assert (
        reply["choices"][0]["message"]["content"] == "xylophone" and reply["choices"][0]["message"]["citations"] == []
    )
    assert reply["rag"]["passages"] == [] and "No passage was found" in reply["rag"]["notes"][-1]
    assert "citations" not in library.chat("hello").json["choices"][0]["message"]


def test_the_official_client(library):
    with openai.OpenAI(base_url=library.base + "/v1", api_key="any", max_retries=0) as client:
        messages = [{"role": "user", "content": "So [1] and [1]?"}]
        more = {"rag": {"query": "notice period"}}
        reply = client.chat.completions.create(model="fake", messages=messages, extra_body=more)
        citations = reply.choices[0].message.citations
        assert citations[0]["document"] == "handbook" and reply.rag["passages"]
        with client.chat.completions.stream(model="fake", messages=messages, extra_body=more) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        assert final.choices[0].message.content == reply.choices[0].message.content
        again = [*messages, reply.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        assert client.chat.completions.create(model="fake", messages=again).choices[0].message.content == "more"


def test_ask(library):
    reply = library.post("/v1/rag/ask", {"question": "notice period [1]", "top_k": 1}).json
    assert reply["choices"][0]["message"]["citations"][-1]["document"] == "handbook"
    events = library.post("/v1/rag/ask", {"question": "notice period [1]", "stream": True}).events
    assert events[-1] == "[DONE]" and events[0]["rag"]["passages"]
    assert library.post("/v1/rag/ask", {"question": "x", "messages": []}).error["param"] == "messages"
    reply = library.post("/v1/rag/ask", {"question": "x", "max_answer_tokens": 10**6})
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "question")


def test_a_session_keeps_the_question_and_not_the_passages(own, tmp_path):
    server = own(key=(ALICE,), database=str(tmp_path / "server.db"))
    server.post(ROUTE, {"text": "The ferry leaves at noon."}, bearer(ALICE))
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "ferry"}],
        "session_id": "s",
        "rag": {},
        "max_tokens": 5,
    }
    assert server.post("/v1/chat/completions", body, bearer(ALICE)).json["rag"]["passages"]
    kept = server.get("/v1/sessions/s", bearer(ALICE)).json["messages"]
    assert kept[0]["content"] == "ferry" and "noon" not in json.dumps(kept)


def test_passages_fit_the_context(own):
    server = own(engine="--max-context 900")
    text = "\n\n".join(f"Paragraph {number} of wool and cotton. " + "words " * 20 for number in range(40))
    server.post(ROUTE, {"text": text, "name": "long.txt", "chunk_tokens": 200, "overlap_tokens": 0})
    reply = server.chat("wool", rag={"top_k": 50}, max_tokens=20).json
    assert 0 < reply["rag"]["passage_tokens"] < 900 and reply["usage"]["prompt_tokens"] + 20 <= 900
    reply = server.chat("wool " * 140, rag={}, max_tokens=100).json
    assert reply["rag"]["passages"] == [] and "room" in reply["rag"]["notes"][-1]


# PDF


def report(encryption: Encryption | None = None) -> bytes:
    made = Pdf()
    made.page().text(72, 700, "The report of the lighthouse at the cape in the far north.")
    made.page().text(72, 700, "The lamp has a range of nineteen miles.")
    return made.data(encryption=encryption)


def send_pdf(server: Harness, data: bytes, query: str = ""):
    return server.raw(request("POST", f"{ROUTE}?name=report.pdf{query}", data, {"content-type": "application/pdf"}))


def test_a_pdf_is_cited_by_its_page(library):
    document = send_pdf(library, report(), "&id=report&chunk_tokens=64&overlap_tokens=0").json
    assert (document["kind"], document["num_pages"]) == ("pdf", 2)
    answer = library.chat(
        "So [1]?", rag={"query": "range of the lamp", "documents": ["report"], "stages": ["bm25"], "top_k": 1}
    ).json
    citation = answer["choices"][0]["message"]["citations"][-1]
    assert citation["page"] == citation["last_page"] == 2 and "nineteen miles" in citation["text"]
    assert "page 2" in answer["choices"][0]["message"]["content"] or " p2" in answer["choices"][0]["message"]["content"]
    library.raw(request("DELETE", f"{ROUTE}/report"))


@pytest.mark.parametrize("method", ["rc4-128", "aes-256"])
def test_an_encrypted_pdf_wants_its_password(library, method):
    data = report(Encryption(method, "open sesame"))
    for query in ("", "&password=wrong"):
        reply = send_pdf(library, data, query)
        assert (
            reply.status == 422 and reply.error["code"] == "unprocessable_file" and "password" in reply.error["message"]
        )
        assert reply.headers["x-should-retry"] == "false"
    assert send_pdf(library, data, "&password=open+sesame&wait=false").status == 400
    document = send_pdf(library, data, "&password=open%20sesame").json
    assert document["num_pages"] == 2
    assert b"sesame" not in library.get(ROUTE).body
    library.raw(request("DELETE", f"{ROUTE}/{document['id']}"))
    for damaged in (data[:200], b"%PDF-1.7 nothing"):
        assert send_pdf(library, damaged).status == 422


def test_pages_that_are_images_are_read_by_the_operators_command(own):
    made = Pdf()
    made.page().box(100, 100, 200, 200)
    server = own()
    reply = send_pdf(server, made.data())
    assert reply.status == 422 and "OCR" in reply.error["message"]
    command = shlex.join([sys.executable, "-c", "print('The picture shows a heron.')", "{image}"])
    server = own(ocr=OcrCommand(command))
    document = send_pdf(server, made.data(), "&id=picture").json
    assert "OCR" in document["warnings"][-1]
    (hit,) = server.post(SEARCH, {"query": "heron"}).json["data"]
    assert hit["page"] == 1 and hit["text"] == "The picture shows a heron."


# Versions, duplicates, lists


def test_versions_and_duplicates(library):
    first = library.post(ROUTE, {"text": "The code is blue.", "name": "c.txt", "id": "code"}).json
    same = library.post(ROUTE, {"text": "The code is blue.", "name": "c.txt", "id": "code"}).json
    assert same["outcome"] == "unchanged" and same["version"] == first["version"] == 1
    twin = library.post(ROUTE, {"text": "The code is blue.", "name": "d.txt", "id": "other"}).json
    assert twin["outcome"] == "duplicate" and twin["duplicate_of"] == twin["id"] == "code"
    assert library.get(f"{ROUTE}/other").status == 404
    second = library.post(ROUTE, {"text": "The code is green.", "name": "c.txt", "id": "code"}).json
    assert (second["version"], second["outcome"], second["created"]) == (2, "replaced", first["created"])
    texts = [hit["text"] for hit in library.post(SEARCH, {"query": "code blue green"}).json["data"]]
    assert "The code is green." in texts and "The code is blue." not in texts
    library.raw(request("DELETE", f"{ROUTE}/code"))


def test_lists_have_pages(own):
    server = own()
    for number in range(7):
        server.post(ROUTE, {"text": f"number {number}", "id": f"d{number}"})
    found, after = [], ""
    while True:
        page = server.get(f"{ROUTE}?limit=3{after and '&after=' + after}").json
        found += [row["id"] for row in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert found == [f"d{number}" for number in range(7)]
    assert server.get(f"{ROUTE}?limit=0").status == 400 and server.get(f"{ROUTE}?order=asc").status == 400


# Tenants


def test_nobody_sees_what_is_anothers(own):
    server = own(key=(ALICE, BOB))
    secret = f"{random.getrandbits(128):032x}"
    added = server.post(ROUTE, {"text": f"The secret of the vault is {secret}.", "id": "vault"}, bearer(ALICE))
    assert added.status == 200
    assert server.post(ROUTE, {"text": "The vault of Bob is empty.", "id": "vault"}, bearer(BOB)).json["version"] == 1
    ready(server, "vault", bearer(ALICE))
    ready(server, "vault", bearer(BOB))
    for query in ("secret of the vault", secret, "vault"):
        for stages in (["bm25"], ["tfidf"], ["dense"], ["bm25", "tfidf", "dense", "rerank"]):
            fields = {"query": query, "stages": stages, "top_k": 50}
            assert secret not in server.post(SEARCH, fields, bearer(BOB)).body.decode().replace(query, "")
    assert server.post(SEARCH, {"query": "secret vault"}, bearer(ALICE)).json["data"][0]["text"].endswith(f"{secret}.")
    server.raw(request("DELETE", f"{ROUTE}/vault", None, bearer(BOB)))
    for method in ("GET", "DELETE"):
        assert server.raw(request(method, f"{ROUTE}/vault", None, bearer(BOB))).status == 404
    assert server.get(ROUTE, bearer(BOB)).json["data"] == []
    assert server.get(f"{ROUTE}/vault", bearer(ALICE)).status == 200
    # The same bytes are nobody's duplicate.
    text = f"The secret of the vault is {secret}."
    assert server.post(ROUTE, {"text": text, "id": "mine"}, bearer(BOB)).json["outcome"] == "created"


def test_the_quota_of_a_tenant(own):
    server = own(key=(ALICE, BOB), documents_bytes=4000)
    assert server.post(ROUTE, {"text": "wool " * 500}, bearer(ALICE)).status == 200
    reply = server.post(ROUTE, {"text": "silk " * 500}, bearer(ALICE))
    assert reply.status == 413 and reply.error["code"] == "request_too_large"
    assert server.post(ROUTE, {"text": "silk " * 500}, bearer(BOB)).status == 200
    (row,) = server.get(ROUTE, bearer(ALICE)).json["data"]
    server.raw(request("DELETE", f"{ROUTE}/{row['id']}", None, bearer(ALICE)))
    assert server.post(ROUTE, {"text": "silk " * 500}, bearer(ALICE)).status == 200


def test_files_that_wait_have_a_bound(own):
    server = own(documents_bytes=100_000)
    sent = request("POST", ROUTE, b"x" * 200_000, {"content-type": "text/plain"})
    reply = server.raw(sent)
    assert reply.status == 413 and reply.error["code"] == "request_too_large"
    wait_for(lambda: os.listdir(server.app.documents().ingest.folder) == ["lock"])
    small = request("POST", ROUTE, b"wool " * 1000, {"content-type": "text/plain"})
    assert server.raw(small).status == 200 and not server.app.documents().ingest._held


def test_a_server_without_documents(server):
    for reply in (server.get(ROUTE), server.post(SEARCH, {"query": "x"}), server.chat("x", rag={})):
        assert (
            reply.status == 400
            and reply.error["code"] == "unsupported_parameter"
            and "--documents" in reply.error["message"]
        )


# Later, and after a restart


def test_without_waiting(own):
    server = own()
    begun = server.post(ROUTE, {"text": HANDBOOK, "name": "h.md", "id": "later", "wait": False}).json
    assert begun["status"] == "queued" and begun["id"] == "later"
    assert ready(server, "later")["num_chunks"]
    wait_for(lambda: sorted(os.listdir(server.app.documents().ingest.folder)) == ["lock"])
    broken = server.raw(
        request("POST", f"{ROUTE}?name=x.txt&wait=false&id=broken", b" \n ", {"content-type": "text/plain"})
    )
    assert broken.status == 200
    wait_for(lambda: server.get(f"{ROUTE}/broken").json["status"] == "failed")
    assert server.get(f"{ROUTE}/broken").json["error"]
    # A restart remembers it, and it can be deleted.
    server = own()
    assert {row["id"]: row["status"] for row in server.get(ROUTE).json["data"]}["broken"] == "failed"
    assert server.raw(request("DELETE", f"{ROUTE}/broken")).status == 200
    assert sorted(os.listdir(server.app.documents().ingest.folder)) == ["lock"]


def test_two_servers_do_not_write_one_file(own, tmp_path):
    server = own()
    assert server.get(ROUTE).status == 200
    other = Harness(documents=str(tmp_path / "documents.db"))
    try:
        reply = other.get(ROUTE)
        assert reply.status == 503 and reply.error["code"] == "storage_unavailable"
        server = own()  # closes the first
        assert server.get(ROUTE).status == 200
    finally:
        other.close()
