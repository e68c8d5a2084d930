"""What state_chunks.py needs of chunks of prompts before it goes through them, of all chunks side by side: a block has a
chunk and a head."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.gpu.attention_mma import key_operands, query_fragments
from zse.kernels.gpu.state import chunk_of, key_head, run_of, sigmoid, softplus, unit
from zse.kernels.runs import RunParams

CHUNK = 64
THREADS = 128
FACTORS = CHUNK + 4  # f32 from row to row
# Of a token's decay: e^-40 leaves nothing of a state beside what is added, and sums over a chunk stay above -2,560, where f32
# has steps of 0.0002; of -1e5 they would be 0.008.
LEAST_LOG = -40.0


class ChunkParams(RunParams):
    """x f32: a row's q, k and v begin q_at, k_at and v_at behind its first number, x_stride from row to row. a: gates of
    decays (scan: of steps), b of weights (delta). A, dt_bias, D f32 [heads]; low, high: of steps. Runs of up to `fewest`
    tokens are left out.

    Prepared: qs, ks bf16 [tokens, k_heads, K]; within, solved bf16 [tokens, heads, CHUNK]; decays, steps f32 [tokens,
    heads]: of the logarithm from the chunk's beginning; of scan."""

    x: zl.Ptr[zl.f32, "const"]
    a: zl.Ptr[zl.f32, "const"]
    b: zl.Ptr[zl.f32, "const"]
    A: zl.Ptr[zl.f32, "const"]
    dt_bias: zl.Ptr[zl.f32, "const"]
    D: zl.Ptr[zl.f32, "const"]
    qs: zl.Ptr[zl.bf16]
    ks: zl.Ptr[zl.bf16]
    within: zl.Ptr[zl.bf16]
    solved: zl.Ptr[zl.bf16]
    decays: zl.Ptr[zl.f32]
    steps: zl.Ptr[zl.f32]
    out: zl.Ptr[zl.f32]
    x_stride: zl.i32
    q_at: zl.i32
    k_at: zl.i32
    v_at: zl.i32
    a_stride: zl.i32
    b_stride: zl.i32
    k_heads: zl.i32
    v_heads: zl.i32
    tiled: zl.i32
    fewest: zl.i32
    low: zl.f32
    high: zl.f32
    K: zl.static
    V: zl.static
    DELTA: zl.static

    @property
    def key_stride(self) -> int:
        """Bytes of a token's q or k in shared memory."""
        return self.K * 2 + 16


class Prepared(NamedTuple):
    """Shared memory of prepare_chunks: q and k of a chunk; factors: A, by rows; decays, weights: of its tokens (scan:
    the steps)."""

    q: Any
    k: Any
    factors: Any
    decays: Any
    weights: Any


