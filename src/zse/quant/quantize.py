"""Round-to-nearest quantization onto affine groups, with clipping chosen by squared error.

Per group: start from the range [min, max]; try the range shrunk by each of SHRINK and keep the one with the smallest
squared error (rounding of scale and offset to f16 included); then refit scale and offset to the chosen integers by
least squares, as ggml's make_qkx2_quants does, and keep what is better. 8-bit groups take the plain range: clipping
cannot pay when a step is 1/255 of it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SHRINK = (1.0, 0.93, 0.86, 0.78)  # eight steps are 0.1 % better and cost twice the time
REFITS = 2
F16_MAX = 65504.0
# q f32 [n, groups, size], scale f16 [n, groups, 1], offset f16 [n, groups, 1] or None, squared error [n, groups, 1]
_Trial = tuple[NDArray, NDArray, NDArray | None, NDArray]
_CHUNK_ELEMENTS = 1 << 17  # about 5 f32 temporaries of this stay in a 2-4 MB L2 cache
# Many threads wait for each other between short NumPy calls (the interpreter's lock): 16 of them quantize 88 million
# elements a second in pieces of 2**17, 336 million in pieces of 2**20; one does 42 in the former.
MANY_THREADS_ELEMENTS = 1 << 20


def quantize(
    w: NDArray, scheme: Any, *, search: bool = True, at_once: int = _CHUNK_ELEMENTS
) -> tuple[NDArray, NDArray, NDArray | None]:
    """f32 [N, K] -> what the nearest AffineArrays of an AffineScheme are made of: (q, scale, offset). search False: plain min-max ranges. at_once: elements that NumPy gets in
    one call (see MANY_THREADS_ELEMENTS). ValueError for NaN, infinities, or values whose scale or offset does not fit
    in f16."""
    n, k = w.shape
    groups = scheme.groups(k)
    q = np.empty((n, k), np.uint8)
    scale = np.empty((n, groups), np.float16)
    offset = None if scheme.symmetric else np.empty((n, groups), np.float16)
    step = max(1, at_once // k)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        block = np.ascontiguousarray(w[rows], np.float32).reshape(-1, groups, k // groups)
        peak = np.abs(block).max(initial=0)
        if not peak <= F16_MAX:
            reason = f"the value {peak} does not fit in f16" if np.isfinite(peak) else "a value is NaN or infinite"
            raise ValueError(reason)
        got_q, got_scale, got_offset, _ = _quantize_groups(block, scheme, search and scheme.bits < 8)
        q[rows], scale[rows] = got_q.reshape(-1, k), got_scale[..., 0]
        if offset is not None and got_offset is not None:
            offset[rows] = got_offset[..., 0]
    return q, scale, offset


def _quantize_groups(w: NDArray, scheme: Any, search: bool) -> _Trial:
    """The best trial for w f32 [n, groups, size]."""
    steps = np.float32((1 << scheme.bits) - 1)
    half = np.float32(1 << (scheme.bits - 1))
    if scheme.symmetric:
        # The code -half is used for the extreme of either sign, by a scale of that sign: 8 bits then need -127 .. 127.
        high, low = w.max(axis=2, keepdims=True), w.min(axis=2, keepdims=True)
        extreme = np.where(-low >= high, low, high)
        ranges = [np.abs(extreme) / (half - 1), extreme / -half] if search else [np.abs(extreme) / (half - 1)]
        candidates = [
            (np.float32(shrink) * scale, -half * np.float32(shrink) * scale)
            for scale in ranges
            for shrink in (SHRINK if search else SHRINK[:1])
        ]
    else:
        high, low = w.max(axis=2, keepdims=True), w.min(axis=2, keepdims=True)
        middle, reach = (high + low) / 2, (high - low) / 2
        candidates = []
        for shrink in SHRINK if search else SHRINK[:1]:
            candidates.append((np.float32(2 * shrink) * reach / steps, middle - np.float32(shrink) * reach))
    trials = (_round(w, scale, offset, steps, half, scheme.symmetric) for scale, offset in candidates)
    best = next(trials)
    for trial in trials:
        best = _better(best, trial)
    for _ in range(REFITS if search else 0):
        best = _better(best, _round(w, *_refit(w, best[0], half, scheme.symmetric), steps, half, scheme.symmetric))
    return best


def _round(w, scale, offset, steps, half, symmetric) -> _Trial:
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
    q = np.clip(np.rint((w - base) * inverse), 0, steps)
    error = w - wide * q
    error -= base
    return q, scale16, offset16, np.einsum("abc,abc->ab", error, error)[..., None]


def _refit(w: NDArray, q: NDArray, half, symmetric: bool) -> tuple[NDArray, NDArray]:
    """Scale and offset that fit w to the integers q with the least squared error."""
    if symmetric:
        centred = q - half
        square = (centred * centred).sum(axis=2, keepdims=True)
        scale = np.divide((w * centred).sum(axis=2, keepdims=True), square, out=np.zeros_like(square), where=square > 0)
        return scale, scale
    mean_q, mean_w = q.mean(axis=2, keepdims=True), w.mean(axis=2, keepdims=True)
    centred = q - mean_q
    square = (centred * centred).sum(axis=2, keepdims=True)
    scale = np.divide((w * centred).sum(axis=2, keepdims=True), square, out=np.zeros_like(square), where=square > 0)
    return scale, mean_w - scale * mean_q


def _better(best: _Trial, new: _Trial) -> _Trial:
    """Group by group, the trial with the smaller error."""
    take = new[3] < best[3]
    offset = None if best[2] is None or new[2] is None else np.where(take, new[2], best[2])
    return np.where(take, new[0], best[0]), np.where(take, new[1], best[1]), offset, np.where(take, new[3], best[3])
