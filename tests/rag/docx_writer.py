"""Writes DOCX files: parts by name, and the XML of usual paragraphs."""

import io
import zipfile
from xml.sax.saxutils import escape

SPACE = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
STYLES = f"""<w:styles {SPACE}><w:style w:styleId="H1"><w:name w:val="heading 1"/></w:style>
<w:style w:styleId="Sub"><w:name w:val="My own"/><w:basedOn w:val="H1"/></w:style>
<w:style w:styleId="Deep"><w:name w:val="Deep"/><w:pPr><w:outlineLvl w:val="2"/></w:pPr></w:style>
<w:style w:styleId="T"><w:name w:val="Title"/></w:style><w:style w:styleId="C"><w:name w:val="Source Code"/></w:style></w:styles>"""
NUMBERING = f"""<w:numbering {SPACE}><w:abstractNum w:abstractNumId="7"><w:lvl w:ilvl="0"><w:numFmt w:val="decimal"/></w:lvl>
<w:lvl w:ilvl="1"><w:numFmt w:val="bullet"/></w:lvl></w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="7"/></w:num></w:numbering>"""


def paragraph(text: str, style: str = "", number: str = "", level: int = 0, before: str = "") -> str:
    properties = f'<w:pStyle w:val="{style}"/>' if style else ""
    if number:
        properties += f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>'
    return f"<w:p><w:pPr>{properties}</w:pPr><w:r>{before}<w:t>{escape(text)}</w:t></w:r></w:p>"


def table(*rows: tuple[str, ...]) -> str:
    return (
        "<w:tbl>"
        + "".join(f"<w:tr>{''.join(f'<w:tc>{paragraph(c)}</w:tc>' for c in row)}</w:tr>" for row in rows)
        + "</w:tbl>"
    )


def document(body: str, head: str = "") -> str:
    return f'<?xml version="1.0" encoding="UTF-8"?>{head}<w:document {SPACE}><w:body>{body}</w:body></w:document>'


def archive(parts: dict[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for name, part in parts.items():
            file.writestr(name, part)
    return out.getvalue()


def docx(body: str, **more: str | bytes) -> bytes:
    parts = {"[Content_Types].xml": "<Types/>", "word/document.xml": document(body), "word/styles.xml": STYLES}
    return archive(parts | {"word/numbering.xml": NUMBERING} | more)
