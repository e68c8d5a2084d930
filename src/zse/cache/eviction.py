"""Which cached page goes when one is needed: a policy within a tenant, equal shares between tenants.

Shares: of the tenants with pages that nobody uses the one with the most pages, used ones included, gives one up. So a
tenant that floods the cache evicts its own pages as soon as it has more than the others, and one that keeps few keeps
them (max-min fairness). A tenant that has not been seen for IDLE_TURNS times as many new pages as the cache holds is no
longer protected and goes first."""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

import msgspec

POLICIES = ("lru", "lfu", "smart")
IDLE_TURNS = 4
# Tenants, those seen last, that are looked at for what they have cached.
MAX_TENANTS = 64
# Of all pages, what idle ones of others may keep from a tenant that runs already: more, and batches get small.
MOST_KEPT = 1 / 2
# The context at which attending to what stands before a page costs as much as its matrix products; of models from 0.1
# to 8 billion weights it is 2,000 to 16,000 tokens. The smart policy only needs its order of magnitude.
ATTENTION_EVEN_TOKENS = 4096


# A struct: one is made for each page of each reply, in C.
class TreeNode(msgspec.Struct, eq=False):
    """A cached page: `tokens` (i32 bytes, a page of them or, of a leaf that is not full, fewer) behind those of
    `parent`.

    page: its number, -1 when it is not in device memory (a root never is). depth: 0 of a root, else one more than its
    parent's. slot: of the host, -1 while it is on the device. children: by their tokens. resident: how many of them are
    in device memory. is_idle: no page table holds the page. uses: hits, and the time it was made. used: when it became
    idle last, in Eviction's count. version: changes whenever an entry of a heap is no longer true. salt: of a root.
    key: what it has on disk, once that was asked for; is_filed: there is a record of it. session: the one that alone
    has used it, "": none, or others too."""

    parent: "TreeNode | None"
    tokens: bytes
    page: int
    account: "SaltAccount"
    depth: int
    salt: tuple = ()
    children: "dict[bytes, TreeNode]" = {}
    resident: int = 0
    used: int = 0
    version: int = 0
    uses: int = 1
    slot: int = -1
    is_idle: bool = False
    is_filed: bool = False
    alive: bool = True
    key: bytes = b""
    session: str = ""

    def __repr__(self) -> str:
        return f"<TreeNode depth={self.depth} page={self.page} idle={self.is_idle} children={len(self.children)}>"


class SaltAccount:
    """A tenant's idle pages. heap: (priority, sequence, node, its version) of leaves; entries may be out of date.
    on_host: nodes that have a slot of the host, the coldest first. num_pages: of device memory that are its, idle or in
    a table."""

    __slots__ = ("heap", "idle", "inflation", "name", "num_nodes", "num_pages", "on_host", "seen")

    def __init__(self, name: str):
        self.name = name
        self.idle: dict[TreeNode, None] = {}
        self.on_host: dict[TreeNode, None] = {}
        self.heap: list[tuple] = []
        self.num_nodes = self.num_pages = self.seen = 0
        self.inflation = 0.0


