"""The short causal convolution of recurrent layers: each channel over its own last inputs, alone (Qwen3-Next, Mamba-2)
or between two gates (LFM2).

The state is the last KERNEL - 1 inputs, [KERNEL - 1, channels], the oldest first: rows as they came, so that neighbouring
channels are read together. A CPU's block takes CHUNK channels through all runs, token by token, with the window in
registers; what it reads and writes is the floor, inputs and results once, and for each run the state twice."""

from itertools import product

from zse import kernel as zl
from zse.kernels.columns import embed, source, wide
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, cases_of, check, later, launcher, require
from zse.kernels.runs import (
    BATCHES,
    KeepParams,
    States,
    keep_state,
    move,
    piece_end,
    random_batch,
    run_args,
    run_of,
    state_output,
    whole,
)
from zse.lazy import numpy as np
from zse.runtime.args import Args

CHUNK = 128  # channels of a block
TILE = 32  # tokens of which a block takes all its channels before the next ones: rows are far apart
KERNELS = (2, 3, 4)  # inputs that a result depends on; the models of 2026 have 3 and 4
ACTIVATIONS = ("", "silu")


class ConvParams(KeepParams):
    """x f32, rows `x_stride` apart: of a gated form [B, C, x] of `channels` each. weight f32 [channels, KERNEL], the last
    column of a token's own input. ACTIVATION: of the result."""

    x: zl.Ptr[zl.f32, "const"]
    x_stride: zl.index
    weight: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    channels: zl.index
    KERNEL: zl.static
    BIAS: zl.static
    GATED: zl.static
    ACTIVATION: zl.static


@zl.inline
def conv_input(p, row, at, lanes):
    """What is convolved: x, or B * x."""
    if p.GATED:
        return zl.load(row + at, lanes) * zl.load(row + 2 * p.channels + at, lanes)
    return zl.load(row + at, lanes)


@zl.inline
def conv_channels(p, first, last, at, taps, windows, lanes, GROUPS):
    """GROUPS * lanes channels from `at` on of the tokens of a tile. taps: [KERNEL + 1, CHUNK], with the bias; windows:
    [KERNEL - 1, CHUNK], the last inputs, in and out."""
    K = p.KERNEL
    steps = [g * lanes for g in zl.static(range(GROUPS))]
    begin = at % CHUNK
    weights = [[zl.load(taps + j * CHUNK + begin + step, lanes) for j in zl.static(range(K + 1))] for step in steps]
    window = [[zl.load(windows + j * CHUNK + begin + step, lanes) for j in zl.static(range(K - 1))] for step in steps]
    for token in range(first, last):
        row = p.x + token * p.x_stride
        for g in zl.static(range(GROUPS)):
            here = at + steps[g]
            value = conv_input(p, row, here, lanes)
            total = zl.fma(value, weights[g][K - 1], weights[g][K])
            for j in zl.static(range(K - 1)):
                total = zl.fma(window[g][j], weights[g][j], total)
            if p.ACTIVATION == "silu":
                total = total / (1.0 + zl.exp(total * -1.0))
            if p.GATED:
                total = total * zl.load(row + p.channels + here, lanes)
            zl.store(p.out + token * p.channels + here, total)
            for j in zl.static(range(K - 2)):
                window[g][j] = window[g][j + 1]
            window[g][K - 2] = value
    for g in zl.static(range(GROUPS)):
        for j in zl.static(range(K - 1)):
            zl.store(windows + j * CHUNK + begin + steps[g], window[g][j])


