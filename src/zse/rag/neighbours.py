"""Approximate nearest neighbours for many vectors, by usearch (`pip install 'zse[ann]'`): HNSW (Malkov and Yashunin, 2016)."""

from importlib import import_module
from typing import Any

from zse.errors import ConfigError
from zse.lazy import numpy as np

TYPE_CHECKING = False
if TYPE_CHECKING:
    import numpy


class Neighbours:
    """Of the rows of segments (rag/dense.py) that are not gone; made anew when they change. Raises ConfigError: usearch is not
    installed."""

    def __init__(self, segments: list, width: int):
        self._index = _module().Index(ndim=width, metric="ip", dtype="i8", connectivity=16)
        for segment in segments:
            places = segment.places[: segment.count]
            alive = places >= 0
            rows = segment.rows[: segment.count, :width][alive] * segment.scales[: segment.count, None][alive]
            self._index.add(places[alive], rows.astype(np.float32))

    @property
    def nbytes(self) -> int:
        return self._index.memory_usage

    def search(self, query: "numpy.ndarray", most: int) -> tuple["numpy.ndarray", "numpy.ndarray"]:
        """(places i64, cosines f32) of about the nearest, query f32 [width] of length 1."""
        found = self._index.search(query.astype(np.float32), most)
        return found.keys.astype(np.int64), (1 - found.distances).astype(np.float32)


def _module() -> Any:
    try:
        return import_module("usearch.index")
    except ImportError:
        raise ConfigError("an approximate index needs usearch: pip install 'zse[ann]'") from None
