"""Between the cache and files: pages are written in the background; a prompt whose beginning is in files waits until it is
in memory, while the steps of others go on.

The tree of prefixes is the scheduler's; this runs in the engine's thread, between steps. Writing and reading have
threads of their own."""

import logging
import time
from collections import OrderedDict, deque
from functools import partial
from typing import Any

from zse.cache.eviction import TreeNode
from zse.cache.files import KEY_BYTES, key_of, state_key
from zse.cache.prefix import common_tokens
from zse.engine import disk_reads, rank_files, state_files
from zse.engine.disk_reads import AwaitingDisk, Place
from zse.engine.disk_writes import DiskWriter, Write
from zse.engine.held import HoldingFeature
from zse.engine.read_ahead import SessionAhead
from zse.errors import DeviceError, GroupError
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.batch import Batch, StepOutput
from zse.scheduler.options import PlacedImage, RequestOptions
from zse.scheduler.request import salt_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.cache.prefix import Match, Salt
    from zse.cache.states import Snapshot
    from zse.engine.state_files import StateFiles

# Content that waits to be written: beyond it pages are left out (they can be computed again).
MAX_PENDING_BYTES = 64 << 20
# Pages that each running request may need while others are read for one that waits.
SPARE_PAGES = 2
# Tokens that a page must spare a prompt which would wait for it alone: fewer are computed while it is read.
LEAST_GAIN = 8
WAIT_S = 0.001  # for what is read, at a time, when nothing else runs
TIDY_S = 60.0  # between looks at which sessions have ended
MAX_SESSIONS = 1 << 16  # whose ends are known
# Time at the end to write what is still in memory.
CLOSE_S = 3.0

log = logging.getLogger("zse.engine")


