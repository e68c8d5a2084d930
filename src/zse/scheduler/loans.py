"""Pages of the requests' pool that are lent to jobs beside them, which stand in one order with the requests: the tenant
that is furthest behind its share goes first, and what came first within a tenant (WaitingQueue.goes_first)."""

from zse.scheduler.lifecycle import Lifecycle
from zse.scheduler.queue import Claimant
from zse.scheduler.request import Request


class PageLoans:
    """pages: lent now, one list a job."""

    def __init__(self, life: Lifecycle):
        self._life = life
        self.pages: list[list[int]] = []
        self._borrower: tuple[Claimant, int] | None = None  # a job that waits for so many pages

    def borrow(self, count: int, job: Claimant) -> list[int] | None:
        """`count` pages for a job, until give_back(). None while too few are free: then requests that it goes ahead of
        leave the pages alone, as it leaves alone what others wait for that go ahead of it."""
        cache, queue = self._life.cache, self._life.queue
        keep = len(self._life.running)
        head = queue.head()
        if head is not None and queue.goes_first(head, job):
            keep += cache.pages_needed(len(head.tokens))
        pages = cache.allocator.allocate(count) if count + keep <= cache.num_free else None
        if pages is None:
            self._borrower = job, count
            return None
        self._borrower = None
        self.pages.append(pages)
        return pages

    def withdraw(self, job: Claimant) -> None:
        """The job no longer waits for pages."""
        if self._borrower is not None and self._borrower[0] is job:
            self._borrower = None

    def give_back(self, pages: list[int]) -> None:
        self.pages.remove(pages)
        self._life.cache.release_pages(pages)

    def awaited(self, request: Request) -> int:
        """Pages that the request must leave to a job which goes ahead of it."""
        if self._borrower is None or self._life.queue.goes_first(request, self._borrower[0]):
            return 0
        return self._borrower[1]
