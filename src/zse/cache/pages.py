"""KV pages: who holds which. A page is `page_size` consecutive tokens of every layer; sequences hold lists of pages.

Kernels know blocks of BLOCK tokens: a page is one or several of them, one behind the other in memory, and what they are
given as page tables lists blocks (layout.py). Everything that counts, shares, caches and moves counts pages.

The allocator is the one writer of reference counts. It and the HostPool know nothing of devices: the runner has the
memory that their numbers index."""

from array import array
from collections.abc import Iterable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from zse.cache.prefix import PrefixCache

BLOCK = 16
# Tokens of a page. More, and a long context has shorter lists, fewer nodes of prefixes and larger pieces to move;
# fewer, and less is wasted at the end of each sequence and prefixes are shared more finely.
PAGE_SIZES = (16, 32, 64, 128)


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK)


def check_page_size(page_size: int) -> None:
    """Raises ValueError for a size that is none of PAGE_SIZES."""
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page size {page_size} is not one of {', '.join(map(str, PAGE_SIZES))}")


class PageAllocator:
    """`num_pages` reference-counted pages. Not thread-safe: the scheduler is its only caller. prefix: the PrefixCache,
    if any, in which pages that nobody holds may stay until they are needed. num_free: pages that can be allocated,
    which are all that nobody holds, cached or not.

    Freed pages are handed out again first, lowest numbers before untouched ones, so that the memory which was ever
    written stays near the largest use so far (KV buffers are anonymous memory that costs nothing until written).
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = self.num_free = num_pages
        self._free = array("i", range(num_pages - 1, -1, -1))  # a stack: pop() gives the lowest number first
        self._refs = array("i", bytes(4 * num_pages))
        self.prefix: PrefixCache | None = None

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) when fewer are free. Cached pages go when no
        other is free."""
        free = self._free
        if count > self.num_free:
            return None
        if count > len(free):
            self.prefix.evict(count - len(free))  # type: ignore[union-attr]
        self.num_free -= count
        pages = [free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def allocate_run(self, count: int) -> list[int] | None:
        """`count` pages that follow one another, with one reference each, or None (and no change) where there are none.
        Not with a prefix cache. The highest such pages: those that allocate() takes come from the other end."""
        if self.prefix is not None:
            raise ValueError("pages in a row are not to be had with a prefix cache")
        refs, size = self._refs.tobytes(), self._refs.itemsize
        at = refs.rfind(bytes(count * size))
        while at > 0 and at % size:  # zero bytes within counts: the run begins before them
            at = refs.rfind(bytes(count * size), 0, at + count * size - 1)
        if at < 0:
            return None
        first = at // size
        end = first + count
        self._free = array("i", [page for page in self._free if not first <= page < end])
        self.num_free -= count
        for page in range(first, end):
            self._refs[page] = 1
        return list(range(first, end))

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each page, all of which must be held by someone already, or cached."""
        refs, prefix = self._refs, self.prefix
        for page in pages:
            if refs[page] < 1:
                if prefix is None or not prefix.retain(page):
                    raise ValueError(f"page {page} is free and cannot be shared")
                self.num_free -= 1
            refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; a page without references is free at once, or stays cached. The last page
        first: of pages that follow one another it is the first to be evicted."""
        refs, free, prefix = self._refs, self._free, self.prefix
        for page in reversed(list(pages)):
            if refs[page] < 1:
                raise ValueError(f"page {page} was released twice")
            refs[page] -= 1
            if not refs[page]:
                self.num_free += 1
                if prefix is None or not prefix.release(page):
                    free.append(page)

    def free(self, page: int) -> None:
        """The prefix cache has forgotten `page`, which nobody holds."""
        self._free.append(page)

    @property
    def num_empty(self) -> int:
        """Pages that nobody holds and that are not cached: nothing in them is needed."""
        return len(self._free)

    def empty_runs(self, first: int, end: int) -> "Iterator[tuple[int, int]]":
        """(page, count) of such pages that follow one another, of those from `first` to `end` - 1."""
        prefix, start = self.prefix, first
        for page in range(first, end):
            if self._refs[page] or prefix is not None and prefix.holds(page):
                if page > start:
                    yield start, page - start
                start = page + 1
        if end > start:
            yield start, end - start

    def references(self, page: int) -> int:
        return self._refs[page]

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> list[str]:
        """What is wrong, one line each; empty when sound. holders: the page list of everything that holds pages."""
        problems = []
        counted = array("i", bytes(4 * self.num_pages))
        for pages in holders:
            for page in pages:
                counted[page] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            problems.append("a page stands twice in the free list")
        if self.num_free != self._refs.count(0):
            problems.append(f"{self.num_free} free pages counted, nobody holds {self._refs.count(0)}")
        # An engine does this while it serves: page by page only where something is wrong.
        cached_idle = self.prefix.num_idle if self.prefix is not None else 0
        sound = (
            counted == self._refs
            and len(free) + cached_idle == self._refs.count(0)
            and not any(self._refs[page] or self.prefix is not None and self.prefix.holds(page) for page in free)
        )
        for page in range(0 if sound else self.num_pages):
            if counted[page] != self._refs[page]:
                problems.append(f"page {page}: {self._refs[page]} references counted, {counted[page]} held")
            cached = self.prefix is not None and self.prefix.holds(page)
            if (page in free) != (self._refs[page] == 0 and not cached):
                listed = "in the free list" if page in free else "not in the free list"
                problems.append(f"page {page}: {self._refs[page]} references, {'cached, ' if cached else ''}{listed}")
        if self.prefix is not None:
            problems += self.prefix.check_integrity(self.references)
        return problems


class HostPool:
    """`num_slots` slots of host memory, each with one owner, for pages that leave the device: of swapped requests, and
    cold prefixes. A slot holds a whole page and what belongs to it. Slots that were used are used again before
    untouched ones."""

    def __init__(self, num_slots: int):
        if num_slots < 0:
            raise ValueError(f"num_slots must not be negative, got {num_slots}")
        self.num_slots = num_slots
        self._free: list[int] = []
        self._untouched = 0

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_slots - self._untouched

    def take(self) -> int:
        """A free slot. IndexError when there is none."""
        if self._free:
            return self._free.pop()
        if self._untouched == self.num_slots:
            raise IndexError("no host slot is free")
        self._untouched += 1
        return self._untouched - 1

    def give(self, slot: int) -> None:
        """The slot's content is not needed any more, once the transfers that were asked for so far are done."""
        self._free.append(slot)

    def check_integrity(self, owned: list[int]) -> list[str]:
        """What is wrong, one line each. owned: all slots that somebody has."""
        if sorted(owned + self._free) != list(range(self._untouched)):
            return [f"host slots are lost or shared: owned {sorted(owned)}, free {sorted(self._free)}"]
        return []
