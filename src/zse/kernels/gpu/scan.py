"""Mamba-2's recurrence on a GPU, token by token: decoding, short runs, and all runs where there are no matrix units.

A block has one head of one run, its state [state size, head size] in registers, four columns and N / ROWS rows a thread;
what its threads sum up with C goes by shared memory. The state is read before the wait for the kernels before: nothing
else in a step writes it. What must be moved is the state, twice: 4 MiB each way for 128 heads of 64 x 128."""

from zse import kernel as zl
from zse.kernels.delta_chunk import MAX_SIZE
from zse.kernels.gpu import state_chunks
from zse.kernels.gpu.state import softplus
from zse.kernels.runs import KeepParams, slot_behind
from zse.kernels.scan import checked
from zse.runtime.args import Args
from zse.tensor import SHORT_RUN

THREADS = 256
SIZES = ((128, 64), (64, 64))  # state and head size: Granite's and Nemotron's the first
MOST = 1 << 30  # no run has more tokens


class ScanHeads(KeepParams):
    """x f32, rows x_stride apart: [x | B | C], heads of head_size, groups of state_size, the same. dt: of steps, rows
    dt_stride apart; A, D, dt_bias f32 [heads]; dt_low, dt_high: of steps."""

    x: zl.Ptr[zl.f32, "const"]
    dt: zl.Ptr[zl.f32, "const"]
    A: zl.Ptr[zl.f32, "const"]
    D: zl.Ptr[zl.f32, "const"]
    dt_bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    x_stride: zl.i32
    dt_stride: zl.i32
    heads: zl.i32
    groups: zl.i32
    dt_low: zl.f32
    dt_high: zl.f32


class HeadParams(ScanHeads):
    """The parameters of scan_tokens. most: tokens of the runs that are computed here."""

    most: zl.i32
    N: zl.static
    P: zl.static

    @property
    def columns(self) -> int:
        """Threads that share a row of the state."""
        return self.P // 4

    @property
    def rows(self) -> int:
        """Rows that a block's threads have at once."""
        return threads_of(self.N, self.P) // self.columns


class AnyHeadParams(ScanHeads):
    """The parameters of scan_columns."""

    state_size: zl.i32
    head_size: zl.i32