class DiskTier(HoldingFeature):
    """engine: its cache has a prefix cache and host slots. mover: the runner's PageMover. far: of `writer`, where other ranks have parts of
    pages, or all of them. cache: where it is not the engine's, but one rank's (engine/divided_files.py)."""

    out = "out"  # the transfer that takes a page to the host
    close_s = CLOSE_S

    def __init__(self, engine, mover, files, far=None, writer: DiskWriter | None = None, cache=None):
        super().__init__(engine)
        self._cache = cache or self._cache
        self._states: StateFiles | None = None
        if self._cache.states is not None:
            self._states = state_files.StateFiles(self._cache, files, self._key)
        self._mover, self._files = mover, files
        self.num_read = self.num_hits = self.num_hit_tokens = 0
        self._writer = writer or DiskWriter()
        self._far: rank_files.RankFiles | None = far
        self._watched: deque[tuple[Any, list[tuple[int, TreeNode]]]] = deque()
        self._walk: list[TreeNode | Snapshot] = []
        self._walked_at = (0, 0)
        self._sessions: OrderedDict[str, float] = OrderedDict()  # when they end, seconds since 1970
        self._tidied_at = 0.0
        self._reading: list[AwaitingDisk] = []
        self._reader = far or disk_reads.DiskReader(files, mover)
        self._ahead = SessionAhead(engine.scheduler, self._cache, mover, files, self._reader)

    def counters(self) -> dict[str, float]:
        """Totals since the start, and what is on disk now."""
        counters = self._files.counters()
        return (
            (counters if self._far is None else self._far.sums(counters))
            | {
                "prefix_disk_written_pages": self._writer.num_written,
                "prefix_disk_read_pages": self.num_read + self._ahead.num_read,
                "prefix_disk_hits": self.num_hits,
                "prefix_disk_hit_tokens": self.num_hit_tokens,
            }
            | ({} if self._states is None else self._states.counters())
        )

    # -- out

    def before_run(self, batch: Batch) -> None:
        """Remember whose pages go to the host with the batch."""
        if not batch.transfers:
            return
        by_slot, full = self._cache.prefix.by_slot, self._cache.prefix.page_bytes
        gone = [(slot, by_slot[slot]) for kind, _, slot in batch.transfers if kind == self.out and slot in by_slot]
        gone = [(slot, node) for slot, node in gone if len(node.tokens) == full]
        if gone:
            self._watched.append((batch, gone))

    def after_commit(self, batch: Batch, seconds: float) -> None:
        """What the batch took to the host can be written."""
        if self._watched and self._watched[0][0] is batch:
            for slot, node in self._watched.popleft()[1]:
                # Given to another page since, the slot may be written just now.
                if self._cache.prefix.by_slot.get(slot) is node and not node.is_filed:
                    self._queue(node)

    def idle(self, now: float) -> bool:
        """Write one page, or state, that has no file yet, or wait a little for those that are written. False when there is
        nothing."""
        self._ahead.settle()
        if now - self._tidied_at > TIDY_S:
            self._tidied_at = now
            self._writer.ask(Write(partial(self._files.tidy, time.time())))
            if self._far is not None:
                self._far.order("tidy", at=time.time())
        if self._far is not None:
            self._far.look()
        if self._writer.has_failed:
            return False
        if self.pending_bytes > MAX_PENDING_BYTES // 2:
            self._wait_for_writes()
            return True
        entered = self._cache.prefix.num_entered, 0 if self._states is None else self._cache.states.num_kept
        if not self._walk and self._walked_at != entered:
            self._walked_at = entered
            self._settle()
            self._walk = self._kept()[::-1]
        while self._walk:
            if self._file(self._walk.pop()):
                return True
        if self._far is None or not self._far.waiting_bytes:
            return False
        self._wait_for_writes()
        return True

    @property
    def pending_bytes(self) -> int:
        """Of what waits to be written."""
        return self._writer.pending_bytes + (0 if self._far is None else self._far.waiting_bytes)

    def _wait_for_writes(self) -> None:
        if self._far is not None and self._far.waiting_bytes:
            self._far.look(WAIT_S)
        else:
            self._writer.wait(WAIT_S)

    def _kept(self, ends: bool = False) -> "list[TreeNode | Snapshot]":
        """What there is to be written, pages behind those in front of them: so they stand in one file. What sessions go on
        from comes first: at the end there may be no time for all. ends: with the last pages of sessions, as far as they go:
        a CPU computes half a page in half a second behind 32,000 tokens. (A state brings such a page along.)"""
        nodes = list(self._cache.prefix.nodes(ends and self._states is None and self._cache.grouped is None))
        states = [] if self._states is None else self._cache.states.snapshots()
        first: set[TreeNode] = set()
        for node in (*nodes, *(state.node for state in states)):
            above: TreeNode | None = node if node.session else None
            while above is not None and above not in first:
                first.add(above)
                above = above.parent
        kept = [[each for each in nodes if (each in first) == is_first] for is_first in (True, False)]
        behind = [[each for each in states if (each.node in first) == is_first] for is_first in (True, False)]
        return [*kept[0], *behind[0], *kept[1], *behind[1]]

    def _file(self, kept: "TreeNode | Snapshot") -> bool:
        """Write what has no file yet. False when it has one, or is gone."""
        if kept.is_filed:
            return False
        if isinstance(kept, TreeNode):
            if kept.alive:
                self._queue(kept)
            return kept.alive
        assert self._states is not None
        found = self._states.content(kept)
        if found is not None:
            kept.is_filed = True
            self._put(*found, kept.node.session)
        return found is not None

    def _settle(self) -> None:
        """What pages and slots hold is what the tree says."""
        self._mover.run(self._cache.take_transfers())
        self._mover.settle()

    def _queue(self, node: TreeNode) -> None:
        if self._writer.has_failed or self.pending_bytes > MAX_PENDING_BYTES:
            return
        node.is_filed = True
        assert node.parent is not None
        parent, is_full = self._key(node.parent), len(node.tokens) == self._cache.prefix.page_bytes
        key = self._key(node) if is_full else state_key(parent, node.tokens)
        places = [("slot", node.slot) if node.page < 0 else ("page", node.page)]
        self._put(key, parent, node.tokens, places, node.session)

    def _put(self, key: bytes, parent: bytes, tokens: bytes, places: list[Place], session: str) -> None:
        """Have the thread write a page or state."""
        if key in self._files:
            return
        is_here, ends = self._far is None or self._far.has_part, self._sessions.get(session, 0.0)
        content = disk_reads.content_of(self._mover, places) if is_here else b""
        run = partial(self._files.write, key, parent, content, session, ends, tokens)
        write = Write(run, len(content) or self._mover.page_nbytes, len(key) == KEY_BYTES, session)
        if self._far is None:
            self._writer.ask(write)
        else:
            self._far.write(write, key, parent, tokens, places, ends)

    def drop_session(self, session: str) -> None:
        """Remove what files have of a session alone. The cache has forgotten it."""
        self._writer.drop(session)
        if self._far is not None:
            self._far.drop(session)
        self._walk, self._walked_at = [], (0, 0)
        self._ahead.drop(session)
        self._sessions.pop(session, None)
        self._writer.ask(Write(partial(self._files.drop_session, session)))

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

    # -- in

    def read_ahead(self) -> None:
        """The engine is ready: have read what is likely to be asked for."""
        self._ahead.begin()

    def before_submit(self, id: int, prompt: list[int], params: Any, options: RequestOptions) -> bool:
        if not goes_on(params, options):
            return False
        if options.session:
            self.use_session(options.session, options.session_ttl)
        return self.hold(id, prompt, params, options)

    def hold(self, id: int, prompt: list[int], params: Any, options: RequestOptions) -> bool:
        """Hold a request back whose prompt begins with what files have and memory has not."""
        if not len(self._files):
            return False
        self.check_held(id, prompt, params)
        held = AwaitingDisk(prompt, params, options, self._engine.clock())
        self._reading += self._ahead.claim(held)
        if not self._begin(held):
            return False
        self._held[id] = held
        return True

    def use_session(self, session: str, ttl_s: float) -> None:
        """The session goes on."""
        self._sessions[session] = expires = time.time() + ttl_s
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        self._writer.ask(Write(partial(self._files.extend, session, expires), session=session))
        if self._far is not None:
            self._far.order("extend", session=session, at=expires)

    def _begin(self, held: AwaitingDisk) -> bool:
        """Whether something is to be waited for: what is read for the request from here on, or for one before it."""
        tokens, salt, prefix = held.compared, salt_of(held.options), self._cache.prefix
        matched, nodes, parent, keys = self._known(salt, tokens)
        kept = None
        if self._states is not None:
            reach = prefix.match(salt, tokens).length
            most = self._room(nodes) - 1  # one for a page that is not full
            kept = self._states.deepest(salt, nodes, keys, tokens, reach, most)
            keys = keys[: max(0, kept.num_pages - len(nodes))] if kept is not None else []
        else:
            keys += self._end_behind(parent, keys, tokens, len(nodes), matched.length)
        if not keys and kept is None:
            return False
        wanted = {key for key, _ in keys} | ({kept.key} if kept is not None else set())
        if any(not wanted.isdisjoint(key for key, _ in other.fetch.wanted) for other in self._reading if other.fetch):
            return True
        self._settle()  # slots that were given back may still be read by transfers
        held.here, held.keys = len(nodes), tuple(keys)
        kind = self._take_places(held, nodes)
        if kept is not None and len(held.keys) == len(keys):
            held.state = self._states.take(kept)  # type: ignore[union-attr]
        found: list[disk_reads.Wanted] = [
            (key, [(kind, place)]) for (key, _), place in zip(held.keys, held.places, strict=True)
        ]
        if held.state is not None:
            found.append((held.state.kept.key, held.state.places))
        if not found:
            self._give_places(held)
            return False
        held.fetch = disk_reads.DiskFetch(found)
        self._reading.append(held)
        self._reader.add(held.fetch)
        return True

    def _known(self, salt: "Salt", tokens: bytes) -> "tuple[Match, list[TreeNode], bytes, list[tuple[bytes, bytes]]]":
        """What memory has of a prompt, the pages of it behind which files are read, the last one's key, and (key, tokens) of the full pages
        that files have behind them."""
        matched = self._cache.prefix.match(salt, tokens, whole=True)
        nodes = matched.nodes
        if self._mover.can_fill_pages:  # what was moved to host memory is read, too, where it has a file
            nodes = [node for node in nodes if node.page >= 0]
        parent = self._key(nodes[-1]) if nodes else self._files.root(salt)
        return matched, nodes, parent, self._keys_behind(parent, tokens, len(nodes))

    def _keys_behind(self, key: bytes, tokens: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """(key, tokens) of the prompt's pages that files have behind its first `count`, the last of which has `key`."""
        page_bytes, keys = self._cache.prefix.page_bytes, []
        for at in range(page_bytes * count, len(tokens) - 4 - page_bytes + 1, page_bytes):
            key = key_of(key, tokens[at : at + page_bytes])
            if key not in self._files:
                break
            keys.append((key, tokens[at : at + page_bytes]))
        return keys

    def _end_behind(
        self, parent: bytes, keys: list[tuple[bytes, bytes]], tokens: bytes, count: int, reach: int
    ) -> list[tuple[bytes, bytes]]:
        """(key, its tokens) of the page in files that the prompt goes on within, behind its first `count`, the last of which
        has the key `parent`, and `keys`; where it has more than the `reach` tokens of the prompt that are in memory."""
        page_bytes = self._cache.prefix.page_bytes
        at = page_bytes * (count + len(keys))
        wanted = tokens[at : min(at + page_bytes, len(tokens) - 4)]
        key, found, common = self._files.nearest_behind(keys[-1][0] if keys else parent, wanted)
        gain = at // 4 + common - max(reach, at // 4)
        return [(key, found)] if gain >= (1 if keys else LEAST_GAIN) else []

    def _room(self, nodes: list[TreeNode]) -> int:
        """How many pages may be read at most behind `nodes`, which stay."""
        if not self._mover.can_fill_pages:
            return self._cache.host.num_slots - sum(node.page < 0 for node in nodes)
        free = self._cache.allocator.num_free - SPARE_PAGES * len(self._scheduler.running)
        return max(0, free - sum(not self._cache.allocator.references(node.page) for node in nodes))

    def _take_places(self, held: AwaitingDisk, nodes: list[TreeNode]) -> str:
        """Places that the pages of `held.keys`, or the first of them, are read to: pages where the host can write them,
        else slots of the host; their kind. nodes: what stands in front."""
        cache, prefix, host = self._cache, self._cache.prefix, self._cache.host
        if self._mover.can_fill_pages:
            front = cache.page_list(node.page for node in nodes)
            cache.allocator.retain(front)
            pages = cache.page_list(cache.allocator.allocate(min(len(held.keys), self._room([]))) or ())
            held.places, held.held = tuple(pages), (front, pages)
            self._scheduler.life.job_pages += held.held
            self._settle()  # what was in them may be on its way to the host
            kind = "page"
        else:
            on_host = [node for node in nodes if node.page < 0]
            prefix.claim(on_host)  # others make room first
            prefix.disclaim(on_host)
            count = min(len(held.keys), self._room(nodes))
            while count and not prefix.make_room(count):
                count = min(count - 1, host.num_free)
            held.places = tuple(host.take() for _ in range(count))
            cache.filling.update(held.places)
            kind = "slot"
        held.keys = held.keys[: len(held.places)]
        return kind

    def _give_places(self, held: AwaitingDisk) -> None:
        """What is not the cache's is free again; pages of its that were kept may go."""
        for pages in held.held:
            self._scheduler.life.job_pages[:] = [each for each in self._scheduler.life.job_pages if each is not pages]
        for pages in held.held[::-1]:
            self._cache.allocator.release(pages)
        if not held.held:
            for slot in self._cache.filling.intersection(held.places):
                self._cache.filling.discard(slot)
                self._cache.host.give(slot)
        held.places, held.held = (), ()

    def before_schedule(self, now: float) -> list[StepOutput]:
        """Give the engine those requests whose beginnings have come; what there is to tell of others."""
        if self._far is not None:
            self._far.look()
        self._ahead.settle()
        if not self._reading and not self._held:
            return []
        if not self._scheduler.requests:
            self._reader.wait(WAIT_S)
        outputs: list[StepOutput] = []
        over = [held for held in self._reading if held.fetch is not None and not held.fetch.num_left]
        for held in over:
            self._reading.remove(held)
            self.num_read += self._enter(held)
        done = {id(held) for held in over}
        for request, held in list(self._held.items()):
            is_over = id(held) in done or over and held.fetch is None and not self._begin(held)
            if is_over:
                outputs += self.release(request)
        return outputs + self.end_late(now)

    def _enter(self, held: AwaitingDisk) -> int:
        """What came becomes the prefix cache's; how many pages."""
        prefix, salt, tokens = self._cache.prefix, salt_of(held.options), held.compared
        fetch, count, page_bytes = held.fetch, 0, prefix.page_bytes
        assert fetch is not None
        nodes = prefix.match(salt, tokens, copies=False, whole=True).nodes
        chain = nodes[: held.here]
        # Pages that stood in front may have gone meanwhile.
        for index in range(min(fetch.sound, len(held.keys)) if len(chain) == held.here else 0):
            key, data = held.keys[index]
            parent = chain[-1] if chain else prefix.root(salt)
            is_whole = tokens.startswith(data, page_bytes * len(chain))
            session = self._session_of(key, held.options.session, is_whole)
            node = self._place(parent, data, held.places[index], session)
            if node is None:
                break
            node.is_filed = True
            if len(key) == KEY_BYTES:
                node.key = key
            chain.append(node)
            count += 1
        if held.state is not None:
            if fetch.sound < len(fetch.wanted):
                self._states.give(held.state)  # type: ignore[union-attr]
            elif self._states.enter(held.state, salt, chain, held.options.session):  # type: ignore[union-attr]
                self._use_key(held.state.kept.key)
        self._give_places(held)
        came = b"".join(data for _, data in held.keys[:count])
        num_common = common_tokens(tokens[page_bytes * held.here : -4], came)
        if num_common:
            self.num_hits += 1
            self.num_hit_tokens += num_common
            self._use_key(held.keys[count - 1][0])
        if self._far is not None and not fetch.is_cancelled and fetch.sound < len(fetch.wanted):
            self._files.forget(fetch.wanted[fetch.sound][0])  # a rank has not its part of it
        return count

    def _use_key(self, key: bytes) -> None:
        self._files.used(key)
        if self._far is not None:
            self._far.order("used", key=key)

    def _session_of(self, key: bytes, session: str, is_whole: bool) -> str:
        """What a page that a request brings is of alone. is_whole: the request has all of its tokens; else nobody goes on
        from it, and it goes with the session that wrote it."""
        wrote = self._files.session_of(key)
        return wrote if wrote == session or not is_whole else ""

    def _place(self, parent: TreeNode, data: bytes, place: int, session: str) -> TreeNode | None:
        """The node of a page that came behind `parent`, or of the one that has come otherwise. None where it cannot be."""
        prefix = self._cache.prefix
        if self._mover.can_fill_pages:
            return None if parent.depth and parent.page < 0 else prefix.enter(parent, data, place, session)
        there = parent.children.get(data)
        if there is not None:
            return there
        self._cache.filling.discard(place)
        return prefix.enter_host(parent, data, place, session)

    def stop(self, held: AwaitingDisk) -> None:
        """What was read of it until here is of use to others."""
        if held.fetch is not None:
            self._reader.cancel(held.fetch)

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self._held or self._reading)

    # -- the end

    def close(self) -> None:
        """Write what is in memory and has no file, for a few seconds at most."""
        deadline = time.monotonic() + self.close_s
        self._reader.close()  # pages are freed next
        try:
            if self._far is not None:
                self._far.look()  # raises where a rank has ended
            self._settle()
            for kept in self._kept(ends=True):
                if kept.is_filed:
                    continue
                while self.pending_bytes > MAX_PENDING_BYTES // 2 and time.monotonic() < deadline:
                    self._wait_for_writes()
                if time.monotonic() > deadline or self._writer.has_failed:
                    break
                self._file(kept)
            while self._far is not None and self._far.waiting_bytes and time.monotonic() < deadline:
                self._far.look(WAIT_S)
        except (DeviceError, GroupError) as error:
            log.warning("what is cached is not written to disk: %s", error)
        finally:
            self._writer.close(deadline)
            self._files.close()


def goes_on(params: Any, options: RequestOptions) -> bool:
    """Whether a request's prompt may go on from what files have: not yet where its images are not encoded."""
    is_placed = not options.images or isinstance(options.images[0], PlacedImage)
    return isinstance(params, (SamplingParams, BeamParams)) and is_placed
