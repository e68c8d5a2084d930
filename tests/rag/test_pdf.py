"""PDF: generated pages whose reading order is known, by every way of storing and encrypting them."""

import random
import sys
import time
import zlib

import pytest
from pdf_writer import Encryption, Pdf, width, wrapped

from zse.rag.documents import DocumentError, ParseLimits
from zse.rag.parse import pdf, pdfium
from zse.rag.worker import parse_now

LIMITS = ParseLimits()
NOUNS = "harbour office clerk correspondence circumstance engine letter morning government instrument reservation valley".split()
VERBS = "opened considered distributed reached transformed followed remembered described".split()


@pytest.fixture(scope="module", autouse=True)
def loaded():
    pdf.load()


def test_a_server_without_pdfium_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdfium2_raw", None)
    with pytest.raises(DocumentError, match=r"pip install 'zse\[pdf\]'"):
        pdf.load()


def prose(seed: int, sentences: int) -> str:
    """Sentences that stand nowhere twice."""
    chosen = random.Random(seed)
    said = []
    for number in range(sentences):
        words = [chosen.choice(NOUNS) if at % 2 else chosen.choice(VERBS) for at in range(chosen.randint(6, 14))]
        said.append(f"Item {seed}x{number} " + " ".join(words) + ".")
    return " ".join(said)


def parsed(made: Pdf, **how):
    return pdf.parse(made.data(**how), "a.pdf", LIMITS)


def told(document) -> list[tuple]:
    return [(block.kind, block.page, block.text) for block in document.blocks]


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("offset", [0, 4.5])
def test_columns_are_read_one_after_the_other(columns, offset):
    """offset: of the baselines of neighbours; a heading stands over all of them, a paragraph under them."""
    made = Pdf()
    page = made.page()
    page.text(72, 740, "A heading over every column of the page, from side to side", 15, bold=True)
    wide = (468 - 24 * (columns - 1)) / columns
    texts = [prose(number, 9 - columns) for number in range(columns)]
    bottom = 740
    for number, text in enumerate(texts):
        end = page.lines(72 + number * (wide + 24), 710 - number * offset, wrapped(text, wide, 10, hyphenate=True))
        bottom = min(bottom, end)
    below = prose(9, 3)
    page.lines(72, bottom - 20, wrapped(below, 468, 10))
    assert told(parsed(made)) == [
        ("heading", 1, "A heading over every column of the page, from side to side"),
        *(("paragraph", 1, text) for text in texts),
        ("paragraph", 1, below),
    ]


def test_the_order_in_the_file_does_not_matter():
    made, order = Pdf(), random.Random(3)
    page = made.page()
    left, right = prose(1, 8), prose(2, 8)
    page.lines(72, 700, wrapped(left, 220, 10))
    page.lines(320, 700, wrapped(right, 220, 10))
    order.shuffle(page.parts)
    assert told(parsed(made)) == [("paragraph", 1, left), ("paragraph", 1, right)]


