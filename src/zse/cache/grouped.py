"""Page tables of models whose layers are in groups (groups.py): a table with all pages, and one for each windowed
group, from which pages go back to the pool when the window has passed them (trim).

A sequence is given its windowed pages as it grows: what trim() takes from the front it adds at the end, so that a
prompt which was admitted can be computed to its end. Only pages that others share too do not come back at once: then
covered() says how far it may go.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from zse.cache.eviction import TreeNode
from zse.cache.groups import PageGeometry
from zse.cache.manager import CacheManager
from zse.cache.pages import HostPool, PageAllocator
from zse.cache.prefix import Match, PrefixCache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.cache.prefix import Salt


class WindowTable:
    """A sequence's pages of the windowed groups: for each group its page numbers in token order, GONE before page
    `first`, which were given back. All lists are equally long."""

    GONE = -1
    __slots__ = ("first", "pages")

    def __init__(self, windowed: int):
        self.first = 0
        self.pages: list[list[int]] = [[] for _ in range(windowed)]

    def __len__(self) -> int:
        return len(self.pages[0])

    def extend(self, pages: Sequence[int]) -> None:
        """As many more pages for each group, those of the first group first."""
        count = len(pages) // len(self.pages)
        for group, mine in enumerate(self.pages):
            mine.extend(pages[group * count : (group + 1) * count])

    def at(self, index: int) -> list[int]:
        """A page of each group."""
        return [mine[index] for mine in self.pages]

    def held(self, first: int | None = None, end: int | None = None) -> list[int]:
        """The pages first … end - 1 of all groups, default: all that are not gone."""
        first = self.first if first is None else first
        return [page for mine in self.pages for page in mine[first:end]]

    def drop(self, first: int) -> list[int]:
        """Forget the pages before `first`; what they were."""
        gone = self.held(end=first)
        for mine in self.pages:
            mine[self.first : first] = [self.GONE] * (first - self.first)
        self.first = first
        return gone


class WindowPages:
    """Which pages of windowed groups stand beside which node of the prefix cache, and which of them nobody holds.

    A hit needs a node's own page for the whole prefix, and the windowed groups' pages for the last window only. They
    are kept apart from the node's life, as long as there is room: a node that lost them is of use only far enough
    before the end of a hit. geometry: how many a node has, and which of them a token sees."""

    def __init__(self, geometry: PageGeometry):
        self.geometry, self.windowed = geometry, geometry.windowed
        self._pages: dict[TreeNode, list[int]] = {}
        self._node_of: dict[int, TreeNode] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def pages(self, node: TreeNode) -> list[int] | None:
        """The node's pages, None when it has none (any more)."""
        return self._pages.get(node)

    def within_reach(self, match: Match) -> Match:
        """As much of a match as has the windowed pages that the next token sees."""
        first = self.geometry.first
        missing, last = [-1], -1  # before each number of nodes: the last one without windowed pages
        for index, node in enumerate(match.nodes):
            if node not in self._pages:
                last = index
            missing.append(last)
        if match.source in self._pages and last < first(match.length):
            return match
        count, page_size = len(match.nodes), self.geometry.page_size
        while count and missing[count] >= first(count * page_size):
            count -= 1
        return Match(match.nodes[:count], None, count * page_size)

    def attach(self, node: TreeNode, pages: list[int]) -> None:
        """`pages`, which a table holds, have what belongs to `node`. Nothing changes where it has some already."""
        if node not in self._pages and not any(page in self._node_of for page in pages):
            self._pages[node] = pages
            for page in pages:
                self._node_of[page] = node

    def holds(self, page: int) -> bool:
        return page in self._node_of

    def release(self, page: int) -> bool:
        """Nobody holds the page any more. False when no node has it: it is free then."""
        if page not in self._node_of:
            return False
        self._idle[page] = None
        return True

    def retain(self, page: int) -> bool:
        """A table holds the idle page again. False when no node has it."""
        if page not in self._idle:
            return False
        del self._idle[page]
        return True

    def oldest(self) -> TreeNode:
        """The node whose pages have been idle longest."""
        return self._node_of[next(iter(self._idle))]

    def drop(self, node: TreeNode) -> list[int]:
        """Forget the node's pages; those that nobody holds, which are free now."""
        pages = self._pages.pop(node, [])
        for page in pages:
            del self._node_of[page]
        free = [page for page in pages if page in self._idle]
        for page in free:
            del self._idle[page]
        return free

    def check_integrity(self, references) -> list[str]:
        problems = []
        found = {page: node for node, pages in self._pages.items() for page in pages}
        if found != self._node_of or len(found) != self.windowed * len(self._pages):
            problems.append("a windowed page stands beside two nodes")
        for page, node in found.items():
            if not node.alive:
                problems.append(f"page {page} stands beside a node that is gone")
            if (page in self._idle) != (references(page) == 0):
                problems.append(f"windowed page {page}: {references(page)} references")
        return problems + [f"page {page} is idle and nobody's" for page in self._idle if page not in found]


