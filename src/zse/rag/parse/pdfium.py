"""pdfium as far as text wants it: a document's pages, the words of a page with their places, an image of a page.

Runs in the worker process only: pdfium is C++ that reads strangers' bytes. The bindings are those of pypdfium2 (extra `pdf`), which
load() imports."""

import ctypes
import re
import struct
import zlib
from importlib import import_module
from math import hypot
from types import TracebackType
from typing import Any

from zse.rag.documents import DocumentError
from zse.rag.parse.layout import BOLD, MONO, SOFT_HYPHEN, Box

MAX_PAGE_CHARACTERS = 1_000_000  # a page of small print has 10,000
OCR_DPI, MAX_IMAGE_PIXELS = 200, 4_000 * 6_000
_PASSWORD, _SECURITY = 4, 5  # FPDF_GetLastError()
_FIXED_PITCH, _FORCE_BOLD = 1, 1 << 18  # of a font's flags (ISO 32000-2, table 121)
_BOLD_NAME = re.compile(r"bold|black|heavy|semibold|demi", re.IGNORECASE)
_MONO_NAME = re.compile(r"courier|mono|consol|menlo|typewriter|cmtt", re.IGNORECASE)
_HYPHEN_MARKS = ("\x02", "\ufffe")  # pdfium's for a hyphen at a line's end: the next line's word follows at once
_WORD = re.compile(r"[^\s\0\x02\ufffe]+[\x02\ufffe]?")
raw: Any = None
_PNG_HEAD = b"\x89PNG\r\n\x1a\n"


def load() -> None:
    """Import pdfium, before the process closes itself in. DocumentError: it is not installed."""
    global raw
    try:
        raw = import_module("pypdfium2_raw")
    except ModuleNotFoundError:
        raise DocumentError("this server reads no PDF: its operator has to run `pip install 'zse[pdf]'`") from None


class PdfFile:
    """data: the file. password: "" for none. Used in a `with`. DocumentError: it is no PDF, or needs another password."""

    def __init__(self, data: bytes, password: str):
        self._data = data
        raw.FPDF_InitLibrary()
        self._document = raw.FPDF_LoadMemDocument64(data, len(data), password.encode("utf-8") or None)
        if not self._document:
            raise DocumentError(_why(raw.FPDF_GetLastError(), password))

    def __enter__(self) -> "PdfFile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        raw.FPDF_CloseDocument(self._document)

    @property
    def num_pages(self) -> int:
        return raw.FPDF_GetPageCount(self._document)

    def title(self) -> str:
        """What the file's properties say, or ""."""
        buffer = ctypes.create_string_buffer(4096)
        size = raw.FPDF_GetMetaText(self._document, b"Title", buffer, len(buffer))
        return buffer.raw[: min(size, len(buffer)) & ~1].decode("utf-16-le", "replace").replace("\0", "").strip()

    def page(self, index: int) -> "PdfPage":
        """DocumentError: the page is damaged."""
        page = raw.FPDF_LoadPage(self._document, index)
        if not page:
            raise DocumentError(f"page {index + 1} is damaged")
        return PdfPage(page)


def _why(error: int, password: str) -> str:
    if error == _PASSWORD:
        return (
            "the PDF is encrypted, and not with this password"
            if password
            else "the PDF is encrypted: send its `password`"
        )
    if error == _SECURITY:
        return "the PDF is encrypted by a method that is not known"
    return "the file is no PDF, or damaged"


