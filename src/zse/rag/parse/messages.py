"""What the worker process and its parent say to each other: each message is its length in four bytes, big-endian, and msgpack."""

import msgspec

from zse.rag.documents import ParseLimits, TextBlock

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 96 << 20  # an image of a page is the longest
FRAME_CHARACTERS = 1 << 18  # of blocks in one message: reading one holds the interpreter's lock for about a millisecond


class ParseRequest(msgspec.Struct, array_like=True):
    """parent → worker. parent: its process id. descriptor: of the file, open for reading. kind: "" is found by name, media type and content. ocr: whether
    pages without text are wanted as images."""

    parent: int
    descriptor: int
    name: str
    media_type: str
    kind: str
    password: str
    ocr: bool
    limits: ParseLimits


class Blocks(msgspec.Struct, array_like=True, tag=0):
    """worker → parent, as the next three: blocks in reading order, those of one document in as many messages as it takes."""

    blocks: list[TextBlock]


class PageImage(msgspec.Struct, array_like=True, tag=1):
    """A page without text. png: at most MAX_MESSAGE_BYTES."""

    page: int
    png: bytes


class Parsed(msgspec.Struct, array_like=True, tag=2):
    """The last message: all blocks were sent."""

    kind: str
    title: str
    num_pages: int
    warnings: list[str]


class Unreadable(msgspec.Struct, array_like=True, tag=3):
    """The last message: a DocumentError."""

    message: str
    code: str


FromParser = Blocks | PageImage | Parsed | Unreadable