@zl.kernel
def conv_chunk(p: ConvParams):
    """Grid (chunks of channels)."""
    L = zl.target.lanes
    GROUPS = 2 if L == 16 else 1  # windows and weights in registers: AVX2 has 16, the others 32
    start = zl.block_index(0) * CHUNK
    stop = min(start + CHUNK, p.channels)
    taps = zl.local_array(zl.f32, (p.KERNEL + 1) * CHUNK)
    windows = zl.local_array(zl.f32, (p.KERNEL - 1) * CHUNK)
    for c in range(start, stop):
        for j in zl.static(range(p.KERNEL)):
            taps[j * CHUNK + c - start] = p.weight[c * p.KERNEL + j]
        taps[p.KERNEL * CHUNK + c - start] = p.bias[c] if p.BIAS else 0.0
    for run in range(p.runs):
        first, last, states = run_of(p, run)
        state = states + start
        for j in zl.static(range(p.KERNEL - 1)):
            if p.positions[first] == 0:
                move(windows + j * CHUNK, None, stop - start)
            else:
                move(windows + j * CHUNK, state + j * p.channels, stop - start)
        tile = first + 0
        while tile < last:
            end = piece_end(p, tile, min(tile + TILE, last))
            at = start + 0
            for lanes, groups in zl.static(((L, GROUPS), (L, 1), (1, 1))):
                limit = at + (stop - at) // (lanes * groups) * (lanes * groups)
                for channel in range(at, limit, lanes * groups):
                    conv_channels(p, tile, end, channel, taps, windows, lanes, groups)
                at = limit
            for j in zl.static(range(p.KERNEL - 1)):
                keep_state(p, end - 1, last, windows + j * CHUNK, start + j * p.channels, stop - start)
            tile = end + 0
        for j in zl.static(range(p.KERNEL - 1)):
            move(state + j * p.channels, windows + j * CHUNK, stop - start)


