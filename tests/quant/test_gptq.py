"""Rounding by what is known of the inputs, against the method in its plainest form."""

import numpy as np
import pytest

from zse.quant import gptq, quantize
from zse.quant.scheme import AffineScheme


def correlated(rng, samples, k):
    mix = rng.normal(size=(k, k)) * np.exp(-4 * rng.random(k))
    return (rng.normal(size=(samples, k)) @ mix).astype(np.float32)


def plain(w, scheme, squares):
    """Float64, a column at a time, each time with the inverse of what is left of H: no Cholesky, no blocks (Hassibi and
    Stork 1993, "Second order derivatives for network pruning")."""
    n, k = w.shape
    size = k // scheme.groups(k)
    h = squares.astype(np.float64)
    mean = h.diagonal().mean()
    weight = (h.diagonal() / mean + gptq.DAMPING).astype(np.float32)
    h = h + gptq.DAMPING * mean * np.eye(k)
    left, found = w.astype(np.float64), np.empty((n, k))
    for column in range(k):
        if column % size == 0:
            columns = slice(column, column + size)
            taken = quantize.quantize_groups(left[:, columns].T.astype(np.float32), scheme, True, weight[columns])
            scale = taken.scale.astype(np.float64)
            base = -(2.0 ** (scheme.bits - 1)) * scale if scheme.symmetric else taken.offset.astype(np.float64)
        code = np.rint((left[:, column] - base) / scale).clip(0, 2**scheme.bits - 1)
        found[:, column] = code * scale + base
        inverse = np.linalg.inv(h[column:, column:])
        error = (left[:, column] - found[:, column]) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    return found


@pytest.mark.parametrize("scheme", [AffineScheme(4, 32, False), AffineScheme(4, 0, True), AffineScheme(5, 64, False)])
def test_it_is_the_plain_method(scheme):
    rng = np.random.default_rng(5)
    x, w = correlated(rng, 500, 192), rng.standard_t(5, size=(24, 192)).astype(np.float32)
    squares = x.T @ x
    found = scheme.nearest(w, inputs=gptq.inputs_of(squares)).dequantize()
    meant = plain(w, scheme, squares)

    def error(values):
        return np.linalg.norm(x @ (values - w).T) / np.linalg.norm(x @ w.T)

    # f32 beside f64 turns a rounding here and there, from which a row goes another way that is as good.
    assert (np.abs(found - meant) < 1e-3).mean() > 0.9
    assert error(found) == pytest.approx(error(meant), rel=0.02)
    assert error(found) < 0.8 * error(scheme.nearest(w).dequantize())


def test_inputs_that_say_nothing_change_nothing():
    """H = 1: rounding to nearest. Of absent inputs likewise, though the others go together."""
    rng = np.random.default_rng(6)
    w, scheme = rng.normal(size=(40, 128)).astype(np.float32), AffineScheme(4, 32, False)
    nearest = scheme.nearest(w)
    found = scheme.nearest(w, inputs=gptq.inputs_of(np.eye(128)))
    assert np.array_equal(found.q, nearest.q) and np.array_equal(found.scale, nearest.scale)
    x = correlated(rng, 300, 128)
    x[:, 96:] = 0
    found = scheme.nearest(w, inputs=gptq.inputs_of(x.T @ x))
    assert np.array_equal(found.q[:, 96:], nearest.q[:, 96:]) and not np.array_equal(found.q, nearest.q)


def test_pieces_of_rows_are_the_whole():
    rng = np.random.default_rng(7)
    w, scheme, x = rng.normal(size=(96, 64)).astype(np.float32), AffineScheme(4, 16, False), correlated(rng, 200, 64)
    inputs = gptq.inputs_of(x.T @ x)
    whole, pieces = (
        np.concatenate([scheme.nearest(part, inputs=inputs).q for part in np.split(w, parts)]) for parts in (1, 3)
    )
    assert (whole == pieces).mean() > 0.999  # sums of a product may be added in another order


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_values_that_do_not_fit(value):
    w = np.zeros((16, 32), np.float32)
    w[3, 5] = value
    with pytest.raises(ValueError, match="NaN or infinite|does not fit in f16"):
        AffineScheme(4, 32, False).nearest(w, inputs=gptq.inputs_of(np.eye(32)))
    with pytest.raises(ValueError, match="inputs of a product are not finite"):
        gptq.inputs_of(np.full((32, 32), np.nan))
