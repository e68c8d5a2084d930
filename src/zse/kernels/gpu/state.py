"""What kernels of recurrent layers share: which runs and chunks a block has, gates, keys."""

from zse import kernel as zl


@zl.inline
def run_of(p, token):
    """The run of a token."""
    low, high = zl.i32(0), p.runs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if p.run_start[middle] <= token:
            low = middle + 0
        else:
            high = middle - 1
    return low


@zl.inline
def chunk_of(p, run, segment, TOKENS):
    """(first token, token behind the last) of the run's chunk that begins among the TOKENS tokens from `segment` on, the
    first not below the second where there is none. A run's chunks begin with it and have TOKENS tokens, but for the
    last."""
    first, end = p.run_start[run], p.run_start[run + 1]
    begin = first + (max(segment - first, 0) + (TOKENS - 1)) // TOKENS * TOKENS
    return begin, min(min(begin + TOKENS, end), end if begin < segment + TOKENS else begin)


@zl.inline
def four(p, ALIGNED):
    """Four f32 that follow one another."""
    if ALIGNED:
        return zl.load(p, 4)
    return zl.make_vector(p[0] + 0.0, p[1] + 0.0, p[2] + 0.0, p[3] + 0.0)


FAR = 20.0  # softplus(x) is x from here on: exp(-20) is below half a step of f32 beside 20


@zl.inline
def softplus(x):
    """log(1 + e^x); of x below -4 the logarithm's series, for 1 + e^x has lost digits of it."""
    e = zl.exp(min(x, FAR))
    series = e * (1.0 - e * (0.5 - e * (1 / 3 - e * 0.25)))
    return zl.where(x > FAR, x, zl.where(x < -4.0, series, zl.log(1.0 + e)))


@zl.inline
def sigmoid(x):
    return zl.reciprocal(1.0 + zl.exp(x * -1.0))


@zl.inline
def key_head(p, head):
    """The head of q and k that a head of v has."""
    return head % p.k_heads if p.tiled != 0 else head // (p.v_heads // p.k_heads)


@zl.inline
def unit(values, factor):
    """Vectors of four that a warp holds together, L2-normalized and times a factor."""
    squares = zl.f32(0)
    for v in zl.static(values):
        squares += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3])
    scale = zl.rsqrt(zl.warp_sum(squares) + 1e-6) * factor
    return [v * scale for v in values]
