"""PDFs that are small and would be large, or go round in circles: name → (what makes its bytes, words of the refusal or "" where any will do)."""

import functools
import zlib
from collections.abc import Callable

from pdf_writer import Encryption, Pdf, with_table


def _lzw(data: bytes) -> bytes:
    """LZW as PDF has it (early change), codes from the most significant bit."""
    table = {bytes([byte]): byte for byte in range(256)}
    bits, size, out, word, number = 9, 0, bytearray(), b"", 0

    def put(code: int) -> None:
        nonlocal number, size
        number, size = number << bits | code, size + bits
        while size >= 8:
            out.append(number >> (size - 8) & 255)
            size -= 8
            number &= (1 << size) - 1

    put(256)
    following = 258
    for at in range(len(data)):
        longer = word + data[at : at + 1]
        if longer in table:
            word = longer
            continue
        put(table[word])
        table[longer] = following
        following += 1
        word = data[at : at + 1]
        if following + 1 > 1 << bits:
            bits += 1
        if following == 4094:
            put(256)
            table = {bytes([byte]): byte for byte in range(256)}
            bits, following = 9, 258
    put(table[word])
    put(257)
    return bytes(out) + bytes([number << (8 - size) & 255] if size else b"")


def content(filters: str, data: bytes, more: dict[int, bytes] | None = None, fonts: str = "") -> bytes:
    """A page whose content is this stream."""
    head = f"<</Length {len(data)}{'/Filter' + filters if filters else ''}>>".encode()
    return with_table(
        {
            1: b"<</Type/Catalog/Pages 2 0 R>>",
            2: b"<</Type/Pages/Count 1/Kids[4 0 R]>>",
            3: b"<<>>",
            4: f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 5 0 R/Resources<<{fonts}>>>>".encode(),
            5: head + b"stream\n" + data + b"\nendstream",
            **(more or {}),
        }
    )


SHOWN = b"BT /F 10 Tf 10 10 Td (\1\2\3) Tj ET"


def cmap(ranges: bytes) -> bytes:
    """A font whose codes become text by these ranges."""
    text = b"begincmap 1 begincodespacerange <0000> <FFFF> endcodespacerange " + ranges + b" endcmap"
    fonts = {
        6: b"<</Type/Font/Subtype/Type0/BaseFont/X/Encoding/Identity-H/DescendantFonts[7 0 R]/ToUnicode 8 0 R>>",
        7: b"<</Type/Font/Subtype/CIDFontType2/BaseFont/X/CIDSystemInfo<</Registry(Adobe)/Ordering(Identity)/Supplement 0>>>>",
        8: b"<</Length %d>>stream\n" % len(text) + text + b"\nendstream",
    }
    return content("", b"BT /F 10 Tf 10 10 Td <00010002> Tj ET", fonts, "/Font<</F 6 0 R>>")


def _pages(kids: dict[int, bytes]) -> bytes:
    return with_table({1: b"<</Type/Catalog/Pages 2 0 R>>", 3: b"<<>>", **kids})


def _form_in_itself(depth: int) -> dict[int, bytes]:
    """Forms that each draw the next ten times."""
    forms = {}
    for number in range(6, 6 + depth):
        body = b"/X Do " * 10 if number < 5 + depth else SHOWN
        head = f"<</Type/XObject/Subtype/Form/BBox[0 0 9 9]/Length {len(body)}/Resources<</XObject<</X {number + 1} 0 R>>>>>>"
        forms[number] = head.encode() + b"stream\n" + body + b"\nendstream"
    return forms


MEBI = 1 << 20


@functools.cache
def _flate() -> bytes:
    return zlib.compress(b" " * (40 * MEBI), 9)


@functools.cache
def _words() -> Pdf:
    made = Pdf()
    made.page().text(72, 700, "Words.")
    return made


def _plain() -> bytes:
    return _words().data()


def _own_previous() -> bytes:
    start = int(_plain().rpartition(b"startxref\n")[2].split(b"\n")[0])
    return _plain().replace(b"/Info 3 0 R", f"/Prev {start}".encode()).replace(b"(Words.) Tj", b"")


