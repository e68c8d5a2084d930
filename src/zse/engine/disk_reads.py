"""Pages and states on their way from files, read by threads while the engine's steps go on."""

import threading
from array import array
from collections import deque
from collections.abc import Callable
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

# A key, and what gives the memory for its content: a reader asks it, since memory for a GPU may have to be locked first.
Wanted = tuple[bytes, Callable[[], tuple[memoryview, ...]]]


class DiskFetch:
    """What one request waits for. wanted: pages that follow each other, then perhaps a state. sound: so many of them came.
    num_left: pieces that are not read yet."""

    def __init__(self, wanted: list[Wanted]):
        self.wanted, self.sound = wanted, len(wanted)
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


def views_of(memory: Callable[[int], memoryview], place: int) -> tuple[memoryview, ...]:
    """What a page is read to, as DiskFetch takes it."""
    return (memory(place),)


class DiskReader:
    """Its threads read fetches from `files`, first come first; what nobody waits for yet is read by one of them, when there
    is nothing else."""

    def __init__(self, files: PageFiles):
        self._files = files
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
            with self._changed:
                if count < len(wanted):
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
            placed = [(key, memory()) for key, memory in wanted]
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
