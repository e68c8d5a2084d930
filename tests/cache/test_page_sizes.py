"""Pages of more than one block: arithmetic of the manager and of the kernels' tables, and damage that the checks find."""

import random
from array import array
from types import SimpleNamespace

import pytest

from zse.cache.files import PageFiles, key_of
from zse.cache.grouped import GroupedCacheManager
from zse.cache.groups import PageGeometry, rows_of
from zse.cache.layout import KVCache
from zse.cache.manager import CacheManager
from zse.cache.pages import BLOCK, PAGE_SIZES, HostPool, PageAllocator
from zse.cache.prefix import PrefixCache, common_tokens
from zse.runtime.null import NullDevice
from zse.scheduler.scheduler import cache_manager

SALT = ("a", "")
LARGER = pytest.mark.parametrize("size", PAGE_SIZES[1:])


def manager(size, num_pages=12, slots=0) -> CacheManager:
    geometry = PageGeometry(page_size=size)
    return CacheManager(PageAllocator(num_pages), PrefixCache(num_pages, page_size=size), HostPool(slots), geometry)


@LARGER
def test_the_manager_counts_pages_of_its_size(size):
    cache = manager(size, 4)
    assert cache.capacity == 4 * size and [cache.pages_for(n) for n in (0, 1, size, size + 1)] == [0, 1, 1, 2]
    assert cache.reserve(1, size) and len(cache.table(1)) == 1 and cache.covered(1) == size
    assert cache.reserve(1, size + 1) and len(cache.table(1)) == 2
    assert not cache.reserve(2, 2 * size + 1) and cache.check_integrity() == []


@LARGER
def test_a_hit_within_a_page_copies_that_page(size):
    cache, tokens = manager(size), array("i", range(3 * size))
    assert cache.admit(1, 3 * size, tokens, SALT) == 0
    cache.commit(1, tokens, 2 * size + 9, partial=True)
    again = array("i", [*range(2 * size + 5), 7, 7])
    assert cache.admit(2, len(again), again, SALT) == 2 * size + 5
    assert cache.table(2)[:2] == cache.table(1)[:2]
    assert cache.take_transfers() == [("copy", cache.table(1)[2], cache.table(2)[2])]
    # A fork shares full pages only; at a block's border within a page it copies too.
    assert cache.fork(1, 3, size + BLOCK, 2 * size)
    assert cache.table(3)[0] == cache.table(1)[0] and cache.table(3)[1] != cache.table(1)[1]
    assert cache.take_transfers() == [("copy", cache.table(1)[1], cache.table(3)[1])]
    assert cache.check_integrity() == []


@LARGER
def test_evicted_pages_go_to_the_host_whole(size):
    cache, tokens = manager(size, 3, slots=4), array("i", range(2 * size + BLOCK))
    assert cache.admit(1, len(tokens), tokens, SALT) == 0
    cache.commit(1, tokens, len(tokens), partial=True)
    cache.release(1)
    assert cache.reserve(2, 3 * size) and len(cache.take_transfers()) == 2  # full pages; the last one is dropped
    cache.release(2)
    assert cache.admit(3, len(tokens), tokens, SALT) == 2 * size
    assert [kind for kind, _, _ in cache.take_transfers()] == ["in", "in"] and cache.check_integrity() == []
    cache.commit(3, tokens, len(tokens))
    assert cache.swap_out(3, len(tokens)) and len(cache.take_transfers()) == 3
    assert cache.admit(3, len(tokens), tokens, SALT) == len(tokens) and cache.check_integrity() == []


def test_page_sizes_must_agree_and_be_known():
    with pytest.raises(ValueError, match="pages of 16 tokens, for pages of 32"):
        CacheManager(PageAllocator(4), PrefixCache(4), None, PageGeometry(page_size=32))
    for make in (
        lambda: PrefixCache(4, page_size=48),
        lambda: CacheManager(PageAllocator(4), None, None, PageGeometry(page_size=8)),
    ):
        with pytest.raises(ValueError, match="is not one of 16, 32, 64, 128"):
            make()


