"""Documents that are made to harm: each is refused or read within its time, and its process is all that it reaches."""

import ctypes
import functools
import gc
import io
import os
import random
import re
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import docx_writer as word
import psutil
import pytest
from pdf_bombs import BOMBS
from pdf_writer import Encryption, Pdf

from zse.rag.documents import DocumentError, ParseLimits
from zse.rag.parse import docx, pdf
from zse.rag.worker import parse_now

LIMITS = ParseLimits()
READABLE = {
    "self-Prev",
    "cmap of all",
    "cmap of many",
    "a stream that is its own length",
}  # they do no harm, and have a text


def own_bytes() -> int:
    """Of this process alone, without what it has freed (a bomb is 102 MB while it is made) and without pages of files, which the
    system takes and brings back as it likes."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    if not (status := Path("/proc/self/status")).exists():  # not on Linux: with what others say of it
        return psutil.Process().memory_info().rss
    status = status.read_text()
    return sum(1024 * int(size) for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE))


@pytest.fixture(scope="module", autouse=True)
def the_parent_is_no_larger():
    """By what one bomb takes, after all of them: to weigh a process that has run tests for a while takes 0.3 s of it."""
    before = own_bytes()
    yield
    assert own_bytes() - before < 64 << 20


@pytest.fixture(autouse=True)
def the_parent_is_unharmed():
    process = psutil.Process()
    files = process.num_fds()
    others = set(process.children(recursive=True))  # of servers that other tests share
    yield
    assert not set(process.children(recursive=True)) - others and process.num_fds() == files


@pytest.mark.parametrize("name", BOMBS)
def test_pdf_bombs(name):
    make, words = BOMBS[name]
    data = make()
    started = time.monotonic()
    try:
        document = parse_now(data, "a.pdf")
        assert name in READABLE and document.blocks
    except DocumentError as refused:
        assert not words or any(word in str(refused) for word in [*words.split("|"), "memory"]), str(refused)
    assert time.monotonic() - started < 27  # 25 s and a busy machine's process


def test_a_file_that_takes_too_long_is_stopped():
    with pytest.raises(DocumentError, match="more than 0.5 s to read"):
        parse_now(slow_pdf(), "a.pdf", limits=ParseLimits(wall_s=0.5))
    with pytest.raises(DocumentError, match="more than [12] s to read"):
        parse_now(slow_pdf(), "a.pdf", limits=ParseLimits(cpu_s=1))


def test_mutants_leave_no_worker():
    """ZSE_TEST_DOCUMENT_WORKERS: how many, each in its process (50,000 in `make soak`); tests/reliability/test_mutants.py has the breadth."""
    count, seed = int(os.environ.get("ZSE_TEST_DOCUMENT_WORKERS", "40")), os.environ.get("ZSE_TEST_SEED", "1")
    made = Pdf()
    made.page().lines(72, 700, ["Words of the file.", "More of them."])
    seeds = {
        "a.pdf": made.data(compress=False),
        "b.pdf": made.data(object_streams=True),
        "a.docx": word.docx(word.paragraph("Words.")),
    }
    chosen = random.Random(f"documents {seed}")
    for number in range(count):
        name, data = chosen.choice(sorted(seeds.items()))
        changed = bytearray(data)
        for _ in range(chosen.randint(1, 6)):
            at = chosen.randrange(len(changed))
            changed[at : at + chosen.choice((0, 1, 4, 40))] = chosen.choice(
                (b"", b"\xff", b"9" * 10, bytes(changed[:at][-60:]))
            )
        try:
            assert parse_now(bytes(changed), name).blocks, f"ZSE_TEST_SEED={seed}: {number}"
        except DocumentError as refused:
            assert "\n" not in str(refused)


@functools.cache
def slow_pdf() -> bytes:
    """Some seconds of work."""
    made = Pdf()
    page = made.page()
    page.parts = [
        f"BT /F0 {1 + number % 9} Tf {number % 500} {number % 700} Td (word) Tj ET" for number in range(6_000)
    ]
    made.pages = [page] * 60
    return made.data(compress=False)


@pytest.mark.parametrize("step", [7])
def test_truncated_pdfs(step):
    pdf.load()
    made = Pdf()
    made.page().text(72, 700, "Words of the file.")
    for data in (made.data(), made.data(object_streams=True), made.data(encryption=Encryption("rc4-128", ""))):
        for end in range(0, len(data), step):
            try:
                assert all(block.text for block in pdf.parse(data[:end], "a.pdf", LIMITS).blocks)
            except DocumentError:
                pass


def test_truncated_docx():
    data = word.docx(word.paragraph("Words."))
    for end in range(0, len(data), 5):
        with pytest.raises(DocumentError):
            docx.parse(data[:end], "a.docx", LIMITS)


def zip_of(entries: list[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in entries:
            file.writestr(name, data)
    return out.getvalue()


MAIN = "word/document.xml"
LONG = b"<a>" + b" " * (3 << 20)


def flagged(data: bytes, offset: int, value: int) -> bytes:
    """A field of every entry's records changed: offset in the central one, two less in the local one."""
    changed = bytearray(data)
    for mark, at in ((b"PK\x01\x02", offset), (b"PK\x03\x04", offset - 2)):
        place = data.find(mark)
        while place >= 0:
            struct.pack_into("<H", changed, place + at, value)
            place = data.find(mark, place + 4)
    return bytes(changed)


