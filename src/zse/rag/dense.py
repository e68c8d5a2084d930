"""A tenant's vectors of one model in memory, int8 with a scale a row, and exact search in them (kernels/dense_search.py).

Hidden states of a causal model lie in a narrow cone: their mean is longer than what tells one from another, and a few dimensions are
larger than all others. So each vector is standardised, (x - mean) / spread by dimension over the tenant's vectors (after Mu and
Viswanath, "All-but-the-top", 2018), then brought to length 1. Mean and spread are of the vectors that were there when the block was
read; it is read again when it has twice as many, or half of it is gone."""

import sqlite3
from collections.abc import Iterator

from zse.kernels import dense_search
from zse.lazy import numpy as np
from zse.rag import neighbours
from zse.runtime import buffer, cpu
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    import numpy

SEGMENT_ROWS = 1 << 14  # 9 MB of a small model's
SAMPLE_GROUPS = 1024  # stored groups that mean and spread are taken of
PRIOR = 8.0  # vectors that the mean of zero and an even spread count as: of one vector alone nothing would be left


class Scorer:
    """The CPU's kernels, opened when first used: a server that searches no vectors opens no device. ann_from: vectors of a tenant from
    which an approximate index answers (extra `ann`); 0: never. Raises DeviceError where no kernel is compiled."""

    def __init__(self, ann_from: int = 0):
        self.ann_from = ann_from
        self._device: cpu.CPUDevice | None = None

    @property
    def device(self) -> cpu.CPUDevice:
        if self._device is None:
            self._device = cpu.CPUDevice(1)
        return self._device


class Segment:
    """Up to `capacity` rows, in the order of storing. places i64 [capacity]: of their chunks, -1 of what is gone."""

    def __init__(self, scorer: Scorer, capacity: int, width: int):
        device = scorer.device
        self.count = 0
        self._buffers: list[buffer.Buffer] = []

        def made(dtype: str, *shape: int) -> tuple[Tensor, "numpy.ndarray"]:
            size = 1 if dtype == "i8" else 4
            memory = device.alloc(int(np.prod(shape)) * size, "vectors")
            self._buffers.append(memory)
            view = np.frombuffer(memory.view(), np.int8 if size == 1 else np.float32).reshape(shape)
            return Tensor(memory, shape, dtype), view

        rows, self.rows = made("i8", capacity, width)
        scales, self.scales = made("f32", capacity)
        query, self._query = made("i8", 1, width)
        factor, self._factor = made("f32", 1)
        out, self._out = made("f32", 1, capacity)
        self.documents, self.positions, self.places = (np.zeros(capacity, np.int64) for _ in range(3))
        recorder = device.record()
        dense_search.dense_search(recorder, rows, scales, query, factor, out)
        self._graph = recorder.finish()

    @property
    def room(self) -> int:
        return len(self.scales) - self.count

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._buffers) + 3 * self.places.nbytes

    def append(self, rows: "numpy.ndarray", scales: "numpy.ndarray", document: int, first: int) -> None:
        end = self.count + len(rows)
        into = slice(self.count, end)
        self.rows[into, : rows.shape[1]], self.scales[into] = rows, scales
        self.documents[into], self.positions[into] = document, np.arange(first, first + len(rows))
        self.count = end

    def scores(self, query: "numpy.ndarray", factor: float) -> "numpy.ndarray":
        """f32 [count], in the segment's memory."""
        self._query[0, : len(query)], self._factor[0] = query, factor
        self._graph.run()
        return self._out[0, : self.count]


