"""Page tables of sequences: grows and frees them; the one place where a sequence's pages change hands."""

from zse.cache.pages import PageAllocator, pages_for


class CacheManager:
    """Page tables by sequence id over one PageAllocator. A sequence appears with its first reserve()."""

    def __init__(self, allocator: PageAllocator):
        self.allocator = allocator
        self._tables: dict[int, list[int]] = {}

    def reserve(self, sequence: int, length: int) -> bool:
        """Give `sequence` pages for `length` tokens. False, and nothing changed, when too few are free."""
        table = self._tables.get(sequence, ())
        missing = pages_for(length) - len(table)
        if missing <= 0:
            return True
        pages = self.allocator.allocate(missing)
        if pages is None:
            return False
        self._tables.setdefault(sequence, []).extend(pages)
        return True

    def table(self, sequence: int) -> list[int]:
        """The pages of `sequence` in token order; the caller must not change the list."""
        return self._tables.get(sequence, [])

    def detach(self, sequence: int) -> list[int]:
        """Forget `sequence`; its pages keep their references and the caller now owns them (see release_pages)."""
        return self._tables.pop(sequence, [])

    def release_pages(self, pages: list[int]) -> None:
        self.allocator.release(pages)

    def release(self, sequence: int) -> None:
        """Forget `sequence` and free its pages. A sequence without pages is fine."""
        self.allocator.release(self._tables.pop(sequence, ()))

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    def sequences(self) -> set[int]:
        return set(self._tables)

    def check_integrity(self, detached: list[list[int]] | None = None) -> list[str]:
        """What is wrong, one line each. detached: page lists that the caller took with detach() and still owns."""
        problems = self.allocator.check_integrity([*self._tables.values(), *(detached or [])])
        for sequence, table in self._tables.items():
            if len(set(table)) != len(table):
                problems.append(f"sequence {sequence} holds a page twice")
        return problems
