"""Pages of the requests' pool that are lent to sequences beside them (jobs), in the order in which both came."""

from zse.scheduler.lifecycle import Lifecycle
from zse.scheduler.request import Request


class PageLoans:
    """pages: lent now, one list a sequence."""

    def __init__(self, life: Lifecycle):
        self._life = life
        self.pages: list[list[int]] = []
        self._borrower: tuple[int, int] | None = None   # (arrival, pages) of a sequence that waits for pages

    def borrow(self, count: int, arrival: int) -> list[int] | None:
        """`count` pages for a sequence that came at `arrival`, until give_back(). None while too few are free: then
        requests that came later leave the pages alone, as it leaves alone what older ones wait for."""
        cache = self._life.cache
        keep = len(self._life.running)
        head = self._life.queue.head()
        if head is not None and head.arrival < arrival:
            keep += cache.pages_needed(len(head.tokens))
        pages = cache.allocator.allocate(count) if count + keep <= cache.num_free else None
        if pages is None:
            self._borrower = arrival, count
            return None
        self._borrower = None
        self.pages.append(pages)
        return pages

    def withdraw(self, arrival: int) -> None:
        """The sequence of `arrival` no longer waits for pages."""
        if self._borrower is not None and self._borrower[0] == arrival:
            self._borrower = None

    def give_back(self, pages: list[int]) -> None:
        self.pages.remove(pages)
        self._life.cache.release_pages(pages)

    def awaited(self, request: Request) -> int:
        """Pages that the request must leave to a sequence which came before it."""
        borrower = self._borrower
        return borrower[1] if borrower is not None and borrower[0] <= request.arrival else 0
