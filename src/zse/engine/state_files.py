"""Files of kept states (cache/files.py), for the disk tier (engine/offload.py): what is written of one, and which of them
a prompt continues from.

A file has the state and, where it stands within a page, that page too: files of pages are of full ones."""

from collections.abc import Callable
from typing import NamedTuple

from zse.cache.eviction import TreeNode
from zse.cache.files import PageFiles, state_key
from zse.cache.states import Snapshot, StateSlots, child_of


class KeptState(NamedTuple):
    """A file with the state behind the first `depth` pages of a prompt and the tokens `tail`. num_pages: full pages that
    must be there for it."""

    key: bytes
    depth: int
    tail: bytes
    num_pages: int


class StateFiles:
    """cache: a CacheManager with states and a prefix cache. mover: the runner's PageMover. key_of_node: of the pages'
    files."""

    def __init__(self, cache, mover, files: PageFiles, key_of_node: Callable[[TreeNode], bytes]):
        self._prefix, self._host, self._mover, self._files = cache.prefix, cache.host, mover, files
        self._states: StateSlots = cache.states
        self._key_of_node = key_of_node
        self.num_read = 0

    def counters(self) -> dict[str, float]:
        """Files of states, and how many were read since the start."""
        return {"state_disk_files": self._files.num_states, "state_disk_read": self.num_read}

    def content(self, snapshot: Snapshot) -> tuple[bytes, bytes, bytes] | None:
        """Key, tokens and content of its file; None of one that is gone. What pages and slots hold is settled."""
        node, mover = snapshot.node, self._mover
        if not node.alive or not self._states.has(node, snapshot):
            return None
        near = snapshot.slot >= 0
        state = mover.read_state(snapshot.slot) if near else mover.read_host_state(snapshot.host)
        tail = node.tokens[: 4 * snapshot.offset]
        if len(tail) < self._prefix.page_bytes:
            state += mover.read_page(node.page) if node.page >= 0 else mover.read_slot(node.slot)
        return state_key(self._key_of_node(node.parent), tail), tail, state  # type: ignore[arg-type]

    def deepest(
        self, salt, nodes: list[TreeNode], keys: list[tuple[bytes, bytes]], tokens: bytes, reach: int
    ) -> KeptState | None:
        """The file with the deepest state of a prompt, deeper than the `reach` tokens that memory has one for. nodes:
        its pages in memory; keys: those behind them that are in files, with their tokens."""
        page_bytes, end = self._prefix.page_bytes, len(tokens) - 4
        # Places on the host for the pages, and one for a page that is not full.
        most = len(nodes) + self._host.num_slots - sum(node.page < 0 for node in nodes) - 1
        for depth in range(min(len(nodes) + len(keys), most), -1, -1):
            at = depth * page_bytes
            if at + page_bytes <= 4 * reach:
                return None
            if depth > len(nodes):
                key = keys[depth - len(nodes) - 1][0]
            else:
                key = self._key_of_node(nodes[depth - 1]) if depth else self._files.root(salt)
            for tail in self._files.states_behind(key, tokens[at : at + page_bytes]):
                num_pages = depth + (len(tail) == page_bytes)
                if 4 * reach < at + len(tail) <= end and num_pages <= min(len(nodes) + len(keys), most):
                    return KeptState(state_key(key, tail), depth, tail, num_pages)
        return None

    def bring(self, kept: KeptState, salt, nodes: list[TreeNode]) -> None:
        """Read the state to the host and enter it. nodes: the prompt's pages, kept.num_pages of them at least, which
        nobody takes away meanwhile."""
        page_bytes, state_nbytes = self._prefix.page_bytes, self._states.slot_nbytes
        is_full = len(kept.tail) == page_bytes
        content = self._files.read(kept.key, kept.tail, state_nbytes + (0 if is_full else self._mover.page_nbytes))
        if content is None or not self._states.make_room():
            return
        parent = nodes[kept.depth - 1] if kept.depth else self._prefix.roots.get(salt)
        node = nodes[kept.depth] if is_full else parent and child_of(parent, kept.tail)
        if node is None:
            if not self._prefix.make_room(1):
                return
            slot = self._host.take()
            self._mover.write_slot(slot, content[state_nbytes:])
            node = self._prefix.enter_host(parent or self._prefix.root(salt), kept.tail, slot)
        host = self._states.host.take()
        self._mover.write_host_state(host, content[:state_nbytes])
        self._states.enter_host(node, len(kept.tail) // 4, host)
        self.num_read += 1
