"""What rank 0 says to the others, whether on this host or another, and what they say first."""

import msgspec

Key = tuple[str, int, int]  # kind of recording, its size, the number of its inputs
Place = tuple[str, int]  # as engine/disk_reads.py has it


class Replay(msgspec.Struct, tag=True, array_like=True):
    """Write `data` at byte `at` of the recording's inputs, have memory for pages up to number `mapped`, replay. images:
    (byte, data) of the inputs of steps with images."""

    key: Key
    symbols: dict[str, int]
    at: int
    data: bytes
    mapped: int
    images: list[tuple[int, bytes]] = []


class RecordAhead(msgspec.Struct, tag=True, array_like=True):
    """Make a recording that will be replayed."""

    key: Key


class Move(msgspec.Struct, tag=True, array_like=True):
    """Run transfers of pages."""

    transfers: list[tuple[str, int, int]]


class Discard(msgspec.Struct, tag=True, array_like=True):
    """Give back the memory of so many pages."""

    first: int
    count: int


class WriteTable(msgspec.Struct, tag=True, array_like=True):
    """Write entries of the page table, from byte `at` on."""

    at: int
    data: bytes


class AdapterPart(msgspec.Struct, tag=True, array_like=True):
    """Numbers of the adapter that is kept next, from number `at` of a slot of the whole model on."""

    at: int
    data: bytes


class KeepAdapter(msgspec.Struct, tag=True, array_like=True):
    """Recordings may have this adapter (zse.lora.targets.Image) from now on, whose parts were told."""

    id: str
    rank: int
    scales: bytes
    members: list[str]
    own_rank: int


class ForgetAdapter(msgspec.Struct, tag=True, array_like=True):
    """No recording will have it."""

    id: str


class FillSlot(msgspec.Struct, tag=True, array_like=True):
    """Write an adapter into a slot."""

    slot: int
    id: str


class WritePage(msgspec.Struct, tag=True, array_like=True):
    """Write a page or state to files, as PageFiles.write(): what is at these places now. Answered."""

    number: int
    key: bytes
    parent: bytes
    tokens: bytes
    places: list[Place]
    session: str
    expires: float


class ReadPages(msgspec.Struct, tag=True, array_like=True):
    """Read what stands under these keys in files to these places. Each piece of it is answered."""

    number: int
    wanted: list[tuple[bytes, list[Place]]]
    is_ahead: bool


class FileOrder(msgspec.Struct, tag=True, array_like=True):
    """Of files: "extend" or "drop" a session, "tidy" (both answered, with number 0), a key was "used"; of what is read: "pause" what nobody
    waits for (at: whether), "hurry" with it, "cancel" a number."""

    what: str
    session: str = ""
    at: float = 0.0
    key: bytes = b""
    number: int = 0


class RankLoaded(msgspec.Struct, tag_field="kind", tag=True):
    """To rank 0: the weights are there."""


class FilesDone(msgspec.Struct, tag_field="kind", tag=True):
    """To rank 0: a page is written (count 1), was not worth its room (0), or the disk takes no more (-1); or so many pages of a piece
    came, which begins at `start`. counters: of files, now and then; left: keys that went from them, where rank 0 has a list of these."""

    number: int
    start: int = 0
    count: int = 0
    counters: dict[str, float] = {}
    left: list[bytes] = []


OfFiles = WritePage | ReadPages | FileOrder
ToRank = (
    Replay | RecordAhead | Move | Discard | WriteTable | AdapterPart | KeepAdapter | ForgetAdapter | FillSlot | OfFiles
)
ToLeader = RankLoaded | FilesDone
