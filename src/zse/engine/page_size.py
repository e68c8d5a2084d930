"""How many tokens a KV page has (`--page-size`), and with it how many pages there are and how long a context may be.

What `auto` takes grows with the context, because the host's work does: page lists, nodes of the prefix cache, reference
counts and pieces to move. A context of 131,072 tokens has 8,192 pages of 16 tokens, or 2,048 of 64. Smaller pages waste
less and share finer, so `auto` stays at 16 as long as that is cheap, and takes a size only within three bounds:

- The context (AUTO_CONTEXTS): 16 up to 8,192 tokens, 32 up to 32,768, 64 up to 131,072, then 128: no sequence of a
  context that is common today has more than 2,048 pages, and none of up to 8,192 tokens changes.
- The pool: a sequence wastes half a page at its end, and in each group of layers with a window another half at the
  window's beginning. If all rows run, that is rows * (1/2 + windowed groups) pages, which may be MAX_WASTE (2 %) of
  all: 25 pages for each row, and 50 more for each of its windowed groups.
- The window: such a group holds little more than a window of a sequence, so a page may be 1/WINDOW_PAGES (3 %) of it.
  Gemma 3's 512 tokens stay at 16, 1,024 allow 32.
"""

from collections.abc import Callable
from typing import NamedTuple

from zse.cache.groups import PageGeometry
from zse.cache.pages import BLOCK, PAGE_SIZES
from zse.errors import ConfigError

AUTO_CONTEXTS = {16: 8192, 32: 32768, 64: 131072}  # page size → the longest context that it is taken for
MAX_WASTE = 0.02
WINDOW_PAGES = 32


class Pool(NamedTuple):
    """The KV pages: tokens of one, how many, the longest context. kv_bytes: of them all."""

    page_size: int
    num_pages: int
    max_context: int
    kv_bytes: int


def choose_pool(
    config, rows: int, *, model_context: int, block_bytes: int, room_bytes: int, geometry: Callable[[int], PageGeometry]
) -> Pool:
    """The Pool of an EngineConfig with at most `rows` sequences at once. block_bytes: of BLOCK tokens of one group of
    layers. room_bytes: what KV pages should stay within. geometry: of a page size.

    Raises ConfigError for a context that num_pages cannot hold."""

    def pool_of(page_size: int) -> Pool:
        return _pool(config, rows, model_context, block_bytes, room_bytes, geometry(page_size))

    if config.page_size:
        return pool_of(config.page_size)
    smallest = pool_of(BLOCK)
    pages = geometry(BLOCK)
    for page_size in reversed(PAGE_SIZES):
        if (
            page_size == BLOCK
            or AUTO_CONTEXTS[page_size // 2] >= smallest.max_context
            or (pages.windowed and page_size * WINDOW_PAGES > pages.window)
        ):
            continue
        # Pages of this size may hold a few tokens less in all: too few for the context that was asked for, say.
        blocks = smallest.num_pages * BLOCK // page_size
        if (
            rows * (0.5 + pages.windowed) > MAX_WASTE * blocks
            or config.max_context is not None
            and (config.num_pages is not None and geometry(page_size).capacity(blocks) < config.max_context)
        ):
            continue
        pool = pool_of(page_size)
        if pool.kv_bytes <= max(room_bytes, smallest.kv_bytes):
            return pool
    return smallest


def _pool(config, rows: int, model_context: int, block_bytes: int, room_bytes: int, pages: PageGeometry) -> Pool:
    size = pages.page_size
    page_bytes = block_bytes * (size // BLOCK)
    if config.num_pages is not None:
        num_pages = config.num_pages * BLOCK // size
        capacity = pages.capacity(num_pages)
        max_context = config.max_context or min(model_context, capacity)
        which = "" if size == BLOCK else f" in pages of {size}"
        if not max_context:
            raise ConfigError(
                f"num_pages {config.num_pages} is too few: this model needs "
                f"{pages.num_groups * size // BLOCK} for a token{which}"
            )
        if max_context > capacity:
            raise ConfigError(
                f"num_pages {config.num_pages} holds {capacity} tokens{which}, less than max_context {max_context}"
            )
    else:
        affordable = max(pages.num_groups, room_bytes // page_bytes)
        max_context = config.max_context or min(model_context, pages.capacity(affordable))
        one = pages.needed(max_context)
        num_pages = max(one, min(one * rows, affordable))
    return Pool(size, num_pages, max_context, num_pages * page_bytes)
