"""Products of small f32 matrices within a CPU's block: the chunked forms of recurrent layers (delta.py, scan.py)."""

from zse import kernel as zl

ROWS = 4  # rows of a tile


def column_steps(most):
    """How columns are walked: vectors of a step, from the most down to one."""
    return [n for n in (8, 4, 2, 1) if n <= most]


@zl.inline
def vectors():
    """Vectors of a tile's rows: with ROWS rows 16 sums in registers, or 8 where there are 16 registers."""
    return 4 if zl.target.lanes == 16 else 2


@zl.inline
def begin(width, vecs, most):
    """Where steps of so many vectors begin in rows of `width` numbers: behind those of twice as many, up to `most`."""
    twice = 2 * vecs * zl.target.lanes
    return zl.i64(0) if vecs == most else width // twice * twice


@zl.inline
def add_products(sums, rows, b, b_row, depth):
    """sums[r][v] += rows[r][k] * b[k] for k < depth, over vectors v of the lines of b, b_row apart."""
    L = zl.target.lanes
    for k in range(0, depth):
        line = b + k * b_row
        values = [zl.load(line + v * L, L) for v in zl.static(range(len(sums[0])))]
        for r in zl.static(range(len(sums))):
            factor = zl.f32.x(L)(rows[r][k])
            for v in zl.static(range(len(sums[0]))):
                sums[r][v] = zl.fma(values[v], factor, sums[r][v])