class DenseBlock:
    """segments: of the model's vectors that the tenant has."""

    def __init__(self, model: str, scorer: Scorer):
        self.model, self.segments, self.width = model, list[Segment](), 0
        self._scorer = scorer
        self._last = self._num_read = 0  # id of the last stored group; vectors there when all were read
        self._mean = self._spread = np.zeros(0, np.float32)
        self._near: neighbours.Neighbours | None = None

    def __len__(self) -> int:
        return sum(segment.count for segment in self.segments)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments) + (self._near.nbytes if self._near else 0)

    def follow(self, connection: sqlite3.Connection, tenant: str, documents: "numpy.ndarray") -> None:
        """Be what the file says. documents i64 [chunks]: rows of the chunks' documents, ascending."""
        self._near = None
        if self.segments:
            self._append(connection, tenant)
        gone = self._place(documents)
        if len(self) >= 2 * self._num_read or 2 * gone > len(self):
            self.segments, self._last, self.width = [], 0, 0
            self._measure(connection, tenant)
            self._append(connection, tenant)
            self._num_read = len(self)
            self._place(documents)

    def scores(self, query: "numpy.ndarray", num_chunks: int, most: int, is_filtered: bool) -> "numpy.ndarray":
        """f32 [chunks]: cosines, -inf of chunks without a vector. query f32 [width]. An approximate index, where it is wanted and
        nothing is filtered, gives `most` chunks."""
        out = np.full(num_chunks, -np.inf, np.float32)
        if query.shape != (self.width,):
            return out
        rows, scales = self._quantized(query[None])
        if 0 < self._scorer.ann_from <= len(self) and not is_filtered:
            if self._near is None:
                self._near = neighbours.Neighbours(self.segments, self.width)
            places, cosines = self._near.search(rows[0] * scales[0], most)
            out[places] = cosines
            return out
        for segment in self.segments:
            cosines, places = segment.scores(rows[0], float(scales[0])), segment.places[: segment.count]
            out[places[places >= 0]] = cosines[places >= 0]
        return out

    def _groups(
        self, connection: sqlite3.Connection, tenant: str, most: int
    ) -> Iterator[tuple[int, int, int, "numpy.ndarray"]]:
        """(id, document, first position, vectors f32) of those after the last."""
        statement = "SELECT id, document, first, num, data FROM vectors WHERE tenant = ? AND model = ? AND id > ? ORDER BY id LIMIT ?"
        for id, document, first, num, data in connection.execute(statement, (tenant, self.model, self._last, most)):
            vectors = np.frombuffer(data, "<f2").astype(np.float32).reshape(num, -1)
            self.width = self.width or vectors.shape[1]
            if vectors.shape[1] == self.width:  # else the name stands for another model now
                yield id, document, first, vectors

    def _measure(self, connection: sqlite3.Connection, tenant: str) -> None:
        """Mean and spread by dimension, of vectors of length 1."""
        sample = [_units(vectors) for *_, vectors in self._groups(connection, tenant, SAMPLE_GROUPS)]
        if not sample:
            return
        count, total, squares = 0, np.zeros(self.width), np.zeros(self.width)
        for units in sample:
            count, total = count + len(units), total + units.sum(0, np.float64)
            squares += (units.astype(np.float64) ** 2).sum(0)
        mean = total / (count + PRIOR)
        variance = np.maximum(squares / count - (total / count) ** 2, 0)
        even = variance.mean()
        self._mean = mean.astype(np.float32)
        self._spread = np.sqrt((count * variance + PRIOR * even) / (count + PRIOR)).astype(np.float32) + np.float32(
            1e-9
        )

    def _append(self, connection: sqlite3.Connection, tenant: str) -> None:
        for id, document, first, vectors in self._groups(connection, tenant, -1):
            self._last = id
            rows, scales = self._quantized(vectors)
            at = 0
            while at < len(rows):
                if not self.segments or not self.segments[-1].room:
                    capacity = min(max(256, len(self), len(vectors)), SEGMENT_ROWS)
                    padded = -(-self.width // dense_search.STEP) * dense_search.STEP
                    self.segments.append(Segment(self._scorer, capacity, padded))
                taken = min(self.segments[-1].room, len(rows) - at)
                self.segments[-1].append(rows[at : at + taken], scales[at : at + taken], document, first + at)
                at += taken

    def _quantized(self, vectors: "numpy.ndarray") -> tuple["numpy.ndarray", "numpy.ndarray"]:
        """i8 [n, width] and their scales f32 [n], of standardised vectors of length 1."""
        units = _units((_units(vectors) - self._mean) / self._spread)
        scales = np.abs(units).max(axis=1) / np.float32(127) + np.float32(1e-30)
        return np.rint(units / scales[:, None]).astype(np.int8), scales

    def _place(self, documents: "numpy.ndarray") -> int:
        """Find the chunks of all rows; how many are gone."""
        gone = 0
        for segment in self.segments:
            wanted = segment.documents[: segment.count]
            start = np.searchsorted(documents, wanted)
            there = documents[np.minimum(start, len(documents) - 1)] == wanted if len(documents) else wanted < 0
            segment.places[: segment.count] = np.where(there, start + segment.positions[: segment.count], -1)
            gone += int((~there).sum())
        return gone


def _units(vectors: "numpy.ndarray") -> "numpy.ndarray":
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
