"""The process that parses: what it takes, what it refuses, and that nothing of it is left."""

import asyncio
import os
import subprocess
import sys

import docx_writer as word
import psutil
import pytest
from pdf_writer import Pdf

from zse.rag.documents import DocumentError, ParseLimits
from zse.rag.worker import parse_document, parse_now


@pytest.fixture(autouse=True)
def nothing_is_left():
    files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    others = set(psutil.Process().children(recursive=True))  # of servers that other tests share
    yield
    assert not set(psutil.Process().children(recursive=True)) - others
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files + 2  # what asyncio keeps


def test_a_path_a_descriptor_and_bytes(tmp_path):
    path = tmp_path / "upload-1"
    path.write_bytes(b"# Title\n\nWords.")
    by_path = parse_now(str(path), "a.md")
    with open(path, "rb") as file:
        file.seek(5)
        assert parse_now(file.fileno(), "a.md") == by_path
    assert parse_now(b"# Title\n\nWords.", "a.md") == by_path
    assert (by_path.kind, by_path.title, [block.text for block in by_path.blocks]) == (
        "markdown",
        "Title",
        ["Title", "Words."],
    )


def test_the_event_loop_goes_on_and_tenants_take_turns():
    async def main():
        ends = []

        async def one(tenant):
            await parse_document(b"word " * 1000, "a.txt", tenant=tenant)
            ends.append(tenant)

        await asyncio.gather(*(one("flood") for _ in range(6)), one("other"))
        assert "other" in ends[:4] and len(ends) == 7

    asyncio.run(main())


def test_a_cancelled_task_ends_its_process():
    others = set(psutil.Process().children())

    async def main():
        task = asyncio.create_task(parse_document(b"a\n\n" * 1_000_000, "a.txt"))
        while not set(psutil.Process().children()) - others:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not set(psutil.Process().children()) - others
        assert (await parse_document(b"word", "a.txt")).blocks  # its turn was given back

    asyncio.run(main())


def every_kind() -> dict[str, bytes]:
    made = Pdf()
    made.page().text(72, 700, "Words.")
    notebook = b'{"nbformat": 4, "cells": [{"cell_type": "markdown", "source": ["Words."]}]}'
    return {
        **{
            "a.txt": b"Words.",
            "a.md": b"# Words.",
            "a.html": b'<meta charset="gbk"><p>W&ouml;rds.',
            "a.csv": b"Words.,x",
        },
        **{
            "a.json": b'["Words."]',
            "a.ipynb": notebook,
            "a.py": b"Words.",
            "a.docx": word.docx(word.paragraph("Words.")),
        },
        **{
            "a.pdf": made.data(),
            "u8.txt": "\ufeffWords.".encode(),
            "u16.txt": "Words.".encode("utf-16"),
            "w.txt": b"W\xf6rds.",
        },
    }


@pytest.mark.parametrize("name", every_kind())
def test_every_kind_is_read_behind_the_limits(name):
    (block,) = parse_now(every_kind()[name], name).blocks
    assert block.text.replace("ö", "o").startswith("Words.")


@pytest.mark.parametrize(
    ("data", "name", "words"),
    [
        (b"", "a.txt", "no text"),
        (b" \n\n ", "a.md", "no text"),
        (b"\x00\x01\x02" * 100, "a.bin", "binary"),
        (b"\x00\x01\x02\xff" * 100, "a.txt", "binary"),
        (b"\xff\xfea", "a.txt", "UTF-16"),
        (b"PK\x03\x04" + bytes(99), "a.xlsx", "ZIP"),
    ],
)
def test_what_cannot_be_read_says_why(data, name, words):
    with pytest.raises(DocumentError, match=words) as refused:
        parse_now(data, name)
    assert refused.value.code == "unprocessable_file"


def test_limits_are_held():
    with pytest.raises(DocumentError, match="more than 1 MiB") as refused:
        parse_now(b"a" * (2 << 20), "a.txt", limits=ParseLimits(max_text_bytes=1 << 20))
    assert refused.value.code == "request_too_large"
    with pytest.raises(DocumentError, match="takes more than 0.01 s"):
        parse_now(b"word", "a.txt", limits=ParseLimits(wall_s=0.01))
    with pytest.raises(DocumentError, match="takes more than 16 MiB") as refused:
        parse_now(b"a\n\n" * 1_000_000, "a.txt", limits=ParseLimits(max_memory_bytes=16 << 20))
    assert refused.value.code == "request_too_large"


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DocumentError, match="regular file"):
        parse_now(str(tmp_path / "fifo"), "a.txt")
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(OSError):
        parse_now(str(tmp_path / "link"), "a.txt")


def test_importing_it_imports_no_parser():
    script = "import sys, zse.rag.worker; print([m for m in ('numpy', 'pypdfium2', 'llguidance', 'html.parser') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
