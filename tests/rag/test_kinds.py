"""What becomes of each kind of document but PDF: blocks in order, nothing of the markup."""

import json as json_module
import time

import docx_writer as word
import pytest

from zse.rag.documents import DocumentError, ParsedDocument, ParseLimits
from zse.rag.parse import code, csv, docx, html, json, markdown, text
from zse.rag.parse.kinds import KINDS, checked_kind, kind_of

LIMITS = ParseLimits()


def blocks(document: ParsedDocument) -> list[tuple]:
    return [(block.kind, block.level, block.text) for block in document.blocks]


@pytest.mark.parametrize(
    ("name", "media_type", "head", "kind"),
    [
        ("a.MD", "", b"x", "markdown"),
        ("a.txt", "text/markdown", b"x", "text"),
        ("upload", "text/markdown; charset=utf-8", b"x", "markdown"),
        ("upload", "application/octet-stream", b"\n <!DOCTYPE html><p>", "html"),
        ("upload", "", b"words", "text"),
        ("upload", "", b"\xff\xfew\0", "text"),
        ("a.txt", "", b"junk %PDF-1.7", "pdf"),
        ("a.docx", "", b"PK\x03\x04...", "docx"),
        ("upload", "", b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml", "docx"),
        ("folder/x.py", "text/plain", b"x", "code"),
        ("Makefile", "", b"all:", "code"),
        ("C:\\x\\t.tsv", "", b"a\tb", "csv"),
        ("a.jsonl", "", b"{}", "json"),
    ],
)
def test_a_kind_is_known_by_content_then_name_then_media_type(name, media_type, head, kind):
    assert kind_of(name, media_type, head) == kind


@pytest.mark.parametrize(
    ("name", "head"), [("a.xlsx", b"PK\x03\x04"), ("a", b"\x7fELF\0\0"), ("a.png", b"\x89PNG\r\n\x1a\n\0")]
)
def test_other_files_are_refused_with_the_kinds_that_there_are(name, head):
    with pytest.raises(DocumentError, match="kinds: text, markdown, html, csv, json, code, docx, pdf"):
        kind_of(name, "", head)


def test_the_table_of_kinds_says_nothing_twice():
    for values in (
        [e for kind in KINDS.values() for e in kind.extensions],
        [m for kind in KINDS.values() for m in kind.media_types],
    ):
        assert len(values) == len(set(values))
    with pytest.raises(DocumentError, match="no kind 'exe'"):
        checked_kind("exe")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252", "latin-1"])
def test_encodings(encoding):
    document = text.parse("Zürich, naïve café\r\nline two\r\rnext".encode(encoding), "a.txt", LIMITS)
    assert [block.text for block in document.blocks] == ["Zürich, naïve café\nline two", "next"]
    assert bool(document.warnings) == (encoding in ("cp1252", "latin-1"))


def test_text_knows_where_its_paragraphs_stand():
    source = "\n\n One.\nTwo.  \n \n\nThree."
    document = text.parse(source.encode(), "a.txt", LIMITS)
    assert [block.text for block in document.blocks] == [" One.\nTwo.", "Three."]
    assert all(source[block.start :].startswith(block.text) for block in document.blocks)


MARKDOWN = """---
title: "The guide"
---
# Head `one`

Some **bold** and _soft_ [link](http://x.y) ![pic](p.png) text <!-- not
this --> here.
Second line.

Sub
---

- item *a*
  goes on
1) first
    * deep

| n | m |
|---|:-:|
| 1 | a \\| b |

```py
x = "*kept*"

y
```
> quoted

***
    indented
"""


def test_markdown():
    document = markdown.parse(MARKDOWN.encode(), "a.md", LIMITS)
    assert document.title == "The guide"
    assert blocks(document) == [
        ("code", 0, 'title: "The guide"'),
        ("heading", 1, "Head one"),
        ("paragraph", 0, "Some bold and soft link pic text\nhere.\nSecond line."),
        ("heading", 2, "Sub"),
        ("list", 0, "- item a\ngoes on"),
        ("list", 0, "1) first"),
        ("list", 2, "- deep"),
        ("table", 1, "n | m"),
        ("table", 0, "1 | a | b"),
        ("code", 0, 'x = "*kept*"\n\ny'),
        ("paragraph", 0, "quoted"),
        ("code", 0, "indented"),
    ]


HTML = """<!doctype html><html><head><title>A &amp; B</title><style>p{}</style></head><body><nav><ul><li>Home</ul></nav>
<h1>Hi <b>there</b></h1><p>One<br>two
 three<p>Four<ul><li>a<ol start=3><li>x<li>y</ol><li><p>b</p></ul>
<table><thead><tr><td>n<td>m</thead><tr><td>1<td>2 <table><tr><td>in</table></table><pre>x
  y &lt;z
</pre><script>alert("<p>")</script>done &#9999999999; 3 < 4 <img alt="pic" src=x> <a href="x>y" onclick='z'>link</a>
<textarea>typed <b></textarea></body>"""


def test_html():
    document = html.parse(HTML.encode(), "a.html", LIMITS)
    assert document.title == "A & B"
    assert blocks(document) == [
        ("heading", 1, "Hi there"),
        ("paragraph", 0, "One\ntwo three"),
        ("paragraph", 0, "Four"),
        ("list", 0, "- a"),
        ("list", 1, "3. x"),
        ("list", 1, "4. y"),
        ("list", 0, "- b"),
        ("table", 1, "n | m"),
        ("table", 0, "1 | 2 in"),
        ("code", 0, "x\n  y <z"),
        ("paragraph", 0, "done \ufffd 3 < 4 pic link typed <b>"),
    ]


def test_html_says_its_encoding_and_may_forget_to_end_things():
    assert blocks(html.parse('<meta charset="koi8-r"><p>Привет'.encode("koi8-r"), "a", LIMITS)) == [
        ("paragraph", 0, "Привет")
    ]
    assert blocks(html.parse(b"<nav>all there is", "a", LIMITS)) == [("paragraph", 0, "all there is")]
    assert blocks(html.parse(b"<nav>menu<main>text", "a", LIMITS)) == [("paragraph", 0, "text")]
    assert blocks(html.parse(b"<p>before<script>x", "a", LIMITS)) == [("paragraph", 0, "before")]


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        ('a,b\n1,"x, ""y""\nz"\n2,=cmd()\n', [(1, "a | b"), (0, '1 | x, "y" z'), (0, "2 | =cmd()")]),
        ('n;m\n1,5;"x"\n2,5;y', [(1, "n | m"), (0, "1,5 | x"), (0, "2,5 | y")]),
        ("1\t2\n3\t4\n", [(0, "1 | 2"), (0, "3 | 4")]),
        ("one,two\n", [(0, "one | two")]),
        ("a,,b\n,,\n1,,2", [(0, "a |  | b"), (0, "1 |  | 2")]),
    ],
)
def test_csv(source, rows):
    assert [(block.level, block.text) for block in csv.parse(source.encode(), "a.csv", LIMITS).blocks] == rows


