"""KV memory as it was before paging: each sequence has the pages of a whole context, one behind the other, from its
admission to its end. For comparison (`--kv-layout contiguous`): what is reserved and never written is what paging saves
(Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 3).

Nothing is shared, so there is no prefix cache, and a fork copies all of its source's pages. The device sees page tables
as ever: kernels are the same, and what differs is how many sequences fit.
"""

from array import array

from zse.cache.groups import PageGeometry
from zse.cache.manager import CacheManager
from zse.cache.pages import HostPool, PageAllocator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.cache.prefix import Salt
    from zse.cache.states import StateSlots


class ContiguousCacheManager(CacheManager):
    """See CacheManager. A sequence's table has the pages that it needs so far; the others of its run wait behind."""

    def __init__(
        self,
        allocator: PageAllocator,
        host: HostPool | None,
        geometry: PageGeometry,
        states: "StateSlots | None" = None,
    ):
        super().__init__(allocator, None, host, geometry, states)
        self._run = geometry.run
        self._behind: dict[int, list[int]] = {}  # of each sequence: the last page first

    def reserve(self, sequence: int, length: int) -> bool:
        if sequence not in self.tables and not self._begin(sequence):
            return False
        table, behind = self.tables[sequence], self._behind[sequence]
        missing = self.pages_for(length) - len(table)
        if missing > len(behind):
            return False
        for _ in range(missing):
            table.append(behind.pop())
        return True

    def _begin(self, sequence: int) -> bool:
        """A run for a new sequence, none of it in its table yet."""
        pages = self.allocator.allocate_run(self._run)
        if pages is None:
            return False
        self.tables[sequence], self._behind[sequence] = [], pages[::-1]
        return True

    def admit(
        self, sequence: int, length: int, tokens: array, salt: "Salt", spare: int = 0, session: str = ""
    ) -> int | None:
        # Of `spare`, a page for each that runs is for its next token: here all of them have theirs.
        spare = max(0, spare - len(self.tables))
        if (
            self._run + spare > self.allocator.num_free
            or length > self._run * self.page_size
            or (self.states is not None and not self.states.has_room())
            or not self.reserve(sequence, length)
        ):
            return None
        if self.states is not None:
            self.states.begin(sequence)
        _, computed = self.swapped.get(sequence, ((), 0))
        if computed:
            self._swap_in(sequence, 0)
        return computed

    def fork(self, source: int, sequence: int, shared: int, length: int) -> bool:
        if max(length, shared) > self._run * self.page_size or not self.reserve(sequence, max(length, shared)):
            return False
        if self.states is not None and not self.states.fork(source, sequence):
            self.release(sequence)
            return False
        count = self.pages_for(shared)
        self._transfers += [
            ("copy", old, new)
            for old, new in zip(self.table(source)[:count], self.table(sequence)[:count], strict=True)
        ]
        self.num_copied_pages += count
        return True

    def can_swap(self, length: int) -> bool:
        if self.states is not None and not self.states.can_swap():
            return False
        return 0 < self.pages_for(length) <= self.host.num_free

    def detach(self, sequence: int) -> list[int]:
        return super().detach(sequence) + self._behind.pop(sequence, [])

    def snapshot(self) -> dict[str, float]:
        return {**super().snapshot(), "reserved_pages": sum(map(len, self._behind.values()))}

    def check_integrity(self, detached: list[list[int]] | None = None) -> list[str]:
        problems = super().check_integrity([*self._behind.values(), *(detached or [])])
        if set(self._behind) != set(self.tables):
            problems.append("a sequence has a table without a run, or a run without a table")
        for sequence, table in self.tables.items():
            run = table + self._behind.get(sequence, [])[::-1]
            if len(run) != self._run or run != list(range(run[0], run[0] + len(run))):
                problems.append(f"the pages of sequence {sequence} do not follow one another")
        return problems
