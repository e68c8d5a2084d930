"""Mamba-2 (Dao and Gu, arXiv 2405.21060): for each token and head a state S [state size, head size] decays and takes the
token's values, by keys B and queries C of the head's group:

    S = exp(dt A) S + B (dt x)^T;  out = S^T C + D x,   dt = softplus(dt + dt_bias) within limits

One token reads and writes the state once, which is its floor. Many tokens of a run go in chunks of CHUNK, where G_t is
the sum of dt A up to token t and no exponent is positive:

    out = exp(G) C S + P (dt X) + D X,  P_ti = exp(G_t - G_i) C_t · B_i for i <= t
    S = exp(G_last) S + sum of exp(G_last - G_i) B_i (dt_i x_i)^T

A block has up to HEADS heads of a group, which share C_t · B_i and the turned keys. Results of a run depend on no other
run; those of another cut differ by rounding."""

from itertools import product
from typing import Any

from zse import kernel as zl
from zse.kernels.columns import embed, source, wide
from zse.kernels.delta_chunk import MAX_SIZE, STEPS, softplus
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, cases_of, check, later, launcher, require
from zse.kernels.runs import (
    BATCHES,
    KeepParams,
    States,
    keep_state,
    piece_end,
    random_batch,
    run_args,
    run_of,
    state_output,
    whole,
)
from zse.kernels.small_product import ROWS, add_products, begin, column_steps, vectors
from zse.lazy import numpy as np
from zse.runtime.args import Args

CHUNK = 32
SHORT = 3  # tokens of a run that are worth a chunk
HEADS = 4  # of a block, where that leaves each thread two blocks
NO_LIMITS = (0.0, float("inf"))


class StateScan(KeepParams):
    """x, dt f32, rows x_stride and dt_stride apart. per_group: heads of a group, which go to `blocks`
    blocks, share to each."""

    x: zl.Ptr[zl.f32, "const"]
    dt: zl.Ptr[zl.f32, "const"]
    A: zl.Ptr[zl.f32, "const"]
    D: zl.Ptr[zl.f32, "const"]
    dt_bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    x_stride: zl.index
    dt_stride: zl.index
    heads: zl.index
    groups: zl.index
    per_group: zl.index
    blocks: zl.index
    share: zl.index
    head_size: zl.index
    state_size: zl.index
    dt_low: zl.f32
    dt_high: zl.f32
    CHUNK: zl.static


class StateScratch(zl.Record):
    """turned [state size, CHUNK]: B^T; raw [CHUNK, CHUNK]: C · B; scores [CHUNK, CHUNK]: of a head, times dt; values
    [CHUNK, head size]: what the state takes; wholes, rests [CHUNK]: the sum of logs as a multiple of 1 / STEPS and the
    rest; steps [CHUNK]: dt; order [CHUNK]: 0, 1, ..."""

    turned: object
    raw: object
    scores: object
    values: object
    wholes: object
    rests: object
    steps: object
    order: object


@zl.inline
def keys_of(p, group, token):
    """(B, C) of a token."""
    row = p.x + token * p.x_stride + p.heads * p.head_size + group * p.state_size
    return row, row + p.groups * p.state_size


@zl.inline
def time_step(p, head, token):
    """dt."""
    return min(max(softplus(p.dt[token * p.dt_stride + head] + p.dt_bias[head]), p.dt_low), p.dt_high)


