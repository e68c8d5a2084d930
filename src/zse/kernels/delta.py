"""The gated delta rule of recurrent layers (Gated DeltaNet: Yang et al., arXiv 2412.06464): for each token and v head a
state S [k size, v size] decays, forgets what it had for the token's key, and takes the token's value:

    S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  out = S^T q

g = A softplus(a + dt_bias) is a number of a head, or one of each channel of its keys (Kimi Linear, arXiv 2510.26692);
beta = sigmoid(b); q and k have length 1, q is divided by sqrt(k size).

One token reads and writes the state once, which is its floor. Many tokens of a run take the chunked form of
delta_chunk.py. Results of a run depend on no other run; those of another cut differ by rounding."""

from itertools import product
from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels import delta_chunk
from zse.kernels.columns import embed, source, wide
from zse.kernels.delta_chunk import MAX_SIZE, DeltaParams, channel_steps, head_step, unit_rows
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, cases_of, check, later, launcher, require
from zse.kernels.runs import BATCHES, States, keep_state, piece_end, random_batch, run_args, run_of, state_output, whole
from zse.kernels.small_product import begin, column_steps
from zse.lazy import numpy as np
from zse.runtime.args import Args

LENGTH_EPS = 1e-6  # added to the squared length of q and k
# Tokens of a chunk by what decays; runs of fewer than SHORT take them one by one.
CHUNKS = {"head": 32, "channel": 16}
SHORT = 3


