"""The prefix cache: pages by what stands in them and before them, so that a prompt's known beginning is not computed.

A tree of pages. A root stands for one salt (tenant, cache_salt, adapter); the engine has one model, so its revision
matters to files only. A child is found under its parent by its tokens themselves, not by a hash of them: two prefixes
share a page only if salt, every token and therefore every position are equal.

A page is entered when its keys and values are committed: the step that wrote them is done and its logits were finite.
It is *referenced* while a page table holds it, *idle* (cached, may be evicted) while none does; a page that is in no
tree and that nobody holds is *free*. The last page of a request may be entered before it is full: it is a leaf, which
others copy and never share.

With slots of the host, a full page that is evicted moves there, and comes back when it is hit. Behind the pages of a
chain that are in device memory come those that are on the host."""

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from zse.cache.eviction import MAX_TENANTS, Eviction, SaltAccount, TreeNode
from zse.cache.pages import BLOCK, HostPool, check_page_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zse.cache.grouped import WindowPages
    from zse.cache.pages import PageAllocator
    from zse.cache.states import Snapshot, StateSlots

    Salt = tuple[str, ...]

# Children that are looked at for a page to copy: a shared beginning may have thousands of continuations.
MAX_COMPARED = 16


class Match(NamedTuple):
    """What of a prompt is cached, `length` tokens: `nodes` in full, the others at the beginning of `source`, whose page
    is copied. snapshot: of models with a state, that behind these tokens."""

    nodes: list[TreeNode]
    source: TreeNode | None
    length: int
    snapshot: "Snapshot | None" = None


