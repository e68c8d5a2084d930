"""The gated delta rule on a GPU, token by token: decoding, short runs, and all runs where there are no matrix units.

A block has one head of one run, its state [k size, v size] in registers: four columns and K / ROWS rows a thread. One
pass over the old state S gives both products that a token needs, for with d = beta (v - e^g S'k) the new state is
e^g S + k d' and the result e^g S'q + d (k q). What does not need the state, and the norm behind it, is done for GROUP tokens
side by side, so that a token behind another waits for two barriers and no memory. States are read before the wait for the
kernels before: nothing else in a step writes them. What must be moved is the state, twice: 2 MiB each way for 32 heads of 128 x 128."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.columns import source
from zse.kernels.delta import LENGTH_EPS, OutputGate, checked
from zse.kernels.delta_chunk import MAX_SIZE
from zse.kernels.gpu import gated_norm, state_chunks
from zse.kernels.gpu.state import four, key_head, sigmoid, softplus, unit
from zse.kernels.op import require
from zse.kernels.runs import KeepParams, slot_behind
from zse.runtime.args import Args
from zse.tensor import SHORT_RUN, Tensor

THREADS = 512
GROUP = 4  # tokens that are prepared side by side
SIZES = ((128, 128), (64, 64))  # k and v size of heads: of Qwen's models the first
MOST = 1 << 30  # no run has more tokens


class DeltaHead(KeepParams):
    """qkv f32 [tokens, qkv_stride]: [q | k | v], heads of K, K and V. a: the gates of decays, b of weights, a row
    a_stride and b_stride apart; A, dt_bias f32. tiled: k head of v head j is j mod k_heads, else j // (v_heads /
    k_heads). CHANNELS: each channel of a key has its own decay. fewest, most: tokens of the runs that are computed here.

    GATED: out bf16 = RMSNorm(result) * norm * silu(z), or the sigmoid of z instead, else f32."""

    qkv: zl.Ptr[zl.f32, "const"]
    a: zl.Ptr[zl.f32, "const"]
    b: zl.Ptr[zl.f32, "const"]
    z: zl.Ptr[zl.f32, "const"]
    A: zl.Ptr[zl.f32, "const"]
    dt_bias: zl.Ptr[zl.f32, "const"]
    norm: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr["OUT"]
    qkv_stride: zl.i32
    a_stride: zl.i32
    b_stride: zl.i32
    z_stride: zl.i32
    k_heads: zl.i32
    v_heads: zl.i32
    tiled: zl.i32
    most: zl.i32
    eps: zl.f32
    K: zl.static
    V: zl.static
    CHANNELS: zl.static
    GATE: zl.static
    OUT: zl.static

    @property
    def columns(self) -> int:
        """Threads that share a row of the state."""
        return self.V // 4

    @property
    def rows(self) -> int:
        """Rows that a block's threads have at once."""
        return threads_of(self.K, self.V) // self.columns


class AnyDeltaHead(KeepParams):
    """The parameters of delta_columns, as DeltaHead has them."""

    qkv: zl.Ptr[zl.f32, "const"]
    a: zl.Ptr[zl.f32, "const"]
    b: zl.Ptr[zl.f32, "const"]
    A: zl.Ptr[zl.f32, "const"]
    dt_bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    qkv_stride: zl.i32
    a_stride: zl.i32
    b_stride: zl.i32
    k_heads: zl.i32
    v_heads: zl.i32
    k_size: zl.i32
    v_size: zl.i32
    tiled: zl.i32
    CHANNELS: zl.static


class DeltaWork(NamedTuple):
    """Shared memory of a block. Of GROUP tokens q, k, decay by rows, scalars (k q, the weight), results and gates by columns
    (results are values at first), slots that states go to; of one token d, what it adds, by columns, and parts, sums of a
    thread's rows with k and with q."""

    q: Any
    k: Any
    decay: Any
    scalars: Any
    results: Any
    gates: Any
    d: Any
    parts: Any
    slots: Any