@zl.inline
def leads_key(p, head):
    """Whether this head writes the q and k that it shares with others."""
    return head < p.k_heads if p.tiled != 0 else head % (p.v_heads // p.k_heads) == 0


@zl.inline
def load_keys(p, begin, count, head, s):
    """q and k of a chunk as bf16, of delta normalized; rows behind the last are zeros. A warp takes every fourth row."""
    lane, key = zl.lane_index(), key_head(p, head)
    leads = leads_key(p, head)
    for r in zl.unroll(range(zl.warp_index(), CHUNK, THREADS // 32), 4):
        q, k = zl.f32.x(4)(0), zl.f32.x(4)(0)
        if r < count and lane * 4 < p.K:
            row = p.x + (zl.i64(begin + r) * p.x_stride + (key * p.K + lane * 4))
            q = zl.load(row + p.q_at, 4)
            k = zl.load(row + p.k_at, 4)
        if p.DELTA:
            q, k = unit([q], p.K**-0.5)[0], unit([k], 1.0)[0]
        if lane * 4 < p.K:
            narrow_q, narrow_k = zl.convert(q, zl.bf16), zl.convert(k, zl.bf16)
            zl.store(zl.cast_ptr(s.q + (r * p.key_stride + lane * 8), zl.bf16), narrow_q)
            zl.store(zl.cast_ptr(s.k + (r * p.key_stride + lane * 8), zl.bf16), narrow_k)
            if leads and r < count:
                at = (zl.i64(begin + r) * p.k_heads + key) * p.K + lane * 4
                zl.store(p.qs + at, narrow_q)
                zl.store(p.ks + at, narrow_k)


@zl.inline
def gates_of(p, token, head):
    """(logarithm of a token's decay, its weight; of scan its step)."""
    step = softplus(p.a[zl.i64(token) * p.a_stride + head] + p.dt_bias[head])
    weight = step
    if p.DELTA:
        weight = sigmoid(p.b[zl.i64(token) * p.b_stride + head])
    else:
        step = min(max(step, p.low), p.high)
        weight = step
    return max(step * p.A[head], LEAST_LOG), weight


@zl.inline
def load_gates(p, begin, count, head, s):
    """By warp 0: decays from the chunk's beginning, two tokens a lane; 0 behind the last."""
    lane = zl.lane_index()
    logs = [zl.f32(0) for _ in zl.static(range(2))]
    for u in zl.static(range(2)):
        weight = zl.f32(0)
        token = lane * 2 + u
        if token < count:
            logs[u], weight = gates_of(p, begin + token, head)
        s.weights[token] = weight
    total = logs[0] + logs[1]
    for distance in zl.static((1, 2, 4, 8, 16)):
        before = zl.shuffle_up(total, distance)
        total = total + before if lane >= distance else total
    before = zl.shuffle_up(total, 1)
    first = logs[0] + (before if lane > 0 else zl.f32(0))
    for u, value in zl.static(enumerate((first, total))):
        token = lane * 2 + u
        s.decays[token] = value
        if token < count:
            at = zl.i64(begin + token) * p.v_heads + head
            p.decays[at] = value
            if not p.DELTA:
                p.steps[at] = s.weights[token]


@zl.inline
def products(rows, columns, n, p):
    """[2][4] f32: 16 tokens of this warp (`rows`) times 16 from 16 * n on."""
    acc = [[zl.f32(0) for u in zl.static(range(4))] for _ in zl.static(range(2))]
    for kd in zl.static(range(p.K // 16)):
        a = query_fragments(rows, kd, p.key_stride, 2)
        first, second = key_operands(columns + n * 16 * p.key_stride, kd, p.key_stride, zl.bf16)
        zl.mma_bf16(acc[0], a, first)
        zl.mma_bf16(acc[1], a, second)
    return acc


@zl.inline
def relate(p, begin, count, head, s):
    """(Q K') R to global memory, A to shared memory: 16 tokens a warp, those at or before them."""
    first = zl.warp_index() * 16
    for n in zl.static(range(CHUNK // 16)):
        if n * 16 <= first:
            ours = products(s.q + first * p.key_stride, s.k, n, p)
            theirs = products(s.k + first * p.key_stride, s.k, n, p) if p.DELTA else ours
            for half in zl.static(range(2)):
                i = first + zl.lane_index() // 4 + 8 * half
                for t in zl.static(range(2)):
                    j = n * 16 + t * 8 + zl.lane_index() % 4 * 2
                    pair = [zl.f32(0) for _ in zl.static(range(2))]
                    for u in zl.static(range(2)):
                        decay = zl.exp(min(s.decays[i] - s.decays[j + u], 0.0))
                        if p.DELTA:
                            factor = s.weights[i] * decay * theirs[t][2 * half + u]
                            s.factors[i * FACTORS + j + u] = factor if j + u < i else zl.f32(0)
                        else:
                            decay = decay * s.weights[j + u]
                        pair[u] = ours[t][2 * half + u] * decay if j + u <= i else zl.f32(0)
                    if i < count:
                        at = (zl.i64(begin + i) * p.v_heads + head) * CHUNK + j
                        zl.store(p.within + at, zl.convert(zl.make_vector(pair[0], pair[1]), zl.bf16))
        else:
            for half in zl.static(range(2)):
                i = first + zl.lane_index() // 4 + 8 * half
                for t in zl.static(range(2)):
                    j = n * 16 + t * 8 + zl.lane_index() % 4 * 2
                    if i < count:
                        at = (zl.i64(begin + i) * p.v_heads + head) * CHUNK + j
                        zl.store(p.within + at, zl.bf16.x(2)(0))


@zl.inline
def solve(p, begin, count, head, s):
    """(I + A)^-1 beta: a thread has a column, by forward substitution."""
    column = zl.thread_index()
    beta = s.weights[column] + 0.0
    found = [zl.f32(0) for _ in zl.static(range(CHUNK))]
    for i in zl.static(range(CHUNK)):
        sums = [zl.f32(0) for _ in zl.static(range(4))]
        for j in zl.static(range(0, i, 4)):
            factors = zl.load(s.factors + (i * FACTORS + j), 4)
            for u in zl.static(range(min(4, i - j))):
                sums[u] = zl.fma(factors[u], found[j + u], sums[u])
        found[i] = (zl.f32(1) if column == i else zl.f32(0)) - ((sums[0] + sums[1]) + (sums[2] + sums[3]))
    for i in zl.static(range(CHUNK)):
        if i < count:
            p.solved[(zl.i64(begin + i) * p.v_heads + head) * CHUNK + column] = zl.convert(found[i] * beta, zl.bf16)


@zl.kernel
def prepare_chunks(p: ChunkParams):
    """Grid (tokens / CHUNK, v heads)."""
    zl.grid_launch_dependents()
    s = Prepared(
        zl.shared_array(zl.u8, CHUNK * p.key_stride, 128),
        zl.shared_array(zl.u8, CHUNK * p.key_stride, 128),
        zl.shared_array(zl.f32, CHUNK * FACTORS if p.DELTA else 4),
        zl.shared_array(zl.f32, CHUNK),
        zl.shared_array(zl.f32, CHUNK),
    )
    zl.grid_wait()
    segment, head = zl.block_index(0) * CHUNK, zl.block_index(1)
    run = run_of(p, segment)
    while run < p.runs and p.run_start[min(run, p.runs - 1)] < segment + CHUNK:
        begin, end = chunk_of(p, run, segment, CHUNK)
        if begin < end and p.run_start[run + 1] - p.run_start[run] > p.fewest:
            load_keys(p, begin, end - begin, head, s)
            if zl.warp_index() == 0:
                load_gates(p, begin, end - begin, head, s)
            zl.barrier()
            relate(p, begin, end - begin, head, s)
            zl.barrier()
            if p.DELTA:
                if zl.thread_index() < CHUNK:
                    solve(p, begin, end - begin, head, s)
                zl.barrier()
        run += 1