def _in_ten_steps() -> bytes:
    entity = "".join(f'<!ENTITY e{number} "{f"&e{number - 1};" * 10 if number else "lol"}">' for number in range(10))
    return word.archive({MAIN: word.document("<w:p>&e9;</w:p>", f"<!DOCTYPE d [{entity}]>")})


OUTSIDE = '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
PLAIN = word.docx(word.paragraph("Words."))
DOCX_BOMBS = {
    "ratio": (lambda: zip_of([(MAIN, LONG)]), "200 times"),
    "entries": (lambda: zip_of([(str(number), b"") for number in range(10_001)]), "10000 entries"),
    "two of a name": (
        lambda: zip_of([(MAIN, b"<a/>"), ("word/documenu.xml", b"<a/>")]).replace(b"documenu", b"document"),
        "same name",
    ),
    "entities": (_in_ten_steps, "document type"),
    "outside": (lambda: word.archive({MAIN: word.document("<w:p>&x;</w:p>", OUTSIDE)}), "document type"),
    "deep": (lambda: word.archive({MAIN: "<a>" * 100_000}), "nested more than 200"),
    "encrypted": (lambda: flagged(PLAIN, 8, 1), "encrypted"),
    "another method": (lambda: flagged(PLAIN, 10, 12), "another method"),
    "no end": (lambda: PLAIN[:-30], "cut off|no ZIP"),
    "an old one": (lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "old .doc"),
    "only an archive": (lambda: zip_of([("a/inner.zip", PLAIN)]), "no DOCX"),
    "attributes": (lambda: word.archive({MAIN: "<a " + " ".join(f'a{n}="x"' for n in range(300_000)) + "/>"}), ""),
    "encoding": (lambda: word.archive({MAIN: '<?xml version="1.0" encoding="utf-7"?><a/>'}), "encoding|damaged"),
    "tables": (
        lambda: word.docx("<w:tbl><w:tr><w:tc>" * 70 + word.paragraph("x") + "</w:tc></w:tr></w:tbl>" * 70),
        "nested more",
    ),
}


def test_what_an_archive_unpacks_to_is_bounded():
    data = word.docx(word.paragraph(os.urandom(1 << 20).hex()))
    with pytest.raises(DocumentError, match="limits allow") as refused:
        parse_now(data, "a.docx", limits=ParseLimits(max_stream_bytes=1 << 16))
    assert refused.value.code == "request_too_large"


@pytest.mark.parametrize("name", DOCX_BOMBS)
def test_docx_bombs(name):
    make, words = DOCX_BOMBS[name]
    with pytest.raises(DocumentError) as refused:
        parse_now(make(), "a.docx", kind="docx")
    assert not words or any(word in str(refused.value) for word in words.split("|")), str(refused.value)


def test_names_in_an_archive_reach_nothing(tmp_path):
    hostile = [
        ("../../evil", b"x"),
        ("/etc/evil", b"x"),
        ("C:\\evil", b"x"),
        ("word/embeddings/inner.zip", zip_of([("a", b"x")])),
    ]
    data = zip_of([*hostile, (MAIN, word.document(word.paragraph("Words.")).encode())])
    assert [block.text for block in parse_now(data, "../../a.docx").blocks] == ["Words."]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text", ['=HYPERLINK("http://x")', "@SUM(A1)", "<script>alert(1)</script>", "+cmd|' /C calc'!A0"]
)
def test_formulae_and_scripts_are_text(text):
    quoted = '"' + text.replace('"', '""') + '"'
    assert [block.text for block in parse_now(f"a,b\n{quoted},2\n".encode(), "a.csv").blocks] == [
        "a | b",
        f"{text} | 2",
    ]


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a\0b", "CON", "a" * 4096, "\u202egpj.txt", "a\r\nb", "", "\ud800"]
)
def test_hostile_names(name):
    if name == "\ud800":
        with pytest.raises((DocumentError, UnicodeEncodeError)):
            parse_now(b"Words.", name)
        return
    assert [block.text for block in parse_now(b"Words.", name).blocks] == ["Words."]


def test_a_worker_ends_with_its_parent():
    script = (
        "from zse.rag.worker import parse_now; print('begins', flush=True); parse_now(b'a\\n\\n' * 2_000_000, 'a.txt')"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        parent.stdout.readline()
        process, deadline = psutil.Process(parent.pid), time.monotonic() + 20
        while not (workers := process.children()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
