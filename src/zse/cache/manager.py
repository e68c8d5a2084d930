"""Page tables of sequences: grows, shares and frees them; the one place where a sequence's pages change hands.

With a PrefixCache, a sequence starts with the pages that are known already (admit) and its own enter the cache as they
are committed (commit). What the device must do for that stands in `transfers`, for the next batch.
"""

from array import array

import msgspec

from zse.cache.eviction import TreeNode
from zse.cache.groups import ONE_GROUP, PageGeometry
from zse.cache.pages import HostPool, PageAllocator, check_page_size
from zse.cache.prefix import Match, PrefixCache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zse.cache.grouped import GroupedCacheManager
    from zse.cache.prefix import Salt
    from zse.cache.states import StateSlots

    # ("copy", page, page), ("out", page, slot), ("in", slot, page); of states see StateSlots.
    Transfer = tuple[str, int, int]


NOTHING = Match([], None, 0)


class Entered(msgspec.Struct, eq=False):
    """A sequence that may enter the prefix cache. last: the node of the last full page that it entered. num_shared:
    pages that were there when it was admitted. session: that it is of, "": of none."""

    salt: "Salt"
    last: TreeNode | None = None
    num_shared: int = 0
    session: str = ""


class CacheManager:
    """Page tables by sequence id over one PageAllocator. A sequence appears with its first reserve() or admit().
    prefix: None caches nothing. host: slots for pages that leave the device, None: they are computed again. geometry:
    says how many tokens a page has. states: slots of a model with a state: each sequence has one too, and what is
    cached of a prompt ends at a snapshot. Raises ValueError for a prefix cache of another page size.

    tables: the pages of each sequence in token order; others must not change them. swapped: (slots, tokens) of
    sequences that went to the host. capacity: tokens of the longest sequence that all pages together hold. grouped:
    this manager, where layers with a window have page tables of their own."""

    grouped: "GroupedCacheManager | None" = None
    # Where ranks have pages of their own (divided.py): that of each sequence, and that which one is to be admitted on where it can be.
    rank_of: "dict[int, int] | None" = None
    preferred: "dict[int, int] | None" = None
    page_list: "Callable[[Iterable[int]], list[int]]" = list  # makes a list of pages, which says whose they are

    def __init__(
        self,
        allocator: PageAllocator,
        prefix: PrefixCache | None = None,
        host: HostPool | None = None,
        geometry: PageGeometry = ONE_GROUP,
        states: "StateSlots | None" = None,
    ):
        check_page_size(geometry.page_size)
        if prefix is not None and prefix.page_size != geometry.page_size:
            raise ValueError(f"a prefix cache of pages of {prefix.page_size} tokens, for pages of {geometry.page_size}")
        self.geometry, self.page_size = geometry, geometry.page_size
        self.allocator, self.prefix, self.host = allocator, prefix, host or HostPool(0)
        if prefix is not None:
            prefix.attach(allocator, self.host, lambda transfer: self._transfers.append(transfer))
        self.num_groups = geometry.num_groups  # of layers, each with a page table
        self.capacity = geometry.capacity(allocator.num_pages)
        self.tables: dict[int, list[int]] = {}
        self.swapped: dict[int, tuple[list[int], int]] = {}
        self.num_swapped_out = self.num_swapped_in = self.num_onloaded = 0
        self.num_hits = self.num_hit_tokens = self.num_copied_pages = 0
        self.num_host_hits = self.num_host_hit_tokens = 0
        self.filling: set[int] = set()  # slots that a feature has taken and fills
        self._entered: dict[int, Entered] = {}
        self._transfers: list[Transfer] = []
        self.states = states
        if states is not None:
            states.transfer = lambda transfer: self._transfers.append(transfer)
            if prefix is not None:
                prefix.states = states

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, in one group of layers."""
        return -(-tokens // self.page_size)

    def pages_needed(self, length: int) -> int:
        """Pages that a sequence of `length` tokens holds at most."""
        return self.geometry.needed(length)

    def covered(self, sequence: int) -> int:
        """Tokens of the sequence that there are pages for."""
        return self.page_size * len(self.table(sequence))

    def reserve(self, sequence: int, length: int) -> bool:
        """Give `sequence` pages for `length` tokens. False, and nothing changed, when too few are free."""
        table = self.tables.get(sequence, ())
        missing = -(-length // self.page_size) - len(table)
        if missing <= 0:
            return True
        pages = self.allocator.allocate(missing)
        if pages is None:
            return False
        self.tables.setdefault(sequence, []).extend(pages)
        if sequence in self._entered:
            self.prefix.own(self._entered[sequence].salt, pages)  # type: ignore[union-attr]
        return True

    def admit(
        self, sequence: int, length: int, tokens: array, salt: "Salt", spare: int = 0, session: str = ""
    ) -> int | None:
        """Pages for `length` tokens of a new or swapped sequence that begins with `tokens` (array of i32, at most
        `length`), and leave `spare` free. How many of the tokens need not be computed, at least one fewer than there
        are; None, and nothing changed, when too few pages are free, or no state slot is."""
        if self.states is not None and not self.states.has_room():
            return None
        prefix, swapped = self.prefix, self.swapped.get(sequence)
        match = prefix.match(salt, tokens.tobytes(), whole=swapped is not None) if prefix is not None else NOTHING
        computed = match.length
        if swapped is not None:
            match, computed = self._beside_slots(match.nodes, swapped[1])
        placed = self._place(sequence, match, computed, length, spare)
        if not placed and match.source is not None:  # without holding the page that was to be copied
            match = prefix.match(salt, tokens.tobytes(), copies=False)  # type: ignore[union-attr]
            computed = match.length
            placed = self._place(sequence, match, computed, length, spare)
        if not placed:
            return None
        if prefix is not None:
            nodes = match.nodes
            self._entered[sequence] = Entered(salt, nodes[-1] if nodes else None, len(nodes), session)
            prefix.own(salt, self.tables[sequence])
            if match.length:
                self.num_hits += 1
                self.num_hit_tokens += match.length
                prefix.hit(match, session)
        if self.states is not None:
            self.states.begin(sequence, match.snapshot)
        if swapped is not None:
            self._swap_in(sequence, len(match.nodes))
        return computed

    def _beside_slots(self, nodes: list[TreeNode], length: int) -> tuple[Match, int]:
        """What of a match goes with the slots of a sequence that has `length` tokens there; its tokens then."""
        if self.states is not None:  # whose state is behind so many tokens
            nodes = nodes[: length // self.page_size]
        matched = self.page_size * len(nodes)
        return Match(nodes, None, matched), max(matched, length)

    def _place(self, sequence: int, match: Match, computed: int, length: int, spare: int) -> bool:
        """Pages of a new sequence of which `computed` tokens are there, in the match or in slots."""
        allocator, source = self.allocator, match.source
        resident = [node.page for node in match.nodes if node.page >= 0]
        cold = match.nodes[len(resident) :]  # on the host
        # Of windowed groups: pages to share and to copy, and how many to add.
        beside: list[int] = []
        copied: list[int] = []
        more = 0
        if self.grouped is not None:
            beside, copied, more = self.grouped.windows_of(sequence, match, computed, length)
        held, claimed = resident + beside, cold
        if source is not None and source.page >= 0:
            copied = [source.page, *copied]
        elif source is not None:
            claimed = [*cold, source]
        if claimed:
            self.prefix.claim(claimed)  # type: ignore[union-attr]
        allocator.retain(held + copied)
        missing = -(-length // self.page_size) - len(resident)
        count = missing + more
        pages = allocator.allocate(count) if count + spare <= allocator.num_free else None
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
        if cold:
            self.num_host_hits += 1
            self.num_host_hit_tokens += self.page_size * len(cold)
        if source is not None:
            page = pages[len(cold)]
            self._transfers.append(("copy", source.page, page) if source.page >= 0 else ("in", source.slot, page))
            self.num_copied_pages += 1
        self.tables[sequence] = resident + pages[:missing]
        if self.grouped is not None:
            self.grouped.place_windows(sequence, match, computed, pages[missing:])
        return True

    def fork(self, source: int, sequence: int, shared: int, length: int) -> bool:
        """Give a new sequence the first `shared` tokens of `source`, which has them: full pages are the same, of the
        last one it gets a copy; and pages for `length` tokens in all. Where there are states, that of `source` is behind
        `shared` tokens. False, and nothing changed, when too few are free."""
        if self.states is not None and not self.states.has_room():
            return False
        full, table = shared // self.page_size, self.table(source)
        pages = self.allocator.allocate(self.pages_for(max(length, shared)) - full)
        if pages is None:
            return False
        self.allocator.retain(table[:full])
        if shared % self.page_size:
            self._transfers.append(("copy", table[full], pages[0]))
            self.num_copied_pages += 1
        self.tables[sequence] = table[:full] + pages
        if self.states is not None and not self.states.fork(source, sequence):
            self.release(sequence)
            return False
        self._enter_fork(source, sequence, full)
        return True

    def _enter_fork(self, source: int, sequence: int, num_shared: int) -> None:
        """A new sequence shares so many pages of `source`."""
        if source in self._entered:
            of = self._entered[source]
            self._entered[sequence] = Entered(of.salt, None, num_shared, of.session)

    # -- to the host and back

    def can_swap(self, length: int) -> bool:
        """Whether swap_out() of `length` tokens would find host slots."""
        if self.states is not None and not self.states.can_swap():
            return False
        on_host = len(self.prefix.by_slot) if self.prefix is not None else 0
        return 0 < self.pages_needed(length) <= self.host.num_free + on_host

    def swap_out(self, sequence: int, length: int) -> bool:
        """Move the sequence's first `length` tokens to host slots, by the next batch's transfers, and give all its
        pages back. False, and nothing changed, when too few slots are free. admit() brings them back, drop_swapped()
        gives them up; nothing of the sequence may be in flight."""
        pages = self._swap_pages(sequence, length)
        count = len(pages)
        if not self.can_swap(length) or not (self.host.num_free >= count or self.prefix.make_room(count)):  # type: ignore[union-attr]
            return False
        slots = [self.host.take() for _ in pages]
        self._transfers += [("out", page, slot) for page, slot in zip(pages, slots, strict=True)]
        if self.states is not None:
            self.states.swap_out(sequence)
        self.swapped[sequence] = slots, length
        self.num_swapped_out += len(slots)
        self.release(sequence)
        return True

    def _swap_pages(self, sequence: int, length: int) -> list[int]:
        """The pages that `length` tokens of the sequence need."""
        return self.table(sequence)[: self.pages_for(length)]

    def _swap_in(self, sequence: int, num_shared: int) -> None:
        """Fill the sequence's new pages, but the first `num_shared`, from its slots."""
        slots, length = self.swapped[sequence]
        for slot, page in list(zip(slots, self._swap_pages(sequence, length), strict=True))[num_shared:]:
            self._transfers.append(("in", slot, page))
            self.num_swapped_in += 1
        self.drop_swapped(sequence)

    def drop_swapped(self, sequence: int) -> None:
        """Give the slots of a swapped sequence back."""
        for slot in self.swapped.pop(sequence)[0]:
            self.host.give(slot)
        if self.states is not None and sequence in self.states.swapped:
            self.states.drop_swapped(sequence)

    def commit(self, sequence: int, tokens: array, length: int, partial: bool = False) -> None:
        """The keys and values of tokens[:length] stand in the sequence's pages and are sound: full pages may be used by
        others from now on; partial: the last one too, as far as it goes."""
        entered = self._entered.get(sequence)
        if entered is None:
            return
        prefix: PrefixCache = self.prefix  # type: ignore[assignment]
        page_size, node = self.page_size, entered.last
        if node is not None and (not node.alive or node.page < 0):
            node = None
        if length - (node.depth * page_size if node is not None else 0) >= (1 if partial else page_size):
            if node is None:
                node = prefix.root(entered.salt)
            added = tokens[node.depth * page_size : length].tobytes()
            node = self._enter(node, added, self.tables[sequence], partial, entered.session)
            if node.depth:
                entered.last = node
        if self.states is not None and node is not None:
            self.states.commit(sequence, tokens, length, node)

    def _enter(self, node: TreeNode, data: bytes, table: list[int], partial: bool, session: str = "") -> TreeNode:
        """Enter the pages of a table that have the tokens in `data`, behind those of `node`; the last full page's
        node."""
        prefix: PrefixCache = self.prefix  # type: ignore[assignment]
        at, end, page_bytes = 0, len(data), prefix.page_bytes
        while end - at >= page_bytes:
            child = prefix.enter(node, data[at : at + page_bytes], table[node.depth], session)
            if child is None:
                return node
            node = child
            at += page_bytes
        if partial and end > at:
            prefix.enter(node, data[at:], table[node.depth], session)
        return node

    def adopt(self, tokens: array, length: int, pages: list[int], salt: "Salt", slot: int = -1) -> None:
        """The keys and values of tokens[:length] stand in `pages`, which belong to no sequence but are held, and are
        sound: others may use them from now on. slot: with the state behind them, that StateSlots lent; -1: of none."""
        if self.prefix is not None and length:
            last = self._enter(self.prefix.root(salt), tokens[:length].tobytes(), pages, partial=True)
            if slot >= 0:
                self.states.keep_lent(slot, tokens, length, last)  # type: ignore[union-attr]
        elif slot >= 0:
            self.states.give(slot)  # type: ignore[union-attr]

    def keep_state(self, sequence: int, tokens: array, length: int) -> None:
        """The sequence, which loses its pages next, has the state behind its first `length` tokens, all committed:
        others may continue from there."""
        entered = self._entered.get(sequence)
        last = entered and (entered.last or self.prefix.roots.get(entered.salt))  # type: ignore[union-attr]
        if last and last.alive and length:
            self.states.keep_live(sequence, tokens, length, last)  # type: ignore[union-attr]

    def distrust(self, sequence: int) -> None:
        """What the sequence wrote may not be finite: nobody shares it from now on. The pages that it began with gave
        finite logits to others."""
        entered = self._entered.pop(sequence, None)
        if entered is not None:
            self.prefix.distrust(self.tables[sequence][entered.num_shared :])  # type: ignore[union-attr]

    def take_transfers(self) -> "list[Transfer]":
        """What the device must do, in this order, before it runs anything else on the pages."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def table(self, sequence: int) -> list[int]:
        """The pages of `sequence` in token order; the caller must not change the list."""
        return self.tables.get(sequence, [])

    def detach(self, sequence: int) -> list[int]:
        """Forget `sequence`; its pages keep their references and the caller, who owns them now, releases them. So with the
        slot of its state, which `states.detach` gives, and adopt() or StateSlots.give() takes."""
        self._entered.pop(sequence, None)
        return self.tables.pop(sequence, [])

    def release(self, sequence: int) -> None:
        """Forget `sequence` and free its pages. A sequence without pages is fine."""
        if self.states is not None:
            self.states.give(self.states.detach(sequence))
        self.allocator.release(self.detach(sequence))

    def drop_session(self, session: str) -> None:
        """Forget what only this session has used."""
        if self.prefix is not None:
            self.prefix.drop_session(session)

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
        if self.states is not None:
            totals |= self.states.counters()
        if self.prefix is None:
            return totals
        return totals | {
            "prefix_hits": self.num_hits,
            "prefix_hit_tokens": self.num_hit_tokens,
            "prefix_host_hits": self.num_host_hits,
            "prefix_host_hit_tokens": self.num_host_hit_tokens,
            "prefix_evicted_pages": self.prefix.num_evicted,
            "prefix_copied_pages": self.num_copied_pages,
            "prefix_pages": self.prefix.num_nodes,
            "prefix_idle_pages": self.prefix.num_idle,
            "prefix_host_pages": len(self.prefix.by_slot),
            "prefix_onloaded_pages": self.num_onloaded,
        }

    def check_integrity(self, detached: list[list[int]] | None = None) -> list[str]:
        """What is wrong, one line each. detached: page lists that the caller took with detach() and still owns."""
        problems = self.allocator.check_integrity([*self.tables.values(), *(detached or [])])
        for sequence, table in self.tables.items():
            if len(set(table)) != len(table):
                problems.append(f"sequence {sequence} holds a page twice")
        slots = [slot for slots, _ in self.swapped.values() for slot in slots]
        problems += self.host.check_integrity(
            [*slots, *self.filling, *(self.prefix.by_slot if self.prefix is not None else ())]
        )
        if set(self.swapped) & set(self.tables):
            problems.append("a swapped sequence has pages")
        if not set(self._entered) <= set(self.tables):
            problems.append("the prefix cache knows a sequence that has no pages")
        if self.states is not None:
            problems += self.states.check_integrity()
            if set(self.states.live) != set(self.tables) or set(self.states.swapped) != set(self.swapped):
                problems.append("a sequence has pages and no state, or a state and no pages")
        return problems
