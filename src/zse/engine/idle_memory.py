"""What an idle engine gives back to the system: cached prefixes beyond a bound, and the memory of pages that nobody
has.

KV pages become resident when they are first written, and stay so: a server that was busy for an hour would keep what
its busiest minute took."""

from typing import Any

from zse.scheduler.feature import Feature

IDLE_S = 10.0  # without a step: what is dropped sooner is asked for again
PIECE_BYTES = 64 << 20  # at once, in about 10 ms: a request may come meanwhile


class IdleMemory(Feature):
    """engine: one whose KV pages lie in a buffer that takes memory back (Buffer.discard)."""

    is_live = False  # no step has to do with it

    def __init__(self, engine: Any):
        runner = engine.runner
        self._scheduler, self._cache = engine.scheduler, engine.scheduler.cache
        self._mover, self._kv, self._page_nbytes = runner.pages, runner.kv, runner.kv.page_nbytes
        self._ranks = runner.ranks
        self._states, self._most_bytes = runner.states, runner.config.cache_idle_memory
        self._most_kept = self._most_bytes // self._page_nbytes
        self._piece = max(1, PIECE_BYTES // self._page_nbytes)
        self._steps, self._since = -1, 0.0
        self._next = 0  # the page at which the next piece begins
        self.num_evicted = 0

    def idle(self, now: float) -> bool:
        """Give a piece back where the engine has made no step for IDLE_S seconds. False when there is none."""
        steps, allocator = self._scheduler.totals.steps, self._cache.allocator
        if steps != self._steps:
            self._steps, self._since, self._next = steps, now, 0
        if now - self._since < IDLE_S or self._next >= allocator.num_pages:
            return False
        if self._next == 0:
            over = min(allocator.num_pages - allocator.num_empty - self._most_kept, self._piece)
            is_less = over > 0 and self._evict(over)
            # Transfers that no batch has taken read pages, which may be free by now.
            self._mover.run(self._cache.take_transfers())
            if is_less:
                return True
        end = min(self._next + self._piece, allocator.num_pages)
        for first, count in allocator.empty_runs(self._next, end):
            if self._ranks is not None:
                self._ranks.discard(first, count)
            self._kv.discard(first, count)
        self._next = end
        if end == allocator.num_pages and self._states is not None:
            self._give_states_back()
        return True

    def _give_states_back(self) -> None:
        """Of the states that are kept beside prefixes as many stay as the bound has bytes for; the memory of free slots
        goes."""
        kept, states = self._cache.states, self._states
        kept.keep_at_most(self._most_bytes // states.slot_nbytes)
        self._mover.run(self._cache.take_transfers())
        for first, count in kept.free_runs():
            states.buffer.discard(first * states.slot_nbytes, count * states.slot_nbytes)

    def _evict(self, count: int) -> bool:
        """Take so many pages that nobody uses out of the cache, the coldest first. False when there are none."""
        prefix, before = self._cache.prefix, self._cache.allocator.num_empty
        if prefix is not None:
            prefix.evict(min(count, prefix.num_idle))
        evicted = self._cache.allocator.num_empty - before
        self.num_evicted += evicted
        return evicted > 0

    def counters(self) -> dict[str, float]:
        return {"idle_evicted_pages": self.num_evicted}