def _many_objects() -> bytes:
    many = b"".join(b"%d 0 obj 0 endobj\n" % number for number in range(9, 300_000))
    return _plain().replace(b"xref\n", many + b"xref\n", 1)


def _other_key() -> bytes:
    encryption = Encryption("aes-256", "p")
    encryption.user = encryption.user[:40] + b"\xff" * 8
    return _words().data(encryption=encryption)


NEST = 60_000
# What makes each (seconds for some: nobody pays who only asks for the names), and the words of its refusal.
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "flate": (lambda: content("/FlateDecode", zlib.compress(b" " * (65 * MEBI), 9)), "times its size|MiB"),
    "double flate": (lambda: content("[/FlateDecode/FlateDecode]", zlib.compress(_flate(), 9)), "times its size"),
    "long chain": (lambda: content("[" + "/FlateDecode" * 5 + "]", _flate()), "4 filters"),
    "ratio": (lambda: content("/FlateDecode", zlib.compress(b" " * (2 * MEBI), 9)), "times its size"),
    "run length": (lambda: content("/RunLengthDecode", b"\x81 " * MEBI), "MiB"),
    "run length chain": (lambda: content("[/RunLengthDecode/RunLengthDecode/RunLengthDecode]", b"\x81\x81" * MEBI), ""),
    "lzw": (lambda: content("/LZWDecode", _lzw(b" " * (4 * MEBI))), ""),
    "ascii85": (lambda: content("/ASCII85Decode", b"z" * (20 * MEBI) + b"~>"), ""),
    "a lying length": (lambda: content("", b" " * 100).replace(b"/Length 100", b"/Length 4294967295"), ""),
    "self-Prev": (_own_previous, ""),
    "pages in pages": (lambda: _pages({2: b"<</Type/Pages/Count 1/Kids[2 0 R]>>"}), ""),
    "two that are each other's": (
        lambda: _pages({2: b"<</Type/Pages/Count 9/Kids[4 0 R]>>", 4: b"<</Type/Pages/Count 9/Kids[2 0 R]>>"}),
        "",
    ),
    "pages by number": (lambda: _pages({2: b"<</Type/Pages/Count 2000000000/Kids[]>>"}), ""),
    "too many pages": (
        lambda: _pages(
            {2: b"<</Type/Pages/Count 6000/Kids[%s]>>" % (b"4 0 R " * 6000), 4: b"<</Type/Page/Parent 2 0 R>>"}
        ),
        "5000",
    ),
    "a million objects": (_many_objects, "200000 objects"),
    "objects by number": (
        lambda: (
            _plain()
            .replace(b"/Type/Catalog", b"/Type/ObjStm/N 9999999 ", 1)
            .replace(b">>\nendobj", b">>stream\n\nendstream\nendobj", 1)
        ),
        "",
    ),
    "arrays in arrays": (lambda: _pages({2: b"[" * NEST + b"]" * NEST}), ""),
    "dictionaries in dictionaries": (lambda: _pages({2: b"<</Kids" * NEST + b">>" * NEST}), ""),
    "forms in forms": (lambda: content("", b"/X Do " * 10, _form_in_itself(9), "/XObject<</X 6 0 R>>"), ""),
    "cmap of all": (lambda: cmap(b"1 beginbfrange <0000> <FFFFFFFF> <0020> endbfrange"), ""),
    "cmap of many": (lambda: cmap(b"100 beginbfrange " + b"<0000> <FFFF> <0020> " * 20_000 + b"endbfrange"), ""),
    "key": (_other_key, "encrypted"),
    "a stream that is its own length": (lambda: content("", SHOWN).replace(b"/Length 35", b"/Length 5 0 R"), ""),
    "no end": (lambda: content("", b"(" * 5_000_000), ""),
    "operands": (lambda: content("", b"0 " * 5_000_000 + b"Tj"), ""),
    "states": (lambda: content("", b"q " * 3_000_000), ""),
    "text": (
        lambda: content(
            "",
            b"BT /F 1 Tf " + b"(aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa)Tj " * 60_000,
            {6: b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"},
            "/Font<</F 6 0 R>>",
        ),
        "characters",
    ),
}
