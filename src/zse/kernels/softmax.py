"""The exponential of attention's softmax."""

from zse import kernel as zl


@zl.inline
def weight_of(difference):
    """exp(score - maximum), at most 1: the polynomial of kernel/mathlib.py (Cephes expf) with a lower bound at which
    the power of two is exactly 0, so that masked keys weigh nothing. exp(0) is exactly 1."""
    x = max(difference, -88.3)
    n = zl.round_even(x * 1.44269504088896341)
    r = zl.fma(n, 2.12194440e-4, zl.fma(n, -0.693359375, x))
    p = zl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = zl.fma(p, r, 8.3334519073e-3)
    p = zl.fma(p, r, 4.1665795894e-2)
    p = zl.fma(p, r, 1.6666665459e-1)
    p = zl.fma(p, r, 5.0000001201e-1)
    p = zl.fma(p, r * r, r) + 1.0
    return p * zl.bitcast((zl.convert(n, zl.i32) + 127) << 23, zl.f32)
