"""Groups of layers with a page table each: layers that see all tokens keep all pages, those with a sliding window give
theirs back when the window has passed.

One pool serves all groups, so groups have equally many layers (the last may have fewer), or, where heads differ in
size, layers of about as many bytes: a page holds tokens of one group's layers. The idea is vLLM's hybrid KV cache
manager ("Jenga", arXiv 2503.18292). The first group has the layers without a window. A model with one kind of layer has
one group, and a page of it holds all layers."""

from typing import NamedTuple

from zse.cache.pages import BLOCK
from zse.errors import ConfigError

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
        """A table for each group, for a sequence of `length` tokens that runs alone in `pages` (needed(length) of
        them), chunk after chunk: those of a windowed group are used in turn."""
        count = self.pages_for(length)
        most = min(count, self.most)
        rings = [pages[count + group * most : count + (group + 1) * most] for group in range(self.windowed)]
        return [pages[:count], *([ring[index % most] for index in range(count)] for ring in rings)]


ONE_GROUP = PageGeometry()


def rows_of(max_context: int, num_pages: int, page_size: int = BLOCK) -> PageGeometry:
    """Each sequence has the pages of a whole context in a row, or all pages where there are fewer."""
    return PageGeometry(run=min(-(-max_context // page_size), num_pages), page_size=page_size)


def kv_width(config, layer: int) -> int:
    """Numbers of a token's keys in layer `layer` of a ModelConfig."""
    return config.kv_heads_of(layer) * config.head_dim_of(layer)


def one_group(config) -> Layers:
    """All layers that have K and V of their own. ConfigError where they differ in size: they have no page table in
    common."""
    every = tuple(layer for layer in range(config.num_layers) if config.kv_layer(layer) == layer)
    if len({(config.kv_heads_of(layer), config.head_dim_of(layer)) for layer in every}) > 1:
        raise ConfigError("the layers of this model have heads of two sizes, which takes --kv-layout paged")
    return (every,)


def group_layers(config, whole=None) -> Layers:
    """The layers of each group of a ModelConfig: those without a window, then those with one, in groups that take about
    as many bytes. Layers that read another's K and V, or have no attention, are in none. One group of a model with
    a state: what is cached of it ends at a snapshot, wherever windows are. whole: the ModelConfig that these are some layers of,
    which have as many groups."""
    if whole not in (None, config):
        return _grouped_as(whole, config)
    every = [layer for layer in range(config.num_layers) if config.kv_layer(layer) == layer]
    whole = [layer for layer in every if not config.window(layer)]
    sliding = [layer for layer in every if config.window(layer)]
    if not whole or not sliding or config.has_state:
        return (tuple(every),)
    first, other = kv_width(config, whole[0]), kv_width(config, sliding[0])
    size = max(1, len(whole) * first // other)
    groups = (tuple(whole), *(tuple(sliding[at : at + size]) for at in range(0, len(sliding), size)))
    same = config.head_dim_of(whole[0]) == config.head_dim_of(sliding[0]) and first == other
    if same and len(groups) * size > len(every) / (1 - MAX_WASTE):
        return (tuple(every),)
    return groups


def _grouped_as(whole, config) -> Layers:
    """The layers of `config` in as many groups as those of `whole` are in."""
    count = len(group_layers(whole)) - 1
    every = [layer for layer in range(config.num_layers) if config.kv_layer(layer) == layer]
    if not count:
        return (tuple(every),)
    sliding = [layer for layer in every if config.window(layer)]
    cuts = [len(sliding) * number // count for number in range(count + 1)]
    parts = (tuple(sliding[start:stop]) for start, stop in zip(cuts, cuts[1:], strict=False))
    return (tuple(layer for layer in every if not config.window(layer)), *parts)


def geometry(config, step_tokens: int, steps: int, page_size: int = BLOCK) -> PageGeometry:
    """The PageGeometry of a ModelConfig. step_tokens: of one step; steps: that may be in flight at once: pages for what
    they write are held beside the window."""
    windowed = len(group_layers(config)) - 1
    if not windowed:
        return ONE_GROUP if page_size == BLOCK else PageGeometry(page_size=page_size)
    span = config.sliding_window - 1 + steps * max(step_tokens, BLOCK)
    return PageGeometry(windowed, config.sliding_window, -(-span // page_size) + 1, page_size=page_size)


def paged_by(model):
    """The ModelConfig whose layers say what pages a sequence takes, of a Model or a ModelPlan: of a pipeline's rank the whole model's."""
    return model.share.whole if model.share is not None and model.share.is_stage else model.config
