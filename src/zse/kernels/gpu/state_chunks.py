"""Prompts of layers whose state decays and takes on outer products, by chunks of CHUNK tokens with mma.sync: the gated
delta rule (chunked UT form, Yang et al., arXiv 2412.06464) and Mamba-2 (chunked SSD, Dao and Gu, arXiv 2405.21060).

With the decay G_i from a chunk's beginning to token i, the state S before it and R_ij = e^(G_i - G_j) for j <= i:

    delta: (I + A) Y = beta (V - e^G K S), A_ij = beta_i R_ij (k_i k_j) below the diagonal      scan: Y = dt V
    results e^G Q S + ((Q K') R) Y        state e^G_last S + K' (e^(G_last - G) Y)

prepare_chunks (state_prepare.py) makes what does not need S, of all chunks side by side: (Q K') R, the inverse of I + A
times beta, and of delta the normalized q and k. walk_chunks goes through a run's chunks with the transposed state in registers, 16 columns
of V a warp. All products have their left operand in registers, where the one before left it: tokens are columns. Rows of
prepared arrays are the batch's tokens; what is multiplied is bf16, sums, decays and the state are f32.

Of a Qwen3.5-9B layer and 8,192 tokens (32 heads of 128): 0.05 TFLOP, 0.1 GB of inputs and results, 0.2 GB of what the
first kernel leaves the second; 128 chunks follow one another."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.gpu.attention_mma import key_operands, value_operands
from zse.kernels.gpu.attention_parts import pack_pair
from zse.kernels.gpu.state import key_head
from zse.kernels.gpu.state_prepare import CHUNK, THREADS, ChunkParams, prepare_chunks
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div
from zse.tensor import SHORT_RUN, Tensor

WARPS = (2, 4)  # of walk_chunks
SIZES = {"delta": ((128, 128),), "scan": ((128, 64),)}  # of a key and of a value: state size and head size of a scan
SOLVED = CHUNK * 2 + 16  # bytes from row to row; the padding keeps ldmatrix free of bank conflicts


class Stage(NamedTuple):
    """A chunk in shared memory. v: f32, `v_stride` from row to row, of the block's columns."""

    q: Any
    k: Any
    within: Any
    solved: Any
    v: Any
    decays: Any
    steps: Any
    v_stride: int


class Sizes(NamedTuple):
    """Bytes of a stage's parts."""

    keys: int
    within: int
    values: int

    @property
    def total(self) -> int:
        return 2 * self.keys + 2 * self.within + self.values + 2 * CHUNK * 4


def sizes_of(k: int, warps: int) -> Sizes:
    return Sizes(CHUNK * (k * 2 + 16), CHUNK * SOLVED, CHUNK * (16 * warps + 4) * 4)


@zl.inline
def stage_at(memory, sizes, warps):
    at = [0, sizes.keys, 2 * sizes.keys, 2 * sizes.keys + sizes.within, 2 * (sizes.keys + sizes.within)]
    decays = zl.cast_ptr(memory + (at[4] + sizes.values), zl.f32)
    q, k, within, solved, v = [memory + each for each in at]
    return Stage(q, k, within, solved, zl.cast_ptr(v, zl.f32), decays, decays + CHUNK, 16 * warps + 4)


@zl.inline
def copy_rows(place, stride, source, source_stride, pieces, count):
    """Starts the copy of a chunk's rows of `pieces` times 16 bytes; those from `count` on become zeros. source: u8, of row
    0."""
    for e in zl.unroll(range(zl.thread_index(), CHUNK * pieces, zl.target.threads), 2):
        row, piece = e // pieces, e % pieces
        which = row if row < count else 0
        valid = zl.i32(16) if row < count else zl.i32(0)
        zl.copy_async(
            place + (row * stride + piece * 16), source + (zl.i64(which) * source_stride + piece * 16), 16, valid
        )


