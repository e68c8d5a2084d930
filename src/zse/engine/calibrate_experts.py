"""What the experts of a layer read on a text, for a conversion that rounds each by its own inputs
(zse.engine.calibrate).

Kept are the inputs themselves, so that H of one expert at a time is in memory, however many there are: 4 bytes for each
token and column that gate and up read, and for each pair of a token and one of its experts and column that down reads.
With Qwen3-30B-A3B's sizes and 16,384 tokens that is 134 + 403 MB a layer."""

import re
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from zse.models.weight_plan import MatrixPlan
from zse.quant import gptq

MAX_KEPT_BYTES = 512 << 20  # of what experts' inputs were inverted to, for the next matrix that reads them
_SLICE = re.compile(r"(.*)\[(\d+)\](?: part (\d+))?")


class ExpertInputs:
    """Inputs of one product of experts. gather: a row a token, of which each expert reads those sent to it; else a row
    a pair, sorted by expert."""

    def __init__(self, gather: bool):
        self._gather = gather
        self._rows: list[NDArray] = []
        self._ids: list[NDArray] = []
        self._whole: NDArray | None = None  # H of all tokens
        self._kept: OrderedDict[int, gptq.Inputs] = OrderedDict()

    def add(self, x: NDArray, ids: NDArray) -> None:
        """x f32 [tokens or pairs, K]; ids i32 [tokens, k], the experts of each token. Both are kept: copies."""
        self._rows.append(x)
        self._ids.append(ids)

    def of(self, expert: int) -> gptq.Inputs | None:
        """What is known of one expert's inputs; None where no token was sent to it and nothing else speaks for it."""
        found = self._kept.get(expert)
        if found is None:
            squares = self._squares(expert)
            if squares is None:
                return None
            found = self._kept[expert] = gptq.inputs_of(squares)
            while sum(each.upper.nbytes for each in self._kept.values()) > MAX_KEPT_BYTES and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return found

    def _squares(self, expert: int) -> NDArray | None:
        """H = X'X of the rows that are the expert's, and as many more as there are columns: tokens of the layer (gate
        and up), or the rows' own mean squares without what goes together in them (down, whose columns mean other things
        in each expert). Without these, few rows would have their chance companies followed, and in directions that none
        of them has H knows nothing."""
        x = np.concatenate([self._of_chunk(x, ids, expert) for x, ids in zip(self._rows, self._ids, strict=True)])
        count, columns = x.shape
        squares = x.T @ x
        if self._gather:
            if self._whole is None:
                self._whole = sum((rows.T @ rows for rows in self._rows[1:]), self._rows[0].T @ self._rows[0])
            return squares + np.float32(columns / sum(map(len, self._rows))) * self._whole
        squares[np.diag_indices(columns)] *= np.float32(1 + columns / max(count, 1))
        return squares if count else None

    def _of_chunk(self, x: NDArray, ids: NDArray, expert: int) -> NDArray:
        if self._gather:
            return x[(ids == expert).any(axis=1)]
        begin = int((ids < expert).sum())
        return x[begin : begin + int((ids == expert).sum())]


def experts_of(matrices: Iterable[MatrixPlan]) -> dict[str, int]:
    """Which expert each part of a stack is: the roles of a matrix list theirs in order."""
    found: dict[str, int] = {}
    for matrix in matrices:
        counts: dict[str, int] = {}
        for part in matrix.parts:
            if part.role.experts:
                found[part.info.name] = counts.get(part.role.name, 0)
                counts[part.role.name] = found[part.info.name] + 1
    return found


def stacks_of(matrices: Iterable[MatrixPlan]) -> dict[str, tuple[int, list[str]]]:
    """Tensors that hold all experts → (rows of a part, the names of the parts in their order)."""
    found: dict[str, list[tuple[int, int, int, str]]] = {}
    for matrix in matrices:
        for part in matrix.parts:
            sliced = _SLICE.fullmatch(part.info.name) if part.role.experts else None
            if sliced is not None:
                at = int(sliced[2]), int(sliced[3] or 0), part.info.shape[0], part.info.name
                found.setdefault(sliced[1], []).append(at)
    return {name: (parts[0][2], [part[3] for part in sorted(parts)]) for name, parts in found.items()}
