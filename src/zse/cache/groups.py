"""Groups of layers with a page table each: layers that see all tokens keep all pages, those with a sliding window give
theirs back when the window has passed.

One pool serves all groups, so groups have equally many layers (the last may have fewer): a page holds tokens of one group's
layers. The idea is vLLM's hybrid KV cache manager ("Jenga", arXiv 2503.18292). The first group has the layers
without a window. A model with one kind of layer has one group, and a page of it holds all layers.
"""

from typing import NamedTuple

from zse.cache.pages import BLOCK

# Of a pool with groups, this part may be places of layers that do not exist: beyond it there is one group.
MAX_WASTE = 0.2
Layers = tuple[tuple[int, ...], ...]


class PageGeometry(NamedTuple):
    """What a sequence's pages depend on. windowed: groups whose layers see a window. window: in tokens, a token itself
    included. most: pages that such a group holds at once of one sequence. run: pages that every sequence has from its
    beginning to its end, one behind the other; 0: as many as its tokens need, wherever they are. page_size: tokens of a
    page, of PAGE_SIZES."""

    windowed: int = 0
    window: int = 0
    most: int = 0
    run: int = 0
    page_size: int = BLOCK

    @property
    def num_groups(self) -> int:
        return 1 + self.windowed

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one group."""
        return -(-tokens // self.page_size)

    def first(self, position: int) -> int:
        """The first page that a windowed group needs for the token at `position` and those behind it."""
        return max(0, position + 1 - self.window) // self.page_size

    def needed(self, length: int) -> int:
        """Pages that a sequence of `length` tokens holds at most."""
        pages = max(self.pages_for(length), self.run)
        return pages + self.windowed * min(pages, self.most)

    def capacity(self, num_pages: int) -> int:
        """Tokens of the longest sequence that `num_pages` pages hold."""
        pages = num_pages // self.num_groups
        if pages >= self.most:
            pages = num_pages - self.windowed * self.most
        return pages * self.page_size

    def tables(self, pages: list[int], length: int) -> list[list[int]]:
        """A table for each group, for a sequence of `length` tokens that runs alone in `pages` (needed(length) of them),
        chunk after chunk: those of a windowed group are used in turn."""
        count = self.pages_for(length)
        most = min(count, self.most)
        rings = [pages[count + group * most : count + (group + 1) * most] for group in range(self.windowed)]
        return [pages[:count], *([ring[index % most] for index in range(count)] for ring in rings)]


ONE_GROUP = PageGeometry()


def rows_of(max_context: int, num_pages: int, page_size: int = BLOCK) -> PageGeometry:
    """Each sequence has the pages of a whole context in a row, or all pages where there are fewer."""
    return PageGeometry(run=min(-(-max_context // page_size), num_pages), page_size=page_size)


def group_layers(config) -> Layers:
    """The layers of each group of a ModelConfig: those without a window, then those with one, in equal groups."""
    every = tuple(range(config.num_layers))
    whole = [layer for layer in every if not config.window(layer)]
    sliding = [layer for layer in every if config.window(layer)]
    if not whole or not sliding:
        return (every,)
    size = len(whole)
    groups = (tuple(whole), *(tuple(sliding[at : at + size]) for at in range(0, len(sliding), size)))
    if len(groups) * size > config.num_layers / (1 - MAX_WASTE):
        return (every,)
    return groups


def geometry(config, step_tokens: int, steps: int, page_size: int = BLOCK) -> PageGeometry:
    """The PageGeometry of a ModelConfig. step_tokens: of one step; steps: that may be in flight at once: pages for what
    they write are held beside the window."""
    windowed = len(group_layers(config)) - 1
    if not windowed:
        return ONE_GROUP if page_size == BLOCK else PageGeometry(page_size=page_size)
    span = config.sliding_window - 1 + steps * max(step_tokens, BLOCK)
    return PageGeometry(windowed, config.sliding_window, -(-span // page_size) + 1, page_size=page_size)