def test_json():
    one = {"title": "T", "a": {"b": [1, 2.5], "c": [{"x": 1}, {"y": None}]}, "text": "two\nlines"}
    document = json.parse(json_module.dumps(one).encode(), "a.json", LIMITS)
    assert document.title == "T"
    assert [block.text for block in document.blocks] == [
        "title: T",
        "a.b: 1, 2.5\na.c[0].x: 1\na.c[1].y: null",
        "text: two\nlines",
    ]
    for source in ('[{"a": 1}, {"a": "x"}]', '{"a": 1}\n\n{"a": "x"}\n'):
        assert [block.text for block in json.parse(source.encode(), "a", LIMITS).blocks] == ["a: 1", "a: x"]
    twice = json.parse(b'{"k": 1e400, "k": 123456789012345678901234567890, "n": NaN}', "a", LIMITS)
    assert [block.text for block in twice.blocks] == ["k: 1e400", "k: 123456789012345678901234567890", "n: NaN"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('{"a": 1}\n{"a":', "line 2, column"),
        ("[1,\n2,,]", "line 2, column 3"),
        ("[" * 100_000, "deep"),
        ('{"a":' * 60, "JSON"),
    ]
    + [('{"a":' * 60 + "1" + "}" * 60, "deep"), ("words", "line 1, column 1")],
)
def test_what_is_no_json_says_where(source, words):
    with pytest.raises(DocumentError, match=words):
        json.parse(source.encode(), "a.json", LIMITS)


def test_a_long_name_stands_once():
    source = json_module.dumps({"n" * 100_000: {str(number): [{"x": number}] for number in range(2000)}})
    total = sum(len(block.text) for block in json.parse(source.encode(), "a", LIMITS).blocks)
    assert total < 500_000


