"""What a search has in memory of a tenant: one line a chunk, and its vectors. It follows the file: a chunk is never changed, so
that what is new is read, and what went is left out.

An `Indexes` belongs to one thread, as the connection that it reads."""

import sqlite3
from collections import OrderedDict
from typing import NamedTuple

from zse.lazy import numpy as np
from zse.rag.dense import DenseBlock, Scorer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import numpy

POSTING_BYTES = 32 << 20  # of words that were asked for, of one tenant
MAX_BYTES = 2 << 30  # of all tenants; those that were not searched longest go first


class Posting(NamedTuple):
    """places i64 [n] of the chunks that have a word; counts f32 [n]: how often."""

    places: "numpy.ndarray"
    counts: "numpy.ndarray"


class TenantIndex:
    """number: of the owner. changes: of the file, that it has. Arrays by place, in the order of ids: ids i64, documents i64 (rows),
    num_words i32, norms f32. dense: the vectors of one model, None before they were asked for.
    postings: of words that were asked for, until something changes; common: words that are in too many chunks to be read."""

    def __init__(self, number: int):
        self.number, self.changes = number, -1
        self.ids = np.zeros(0, np.int64)
        self.documents = np.zeros(0, np.int64)
        self.num_words = np.zeros(0, np.int32)
        self.norms = np.zeros(0, np.float32)
        self.mean_words = 0.0
        self.dense: DenseBlock | None = None
        self.postings: dict[str, Posting] = {}
        self.common: set[str] = set()
        self._posting_bytes = self._num_when_common = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        arrays = (self.ids, self.documents, self.num_words, self.norms)
        return self._posting_bytes + sum(array.nbytes for array in arrays) + (self.dense.nbytes if self.dense else 0)

    def follow(self, connection: sqlite3.Connection, tenant: str, changes: int) -> None:
        """Be what the file says."""
        if changes == self.changes:
            return
        live = _column(connection.execute("SELECT row FROM documents WHERE tenant = ?", (tenant,)))
        kept = np.isin(self.documents, live)
        if not kept.all():
            self.ids, self.documents = self.ids[kept], self.documents[kept]
            self.num_words, self.norms = self.num_words[kept], self.norms[kept]
        last = int(self.ids[-1]) if len(self.ids) else 0
        statement = "SELECT id, document, num_words, norm FROM chunks WHERE tenant = ? AND id > ? ORDER BY id"
        if rows := connection.execute(statement, (tenant, last)).fetchall():
            ids, documents, num_words, norms = zip(*rows, strict=True)
            self.ids = np.append(self.ids, np.array(ids, np.int64))
            self.documents = np.append(self.documents, np.array(documents, np.int64))
            self.num_words = np.append(self.num_words, np.array(num_words, np.int32))
            self.norms = np.append(self.norms, np.array(norms, np.float32))
        self.postings, self._posting_bytes = {}, 0
        if not self._num_when_common <= len(self.ids) <= 2 * self._num_when_common:
            self.common, self._num_when_common = set(), len(self.ids)
        self.mean_words = float(self.num_words.mean()) if len(self.ids) else 0.0
        if self.dense is not None:
            self.dense.follow(connection, tenant, self.documents)
        self.changes = changes

    def keep(self, word: str, posting: Posting) -> None:
        """For the next question with this word."""
        size = posting.places.nbytes + posting.counts.nbytes + 200
        if self._posting_bytes + size > POSTING_BYTES:
            self.postings, self._posting_bytes = {}, 0
        self.postings[word] = posting
        self._posting_bytes += size

    def vectors(self, connection: sqlite3.Connection, tenant: str, model: str, scorer: Scorer) -> DenseBlock:
        """The model's, read now if they were not."""
        if self.dense is None or self.dense.model != model:
            block = DenseBlock(model, scorer)
            block.follow(connection, tenant, self.documents)
            self.dense = block
        return self.dense


class Indexes:
    """max_bytes: of all tenants together, the one that was searched last excepted. ann_from: of Scorer."""

    def __init__(self, max_bytes: int = MAX_BYTES, ann_from: int = 0):
        self.max_bytes, self.scorer = max_bytes, Scorer(ann_from)
        self._of: OrderedDict[str, TenantIndex] = OrderedDict()

    def of(self, connection: sqlite3.Connection, tenant: str) -> TenantIndex | None:
        """The tenant's, as the file is now; None: it has stored nothing yet."""
        found = connection.execute("SELECT number, changes FROM owners WHERE tenant = ?", (tenant,)).fetchone()
        if found is None:
            return None
        index = self._of.get(tenant)
        if index is None:
            index = self._of[tenant] = TenantIndex(found[0])
        self._of.move_to_end(tenant)
        index.follow(connection, tenant, found[1])
        return index

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self._of.values())

    def make_room(self) -> None:
        """Let go of tenants until all fit; the last one that was asked for stays."""
        while len(self._of) > 1 and self.nbytes > self.max_bytes:
            self._of.popitem(last=False)


def _column(rows) -> "np.ndarray":
    return np.fromiter((value for (value,) in rows), np.int64)
