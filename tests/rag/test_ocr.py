"""OCR by an operator's command or a callable: what it says stands where the page stood, and it is held to its time."""

import asyncio
import os
import shlex
import subprocess
import sys

import psutil
import pytest
from pdf_writer import Pdf

from zse.errors import ConfigError
from zse.rag import ocr
from zse.rag.documents import DocumentError
from zse.rag.worker import parse_document, parse_now


def scanned() -> bytes:
    made = Pdf()
    made.page().text(72, 700, "First words.")
    made.page().box(100, 100, 300, 300)
    made.page().text(72, 700, "Last words.")
    return made.data()


def command(script: str) -> ocr.OcrCommand:
    return ocr.OcrCommand(f"{shlex.quote(sys.executable)} -c {shlex.quote(script)} {{image}}")


def told(document) -> list[tuple]:
    return [(block.page, block.text) for block in document.blocks]


def test_the_text_stands_where_the_page_stood():
    script = (
        "import sys; d = open(sys.argv[1], 'rb').read(); print('Read', d[1:4].decode() + '.\\n\\n\\nSecond part.\\f')"
    )
    document = parse_now(scanned(), "a.pdf", ocr=command(script))
    assert told(document) == [(1, "First words."), (2, "Read PNG."), (2, "Second part."), (3, "Last words.")]
    assert document.warnings == ["the text of 1 pages was read by OCR"]


def test_a_callable_gets_a_file_that_goes_away():
    paths = []

    def read(path: str) -> str:
        paths.append(path)
        assert os.stat(path).st_size and os.stat(os.path.dirname(path)).st_mode & 0o077 == 0
        return "Called."

    assert told(asyncio.run(parse_document(scanned(), "a.pdf", ocr=read)))[1] == (2, "Called.")
    assert paths and not os.path.exists(os.path.dirname(paths[0]))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; sys.exit(3)", "ended with 3"),
        ("import time; time.sleep(60)", "more than 1 s"),
        ("x = bytearray(3 << 30)", "ended with"),
    ],
)
def test_a_command_that_fails_is_a_warning(monkeypatch, script, words):
    monkeypatch.setattr(ocr, "PAGE_S", 1)
    document = parse_now(scanned(), "a.pdf", ocr=command(script))
    assert told(document) == [(1, "First words."), (3, "Last words.")]
    assert "OCR failed on 1 pages, the first is 2" in document.warnings[0] and words in document.warnings[0]


def test_what_a_command_started_ends_with_it(monkeypatch):
    monkeypatch.setattr(ocr, "PAGE_S", 1)
    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(77)']); time.sleep(60)"
    parse_now(scanned(), "a.pdf", ocr=command(script))
    left = [one for one in psutil.process_iter(["cmdline"]) if "time.sleep(77)" in str(one.info["cmdline"])]
    assert not psutil.wait_procs(left, timeout=10)[1]  # it was killed, and may be on its way


def test_a_document_of_images_alone():
    made = Pdf()
    made.page().box(100, 100, 300, 300)
    with pytest.raises(DocumentError, match="no text; 1 of 1 pages are images without text and were not read by OCR"):
        parse_now(made.data(), "a.pdf")
    assert told(parse_now(made.data(), "a.pdf", ocr=lambda path: "All.")) == [(1, "All.")]
    with pytest.raises(DocumentError, match="no text; the text of 1 pages was read by OCR"):
        parse_now(made.data(), "a.pdf", ocr=lambda path: " \n")


@pytest.mark.parametrize(
    ("given", "words"),
    [("tesseract", "{image}"), ("'x", "quotation"), ("no-such-program {image}", "no program"), ("{image}", "{image}")],
)
def test_commands_that_cannot_be_used(given, words):
    with pytest.raises(ConfigError, match=words):
        ocr.OcrCommand(given)


FAKE = """
class PyTessBaseAPI:
    def __init__(self, lang): self.lang = lang
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def SetImageFile(self, path): self.head = open(path, "rb").read(4)
    def GetUTF8Text(self): return f"{self.lang} {self.head[1:].decode()} \\u00fc\\n"
"""


def test_tesseract_by_its_library(tmp_path):
    """The adapter's calls are those of tesserocr; Tesseract itself is not installed where tests run."""
    (tmp_path / "tesserocr.py").write_text(FAKE)
    run = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from zse.rag.tesseract import main; sys.exit(main(sys.argv[1:]))"
    words = shlex.quote(sys.executable), shlex.quote(run)
    read = ocr.OcrCommand(f"{words[0]} -c {words[1]} {{image}} deu")
    assert told(parse_now(scanned(), "a.pdf", ocr=read))[1] == (2, "deu PNG ü")
    absent = subprocess.run([sys.executable, "-m", "zse.rag.tesseract", "x.png"], capture_output=True, text=True)
    assert absent.returncode == 1 and "pip install 'zse[ocr]'" in absent.stderr
