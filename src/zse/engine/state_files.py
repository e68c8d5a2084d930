"""Kept states in files (cache/files.py), for the disk tier (engine/offload.py): what is written of one, and which of them
a prompt continues from.

A record has the state and, where it stands within a page, that page too: those of pages are of full ones."""

from collections.abc import Callable
from typing import NamedTuple

from zse.cache.eviction import TreeNode
from zse.cache.files import PageFiles, state_key
from zse.cache.states import Snapshot, StateSlots, child_of
from zse.engine.disk_reads import Place


class KeptState(NamedTuple):
    """A record with the state behind the first `depth` pages of a prompt and the tokens `tail`. num_pages: full pages that
    must be there for it."""

    key: bytes
    depth: int
    tail: bytes
    num_pages: int


class PlacedState(NamedTuple):
    """A state on its way. host: its slot of the host; slot: of the page that it stands within, -1: it stands at the end of
    one."""

    kept: KeptState
    host: int
    slot: int

    @property
    def places(self) -> list[Place]:
        """What its record is read to."""
        return [("host state", self.host), *([("slot", self.slot)] if self.slot >= 0 else [])]


class StateFiles:
    """cache: a CacheManager with states and a prefix cache. key_of_node: of the pages' files."""

    def __init__(self, cache, files: PageFiles, key_of_node: Callable[[TreeNode], bytes]):
        self._prefix, self._host, self._files = cache.prefix, cache.host, files
        self._states: StateSlots = cache.states
        self._filling: set[int] = cache.filling
        self._key_of_node = key_of_node
        self.num_read = 0

    def counters(self) -> dict[str, float]:
        """States in files, and how many were read since the start."""
        return {"state_disk_files": self._files.num_states, "state_disk_read": self.num_read}

    def content(self, snapshot: Snapshot) -> tuple[bytes, bytes, bytes, list[Place]] | None:
        """Key, key of the page before, tokens behind that, and where the content of its record is; None of one that is gone. What
        pages and slots hold is settled."""
        node = snapshot.node
        if not node.alive or not self._states.has(node, snapshot):
            return None
        near = snapshot.slot >= 0
        places = [("state", snapshot.slot) if near else ("host state", snapshot.host)]
        tail = node.tokens[: 4 * snapshot.offset]
        if len(tail) < self._prefix.page_bytes:
            places.append(("page", node.page) if node.page >= 0 else ("slot", node.slot))
        parent = self._key_of_node(node.parent)  # type: ignore[arg-type]
        return state_key(parent, tail), parent, tail, places

    def deepest(
        self, salt, nodes: list[TreeNode], keys: list[tuple[bytes, bytes]], tokens: bytes, reach: int, most: int
    ) -> KeptState | None:
        """The record of the deepest state of a prompt, deeper than the `reach` tokens that memory has one for. nodes:
        its pages in memory; keys: those behind them that are in files, with their tokens, `most` of which have a place."""
        page_bytes, end = self._prefix.page_bytes, len(tokens) - 4
        most = len(nodes) + min(len(keys), most)
        for depth in range(most, -1, -1):
            at = depth * page_bytes
            if at + page_bytes <= 4 * reach:
                return None
            if depth > len(nodes):
                key = keys[depth - len(nodes) - 1][0]
            else:
                key = self._key_of_node(nodes[depth - 1]) if depth else self._files.root(salt)
            for tail in self._files.states_behind(key, tokens[at : at + page_bytes]):
                num_pages = depth + (len(tail) == page_bytes)
                if 4 * reach < at + len(tail) <= end and num_pages <= most:
                    return KeptState(state_key(key, tail), depth, tail, num_pages)
        return None

    def take(self, kept: KeptState) -> PlacedState | None:
        """Places on the host for a state, and for its page where it stands within one; None where there are none."""
        is_full = len(kept.tail) == self._prefix.page_bytes
        if not self._states.make_room() or not is_full and not self._prefix.make_room(1):
            return None
        host, slot = self._states.host.take(), -1 if is_full else self._host.take()
        self._states.filling.add(host)
        if slot >= 0:
            self._filling.add(slot)
        return PlacedState(kept, host, slot)

    def give(self, placed: PlacedState) -> None:
        """Nothing came."""
        self._states.filling.discard(placed.host)
        self._states.host.give(placed.host)
        if placed.slot >= 0:
            self._filling.discard(placed.slot)
            self._host.give(placed.slot)

    def enter(self, placed: PlacedState, salt, nodes: list[TreeNode], session: str) -> bool:
        """The state came. nodes: the prompt's pages that are there. False where they are too few now."""
        kept = placed.kept
        if len(nodes) < kept.num_pages:
            self.give(placed)
            return False
        parent = nodes[kept.depth - 1] if kept.depth else self._prefix.roots.get(salt)
        node = nodes[kept.depth] if placed.slot < 0 else parent and child_of(parent, kept.tail)
        if placed.slot >= 0:
            self._filling.discard(placed.slot)
            if node is None:
                parent = parent or self._prefix.root(salt)
                node = self._prefix.enter_host(parent, kept.tail, placed.slot, session)  # type: ignore[arg-type]
            else:
                self._host.give(placed.slot)
        self._states.filling.discard(placed.host)
        assert node is not None
        self._states.enter_host(node, len(kept.tail) // 4, placed.host)
        self.num_read += 1
        return True
