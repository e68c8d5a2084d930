"""What the parts of retrieval hand to each other."""

from typing import Literal

import msgspec

from zse.errors import ZSEError

BlockKind = Literal["heading", "paragraph", "list", "table", "code"]


class DocumentError(ZSEError):
    """A document that cannot be used: damaged, encrypted with another password, too large, without text. The message is one line
    for its sender; code: of the API's error, "unprocessable_file" or "request_too_large"."""

    code: str

    def __init__(self, message: str, code: str = "unprocessable_file"):
        super().__init__(message)
        self.code = code


class TextBlock(msgspec.Struct, array_like=True):
    """A part of a document in reading order. text: without markup; of a table one row, its cells separated by " | "; of a list one
    item with its mark. level: of a heading, 1 is the highest; of a table's row 1 where it names the columns; of a list's item how
    deep it lies, from 0. page: from 1, 0 where there are none. start: of the text, in characters of the document's source (line
    ends are one character), -1 where that is no text."""

    kind: BlockKind
    text: str
    level: int = 0
    page: int = 0
    start: int = -1


class ParsedDocument(msgspec.Struct, array_like=True):
    """kind: of rag/parse/kinds.py. num_pages: 0 where there are none. warnings: lines for the sender, such as pages without
    text."""

    kind: str
    title: str
    blocks: list[TextBlock]
    num_pages: int = 0
    warnings: list[str] = []


class Chunk(msgspec.Struct, array_like=True):
    """What is searched and cited. headings: those that it stands under and that are not in its text, the highest first. Pages as of
    TextBlock, the first and the last. num_tokens: of text, in tokens of the model that cut it."""

    text: str
    headings: list[str]
    first_page: int
    last_page: int
    num_tokens: int


class Passage(msgspec.Struct):
    """A chunk that a search found. position: of the chunk in its document, from 0. score: what orders it; stages: stage → (rank
    from 1, score, part of the fused score)."""

    document: str
    version: int
    name: str
    position: int
    chunk: Chunk
    score: float
    stages: dict[str, tuple[int, float, float]] = {}


class ParseLimits(msgspec.Struct, frozen=True):
    """Bounds of one document. Bytes: max_text_bytes of all its text in UTF-8, max_stream_bytes of one stream unpacked,
    max_memory_bytes beside what the worker has when it begins. max_ratio: unpacked to packed, once more than 1 MB is unpacked.
    max_depth: of what lies in each other, such as a page tree. max_ocr_pages: pages that are rendered for the operator's OCR."""

    max_text_bytes: int = 256 << 20
    max_stream_bytes: int = 64 << 20
    max_memory_bytes: int = 512 << 20
    max_ratio: int = 200
    max_pages: int = 5_000
    max_objects: int = 200_000
    max_depth: int = 50
    max_entries: int = 10_000
    max_blocks: int = 2_000_000
    max_ocr_pages: int = 200
    cpu_s: int = 20
    wall_s: float = 25.0
