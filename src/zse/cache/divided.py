"""Pages of several ranks, each with sequences of its own (attention data parallel, docs/design/0011-several-devices.md): one
CacheManager a rank, behind the interface of one.

Page numbers are a rank's own, and lists of pages say whose they are (RankPages); so are those of host slots. A sequence is on one rank
from admit() until it has no pages, and comes back there where it was swapped."""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from zse.cache.manager import CacheManager
from zse.cache.pages import HostPool, PageAllocator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from array import array

    from zse.cache.manager import Transfer
    from zse.cache.prefix import Salt


class RankPages(list):
    """Pages of rank `rank`."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, pages: Iterable[int], rank: int):
        super().__init__(pages)
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and getattr(other, "rank", None) == self.rank


class DividedPages(PageAllocator):
    """The PageAllocators of all ranks: counts are of them together; numbers of runs are the ranks' one behind the other."""

    def __init__(self, parts: Sequence[PageAllocator]):
        self._parts, self.num_pages = parts, sum(part.num_pages for part in parts)

    @property
    def num_free(self) -> int:  # type: ignore[override]
        return sum(part.num_free for part in self._parts)

    @property
    def num_empty(self) -> int:
        return sum(part.num_empty for part in self._parts)

    def allocate(self, count: int) -> list[int] | None:
        """Of the rank that has the most."""
        rank = max(range(len(self._parts)), key=lambda rank: self._parts[rank].num_free)
        pages = self._parts[rank].allocate(count)
        return None if pages is None else RankPages(pages, rank)

    def release(self, pages: Iterable[int]) -> None:
        self._parts[pages.rank].release(pages)  # type: ignore[attr-defined]

    def empty_runs(self, first: int, end: int) -> "Iterator[tuple[int, int]]":
        at = 0
        for part in self._parts:
            low, high = max(first - at, 0), min(end - at, part.num_pages)
            for page, count in part.empty_runs(low, high) if low < high else ():
                yield at + page, count
            at += part.num_pages


class DividedPrefixes:
    """What is asked of the PrefixCaches of all ranks together."""

    def __init__(self, parts: Sequence[Any]):
        self._parts, self.page_bytes = parts, parts[0].page_bytes

    @property
    def num_idle(self) -> int:
        return sum(part.num_idle for part in self._parts)

    def evict(self, count: int) -> None:
        for part in self._parts:
            mine = min(count, part.num_idle)
            if mine:
                part.evict(mine)
            count -= mine

    def shares_of_others(self, tenant: str) -> int:
        return sum(part.shares_of_others(tenant) for part in self._parts)

    def own(self, salt: "Salt", pages: RankPages) -> None:
        self._parts[pages.rank].own(salt, pages)


