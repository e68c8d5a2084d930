"""The kinds of documents that are read: by their name, media type and first bytes."""

import os
from typing import NamedTuple

from zse.rag.documents import DocumentError

HEAD_BYTES = 4096  # that kind_of() looks at


class DocumentKind(NamedTuple):
    """extensions: without the dot, lower case. signatures: what such a file begins with, where that tells it apart."""

    name: str
    extensions: tuple[str, ...]
    media_types: tuple[str, ...]
    signatures: tuple[bytes, ...] = ()


KINDS = {
    kind.name: kind
    for kind in (
        DocumentKind(
            "text",
            ("txt", "text", "log", "rst", "adoc", "tex", "srt", "ini", "cfg", "conf", "env", "diff"),
            ("text/plain",),
        ),
        DocumentKind("markdown", ("md", "markdown", "mdx", "mkd", "qmd"), ("text/markdown", "text/x-markdown")),
        DocumentKind(
            "html",
            ("html", "htm", "xhtml"),
            ("text/html", "application/xhtml+xml"),
            (b"<!doctype html", b"<html", b"<head", b"<body"),
        ),
        DocumentKind("csv", ("csv", "tsv", "tab", "psv"), ("text/csv", "text/tab-separated-values")),
        DocumentKind(
            "json",
            ("json", "jsonl", "ndjson", "geojson", "ipynb", "webmanifest"),
            (
                "application/json",
                "application/jsonl",
                "application/x-ndjson",
                "application/x-jsonlines",
                "application/ld+json",
            ),
        ),
        DocumentKind(
            "code",
            tuple(
                "py pyi pyx js mjs cjs jsx ts tsx java kt kts scala groovy c h cc cpp cxx hpp hh cu cuh m mm cs go rs swift rb php "
                "pl pm lua r jl sh bash zsh fish ps1 bat sql proto thrift graphql css scss sass less vue svelte dart ex exs erl hs "
                "ml fs clj lisp el vim zig nim v sv vhd asm s f90 f for pas yaml yml toml xml gradle cmake mk make dockerfile".split()
            ),
            (
                "text/x-python",
                "text/javascript",
                "application/javascript",
                "text/x-c",
                "text/css",
                "application/xml",
                "text/xml",
            )
            + ("application/yaml", "application/toml", "application/sql", "application/x-sh"),
        ),
        DocumentKind(
            "docx",
            ("docx", "docm", "dotx"),
            ("application/vnd.openxmlformats-officedocument.wordprocessingml.document",),
        ),
        DocumentKind("pdf", ("pdf",), ("application/pdf", "application/x-pdf"), (b"%pdf-",)),
    )
}
_BY_EXTENSION = {extension: kind.name for kind in KINDS.values() for extension in kind.extensions}
_BY_MEDIA_TYPE = {media_type: kind.name for kind in KINDS.values() for media_type in kind.media_types}
_BY_NAME = {"makefile": "code", "dockerfile": "code", "readme": "text", "license": "text", "changelog": "text"}
_TEXT_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


def kind_of(name: str, media_type: str, head: bytes) -> str:
    """The kind of a file: what its first bytes (HEAD_BYTES) say beyond doubt, else its name, else its media type, else text.
    DocumentError: none that is read here."""
    begin = head.lstrip()[:64].lower()
    if b"%pdf-" in head[:1024].lower():
        return "pdf"  # anything may stand before it within the first 1,024 bytes (ISO 32000-2, implementations)
    base = os.path.basename(name.replace("\\", "/")).lower()
    extension = base.rpartition(".")[2] if "." in base else ""
    kind = (
        _BY_EXTENSION.get(extension)
        or _BY_NAME.get(base)
        or _BY_MEDIA_TYPE.get(media_type.partition(";")[0].strip().lower())
    )
    if head.startswith(b"PK\x03\x04"):
        if kind == "docx" or (kind is None and (b"word/" in head or b"[Content_Types].xml" in head)):
            return "docx"
        raise DocumentError(f"the file is a ZIP archive and no DOCX; {_known()}")
    if kind is not None:
        return kind
    if any(begin.startswith(signature) for signature in KINDS["html"].signatures):
        return "html"
    if b"\0" in head and not head.startswith(_TEXT_MARKS):
        raise DocumentError(f"the file is binary and of no kind that is read; {_known()}")
    return "text"


def checked_kind(kind: str) -> str:
    """A kind that a request names. DocumentError lists those that there are."""
    if kind not in KINDS:
        raise DocumentError(f"no kind {kind[:40]!r} of documents; {_known()}")
    return kind


def _known() -> str:
    return f"kinds: {', '.join(KINDS)}"
