"""Pages of a whole context in a row for each sequence, in place of paging."""

import random
from array import array

import pytest

from zse.cache.contiguous import ContiguousCacheManager
from zse.cache.groups import rows_of
from zse.cache.pages import BLOCK as PAGE
from zse.cache.pages import HostPool, PageAllocator
from zse.cache.prefix import PrefixCache

CONTEXT = 4 * PAGE
TOKENS = array("i", range(20))
SALT = ("", "")


def manager(num_pages: int, slots: int = 0) -> ContiguousCacheManager:
    return ContiguousCacheManager(PageAllocator(num_pages), HostPool(slots), rows_of(CONTEXT, num_pages))


def test_a_run_is_found_between_what_others_hold():
    allocator = PageAllocator(10)
    low = allocator.allocate(2)
    assert allocator.allocate_run(4) == [6, 7, 8, 9] and allocator.allocate_run(3) == [3, 4, 5]
    assert allocator.num_free == 1 and allocator.allocate_run(2) is None
    allocator.release(low[1:])
    assert allocator.allocate_run(2) == [1, 2]
    assert allocator.check_integrity([[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]) == []
    PrefixCache(10).attach(allocator)
    with pytest.raises(ValueError, match="prefix cache"):
        allocator.allocate_run(1)


@pytest.mark.parametrize("seed", range(10))
def test_runs_among_counts_of_any_size(seed):
    """256 references have a zero byte."""
    rng = random.Random(seed)
    allocator = PageAllocator(rng.randint(5, 60))
    held = allocator.allocate(rng.randint(1, allocator.num_pages))
    for page in held:
        for _ in range(rng.choice((0, 1, 255, 256))):
            allocator.retain([page])
    gone = [page for page in held if rng.random() < 0.5]
    for page in gone:
        while allocator.references(page):
            allocator.release([page])
    free = {page for page in range(allocator.num_pages) if not allocator.references(page)}
    for count in range(allocator.num_pages, 0, -1):
        starts = [page for page in range(allocator.num_pages) if set(range(page, page + count)) <= free]
        run = allocator.allocate_run(count)
        assert (run is None) == (not starts) and (run is None or run[0] == max(starts))
        if run is not None:
            allocator.release(run)


def test_a_sequence_holds_a_whole_context_from_its_admission_on():
    cache = manager(9)
    assert cache.admit(1, 20, TOKENS, SALT, spare=0) == 0
    assert cache.table(1) == [5, 6] and cache.covered(1) == 2 * PAGE
    assert cache.allocator.num_free == 5 and cache.snapshot()["reserved_pages"] == 2
    # A page for the next token of sequence 1 need not stay free: it has it.
    assert cache.admit(2, 1, TOKENS[:1], SALT, spare=1) == 0
    assert cache.admit(3, 1, TOKENS[:1], SALT) is None and cache.allocator.num_free == 1
    assert cache.reserve(1, CONTEXT) and cache.table(1) == [5, 6, 7, 8] and not cache.reserve(1, CONTEXT + 1)
    assert cache.check_integrity() == []
    cache.commit(1, TOKENS, 20)
    pages = cache.detach(1)
    assert pages == [5, 6, 7, 8] and cache.check_integrity([pages]) == []
    cache.allocator.release(pages)
    cache.release(2)
    assert cache.allocator.num_free == 9 and cache.check_integrity() == []


def test_others_leave_room_that_is_asked_for():
    cache = manager(9)
    assert cache.admit(1, 1, TOKENS[:1], SALT, spare=6) is None
    assert cache.admit(1, 1, TOKENS[:1], SALT, spare=5) == 0


def test_a_fork_copies_everything():
    cache = manager(8)
    assert cache.admit(1, 20, TOKENS, SALT) == 0 and cache.fork(1, 2, 20, 21)
    assert cache.take_transfers() == [("copy", 4, 0), ("copy", 5, 1)] and cache.table(2) == [0, 1]
    assert not cache.fork(1, 3, 20, 21) and cache.check_integrity() == []


def test_to_the_host_and_back():
    cache = manager(8, slots=3)
    cache.admit(1, 20, TOKENS, SALT)
    assert not cache.can_swap(CONTEXT) and cache.swap_out(1, 20) and cache.allocator.num_free == 8
    assert cache.admit(2, 1, TOKENS[:1], SALT) == 0 and cache.admit(1, 20, TOKENS, SALT) == 20
    transfers = cache.take_transfers()
    assert [kind for kind, _, _ in transfers] == ["out", "out", "in", "in"]
    assert [page for _, _, page in transfers[2:]] == cache.table(1) == [0, 1]
    assert cache.host.num_free == 3 and cache.check_integrity() == []


def test_integrity_check_finds_what_is_wrong():
    cache = manager(8)
    cache.admit(1, 40, array("i", range(40)), SALT)
    cache.table(1)[:2] = cache.table(1)[1::-1]
    assert cache.check_integrity() == ["the pages of sequence 1 do not follow one another"]
    cache.table(1)[:2] = cache.table(1)[1::-1]
    cache._behind.clear()
    assert any(
        "run without a table" in problem or "table without a run" in problem for problem in cache.check_integrity()
    )