def _conv(
    recorder, x, weight, bias, state, runs, out, activation: str = "", gated: bool = False, longest_run=None
) -> None:
    """out f32 [M, C] = activation(bias + each channel's last inputs times `weight`); the state of each run moves on.

    Args:
        x: f32 [M, C], a Tensor or Columns; gated: [M, 3 C] of B, C and x, and out = C * conv(B * x), on a GPU bf16.
        weight: f32 [C, K], K of KERNELS, the last column of a token's own input. bias: f32 [C] or None.
        state: StatePart [K - 1, C]; runs: Runs of the batch.
        activation: of ACTIVATIONS; a gated form has none.
        longest_run: the most tokens of a run, where that is known.
    """
    tokens, channels = out.shape
    symbol = check_conv(out, weight, bias, activation, gated)
    where, stride = source("conv x", x, tokens, 3 * channels if gated else channels)
    args = Args(
        x=where,
        x_stride=stride,
        weight=weight,
        bias=bias,
        out=out,
        channels=channels,
        **run_args("conv", state, runs, tokens, weight.shape[1] - 1, channels),
    )
    recorder.launch(symbol, args, (-(-channels // CHUNK),))


def check_conv(out, weight, bias, activation: str, gated: bool, gated_out: str = "f32") -> str:
    """The symbol of a form whose arguments fit. gated_out: the dtype of a gated form's result."""
    tokens, channels = out.shape
    kernel = weight.shape[1]
    name = "gated_conv" if gated else "conv"
    require(kernel in KERNELS, f"{name}: a kernel of {kernel} inputs, expected one of {KERNELS}")
    require(activation in (ACTIVATIONS[:1] if gated else ACTIVATIONS), f"{name}: activation {activation!r}")
    check(f"{name} out", out, gated_out if gated else "f32", tokens, channels)
    check(f"{name} weight", weight, "f32", channels, kernel)
    if bias is not None:
        check(f"{name} bias", bias, "f32", channels)
    return _symbol(kernel, bias is not None, gated, activation)


def _symbol(kernel: int, bias: bool, gated: bool, activation: str) -> str:
    return f"{'gated_conv' if gated else 'conv'}_{kernel}{'_bias' if bias else ''}{f'_{activation}' * bool(activation)}"


def forms():
    """(symbol, static arguments) of every form."""
    for kernel, bias, (gated, activation) in product(
        KERNELS, (False, True), ((True, ""), (False, ""), (False, "silu"))
    ):
        fixed = {"KERNEL": kernel, "BIAS": bias, "GATED": gated, "ACTIVATION": activation}
        yield _symbol(kernel, bias, gated, activation), fixed


def _reference(x, weight, bias, state, runs, activation="", gated=False, longest_run=None, out=None):
    x, weight, states = wide(x), weight.astype(np.float64), States(state, runs)
    parts = np.split(x, 3, axis=1) if gated else (None, None, x)
    inputs = parts[0] * parts[2] if gated else x
    result = np.empty(inputs.shape)
    for tokens, window in states.each():
        for token in tokens:
            seen = np.concatenate([window, inputs[token : token + 1]])
            result[token] = (seen * weight.T).sum(axis=0) + (0 if bias is None else bias)
            window[:] = seen[1:]
            states.behind(token, window)
    if activation == "silu":
        result = result / (1 + np.exp(-result))
    return {"out": result * parts[1] if gated else result, "state.tensor": states.tensor}


def _case(rng, fixed: dict, channels: int, lengths: tuple, fresh: tuple = (), beside: int = 0, family="cpu") -> Case:
    near = Tolerance(4e-6, 4e-6, "f32 sums of up to five numbers of a few units; an exponent rounded before exp")
    tokens = sum(lengths)
    kernel, gated = fixed["KERNEL"], fixed["GATED"]
    runs, state = random_batch(rng, lengths, fresh, kernel - 1, channels)
    x = rng.standard_normal((tokens, 3 * channels if gated else channels)).astype(np.float32)
    inputs = {
        "x": embed(rng, x, beside, beside // 2) if beside else x,
        "weight": rng.standard_normal((channels, kernel)).astype(np.float32),
        "bias": rng.standard_normal(channels).astype(np.float32) if fixed["BIAS"] else None,
        "state": state,
        "runs": runs,
    }
    out = OutputSpec((tokens, channels), "float32", near)
    if family == "gpu" and gated:
        out = OutputSpec((tokens, channels), "bf16", Tolerance(4e-6, 2**-8, "the result is rounded to bf16"))
    name = f"{_symbol(kernel, fixed['BIAS'], gated, fixed['ACTIVATION'])}: {channels} channels, runs {lengths}"
    options = {"activation": fixed["ACTIVATION"], "gated": gated}
    return Case(name, inputs, {"out": out, **state_output(state, near)}, options)


def _cases(rng, family="cpu"):
    shapes = (
        (2048, (1,), (), 0),
        (96, (1, 1, 1, 1, 1), (1, 4), 0),
        (576, (37, 1, 2, 3, 64), (0, 2), 32),
        (8 if family == "gpu" else 7, (5, 1, 130), (1,), 0),
        (160, (1, 4), (0, 1), 6),
        (204, (16, 2, 9, 17, 3), (2,), 4),
    )
    for number, (_, fixed) in enumerate(forms()):
        for channels, lengths, fresh, beside in (shapes[number % 6], shapes[(number + 2) % 6]):
            case = _case(rng, fixed, channels, lengths, fresh, beside, family)
            yield case
            if family == "gpu" and max(lengths) == 1:
                yield Case(f"{case.name}, of one token", case.inputs, case.outputs, case.options | {"longest_run": 1})


def _sizes(rng):
    fixed = {"KERNEL": 4, "BIAS": False, "GATED": False, "ACTIVATION": "silu"}
    for batch, lengths in BATCHES.items():
        case = _case(rng, fixed, 8192, lengths)
        case.name = f"Qwen3.5-9B, {batch}"
        yield case, whole(_reference, case)


def _cost(case: Case) -> Cost:
    (tokens, channels), kernel = case.outputs["out"].shape, case.inputs["weight"].shape[1]
    runs, read = len(case.inputs["runs"].slot), 3 if case.options["gated"] else 1
    moved = tokens * channels * (read + 1) + channels * kernel + 2 * runs * channels * (kernel - 1)
    return Cost(4 * moved, 2 * tokens * channels * kernel)


conv = launcher(cpu=_conv, gpu=later("gpu.conv", "record"))

CONV = Op(
    "conv",
    lambda target: [zl.Variant(symbol, conv_chunk, fixed) for symbol, fixed in forms()],
    conv,
    _reference,
    _cases,
    _cost,
    later("gpu.conv", "variants"),
    cases_of(cpu=_sizes, gpu=later("gpu.state_sizes", "conv_sizes")),
)
