"""Cold pages in files of ranks that have pages of their own (attention data parallel, docs/design/0011-several-devices.md): a tier of
each rank, all on rank 0.

A rank's pages are written to its own files, and read from there to its own pages. Rank 0 has a list of what the others have in files,
and a request goes to the rank that has the fewest pages in use with it, those not counted that the rank has of its prompt in memory
or files; what is read there is admitted there."""

import time
from collections import ChainMap, deque
from typing import Any

import msgspec

from zse.cache.divided import DividedCache
from zse.cache.eviction import TreeNode
from zse.cache.files import PageFiles
from zse.cache.page_index import PageIndex
from zse.cache.prefix import common_tokens
from zse.cache.segments import CONTENT, KEY_BYTES, SESSION, PageRecord, RecordFile
from zse.engine.disk_reads import AwaitingDisk
from zse.engine.disk_writes import DiskWriter
from zse.engine.offload import CLOSE_S, DiskTier, goes_on
from zse.engine.rank_files import FilesThere, RankFiles
from zse.engine.rank_messages import FilesDone, OfFiles
from zse.scheduler.batch import Batch, StepOutput
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions
from zse.scheduler.request import salt_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.cache.prefix import Salt


class FarIndex(PageIndex):
    """What another rank has in files, as a DiskTier asks its PageFiles: `there` when it started, then what it was told to write, without
    what it says has left. files: rank 0's, which make all keys."""

    def __init__(self, files: PageFiles, there: FilesThere):
        super().__init__()
        self.root, self._said = files.root, there.counters
        for key, parent, tokens, session in there.records:
            self.write(key, parent, b"", session, there.sessions.get(session, 0.0), tokens)

    def write(
        self, key: bytes, parent: bytes, content: bytes, session: str = "", expires: float = 0.0, tokens: bytes = b""
    ) -> None:
        """As PageFiles: the rank has written it. What is of no session stands together."""
        with self._lock:
            file = self._files.get(session) or RecordFile(session)
            if session:
                file.expires = max(file.expires, expires)
            self._enter(file, PageRecord(CONTENT, key, parent, 0, 0, 0, tokens=tokens))

    def extend(self, session: str, expires: float) -> None:
        """As PageFiles."""
        with self._lock:
            if session in self._files:
                self._enter(self._files[session], PageRecord(SESSION, b"", bytes(KEY_BYTES), 0, 0, 0, expires))

    def drop_session(self, session: str) -> None:
        """What others go on from stays, and is nobody's; the rank says what does not."""
        with self._lock:
            if session in self._files:
                self._files[session].expires = 0.0

    def tidy(self, now: float) -> None:
        """Sessions that have ended: as drop_session()."""
        with self._lock:
            for file in self._files.values():
                if 0 < file.expires <= now:
                    file.expires = 0.0

    def used(self, key: bytes) -> None:
        """Nothing: the rank, which is told, decides what goes."""

    def forget(self, key: bytes) -> None:
        """It is not there, or not sound."""
        with self._lock:
            if key in self._at:
                file = self._at[key][0]
                self._leave(key)
                if not file.keys:
                    self._forget(file)

    def counters(self) -> dict[str, float]:
        """What the rank says: FarFiles has it."""
        return {}

    def close(self) -> None:
        """Nothing: they are the rank's."""


class FarFiles(RankFiles):
    """The files of one other rank, which alone has what is in them. files: a FarIndex."""

    has_part = False

    def sums(self, counters: dict[str, float]) -> dict[str, float]:
        return dict(next(iter(self._counters.values())))


class RankLink:
    """The Leader as the files of rank `rank` alone see it."""

    def __init__(self, leader: Any, rank: int):
        self._leader, self._rank, self.group = leader, rank, leader.group

    @property
    def answers(self) -> dict[int, deque[FilesDone]]:
        return self._leader.answers

    def order(self, message: OfFiles) -> None:
        self._leader.order(message, self._rank)

    def listen(self, seconds: float) -> None:
        self._leader.listen(seconds)


class RankPlaces:
    """A RankMover with the transfers of one rank. Everything else is the mover's: places are rank 0's."""

    def __init__(self, mover: Any, rank: int):
        self._mover, self._rank = mover, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def run(self, transfers: list[tuple[str, int, int]]) -> None:
        self._mover.run([(f"{kind}@{self._rank}", source, target) for kind, source, target in transfers])