def threads_of(k: int, v: int) -> int:
    return min(THREADS, k * v // 4)


@zl.inline
def prepare_keys(p, token, head, w, u):
    """By a warp: q and k of a token, number u of its group, and their product."""
    lane, key = zl.lane_index(), key_head(p, head)
    row = p.qkv + zl.i64(token) * p.qkv_stride
    at = [lane * 4 + i for i in zl.static(range(0, p.K, zl.target.warp * 4))]
    qs = [zl.f32.x(4)(0) for _ in at]
    ks = [zl.f32.x(4)(0) for _ in at]
    for i in zl.static(range(len(at))):
        if at[i] < p.K:
            qs[i] = zl.load(row + (key * p.K + at[i]), 4)
            ks[i] = zl.load(row + ((p.k_heads + key) * p.K + at[i]), 4)
    q, k = unit(qs, p.K**-0.5), unit(ks, 1.0)
    dot = zl.f32(0)
    for i in zl.static(range(len(at))):
        both = q[i] * k[i]
        dot += (both[0] + both[1]) + (both[2] + both[3])
        if at[i] < p.K:
            zl.store(w.q + (u * p.K + at[i]), q[i])
            zl.store(w.k + (u * p.K + at[i]), k[i])
    dot = zl.warp_sum(dot)
    if lane == 0:
        w.scalars[2 * u] = dot


@zl.inline
def prepare_gates(p, token, head, w, u):
    """By a warp: a token's decays and weight."""
    lane = zl.lane_index()
    gates = p.a + zl.i64(token) * p.a_stride
    if p.CHANNELS:
        for i in range(lane, p.K, zl.target.warp):
            one = softplus(gates[head * p.K + i] + p.dt_bias[head * p.K + i])
            w.decay[u * p.K + i] = zl.exp(p.A[head] * one)
    elif lane == 1:
        w.decay[u] = zl.exp(p.A[head] * softplus(gates[head] + p.dt_bias[head]))
    if lane == 0:
        w.scalars[2 * u + 1] = sigmoid(p.b[zl.i64(token) * p.b_stride + head])


@zl.inline
def prepare_values(p, token, head, w, u):
    """By a warp: a token's values, where its results will be."""
    column = zl.lane_index() * 4
    if column < p.V:
        values = p.qkv + (zl.i64(token) * p.qkv_stride + (2 * p.k_heads * p.K + head * p.V + column))
        zl.store(w.results + (u * p.V + column), zl.load(values, 4))


@zl.inline
def prepare_factors(p, token, head, w, u):
    """By a warp: what a token's results are multiplied with behind the norm."""
    column = zl.lane_index() * 4
    if column < p.V:
        z = four(p.z + (zl.i64(token) * p.z_stride + (head * p.V + column)), False)
        weight = zl.load(p.norm + column, 4)
        gate = zl.reciprocal(1.0 + zl.exp(z * -1.0))
        zl.store(w.gates + (u * p.V + column), (gate if p.GATE == "sigmoid" else z * gate) * weight)


@zl.inline
def prepare(p, run, first, end, head, w):
    """GROUP tokens of a run, which ends before `end`, from `first` on: each in four parts, which warps share, so that they wait for
    memory side by side."""
    for item in zl.unroll(range(zl.warp_index(), GROUP * 4, zl.target.threads // zl.target.warp), 1):
        u = item % GROUP
        if first + u < end:
            if item < GROUP:
                prepare_keys(p, first + u, head, w, u)
            elif item < GROUP * 2:
                prepare_gates(p, first + u, head, w, u)
                if zl.lane_index() == 2:
                    w.slots[u] = slot_behind(p, run, first + u, end)
            elif item < GROUP * 3:
                prepare_values(p, first + u, head, w, u)
            elif p.GATE != "":
                prepare_factors(p, first + u, head, w, u)


@zl.inline
def next_token(p, state, w, u):
    """The state behind a token, number u of its group; its results take the place of its values."""
    t = zl.thread_index()
    row, column, rows = t // p.columns, t % p.columns * 4, p.rows
    of_k, of_q = zl.f32.x(4)(0), zl.f32.x(4)(0)
    for i in zl.static(range(len(state))):
        r = u * p.K + (row + i * rows)
        state[i] = state[i] * w.decay[r if p.CHANNELS else u]
        of_k = zl.fma(state[i], zl.splat(w.k[r], 4), of_k)
        of_q = zl.fma(state[i], zl.splat(w.q[r], 4), of_q)
    zl.store(w.parts + t * 4, of_k)
    zl.store(w.parts + (rows * p.V + t * 4), of_q)
    zl.barrier()
    # Columns' sums with k, by the first threads, and with q, by as many behind them.
    place = u * p.V + t % p.V
    sums = [zl.f32(0) for _ in zl.static(range(2))]
    if t < 2 * p.V:
        for r in zl.static(range(rows)):
            sums[r % 2] += w.parts[t // p.V * (rows * p.V) + (r * p.V + t % p.V)]
    total = sums[0] + sums[1]
    if t < p.V:
        w.d[t] = w.scalars[2 * u + 1] * (w.results[place] - total)
    zl.barrier()
    if t >= p.V and t < 2 * p.V:
        w.results[place] = zl.fma(w.d[t - p.V], w.scalars[2 * u] + 0.0, total)
    change = zl.load(w.d + column, 4)
    for i in zl.static(range(len(state))):
        state[i] = zl.fma(change, zl.splat(w.k[u * p.K + (row + i * rows)], 4), state[i])


@zl.inline
def leave_result(p, token, head, w, u):
    """By a warp: the result of a token, number u of its group, gated and normalized where the kernel does that."""
    column = zl.lane_index() * 4
    result = zl.f32.x(4)(0)
    if column < p.V:
        result = zl.load(w.results + (u * p.V + column), 4)
    if p.GATE != "":
        squares = result * result
        total = zl.warp_sum((squares[0] + squares[1]) + (squares[2] + squares[3]))
        result = result * zl.rsqrt(total / zl.f32(p.V) + p.eps)
    if column < p.V:
        place = p.out + (zl.i64(token) * (p.v_heads * p.V) + (head * p.V + column))
        if p.GATE == "":
            zl.store(place, result)
        else:
            zl.store(place, zl.convert(result * zl.load(w.gates + (u * p.V + column), 4), p.OUT))


@zl.inline
def prepare_any(p, token, head, w):
    """As prepare(), of k_size channels."""
    lane, key = zl.lane_index(), key_head(p, head)
    q = p.qkv + (zl.i64(token) * p.qkv_stride + key * p.k_size)
    k = q + p.k_heads * p.k_size
    of_q, of_k, of_both = zl.f32(0), zl.f32(0), zl.f32(0)
    for i in range(lane, p.k_size, zl.target.warp):
        of_q = zl.fma(q[i], q[i], of_q)
        of_k = zl.fma(k[i], k[i], of_k)
        of_both = zl.fma(q[i], k[i], of_both)
    query = zl.rsqrt(zl.warp_sum(of_q) + LENGTH_EPS) * zl.rsqrt(zl.f32(p.k_size))
    length = zl.rsqrt(zl.warp_sum(of_k) + LENGTH_EPS)
    both = zl.warp_sum(of_both) * query * length
    if lane == 0:
        w.scalars[0] = both
    for i in range(lane, p.k_size, zl.target.warp):
        w.q[i] = q[i] * query
        w.k[i] = k[i] * length
        gate = head * p.k_size + i if p.CHANNELS else head
        step = softplus(p.a[zl.i64(token) * p.a_stride + gate] + p.dt_bias[gate])
        w.decay[i] = zl.exp(p.A[head] * step)


@zl.kernel
def delta_columns(p: AnyDeltaHead):
    """Grid (v heads, runs): sizes that delta_tokens has no form of. A thread has a column of the state, in memory."""
    zl.grid_launch_dependents()
    w = DeltaWork(*[zl.shared_array(zl.f32, size) for size in (MAX_SIZE, MAX_SIZE, MAX_SIZE, 2, 1, 1, 1, 1, 1)])
    head, run = zl.block_index(0), zl.block_index(1)
    zl.grid_wait()
    first, end = p.run_start[run] + 0, p.run_start[run + 1] + 0
    column = zl.thread_index()
    states = p.state + (p.place + zl.i64(head * p.k_size * p.v_size + column))
    place = states + zl.i64(p.run_slot[run]) * p.slot_size
    fresh = p.positions[first] == 0
    for token in zl.unroll(range(first, end), 1):
        if zl.warp_index() == 0:
            prepare_any(p, token, head, w)
        zl.barrier()
        if zl.thread_index() < p.v_size:
            beta = sigmoid(p.b[zl.i64(token) * p.b_stride + head])
            of_k, of_q = zl.f32(0), zl.f32(0)
            begins = fresh and token == first
            if not begins:
                for r in zl.unroll(range(p.k_size), 4):
                    old = place[r * p.v_size] * w.decay[r]
                    of_k = zl.fma(old, w.k[r], of_k)
                    of_q = zl.fma(old, w.q[r], of_q)
            at = zl.i64(token) * p.qkv_stride + (2 * p.k_heads * p.k_size + head * p.v_size + column)
            d = beta * (p.qkv[at] - of_k)
            p.out[zl.i64(token) * (p.v_heads * p.v_size) + (head * p.v_size + column)] = zl.fma(d, w.scalars[0], of_q)
            for r in zl.unroll(range(p.k_size), 4):
                old = zl.f32(0)
                if not begins:
                    old = place[r * p.v_size] * w.decay[r]
                place[r * p.v_size] = zl.fma(w.k[r], d, old)
            slot = slot_behind(p, run, token, end)
            if token < end - 1 and slot >= 0:
                left = states + zl.i64(slot) * p.slot_size
                for r in zl.unroll(range(p.k_size), 4):
                    left[r * p.v_size] = place[r * p.v_size] + 0.0
        zl.barrier()


@zl.kernel
def delta_tokens(p: DeltaHead):
    """Grid (v heads, runs)."""
    zl.grid_launch_dependents()
    w = DeltaWork(
        zl.shared_array(zl.f32, GROUP * p.K),
        zl.shared_array(zl.f32, GROUP * p.K),
        zl.shared_array(zl.f32, GROUP * (p.K if p.CHANNELS else 1)),
        zl.shared_array(zl.f32, GROUP * 2),
        zl.shared_array(zl.f32, GROUP * p.V),
        zl.shared_array(zl.f32, GROUP * p.V if p.GATE != "" else 1),
        zl.shared_array(zl.f32, p.V),
        zl.shared_array(zl.f32, 2 * p.rows * p.V),
        zl.shared_array(zl.i32, GROUP),
    )
    head, run = zl.block_index(0), zl.block_index(1)
    first, end = p.run_start[run] + 0, p.run_start[run + 1] + 0
    states = p.state + (p.place + zl.i64(head * (p.K * p.V) + zl.thread_index() * 4))
    place = states + zl.i64(p.run_slot[run]) * p.slot_size
    step = zl.target.threads * 4
    state = [zl.f32.x(4)(0) for _ in zl.static(range(p.K // p.rows))]
    if end - first <= p.most:
        if p.positions[first] != 0:
            for i in zl.static(range(len(state))):
                state[i] = zl.load(place + i * step, 4)
        zl.grid_wait()
        for group in zl.unroll(range(first, end, GROUP), 1):
            if group > first:
                zl.barrier()  # results of the group before are out
            prepare(p, run, group, end, head, w)
            zl.barrier()
            for u in zl.static(range(GROUP)):
                if group + u < end:
                    next_token(p, state, w, u)
                    slot = w.slots[u] + 0
                    if slot >= 0:
                        left = states + zl.i64(slot) * p.slot_size
                        for i in zl.static(range(len(state))):
                            zl.store(left + i * step, state[i])
            zl.barrier()  # results are there, and what was prepared is no longer read
            if zl.warp_index() < min(GROUP, end - group):
                leave_result(p, group + zl.warp_index(), head, w, zl.warp_index())
    else:
        zl.grid_wait()


def record(
    recorder,
    qkv,
    b,
    a,
    A,
    dt_bias,
    state,
    runs,
    out,
    k_heads: int,
    k_size: int,
    tiled: bool = False,
    gate: OutputGate | None = None,
    longest_run: int | None = None,
    work=None,
) -> None:
    """delta() on a GPU. gate: out is bf16 and that of the gated norm behind it, where gates() says so. work: f32 [most
    tokens, state_chunks.work_width() and with a gate the width of out], for recordings with longer runs than SHORT_RUN; without it those go token
    by token, too."""
    args = checked(qkv, b, a, A, dt_bias, state, runs, out, k_heads, k_size, tiled, "f32" if gate is None else "bf16")
    tokens, v_heads, size = out.shape[0], args["v_heads"], args.pop("v_size")
    of_channels = dt_bias.shape[0] != v_heads
    grid = v_heads, args["runs"]
    if not fits(args["qkv"], args["qkv_stride"], k_size, size):
        require(gate is None, f"delta on a GPU: no gated form of {k_size} x {size}")
        args |= dict(k_size=k_size, v_size=size)
        recorder.launch(f"delta_columns{'_channels' * of_channels}", Args(**args), grid)
        return
    sizes = "delta", k_size, size
    chunked = state_chunks.chunks(recorder.device, sizes, work, longest_run) and not of_channels
    if chunked and gate is not None:
        inner = Tensor(work.buffer, (tokens, v_heads * size), "f32", work.offset)
        room, width = work.shape[0], v_heads * size
        rest = Tensor(work.buffer, (room, work.shape[1] - width), "f32", work.offset + 4 * room * width)
        vectors, options = (A, dt_bias, state, runs), (k_heads, k_size, tiled, None, longest_run, rest)
        record(recorder, qkv, b, a, *vectors, inner, *options)
        gated_norm.record(recorder, inner, gate.z, gate.norm, out, gate.eps, v_heads, False, gate.activation)
        return
    z, z_stride = (None, 0) if gate is None else source("delta z", gate.z, tokens, v_heads * size)
    more = dict(z=z, z_stride=z_stride, norm=gate and gate.norm, eps=gate.eps if gate else 0.0)
    more |= dict(most=SHORT_RUN if chunked else MOST)
    form = ("" if gate is None else f"_{gate.activation}") + "_channels" * of_channels
    recorder.launch(f"delta_tokens_{k_size}_{size}{form}", Args(**args, **more), grid)
    if chunked:
        keys = k_heads * k_size
        places = dict(x=args.pop("qkv"), x_stride=args.pop("qkv_stride"), q_at=0, k_at=keys, v_at=2 * keys)
        state_chunks.record(recorder, sizes, work, tokens, **args, **places, D=None, low=0.0, high=0.0)


def fits(qkv, stride: int, k_size: int, v_size: int) -> bool:
    """Whether delta_tokens takes heads of these sizes, qkv lying so."""
    return (k_size, v_size) in SIZES and stride % 4 == 0 and qkv.offset % 16 == 0


def variants(target) -> list[zl.Variant]:
    """Sizes of heads x what becomes of a result x decays by head or by channel."""
    found = [
        zl.Variant(
            f"delta_tokens_{k}_{v}{gate and f'_{gate}'}{'_channels' * channels}",
            delta_tokens,
            {"K": k, "V": v, "CHANNELS": channels, "GATE": gate, "OUT": zl.bf16 if gate else zl.f32},
            threads=threads_of(k, v),
            min_blocks=1 if channels else 2,
        )
        for k, v in SIZES
        for gate in ("", "silu", "sigmoid")
        for channels in (False, True)
        if not (gate and channels)
    ]
    for channels in (False, True):
        symbol = f"delta_columns{'_channels' * channels}"
        found.append(zl.Variant(symbol, delta_columns, {"CHANNELS": channels}, threads=MAX_SIZE))
    return found + state_chunks.variants(target, "delta")