@LARGER
def test_what_a_sequence_needs(size):
    pages = PageGeometry(2, 40, 3, page_size=size)
    assert pages.first(39) == 0 and pages.first(39 + size) == 1
    assert pages.needed(10 * size) == 10 + 2 * 3 and pages.capacity(pages.needed(10 * size)) == 10 * size
    whole, *windowed = pages.tables(list(range(16)), 10 * size)
    assert len(whole) == 10 and all(table[at] == table[at + 3] for table in windowed for at in range(7))
    cache = cache_manager(PageAllocator(9), None, None, rows_of(2 * size + 1, 9, size))
    assert cache.reserve(1, 1) and cache.allocator.num_free == 6


@pytest.mark.parametrize("size", PAGE_SIZES)
def test_tables_of_kernels_list_blocks(size):
    config = SimpleNamespace(
        num_layers=3,
        kv_heads_of=lambda layer: 2,
        head_dim_of=lambda layer: 32,
        kv_layer=lambda layer: layer,
        latent=None,
    )
    kv, count = KVCache(NullDevice(), config, 6, page_size=size), size // BLOCK
    assert kv.nbytes == 6 * kv.page_nbytes == kv.num_blocks * 2 * 3 * 2 * 32 * BLOCK * 2
    pages, every = [4, 0, 5], []
    for page in pages:  # parts of a block lie together, blocks of a page too
        every += [kv.parts_per_block * (page * count + index) for index in range(count)]
    for first in range(len(every)):
        assert kv.table_entry(pages, first) == every[first]
        for end in range(first, len(every) + 1):
            assert kv.table_entries(pages, first, end).tolist() == every[first:end]
            held = {every.index(entry) // count for entry in every[first:end]}
            assert set(kv.pages_of(pages, first, end)) >= {pages[at] for at in held}
    # The last index is within the tensors that kernels see.
    last = max(kv.table_entries([5], 0, count))
    assert last == kv.keys[0].shape[0] - 1


def test_common_beginnings():
    rng = random.Random(3)
    for _ in range(300):
        a = [rng.randrange(3) for _ in range(rng.randint(1, 128))]
        b = [*a[: rng.randint(0, len(a))], *(rng.randrange(3) for _ in range(rng.randint(0, 128)))]
        expected = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_tokens(array("i", a).tobytes(), array("i", b).tobytes()) == expected


def test_files_of_other_page_sizes_are_not_read(tmp_path):
    tokens, made = bytes(4 * 32), PageFiles(tmp_path / "kv", b"f" * 16, 9000, 32)
    key = key_of(made.root(("a",)), tokens)
    made.write(key, made.root(("a",)), b"x" * 1000)
    found = bytearray(1000)
    assert made.read([(key, (memoryview(found),))]) == 1 and found == b"x" * 1000
    made.close()
    other = PageFiles(tmp_path / "kv", b"f" * 16, 9000, 64)  # even under one fingerprint
    assert key not in other and other.num_damaged == 1
    assert other.read([(key, (memoryview(found),))]) == 0 and not list(tmp_path.rglob("*.kv"))


# Damage to the books of pages of 64 tokens, each of which check_integrity must find.


def _a_page_too_many(cache):
    cache.table(1).append(cache.table(2)[0])


def _a_page_is_missing(cache):
    cache.table(1).pop()


def _a_page_twice(cache):
    cache.table(1)[1] = cache.table(1)[0]


def _a_full_page_is_shorter(cache):
    node = next(cache.prefix.nodes())
    node.tokens = node.tokens[: 4 * 16]


def _an_idle_page_is_free(cache):
    cache.allocator.free(next(iter(node.page for node in cache.prefix.nodes())))


@pytest.mark.parametrize(
    "damage",
    [_a_page_too_many, _a_page_is_missing, _a_page_twice, _a_full_page_is_shorter, _an_idle_page_is_free],
    ids=lambda damage: damage.__name__[1:],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_damage_is_found(damage, grouped):
    size, num_pages = 64, 40
    prefix, host = PrefixCache(num_pages, page_size=size), HostPool(4)
    geometry = PageGeometry(2, 40, 4, page_size=size) if grouped else PageGeometry(page_size=size)
    made = GroupedCacheManager if grouped else CacheManager
    cache = made(PageAllocator(num_pages), prefix, host, geometry)
    for sequence in (1, 2):
        tokens = array("i", range(1000 * sequence, 1000 * sequence + 150))
        assert cache.admit(sequence, 150, tokens, SALT) == 0
        cache.commit(sequence, tokens, 150, partial=True)
    assert cache.check_integrity() == []
    damage(cache)
    assert cache.check_integrity()