def threads_of(n: int, p: int) -> int:
    return min(THREADS, n * p // 4)


@zl.inline
def gates_of(p, token, head):
    """(a token's step, its decay)."""
    step = softplus(p.dt[zl.i64(token) * p.dt_stride + head] + p.dt_bias[head])
    step = min(max(step, p.dt_low), p.dt_high)
    return step, zl.exp(step * p.A[head])


@zl.inline
def next_token(p, token, head, state, parts):
    """The state behind a token, and its result."""
    t = zl.thread_index()
    row, column = t // p.columns, t % p.columns * 4
    line = p.x + zl.i64(token) * p.x_stride
    keys = line + (p.heads * p.P + head // (p.heads // p.groups) * p.N + row)
    values = line + head * p.P
    step, decay = gates_of(p, token, head)
    value = zl.load(values + column, 4) * step
    total = zl.f32.x(4)(0)
    for i in zl.static(range(len(state))):
        key, query = keys[i * p.rows] + 0.0, keys[p.groups * p.N + i * p.rows] + 0.0
        state[i] = zl.fma(value, zl.splat(key, 4), state[i] * decay)
        total = zl.fma(state[i], zl.splat(query, 4), total)
    zl.store(parts + t * 4, total)
    zl.barrier()
    if t < p.P:
        sums = [zl.f32(0) for _ in zl.static(range(2))]
        for r in zl.static(range(p.rows)):
            sums[r % 2] += parts[r * p.P + t]
        p.out[zl.i64(token) * (p.heads * p.P) + (head * p.P + t)] = zl.fma(values[t], p.D[head], sums[0] + sums[1])


@zl.kernel
def scan_tokens(p: HeadParams):
    """Grid (heads, runs)."""
    zl.grid_launch_dependents()
    parts = zl.shared_array(zl.f32, p.rows * p.P)
    head, run = zl.block_index(0), zl.block_index(1)
    first, end = p.run_start[run] + 0, p.run_start[run + 1] + 0
    states = p.state + (p.place + zl.i64(head * (p.P * p.N) + zl.thread_index() * 4))
    place = states + zl.i64(p.run_slot[run]) * p.slot_size
    step = zl.target.threads * 4
    state = [zl.f32.x(4)(0) for _ in zl.static(range(p.N // p.rows))]
    if end - first <= p.most:
        if p.positions[first] != 0:
            for i in zl.static(range(len(state))):
                state[i] = zl.load(place + i * step, 4)
        zl.grid_wait()
        for token in zl.unroll(range(first, end), 1):
            if token > first:
                zl.barrier()  # the sums of the token before were read
            next_token(p, token, head, state, parts)
            slot = slot_behind(p, run, token, end)
            if slot >= 0:
                left = states + zl.i64(slot) * p.slot_size
                for i in zl.static(range(len(state))):
                    zl.store(left + i * step, state[i])
    else:
        zl.grid_wait()


@zl.kernel
def scan_columns(p: AnyHeadParams):
    """Grid (heads, runs): sizes that scan_tokens has no form of. A thread has a column of the state, in memory."""
    zl.grid_launch_dependents()
    head, run, column = zl.block_index(0), zl.block_index(1), zl.thread_index()
    zl.grid_wait()
    if column >= p.head_size:
        return
    first, end = p.run_start[run] + 0, p.run_start[run + 1] + 0
    states = p.state + (p.place + zl.i64(head * (p.state_size * p.head_size) + column))
    place = states + zl.i64(p.run_slot[run]) * p.slot_size
    fresh = p.positions[first] == 0
    for token in zl.unroll(range(first, end), 1):
        line = p.x + zl.i64(token) * p.x_stride
        keys = line + (p.heads * p.head_size + head // (p.heads // p.groups) * p.state_size)
        x = line[head * p.head_size + column] + 0.0
        step, decay = gates_of(p, token, head)
        total = zl.f32(0)
        for n in zl.unroll(range(p.state_size), 4):
            old = zl.f32(0)
            if not (fresh and token == first):
                old = place[n * p.head_size] * decay
            new = zl.fma(keys[n], x * step, old)
            place[n * p.head_size] = new
            total = zl.fma(new, keys[p.groups * p.state_size + n], total)
        p.out[zl.i64(token) * (p.heads * p.head_size) + (head * p.head_size + column)] = zl.fma(x, p.D[head], total)
        slot = slot_behind(p, run, token, end)
        if token < end - 1 and slot >= 0:
            left = states + zl.i64(slot) * p.slot_size
            for n in zl.unroll(range(p.state_size), 4):
                left[n * p.head_size] = place[n * p.head_size] + 0.0


def record(
    recorder,
    x,
    dt,
    A,
    D,
    dt_bias,
    state,
    runs,
    out,
    groups: int,
    state_size: int,
    dt_limits: tuple[float, float] | None = None,
    longest_run: int | None = None,
    work=None,
) -> None:
    """scan() on a GPU. work: f32 [most tokens, state_chunks.work_width()], for recordings with longer runs than
    SHORT_RUN; without it those go token by token, too."""
    args = checked(x, dt, A, D, dt_bias, state, runs, out, groups, state_size, dt_limits)
    (tokens, width), heads = out.shape, args["heads"]
    size, grid = width // heads, (heads, args["runs"])
    if (state_size, size) not in SIZES or args["x_stride"] % 4 or args["x"].offset % 16:
        recorder.launch("scan_columns", Args(**args, state_size=state_size, head_size=size), grid)
        return
    sizes = "scan", state_size, size
    chunked = state_chunks.chunks(recorder.device, sizes, work, longest_run)
    most = SHORT_RUN if chunked else MOST
    recorder.launch(f"scan_tokens_{state_size}_{size}", Args(**args, most=most), grid)
    if chunked:
        for old, new in (("dt", "a"), ("dt_stride", "a_stride"), ("heads", "v_heads"), ("groups", "k_heads")):
            args[new] = args.pop(old)
        for old, new in (("dt_low", "low"), ("dt_high", "high")):
            args[new] = args.pop(old)
        places = dict(q_at=width + groups * state_size, k_at=width, v_at=0, tiled=0, b=None, b_stride=0)
        state_chunks.record(recorder, sizes, work, tokens, **args, **places)


def variants(target) -> list[zl.Variant]:
    """Sizes of heads, and any."""
    found = [
        zl.Variant(f"scan_tokens_{n}_{p}", scan_tokens, {"N": n, "P": p}, threads=threads_of(n, p), min_blocks=2)
        for n, p in SIZES
    ]
    found.append(zl.Variant("scan_columns", scan_columns, threads=MAX_SIZE))
    return found + state_chunks.variants(target, "scan")
