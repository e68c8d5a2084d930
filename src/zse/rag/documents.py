"""What the parts of retrieval hand to each other."""

from typing import Literal

import msgspec

from zse.errors import ZSEError

BlockKind = Literal["heading", "paragraph", "list", "table", "code"]


class DocumentError(ZSEError):
    """A document that cannot be used: damaged, encrypted with another password, too large, without text. The message is one line
    for its sender; code: of the API's error, "unprocessable_file" or "request_too_large"."""

    def __init__(self, message: str, code: str = "unprocessable_file"):
        super().__init__(message)
        self.code = code


class TextBlock(msgspec.Struct, array_like=True):
    """A part of a document in reading order. text: without markup; of a table one row, its cells separated by " | ". level: of a
    heading, 1 is the highest. page: from 1, 0 where there are none. start: of the text, in characters of the document's source,
    -1 where that is no text."""

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
    """What is searched and cited. headings: those that it stands under, the highest first. Pages as of TextBlock, the first and the
    last. num_tokens: of text, in tokens of the model that cut it."""

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
