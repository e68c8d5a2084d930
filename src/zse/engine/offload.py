"""Between host slots and files: pages that went to the host are written in the background; a prompt whose beginning is
in files gets it back before it is queued.

The tree of prefixes is the scheduler's; this runs in the engine's thread, between steps. Only writing has a thread of
its own."""

import hashlib
import logging
import threading
import time
from array import array
from collections import deque
from typing import Any

from zse import __version__
from zse.cache.eviction import TreeNode
from zse.cache.files import KEY_BYTES, PageFiles, key_of
from zse.engine import state_files
from zse.errors import DeviceError
from zse.scheduler.batch import Batch
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions
from zse.scheduler.request import salt_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.cache.states import Snapshot
    from zse.engine.state_files import StateFiles

# Content that waits to be written: beyond it pages are left out (they can be computed again).
MAX_PENDING_BYTES = 64 << 20
# Read at most at once for a prompt: 0.1 s that others wait.
MAX_READ_BYTES = 64 << 20
# Of a model with a state: pages are of use only up to where a state is.
MAX_STATE_READ_BYTES = 1 << 30
# A model's revision is read from so many pieces of so many bytes of each file.
PIECES, PIECE_BYTES = 65, 4096
# Time at the end to write what is still in memory.
CLOSE_S = 3.0

log = logging.getLogger("zse.engine")


class DiskTier(Feature):
    """scheduler: its cache has a prefix cache and host slots. mover: the runner's PageMover."""

    def __init__(self, scheduler, mover, files: PageFiles):
        self._states: StateFiles | None = None
        if scheduler.cache.states is not None:
            self._states = state_files.StateFiles(scheduler.cache, mover, files, self._key)
        self._scheduler, self._cache, self._mover, self._files = scheduler, scheduler.cache, mover, files
        self.num_written = self.num_read = 0
        self._pending: deque[tuple[bytes, bytes, bytes]] = deque()
        self._pending_bytes = 0
        self._wake = threading.Condition()
        self._watched: deque[tuple[Any, list[tuple[int, TreeNode]]]] = deque()
        self._walk: list[TreeNode | Snapshot] = []
        self._walked_at = (0, 0)
        self._closing = False
        self._failed = False
        self._thread = threading.Thread(target=self._write, name="kv files", daemon=True)
        self._thread.start()

    def counters(self) -> dict[str, float]:
        """Totals since the start, and what is on disk now."""
        return {
            "prefix_disk_pages": len(self._files) - self._files.num_states,
            "prefix_disk_bytes": self._files.num_bytes,
            "prefix_disk_written_pages": self.num_written,
            "prefix_disk_read_pages": self.num_read,
            "prefix_disk_damaged_files": self._files.num_damaged,
        } | ({} if self._states is None else self._states.counters())

    # -- out

    def before_run(self, batch: Batch) -> None:
        """Remember whose pages go to the host with the batch."""
        if not batch.transfers:
            return
        by_slot, full = self._cache.prefix.by_slot, self._cache.prefix.page_bytes
        gone = [(slot, by_slot[slot]) for kind, _, slot in batch.transfers if kind == "out" and slot in by_slot]
        gone = [(slot, node) for slot, node in gone if len(node.tokens) == full]
        if gone:
            self._watched.append((batch, gone))

    def after_commit(self, batch: Batch, seconds: float) -> None:
        """What the batch took to the host can be written."""
        if self._watched and self._watched[0][0] is batch:
            for slot, node in self._watched.popleft()[1]:
                # Given to another page since, the slot may be written just now.
                if self._cache.prefix.by_slot.get(slot) is node and not node.is_filed:
                    self._queue(node, self._mover.read_slot(slot))

    def idle(self, now: float) -> bool:
        """Write one page, or state, that has no file yet. False when there is none."""
        if self._failed or self._pending_bytes > MAX_PENDING_BYTES // 2:
            return False
        entered = self._cache.prefix.num_entered, 0 if self._states is None else self._cache.states.num_kept
        if not self._walk and self._walked_at != entered:
            self._walked_at = entered
            self._settle()
            self._walk = self._kept()
        while self._walk:
            if self._file(self._walk.pop()):
                return True
        return False

    def _kept(self) -> "list[TreeNode | Snapshot]":
        """What there is to be written; pages last, which come first where the last is taken."""
        states = [] if self._states is None else self._cache.states.snapshots()
        return [*states, *self._cache.prefix.full_nodes()]

    def _file(self, kept: "TreeNode | Snapshot") -> bool:
        """Write what has no file yet. False when it has one, or is gone."""
        if kept.is_filed:
            return False
        if isinstance(kept, TreeNode):
            if kept.alive:
                self._queue_any(kept)
            return kept.alive
        assert self._states is not None
        found = self._states.content(kept)
        if found is not None:
            kept.is_filed = True
            self._put(*found)
        return found is not None

    def _settle(self) -> None:
        """What pages and slots hold is what the tree says."""
        self._mover.run(self._cache.take_transfers())
        self._mover.settle()

    def _queue_any(self, node: TreeNode) -> None:
        self._queue(node, self._mover.read_slot(node.slot) if node.page < 0 else self._mover.read_page(node.page))

    def _queue(self, node: TreeNode, content: bytes) -> None:
        if self._failed or self._pending_bytes > MAX_PENDING_BYTES:
            return
        node.is_filed = True
        self._put(self._key(node), node.tokens, content)

    def _put(self, key: bytes, tokens: bytes, content: bytes) -> None:
        """Have the thread write a file."""
        if key in self._files:
            return
        with self._wake:
            self._pending.append((key, tokens, content))
            self._pending_bytes += len(content)
            self._wake.notify()

    def _key(self, node: TreeNode) -> bytes:
        chain = []
        while not node.key:
            chain.append(node)
            if node.parent is None:
                break
            node = node.parent
        for inner in reversed(chain):
            inner.key = (
                key_of(inner.parent.key, inner.tokens) if inner.parent is not None else self._files.root(inner.salt)
            )
        return chain[0].key if chain else node.key

    def _write(self) -> None:
        while True:
            with self._wake:
                while not self._pending and not self._closing:
                    self._wake.wait()
                if not self._pending:
                    return
                key, tokens, content = self._pending.popleft()
            try:
                if not self._failed:
                    self._files.write(key, tokens, content)
                    self.num_written += len(key) == KEY_BYTES
            except OSError as error:
                self._failed = True
                log.warning("the prefix cache no longer writes to disk: %s", error)
            with self._wake:
                self._pending_bytes -= len(content)

    # -- in

    def before_queue(self, prompt: list[int], options: RequestOptions) -> None:
        """Bring what files have of the prompt's beginning, behind what is in memory, to the host."""
        self._scheduler.limits.check_ids("prompt", prompt)
        if not len(self._files):
            return
        salt, prefix, host = salt_of(options), self._cache.prefix, self._cache.host
        page_bytes = prefix.page_bytes
        tokens = array("i", prompt).tobytes()
        match = prefix.match(salt, tokens, whole=True)
        node = match.nodes[-1] if match.nodes else None
        key = self._key(node) if node is not None else self._files.root(salt)
        at, end = page_bytes * len(match.nodes), len(tokens) - 4
        keys: list[tuple[bytes, bytes]] = []
        most = MAX_READ_BYTES if self._states is None else MAX_STATE_READ_BYTES
        while at + page_bytes <= end and len(keys) * self._mover.page_nbytes < most:
            key = key_of(key, tokens[at : at + page_bytes])
            if key not in self._files:
                break
            keys.append((key, tokens[at : at + page_bytes]))
            at += page_bytes
        kept = None
        if self._states is not None:
            reach = prefix.match(salt, tokens).length
            kept = self._states.deepest(salt, match.nodes, keys, tokens, reach)
            keys = keys[: max(0, kept.num_pages - len(match.nodes))] if kept is not None else []
        if not keys and kept is None:
            return
        # Slots that were given back may still be read by transfers: those come first.
        self._settle()
        on_host = [inner for inner in match.nodes if inner.page < 0]
        prefix.claim(on_host)
        fetched: list[TreeNode] = []
        for key, page_tokens in keys[: host.num_slots - len(on_host)]:
            content = self._files.read(key, page_tokens, self._mover.page_nbytes)
            if content is None or not prefix.make_room(1):
                break
            slot = host.take()
            self._mover.write_slot(slot, content)
            node = prefix.enter_host(node if node is not None else prefix.root(salt), page_tokens, slot)
            node.key, node.is_filed = key, True
            prefix.claim((node,))
            fetched.append(node)
        if kept is not None and len(match.nodes) + len(fetched) >= kept.num_pages:
            self._states.bring(kept, salt, [*match.nodes, *fetched])  # type: ignore[union-attr]
        prefix.disclaim([*on_host, *fetched])
        self.num_read += len(fetched)

    # -- the end

    def close(self) -> None:
        """Write what is in memory and has no file, for a few seconds at most."""
        deadline = time.monotonic() + CLOSE_S
        try:
            self._settle()
            for kept in reversed(self._kept()):
                if kept.is_filed:
                    continue
                while self._pending_bytes > MAX_PENDING_BYTES // 2 and time.monotonic() < deadline:
                    time.sleep(0.001)
                if time.monotonic() > deadline or self._failed:
                    break
                self._file(kept)
        except DeviceError as error:
            log.warning("what is cached is not written to disk: %s", error)
        finally:
            with self._wake:
                self._closing = True
                self._wake.notify()
            self._thread.join(max(0.1, deadline - time.monotonic()))


