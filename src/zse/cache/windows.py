"""Pages of layers with a sliding window, as the prefix cache keeps them: beside a node, as long as there is room.

A hit needs a node's own page for the whole prefix, and the windowed groups' pages for the last window only. They are kept
apart from the node's life: a node may have lost them, and is then of use only far enough before the end of a hit.
"""

from collections import OrderedDict
from collections.abc import Sequence

from zse.cache.eviction import Node


class WindowTable:
    """A sequence's pages of the windowed groups: for each group its page numbers in token order, GONE before page `first`,
    which were given back. All lists are equally long."""

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
    windowed: how many a node has."""

    def __init__(self, windowed: int):
        self.windowed = windowed
        self._pages: dict[Node, list[int]] = {}
        self._node_of: dict[int, Node] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def pages(self, node: Node) -> list[int] | None:
        """The node's pages, None when it has none (any more)."""
        return self._pages.get(node)

    def attach(self, node: Node, pages: list[int]) -> None:
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

    def oldest(self) -> Node:
        """The node whose pages have been idle longest."""
        return self._node_of[next(iter(self._idle))]

    def drop(self, node: Node) -> list[int]:
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
