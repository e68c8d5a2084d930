"""The session that was used last, read from files before anybody asks for it: when an engine is ready a thread begins to bring
its pages into memory, while no request runs, so that the user who goes on waits for what is left at most.

Files say no tenant's name: what came stands in the prefix cache under a root of its own, which no request's salt can be
equal to, until one comes whose root has the key in files, and that begins alike; then it is under that request's. Until then its pages are the first
to go when others need some, and go like all idle ones when nobody comes (engine/idle_memory.py)."""

from itertools import takewhile
from typing import Any

from zse.cache.eviction import TreeNode
from zse.cache.files import KEY_BYTES
from zse.cache.prefix import common_tokens
from zse.engine.disk_reads import AwaitingDisk, DiskFetch, DiskReader
from zse.scheduler.options import RequestOptions
from zse.scheduler.request import salt_of

# Requests that come meanwhile have the other pages.
MOST_PAGES = 1 / 2
UNCLAIMED = ("read ahead",)  # a salt; those of requests have two parts or more


class SessionAhead:
    """Of a device whose pages the host may write, for models whose pages are all that a prompt goes on from; of others nothing
    is read. num_read: pages that came, but those that a request has claimed."""

    def __init__(self, scheduler, cache, mover, files: Any, reader: DiskReader):
        self._life, self._cache, self._mover = scheduler.life, cache, mover
        self._files, self._reader, self._requests = files, reader, scheduler.requests
        self.num_read = 0
        # Key of the root, tokens of the first page, while anything is read or unclaimed.
        self._root, self._begins = b"", b""
        self._has_waited = False  # whether a request waited when settle() was last called
        self._held: AwaitingDisk | None = None
        self._came: list[tuple[bytes, TreeNode]] = []

    def begin(self) -> None:
        """Have the pages read, once: nobody has asked for any yet."""
        cache = self._cache
        if not self._mover.can_fill_pages or cache.states is not None or cache.grouped is not None:
            return
        root, keys = self._files.last_session()
        most = min(int(MOST_PAGES * cache.allocator.num_pages), cache.allocator.num_empty)
        pages = cache.page_list(cache.allocator.allocate(min(len(keys), most)) or ())
        if not pages:
            return
        self._mover.run(cache.take_transfers())  # what was in them may be on its way to the host
        session = self._files.session_of(keys[-1][0])
        held = self._hold(AwaitingDisk([], None, RequestOptions(session=session), 0.0), keys[: len(pages)], pages)
        self._held, self._root, self._begins = held, root, keys[0][1]
        self._reader.add(held.fetch, is_ahead=True)  # type: ignore[arg-type]

    def _hold(self, held: AwaitingDisk, keys: list[tuple[bytes, bytes]], pages: list[int]) -> AwaitingDisk:
        """Let it hold pages, which it was given, for the content of these keys."""
        held.keys, held.places, held.held = tuple(keys), tuple(pages), (pages,)
        held.fetch = DiskFetch([(key, (("page", page),)) for (key, _), page in zip(keys, pages, strict=True)])
        self._life.job_pages += held.held
        return held

    def settle(self) -> None:
        """What came, where all is read, is cached, unclaimed. While requests run nothing is read: a machine whose host gives memory
        back slowly has a processor less for milliseconds at a time, which each layer of a step would wait for. A request that is
        left waiting by a step may need the pages: what was not read by then is given up."""
        held = self._held
        if held is None or held.fetch is None:
            return
        waits = self._life.queue.num_waiting > 0
        if waits and self._has_waited and not held.fetch.is_cancelled:
            self._reader.cancel(held.fetch)
            self._reader.hurry()  # which reads nothing any more, and ends
        self._has_waited = waits
        self._reader.pause(bool(self._requests))
        if held.fetch.num_left:
            return
        self._held, prefix, parent = None, self._cache.prefix, None
        for (key, data), page in zip(held.keys[: held.fetch.sound], held.places, strict=False):
            parent = parent or prefix.root(UNCLAIMED)
            parent = prefix.enter(parent, data, page, self._files.session_of(key))
            assert parent is not None  # nothing else stands there
            parent.is_filed = True
            if len(key) == KEY_BYTES:
                parent.key = key
            self._came.append((key, parent))
        self.num_read += len(self._came)
        self._give(held)
        if parent is None:
            self._root = b""
        else:
            prefix.eviction.expose(parent.account)

    def _give(self, held: AwaitingDisk) -> None:
        (pages,), held.held = held.held, ()
        self._life.job_pages[:] = [each for each in self._life.job_pages if each is not pages]
        self._cache.allocator.release(pages)

    @property
    def num_pages(self) -> int:
        """Pages that are kept for what is read, which nobody has asked for."""
        return len(self._held.places) if self._held is not None else 0

    def claim(self, asked: AwaitingDisk) -> list[AwaitingDisk]:
        """A request comes: where this is its tenant's and salt's, and begins as its prompt does, it becomes a reading of the
        request's own, which is over or under way; else []."""
        self.settle()
        is_its = self._root and self._root == self._files.root(salt_of(asked.options))
        if not is_its or not common_tokens(asked.compared, self._begins):
            return []
        held, self._held, self._root = self._held, None, b""
        if held is not None:
            held.prompt, held.params, held.options = asked.prompt, asked.params, asked.options
            self._reader.hurry()
            return [held]
        # Some have gone meanwhile, perhaps: those behind first.
        came = list(takewhile(lambda each: each[1].alive and each[1].page >= 0, self._came))
        self._came = []
        if not came:
            return []
        pages = self._cache.page_list(node.page for _, node in came)
        self._cache.allocator.retain(pages)
        self._cache.prefix.withdraw(pages)
        self.num_read -= len(pages)  # they are counted with the request
        keys = [(key, node.tokens) for key, node in came]
        again = self._hold(AwaitingDisk(asked.prompt, asked.params, asked.options, asked.since), keys, pages)
        again.fetch.num_left = 0  # type: ignore[union-attr]
        return [again]

    def drop(self, session: str) -> None:
        """The session was removed. (What is cached of it has gone.)"""
        if self._held is not None and self._held.options.session == session:
            self._held.keys = ()
            self._reader.cancel(self._held.fetch)  # type: ignore[arg-type]
