"""Documents for mutator.py: seeds of each kind, and what must hold of a mutant that is read: blocks of text that can be stored."""

import docx_writer as word
from pdf_writer import Encryption, Pdf, wrapped

from zse.rag.chunk import chunk_document
from zse.rag.documents import DocumentError, ParseLimits
from zse.rag.parse import code, csv, docx, html, json, markdown, pdf, text

LIMITS = ParseLimits()
PROSE = "The harbour office opened its gates before sunrise, and letters were distributed among the clerks. "
HTML = (
    b"<!doctype html><html><head><title>T</title></head><body><nav>x</nav><h1>A</h1><p class='q'>b &amp; <b>c</b><br>d</p><ul>"
    b"<li>e<ol><li>f</ol></ul><table><tr><th>n<th>m<tr><td>1<td>2</table><pre>g\n h</pre><script>i()</script><!-- j --></body></html>"
)
MARKDOWN = b"---\ntitle: T\n---\n# A\n\nb **c** [d](e)\n\nf\n---\n\n- g\n  1. h\n\n| i | j |\n|---|---|\n| k | l |\n\n```\nm\n```\n<!-- n -->\n> o\n"


def parsed(parse, data: bytes, name: str) -> str:
    """ "accepted" or "refused"; an AssertionError where the document is not as all of them are."""
    try:
        document = parse(data, name, LIMITS)
    except (DocumentError, MemoryError, RecursionError):
        return "refused"
    for block in document.blocks:
        assert block.text.strip() and block.level >= 0 and 0 <= block.page <= max(document.num_pages, 0)
        assert "\0" not in block.text
    chunks = chunk_document(document, lambda texts: [len(one) // 4 + 1 for one in texts], 64, 8)
    assert bool(chunks) == bool(document.blocks)
    return "accepted"


def pdf_seeds() -> list[bytes]:
    made = Pdf()
    page = made.page()
    page.text(72, 740, "A heading", 16, bold=True)
    page.lines(72, 700, wrapped(PROSE * 2, 200, 10))
    page.lines(320, 700, wrapped(PROSE * 2, 200, 10))
    made.page().lines(72, 700, ["a", "b"], mono=True)
    plain = [made.data(compress=False), made.data(object_streams=True), made.data()]
    return plain + [made.data(encryption=Encryption(method, "")) for method in ("rc4-128", "aes-128")]


def docx_seeds() -> list[bytes]:
    body = (
        word.paragraph("A", "H1")
        + word.paragraph("b", number="1")
        + word.table(("c", "d"), ("e", "f"))
        + word.paragraph("g", "C")
    )
    stored = {
        "word/document.xml": word.document(body),
        "word/styles.xml": word.STYLES,
        "word/numbering.xml": word.NUMBERING,
    }
    return [
        word.docx(body),
        word.archive(stored, 0),
        word.document(body).encode(),
        word.document(word.table(("x", "y"))).encode(),
    ]


def docx_or_its_xml(data: bytes, name: str, limits: ParseLimits):
    """A mutant of the XML stands in a whole archive: what a mutant of packed bytes hardly ever reaches."""
    return docx.parse(data if data[:2] == b"PK" else word.archive({"word/document.xml": data}), name, limits)


def kinds() -> dict:
    """Name → (seeds, attempt)."""
    pdf.load()
    return {
        "pdf": (pdf_seeds(), lambda data: parsed(pdf.parse, data, "a.pdf")),
        "docx": (docx_seeds(), lambda data: parsed(docx_or_its_xml, data, "a.docx")),
        "html": ([HTML], lambda data: parsed(html.parse, data, "a.html")),
        "markdown": ([MARKDOWN], lambda data: parsed(markdown.parse, data, "a.md")),
        "json document": (
            [b'{"title": "a", "b": [1, {"c": null}]}', b'{"a": 1}\n{"a": 2}\n'],
            lambda data: parsed(json.parse, data, "a.json"),
        ),
        "csv": ([b'a,b\n1,"x, ""y"""\n', b"a;b\n1;2\n"], lambda data: parsed(csv.parse, data, "a.csv")),
        "plain text": (
            ["Wörter. Zwei.\n\nDrei.".encode(), "Zwei".encode("utf-16")],
            lambda data: parsed(text.parse, data, "a.txt"),
        ),
        "source": (
            [b"import a\n\n\ndef f():\n    x\n\n\nclass C:\n    y\n"],
            lambda data: parsed(code.parse, data, "a.py"),
        ),
    }