@zl.inline
def step_columns(p, state, value, out, work, beta, overlap, ahead, COUNT):
    """One token's update of COUNT vectors of columns. work: k * decay, q * decay, decay, k, each [k size]. overlap: q
    · k. ahead: how far behind these columns lie those that come next, which are brought nearer."""
    L = zl.target.lanes
    by_key = [zl.f32.x(L)(0) for _ in range(COUNT)]
    by_query = [zl.f32.x(L)(0) for _ in range(COUNT)]
    for r in range(p.k_size):
        line = state + r * p.v_size
        key, query = zl.f32.x(L)(work[r]), zl.f32.x(L)(work[MAX_SIZE + r])
        for v in zl.static(range(COUNT // 2)):  # the other half below: memory is kept busy
            zl.prefetch(line + ahead + v * L)
        for v in zl.static(range(COUNT)):
            old = zl.load(line + v * L, L)
            by_key[v] = zl.fma(old, key, by_key[v])
            by_query[v] = zl.fma(old, query, by_query[v])
    change = [(zl.load(value + v * L, L) - by_key[v]) * beta for v in zl.static(range(COUNT))]
    for v in zl.static(range(COUNT)):
        zl.store(out + v * L, zl.fma(change[v], zl.f32.x(L)(overlap), by_query[v]))
    for r in range(p.k_size):
        line = state + r * p.v_size
        decay, key = zl.f32.x(L)(work[2 * MAX_SIZE + r]), zl.f32.x(L)(work[3 * MAX_SIZE + r])
        for v in zl.static(range(COUNT // 2, COUNT)):
            zl.prefetch(line + ahead + v * L)
        for v in zl.static(range(COUNT)):
            zl.store(line + v * L, zl.fma(change[v], key, zl.load(line + v * L, L) * decay))


@zl.inline
def delta_token(p, head, token, state, work):
    """One token: reads and writes the state once."""
    L = zl.target.lanes
    unit_rows(p, head, token, work + 3 * MAX_SIZE, work + MAX_SIZE)
    overlaps = zl.f32.x(L)(0)
    step = None
    if p.DECAY == "head":
        step = zl.splat(zl.exp(head_step(p, head, token)), L)
    for r in range(0, p.k_size, L):
        key = zl.load(work + 3 * MAX_SIZE + r, L)
        query = zl.load(work + MAX_SIZE + r, L)
        decay = step if p.DECAY == "head" else zl.exp(channel_steps(p, head, token, r))
        overlaps = zl.fma(key, query, overlaps)
        zl.store(work + r, key * decay)
        zl.store(work + MAX_SIZE + r, query * decay)
        zl.store(work + 2 * MAX_SIZE + r, decay)
    overlap = zl.reduce_add(overlaps)
    beta = 1.0 / (1.0 + zl.exp(p.b[token * p.b_stride + head] * -1.0))
    value = p.qkv + (token * p.qkv_stride + 2 * p.k_heads * p.k_size + head * p.v_size)
    out = p.out + (token * p.v_heads + head) * p.v_size
    for count in zl.static(column_steps(8 if L == 16 else 4)):  # twice as many sums in registers
        for c in range(begin(p.v_size, count, 8 if L == 16 else 4), p.v_size // (count * L) * (count * L), count * L):
            ahead = count * L + 0 if c + count * L < p.v_size else p.k_size * p.v_size - c
            step_columns(p, state + c, value + c, out + c, work, beta, overlap, ahead, count)


@zl.kernel
def delta_head(p: DeltaParams):
    """Grid (v heads, runs)."""
    L = zl.target.lanes
    head = zl.block_index(0)
    run = zl.block_index(1)
    first, last, states = run_of(p, run)
    at = head * p.k_size * p.v_size
    state = states + at
    if p.positions[first] == 0:
        for i in range(0, p.k_size * p.v_size, L):
            zl.store(state + i, zl.f32.x(L)(0))
    work = zl.local_array(zl.f32, 4 * MAX_SIZE)
    token = first + 0
    while token < last:
        end = piece_end(p, token, last)
        if end - token >= SHORT:
            token = delta_chunk.delta_chunks(p, head, token, end, state, SHORT)
        for rest in range(token, end):
            delta_token(p, head, rest, state, work)
        keep_state(p, end - 1, last, state, at, p.k_size * p.v_size)
        token = end + 0


class OutputGate(NamedTuple):
    """What makes a head's result ready for the next product: RMSNorm(result) * norm * activation(z). z: f32 [M, v_heads *
    v size], a Tensor or Columns; norm: f32 [v size]; activation: "silu" or "sigmoid"."""

    z: Any
    norm: Any
    eps: float
    activation: str = "silu"


def _delta(
    recorder, qkv, b, a, A, dt_bias, state, runs, out, k_heads: int, k_size: int, tiled=False, longest_run=None
) -> None:
    """out f32 [M, v_heads * v size] of M tokens; the state of each run moves on.

    Args:
        qkv: f32 [M, 2 * k_heads * k_size + v_heads * v size]: q, k and v of all heads. b: f32 [M, v_heads]. a: f32 [M,
            v_heads], or [M, v_heads * k_size] of a decay of each channel. All Tensors or Columns.
        A: f32 [v_heads], negative. dt_bias: f32, one for each column of a.
        state: StatePart [v_heads, k_size, v size]; runs: Runs of the batch.
        k_size, v size: multiples of 16 up to MAX_SIZE.
        tiled: v head j has k head j mod k_heads; else j // (v_heads / k_heads).
        longest_run: the most tokens of a run, where that is known.
    """
    args = checked(qkv, b, a, A, dt_bias, state, runs, out, k_heads, k_size, tiled)
    args |= dict(k_size=k_size, eps=LENGTH_EPS, q_scale=k_size**-0.5)
    decay = "head" if dt_bias.shape == A.shape else "channel"
    recorder.launch(f"delta_{decay}", Args(**args), (A.shape[0], runs.slot.shape[0]))


def checked(qkv, b, a, A, dt_bias, state, runs, out, k_heads, k_size, tiled, dtype: str = "f32") -> dict[str, Any]:
    """The arguments of a kernel but k_size. dtype: of the result."""
    (tokens, width), (v_heads,) = out.shape, A.shape
    require(k_heads > 0 and v_heads % k_heads == 0, f"delta: {v_heads} v heads of {k_heads} k heads")
    require(width % v_heads == 0, f"delta: out is {width} wide, {v_heads} heads")
    v_size = width // v_heads
    for name, size in (("k_size", k_size), ("v size", v_size)):
        require(
            0 < size <= MAX_SIZE and size % 16 == 0, f"delta: {name} {size} is not a multiple of 16 up to {MAX_SIZE}"
        )
    check("delta out", out, dtype, tokens, width)
    check("delta dt_bias", dt_bias, "f32", v_heads if dt_bias.shape == (v_heads,) else v_heads * k_size)
    check("delta A", A, "f32", v_heads)
    qkv, qkv_stride = source("delta qkv", qkv, tokens, 2 * k_heads * k_size + width)
    b, b_stride = source("delta b", b, tokens, v_heads)
    a, a_stride = source("delta a", a, tokens, dt_bias.shape[0])
    args = dict(qkv=qkv, qkv_stride=qkv_stride, b=b, b_stride=b_stride, a=a, a_stride=a_stride, A=A, dt_bias=dt_bias)
    args |= dict(out=out, k_heads=k_heads, v_heads=v_heads, v_size=v_size, tiled=int(tiled))
    return args | run_args("delta", state, runs, tokens, v_heads, k_size, v_size)


delta = launcher(cpu=_delta, gpu=later("gpu.delta", "record"))


def _reference(qkv, b, a, A, dt_bias, state, runs, k_heads, k_size, tiled=False, gate=None, out=None, **_):
    qkv, b, a, A = wide(qkv), wide(b), wide(a), A.astype(np.float64)
    states, tokens, v_heads = States(state, runs), len(qkv), len(A)
    q, k, v = np.split(qkv, [k_heads * k_size, 2 * k_heads * k_size], axis=1)
    kind = np.arange(v_heads) % k_heads if tiled else np.arange(v_heads) // (v_heads // k_heads)
    q, k = (x.reshape(tokens, k_heads, k_size) for x in (q, k))
    q, k = ((x / np.sqrt((x * x).sum(axis=2, keepdims=True) + LENGTH_EPS))[:, kind] for x in (q, k))
    q, v = q / np.sqrt(k_size), v.reshape(tokens, v_heads, -1)
    beta = 1 / (1 + np.exp(-b))
    g = np.logaddexp(0, a + dt_bias).reshape(tokens, v_heads, -1) * A[:, None]
    result = np.empty(v.shape)
    for run, S in states.each():
        for t in run:
            S *= np.exp(g[t])[:, :, None]
            change = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", S, k[t]))
            S += k[t][:, :, None] * change[:, None]
            result[t] = np.einsum("hkv,hk->hv", S, q[t])
            states.behind(t, S)
    if gate is not None:
        z = wide(gate.z).reshape(result.shape)
        result /= np.sqrt((result * result).mean(axis=2, keepdims=True) + gate.eps)
        result *= gate.norm * (z if gate.activation == "silu" else 1) / (1 + np.exp(-z))
    return {"out": result.reshape(tokens, -1), "state.tensor": states.tensor}


# (k heads, v heads, k size, v size), lengths of runs, those that begin, columns beside the inputs.
SHAPES: tuple = (
    ((2, 4, 128, 128), (1, 1, 1), (1,), 0),
    ((2, 4, 128, 128), (70, 1, 3, 129), (0, 3), 64),
    ((1, 1, 16, 48), (1, 5, 4, 64, 65, 16), (0, 2, 4), 0),
    ((2, 2, 32, 16), (33, 2, 7, 200), (3,), 32),
    ((1, 3, 64, 80), (31, 63, 17), (1,), 0),
    ((1, 2, 48, 64), (16, 2, 9, 17, 3), (2,), 0),
)


NEAR = Tolerance(1e-5, 1e-5, "f32 sums over k size, over a chunk and from chunk to chunk, of numbers of some units")
# Model: k heads, v heads, k size, v size.
MODELS = {"Qwen3.5-0.8B": (16, 16, 128, 128), "Qwen3.5-9B": (16, 32, 128, 128)}


def cases(rng):
    for decay, shape in product(CHUNKS, SHAPES):
        yield make_case(rng, decay, *shape, NEAR)


def _sizes(rng):
    for (model, sizes), (batch, lengths) in product(MODELS.items(), BATCHES.items()):
        case = make_case(rng, "head", sizes, lengths, (), 0, NEAR)
        case.name = f"{model}, {batch}"
        yield case, whole(_reference, case)


def make_case(rng, decay: str, sizes, lengths, fresh, beside: int, near: Tolerance) -> Case:
    """A case of one of SHAPES; decay: of CHUNKS."""
    k_heads, v_heads, k_size, v_size = sizes
    tokens = sum(lengths)
    runs, state = random_batch(rng, lengths, fresh, v_heads, k_size, v_size)
    columns = v_heads if decay == "head" else v_heads * k_size
    # Decays from none to all that there is, as trained models have them side by side.
    widths = {"qkv": (2 * k_heads * k_size + v_heads * v_size, 1), "b": (v_heads, 2), "a": (columns, 3)}
    inputs = {
        name: (rng.standard_normal((tokens, width)) * scale).astype(np.float32)
        for name, (width, scale) in widths.items()
    }
    if beside:
        inputs = {name: embed(rng, array, beside, 16) for name, array in inputs.items()}
    inputs |= {
        "A": -np.exp(rng.uniform(-3, 2.5, v_heads)).astype(np.float32),
        "dt_bias": rng.uniform(-4, 1, columns).astype(np.float32),
        "state": state,
        "runs": runs,
    }
    outputs = {"out": OutputSpec((tokens, v_heads * v_size), "float32", near), **state_output(state, near)}
    options = {"k_heads": k_heads, "k_size": k_size, "tiled": len(lengths) % 2 == 1}
    return Case(f"{decay} {k_heads}/{v_heads} of {k_size}x{v_size}, runs {lengths}", inputs, outputs, options)


def _cost(case: Case) -> Cost:
    """The state once in and once out for each run; the products of the recurrence."""
    tokens, width = case.outputs["out"].shape
    k_size, runs, v_heads = case.options["k_size"], len(case.inputs["runs"].slot), len(case.inputs["A"])
    qkv = wide(case.inputs["qkv"]).shape[1]
    return Cost(4 * (2 * runs * width * k_size + tokens * (qkv + width + 2 * v_heads)), 6 * tokens * width * k_size)


def _variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"delta_{decay}", delta_head, {"DECAY": decay, "CHUNK": chunk}) for decay, chunk in CHUNKS.items()
    ]


DELTA = Op(
    "delta",
    _variants,
    delta,
    _reference,
    cases_of(cpu=cases, gpu=later("gpu.state_cases", "delta_cases")),
    _cost,
    later("gpu.delta", "variants"),
    cases_of(cpu=_sizes, gpu=later("gpu.state_sizes", "delta_sizes")),
)