def open_disk_tier(engine, config, source, quantize: str | None) -> DiskTier:
    """The tier of a ResolvedConfig with cache_disk, for an Engine whose model comes from `source`. Raises
    ConfigError."""
    fingerprint = fingerprint_of(engine, config, source, quantize)
    files = PageFiles(config.cache_disk, fingerprint, config.cache_disk_size, config.page_size)
    return DiskTier(engine.scheduler, engine.runner.pages, files)


def fingerprint_of(engine, config, source, quantize: str | None) -> bytes:
    """What the content of pages depends on beside their tokens: 16 bytes, of two engines the same where the pages are."""
    facts = (
        __version__,
        config.page_size,
        engine.runner.pages.page_nbytes,
        config.kv_dtype,
        config.activations,
        quantize,
        engine.runner.device.kernels,
        *(() if engine.runner.states is None else (engine.runner.states.slot_nbytes,)),
    )
    return hashlib.blake2b(revision_of(source) + repr(facts).encode(), digest_size=16).digest()


def revision_of(source) -> bytes:
    """A digest by which the model's files are told from others: of their sizes, their beginnings (metadata and table of
    tensors) and pieces all over them. Reading a model in full would take longer than loading it."""
    total = hashlib.blake2b(digest_size=32)
    for file in source.files:
        total.update(file.size.to_bytes(8, "little"))
        piece = min(PIECE_BYTES, file.size)
        for number in range(PIECES):
            total.update(file.read((file.size - piece) * number // (PIECES - 1), piece))
    return total.digest()