class GroupedCacheManager(CacheManager):
    """See CacheManager. table(): of the first group, the one that keeps all its pages."""

    def __init__(
        self, allocator: PageAllocator, prefix: PrefixCache | None, host: HostPool | None, geometry: PageGeometry
    ):
        super().__init__(allocator, prefix, host, geometry)
        self.grouped = self
        self._windows: dict[int, WindowTable] = {}
        self._kept = WindowPages(geometry)
        if prefix is not None:
            prefix.windows = self._kept
        self.num_trimmed = 0

    def covered(self, sequence: int) -> int:
        return self.page_size * min(len(self.table(sequence)), len(self._windows[sequence]))

    def windows(self, sequence: int) -> WindowTable:
        """The tables of the windowed groups; the caller must not change them."""
        return self._windows[sequence]

    # -- growing and shrinking

    def reserve(self, sequence: int, length: int) -> bool:
        table, windows = self.tables.get(sequence, []), self._windows.get(sequence)
        if windows is None:
            windows = WindowTable(self.geometry.windowed)
        count = max(self.pages_for(length), len(table))
        missing = count - len(table)
        short = max(0, min(count, windows.first + self.geometry.most) - len(windows))
        if not missing and not short:
            return True
        pages = self.allocator.allocate(missing + self.geometry.windowed * short)
        if pages is None:
            # What these tokens need comes first, what later ones need when there is more room.
            short = max(0, self.pages_for(length) - len(windows))
            pages = self.allocator.allocate(missing + self.geometry.windowed * short)
        if pages is None:
            return False
        table.extend(pages[:missing])
        windows.extend(pages[missing:])
        self.tables[sequence], self._windows[sequence] = table, windows
        return True

    def trim(self, sequence: int, position: int) -> None:
        """No query of the sequence will come from before `position`, in flight or later: windowed groups give back what
        lies before that one's window."""
        windows = self._windows[sequence]
        first = self.geometry.first(position)
        if first <= windows.first:
            return
        self.num_trimmed += self.geometry.windowed * (first - windows.first)
        self.allocator.release(windows.drop(first))
        self.reserve(sequence, 0)

    # -- sequences with a past

    def _beside_slots(self, nodes: list[TreeNode], length: int) -> tuple[Match, int]:
        full = nodes[: length // self.page_size]
        return Match(full, None, self.page_size * len(full)), length

    def _shared_windows(self, sequence: int, match: Match, computed: int) -> list[list[int]]:
        """The windowed pages that a new sequence shares, a page of each group for each node."""
        nodes = [] if sequence in self.swapped else match.nodes[self.geometry.first(computed) :]
        return [self._kept.pages(node) for node in nodes]  # type: ignore[misc]

    def windows_of(self, sequence: int, match: Match, computed: int, length: int) -> tuple[list[int], list[int], int]:
        """Of windowed groups: the match's pages that the sequence shares, those that it copies, and how many more it
        needs."""
        geometry, beside = self.geometry, self._shared_windows(sequence, match, computed)
        first = geometry.first(computed)
        short = min(self.pages_for(length), first + geometry.most) - first - len(beside)
        copied = self._kept.pages(match.source) if match.source is not None else []
        return [page for pages in beside for page in pages], list(copied or ()), geometry.windowed * short

    def place_windows(self, sequence: int, match: Match, computed: int, pages: list[int]) -> None:
        """The sequence has its table: give it those of windowed groups, with these new pages."""
        windows = WindowTable(self.geometry.windowed)
        windows.first = first = self.geometry.first(computed)
        beside = self._shared_windows(sequence, match, computed)
        for group, mine in enumerate(windows.pages):
            mine += [WindowTable.GONE] * first + [pages_of[group] for pages_of in beside]
        at = len(windows)
        windows.extend(pages)
        self._windows[sequence] = windows
        if match.source is not None:
            self._copy(self._kept.pages(match.source) or [], windows.at(at))

    def _copy(self, source: list[int], pages: list[int]) -> None:
        self._transfers += [("copy", old, new) for old, new in zip(source, pages, strict=True)]
        self.num_copied_pages += len(pages)

    def fork(self, source: int, sequence: int, shared: int, length: int) -> bool:
        geometry, table, mine = self.geometry, self.table(source), self._windows[source]
        full, first = shared // self.page_size, geometry.first(shared)
        if first < mine.first:
            return False  # trimmed: what the new one's first token sees is gone
        count = self.pages_for(max(length, shared))
        short = min(count, first + geometry.most) - full
        pages = self.allocator.allocate(count - full + geometry.windowed * short)
        if pages is None:
            return False
        windows = WindowTable(geometry.windowed)
        windows.first = first
        self.allocator.retain(table[:full] + mine.held(first, full))
        for old, new in zip(mine.pages, windows.pages, strict=True):
            new += [WindowTable.GONE] * first + old[first:full]
        windows.extend(pages[count - full :])
        self.tables[sequence], self._windows[sequence] = table[:full] + pages[: count - full], windows
        if shared % self.page_size:
            self._copy([table[full], *mine.at(full)], [pages[0], *windows.at(full)])
        self._enter_fork(source, sequence, full)
        return True

    # -- to the host and back

    def _swap_pages(self, sequence: int, length: int) -> list[int]:
        count = self.pages_for(length)
        return self.table(sequence)[:count] + self._windows[sequence].held(self.geometry.first(length), count)

    # -- the prefix cache

    def commit(self, sequence: int, tokens: array, length: int, partial: bool = False) -> None:
        entered = self._entered.get(sequence)
        if entered is None:
            return
        before = entered.last
        super().commit(sequence, tokens, length, partial)
        windows, table = self._windows[sequence], self.tables[sequence]
        node = last = entered.last
        while node is not None and node is not before and node.depth > windows.first:
            self._kept.attach(node, windows.at(node.depth - 1))
            node = node.parent
        parent = last if last is not None and last.alive else self.prefix.roots.get(entered.salt)  # type: ignore
        size = self.page_size
        if partial and parent is not None and length > parent.depth * size >= windows.first * size:
            leaf = parent.children.get(tokens[parent.depth * size : length].tobytes())
            # Another's page may continue differently behind these tokens, and so may what stands beside it.
            if leaf is not None and leaf.page == table[parent.depth]:
                self._kept.attach(leaf, windows.at(parent.depth))

    def adopt(self, tokens: array, length: int, pages: list[int], salt: "Salt", slot: int = -1) -> None:
        """Nothing: what a job leaves of windowed pages is not known here."""

    def detach(self, sequence: int) -> list[int]:
        windows = self._windows.pop(sequence, None)
        return super().detach(sequence) + (windows.held() if windows is not None else [])

    def snapshot(self) -> dict[str, float]:
        return {**super().snapshot(), "trimmed_pages": self.num_trimmed}

    def check_integrity(self, detached: list[list[int]] | None = None) -> list[str]:
        problems = super().check_integrity([*(windows.held() for windows in self._windows.values()), *(detached or [])])
        if set(self._windows) != set(self.tables):
            problems.append("a sequence has pages of one kind of group only")
        for sequence, windows in self._windows.items():
            held, length = windows.held(), len(windows)
            if {len(mine) for mine in windows.pages} != {length} or length > len(self.table(sequence)):
                problems.append(f"sequence {sequence}: tables of {[len(mine) for mine in windows.pages]} pages")
            if length - windows.first > self.geometry.most:
                problems.append(f"sequence {sequence}: {length - windows.first} windowed pages of a group")
            if WindowTable.GONE in held or len({*held, *self.table(sequence)}) != len(held) + len(self.table(sequence)):
                problems.append(f"sequence {sequence}: a windowed page is gone, or held twice")
            if any(page != WindowTable.GONE for mine in windows.pages for page in mine[: windows.first]):
                problems.append(f"sequence {sequence}: a trimmed page is still in its table")
        return problems
