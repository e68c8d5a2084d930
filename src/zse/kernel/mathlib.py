"""Elementary functions written in the language itself, used where a target names them in `inline_builtins`.

exp: n = round(v / ln 2), then a degree-6 polynomial on [-ln2/2, ln2/2] (coefficients of Cephes expf, netlib); 2**n as two factors
made from exponent bits. Inputs are clamped to [-87.3, 88.7]: below, the result is the smallest normal number's size, near 1e-38,
which every softmax here treats as zero.
"""

from zse.kernel.language import BUILTINS, f32, i32, inline

bitcast, convert, fma, maximum, minimum, round_even = (
    BUILTINS[name] for name in ("bitcast", "convert", "fma", "maximum", "minimum", "round_even"))


@inline
def exp_f32(v):
    """e**v for f32 scalars and vectors, within 2 ulp for inputs in [-87.3, 88.7]."""
    x = minimum(maximum(v, -87.33), 88.37)
    n = round_even(x * 1.44269504088896341)
    r = fma(n, -0.693359375, x)            # ln 2 in two parts, so that n * ln2 loses nothing
    r = fma(n, 2.12194440e-4, r)
    p = fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = fma(p, r, 8.3334519073e-3)
    p = fma(p, r, 4.1665795894e-2)
    p = fma(p, r, 1.6666665459e-1)
    p = fma(p, r, 5.0000001201e-1)
    p = fma(p, r * r, r) + 1.0
    return p * bitcast((convert(n, i32) + 127) << 23, f32)


@inline
def tanh_f32(v):
    """tanh(v) = 1 - 2 / (exp(2v) + 1); absolute error below 3e-7."""
    return 1.0 - 2.0 / (exp_f32(v * 2.0) + 1.0)
