"""Groups of layers: which layers share a table, how many pages a sequence takes, what stays beside prefixes."""

from array import array
from types import SimpleNamespace

import pytest

from zse.cache.grouped import GroupedCacheManager
from zse.cache.groups import ONE_GROUP, PageGeometry, geometry, group_layers
from zse.cache.pages import BLOCK as PAGE
from zse.cache.pages import PageAllocator, blocks_for
from zse.cache.prefix import PrefixCache

SALT = ("", "")


def model(pattern: str, window: int = 512, small: int = 256, large: int = 256, shared: int = 0):
    """s: a layer with a window and keys of `small` numbers, f: one without and of `large`. shared: last layers without any."""
    return SimpleNamespace(
        num_layers=len(pattern),
        sliding_window=window,
        window=lambda layer: window if pattern[layer] == "s" else 0,
        kv_heads_of=lambda layer: 1,
        head_dim_of=lambda layer: small if pattern[layer] == "s" else large,
        has_state=False,
        kv_layer=lambda layer: layer if layer < len(pattern) - shared else pattern.index(pattern[layer]),
    )


@pytest.mark.parametrize(
    "pattern, options, groups",
    [
        ("ssssf" * 7, dict(large=512, shared=20), [3, 6, 6]),  # Gemma 4 E2B
        ("sssssf" * 7, dict(large=512, shared=18), [4, 8, 8, 4]),  # E4B
        ("sssssf" * 10, dict(small=4096, large=2048), [10, *[5] * 10]),  # 31B
        ("sf", dict(small=512, large=256), [1, 1]),
    ],
)
def test_layers_of_two_sizes_are_in_groups_of_as_many_bytes(pattern, options, groups):
    found = group_layers(model(pattern, **options))
    assert [len(layers) for layers in found] == groups
    assert sorted(layer for layers in found for layer in layers) == list(range(len(pattern) - options.get("shared", 0)))
    assert all(len({pattern[layer] for layer in layers}) == 1 for layers in found)


@pytest.mark.parametrize(
    "pattern, groups",
    [
        ("sssssf" * 3, [3] * 6),  # Gemma 3 270M
        ("sssssf" * 4 + "ss", [4, 4, 4, 4, 4, 4, 2]),  # 1B
        ("sssssf" * 8, [8] * 6),  # 12B
        ("sf" * 6, [6, 6]),
        ("f" * 5, [5]),
        ("s" * 5, [5]),
        ("ffffs", [5]),
        ("sssffffff", [9]),  # too many places of a page would be nobody's
    ],
)
def test_layers_are_in_equal_groups(pattern, groups):
    found = group_layers(model(pattern))
    assert [len(group) for group in found] == groups
    assert sorted(sum(found, ())) == list(range(len(pattern)))
    if len(found) > 1:
        assert {pattern[layer] for layer in found[0]} == {"f"}
        assert {pattern[layer] for group in found[1:] for layer in group} == {"s"}
    assert geometry(model(pattern), 256, 1).num_groups == len(groups)


def test_a_model_with_one_kind_of_layer_counts_as_before():
    assert geometry(model("f" * 4), 256, 2) is ONE_GROUP and geometry(model("s" * 4), 256, 2) is ONE_GROUP
    for tokens in (1, 15, 16, 17, 4000):
        assert ONE_GROUP.needed(tokens) == blocks_for(tokens)
    assert ONE_GROUP.capacity(9) == 9 * PAGE


@pytest.mark.parametrize("groups", [PageGeometry(1, 5, 3), PageGeometry(5, 512, 49), PageGeometry(3, 16, 4)])
def test_capacity_is_what_fits(groups):
    for num_pages in range(1, 400):
        tokens = groups.capacity(num_pages)
        assert groups.needed(tokens) <= num_pages < groups.needed(tokens + 1)


def test_gemma_270m_holds_a_quarter_of_the_pages():
    groups = geometry(model("sssssf" * 3), 256, 1)
    assert groups.needed(4096) == 256 + 5 * 49 < 6 * 256 / 3  # of a prompt in chunks of 256; 6 * 256 without


def test_tables_of_a_sequence_alone_use_windowed_pages_in_turn():
    groups = PageGeometry(2, 20, 4)
    pages = list(range(100, 100 + groups.needed(10 * PAGE)))
    whole, *windowed = groups.tables(pages, 10 * PAGE)
    assert whole == pages[:10] and len(set(windowed[0]) | set(windowed[1])) == 8
    for table in windowed:
        assert table[:4] == table[4:8] and table[8:] == table[:2]
    assert groups.tables(list(range(6)), 2 * PAGE) == [[0, 1], [2, 3], [4, 5]]


