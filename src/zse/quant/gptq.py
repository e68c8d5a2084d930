"""Rounding that knows what a layer's inputs are: GPTQ (Frantar et al. 2022, arXiv 2210.17323).

Columns are rounded one after another, and what rounding one of them changed in a row's products is taken back by those
that follow, as far as their inputs go together: with H = X'X of the inputs and the upper triangular U with U'U = H^-1,
the error (w - rounded) / U[i, i] of column i is subtracted from column j times U[i, j]. Rows do not depend on one
another, so a matrix may be rounded in pieces of rows.

A group's scale and offset are those of zse.quant.quantize for the weights as they are when the first of its columns
comes, each column's error counted by the mean square of its input."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zse.quant import quantize

DAMPING = 0.01  # of the mean square of the inputs, added to each: inputs that go together exactly have no inverse
_BLOCK = 64  # columns whose errors reach those behind them at once


class Inputs(NamedTuple):
    """What is known of a product's inputs. upper: U, f32 [K, K]; weight: their mean squares, f32 [K]."""

    upper: NDArray
    weight: NDArray


def inputs_of(squares: NDArray) -> Inputs:
    """Of H = X'X f32 or f64 [K, K]. An input that was always 0 is rounded as it comes. ValueError unless H is
    finite."""
    if not np.isfinite(squares).all():
        raise ValueError("the inputs of a product are not finite")
    wide = squares.astype(np.float64)
    diagonal = wide.diagonal().copy()
    mean = diagonal.mean() or 1.0
    absent = diagonal == 0
    wide[absent, absent] = mean
    wide[np.diag_indices_from(wide)] += DAMPING * mean
    # H = R R' with R upper triangular (Cholesky from the last column on), so U = R^-1.
    reversed_lower = np.linalg.cholesky(wide[::-1, ::-1])
    upper = _inverse(reversed_lower[::-1, ::-1])
    return Inputs(upper.astype(np.float32), (diagonal / mean + DAMPING).astype(np.float32))


def _inverse(upper: NDArray) -> NDArray:
    """Of an upper triangular matrix, by halves: a fifth of np.linalg.inv's time at 1,536 columns."""
    half = len(upper) // 2
    if half < _BLOCK:
        return np.triu(np.linalg.inv(upper))
    found = np.zeros_like(upper)
    found[:half, :half] = left = _inverse(upper[:half, :half])
    found[half:, half:] = right = _inverse(upper[half:, half:])
    found[:half, half:] = -left @ upper[:half, half:] @ right
    return found


def round_rows(
    w: NDArray, scheme: Any, inputs: Inputs, *, search: bool = True
) -> tuple[NDArray, NDArray, NDArray | None]:
    """f32 [N, K] → (q u8 [N, K], scale f16 [N, G], offset f16 [N, G] or None) of an AffineScheme, as quantize() gives
    them. ValueError as there."""
    n, k = w.shape
    groups = scheme.groups(k)
    size = k // groups
    left = np.ascontiguousarray(w.T, np.float32)  # what is still to be rounded, [K, N]
    q = np.empty((k, n), np.uint8)
    scale = np.empty((n, groups), np.float16)
    offset = None if scheme.symmetric else np.empty((n, groups), np.float16)
    steps, half = np.float32((1 << scheme.bits) - 1), np.float32(1 << (scheme.bits - 1))
    block = min(_BLOCK, size)
    for start in range(0, k, block):
        stop = min(start + block, k)
        if start % size == 0:
            group = start // size
            taken = _group(left[start : start + size], scheme, inputs.weight[start : start + size], search)
            scale[:, group] = taken.scale
            wide = taken.scale.astype(np.float32)
            base = -half * wide
            if offset is not None:
                offset[:, group] = taken.offset
                base = taken.offset.astype(np.float32)
            inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
        errors = np.empty((stop - start, n), np.float32)
        for column in range(start, stop):
            code = left[column] - base
            code *= inverse
            np.rint(code, out=code)
            np.clip(code, 0, steps, out=code)
            q[column] = code
            error = errors[column - start]
            np.multiply(code, wide, out=error)
            error += base
            np.subtract(left[column], error, out=error)
            error /= inputs.upper[column, column]
            if column + 1 < stop:
                left[column + 1 : stop] -= np.multiply.outer(inputs.upper[column, column + 1 : stop], error)
        left[stop:] -= inputs.upper[start:stop, stop:].T @ errors
    return np.ascontiguousarray(q.T), scale, offset


def _group(w: NDArray, scheme: Any, weight: NDArray, search: bool) -> Any:
    """Scale and offset of one group of each row, w f32 [size, N]."""
    peak = np.abs(w).max(initial=0)
    if not peak <= quantize.F16_MAX:
        reason = f"the value {peak} does not fit in f16" if np.isfinite(peak) else "a value is NaN or infinite"
        raise ValueError(reason)
    return quantize.quantize_groups(w, scheme, search, weight)
