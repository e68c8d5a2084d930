import random

import pytest

from zse.cache.manager import CacheManager
from zse.cache.pages import BLOCK as PAGE
from zse.cache.pages import PageAllocator, blocks_for


def test_blocks_for_rounds_up():
    assert [blocks_for(n) for n in (0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE)] == [0, 1, 1, 1, 2, 2]


def test_allocation_is_all_or_nothing():
    allocator = PageAllocator(4)
    first = allocator.allocate(3)
    assert allocator.allocate(2) is None
    assert allocator.num_free == 1 and allocator.check_integrity([first]) == []


def test_freed_pages_are_used_before_untouched_ones():
    allocator = PageAllocator(8)
    first = allocator.allocate(3)
    assert first == [0, 1, 2]
    allocator.release(first)
    assert allocator.allocate(3) == [0, 1, 2]


def test_a_shared_page_stays_until_its_last_holder_leaves():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.retain(pages)
    allocator.release(pages)
    assert allocator.references(pages[0]) == 1 and allocator.num_free == 1
    allocator.release(pages)
    assert allocator.num_free == 2


def test_misuse_is_an_error():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(ValueError, match="released twice"):
        allocator.release(pages)
    with pytest.raises(ValueError, match="is free"):
        allocator.retain(pages)
    with pytest.raises(ValueError, match="at least 1"):
        PageAllocator(0)


def test_integrity_check_finds_what_is_wrong():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    assert allocator.check_integrity([pages]) == []
    assert any("1 references counted, 0 held" in line for line in allocator.check_integrity([pages[:1]]))
    assert any("1 references counted, 2 held" in line for line in allocator.check_integrity([pages, pages[:1]]))
    allocator._free.append(pages[0])
    assert any("in the free list" in line for line in allocator.check_integrity([pages]))
    allocator._free.append(pages[0])
    assert any("stands twice" in line for line in allocator.check_integrity([pages]))


def test_manager_grows_detaches_and_releases():
    cache = CacheManager(PageAllocator(4))
    assert cache.reserve(7, 1) and cache.reserve(7, PAGE) and len(cache.table(7)) == 1
    assert cache.reserve(7, PAGE + 1) and len(cache.table(7)) == 2
    assert not cache.reserve(8, 3 * PAGE) and set(cache.tables) == {7}
    pages = cache.detach(7)
    assert cache.table(7) == [] and cache.allocator.num_free == 2
    assert cache.check_integrity() != [] and cache.check_integrity([pages]) == []
    cache.allocator.release(pages)
    cache.release(7)
    assert cache.allocator.num_free == 4 and cache.check_integrity() == []


@pytest.mark.parametrize("seed", range(20))
def test_random_walk(seed):
    rng = random.Random(seed)
    allocator = PageAllocator(rng.randint(1, 40))
    holders: list[list[int]] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.5:
            pages = allocator.allocate(rng.randint(0, 6))
            if pages is not None:
                holders.append(pages)
        elif holders and action < 0.6:
            shared = rng.choice(holders)
            allocator.retain(shared)
            holders.append(list(shared))
        elif holders:
            allocator.release(holders.pop(rng.randrange(len(holders))))
        assert allocator.check_integrity(holders) == []
    for pages in holders:
        allocator.release(pages)
    assert allocator.num_free == allocator.num_pages