class PdfPage:
    """A page that is open; used in a `with`."""

    def __init__(self, page: object):
        self._page = page
        self._text = None
        self.rotation: int = raw.FPDFPage_GetRotation(page)
        self.width: float = raw.FPDF_GetPageWidthF(page)
        self.height: float = raw.FPDF_GetPageHeightF(page)

    def __enter__(self) -> "PdfPage":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._text is not None:
            raw.FPDFText_ClosePage(self._text)
        raw.FPDF_ClosePage(self._page)

    @property
    def has_images(self) -> bool:
        """Whether it draws any image, so that OCR could find words there."""
        count = min(raw.FPDFPage_CountObjects(self._page), 10_000)
        kinds = (raw.FPDF_PAGEOBJ_IMAGE, raw.FPDF_PAGEOBJ_FORM, raw.FPDF_PAGEOBJ_PATH)
        return any(
            raw.FPDFPageObj_GetType(raw.FPDFPage_GetObject(self._page, index)) in kinds for index in range(count)
        )

    def words(self) -> tuple[list[Box], list[str]]:
        """(words in the file's order, upright as the page is shown; words that stand on their side). DocumentError: too many."""
        text_page = self._text = raw.FPDFText_LoadPage(self._page)
        if not text_page:
            return [], []
        count = raw.FPDFText_CountChars(text_page)
        if count > MAX_PAGE_CHARACTERS:
            raise DocumentError(f"a page has more than {MAX_PAGE_CHARACTERS} characters", "request_too_large")
        if count <= 0:
            return [], []
        text = self._characters(count)
        words: list[Box] = []
        sideways: list[str] = []
        style, size, styled = 0, 0.0, (0.0, 0.0)
        box = raw.FS_RECTF()
        place, get_box = ctypes.byref(box), raw.FPDFText_GetLooseCharBox
        turned = self._turned
        for match in _WORD.finditer(text):
            start, end = match.span()
            if not get_box(text_page, start, place):
                continue
            first = turned(box.left, box.bottom, box.right, box.top)
            get_box(text_page, end - 1, place)
            last = turned(box.left, box.bottom, box.right, box.top)
            word = match[0]
            if word.endswith(_HYPHEN_MARKS):
                word = word[:-1] + SOFT_HYPHEN
            if end - start > 1 and min(first[3], last[3]) - max(first[1], last[1]) < 0.3 * (first[3] - first[1]):
                sideways.append(word.replace(SOFT_HYPHEN, "-"))
                continue
            height = first[3] - first[1]
            if styled != (first[1], height):  # fonts are asked for once a line and height
                style, size, styled = self._style(start), self._size(start), (first[1], height)
            words.append(Box(min(first[0], last[0]), first[1], max(first[2], last[2]), first[3], word, style, size))
        return words, sideways

    def _characters(self, count: int) -> str:
        """One character for each of pdfium's, so that places in it are pdfium's."""
        buffer = (ctypes.c_ushort * (2 * count + 2))()
        size = raw.FPDFText_GetText(self._text, 0, count, buffer)
        text = bytes(buffer)[: 2 * max(size - 1, 0)].decode("utf-16-le", "replace")
        if len(text) != count:
            get = raw.FPDFText_GetUnicode
            codes = (get(self._text, index) for index in range(count))
            text = "".join(chr(code) if 0 < code < 0xD800 or 0xDFFF < code < 0x110000 else " " for code in codes)
        return text

    def _style(self, index: int) -> int:
        buffer, flags = ctypes.create_string_buffer(128), ctypes.c_int()
        size = raw.FPDFText_GetFontInfo(self._text, index, buffer, len(buffer), ctypes.byref(flags))
        name = buffer.raw[: max(0, min(size, len(buffer)) - 1)].decode("latin-1")
        style = BOLD if flags.value & _FORCE_BOLD or _BOLD_NAME.search(name) else 0
        return style | (MONO if flags.value & _FIXED_PITCH or _MONO_NAME.search(name) else 0)

    def _size(self, index: int) -> float:
        """Of the font, times what the text's matrix makes of it."""
        matrix = raw.FS_MATRIX()
        scale = hypot(matrix.c, matrix.d) if raw.FPDFText_GetMatrix(self._text, index, ctypes.byref(matrix)) else 1.0
        return round(raw.FPDFText_GetFontSize(self._text, index) * scale, 1)

    def _turned(self, x0: float, y0: float, x1: float, y1: float) -> tuple[float, float, float, float]:
        """A box as the page is shown: /Rotate turns it clockwise."""
        if not self.rotation:
            return x0, y0, x1, y1
        if self.rotation == 1:
            return y0, self.height - x1, y1, self.height - x0
        if self.rotation == 2:
            return self.width - x1, self.height - y1, self.width - x0, self.height - y0
        return self.width - y1, x0, self.width - y0, x1

    def png(self) -> bytes:
        """The page in shades of grey, OCR_DPI dots an inch, fewer for a large page. DocumentError: it cannot be drawn."""
        scale = OCR_DPI / 72
        pixels = self.width * self.height * scale * scale
        if pixels > MAX_IMAGE_PIXELS:
            scale *= (MAX_IMAGE_PIXELS / pixels) ** 0.5
        width, height = max(1, int(self.width * scale)), max(1, int(self.height * scale))
        bitmap = raw.FPDFBitmap_CreateEx(width, height, raw.FPDFBitmap_Gray, None, 0)
        if not bitmap:
            raise DocumentError("a page is too large to be drawn")
        try:
            raw.FPDFBitmap_FillRect(bitmap, 0, 0, width, height, 0xFFFFFFFF)
            raw.FPDF_RenderPageBitmap(bitmap, self._page, 0, 0, width, height, 0, raw.FPDF_GRAYSCALE)
            stride = raw.FPDFBitmap_GetStride(bitmap)
            dots = ctypes.string_at(raw.FPDFBitmap_GetBuffer(bitmap), stride * height)
        finally:
            raw.FPDFBitmap_Destroy(bitmap)
        lines = b"".join(b"\0" + dots[at : at + width] for at in range(0, stride * height, stride))
        head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
        return _PNG_HEAD + _part(b"IHDR", head) + _part(b"IDAT", zlib.compress(lines, 3)) + _part(b"IEND", b"")


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