class Eviction:
    """The idle pages of all tenants. policy: of POLICIES. capacity: pages of the cache. page_size: tokens of a page.

    lru: the page that became idle first. lfu: the one with the fewest uses, of these the oldest. smart: the least of
    uses x cost to recompute, aged (Greedy-Dual-Size-Frequency, Cherkasova 1998: what a victim was worth is added to all
    that comes after it). In every policy a page goes before those in front of it: only leaves are chosen.
    """

    def __init__(self, policy: str, capacity: int, page_size: int):
        if policy not in POLICIES:
            raise ValueError(f"cache policy {policy!r} is not one of {', '.join(POLICIES)}")
        self.policy, self._capacity = policy, capacity
        self._depth_cost = page_size / ATTENTION_EVEN_TOKENS
        self.num_idle = 0
        self._clock = 0  # pages that became idle
        self._sequence = 0
        self._seen: OrderedDict[SaltAccount, None] = OrderedDict()  # with idle pages, the longest unseen first

    def add(self, node: TreeNode) -> None:
        """No table holds the node's page any more."""
        account = node.account
        self._clock += 1
        node.is_idle, node.used = True, self._clock
        self.num_idle += 1
        self._seen[account] = account.idle[node] = None
        self.touch(account)
        if not node.resident:
            self.offer(node)

    def remove(self, node: TreeNode) -> None:
        """The node's page is held again, or leaves."""
        node.is_idle = False
        node.version += 1
        self.num_idle -= 1
        del node.account.idle[node]
        if not node.account.idle:
            del self._seen[node.account]

    def touch(self, account: SaltAccount) -> None:
        """The tenant has been seen."""
        account.seen = self._clock
        if account in self._seen:
            self._seen.move_to_end(account)

    def expose(self, account: SaltAccount) -> None:
        """What is idle of the account goes before all other pages, as of a tenant that has not been seen for long."""
        account.seen = self._clock - IDLE_TURNS * self._capacity - 1
        if account in self._seen:
            self._seen.move_to_end(account, last=False)

    def offer(self, node: TreeNode) -> None:
        """An idle node became a leaf."""
        heap = node.account.heap
        if len(heap) > 2 * len(node.account.idle) + 64:
            heap[:] = [entry for entry in heap if self._is_true(entry)]
            heapify(heap)
        self._sequence += 1
        node.version += 1
        priority: Any = node.used  # lru
        if self.policy == "lfu":
            priority = node.uses, node.used
        elif self.policy == "smart":
            priority = node.account.inflation + node.uses * (1.0 + self._depth_cost * node.depth)
        heappush(heap, (priority, self._sequence, node, node.version))

    def choose(self) -> TreeNode:
        """The next to go. It has no children in device memory, unless every idle page of its tenant has."""
        account = self._victim()
        heap = account.heap
        while heap:
            entry = heappop(heap)
            if self._is_true(entry):
                if self.policy == "smart":
                    account.inflation = max(account.inflation, entry[0])
                return entry[2]
        # A page behind this one is held by a table that has its own copy of this one.
        return next(iter(account.idle))

    @staticmethod
    def _is_true(entry) -> bool:
        node = entry[2]
        return node.version == entry[3] and node.is_idle and not node.resident

    def shares_of_others(self, own: SaltAccount | None) -> int:
        """Idle pages that a tenant's further requests leave alone: of each other tenant (of those seen last) what it
        has within an equal share of the cache, of all together up to MOST_KEPT of it; none of tenants that are no
        longer protected."""
        num_tenants = len(self._seen) + (own not in self._seen)
        share, most, kept = self._capacity // num_tenants, int(MOST_KEPT * self._capacity), 0
        for account in islice(reversed(self._seen), MAX_TENANTS if num_tenants > 1 else 0):
            if kept >= most or self._is_gone(account):
                break
            num_idle = len(account.idle)
            if account is not own:
                kept += max(0, min(num_idle, share - account.num_pages + num_idle))
        return min(kept, most)

    def _is_gone(self, account: SaltAccount) -> bool:
        return self._clock - account.seen > IDLE_TURNS * self._capacity

    def _victim(self) -> SaltAccount:
        longest_unseen = next(iter(self._seen))
        if self._is_gone(longest_unseen):
            return longest_unseen
        return max(islice(reversed(self._seen), MAX_TENANTS), key=lambda account: account.num_pages)

    def check_integrity(self) -> list[str]:
        """What is wrong, one line each."""
        problems = []
        counted = sum(len(account.idle) for account in self._seen)
        if counted != self.num_idle:
            problems.append(f"{self.num_idle} idle pages counted, {counted} listed")
        for account in self._seen:
            offered = {entry[2] for entry in account.heap if self._is_true(entry)}
            problems += [
                f"{node} of {account.name!r} cannot be evicted"
                for node in account.idle
                if not node.resident and node not in offered
            ]
        return problems