def manager(num_pages=60, groups=None, prefix=True):
    return GroupedCacheManager(
        PageAllocator(num_pages), PrefixCache(num_pages) if prefix else None, None, groups or PageGeometry(2, 20, 4)
    )


def test_windowed_pages_come_back_and_go_to_the_end():
    cache = manager(prefix=False)
    assert cache.admit(1, 8 * PAGE, array("i", range(8 * PAGE)), SALT) == 0
    assert (cache.allocator.num_pages - cache.allocator.num_free, cache.covered(1)) == (8 + 2 * 4, 4 * PAGE)
    cache.trim(1, 2 * PAGE)  # sees 20 tokens: the last of page 0 too
    assert cache.windows(1).first == 0
    cache.trim(1, 4 * PAGE)
    assert cache.windows(1).first == 2 and cache.covered(1) == 6 * PAGE and cache.num_trimmed == 4
    assert cache.allocator.num_pages - cache.allocator.num_free == 16 and not cache.check_integrity()
    cache.trim(1, 8 * PAGE - 1)  # at the end they go to the pool
    assert cache.allocator.num_pages - cache.allocator.num_free == 8 + 2 * 2 and cache.covered(1) == 8 * PAGE
    cache.trim(1, 4 * PAGE)
    assert cache.windows(1).first == 6, "trimming never goes back"
    cache.release(1)
    assert cache.allocator.num_free == cache.allocator.num_pages and not cache.check_integrity()


def say(cache, sequence, tokens):
    """Run a sequence to its end, as the scheduler does; how many of its tokens were cached."""
    cached = cache.admit(sequence, len(tokens), array("i", tokens), SALT)
    for position in range(cached, len(tokens), PAGE):
        cache.trim(sequence, position)
    cache.commit(sequence, array("i", tokens), len(tokens), partial=True)
    cache.release(sequence)
    assert not cache.check_integrity()
    return cached


def test_a_hit_needs_the_windowed_pages_of_the_last_window_only():
    cache, tokens = manager(num_pages=200), list(range(1000, 1000 + 10 * PAGE))
    assert say(cache, 1, tokens) == 0
    assert say(cache, 2, [*tokens, 1, 2, 3]) == 10 * PAGE, "of 10 pages, windowed groups have the last two"
    # What begins alike and ends earlier would see windowed pages that are gone: computed, not guessed.
    assert say(cache, 3, tokens[: 5 * PAGE]) == 0
    # That run has left its own beside the same nodes.
    assert say(cache, 4, [*tokens[: 5 * PAGE], 7, 8]) == 5 * PAGE


def test_a_page_that_is_copied_brings_its_windowed_pages():
    cache, tokens = manager(num_pages=200), list(range(1000, 1000 + 3 * PAGE + 9))
    say(cache, 1, tokens)
    cache.take_transfers()
    assert cache.admit(2, 4 * PAGE, array("i", [*tokens[: 3 * PAGE + 5], 1, 2]), SALT) == 3 * PAGE + 5
    copies = cache.take_transfers()
    assert [kind for kind, _, _ in copies] == ["copy"] * 3
    assert [page for _, _, page in copies] == [cache.table(2)[3], *cache.windows(2).at(3)]


def test_windowed_pages_that_nobody_holds_make_room():
    cache, tokens = manager(num_pages=40), list(range(1000, 1000 + 6 * PAGE))
    say(cache, 1, tokens)
    assert cache.allocator.num_free == 40
    assert cache.admit(2, 9 * PAGE, array("i", range(9 * PAGE)), SALT) == 0
    assert cache.admit(3, 10 * PAGE, array("i", range(5000, 5000 + 10 * PAGE)), SALT) == 0
    assert not cache.check_integrity() and cache.allocator.num_free == 40 - 17 - 18
    cache.release(2)
    cache.release(3)
    cache.clear()
    assert cache.allocator.num_free == 40 and not cache.check_integrity()


def test_a_fork_from_before_what_was_trimmed_is_computed_again():
    cache, tokens = manager(num_pages=100), array("i", range(8 * PAGE))
    cache.admit(1, 8 * PAGE, tokens, SALT)
    for position in range(0, 8 * PAGE, PAGE):
        cache.trim(1, position)
    assert not cache.fork(1, 2, 3 * PAGE, 9 * PAGE)
    assert cache.fork(1, 2, 7 * PAGE + 3, 9 * PAGE) and not cache.check_integrity()
    assert cache.windows(2).held(first=6, end=7) == cache.windows(1).held(first=6, end=7)
