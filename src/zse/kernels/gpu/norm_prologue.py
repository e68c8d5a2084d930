"""RMSNorm as the prologue of a product for few tokens: every block normalizes the rows itself, while its weights are on
their way, instead of waiting for a kernel that does it once.

The bits are add_rmsnorm's: of its 16 warps, warp w sums the squares of the 128 columns at 128 (w + 16 v), v = 0, 1, ...;
a block of fewer warps does for these 16 *row warps* in turn what they would do. Row warp w and vector v are chunk w +
16 v of 128 columns, four columns a lane.

What it costs is reading: each block reads all rows, 132 x 4 tokens x 4,096 columns x 4 bytes are 8.7 MB of L2, more than
a microsecond. Beyond that (8 vectors of 2,048 columns over all tokens) the kernel of its own is as fast.
"""

from zse.kernel import (
    barrier,
    bf16,
    bitcast,
    convert,
    f32,
    i64,
    inline,
    lane_index,
    load,
    make_vector,
    static,
    store,
    target,
    u32,
    warp_index,
    warp_sum,
)
from zse.kernels.gpu.norm import THREADS
from zse.kernels.gpu.rows import inverse_rms, square_sum, tree_sum

TOKENS = 4
ROW_WARPS = THREADS // 32
ROW_COLUMNS = THREADS * 4  # that add_rmsnorm's block has in one vector a thread
SHAPES = ((4, 2), (2, 4))  # (tokens, vectors) whose rows a block holds in registers


def scratch_bytes() -> int:
    return TOKENS * ROW_WARPS * 4


def fits(width: int, tokens: int) -> bool:
    """Whether the prologue takes `tokens` rows of `width` columns."""
    return width % 8 == 0 and any(tokens <= most and width <= v * ROW_COLUMNS for most, v in SHAPES)


def elements_for(shared: int) -> int:
    """Normed activations in matmul_small_norm's shared memory, of blocks with `shared` bytes: 4 tokens of 4,096 columns
    beside Hopper's ring, one token of 8,192 elsewhere (the ring keeps its slots but for one on the smallest)."""
    return 4 * (4096 + 32) if shared > 200 * 1024 else 2 * (4096 + 64)


def pitch(width: int, padding: int) -> int:
    """Elements between two tokens there."""
    return (width + 127) // 128 * 128 + padding


def rounds_of(warps: int) -> int:
    """Row warps that a warp stands for, at most."""
    return -(-ROW_WARPS // warps)


@inline
def has_row_warp(r, warp, WARPS):
    """Whether there is a row warp for this warp in round r."""
    return ROW_WARPS % WARPS == 0 or r * WARPS + warp < ROW_WARPS


@inline
def chunk_at(r, v, warp, WARPS):
    return v * ROW_WARPS + r * WARPS + warp


@inline
def load_norm(weight, width):
    """This lane's weights of the norm, [round][4 vectors]. No kernel writes them: they are read before grid_wait()."""
    WARPS = target.threads // 32
    lane, warp = lane_index(), warp_index()
    ws = [f32.x(4)(0) for _ in static(range(rounds_of(WARPS) * 4))]
    for r in static(range(rounds_of(WARPS))):
        for v in static(range(4)):
            column = chunk_at(r, v, warp, WARPS) * 128 + lane * 4
            if has_row_warp(r, warp, WARPS) and column < width:
                ws[r * 4 + v] = load(weight + column, 4)
    return ws


@inline
def load_rows(xs, x, scratch, here, width, ROWS, VECTORS):
    """xs [token][round][vector]: this lane's columns of the rows; their row warps' sums of squares go to scratch
    [token][row warp]."""
    WARPS = target.threads // 32
    lane, warp = lane_index(), warp_index()
    rounds = rounds_of(WARPS)
    for m in static(range(ROWS)):
        if m < here:
            for r in static(range(rounds)):
                for v in static(range(VECTORS)):
                    column = chunk_at(r, v, warp, WARPS) * 128 + lane * 4
                    if has_row_warp(r, warp, WARPS) and column < width:
                        xs[(m * rounds + r) * VECTORS + v] = load(x + (i64(m) * width + column), 4)
    for m in static(range(ROWS)):
        if m < here:
            for r in static(range(rounds)):
                first = (m * rounds + r) * VECTORS
                sum = warp_sum(square_sum(xs[first : first + VECTORS]))
                if has_row_warp(r, warp, WARPS) and lane == 0:
                    scratch[m * ROW_WARPS + r * WARPS + warp] = sum


@inline
def row_inverse(scratch, m, width, eps):
    """1 / rms of row m, from its row warps' sums in the order of add_rmsnorm."""
    values = []
    for w in static(range(0, ROW_WARPS, 4)):
        four = load(scratch + (m * ROW_WARPS + w), 4)
        values += [four[0], four[1], four[2], four[3]]
    return inverse_rms(tree_sum(values), width, eps)


@inline
def normalize(x, ws, scratch, here, width, eps, put, ROWS, VECTORS):
    """Normalize `here` <= ROWS rows of up to VECTORS * 2,048 columns and hand each lane's four columns of every chunk to
    put[0](token, chunk, two words of bf16 pairs (zero past the last column), *put[1:]). All warps: with a barrier after
    it, everything is there."""
    WARPS = target.threads // 32
    lane, warp = lane_index(), warp_index()
    rounds = rounds_of(WARPS)
    xs = [f32.x(4)(0) for _ in static(range(ROWS * rounds * VECTORS))]
    load_rows(xs, x, scratch, here, width, ROWS, VECTORS)
    barrier()
    for m in static(range(ROWS)):
        if m < here:
            inverse = row_inverse(scratch, m, width, eps)
            for r in static(range(rounds)):
                for v in static(range(VECTORS)):
                    chunk = chunk_at(r, v, warp, WARPS)
                    if has_row_warp(r, warp, WARPS) and chunk * 128 < width:
                        normed = bitcast(
                            convert(xs[(m * rounds + r) * VECTORS + v] * inverse * ws[r * 4 + v], bf16), u32
                        )
                        inside = chunk * 128 + lane * 4 < width
                        put[0](m, chunk, [normed[0] if inside else u32(0), normed[1] if inside else u32(0)], *put[1:])


@inline
def normalize_rows(x, ws, scratch, here, width, eps, put):
    """normalize() for every shape that fits(), and the barrier after it."""
    if width <= 2 * ROW_COLUMNS:
        normalize(x, ws, scratch, here, width, eps, put, 4, 2)
    else:
        normalize(x, ws, scratch, here, width, eps, put, 2, 4)
    barrier()


@inline
def put_row(m, chunk, words, rows, pitch, lane):
    """Into rows of bf16 in shared memory, `pitch` elements apart."""
    store(rows + (m * pitch + chunk * 128 + lane * 4), bitcast(make_vector(words[0], words[1]), bf16))
