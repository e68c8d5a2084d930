"""The documents of the web page in headless Chromium: added, listed, searched, deleted, and cited in the chat."""

import base64
import json
import os
from pathlib import Path

import pytest
from harness import Harness
from pages import LAST, ask, press_in, row
from test_documents import Encryption, report

HOSTILE = "<img src=x onerror=alert(1)>=cmd|' /C calc'!A0\u202e"
DROP = """((name, text) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    document.querySelector('.drop').dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}));
})"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    server = Harness(documents=str(tmp_path_factory.mktemp("documents") / "documents.db"))
    yield server
    server.close()


@pytest.fixture
def tab(chromium, library):
    chromium.window()
    chromium.errors.clear()
    chromium.open(library.base + "/version")
    chromium.forget(library.base)
    chromium.open(library.base + "/#documents")
    chromium.wait("document.querySelector('.drop')")
    chromium.evaluate(
        "window.refused = []; addEventListener('securitypolicyviolation', e => refused.push(e.violatedDirective)); 0"
    )
    yield chromium
    assert not chromium.errors and chromium.evaluate("window.refused ?? []") == []
    chromium.send("Page.navigate", url="about:blank")


def drop(tab, name: str, text: str) -> None:
    tab.evaluate(f"{DROP}({json.dumps(name)}, {json.dumps(text)})")


def shoot(tab, name: str) -> None:
    """ZSE_TEST_SCREENSHOTS=FOLDER keeps pictures; no view is wider than its window."""
    for width, shape in ((1280, "wide"), (390, "narrow")):
        for dark in (False, True):
            tab.window(width, 900, dark=dark, phone=width < 500)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            if folder := os.environ.get("ZSE_TEST_SCREENSHOTS"):
                tab.screenshot(Path(folder) / f"{name}-{shape}{'-dark' * dark}.png")
    tab.window()


def test_documents_come_and_go(tab, library, tmp_path):
    tab.wait("document.body.innerText.includes('There are none')")
    (tmp_path / "handbook.md").write_text("# Notice\n\nThe notice period is ninety days.\n")
    root = tab.send("DOM.getDocument")["root"]["nodeId"]
    field = tab.send("DOM.querySelector", nodeId=root, selector=".drop input")["nodeId"]
    tab.send("DOM.setFileInputFiles", nodeId=field, files=[str(tmp_path / "handbook.md")])
    tab.wait(f"{row('handbook.md')}?.innerText.includes('ready')")
    assert "markdown" in tab.evaluate(f"{row('handbook.md')}.innerText")
    assert "1 passage" in tab.evaluate("document.querySelector('.uploads').innerText")
    drop(tab, "empty.txt", "   ")
    tab.wait("document.querySelector('.uploads .error')?.innerText.includes('no text')")
    drop(tab, f"{HOSTILE}.txt", f"{HOSTILE} says the walrus <script>alert(2)</script>")
    tab.wait("[...document.querySelectorAll('.uploads .error')].at(-1)?.innerText.includes('printable')")
    drop(tab, "<b>walrus.txt", f"{HOSTILE} says the walrus <script>alert(2)</script>")
    tab.wait(f"{row('<b>walrus.txt')}?.innerText.includes('ready')")
    # A search, whose hits are text.
    tab.evaluate("document.querySelector('[name=query]').focus()")
    tab.type("walrus")
    tab.press("Enter")
    tab.wait("document.querySelector('.passage')")
    found = tab.evaluate("document.querySelector('.passage').innerText")
    assert "<script>alert(2)</script>" in found and "<b>walrus.txt" in found and "bm25 1" in found
    assert tab.evaluate("document.querySelectorAll('.documents img, .documents script, .documents b').length") == 0
    shoot(tab, "documents")
    press_in(tab, row("<b>walrus.txt"), "Delete")
    press_in(tab, row("<b>walrus.txt"), "Delete, really")
    tab.wait(f"!{row('<b>walrus.txt')}")
    assert [each["name"] for each in library.get("/v1/rag/documents").json["data"]] == ["handbook.md"]


def test_an_answer_shows_what_it_cites(tab, library):
    added = library.post(
        "/v1/rag/documents", {"text": "The ferry leaves at noon.", "name": "ferry<i>.txt", "id": "ferry"}
    )
    assert added.status == 200
    tab.evaluate("location.hash = 'chat'")
    tab.wait("document.querySelector('#question')")
    ask(tab, "When does the ferry leave [1]?")
    assert tab.evaluate(f"{LAST}.querySelectorAll('.passage').length") == 0
    tab.click("[name=documents]")
    ask(tab, "When does the ferry leave [1]?")
    passage = f"{LAST}.querySelector('.passage')"
    assert tab.evaluate(f"{LAST}.querySelectorAll('.passage').length") >= 1
    assert tab.evaluate(f"{passage}.open") is False
    assert tab.evaluate(f"{passage}.querySelector('summary').innerText").startswith("[1] ferry<i>.txt")
    tab.evaluate(f"{passage}.querySelector('summary').click()")
    assert "The ferry leaves at noon." in tab.evaluate(f"{passage}.innerText")
    shoot(tab, "cited")
    # It is kept with the chat, and the switch with the browser.
    tab.send("Page.reload")
    tab.wait(f"{LAST}?.querySelector('.passage')")
    assert tab.evaluate("document.querySelector('[name=documents]').checked")
    library.raw(b"DELETE /v1/rag/documents/ferry HTTP/1.1\r\nhost: localhost\r\n\r\n")


def test_an_encrypted_file_asks_for_its_password(tab, library):
    encoded = base64.b64encode(report(Encryption("aes-128", "open sesame"))).decode()
    tab.evaluate(f"{DROP}('secret.pdf', Uint8Array.from(atob('{encoded}'), (letter) => letter.charCodeAt(0)))")
    tab.wait("document.querySelector('.uploads [name=password]')")
    assert "password" in tab.evaluate("document.querySelector('.uploads .error').innerText")
    for word, then in (
        ("wrong", "document.querySelector('.uploads .error')?.innerText.includes('not with this')"),
        ("open sesame", "true"),
    ):
        tab.evaluate("document.querySelector('.uploads [name=password]').select()")
        tab.type(word)
        tab.press("Enter")
        tab.wait(then)
    tab.wait(f"{row('secret.pdf')}?.innerText.includes('ready')")
    (document,) = [each for each in library.get("/v1/rag/documents").json["data"] if each["name"] == "secret.pdf"]
    library.raw(f"DELETE /v1/rag/documents/{document['id']} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