@zl.inline
def scan_token(p, head, group, token, state):
    """One token: reads and writes the state once."""
    L = zl.target.lanes
    step = time_step(p, head, token)
    decay = zl.exp(step * p.A[head])
    B, C = keys_of(p, group, token)
    x = p.x + token * p.x_stride + head * p.head_size
    out = p.out + (token * p.heads + head) * p.head_size
    for vecs in zl.static(column_steps(vectors())):
        for c in range(begin(p.head_size, vecs, vectors()), p.head_size // (vecs * L) * (vecs * L), vecs * L):
            values = [zl.load(x + c + v * L, L) * step for v in zl.static(range(vecs))]
            # Two sums a column: a chain of multiply-adds would take longer than the loads.
            sums = [[zl.f32.x(L)(0) for _ in range(vecs)] for _ in range(2)]
            for n in range(0, p.state_size, 2):
                for u in zl.static(range(2)):
                    line = state + (n + u) * p.head_size + c
                    for v in zl.static(range(vecs)):
                        new = zl.fma(values[v], zl.f32.x(L)(B[n + u]), zl.load(line + v * L, L) * decay)
                        zl.store(line + v * L, new)
                        sums[u][v] = zl.fma(new, zl.f32.x(L)(C[n + u]), sums[u][v])
            for v in zl.static(range(vecs)):
                own = zl.load(x + c + v * L, L) * p.D[head]
                zl.store(out + c + v * L, (sums[0][v] + sums[1][v]) + own)


@zl.inline
def group_scores(p, w, group, token, count):
    """raw = C · B on and below the diagonal of tiles, and turned keys, of all heads of the group."""
    L, C, N = zl.target.lanes, p.CHUNK, p.state_size
    for t in range(count):
        B, _ = keys_of(p, group, token + t)
        for n in range(N):
            w.turned[n * C + t] = B[n]
    for t in range(0, count, ROWS):
        lines = [keys_of(p, group, token + min(t + r, count - 1))[1] for r in zl.static(range(ROWS))]
        seen = (t + ROWS + L - 1) // L * L
        for vecs in zl.static(column_steps(vectors())):
            for i in range(begin(seen, vecs, vectors()), seen // (vecs * L) * (vecs * L), vecs * L):
                sums = [[zl.f32.x(L)(0) for _ in range(vecs)] for _ in range(ROWS)]
                add_products(sums, lines, w.turned + i, C, N)
                for r in zl.static(range(ROWS)):
                    for v in zl.static(range(vecs)):
                        zl.store(w.raw + (t + r) * C + i + v * L, sums[r][v])


@zl.inline
def head_logs(p, w, head, token, count):
    """steps, wholes and rests of a head, and the values that the state takes of the chunk."""
    L, P = zl.target.lanes, p.head_size
    total = zl.f64(0)
    for t in range(count):
        step = time_step(p, head, token + t)
        total += zl.f64(step * p.A[head])
        w.steps[t] = step
        w.wholes[t] = zl.round_even(zl.f32(total) * STEPS) / STEPS
        w.rests[t] = zl.f32(total - zl.f64(w.wholes[t]))
    last = count - 1
    for t in range(count):
        left = zl.exp((w.wholes[last] - w.wholes[t]) + (w.rests[last] - w.rests[t])) * w.steps[t]
        x = p.x + (token + t) * p.x_stride + head * P
        for c in range(0, P, L):
            zl.store(w.values + t * P + c, zl.load(x + c, L) * left)


@zl.inline
def head_scores(p, w, count):
    """scores = P dt of a head."""
    L, C = zl.target.lanes, p.CHUNK
    for t in range(count):
        for i in range(0, t + 1, L):
            wholes = w.wholes[t] - zl.load(w.wholes + i, L)
            decay = zl.exp(min(wholes + (w.rests[t] - zl.load(w.rests + i, L)), 0.0))
            score = zl.load(w.raw + t * C + i, L) * decay * zl.load(w.steps + i, L)
            zl.store(w.scores + t * C + i, zl.where(zl.load(w.order + i, L) <= zl.f32(t), score, 0.0))
        for after in range(t + 1, min(t // ROWS * ROWS + ROWS, C)):
            w.scores[t * C + after] = 0.0


@zl.inline
def head_outputs(p, w, head, group, token, count, state):
    """out of a chunk's tokens."""
    L, C, P = zl.target.lanes, p.CHUNK, p.head_size
    x = p.x + token * p.x_stride + head * P
    for vecs in zl.static(column_steps(vectors())):
        for c in range(begin(P, vecs, vectors()), P // (vecs * L) * (vecs * L), vecs * L):
            for t in range(0, count, ROWS):
                rows = [min(t + r, count - 1) for r in zl.static(range(ROWS))]
                lines = [keys_of(p, group, token + rows[r])[1] for r in zl.static(range(ROWS))]
                sums = [[zl.f32.x(L)(0) for _ in range(vecs)] for _ in range(ROWS)]
                add_products(sums, lines, state + c, P, p.state_size)
                for r in zl.static(range(ROWS)):
                    decay = zl.exp(w.wholes[rows[r]] + w.rests[rows[r]])
                    own = x + rows[r] * p.x_stride + c
                    for v in zl.static(range(vecs)):
                        sums[r][v] = zl.fma(sums[r][v], zl.f32.x(L)(decay), zl.load(own + v * L, L) * p.D[head])
                scores = [w.scores + rows[r] * C for r in zl.static(range(ROWS))]
                add_products(sums, scores, x + c, p.x_stride, min(t + ROWS, count))
                for r in zl.static(range(ROWS)):
                    if t + r < count:
                        out = p.out + ((token + t + r) * p.heads + head) * P + c
                        for v in zl.static(range(vecs)):
                            zl.store(out + v * L, sums[r][v])


@zl.inline
def next_state(p, w, count, state):
    """S = exp(G_last) S + B^T values."""
    L, C, P = zl.target.lanes, p.CHUNK, p.head_size
    decay = zl.exp(w.wholes[count - 1] + w.rests[count - 1])
    for vecs in zl.static(column_steps(vectors())):
        for c in range(begin(P, vecs, vectors()), P // (vecs * L) * (vecs * L), vecs * L):
            for n in range(0, p.state_size, ROWS):
                lines = [state + (n + r) * P + c for r in zl.static(range(ROWS))]
                sums = [[zl.load(line + v * L, L) * decay for v in zl.static(range(vecs))] for line in lines]
                add_products(sums, [w.turned + (n + r) * C for r in zl.static(range(ROWS))], w.values + c, P, count)
                for r in zl.static(range(ROWS)):
                    for v in zl.static(range(vecs)):
                        zl.store(lines[r] + v * L, sums[r][v])


@zl.kernel
def scan_heads(p: StateScan):
    """Grid (groups * blocks, runs)."""
    L, C = zl.target.lanes, p.CHUNK
    group = zl.block_index(0) // p.blocks
    first_head = group * p.per_group + zl.block_index(0) % p.blocks * p.share
    last_head = min(first_head + p.share, (group + 1) * p.per_group)
    run = zl.block_index(1)
    first, last, states = run_of(p, run)
    size = p.state_size * p.head_size
    if p.positions[first] == 0:
        for i in range(first_head * size, last_head * size, L):
            zl.store(states + i, zl.f32.x(L)(0))
    w = StateScratch(
        turned=zl.local_array(zl.f32, C * MAX_SIZE),
        raw=zl.local_array(zl.f32, C * C),
        scores=zl.local_array(zl.f32, C * C),
        values=zl.local_array(zl.f32, C * MAX_SIZE),
        wholes=zl.local_array(zl.f32, C),
        rests=zl.local_array(zl.f32, C),
        steps=zl.local_array(zl.f32, C),
        order=zl.local_array(zl.f32, C),
    )
    for i in range(C):
        w.order[i] = zl.f32(i)
    token = first + 0
    while token < last:
        end = piece_end(p, token, last)
        while end - token >= SHORT:
            count = min(end - token, C)
            group_scores(p, w, group, token, count)
            for head in range(first_head, last_head):
                head_logs(p, w, head, token, count)
                head_scores(p, w, count)
                head_outputs(p, w, head, group, token, count, states + head * size)
                next_state(p, w, count, states + head * size)
            token += count
        for rest in range(token, end):
            for head in range(first_head, last_head):
                scan_token(p, head, group, rest, states + head * size)
        own = first_head * size
        keep_state(p, end - 1, last, states + own, own, (last_head - first_head) * size)
        token = end + 0


def _scan(
    recorder, x, dt, A, D, dt_bias, state, runs, out, groups: int, state_size: int, dt_limits=None, longest_run=None
) -> None:
    """out f32 [M, heads * head size] of M tokens; the state of each run moves on.

    Args:
        x: f32 [M, heads * head size + 2 * groups * state_size]: x of all heads, then B and C of all groups. dt: f32 [M,
            heads]. Both Tensors or Columns.
        A, D, dt_bias: f32 [heads]; A is negative.
        state: StatePart [heads, state_size, head size]; runs: Runs of the batch.
        state_size, head size: multiples of 16 up to MAX_SIZE.
        dt_limits: (low, high) of time steps; None: none.
        longest_run: the most tokens of a run, where that is known.
    """
    heads = A.shape[0]
    args = checked(x, dt, A, D, dt_bias, state, runs, out, groups, state_size, dt_limits)
    share, per_group = HEADS, heads // groups
    while share > 1 and groups * -(-per_group // share) < 2 * recorder.device.threads:
        share //= 2
    args |= dict(per_group=per_group, blocks=(blocks := -(-per_group // share)), share=share)
    args |= dict(head_size=out.shape[1] // heads, state_size=state_size)
    recorder.launch("scan", Args(**args), (groups * blocks, runs.slot.shape[0]))


def checked(x, dt, A, D, dt_bias, state, runs, out, groups, state_size, dt_limits) -> dict[str, Any]:
    """The arguments that all kernels have."""
    (tokens, width), (heads,) = out.shape, A.shape
    require(groups > 0 and heads % groups == 0, f"scan: {heads} heads of {groups} groups")
    require(width % heads == 0, f"scan: out is {width} wide, {heads} heads")
    head_size, (low, high) = width // heads, dt_limits or NO_LIMITS
    for name, size in (("state_size", state_size), ("head size", head_size)):
        require(
            0 < size <= MAX_SIZE and size % 16 == 0, f"scan: {name} {size} is not a multiple of 16 up to {MAX_SIZE}"
        )
    check("scan out", out, "f32", tokens, width)
    for name, vector in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        check(f"scan {name}", vector, "f32", heads)
    x, x_stride = source("scan x", x, tokens, width + 2 * groups * state_size)
    dt, dt_stride = source("scan dt", dt, tokens, heads)
    args = dict(x=x, dt=dt, A=A, D=D, dt_bias=dt_bias, out=out, x_stride=x_stride, dt_stride=dt_stride, heads=heads)
    args |= dict(groups=groups, dt_low=float(low), dt_high=float(high))
    return args | run_args("scan", state, runs, tokens, heads, state_size, head_size)


scan = launcher(cpu=_scan, gpu=later("gpu.scan", "record"))


def _reference(x, dt, A, D, dt_bias, state, runs, groups, state_size, dt_limits=None, out=None, **_):
    x, dt, A, D = wide(x), wide(dt), A.astype(np.float64), D.astype(np.float64)
    states, tokens, heads = States(state, runs), len(x), len(A)
    inner = x.shape[1] - 2 * groups * state_size
    values, B, C = np.split(x, [inner, inner + groups * state_size], axis=1)
    values = values.reshape(tokens, heads, -1)
    B, C = (part.reshape(tokens, groups, state_size).repeat(heads // groups, axis=1) for part in (B, C))
    steps = np.clip(np.logaddexp(0, dt + dt_bias), *(dt_limits or NO_LIMITS))
    result = np.empty(values.shape)
    for run, S in states.each():
        for t in run:
            S *= np.exp(steps[t] * A)[:, None, None]
            S += B[t][:, :, None] * (steps[t][:, None] * values[t])[:, None]
            result[t] = np.einsum("hnp,hn->hp", S, C[t]) + D[:, None] * values[t]
            states.behind(t, S)
    return {"out": result.reshape(tokens, -1), "state.tensor": states.tensor}


# (heads, groups, head size, state size), lengths of runs, those that begin, columns beside the inputs, limits of dt.
SHAPES: tuple = (
    ((8, 1, 64, 128), (1, 1, 1), (1,), 0, None),
    ((8, 2, 64, 128), (70, 1, 3, 129), (0, 3), 64, None),
    ((1, 1, 16, 48), (1, 5, 4, 64, 65, 16), (0, 2, 4), 0, (0.1, 2.0)),
    ((10, 2, 80, 16), (33, 2, 7, 200), (3,), 32, (0.0, 1.5)),
    ((3, 3, 32, 64), (31, 63, 17), (1,), 0, None),
    ((6, 2, 48, 32), (16, 2, 9, 17, 3), (2,), 0, None),
)


NEAR = Tolerance(1e-5, 1e-5, "f32 sums over state size, over a chunk and from chunk to chunk, of numbers of up to 10")
# Model: heads, groups, head size, state size.
MODELS = {"Granite 4 h-tiny": (48, 1, 64, 128), "Nemotron 3 Nano": (64, 8, 64, 128)}


def cases(rng):
    for shape in SHAPES:
        yield make_case(rng, *shape, NEAR)


def _sizes(rng):
    for (model, sizes), (batch, lengths) in product(MODELS.items(), BATCHES.items()):
        case = make_case(rng, sizes, lengths, (), 0, None, NEAR)
        case.name = f"{model}, {batch}"
        yield case, whole(_reference, case)


def make_case(rng, sizes, lengths, fresh, beside: int, limits, near: Tolerance) -> Case:
    """A case of one of SHAPES."""
    heads, groups, head_size, state_size = sizes
    tokens, width = sum(lengths), heads * head_size
    runs, state = random_batch(rng, lengths, fresh, heads, state_size, head_size)
    columns = width + 2 * groups * state_size
    scales = np.where(np.arange(columns) < width, 1.0, state_size**-0.5)  # keys and queries of about length 1
    inputs = {
        "x": (rng.standard_normal((tokens, columns)) * scales).astype(np.float32),
        "dt": (rng.standard_normal((tokens, heads)) * 2).astype(np.float32),
    }
    if beside:
        inputs = {name: embed(rng, array, beside, 16) for name, array in inputs.items()}
    inputs |= {
        "A": -np.exp(rng.uniform(-3, 2.5, heads)).astype(np.float32),
        "D": rng.standard_normal(heads).astype(np.float32),
        "dt_bias": rng.uniform(-4, 1, heads).astype(np.float32),
        "state": state,
        "runs": runs,
    }
    outputs = {"out": OutputSpec((tokens, width), "float32", near), **state_output(state, near)}
    options = {"groups": groups, "state_size": state_size, "dt_limits": limits}
    return Case(f"{heads}/{groups} of {state_size}x{head_size}, runs {lengths}", inputs, outputs, options)


def _cost(case: Case) -> Cost:
    """The state once in and once out for each run; the products of the recurrence."""
    tokens, width = case.outputs["out"].shape
    size, runs, heads = case.options["state_size"], len(case.inputs["runs"].slot), len(case.inputs["A"])
    columns = wide(case.inputs["x"]).shape[1]
    return Cost(4 * (2 * runs * width * size + tokens * (columns + width + heads)), 4 * tokens * width * size)


SCAN = Op(
    "scan",
    lambda target: [zl.Variant("scan", scan_heads, {"CHUNK": CHUNK})],
    scan,
    _reference,
    cases_of(cpu=cases, gpu=later("gpu.state_cases", "scan_cases")),
    _cost,
    later("gpu.scan", "variants"),
    cases_of(cpu=_sizes, gpu=later("gpu.state_sizes", "scan_sizes")),
)