class PrefixCache:
    """Over the pages of one PageAllocator, which tells it when a page is no longer held. policy: see Eviction.
    page_size: tokens of a page, of PAGE_SIZES; page_bytes: of their ids. roots: by salt. by_slot: what is on the
    host."""

    def __init__(self, num_pages: int, policy: str = "lru", page_size: int = BLOCK):
        check_page_size(page_size)
        self.page_size, self.page_bytes = page_size, 4 * page_size
        self.eviction = Eviction(policy, num_pages, page_size)
        self.num_nodes = self.num_evicted = self.num_entered = 0
        self.roots: dict[Salt, TreeNode] = {}
        self._accounts: dict[str, SaltAccount] = {}
        self._node_of: list[TreeNode | None] = [None] * num_pages
        self._owner_of: list[SaltAccount | None] = [None] * num_pages
        self._allocator: PageAllocator | None = None
        self._host = HostPool(0)
        self._transfer: Callable[[tuple[str, int, int]], object] = lambda transfer: None
        self._host_accounts: dict[SaltAccount, None] = {}
        self.by_slot: dict[int, TreeNode] = {}
        self.windows: WindowPages | None = None  # of models with layers that see a window only
        self.states: StateSlots | None = None  # of models with a state

    def attach(
        self,
        allocator: "PageAllocator",
        host: HostPool | None = None,
        transfer: "Callable[[tuple[str, int, int]], object] | None" = None,
    ) -> None:
        """host: slots for what is evicted. transfer: told of each ("out", page, slot) that this takes."""
        self._allocator = allocator
        allocator.prefix = self
        if host is not None and transfer is not None:
            self._host, self._transfer = host, transfer

    # -- looking up

    def match(self, salt: "Salt", tokens: bytes, copies: bool = True, whole: bool = False) -> Match:
        """The longest cached beginning of `tokens` (i32 bytes), at least one token shorter than they are. copies:
        whether it may end within a page. whole: also what no new sequence can go on from, because the windowed pages or
        the state beside it are gone."""
        node, page_bytes = self.roots.get(salt), self.page_bytes
        if node is None:
            return Match([], None, 0)
        nodes: list[TreeNode] = []
        end = len(tokens) - 4  # the last token is computed in any case
        at = 0
        while at + page_bytes <= end:
            child = node.children.get(tokens[at : at + page_bytes])
            if child is None:
                break
            nodes.append(child)
            node = child
            at += page_bytes
        if self.states is not None and not whole:
            return self.states.within_reach(self.roots[salt], nodes, tokens, copies)
        source, copied = None, 0
        wanted = tokens[at : min(at + page_bytes, end)]
        if copies and wanted and node.children:
            for count, child in enumerate(reversed(node.children.values())):
                common = common_tokens(wanted, child.tokens)
                if common > copied:
                    source, copied = child, common
                if count == MAX_COMPARED:
                    break
        match = Match(nodes, source, at // 4 + copied)
        return match if whole or self.windows is None else self.windows.within_reach(match)

    def hit(self, match: Match, session: str = "") -> None:
        """A request, of a session perhaps, runs on this match: its nodes were of use."""
        for node in match.nodes:
            node.uses += 1
            if node.session != session:
                node.session = ""
        last = match.source or (match.nodes[-1] if match.nodes else None)
        if last is not None:
            if match.source is not None:
                match.source.uses += 1
            self.eviction.touch(last.account)

    def shares_of_others(self, tenant: str) -> int:
        """Idle pages that a tenant which runs already leaves to others when it begins more
        (Eviction.shares_of_others)."""
        return self.eviction.shares_of_others(self._accounts.get(tenant))

    # -- entering

    def root(self, salt: "Salt") -> TreeNode:
        """The root of a salt, made when there is none."""
        node = self.roots.get(salt)
        if node is None:
            account = self._accounts.get(salt[0]) or self._accounts.setdefault(salt[0], SaltAccount(salt[0]))
            node = self.roots[salt] = TreeNode(None, b"", -1, account, 0, salt)
        return node

    def own(self, salt: "Salt", pages: "Iterable[int]") -> None:
        """These pages, which a sequence of this salt was given, count as its tenant's until they are free."""
        account = self._accounts.get(salt[0]) or self._accounts.setdefault(salt[0], SaltAccount(salt[0]))
        for page in pages:
            if self._owner_of[page] is None:
                self._owner_of[page] = account
                account.num_pages += 1

    def _free(self, page: int) -> None:
        self._disown(page)
        self._allocator.free(page)  # type: ignore[union-attr]

    def _disown(self, page: int) -> None:
        account, self._owner_of[page] = self._owner_of[page], None
        if account is not None:
            account.num_pages -= 1
            if not account.num_pages:
                self._drop_account(account)

    def enter(self, parent: TreeNode, tokens: bytes, page: int, session: str = "") -> TreeNode | None:
        """`page`, which a table holds, has `tokens` behind those of `parent`, of a session perhaps. The node that stands for them: another
        page's when these tokens are cached already. None when the page is in the tree in another place."""
        if not parent.alive:
            raise ValueError("a page cannot be entered behind one that was evicted")
        there = parent.children.get(tokens)
        before = self._node_of[page]
        if there is not None:
            if there.session != session:
                there.session = ""
            if there.page < 0:  # on the host; this page is as good
                if before is not None:
                    self._drop(before)
                self.promote(there, page)
            return there
        if before is not None:
            if before.parent is not parent or len(before.tokens) == self.page_bytes:
                return None
            # It was entered before it was full, and is a leaf.
            del parent.children[before.tokens]
            before.tokens, before.is_filed = tokens, False
            self.num_entered += 1
            parent.children[tokens] = before
            return before
        node = TreeNode(parent, tokens, page, parent.account, parent.depth + 1, session=session)
        parent.children[tokens] = node
        parent.resident += 1
        node.account.num_nodes += 1
        self._node_of[page] = node
        self.own((node.account.name,), (page,))
        self.num_nodes += 1
        self.num_entered += 1
        return node

    def distrust(self, pages: list[int]) -> None:
        """Forget what stands in `pages` and everything behind: one of them may hold numbers that are not finite."""
        for page in pages:
            node = self._node_of[page]
            if node is not None:
                self._drop(node)

    def withdraw(self, pages: list[int]) -> None:
        """Take pages that follow each other, which a table holds, and everything behind the first out of the tree: they are nobody's."""
        self.distrust(pages[:1])
        for page in pages:
            self._disown(page)

    def drop_session(self, session: str) -> int:
        """Forget what only this session has used; how many pages. Requests that run keep theirs until they end."""
        stack, before = list(self.roots.values()), self.num_nodes
        while stack:
            node = stack.pop()
            if node.session == session:
                self._drop(node)
            else:
                stack += node.children.values()
        return before - self.num_nodes

    def nodes(self, ends: bool = False) -> "Iterator[TreeNode]":
        """Every page that is full, those in front first; ends: those, too, that are not full and of a session. The tree must not
        change meanwhile."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if len(node.tokens) == self.page_bytes or ends and node.session:
                yield node

    # -- on the host

    def claim(self, nodes: "Iterable[TreeNode]") -> None:
        """What is on the host of these stays there until it is promoted or disclaimed."""
        for node in nodes:
            del node.account.on_host[node]

    def disclaim(self, nodes: "Iterable[TreeNode]") -> None:
        """Claimed nodes may go again, after all others of their tenant."""
        for node in nodes:
            node.account.on_host[node] = None
            self._host_accounts[node.account] = None

    def promote(self, node: TreeNode, page: int) -> None:
        """What the node had on the host stands in `page` now, or will once the transfers so far are done."""
        node.account.on_host.pop(node, None)
        del self.by_slot[node.slot]
        self._host.give(node.slot)
        node.slot, node.page = -1, page
        self._node_of[page] = node
        node.parent.resident += 1  # type: ignore[union-attr]

    def _demote(self, node: TreeNode) -> bool:
        """Move an idle page to the host. False when it has no place there: one that is not full only where a state is
        kept beside it."""
        is_worth = len(node.tokens) == self.page_bytes or self.states is not None and self.states.has(node)
        if node.resident or not is_worth or not self.make_room(1):
            return False
        slot = self._host.take()
        self._transfer(("out", node.page, slot))
        self.eviction.remove(node)
        self._node_of[node.page] = None
        self._free(node.page)
        node.page = -1
        self._put(node, slot)
        self._child_left(node)
        return True

    def _put(self, node: TreeNode, slot: int) -> None:
        node.slot = slot
        self.by_slot[slot] = node
        self.disclaim((node,))

    def enter_host(self, parent: TreeNode, tokens: bytes, slot: int, session: str = "") -> TreeNode:
        """`slot`, which the caller took, has full `tokens` behind those of `parent`, which has no such child."""
        node = TreeNode(parent, tokens, -1, parent.account, parent.depth + 1, session=session)
        parent.children[tokens] = node
        node.account.num_nodes += 1
        self.num_nodes += 1
        self._put(node, slot)
        return node

    def make_room(self, count: int) -> bool:
        """At least `count` free slots on the host, as far as prefixes hold the others: the tenant with the most of them
        gives its coldest."""
        while self._host.num_free < count:
            account = max(
                islice(self._host_accounts, MAX_TENANTS), key=lambda account: len(account.on_host), default=None
            )
            if account is None:
                return False
            if not account.on_host:
                del self._host_accounts[account]
                continue
            self._drop(next(iter(account.on_host)))
        return True

    # -- the allocator's side

    def holds(self, page: int) -> bool:
        return self._node_of[page] is not None or self.windows is not None and self.windows.holds(page)

    def release(self, page: int) -> bool:
        """Nobody holds the page any more. False when it is not cached: it is free then."""
        node = self._node_of[page]
        if node is None:
            if self.windows is not None and self.windows.release(page):
                return True
            self._disown(page)
            return False
        self.eviction.add(node)
        return True

    def retain(self, page: int) -> bool:
        """A table holds the idle page again. False when it is not cached."""
        node = self._node_of[page]
        if node is None:
            return self.windows is not None and self.windows.retain(page)
        self.eviction.remove(node)
        return True

    @property
    def num_idle(self) -> int:
        return self.eviction.num_idle + (self.windows.num_idle if self.windows is not None else 0)

    def evict(self, count: int) -> None:
        """Make at least `count` (at most num_idle) idle pages free."""
        windows = self.windows
        for _ in range(count):
            # More than idle nodes can have: pages that the windows of running requests have passed.
            if windows is not None and windows.num_idle > windows.windowed * self.eviction.num_idle:
                self.num_evicted += self._drop_windows(windows.oldest())
                continue
            if not self.eviction.num_idle:
                break
            self.num_evicted += 1
            node = self.eviction.choose()
            if not self._demote(node):
                self._drop(node)

    def _drop_windows(self, node: TreeNode) -> int:
        """Take what stands beside a node from it; how many pages are free for it."""
        if self.windows is None:
            return 0
        free = self.windows.drop(node)
        for page in free:
            self._free(page)
        return len(free)

    def clear(self) -> None:
        """Forget everything; pages that nobody holds are free."""
        for root in list(self.roots.values()):
            for node in list(root.children.values()):
                self._drop(node)

    def _drop(self, node: TreeNode) -> None:
        """Take a node and all behind it out of the tree."""
        stack = [node]
        while stack:
            inner = stack[-1]
            if inner.children:
                stack += inner.children.values()
                inner.children = {}
                inner.resident = 0
                continue
            stack.pop()
            self._forget(inner)
        parent = node.parent
        if parent is None or parent.children.get(node.tokens) is not node:
            return
        del parent.children[node.tokens]
        if node.page >= 0:
            self._child_left(node)
        if parent.parent is None and not parent.children:
            self._drop_root(parent)

    def _child_left(self, node: TreeNode) -> None:
        """The node is no longer in device memory."""
        parent: TreeNode = node.parent  # type: ignore[assignment]
        parent.resident -= 1
        if parent.is_idle and not parent.resident:
            self.eviction.offer(parent)

    def _forget(self, node: TreeNode) -> None:
        node.alive = False
        self.num_nodes -= 1
        node.account.num_nodes -= 1
        if self.windows is not None:
            self._drop_windows(node)
        if self.states is not None:
            self.states.drop(node)
        if node.page < 0:
            node.account.on_host.pop(node, None)
            del self.by_slot[node.slot]
            self._host.give(node.slot)
            return
        self._node_of[node.page] = None
        if node.is_idle:
            self.eviction.remove(node)
            self._free(node.page)

    def _drop_root(self, root: TreeNode) -> None:
        root.alive = False
        del self.roots[root.salt]
        self._drop_account(root.account)

    def _drop_account(self, account: SaltAccount) -> None:
        if not account.num_nodes and not account.num_pages and self._accounts.get(account.name) is account:
            del self._accounts[account.name]

    # -- checks

    def check_integrity(self, references) -> list[str]:
        """What is wrong, one line each. references(page): how many tables hold it."""
        problems = self.eviction.check_integrity()
        found: dict[int, TreeNode] = {}
        on_host: dict[int, TreeNode] = {}
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is None and not node.children:
                problems.append("a root without pages")
            if node.resident != sum(child.page >= 0 for child in node.children.values()):
                problems.append(f"{node}: {node.resident} children counted")
            if node.resident and node.parent is not None and node.page < 0:
                problems.append(f"{node}: not in device memory, and a page behind it is")
            for tokens, child in node.children.items():
                if (
                    child.tokens != tokens
                    or child.parent is not node
                    or child.depth != node.depth + 1
                    or (not child.alive or child.account is not node.account)
                ):
                    problems.append(f"{child}: out of place")
                if len(tokens) < self.page_bytes and child.children:
                    problems.append(f"{child}: has children and is not full")
                where, place = (found, child.page) if child.page >= 0 else (on_host, child.slot)
                if place in where or (child.page >= 0) == (child.slot >= 0):
                    problems.append(f"{child}: page {child.page}, slot {child.slot}")
                where[place] = child
                if child.page < 0 and child not in child.account.on_host:
                    problems.append(f"{child}: its slot cannot be had")
                stack.append(child)
        if len(found) + len(on_host) != self.num_nodes:
            problems.append(f"{self.num_nodes} nodes counted, {len(found)} and {len(on_host)} found")
        if on_host != self.by_slot:
            problems.append(f"slots of the host: {sorted(on_host)} found, {sorted(self.by_slot)} listed")
        pages: Iterable[int] = found
        if self._node_of.count(None) != len(self._node_of) - len(found):
            pages = range(len(self._node_of))  # a page too many is listed: which
        for page in pages:
            listed = self._node_of[page]
            if found.get(page) is not listed:
                problems.append(f"page {page}: listed as {listed}, found {found.get(page)}")
            elif listed is not None and listed.is_idle != (references(page) == 0):
                problems.append(f"{listed}: {references(page)} references")
        idle = sum(node.is_idle for node in found.values())
        owners = [account for account in self._owner_of if account is not None]
        for account in {*owners, *self._accounts.values()}:
            if account.num_pages != owners.count(account):
                problems.append(f"{account.num_pages} pages of {account.name!r} counted, {owners.count(account)} found")
        if idle != self.eviction.num_idle:
            problems.append(f"{self.eviction.num_idle} idle pages counted, {idle} found")
        return problems + (self.windows.check_integrity(references) if self.windows is not None else [])


def common_tokens(first: bytes, second: bytes) -> int:
    """How many tokens two sequences of i32 bytes have in common at their beginning."""
    if first == second[: len(first)]:
        return len(first) // 4
    if first[:4] != second[:4]:
        return 0
    # By bisection: comparing bytes is quick, and pages have up to 128 tokens, prompts many more.
    low, high = 1, min(len(first), len(second)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if first[4 * low : 4 * middle] == second[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
