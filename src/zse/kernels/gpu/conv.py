"""The short causal convolution on a GPU: a thread has four channels of a chunk of a run, its window in registers.

Chunks of TOKENS tokens begin with their run, so that what lies before any but the first comes from the inputs themselves:
only the first touches the run's state. It reads the old one and leaves the run's last inputs. States behind tokens before
are left by who computes these tokens, from registers."""

from zse import kernel as zl
from zse.kernels.columns import source
from zse.kernels.conv import ConvParams, check_conv, forms
from zse.kernels.gpu.state import chunk_of, four, run_of
from zse.kernels.op import require
from zse.kernels.runs import run_args
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div

THREADS = 128
COLUMNS = THREADS * 4  # channels of a block
CHUNK = 8  # tokens of a block; 1 where no run has more


class ConvTokens(ConvParams):
    """The parameters of conv_tokens. ALIGNED: rows of x begin at multiples of 16 bytes."""

    out: zl.Ptr["OUT"]
    OUT: zl.static
    ALIGNED: zl.static


@zl.inline
def input_at(p, token, at):
    """What is convolved of a token, four channels: x, or B * x."""
    row = p.x + zl.i64(token) * p.x_stride + at
    value = four(row, p.ALIGNED)
    if p.GATED:
        value = value * four(row + 2 * p.channels, p.ALIGNED)
    return value


@zl.inline
def leave_state(p, run, old, at):
    """The run's last inputs as its state: those of `old` that are left of a run shorter than the window before them."""
    K = p.KERNEL
    first, end = p.run_start[run], p.run_start[run + 1]
    state = p.state + (zl.i64(p.run_slot[run]) * p.slot_size + p.place + at)
    for j in zl.static(range(K - 1)):
        token = end - (K - 1) + j
        value = old[j] + 0.0
        if token >= first:
            value = input_at(p, token, at)
        else:
            for n in zl.static(range(1, K - 1 - j)):
                if end - first == n:
                    value = old[j + n] + 0.0
        zl.store(state + j * p.channels, value)


@zl.inline
def keep_window(p, token, last, window, at):
    """Leaves the window behind a token that is not its run's last where it is to be left."""
    if p.keeps != 0 and token < last - 1:
        slot = p.leave[token] + 0
        if slot >= 0:
            state = p.state + (zl.i64(slot) * p.slot_size + p.place + at)
            for j in zl.static(range(p.KERNEL - 1)):
                zl.store(state + j * p.channels, window[j])


@zl.inline
def begin_run(p, run, window, at):
    """The window before a run's first token, from its state; the state is what it will be behind the run."""
    K = p.KERNEL
    state = p.state + (zl.i64(p.run_slot[run]) * p.slot_size + p.place + at)
    fresh = p.positions[p.run_start[run]] == 0
    for j in zl.static(range(K - 1)):
        window[j] = zl.f32.x(4)(0)
        if not fresh:
            window[j] = zl.load(state + j * p.channels, 4)
    leave_state(p, run, window, at)


@zl.inline
def conv_chunk(p, run, begin, end, weights, bias, at, TOKENS):
    """Tokens begin to end - 1 of a run, up to TOKENS."""
    K = p.KERNEL
    values = [zl.f32.x(4)(0) for _ in zl.static(range(TOKENS))]
    window = [zl.f32.x(4)(0) for _ in zl.static(range(K - 1))]
    for u in zl.static(range(TOKENS)):
        if begin + u < end:
            values[u] = input_at(p, begin + u, at)
    if begin == p.run_start[run]:
        begin_run(p, run, window, at)
    elif TOKENS > 1:
        for j in zl.static(range(K - 1)):
            window[j] = input_at(p, begin - (K - 1) + j, at)
    for u in zl.static(range(TOKENS)):
        token = begin + u
        if token < end:
            total = zl.fma(values[u], weights[K - 1], bias)
            for j in zl.static(range(K - 1)):
                total = zl.fma(window[j], weights[j], total)
            if p.ACTIVATION == "silu":
                total = total * zl.reciprocal(1.0 + zl.exp(total * -1.0))
            if p.GATED:
                total = total * four(p.x + (zl.i64(token) * p.x_stride + p.channels + at), p.ALIGNED)
            zl.store(p.out + (zl.i64(token) * p.channels + at), zl.convert(total, p.OUT))
            for j in zl.static(range(K - 2)):
                window[j] = window[j + 1]
            window[K - 2] = values[u]
            if TOKENS > 1:
                keep_window(p, token, p.run_start[run + 1], window, at)


@zl.kernel
def conv_tokens(p: ConvTokens, TOKENS: zl.static):
    """Grid (channels / COLUMNS, tokens / TOKENS)."""
    K = p.KERNEL
    zl.grid_launch_dependents()
    at = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * 4
    here = min(at, p.channels - 4)  # those behind the last channel read, and leave nothing
    taps = [zl.load(p.weight + (here * K + j * 4), 4) for j in zl.static(range(K))]  # four channels' K each
    weights = [
        zl.make_vector(*[taps[(c * K + j) // 4][(c * K + j) % 4] for c in range(4)]) for j in zl.static(range(K))
    ]
    bias = zl.f32.x(4)(0)
    if p.BIAS:
        bias = zl.load(p.bias + here, 4)
    zl.grid_wait()
    if at >= p.channels:
        return
    segment = zl.block_index(1) * TOKENS
    run = segment if TOKENS == 1 else run_of(p, segment)
    while run < p.runs and p.run_start[min(run, p.runs - 1)] < segment + TOKENS:
        begin, end = chunk_of(p, run, segment, TOKENS)
        if begin < end:
            conv_chunk(p, run, begin, end, weights, bias, at, TOKENS)
        run += 1


def record(
    recorder, x, weight, bias, state, runs, out, activation: str = "", gated: bool = False, longest_run=None
) -> None:
    """conv() on a GPU: C a multiple of 4; out of a gated form is bf16."""
    tokens, channels = out.shape
    symbol = check_conv(out, weight, bias, activation, gated, "bf16")
    require(channels % 4 == 0, f"conv on a GPU: {channels} channels are no multiple of 4")
    where, stride = source("conv x", x, tokens, 3 * channels if gated else channels)
    aligned = stride % 4 == 0 and where.offset % 16 == 0
    size = 1 if longest_run == 1 and aligned else CHUNK
    args = Args(
        x=where,
        x_stride=stride,
        weight=weight,
        bias=bias,
        out=out,
        channels=channels,
        **run_args("conv", state, runs, tokens, weight.shape[1] - 1, channels),
    )
    grid = -(-channels // COLUMNS), ceil_div(tokens, size)
    recorder.launch(f"{symbol}_t{size}" if aligned else f"{symbol}_any", args, grid)


def variants(target) -> list[zl.Variant]:
    """Every form x tokens of a chunk, and one for rows that are not aligned."""
    return [
        zl.Variant(
            f"{symbol}_t{tokens}" if aligned else f"{symbol}_any",
            conv_tokens,
            {**fixed, "OUT": zl.bf16 if fixed["GATED"] else zl.f32, "TOKENS": tokens, "ALIGNED": aligned},
            threads=THREADS,
        )
        for symbol, fixed in forms()
        for tokens, aligned in ((1, True), (CHUNK, True), (CHUNK, False))
    ]
