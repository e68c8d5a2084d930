"""Pages that are images: an operator's command, or a callable, reads them. The worker process renders them; nothing here does."""

import contextlib
import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable

from zse.errors import ConfigError
from zse.lazy import shutil, subprocess, tempfile
from zse.rag.documents import DocumentError, ParsedDocument
from zse.rag.parse.text import paragraphs

PAGE_S, DOCUMENT_S = 30.0, 300.0  # that pages may take, one and all of a document
MAX_OUTPUT_BYTES = 1 << 20  # of one page
MAX_IMAGES_BYTES = 1 << 30  # of one document, on disk
_COMMAND_MEMORY = 2 << 30

Ocr = Callable[[str], str]  # path of a PNG → its text; raises DocumentError


class PageImages:
    """PNG files of one document's pages, in a folder of their own that goes with the stack."""

    def __init__(self, stack: contextlib.ExitStack):
        self.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zse-ocr-"))
        self.pages: dict[int, str] = {}
        self._left = MAX_IMAGES_BYTES

    def add(self, page: int, png: bytes) -> None:
        """Keep a page's image. DocumentError: all of them have more than MAX_IMAGES_BYTES."""
        self._left -= len(png)
        if self._left < 0:
            raise DocumentError(
                f"the images of the pages have more than {MAX_IMAGES_BYTES >> 20} MiB", "request_too_large"
            )
        path = os.path.join(self.folder, f"page-{page}.png")
        with open(path, "wb") as file:
            file.write(png)
        self.pages[page] = path


def read_pages(document: ParsedDocument, images: PageImages, ocr: Ocr, is_stopped: Callable[[], bool]) -> None:
    """Put the text of the images where the pages stand. A page that cannot be read is a warning of the document; so are those that
    are left when DOCUMENT_S has passed."""
    deadline, failed, late, why = time.monotonic() + DOCUMENT_S, [], [], ""
    found = []
    for page, path in sorted(images.pages.items()):
        if is_stopped() or time.monotonic() > deadline:
            late.append(page)
            continue
        try:
            text = ocr(path)
        except DocumentError as error:
            failed.append(page)
            why = str(error)
            continue
        for block in paragraphs(text.replace("\r\n", "\n").replace("\0", "").replace("\f", "\n\n").replace("\r", "\n")):
            block.page, block.start = page, -1
            found.append(block)
    if found:
        document.blocks = sorted(
            document.blocks + found, key=lambda block: block.page
        )  # stable: pages have one source each
    if failed:
        document.warnings.append(f"OCR failed on {len(failed)} pages, the first is {failed[0]}: {why}")
    if late:
        document.warnings.append(f"OCR had no time for {len(late)} pages, the first is {late[0]}")
    document.warnings.append(f"the text of {len(images.pages) - len(failed) - len(late)} pages was read by OCR")


class OcrCommand:
    """`--ocr-command 'tesseract {image} stdout'`: split as a shell splits, run without one; {image} is the path of a PNG, what it
    writes to its standard output is the text, in UTF-8."""

    def __init__(self, command: str):
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--ocr-command: {error}") from None
        if not any("{image}" in word for word in self._words[1:]):
            raise ConfigError("--ocr-command needs a program and {image}, such as 'tesseract {image} stdout'")
        if shutil.which(self._words[0]) is None:
            raise ConfigError(f"--ocr-command: there is no program {self._words[0]!r}")

    def __call__(self, path: str) -> str:
        """The page's text. DocumentError: the command fails, or takes more than PAGE_S seconds."""
        words = [word.replace("{image}", path) for word in self._words]
        keep = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TESSDATA_PREFIX", "TMPDIR")
        environment = {name: os.environ[name] for name in keep if name in os.environ} | {"OMP_THREAD_LIMIT": "1"}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd=os.path.dirname(path),
                start_new_session=True,
            )
            _limit(process.pid)
            try:
                code = process.wait(PAGE_S)
            except subprocess.TimeoutExpired:
                raise DocumentError(f"the OCR command takes more than {PAGE_S:g} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it started
                process.wait()
            if code:
                raise DocumentError(f"the OCR command ended with {code}")
            output.seek(0)
            return output.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")


def _limit(pid: int) -> None:
    if sys.platform != "linux":
        return
    for number, most in (
        (resource.RLIMIT_AS, _COMMAND_MEMORY),
        (resource.RLIMIT_CPU, int(PAGE_S) + 1),
        (resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES * 16),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, number, (most, most))