class DividedCache(CacheManager):
    """parts: the CacheManager of each rank, of one geometry, without states and groups of layers. rank_of: the rank of each sequence
    that has pages. preferred: the rank where the beginning of a sequence was brought, which is admitted next."""

    rank_of: dict[int, int]
    preferred: dict[int, int]

    def __init__(self, parts: Sequence[CacheManager]):
        self.parts, first = parts, parts[0]
        self.geometry, self.page_size, self.num_groups = first.geometry, first.page_size, first.num_groups
        self.capacity, self.host, self.states = first.capacity, HostPool(0), None
        self.allocator = DividedPages([part.allocator for part in parts])
        self.prefix: Any = None if first.prefix is None else DividedPrefixes([part.prefix for part in parts])
        self.tables: Any = ChainMap(*(part.tables for part in parts))
        self.swapped: Any = ChainMap(*(part.swapped for part in parts))
        self.filling, self.rank_of, self.preferred = set(), {}, {}

    def _part(self, sequence: int) -> CacheManager:
        return self.parts[self.rank_of[sequence]]

    def reserve(self, sequence: int, length: int) -> bool:
        return self._part(sequence).reserve(sequence, length)

    def admit(
        self, sequence: int, length: int, tokens: "array", salt: "Salt", spare: int = 0, session: str = ""
    ) -> int | None:
        """On the preferred rank, else on the one that has the least in use then: what it has cached of the sequence counts for it. The
        ranks that follow are tried where pages are too few; not where it has been swapped on one."""
        data, spare, first = tokens.tobytes(), -(-spare // len(self.parts)), self.preferred.pop(sequence, -1)

        def used(rank: int) -> tuple[bool, tuple[int, int]]:
            prefix = self.parts[rank].prefix
            return rank != first, self.load(rank, 0 if prefix is None else prefix.match(salt, data).length)

        ranks = [rank for rank, part in enumerate(self.parts) if sequence in part.swapped]
        for rank in ranks or sorted(range(len(self.parts)), key=used):
            found = self.parts[rank].admit(sequence, length, tokens, salt, spare, session)
            if found is not None:
                self.rank_of[sequence] = rank
                return found
        return None

    def load(self, rank: int, cached: int) -> tuple[int, int]:
        """By which a rank is chosen, the least first: tokens that its pages in use could hold, `cached` of which count as there; of equal
        ones the pages that are in use or cached, so that what is cached is on all ranks."""
        allocator = self.parts[rank].allocator
        return self.page_size * (allocator.num_pages - allocator.num_free) - cached, -allocator.num_empty

    def fork(self, source: int, sequence: int, shared: int, length: int) -> bool:
        rank = self.rank_of[source]
        is_done = self.parts[rank].fork(source, sequence, shared, length)
        if is_done:
            self.rank_of[sequence] = rank
        return is_done

    def can_swap(self, length: int) -> bool:
        return any(part.can_swap(length) for part in self.parts)

    def swap_out(self, sequence: int, length: int) -> bool:
        is_done = self._part(sequence).swap_out(sequence, length)
        if is_done:
            del self.rank_of[sequence]
        return is_done

    def drop_swapped(self, sequence: int) -> None:
        for part in self.parts:
            if sequence in part.swapped:
                part.drop_swapped(sequence)

    def commit(self, sequence: int, tokens: "array", length: int, partial: bool = False) -> None:
        if sequence in self.rank_of:
            self._part(sequence).commit(sequence, tokens, length, partial)

    def adopt(self, tokens: "array", length: int, pages: list[int], salt: "Salt", slot: int = -1) -> None:
        self.parts[pages.rank].adopt(tokens, length, pages, salt, slot)  # type: ignore[attr-defined]

    def distrust(self, sequence: int) -> None:
        if sequence in self.rank_of:
            self._part(sequence).distrust(sequence)

    def take_transfers(self) -> "list[Transfer]":
        """Each says its rank: "copy@1"."""
        taken = ((rank, transfer) for rank, part in enumerate(self.parts) for transfer in part.take_transfers())
        return [(f"{kind}@{rank}", source, target) for rank, (kind, source, target) in taken]

    def detach(self, sequence: int) -> list[int]:
        rank = self.rank_of.pop(sequence, 0)
        return RankPages(self.parts[rank].detach(sequence), rank)

    def release(self, sequence: int) -> None:
        self.allocator.release(self.detach(sequence))

    def drop_session(self, session: str) -> None:
        for part in self.parts:
            part.drop_session(session)

    def clear(self) -> None:
        for part in self.parts:
            part.clear()

    def snapshot(self) -> dict[str, float]:
        """Of all ranks together."""
        each = [part.snapshot() for part in self.parts]
        return {name: sum(totals[name] for totals in each) for name in each[0]}

    def check_integrity(self, detached: list[list[int]] | None = None) -> list[str]:
        problems = []
        for rank, part in enumerate(self.parts):
            mine = [pages for pages in detached or [] if pages.rank == rank]  # type: ignore[attr-defined]
            problems += [f"rank {rank}: {problem}" for problem in part.check_integrity(mine)]
            if set(part.tables) != {sequence for sequence, on in self.rank_of.items() if on == rank}:
                problems.append(f"rank {rank}: sequences are on another rank than is known")
        return problems


def divide(ranks: int, make: Callable[[], CacheManager]) -> DividedCache:
    """Of so many ranks, each with what `make` gives."""
    parts = [make() for _ in range(ranks)]
    for rank, part in enumerate(parts):
        part.page_list = partial(RankPages, rank=rank)
    return DividedCache(parts)
