"""Pages and states on their way from files, read by threads while the engine's steps go on."""

import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from zse.cache.files import PageFiles
from zse.engine.held import Held
from zse.errors import DeviceError
from zse.runtime import probe
from zse.scheduler import images

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.engine.state_files import PlacedState

# A core copies and checks about 3 GB/s of what the system has cached, and locks as much; a disk needs some asked for at once.
LEAST_READERS, MOST_READERS, CORES_PER_READER = 2, 4, 4
PIECE = 16  # pages that a thread reads at once

# Where a part of a page's or state's content is: a kind of READS or VIEWS, and its number.
Place = tuple[str, int]
READS = {"page": "read_page", "slot": "read_slot", "state": "read_state", "host state": "read_host_state"}
VIEWS = {"page": "page_view", "slot": "slot_view", "host state": "host_state_view"}
# A key, and the places for its content: a reader asks for their memory, since that of a GPU may have to be locked first.
Wanted = tuple[bytes, Sequence[Place]]


def content_of(mover, places: Sequence[Place]) -> bytes:
    """What a PageMover has there, one behind the other."""
    return b"".join([getattr(mover, READS[kind])(number) for kind, number in places])


def views_of(mover, places: Sequence[Place]) -> tuple[memoryview, ...]:
    """The memory of places to which the host may write. Raises DeviceError where there is none."""
    return tuple([getattr(mover, VIEWS[kind])(number) for kind, number in places])


class DiskFetch:
    """What one request waits for. wanted: pages that follow each other, then perhaps a state. sound: so many of them came.
    num_left: pieces that are not read yet, by any rank. number: by which ranks speak of it."""

    def __init__(self, wanted: list[Wanted], number: int = 0):
        self.wanted, self.sound, self.number = wanted, len(wanted), number
        self.num_left = -(-len(wanted) // PIECE)
        self.is_cancelled = False


class AwaitingDisk(Held):
    """A request whose beginning is read. fetch: once something is; here: pages in front of it; keys, tokens: of those that
    are read; places: pages or host slots for them; held: pages that are kept meanwhile; state: that is read, too."""

    fetch: DiskFetch | None = None
    here = 0
    keys: tuple[tuple[bytes, bytes], ...] = ()
    places: tuple[int, ...] = ()
    held: tuple[list[int], ...] = ()
    state: "PlacedState | None" = None

    @property
    def compared(self) -> bytes:
        """The prompt as prefixes are compared by."""
        return images.compared(array("i", self.prompt), self.options.images).tobytes()


class DiskReader:
    """Its threads read fetches from `files` to the places of a PageMover, first come first; what nobody waits for yet is read by one of
    them, when there is nothing else. told(fetch, start, count): called by them for each piece, of which so many pages came. num_threads:
    None: by the cores that there are."""

    def __init__(
        self,
        files: PageFiles,
        mover,
        told: Callable[[DiskFetch, int, int], None] | None = None,
        num_threads: int | None = None,
    ):
        self._files, self._mover, self._told = files, mover, told
        if num_threads is None:
            num_threads = max(LEAST_READERS, min(MOST_READERS, probe.default_threads() // CORES_PER_READER))
        self._pieces: deque[tuple[DiskFetch, int]] = deque()
        self._ahead: deque[tuple[DiskFetch, int]] = deque()
        self._changed = threading.Condition()
        self._has_news = self._closing = self._is_paused = False
        self._threads: list[Any] = [
            threading.Thread(target=self.read, name="kv reader", daemon=True, args=(number == 0,))
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, fetch: DiskFetch, is_ahead: bool = False) -> None:
        """Have it read. is_ahead: nobody waits for it, until hurry()."""
        with self._changed:
            pieces = self._ahead if is_ahead else self._pieces
            pieces += [(fetch, start) for start in range(0, len(fetch.wanted), PIECE)]
            self._changed.notify_all()

    def pause(self, is_paused: bool) -> None:
        """Whether what is read ahead is to wait."""
        if is_paused != self._is_paused:
            with self._changed:
                self._is_paused = is_paused
                self._changed.notify_all()

    def hurry(self) -> None:
        """What is read ahead is waited for."""
        with self._changed:
            self._pieces.extendleft(reversed(self._ahead))
            self._ahead.clear()
            self._changed.notify_all()

    def cancel(self, fetch: DiskFetch) -> None:
        """Nobody waits for it any more; it is over when those of its pieces are that are being read."""
        fetch.is_cancelled = True

    def wait(self, seconds: float) -> None:
        """Until a fetch is over, or so long."""
        with self._changed:
            if not self._has_news:
                self._changed.wait(seconds)
            self._has_news = False

    def read(self, reads_ahead: bool = False) -> None:
        """What a thread does until close()."""
        while True:
            with self._changed:
                while not (pieces := self._next(reads_ahead)) and not self._closing:
                    self._changed.wait()
                if not pieces:
                    return
                fetch, start = pieces.popleft()
            wanted = fetch.wanted[start : start + PIECE]
            # What stands behind a page that is not sound is of no use.
            count = 0 if fetch.is_cancelled or start > fetch.sound else self._read(wanted)
            self.came(fetch, start, count)
            if self._told is not None:
                self._told(fetch, start, count)

    def came(self, fetch: DiskFetch, start: int, count: int) -> None:
        """So many pages of the piece at `start` came, here or on another rank."""
        with self._changed:
            if count < min(PIECE, len(fetch.wanted) - start):
                fetch.sound = min(fetch.sound, start + count)
            fetch.num_left -= 1
            if not fetch.num_left:
                self._has_news = True
                self._changed.notify_all()

    def _next(self, reads_ahead: bool) -> deque[tuple[DiskFetch, int]]:
        """Of what a thread takes the next piece, if it has one."""
        return self._ahead if reads_ahead and not self._pieces and not self._is_paused else self._pieces

    def _read(self, wanted: list[Wanted]) -> int:
        """How many could be."""
        try:
            placed = [(key, views_of(self._mover, places)) for key, places in wanted]
        except DeviceError:  # no memory for them: they are computed
            return 0
        return self._files.read(placed)

    def close(self) -> None:
        """Nothing more is read; what memory a fetch had is not written from here on."""
        with self._changed:
            for pieces in (self._pieces, self._ahead):
                for fetch, _ in pieces:
                    fetch.is_cancelled = True
                pieces.clear()
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(10.0)
