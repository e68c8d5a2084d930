"""Cold pages in files of several ranks (docs/design/0011-several-devices.md): each has its own part of every page in files of its own.

Rank 0 decides what is written and read, and tells the others in the order of everything else that it tells them, so that they find
in their pages and slots what it has in its own. A page is written by the others first: what rank 0 has in files, all had then. Who has
less, since files were damaged or lost, says so when it reads; the least counts, and rank 0 forgets the page."""

import contextlib
import fcntl
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from zse.cache.files import SECRET, PageFiles, make_private
from zse.engine import disk_reads
from zse.engine.disk_reads import DiskFetch, DiskReader, Place
from zse.engine.disk_writes import DiskWriter, Write
from zse.engine.rank_messages import FileOrder, FilesDone, OfFiles, ReadPages, WritePage
from zse.errors import GroupError
from zse.lazy import logging

TELL_S = 0.5  # between two counts of what files a rank has
CLAIM_S = 5.0  # for a rank that is about to end
END_S = 1.0  # for what waits to be written when rank 0 has ended
SUMS = ("prefix_disk_bytes", "session_bytes", "prefix_disk_damaged_files")  # over all ranks


class FilesThere(msgspec.Struct):
    """What a rank has in files when it starts. records, sessions: of a PageIndex, where the rank has pages of its own."""

    keys: list[bytes]
    counters: dict[str, float]
    records: list[tuple[bytes, bytes, bytes, str]] = []
    sessions: dict[str, float] = {}


def open_files(
    ranks: Any, config: Any, fingerprint: bytes, page_nbytes: int
) -> tuple[PageFiles, dict[int, FilesThere]]:
    """This rank's files, of which each has room for as many pages, and what the others have. All must call it. Those of other ranks lie
    within rank 0's folder; where ranks have parts of pages, one that not every rank has is forgotten by all. Raises ConfigError, GroupError."""
    group = ranks.group
    before, group.timeout_s = group.timeout_s, float("inf")  # a folder takes as long as it has files
    try:
        sizes = [int.from_bytes(size, "little") for size in group.exchange(page_nbytes.to_bytes(8, "little"))]
        room = config.cache_disk_size * page_nbytes // sum(sizes)
        make_private(Path(config.cache_disk))
        files = PageFiles(config.cache_disk, fingerprint, room, config.page_size) if ranks.leads else None
        folder = group.exchange(b"" if files is None else files.folder.name.encode())[0].decode()
        if files is None:
            inner = Path(config.cache_disk) / folder
            _wait_for_end(inner / fingerprint.hex()[:32] / SECRET)
            files = PageFiles(inner, fingerprint, room, config.page_size)
        there, is_own = FilesThere(list(files), files.counters()), config.page_pools > 1
        if is_own and not ranks.leads:
            files.left, there.records, there.sessions = set(), files.records(), files.sessions()
        mine = msgspec.msgpack.encode(there)
        told = [msgspec.msgpack.decode(data, type=FilesThere) for data in group.exchange(mine)]
    finally:
        group.timeout_s = before
    others = {rank: there for rank, there in enumerate(told) if rank != group.rank}
    if is_own:
        return files, others
    common = set(told[0].keys).intersection(*[there.keys for there in told])
    missing = [key for key in files if key not in common]
    if missing:
        logging.getLogger("zse.engine").info("%d cached pages are not in the files of all ranks", len(missing))
        for key in missing:
            files.forget(key)
        files.tidy(time.time())
    return files, others


