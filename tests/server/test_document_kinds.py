"""Kinds of documents over HTTP: an encrypted PDF and its password, a bomb, pages that OCR reads, a DOCX and a table."""

import base64
import sys
from pathlib import Path

import pytest
from harness import Harness, request

sys.path.append(str(Path(__file__).parents[1] / "rag"))
import docx_writer as word  # noqa: E402
from pdf_bombs import BOMBS  # noqa: E402
from pdf_writer import Encryption, Pdf  # noqa: E402

ROUTE, SEARCH = "/v1/rag/documents", "/v1/rag/search"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    server = Harness(documents=str(tmp_path_factory.mktemp("documents") / "documents.db"))
    yield server
    server.close()


def two_pages() -> Pdf:
    made = Pdf()
    made.page().text(72, 700, "The first page is about apples.")
    made.page().text(72, 700, "Termination needs ninety days of notice.")
    return made


def sent(library, data: bytes, name: str, **fields):
    return library.post(ROUTE, {"data": base64.b64encode(data).decode(), "name": name, **fields})


@pytest.mark.parametrize("method", ["rc4-40", "rc4-128", "aes-128", "aes-256"])
def test_an_encrypted_pdf_needs_its_password(library, method):
    data = two_pages().data(encryption=Encryption(method, f"secret {method}"))
    for password, words in ((None, "send its `password`"), ("wrong", "not with this password")):
        reply = sent(library, data, "contract.pdf", **({"password": password} if password else {}))
        assert (reply.status, reply.json["error"]["code"]) == (422, "unprocessable_file")
        assert words in reply.json["error"]["message"]
    reply = sent(library, data, "contract.pdf", password=f"secret {method}", id=method)
    assert (reply.status, reply.json["kind"], reply.json["num_pages"]) == (200, "pdf", 2), reply.body
    (best,) = library.post(
        SEARCH, {"query": "termination notice", "top_k": 1, "stages": ["bm25"], "documents": [method]}
    ).json["data"]
    assert "ninety days of notice" in best["text"] and best["document"] == method
    assert library.raw(request("DELETE", f"{ROUTE}/{method}")).json["deleted"]


def test_a_bomb_is_422(library):
    reply = library.raw(
        request("POST", f"{ROUTE}?name=a.pdf", BOMBS["double flate"][0](), {"content-type": "application/pdf"})
    )
    assert (reply.status, reply.json["error"]["code"]) == (422, "unprocessable_file")
    assert "times its size" in reply.json["error"]["message"]


def test_office_files_and_tables(library):
    body = word.paragraph("Travel", "H1") + word.table(("city", "limit"), ("Zurich", "210 francs"))
    for name, data, kind in (
        ("travel.docx", word.docx(body), "docx"),
        ("limits.csv", b"city,limit\nOslo,190 crowns\n", "csv"),
    ):
        reply = sent(library, data, name)
        assert (reply.status, reply.json["kind"]) == (200, kind), reply.body
    (best,) = library.post(SEARCH, {"query": "limit Zurich", "top_k": 1, "stages": ["bm25"]}).json["data"]
    assert best["text"].endswith("city | limit\nZurich | 210 francs") and best["name"] == "travel.docx"