def test_a_notebook():
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {
            "cell_type": "code",
            "source": "x = 1\nx",
            "outputs": [{"text": ["out\n"]}, {"data": {"text/plain": "1", "image/png": "A=="}}],
        },
    ]
    source = json_module.dumps({"nbformat": 4, "cells": cells})
    assert blocks(json.parse(source.encode(), "a.ipynb", LIMITS)) == [
        ("heading", 1, "Title"),
        ("paragraph", 0, "words"),
        ("code", 0, "x = 1\nx"),
        ("code", 0, "out"),
        ("code", 0, "1"),
    ]


def test_code_is_cut_where_its_functions_begin():
    python = "import a\n\n\n# what f does\n@deco\ndef f():\n    x = 1\n\n    return x\n\n\nclass C:\n    def g(self):\n        pass\n"
    found = [block.text for block in code.parse(python.encode(), "a.py", LIMITS).blocks]
    assert found == [
        "import a",
        "# what f does\n@deco\ndef f():\n    x = 1\n\n    return x",
        "class C:\n    def g(self):\n        pass",
    ]
    braces = "#include <x>\n\n// main\nint main() {\n  a;\n\n  b;\n}\nint g() {\n}\n"
    found = [block.text for block in code.parse(braces.encode(), "a.c", LIMITS).blocks]
    assert found == ["#include <x>", "// main\nint main() {\n  a;\n\n  b;\n}", "int g() {\n}"]


def test_a_long_class_is_cut_at_its_methods():
    source = "class C:\n" + "\n".join(f"    def f{number}(self):\n        return {'x' * 300}\n" for number in range(30))
    document = code.parse(source.encode(), "a.py", LIMITS)
    assert len(document.blocks) == 30 and all(block.text.count("def f") == 1 for block in document.blocks)
    assert all(source[block.start :].startswith(block.text) for block in document.blocks)


BODY = (
    word.paragraph("The title", "T")
    + word.paragraph("Part", "Sub")
    + word.paragraph("one", number="1")
    + word.paragraph("under", number="1", level=1)
    + word.paragraph("two", number="1")
    + word.table(("n", "m"), ("1", "2"))
    + word.paragraph("Deeper", "Deep")
    + "<w:p><w:r><w:t>kept </w:t></w:r><w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:ins><w:r><w:t>new</w:t></w:r></w:ins>"
    + "<w:r><w:br/><w:t>line</w:t></w:r></w:p>"
    + word.paragraph("x = 1", "C")
    + word.paragraph("  y", "C")
    + word.paragraph("Second page.", before="<w:lastRenderedPageBreak/>")
)


def test_docx():
    notes = word.document(word.paragraph("A note."))
    document = docx.parse(word.docx(BODY, **{"word/footnotes.xml": notes}), "a.docx", LIMITS)
    assert (document.title, document.num_pages) == ("The title", 2)
    assert blocks(document) == [
        ("heading", 1, "The title"),
        ("heading", 1, "Part"),
        ("list", 0, "1. one"),
        ("list", 1, "- under"),
        ("list", 0, "2. two"),
        ("table", 1, "n | m"),
        ("table", 0, "1 | 2"),
        ("heading", 3, "Deeper"),
        ("paragraph", 0, "kept new\nline"),
        ("code", 0, "x = 1\n  y"),
        ("paragraph", 0, "Second page."),
        ("paragraph", 0, "A note."),
    ]
    assert [block.page for block in document.blocks] == [1] * 10 + [2, 0]


@pytest.mark.parametrize("kind", [html, csv, json, code])
@pytest.mark.parametrize(
    "source",
    [
        '<a "',
        "<a '>",
        "<",
        "<!--",
        "&#",
        "&a",
        "<table>",
        "<ul>",
        "<li>",
        "<td>",
        "<script>",
        '<b "> "',
        "<p>a",
        "a b=c ",
        "<pre>",
    ]
    + [
        '"',
        '"a',
        ",",
        "[0,",
        '{"a":',
        "1\n",
        "a\n\n",
        "}\n",
        "@a\n\n",
        "\n",
        "  a\n\n",
        "<nav>",
        "<h1>",
        "alt=' ",
        "<br>",
    ],
)
def test_time_grows_with_the_text(kind, source):
    """Four times the text may take twelve times as long: what is quadratic takes sixteen times."""

    def spent(size: int) -> float:
        data = ("<img " + source * (size // len(source)) + "x").encode()
        started = time.process_time()
        try:
            kind.parse(data, "x", LIMITS)
        except DocumentError:
            pass
        return time.process_time() - started

    short = min(spent(20_000) for _ in range(2))
    assert spent(80_000) < 12 * short + 0.05