@zl.inline
def load_stage(p, stage, begin, count, head, first, WARPS):
    """Starts the copy of a chunk. first: of the block's columns of V."""
    at = zl.i64(begin) * p.v_heads + head
    keys = (zl.i64(begin) * p.k_heads + key_head(p, head)) * p.K
    copy_rows(stage.q, p.key_stride, zl.cast_ptr(p.qs + keys, zl.u8), p.k_heads * p.K * 2, p.K // 8, count)
    copy_rows(stage.k, p.key_stride, zl.cast_ptr(p.ks + keys, zl.u8), p.k_heads * p.K * 2, p.K // 8, count)
    width = p.v_heads * CHUNK * 2
    copy_rows(stage.within, SOLVED, zl.cast_ptr(p.within + at * CHUNK, zl.u8), width, CHUNK // 8, count)
    if p.DELTA:
        copy_rows(stage.solved, SOLVED, zl.cast_ptr(p.solved + at * CHUNK, zl.u8), width, CHUNK // 8, count)
    v = p.x + (zl.i64(begin) * p.x_stride + (p.v_at + head * p.V + first))
    place = zl.cast_ptr(stage.v, zl.u8)
    copy_rows(place, stage.v_stride * 4, zl.cast_ptr(v, zl.u8), p.x_stride * 4, 4 * WARPS, count)
    for t in range(zl.thread_index(), CHUNK, zl.target.threads):
        valid = zl.i32(4) if t < count else zl.i32(0)
        from_token = at + zl.i64(t if t < count else 0) * p.v_heads
        zl.copy_async(stage.decays + t, p.decays + from_token, 4, valid)
        if not p.DELTA:
            zl.copy_async(stage.steps + t, p.steps + from_token, 4, valid)
    zl.copy_commit()


@zl.inline
def packed(values):
    """Sums [n][4] as A operands of 16 columns each."""
    return [
        [pack_pair(values[2 * n + u // 2][u % 2 * 2], values[2 * n + u // 2][u % 2 * 2 + 1], zl.bf16) for u in range(4)]
        for n in zl.static(range(len(values) // 2))
    ]


@zl.inline
def multiply_keys(acc, frags, keys, p):
    """acc [tokens / 8][4] += frags times the rows of `keys`."""
    for kd in zl.static(range(len(frags))):
        for n in zl.static(range(CHUNK // 16)):
            one, other = key_operands(keys + n * 16 * p.key_stride, kd, p.key_stride, zl.bf16)
            zl.mma_bf16(acc[2 * n], frags[kd], one)
            zl.mma_bf16(acc[2 * n + 1], frags[kd], other)


@zl.inline
def multiply_before(acc, frags, triangle):
    """acc [tokens / 8][4] += frags times a lower triangle's rows."""
    for n in zl.static(range(CHUNK // 16)):
        for kd in zl.static(range(n + 1)):
            one, other = key_operands(triangle + n * 16 * SOLVED, kd, SOLVED, zl.bf16)
            zl.mma_bf16(acc[2 * n], frags[kd], one)
            zl.mma_bf16(acc[2 * n + 1], frags[kd], other)


@zl.inline
def zeros(count):
    return [[zl.f32(0) for u in zl.static(range(4))] for _ in zl.static(range(count))]


@zl.inline
def walk_chunk(p, state, stage, begin, count, head, first):
    """One chunk: results, and the state behind it. first: this warp's first column of V."""
    g, j = zl.lane_index() // 4, zl.lane_index() % 4
    mine = zl.warp_index() * 16 + g
    before = packed(state)
    values = zeros(CHUNK // 8)
    grown = [zl.load(stage.decays + (n * 8 + j * 2), 2) for n in zl.static(range(CHUNK // 8))]
    grown = [[zl.exp(pair[u]) for u in zl.static(range(2))] for pair in grown]
    if p.DELTA:
        multiply_keys(values, before, stage.k, p)
    for n in zl.static(range(CHUNK // 8)):
        for u in zl.static(range(4)):
            value = stage.v[(n * 8 + j * 2 + u % 2) * stage.v_stride + mine + u // 2 * 8]
            values[n][u] = value - grown[n][u % 2] * values[n][u] if p.DELTA else value
    if p.DELTA:
        frags = packed(values)
        values = zeros(CHUNK // 8)
        multiply_before(values, frags, stage.solved)
    results = zeros(CHUNK // 8)
    multiply_keys(results, before, stage.q, p)
    for n in zl.static(range(CHUNK // 8)):
        for u in zl.static(range(4)):
            results[n][u] = results[n][u] * grown[n][u % 2]
    multiply_before(results, packed(values), stage.within)
    to = p.out + (zl.i64(begin) * (p.v_heads * p.V) + (head * p.V + first + g))
    for n in zl.static(range(CHUNK // 8)):
        for u in zl.static(range(4)):
            token = n * 8 + j * 2 + u % 2
            if not p.DELTA:
                results[n][u] = zl.fma(values[n][u], p.D[head], results[n][u])
            if token < count:
                to[zl.i64(token) * (p.v_heads * p.V) + u // 2 * 8] = results[n][u]
    last = stage.decays[count - 1] + 0.0
    for n in zl.static(range(CHUNK // 8)):
        for u in zl.static(range(2)):
            left = zl.exp(min(last - stage.decays[n * 8 + j * 2 + u], 0.0))
            if not p.DELTA:
                left = left * stage.steps[n * 8 + j * 2 + u]
            values[n][u] = values[n][u] * left
            values[n][u + 2] = values[n][u + 2] * left
    frags = packed(values)
    decay = zl.exp(last)
    for n in zl.static(range(p.K // 8)):
        for u in zl.static(range(4)):
            state[n][u] = state[n][u] * decay
    for kd in zl.static(range(CHUNK // 16)):
        for n in zl.static(range(p.K // 16)):
            one, other = value_operands(stage.k + kd * 16 * p.key_stride, n, p.key_stride, zl.bf16)
            zl.mma_bf16(state[2 * n], frags[kd], one)
            zl.mma_bf16(state[2 * n + 1], frags[kd], other)


@zl.inline
def state_place(p, n, u, head, column):
    """Where in a part of the state [heads, K, V] a number of a thread's stands."""
    key = n * 8 + zl.lane_index() % 4 * 2 + u % 2
    value = column + zl.lane_index() // 4 + u // 2 * 8
    return head * (p.K * p.V) + key * p.V + value


@zl.kernel
def walk_chunks(p: ChunkParams, WARPS: zl.static, STAGES: zl.static):
    """Grid (V / 16 / WARPS, v heads, runs)."""
    zl.grid_launch_dependents()
    sizes = sizes_of(p.K, WARPS)
    ring = zl.shared_array(zl.u8, STAGES * sizes.total, 128)
    head, run = zl.block_index(1), zl.block_index(2)
    start, end = p.run_start[run] + 0, p.run_start[run + 1] + 0
    if end - start > p.fewest:
        columns = zl.block_index(0) * (16 * WARPS)
        first = columns + zl.warp_index() * 16
        place = p.state + (zl.i64(p.run_slot[run]) * p.slot_size + p.place)
        state = zeros(p.K // 8)
        if p.positions[start] != 0:
            for n in zl.static(range(p.K // 8)):
                for u in zl.static(range(4)):
                    state[n][u] = place[state_place(p, n, u, head, first)] + 0.0
        zl.grid_wait()
        load_stage(p, stage_at(ring, sizes, WARPS), start, min(end - start, CHUNK), head, columns, WARPS)
        slot = zl.i32(0)
        for begin in zl.unroll(range(start, end, CHUNK), 1):
            here = stage_at(ring + slot * sizes.total, sizes, WARPS)
            after = begin + CHUNK
            if STAGES > 1:
                slot = 1 - slot
                if after < end:
                    there = stage_at(ring + slot * sizes.total, sizes, WARPS)
                    load_stage(p, there, after, min(end - after, CHUNK), head, columns, WARPS)
                else:
                    zl.copy_commit()
                zl.copy_wait(1)
            else:
                zl.copy_wait(0)
            zl.barrier()
            walk_chunk(p, state, here, begin, min(end - begin, CHUNK), head, first)
            zl.barrier()
            if STAGES == 1 and after < end:
                load_stage(p, here, after, min(end - after, CHUNK), head, columns, WARPS)
        for n in zl.static(range(p.K // 8)):
            for u in zl.static(range(4)):
                place[state_place(p, n, u, head, first)] = state[n][u]
    else:
        zl.grid_wait()


def work_width(kind: str, k_heads: int, k_size: int, v_heads: int) -> int:
    """f32 numbers of a token that prepare_chunks leaves: q and k, one or two rows of a triangle, two gates."""
    return k_heads * k_size + v_heads * (CHUNK // 2 * (2 if kind == "delta" else 1) + 2)


def takes(kind: str, k_size: int, v_size: int) -> bool:
    """Whether there are kernels for heads of these sizes."""
    return (k_size, v_size) in SIZES[kind]


def chunks(device, sizes: tuple[str, int, int], work: Tensor | None, longest_run: int | None) -> bool:
    """Whether a recording computes its longer runs by chunks. sizes: kind, of a key and of a value."""
    return takes(*sizes) and not device.simt and work is not None and (longest_run is None or longest_run > SHORT_RUN)


def record(recorder, sizes: tuple[str, int, int], work: Tensor, tokens, warps: int = 4, **common: Any) -> None:
    """Both launches. common: of ChunkParams what is not of the work, and what run_args() gives beside."""
    del common["leave"], common["keeps"]  # only of short runs
    kind, k, v = sizes
    k_heads, v_heads, room, at = common["k_heads"], common["v_heads"], work.shape[0], work.offset
    parts = {}
    for name, dtype, words in (
        ("qs", "bf16", k_heads * k // 2),
        ("ks", "bf16", k_heads * k // 2),
        ("within", "bf16", v_heads * CHUNK // 2),
        ("solved", "bf16", v_heads * CHUNK // 2 if kind == "delta" else 0),
        ("decays", "f32", v_heads),
        ("steps", "f32", v_heads),
    ):
        parts[name] = Tensor(work.buffer, (room, words), dtype, at)
        at += 4 * room * words
    args = Args(**common, **parts, fewest=SHORT_RUN)
    recorder.launch(f"prepare_{kind}_{k}_{v}", args, (ceil_div(tokens, CHUNK), v_heads))
    grid = v // (16 * warps), v_heads, common["runs"]
    recorder.launch(f"walk_{kind}_{k}_{v}_w{warps}", args, grid)


def variants(target, kind: str) -> list[zl.Variant]:
    """Of an operation, "delta" or "scan"."""
    if not target.has("mma_sync"):
        return []
    found = []
    for k, v in SIZES[kind]:
        fixed = {"K": k, "V": v, "DELTA": kind == "delta"}
        found.append(zl.Variant(f"prepare_{kind}_{k}_{v}", prepare_chunks, fixed, threads=THREADS))
        for warps in WARPS:
            stages = 2 if 2 * sizes_of(k, warps).total <= target.shared_limit else 1
            more = {"WARPS": warps, "STAGES": stages}
            found.append(zl.Variant(f"walk_{kind}_{k}_{v}_w{warps}", walk_chunks, fixed | more, threads=32 * warps))
    return found