class RankTier(DiskTier):
    """The DiskTier of rank `rank`, a part of `whole`, over its part of the cache. files: rank 0's own, or a FarIndex with `far`."""

    def __init__(
        self, whole: Feature, rank: int, engine: Any, mover: Any, files: Any, far: FarFiles | None, writer: DiskWriter
    ):
        super().__init__(engine, RankPlaces(mover, rank), files, far, writer, engine.scheduler.cache.parts[rank])
        self.part_of, self.rank, self.out = whole, rank, f"out@{rank}"

    def _place(self, parent: TreeNode, data: bytes, place: int, session: str) -> TreeNode | None:
        if not self._mover.can_fill_pages:
            self._mover.fill_history(self.rank, place, data)
        return super()._place(parent, data, place, session)

    def reach(self, salt: "Salt", tokens: bytes) -> int:
        """How many of the tokens are in memory or files."""
        matched, nodes, parent, keys = self._known(salt, tokens)
        keys += self._end_behind(parent, keys, tokens, len(nodes), matched.length)
        here = self._cache.prefix.page_bytes * len(nodes)
        return max(matched.length, here // 4 + common_tokens(tokens[here:-4], b"".join(data for _, data in keys)))

    @property
    def has_files(self) -> bool:
        return len(self._files) > 0

    @property
    def num_ahead(self) -> int:
        """Tokens that the pages could hold to which is read what nobody has asked for."""
        return self._cache.page_size * self._ahead.num_pages

    @property
    def held(self) -> dict[int, Any]:
        """Requests that wait here, by id."""
        return self._held


class DividedDisk(Feature):
    """The tiers of all ranks. engine: its cache is a DividedCache. files: rank 0's; others: of the others when they started."""

    def __init__(self, engine: Any, mover: Any, files: PageFiles, ranks: Any, others: dict[int, FilesThere]):
        self._scheduler, self._cache = engine.scheduler, engine.scheduler.cache
        assert isinstance(self._cache, DividedCache)
        self.tiers = [RankTier(self, 0, engine, mover, files, None, DiskWriter())]
        for rank, there in others.items():
            index, writer = FarIndex(files, there), DiskWriter()
            far = FarFiles(index, mover, RankLink(ranks, rank), {rank: there}, writer)
            self.tiers.append(RankTier(self, rank, engine, mover, index, far, writer))

    def read_ahead(self) -> None:
        """As DiskTier: each rank's last session."""
        for tier in self.tiers:
            tier.read_ahead()

    def before_submit(self, id: int, prompt: list[int], params: Any, options: RequestOptions) -> bool:
        """As DiskTier, on the rank that DividedCache.admit() would choose if all that files have were in memory."""
        if not goes_on(params, options):
            return False
        if options.session:
            for tier in self.tiers:
                tier.use_session(options.session, options.session_ttl)
        if not any(tier.has_files for tier in self.tiers):
            return False
        held = [tier.held for tier in self.tiers]
        self._scheduler.check_room(id, ChainMap(*held), sum(map(len, held)))
        salt, tokens = salt_of(options), AwaitingDisk(prompt, params, options, 0.0).compared
        tier = min(self.tiers, key=lambda tier: self._cache.load(tier.rank, tier.reach(salt, tokens) + tier.num_ahead))
        return tier.hold(id, prompt, params, msgspec.structs.replace(options, rank=tier.rank))

    def before_schedule(self, now: float) -> list[StepOutput]:
        return [output for tier in self.tiers for output in tier.before_schedule(now)]

    def before_run(self, batch: Batch) -> None:
        for tier in self.tiers:
            tier.before_run(batch)

    def after_commit(self, batch: Batch, seconds: float) -> None:
        for tier in self.tiers:
            tier.after_commit(batch, seconds)

    def idle(self, now: float) -> bool:
        return any([tier.idle(now) for tier in self.tiers])

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return any(tier.has_work for tier in self.tiers)

    @property
    def pending_bytes(self) -> int:
        """Of what waits to be written."""
        return sum(tier.pending_bytes for tier in self.tiers)

    def cancel(self, id: int) -> bool:
        return any(tier.cancel(id) for tier in self.tiers)

    def drop_session(self, session: str) -> None:
        for tier in self.tiers:
            tier.drop_session(session)

    def num_computed(self, id: int) -> int | None:
        return 0 if any(id in tier.held for tier in self.tiers) else None

    def counters(self) -> dict[str, float]:
        """Of all ranks together."""
        each = [tier.counters() for tier in self.tiers]
        return {name: sum(counters[name] for counters in each) for name in each[0]}

    def close(self) -> None:
        """As DiskTier, within the time of one: each rank may take its share, and what is left of those before it."""
        began = time.monotonic()
        for number, tier in enumerate(self.tiers[::-1], 1):
            tier.close_s = CLOSE_S * number / len(self.tiers) - (time.monotonic() - began)
            tier.close()
