"""Elementary functions written in the language itself, used where a target names them in `inline_builtins`.

exp: n = round(v / ln 2), then a degree-6 polynomial on [-ln2/2, ln2/2] (coefficients of Cephes expf, netlib); 2**n as
two factors made from exponent bits. Inputs are clamped to [-87.3, 88.7]: below, the result is the smallest normal
number's size, near 1e-38, which every softmax here treats as zero.

log: x = m 2**e with m in [sqrt(1/2), sqrt(2)), then Cephes' logf polynomial of m - 1. sin, cos: x less a multiple of pi
/ 2 in three parts (Cody and Waite), then Cephes' sinf or cosf polynomial on [-pi/4, pi/4]."""

from zse import kernel as zl
from zse.kernel.language import BUILTINS

bitcast, convert, fma, maximum, minimum, round_even, where = (
    BUILTINS[name] for name in ("bitcast", "convert", "fma", "maximum", "minimum", "round_even", "where")
)


@zl.inline
def exp_f32(v):
    """e**v for f32 scalars and vectors, within 2 ulp for inputs in [-87.3, 88.7]."""
    x = minimum(maximum(v, -87.33), 88.37)
    n = round_even(x * 1.44269504088896341)
    r = fma(n, -0.693359375, x)  # ln 2 in two parts, so that n * ln2 loses nothing
    r = fma(n, 2.12194440e-4, r)
    p = fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = fma(p, r, 8.3334519073e-3)
    p = fma(p, r, 4.1665795894e-2)
    p = fma(p, r, 1.6666665459e-1)
    p = fma(p, r, 5.0000001201e-1)
    p = fma(p, r * r, r) + 1.0
    return p * bitcast((convert(n, zl.i32) + 127) << 23, zl.f32)


@zl.inline
def tanh_f32(v):
    """tanh(v) = 1 - 2 / (exp(2v) + 1); absolute error below 3e-7."""
    return 1.0 - 2.0 / (exp_f32(v * 2.0) + 1.0)


@zl.inline
def log_f32(v):
    """The natural logarithm of an f32 scalar, within 2 ulp; -infinity of 0, NaN below."""
    tiny = v < 1.17549435e-38
    bits = bitcast(where(tiny, v * 8388608.0, v), zl.i32)
    # Counted from sqrt(1/2): the exponent steps where the mantissa passes sqrt(2).
    above = bits - 0x3F3504F3
    exponent = above >> 23
    m = bitcast(bits - (exponent << 23), zl.f32) - 1.0
    e = zl.f32(exponent) - where(tiny, zl.f32(23), zl.f32(0))
    p = fma(m, 7.0376836292e-2, -1.1514610310e-1)
    p = fma(p, m, 1.1676998740e-1)
    p = fma(p, m, -1.2420140846e-1)
    p = fma(p, m, 1.4249322787e-1)
    p = fma(p, m, -1.6668057665e-1)
    p = fma(p, m, 2.0000714765e-1)
    p = fma(p, m, -2.4999993993e-1)
    p = fma(p, m, 3.3333331174e-1)
    z = m * m
    y = fma(e, -2.12194440e-4, p * m * z)
    y = fma(z, -0.5, y)
    result = fma(e, 0.693359375, m + y)
    result = where(bits >= 0x7F800000, v, result)  # infinity and NaN
    return where(v > 0.0, result, where(v == 0.0, zl.f32(float("-inf")), zl.f32(float("nan"))))


@zl.inline
def _reduced(v):
    """(v less a multiple n of pi / 2, n), for |v| up to some ten thousand."""
    n = round_even(v * 0.636619772367581343)
    r = fma(n, -1.5703125, v)
    r = fma(n, -4.837512969970703125e-4, r)
    return fma(n, -7.549789948768648e-8, r), convert(n, zl.i32)


@zl.inline
def _quadrant(r, n):
    """sin(r + n pi / 2)."""
    z = r * r
    s = fma(z, -1.9515295891e-4, 8.3321608736e-3)
    s = fma(s, z, -1.6666654611e-1)
    s = fma(s * z, r, r)
    c = fma(z, 2.443315711809948e-5, -1.388731625493765e-3)
    c = fma(c, z, 4.166664568298827e-2)
    c = fma(c * z, z, fma(z, -0.5, 1.0))
    value = where((n & 1) != 0, c, s)
    return where((n & 2) != 0, -value, value)


@zl.inline
def sin_f32(v):
    """The sine of an f32 scalar, absolute error below 2e-7 for |v| up to 8192."""
    r, n = _reduced(v)
    return _quadrant(r, n)


@zl.inline
def cos_f32(v):
    """The cosine of an f32 scalar, as sin_f32."""
    r, n = _reduced(v)
    return _quadrant(r, n + 1)


# For GPUs without library functions.
FUNCTIONS = {"exp": exp_f32, "tanh": tanh_f32, "log": log_f32, "sin": sin_f32, "cos": cos_f32}
