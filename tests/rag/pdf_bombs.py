"""PDFs that are small and would be large, or go round in circles: name → (bytes, words of the refusal or "" where any will do)."""

import functools
import zlib

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


@functools.cache
def bombs() -> dict[str, tuple[bytes, str]]:
    mebi = 1 << 20
    flate = zlib.compress(b" " * (40 * mebi), 9)
    made = Pdf()
    made.page().text(72, 700, "Words.")
    plain = made.data()
    start = int(plain.rpartition(b"startxref\n")[2].split(b"\n")[0])
    encryption = Encryption("aes-256", "p")
    encryption.user = encryption.user[:40] + b"\xff" * 8
    many = b"".join(b"%d 0 obj 0 endobj\n" % number for number in range(9, 300_000))
    nest = 60_000
    return {
        "flate": (content("/FlateDecode", zlib.compress(b" " * (65 * mebi), 9)), "times its size|MiB"),
        "double flate": (content("[/FlateDecode/FlateDecode]", zlib.compress(flate, 9)), "times its size"),
        "long chain": (content("[" + "/FlateDecode" * 5 + "]", flate), "4 filters"),
        "ratio": (content("/FlateDecode", zlib.compress(b" " * (2 * mebi), 9)), "times its size"),
        "run length": (content("/RunLengthDecode", b"\x81 " * mebi), "MiB"),
        "run length chain": (content("[/RunLengthDecode/RunLengthDecode/RunLengthDecode]", b"\x81\x81" * mebi), ""),
        "lzw": (content("/LZWDecode", _lzw(b" " * (4 * mebi))), ""),
        "ascii85": (content("/ASCII85Decode", b"z" * (20 * mebi) + b"~>"), ""),
        "a lying length": (content("", b" " * 100).replace(b"/Length 100", b"/Length 4294967295"), ""),
        "self-Prev": (plain.replace(b"/Info 3 0 R", f"/Prev {start}".encode()).replace(b"(Words.) Tj", b""), ""),
        "pages in pages": (_pages({2: b"<</Type/Pages/Count 1/Kids[2 0 R]>>"}), ""),
        "two that are each other's": (
            _pages({2: b"<</Type/Pages/Count 9/Kids[4 0 R]>>", 4: b"<</Type/Pages/Count 9/Kids[2 0 R]>>"}),
            "",
        ),
        "pages by number": (_pages({2: b"<</Type/Pages/Count 2000000000/Kids[]>>"}), ""),
        "too many pages": (
            _pages({2: b"<</Type/Pages/Count 6000/Kids[%s]>>" % (b"4 0 R " * 6000), 4: b"<</Type/Page/Parent 2 0 R>>"}),
            "5000",
        ),
        "a million objects": (plain.replace(b"xref\n", many + b"xref\n", 1), "200000 objects"),
        "objects by number": (
            plain.replace(b"/Type/Catalog", b"/Type/ObjStm/N 9999999 ", 1).replace(
                b">>\nendobj", b">>stream\n\nendstream\nendobj", 1
            ),
            "",
        ),
        "arrays in arrays": (_pages({2: b"[" * nest + b"]" * nest}), ""),
        "dictionaries in dictionaries": (_pages({2: b"<</Kids" * nest + b">>" * nest}), ""),
        "forms in forms": (content("", b"/X Do " * 10, _form_in_itself(9), "/XObject<</X 6 0 R>>"), ""),
        "cmap of all": (cmap(b"1 beginbfrange <0000> <FFFFFFFF> <0020> endbfrange"), ""),
        "cmap of many": (cmap(b"100 beginbfrange " + b"<0000> <FFFF> <0020> " * 20_000 + b"endbfrange"), ""),
        "key": (made.data(encryption=encryption), "encrypted"),
        "a stream that is its own length": (content("", SHOWN).replace(b"/Length 35", b"/Length 5 0 R"), ""),
        "no end": (content("", b"(" * 5_000_000), ""),
        "operands": (content("", b"0 " * 5_000_000 + b"Tj"), ""),
        "states": (content("", b"q " * 3_000_000), ""),
        "text": (
            content(
                "",
                b"BT /F 1 Tf " + b"(aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa)Tj " * 60_000,
                {6: b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"},
                "/Font<</F 6 0 R>>",
            ),
            "characters",
        ),
    }
