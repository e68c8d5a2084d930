"""Page tables of sequences: grows, shares and frees them; the one place where a sequence's pages change hands.

With a PrefixCache, a sequence starts with the pages that are known already (admit) and its own enter the cache as they
are committed (commit). What the device must do for that stands in `transfers`, for the next batch.
"""

from array import array

from zse.cache.eviction import Node
from zse.cache.groups import ONE_GROUP, PageGeometry
from zse.cache.pages import HostPool, PageAllocator, check_page_size
from zse.cache.prefix import Match, PrefixCache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.cache.grouped import GroupedCacheManager
    from zse.cache.prefix import Salt

    Transfer = tuple[str, int, int]  # ("copy", page, page), ("out", page, slot), ("in", slot, page)


NOTHING = Match([], None, 0, 0)


class CacheManager:
    """Page tables by sequence id over one PageAllocator. A sequence appears with its first reserve() or admit().
    prefix: None caches nothing. host: slots for pages that leave the device, None: they are computed again. geometry: says
    how many tokens a page has. Raises ValueError for a prefix cache of another page size."""

    def __init__(
        self,
        allocator: PageAllocator,
        prefix: PrefixCache | None = None,
        host: HostPool | None = None,
        geometry: PageGeometry = ONE_GROUP,
    ):
        check_page_size(geometry.page_size)
        if prefix is not None and prefix.page_size != geometry.page_size:
            raise ValueError(f"a prefix cache of pages of {prefix.page_size} tokens, for pages of {geometry.page_size}")
        self.geometry, self.page_size = geometry, geometry.page_size
        self.allocator, self.prefix, self.host = allocator, prefix, host or HostPool(0)
        if prefix is not None:
            prefix.attach(allocator, self.host, lambda transfer: self._transfers.append(transfer))
        self.num_groups = 1  # of layers, each with a page table: see GroupedCacheManager
        self._swapped: dict[int, tuple[list[int], int]] = {}  # (slots, tokens) of sequences that went to the host
        self.num_swapped_out = self.num_swapped_in = self.num_onloaded = 0
        self.num_hits = self.num_hit_tokens = self.num_copied_pages = 0
        self._tables: dict[int, list[int]] = {}
        self._salts: dict[int, Salt] = {}  # of sequences that may enter the prefix cache
        self._last: dict[int, Node] = {}  # the node of the last full page that they entered
        self._num_shared: dict[int, int] = {}  # pages that were there when they were admitted
        self._transfers: list[Transfer] = []

    @property
    def grouped(self) -> "GroupedCacheManager | None":
        """This manager, where layers with a window have page tables of their own."""
        return None

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, in one group of layers."""
        return -(-tokens // self.page_size)

    def pages_needed(self, length: int) -> int:
        """Pages that a sequence of `length` tokens holds at most."""
        return self.pages_for(length)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that all pages together hold."""
        return self.num_pages * self.page_size

    def covered(self, sequence: int) -> int:
        """Tokens of the sequence that there are pages for."""
        return self.page_size * len(self.table(sequence))

    def reserve(self, sequence: int, length: int) -> bool:
        """Give `sequence` pages for `length` tokens. False, and nothing changed, when too few are free."""
        table = self._tables.get(sequence, ())
        missing = -(-length // self.page_size) - len(table)
        if missing <= 0:
            return True
        pages = self.allocator.allocate(missing)
        if pages is None:
            return False
        self._tables.setdefault(sequence, []).extend(pages)
        return True

    def admit(self, sequence: int, length: int, tokens: array, salt: "Salt", spare: int = 0) -> int | None:
        """Pages for `length` tokens of a new or swapped sequence that begins with `tokens` (array of i32, at most
        `length`), and leave `spare` free. How many of the tokens need not be computed, at least one fewer than there
        are; None, and nothing changed, when too few pages are free."""
        match, swapped = NOTHING, self._swapped.get(sequence)
        if self.prefix is not None:
            match = self._within_reach(self.prefix.match(salt, tokens.tobytes()), swapped is not None)
        computed = match.length
        if swapped is not None:
            match, computed = self._beside_slots(match, swapped[1])
        placed = self._place(sequence, match, computed, length, spare)
        if not placed and match.source is not None:  # without holding the page that was to be copied
            match = self._within_reach(Match(match.nodes, None, 0, self.page_size), False)
            computed = match.length
            placed = self._place(sequence, match, computed, length, spare)
        if not placed:
            return None
        if self.prefix is not None:
            self._remember(sequence, salt, match)
        self._swap_in(sequence, len(match.nodes))
        return computed

    def _within_reach(self, match: Match, is_swapped: bool) -> Match:
        """As much of a match as a new sequence, or one that was swapped, can go on from."""
        return match

    def _beside_slots(self, match: Match, length: int) -> tuple[Match, int]:
        """What of a match goes with the slots of a sequence that has `length` tokens there; its tokens then."""
        return Match(match.nodes, None, 0, self.page_size), max(self.page_size * len(match.nodes), length)

    def _place(self, sequence: int, match: Match, computed: int, length: int, spare: int) -> bool:
        """Pages of a new sequence of which `computed` tokens are there, in the match or in slots."""
        allocator, source = self.allocator, match.source
        resident = [node.page for node in match.nodes if node.page >= 0]
        cold = match.nodes[len(resident) :]  # on the host
        beside, copied, more = self._windows_of(sequence, match, computed, length)
        held, claimed = resident + beside, cold
        if source is not None and source.page >= 0:
            copied = [source.page, *copied]
        elif source is not None:
            claimed = [*cold, source]
        if claimed:
            self.prefix.claim(claimed)  # type: ignore[union-attr]
        allocator.retain(held + copied)
        missing = self.pages_for(length) - len(resident)
        count = missing + more
        pages = allocator.allocate(count) if count + spare <= self.num_free else None
        # The copies come before whatever their sources may be given to next.
        allocator.release(copied if pages is not None else held + copied)
        if claimed:
            self.prefix.disclaim(claimed)  # type: ignore[union-attr]
        if pages is None:
            return False
        for node, page in zip(cold, pages, strict=False):
            self._transfers.append(("in", node.slot, page))
            self.prefix.promote(node, page)  # type: ignore[union-attr]
        self.num_onloaded += len(cold)
        if source is not None:
            self._transfers.append(copy_of(source, pages[len(cold)]))
            self.num_copied_pages += 1
        self._tables[sequence] = resident + pages[:missing]
        self._place_windows(sequence, match, computed, pages[missing:])
        return True

    def _windows_of(self, sequence: int, match: Match, computed: int, length: int) -> tuple[list[int], list[int], int]:
        """Of windowed groups: the match's pages that the sequence shares, those that it copies, and how many more it needs."""
        return [], [], 0

    def _place_windows(self, sequence: int, match: Match, computed: int, pages: list[int]) -> None:
        """The sequence has its table: give it those of windowed groups, with these new pages."""

    def _remember(self, sequence: int, salt: "Salt", match: Match) -> None:
        self._salts[sequence] = salt
        if match.nodes:
            self._last[sequence] = match.nodes[-1]
            self._num_shared[sequence] = len(match.nodes)
        if match.length:
            self.num_hits += 1
            self.num_hit_tokens += match.length
            self.prefix.hit(match)  # type: ignore[union-attr]

    def fork(self, source: int, sequence: int, shared: int, length: int) -> bool:
        """Give a new sequence the first `shared` tokens of `source`, which has them: full pages are the same, of the last
        one it gets a copy; and pages for `length` tokens in all. False, and nothing changed, when too few are free."""
        full, table = shared // self.page_size, self.table(source)
        pages = self.allocator.allocate(self.pages_for(max(length, shared)) - full)
        if pages is None:
            return False
        self.allocator.retain(table[:full])
        if shared % self.page_size:
            self._transfers.append(("copy", table[full], pages[0]))
            self.num_copied_pages += 1
        self._tables[sequence] = table[:full] + pages
        if source in self._salts:
            self._salts[sequence] = self._salts[source]
            self._num_shared[sequence] = full
        return True

    # -- to the host and back

    def can_swap(self, length: int) -> bool:
        """Whether swap_out() of `length` tokens would find host slots."""
        on_host = self.prefix.num_on_host if self.prefix is not None else 0
        return 0 < self.pages_needed(length) <= self.host.num_free + on_host

    def swap_out(self, sequence: int, length: int) -> bool:
        """Move the sequence's first `length` tokens to host slots, by the next batch's transfers, and give all its pages
        back. False, and nothing changed, when too few slots are free. admit() brings them back, drop_swapped() gives
        them up; nothing of the sequence may be in flight."""
        pages = self._swap_pages(sequence, length)
        count = len(pages)
        if not self.can_swap(length) or not (self.host.num_free >= count or self.prefix.make_room(count)):  # type: ignore[union-attr]
            return False
        slots = [self.host.take() for _ in pages]
        self._transfers += [("out", page, slot) for page, slot in zip(pages, slots, strict=True)]
        self._swapped[sequence] = slots, length
        self.num_swapped_out += len(slots)
        self.release(sequence)
        return True

    def _swap_pages(self, sequence: int, length: int) -> list[int]:
        """The pages that `length` tokens of the sequence need."""
        return self.table(sequence)[: self.pages_for(length)]

    def is_swapped(self, sequence: int) -> bool:
        return sequence in self._swapped

    def _swap_in(self, sequence: int, num_shared: int) -> int:
        """Fill the new sequence's pages, but the first `num_shared`, from its slots. How many tokens come back."""
        slots, length = self._swapped.pop(sequence, ((), 0))
        pages = self._swap_pages(sequence, length) if slots else ()
        for slot, page in list(zip(slots, pages, strict=True))[num_shared:]:
            self._transfers.append(("in", slot, page))
            self.num_swapped_in += 1
        for slot in slots:
            self.host.give(slot)
        return length

    def drop_swapped(self, sequence: int) -> None:
        """Give the slots of a sequence back, if it has any."""
        for slot in self._swapped.pop(sequence, ((), 0))[0]:
            self.host.give(slot)

    def commit(self, sequence: int, tokens: array, length: int, partial: bool = False) -> None:
        """The keys and values of tokens[:length] stand in the sequence's pages and are sound: full pages may be used by
        others from now on; partial: the last one too, as far as it goes."""
        salt = self._salts.get(sequence)
        if salt is None:
            return
        prefix: PrefixCache = self.prefix  # type: ignore[assignment]
        page_size, node = self.page_size, self._last.get(sequence)
        if node is not None and (not node.alive or node.page < 0):
            node = None
        if length - (node.depth * page_size if node is not None else 0) < (1 if partial else page_size):
            return
        if node is None:
            node = prefix.root(salt)
        node = self._enter(node, tokens[node.depth * page_size : length].tobytes(), self._tables[sequence], partial)
        if node.depth:
            self._last[sequence] = node

    def _enter(self, node: Node, data: bytes, table: list[int], partial: bool) -> Node:
        """Enter the pages of a table that have the tokens in `data`, behind those of `node`; the last full page's node."""
        prefix: PrefixCache = self.prefix  # type: ignore[assignment]
        at, end, page_bytes = 0, len(data), prefix.page_bytes
        while end - at >= page_bytes:
            child = prefix.enter(node, data[at : at + page_bytes], table[node.depth])
            if child is None:
                return node
            node = child
            at += page_bytes
        if partial and end > at:
            prefix.enter(node, data[at:], table[node.depth])
        return node

    def adopt(self, tokens: array, length: int, pages: list[int], salt: "Salt") -> None:
        """The keys and values of tokens[:length] stand in `pages`, which belong to no sequence but are held, and are
        sound: others may use them from now on."""
        if self.prefix is not None and length:
            self._enter(self.prefix.root(salt), tokens[:length].tobytes(), pages, partial=True)

    def distrust(self, sequence: int) -> None:
        """What the sequence wrote may not be finite: nobody shares it from now on. The pages that it began with gave
        finite logits to others."""
        if self._salts.pop(sequence, None) is not None:
            num_shared = self._num_shared.get(sequence, 0)
            self.prefix.distrust(self._tables[sequence][num_shared:])  # type: ignore[union-attr]

    def take_transfers(self) -> "list[Transfer]":
        """What the device must do, in this order, before it runs anything else on the pages."""
        transfers, self._transfers = self._transfers, []
        return transfers

    @property
    def tables(self) -> dict[int, list[int]]:
        """All page tables by sequence; the caller must not change them."""
        return self._tables

    def table(self, sequence: int) -> list[int]:
        """The pages of `sequence` in token order; the caller must not change the list."""
        return self._tables.get(sequence, [])

    def detach(self, sequence: int) -> list[int]:
        """Forget `sequence`; its pages keep their references and the caller now owns them (see release_pages)."""
        self._salts.pop(sequence, None)
        self._last.pop(sequence, None)
        self._num_shared.pop(sequence, None)
        return self._tables.pop(sequence, [])

    def release_pages(self, pages: list[int]) -> None:
        self.allocator.release(pages)

    def release(self, sequence: int) -> None:
        """Forget `sequence` and free its pages. A sequence without pages is fine."""
        self.allocator.release(self.detach(sequence))

    @property
    def num_free(self) -> int:
        """Pages that can be had: free ones and cached ones that nobody holds."""
        return self.allocator.num_free

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    def sequences(self) -> set[int]:
        return set(self._tables)

    def clear(self) -> None:
        """Forget all prefixes."""
        if self.prefix is not None:
            self.prefix.clear()

    def snapshot(self) -> dict[str, float]:
        """Totals since the start, and what is cached now."""
        totals: dict[str, float] = {
            "swapped_out_pages": self.num_swapped_out,
            "swapped_in_pages": self.num_swapped_in,
            "free_host_slots": self.host.num_free,
        }
        if self.prefix is None:
            return totals
        return totals | {
            "prefix_hits": self.num_hits,
            "prefix_hit_tokens": self.num_hit_tokens,
            "prefix_evicted_pages": self.prefix.num_evicted,
            "prefix_copied_pages": self.num_copied_pages,
            "prefix_pages": self.prefix.num_nodes,
            "prefix_idle_pages": self.prefix.num_idle,
            "prefix_host_pages": self.prefix.num_on_host,
            "prefix_onloaded_pages": self.num_onloaded,
        }

    def check_integrity(self, detached: list[list[int]] | None = None) -> list[str]:
        """What is wrong, one line each. detached: page lists that the caller took with detach() and still owns."""
        problems = self.allocator.check_integrity([*self._tables.values(), *(detached or [])])
        for sequence, table in self._tables.items():
            if len(set(table)) != len(table):
                problems.append(f"sequence {sequence} holds a page twice")
        slots = [slot for slots, _ in self._swapped.values() for slot in slots]
        problems += self.host.check_integrity([*slots, *(self.prefix.by_slot if self.prefix is not None else ())])
        if set(self._swapped) & set(self._tables):
            problems.append("a swapped sequence has pages")
        if not {*self._salts, *self._last, *self._num_shared} <= set(self._tables):
            problems.append("the prefix cache knows a sequence that has no pages")
        return problems


def copy_of(node: Node, page: int) -> "Transfer":
    """Fill `page` with what the node has, wherever that is."""
    return ("copy", node.page, page) if node.page >= 0 else ("in", node.slot, page)