def test_a_paragraph_goes_on_in_the_next_column():
    made = Pdf()
    page = made.page()
    whole = prose(1, 16)
    lines = wrapped(whole, 220, 10)
    half = next(at for at in range(len(lines) // 2, 0, -1) if lines[at][0].islower() and lines[at - 1][-1] != ".")
    page.lines(72, 700, lines[:half])
    page.lines(320, 700, lines[half:])
    assert told(parsed(made)) == [("paragraph", 1, whole)]


def test_words_that_were_cut_are_whole_and_hyphens_stay():
    made = Pdf()
    made.page().lines(
        72,
        700,
        [
            "They wrote a well-known piece of corre-",
            "spondence, which is well-",
            "known, about the year 1998-",
            "2001.",
        ],
    )
    made.page().lines(72, 700, ["An inter-", "national office."])
    assert [block.text for block in parsed(made).blocks] == [
        "They wrote a well-known piece of correspondence, which is well-known, about the year 1998- 2001.",
        "An international office.",
    ]


def test_paragraphs_by_gap_indent_and_short_line():
    made = Pdf()
    page = made.page()
    one, two, three = prose(1, 3), prose(2, 3), prose(3, 3)
    y = page.lines(72, 700, wrapped(one, 400, 10))
    y = page.lines(72, y - 8, wrapped(two, 400, 10))
    lines = wrapped(three, 400, 10)
    page.text(90, y, lines[0])
    page.lines(72, y - 12, lines[1:])
    assert [block.text for block in parsed(made).blocks] == [one, two, three]


def test_headings_by_size_and_weight():
    made = Pdf()
    for number in range(2):
        page = made.page()
        page.text(72, 740, f"Chapter {number}", 18)
        y = page.lines(72, 700, wrapped(prose(number, 6), 468, 10))
        page.text(72, y - 10, f"Section {number}", 13, bold=True)
        y = page.lines(72, y - 30, wrapped(prose(number + 4, 6), 468, 10))
        page.text(72, y - 10, f"Small {number}", 10, bold=True)
        page.lines(72, y - 24, wrapped(prose(number + 8, 6), 468, 10))
    document = parsed(made)
    assert [(block.text, block.level, block.page) for block in document.blocks if block.kind == "heading"] == [
        *[("Chapter 0", 1, 1), ("Section 0", 2, 1), ("Small 0", 3, 1)],
        *[("Chapter 1", 1, 2), ("Section 1", 2, 2), ("Small 1", 3, 2)],
    ]
    assert document.title == "Chapter 0" and document.num_pages == 2


def test_tables_are_rows():
    made = Pdf()
    page = made.page()
    page.lines(72, 740, wrapped(prose(1, 4), 468, 10))
    rows = [
        ("Name", "Count", "Remark"),
        ("apples", "12", "red and sweet"),
        ("pears", "7", "green"),
        ("plums", "", "blue"),
    ]
    for number, row in enumerate(rows):
        for x, cell in zip((72, 200, 300), row):
            page.text(x, 660 - 14 * number, cell)
    page.text(300, 660 - 14 * 3 - 11, "and small")
    page.lines(72, 560, wrapped(prose(2, 4), 468, 10))
    found = told(parsed(made))
    assert found[1:-1] == [
        ("table", 1, "Name | Count | Remark"),
        ("table", 1, "apples | 12 | red and sweet"),
        ("table", 1, "pears | 7 | green"),
        ("table", 1, "plums |  | blue and small"),
    ]
    assert [block.level for block in parsed(made).blocks[1:-1]] == [1, 0, 0, 0]
    assert found[0][2] == prose(1, 4) and found[-1][2] == prose(2, 4)


def test_lists_and_code():
    made = Pdf()
    page = made.page()
    y = page.lines(72, 740, wrapped(prose(1, 6), 468, 10))
    for number, item in enumerate([prose(2, 2), "short one", prose(3, 2)], 1):
        page.text(72, y - 8, f"{number}.")
        y = page.lines(90, y - 8, wrapped(item, 450, 10))
    y = page.lines(72, y - 8, ["def f(x):", "    return x", "f(1)"], mono=True)
    page.lines(72, y - 8, wrapped(prose(4, 6), 468, 10))
    assert told(parsed(made))[1:-1] == [
        ("list", 1, f"1. {prose(2, 2)}"),
        ("list", 1, "2. short one"),
        ("list", 1, f"3. {prose(3, 2)}"),
        ("code", 1, "def f(x):\n    return x\nf(1)"),
    ]


def test_running_heads_and_page_numbers_are_dropped():
    made = Pdf()
    for number in range(1, 7):
        page = made.page()
        head = "The Book of Harbours" if number % 2 else "Chapter of Letters"
        page.text(72, 760, head, 9)
        page.lines(72, 700, wrapped(prose(number, 5), 468, 10))
        page.text(300, 30, f"Page {number} of 6", 9)
    assert told(parsed(made)) == [("paragraph", number, prose(number, 5)) for number in range(1, 7)]


@pytest.mark.parametrize("rotate", [90, 180, 270])
def test_turned_pages_are_read_as_they_are_shown(rotate):
    made = Pdf()
    page = made.page(612, 792, rotate=rotate)
    lines = wrapped(prose(1, 4), 300, 10)
    for number, line in enumerate(lines):
        x, y = 100, 600 - 12 * number  # of the page as shown
        at = {90: (612 - y, x), 180: (612 - x, 792 - y), 270: (y, 792 - x)}[rotate]
        turn = {90: "0 1 -1 0", 180: "-1 0 0 -1", 270: "0 -1 1 0"}[rotate]
        page.parts.append(f"BT /F0 10 Tf {turn} {at[0]} {at[1]} Tm ({line}) Tj ET")
    assert told(parsed(made)) == [("paragraph", 1, prose(1, 4))]


def test_what_stands_on_its_side_comes_last():
    made = Pdf()
    page = made.page()
    page.parts.append("BT /F0 20 Tf 0 1 -1 0 40 200 Tm (Preprint stamp) Tj ET")
    page.lines(72, 700, wrapped(prose(1, 4), 468, 10))
    assert told(parsed(made)) == [("paragraph", 1, prose(1, 4)), ("paragraph", 1, "Preprint stamp")]


@pytest.mark.parametrize("how", [{"compress": False}, {"object_streams": True}])
def test_ways_of_storing_objects(how):
    made = Pdf()
    made.title = "By the properties"
    made.page().lines(72, 700, wrapped(prose(1, 4), 468, 10))
    document = parsed(made, **how)
    assert told(document) == [("paragraph", 1, prose(1, 4))] and document.title == "By the properties"


@pytest.mark.parametrize("method", ["rc4-40", "rc4-128", "aes-128", "aes-256"])
def test_encrypted_files(method):
    made = Pdf()
    made.page().lines(72, 700, wrapped(prose(1, 4), 468, 10))
    data = made.data(encryption=Encryption(method, "secret"))
    assert prose(1, 4)[:9].encode() not in data
    assert told(pdf.parse(data, "a.pdf", LIMITS, "secret")) == [("paragraph", 1, prose(1, 4))]
    with pytest.raises(DocumentError, match="is encrypted: send its `password`"):
        pdf.parse(data, "a.pdf", LIMITS)
    with pytest.raises(DocumentError, match="not with this password"):
        pdf.parse(data, "a.pdf", LIMITS, "Secret")


def test_the_password_reaches_the_worker():
    made = Pdf()
    made.page().text(72, 700, "Words of the file.")
    data = made.data(encryption=Encryption("aes-128", "señor"))
    assert told(parse_now(data, "a.pdf", password="señor")) == [("paragraph", 1, "Words of the file.")]
    with pytest.raises(DocumentError, match="send its `password`"):
        parse_now(data, "a.pdf")


def test_pages_without_text_are_told():
    made = Pdf()
    made.page().text(72, 700, "Words.")
    made.page().box(100, 100, 300, 300)
    made.page()  # empty: nothing to read there
    document = parsed(made)
    assert document.warnings == ["1 of 3 pages are images without text and were not read by OCR, the first is 2"]
    assert document.num_pages == 3


def test_images_for_ocr_are_png():
    made = Pdf()
    made.page(144, 72).box(0, 0, 72, 72)
    images = []
    pdf.parse(made.data(), "a.pdf", LIMITS, send_image=lambda page, png: images.append((page, png)))
    ((page, png),) = images
    assert page == 1 and png.startswith(b"\x89PNG\r\n\x1a\n") and png[16:24] == bytes([0, 0, 1, 144, 0, 0, 0, 200])
    dots = zlib.decompress(png[png.index(b"IDAT") + 4 : png.index(b"IEND") - 8])
    line = dots[100 * 401 : 101 * 401]
    assert line[10] == 0 and line[390] == 255


def test_widths_are_those_that_pdfium_has():
    """The writer wraps by them: a wrong table would make columns that run into each other."""
    made = Pdf()
    text = "The quick brown fox jumps over 13 lazy dogs."
    made.page().text(72, 700, text)
    with pdfium.PdfFile(made.data(), "") as file, file.page(0) as page:
        words = page.words()[0]
    assert abs(words[-1].x1 - words[0].x0 - width(text, 10)) < 1


def test_a_long_book_is_read_in_time():
    made = Pdf()
    text = prose(1, 30)
    for number in range(60):
        page = made.page()
        page.lines(72, 720, wrapped(text, 220, 9))
        page.lines(320, 720, wrapped(text, 220, 9))
    data = made.data()
    started = time.process_time()
    assert parsed(made).num_pages == 60 and data
    assert time.process_time() - started < 6