def _wait_for_end(claimed: Path) -> None:
    """Of the rank that had this folder before, where rank 0 was killed: without its files nobody would have any page."""
    deadline = time.monotonic() + CLAIM_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError), open(claimed, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            except OSError:  # a file system without locks
                return
        return


class RankFiles(DiskReader):
    """Rank 0's reader, whose fetches are over when all ranks have read them; and the files of the others. writer: of its own files.
    waiting_bytes: of what the others are still writing, which then goes to the writer. has_part: whether rank 0 has a part of what is
    read; else `files` are a list of what others have (engine/divided_files.py)."""

    has_part = True

    def __init__(self, files: Any, mover: Any, ranks: Any, there: dict[int, FilesThere], writer: DiskWriter):
        super().__init__(files, mover, num_threads=None if self.has_part else 0)
        self._ranks, self._writer, self._number = ranks, writer, 0
        self._writes: dict[int, tuple[Write, list[int]]] = {}  # with the answers so far
        self._fetches: dict[int, tuple[DiskFetch, int]] = {}  # with the answers that are to come
        self._counters = {rank: other.counters for rank, other in there.items()}
        self._heard_at = 0.0  # when an answer to what is read came, or could be waited for
        self.waiting_bytes = 0

    @property
    def _others(self) -> int:
        return len(self._counters)

    def write(self, write: Write, key: bytes, parent: bytes, tokens: bytes, places: list[Place], end: float) -> None:
        """Have a page or state written by the others from these places, then by the Write."""
        self._number += 1
        self._writes[self._number] = write, []
        self.waiting_bytes += write.nbytes
        self._ranks.order(WritePage(self._number, key, parent, tokens, places, write.session, end))

    def order(self, what: str, **fields: Any) -> None:
        """As FileOrder."""
        self._ranks.order(FileOrder(what, **fields))

    def drop(self, session: str) -> None:
        """A session is removed."""
        for number, (write, _) in list(self._writes.items()):
            if write.session == session:
                self._over(number)
        self.order("drop", session=session)

    def add(self, fetch: DiskFetch, is_ahead: bool = False) -> None:
        self._number += 1
        if not self._fetches:
            self._heard_at = time.monotonic()
        fetch.number, pieces = self._number, fetch.num_left
        self._fetches[fetch.number] = fetch, pieces * self._others
        fetch.num_left = pieces * (self._others + self.has_part)
        wanted = [(key, list(places)) for key, places in fetch.wanted]
        self._ranks.order(ReadPages(fetch.number, wanted, is_ahead))
        if self.has_part:
            super().add(fetch, is_ahead)

    def pause(self, is_paused: bool) -> None:
        if is_paused != self._is_paused:
            self._heard_at = time.monotonic()
            self.order("pause", at=float(is_paused))
        super().pause(is_paused)

    def hurry(self) -> None:
        self.order("hurry")
        super().hurry()

    def cancel(self, fetch: DiskFetch) -> None:
        super().cancel(fetch)
        if fetch.number in self._fetches:
            self.order("cancel", number=fetch.number)

    def look(self, seconds: float = 0.0) -> None:
        """What the others answered, waited for so long. GroupError where one has ended, or is silent."""
        if self._writes or self._fetches:
            self._ranks.listen(seconds)
        for rank in self._counters:
            answers = self._ranks.answers.get(rank)
            while answers:
                self._take(rank, answers.popleft())
        limit = self._ranks.group.timeout_s
        if self._fetches and not self._is_paused and time.monotonic() - self._heard_at > limit:
            raise GroupError(
                f"rank 0 waited {limit:g} s for other ranks to read pages from files (ZSE_GROUP_TIMEOUT_S)"
            )

    def _take(self, rank: int, told: FilesDone) -> None:
        self._counters[rank] = told.counters or self._counters[rank]
        for key in told.left:
            self._files.forget(key)
        if told.number in self._writes:
            write, answers = self._writes[told.number]
            answers.append(told.count)
            if told.count < 0 and not self._writer.has_failed:
                self._writer.has_failed = True
                logging.getLogger("zse.engine").warning(
                    "the prefix cache no longer writes to disk: rank %d cannot", rank
                )
            if len(answers) == self._others:
                self._over(told.number)
                if min(answers) > 0:
                    self._writer.ask(write)
        elif told.number in self._fetches:
            self._heard_at = time.monotonic()
            fetch, left = self._fetches.pop(told.number)
            if left > 1:
                self._fetches[told.number] = fetch, left - 1
            self.came(fetch, told.start, told.count)

    def _over(self, number: int) -> None:
        write, _ = self._writes.pop(number)
        self.waiting_bytes -= write.nbytes

    def sums(self, counters: dict[str, float]) -> dict[str, float]:
        """Counters of rank 0's files, some of which are of all ranks' then."""
        for other in self._counters.values():
            counters |= {name: counters[name] + other[name] for name in SUMS}
        return counters


class RankStore:
    """The files of another rank: does what rank 0 says, and answers. mover: its runner's PageMover."""

    def __init__(self, files: PageFiles, mover: Any, ranks: Any):
        self._files, self._mover, self._ranks = files, mover, ranks
        self._writer = DiskWriter()
        self._reader = DiskReader(files, mover, self._came)
        self._fetches: dict[int, DiskFetch] = {}
        self._told_at = 0.0

    def do(self, message: OfFiles) -> None:
        """Errors as of the device."""
        if isinstance(message, WritePage):
            self._write(message)
        elif isinstance(message, ReadPages):
            self._mover.settle()  # slots that were given back may still be read by transfers
            fetch = DiskFetch(list(message.wanted), message.number)
            self._fetches = {number: other for number, other in self._fetches.items() if other.num_left}
            self._fetches[message.number] = fetch
            self._reader.add(fetch, message.is_ahead)
        elif message.what == "pause":
            self._reader.pause(bool(message.at))
        elif message.what == "hurry":
            self._reader.hurry()
        elif message.what == "cancel":
            self._reader.cancel(self._fetches.get(message.number) or DiskFetch([]))
        else:
            if message.what == "drop":
                self._writer.drop(message.session)
            told = (lambda is_taken: self._answer(0, 0, 0)) if message.what in ("drop", "tidy") else None
            self._writer.ask(Write(partial(self._keep_order, message), told=told))

    def _write(self, page: WritePage) -> None:
        self._mover.settle()  # what was moved to a slot is there
        content = disk_reads.content_of(self._mover, page.places)
        write = partial(self._files.write, page.key, page.parent, content, page.session, page.expires, page.tokens)

        def told(is_taken: bool) -> None:
            self._answer(page.number, 0, int(page.key in self._files) if is_taken else -1)

        self._writer.ask(Write(write, len(content), 1, page.session, told))

    def _keep_order(self, order: FileOrder) -> None:
        if order.what == "extend":
            self._files.extend(order.session, order.at)
        elif order.what == "drop":
            self._files.drop_session(order.session)
        elif order.what == "tidy":
            self._files.tidy(order.at)
        else:
            self._files.used(order.key)

    def _came(self, fetch: DiskFetch, start: int, count: int) -> None:
        self._answer(fetch.number, start, count)

    def _answer(self, number: int, start: int, count: int) -> None:
        counters: dict[str, float] = {}
        now = time.monotonic()
        if not self._writer.pending or now - self._told_at > TELL_S:
            self._told_at, counters = now, self._files.counters()
        self._ranks.answer(FilesDone(number, start, count, counters, self._files.take_left()))

    def close(self) -> None:
        """Rank 0 has ended: what it has asked for is written, or is not needed."""
        self._reader.close()
        self._writer.close(time.monotonic() + END_S)
        self._files.close()
