"""Round-to-nearest quantization onto affine groups, with clipping chosen by squared error.

Per group: start from the range [min, max]; try the range shrunk by each of SHRINK and keep the one with the smallest
squared error (rounding of scale and offset to f16 included); then refit scale and offset to the chosen integers by
least squares, as ggml's make_qkx2_quants does, and keep what is better. 8-bit groups take the plain range: clipping
cannot pay when a step is 1/255 of it.

This is the reference of kernels that give the same bits (zse.kernels.repack_checkpoint, zse.kernels.gpu.repack): every
operation is one of f32, rounded by itself, and a sum adds the numbers of a group one after the other, from the first
on."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SHRINK = (1.0, 0.93, 0.86, 0.78)  # eight steps are 0.1 % better and cost twice the time
REFITS = 2
F16_MAX = 65504.0
_CHUNK_ELEMENTS = 1 << 17  # about 5 f32 temporaries of this stay in a 2-4 MB L2 cache
MIN_COLUMNS = 128  # groups that NumPy gets at once, where a group is a whole row
# Many threads wait for each other between short NumPy calls (the interpreter's lock): 16 of them quantize 88 million
# elements a second in pieces of 2**17, 336 million in pieces of 2**20; one does 42 in the former.
MANY_THREADS_ELEMENTS = 1 << 20


class _Trial(NamedTuple):
    """q f32 [size, n] of n groups, scale f16 [n], offset f16 [n] or None, squared error f32 [n], None where nobody
    asks."""

    q: NDArray
    scale: NDArray
    offset: NDArray | None
    error: Any


def quantize(
    w: NDArray, scheme: Any, *, search: bool = True, at_once: int = _CHUNK_ELEMENTS
) -> tuple[NDArray, NDArray, NDArray | None]:
    """f32 [N, K] -> what the nearest AffineArrays of an AffineScheme are made of: (q, scale, offset). search False:
    plain min-max ranges. at_once: elements that NumPy gets in one call (see MANY_THREADS_ELEMENTS). ValueError for NaN,
    infinities, or values whose scale or offset does not fit in f16."""
    n, k = w.shape
    groups = scheme.groups(k)
    q = np.empty((n, k), np.uint8)
    scale = np.empty((n, groups), np.float16)
    offset = None if scheme.symmetric else np.empty((n, groups), np.float16)
    step = max(1, at_once // k, MIN_COLUMNS // groups)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        block = np.ascontiguousarray(w[rows], np.float32)
        peak = np.abs(block).max(initial=0)
        if not peak <= F16_MAX:
            reason = f"the value {peak} does not fit in f16" if np.isfinite(peak) else "a value is NaN or infinite"
            raise ValueError(reason)
        count = len(block) * groups
        columns = block.reshape(count, k // groups).T
        if count == 1:  # NumPy adds along a single column in another order
            columns = np.repeat(columns, 2, axis=1)
        best = quantize_groups(np.ascontiguousarray(columns), scheme, search)
        q[rows] = best.q.T[:count].reshape(-1, k)
        scale[rows] = best.scale[:count].reshape(-1, groups)
        if offset is not None and best.offset is not None:
            offset[rows] = best.offset[:count].reshape(-1, groups)
    return q, scale, offset


def _total(values: NDArray) -> NDArray:
    """[size, n] → [n]: added one row after the other, as NumPy does along the outer axis where n > 1."""
    return np.add.reduce(values, axis=0)


def quantize_groups(w: NDArray, scheme: Any, search: bool, weight: NDArray | None = None) -> _Trial:
    """The best trial for n groups, w f32 [size, n]. weight: f32 [size], what each column's squared error counts
    (default: 1)."""
    search = search and scheme.bits < 8
    steps = np.float32((1 << scheme.bits) - 1)
    half = np.float32(1 << (scheme.bits - 1))
    # + 0: of two zeros that differ in sign either may be the largest.
    high, low = w.max(axis=0) + np.float32(0), w.min(axis=0) + np.float32(0)
    if scheme.symmetric:
        # The code -half is used for the extreme of either sign, by a scale of that sign: 8 bits then need -127 .. 127.
        extreme = np.where(-low >= high, low, high)
        ranges = [np.abs(extreme) / (half - 1), extreme / -half] if search else [np.abs(extreme) / (half - 1)]
        candidates = [
            (np.float32(shrink) * scale, -half * np.float32(shrink) * scale)
            for scale in ranges
            for shrink in (SHRINK if search else SHRINK[:1])
        ]
    else:
        middle, reach = (high + low) / 2, (high - low) / 2
        candidates = []
        for shrink in SHRINK if search else SHRINK[:1]:
            candidates.append((np.float32(2 * shrink) * reach / steps, middle - np.float32(shrink) * reach))
    rows = None if weight is None else weight[:, None]
    trials = (_round(w, scale, offset, steps, half, scheme.symmetric, search, rows) for scale, offset in candidates)
    best = next(trials)
    for trial in trials:
        best = _better(best, trial)
    for _ in range(REFITS if search else 0):
        found = _refit(w, best.q, half, scheme.symmetric, rows)
        best = _better(best, _round(w, *found, steps, half, scheme.symmetric, True, rows))
    return best


def _round(w, scale, offset, steps, half, symmetric, with_error=True, weight=None) -> _Trial:
    """The trial that wanted scales and offsets lead to."""
    scale16 = scale.astype(np.float16)
    wide = scale16.astype(np.float32)
    if symmetric:
        offset16, base = None, -half * wide
    else:
        offset16 = np.clip(offset, -F16_MAX, F16_MAX).astype(np.float16)
        base = offset16.astype(np.float32)
    inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
    # A subnormal scale has an infinite inverse in f32 only below 2**-126, which f16 cannot hold.
    q = w - base
    q *= inverse
    np.rint(q, out=q)
    np.clip(q, 0, steps, out=q)
    if not with_error:
        return _Trial(q, scale16, offset16, None)
    error = wide * q
    np.subtract(w, error, out=error)
    error -= base
    error *= error
    if weight is not None:
        error *= weight
    return _Trial(q, scale16, offset16, _total(error))


def _refit(w: NDArray, q: NDArray, half, symmetric: bool, weight: NDArray | None = None) -> tuple[NDArray, NDArray]:
    """Scale and offset that fit w to the integers q with the least squared error."""
    size = np.float32(len(w)) if weight is None else _total(weight)

    def weighted(values: NDArray) -> NDArray:
        return values if weight is None else values * weight

    mean_q = half if symmetric else _total(weighted(q)) / size
    centred = q - mean_q
    product = weighted(w * centred)
    centred = weighted(centred * centred)
    square = _total(centred)
    scale = np.divide(_total(product), square, out=np.zeros_like(square), where=square > 0)
    return scale, scale if symmetric else _total(weighted(w)) / size - scale * mean_q


def _better(best: _Trial, new: _Trial) -> _Trial:
    """Group by group, the trial with the smaller error."""
    take = new.error < best.error
    offset = None if best.offset is None or new.offset is None else np.where(take, new.offset, best.offset)
    return _Trial(
        np.where(take, new.q, best.q),
        np.where(take, new.scale, best.scale),
        offset,
        np.where(take, new.error, best.error),
    )
