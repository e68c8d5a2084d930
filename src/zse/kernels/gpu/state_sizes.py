"""Recurrent layers of real models, as they are timed on a GPU: decoding of one row and of 64, and a prompt."""

from zse.kernels import delta, scan
from zse.kernels.gpu import state_cases
from zse.kernels.op import Case, OutputSpec, Tolerance
from zse.kernels.runs import random_runs, random_state, state_output
from zse.lazy import numpy as np
from zse.tensor import SHORT_RUN

ROWS, PROMPT = (1, 64), 8192


def batches():
    """(name, lengths of runs) of what is timed: decoding, and a prompt."""
    yield from ((f"{rows} row{'s' * (rows > 1)}", (1,) * rows) for rows in ROWS)
    yield f"a prompt of {PROMPT}", (PROMPT,)


def delta_sizes(rng):
    """Qwen3.5-9B: 32 heads of 128 x 128 over 16 of q and k, with their gated norm. Of a prompt one head is compared."""
    k_heads, v_heads, size = 16, 32, 128
    for name, lengths in batches():
        fresh = (0,) if len(lengths) == 1 else ()
        case = state_cases.gated(
            rng,
            delta.make_case(rng, "head", (k_heads, v_heads, size, size), lengths, fresh, 0, state_cases.NEAR),
            "silu",
        )
        if max(lengths) > SHORT_RUN:
            case = state_cases.by_chunks(case, "delta", k_heads, size, v_heads)
        options = case.options | {"longest_run": max(lengths), "tiled": False}
        yield Case(f"Qwen3.5-9B, {name}", case.inputs, case.outputs, options), first_head(case)


def first_head(case):
    """What the first head of a case of delta_sizes() gives, when asked."""

    def expected():
        inputs, size = case.inputs, case.options["k_size"]
        qkv, state, gate = inputs["qkv"], inputs["state"], inputs["gate"]
        at = [part * case.options["k_heads"] * size for part in range(3)]
        one = inputs | {
            "qkv": np.concatenate([qkv[:, start : start + size] for start in at], axis=1),
            "b": inputs["b"][:, :1],
            "a": inputs["a"][:, :1],
            "A": inputs["A"][:1],
            "dt_bias": inputs["dt_bias"][:1],
            "state": state._replace(shape=(1, *state.shape[1:])),
            "gate": gate._replace(z=gate.z[:, :size]),
        }
        found = delta.DELTA.reference(**one, k_heads=1, k_size=size)
        part = slice(state.place, state.place + size * size)
        return {
            "out": ((slice(None), slice(size)), found["out"]),
            "state.tensor": ((slice(None), part), found["state.tensor"][:, part]),
        }

    return expected


def scan_sizes(rng):
    """Granite 4 h-small: 128 heads of 64 with states of 128, one group; Nemotron 3 30B-A3B: 64 heads, 8 groups."""
    for model, heads, groups in (("Granite 4 h-small", 128, 1), ("Nemotron 3 30B-A3B", 64, 8)):
        for name, lengths in batches():
            case = scan.make_case(rng, (heads, groups, 64, 128), lengths, (), 0, None, state_cases.NEAR)
            if max(lengths) > SHORT_RUN:
                case = state_cases.by_chunks(case, "scan", groups, 128, heads)
            options = case.options | {"longest_run": max(lengths)}
            yield Case(f"{model}, {name}", case.inputs, case.outputs, options), first_scan(case)


def first_scan(case):
    """What the first head of a case of scan_sizes() gives, when asked."""

    def expected():
        inputs, size, heads = case.inputs, case.options["state_size"], len(case.inputs["A"])
        x, state, groups = inputs["x"], inputs["state"], case.options["groups"]
        width = state.shape[2]
        at = [(0, width), (heads * width, size), (heads * width + groups * size, size)]
        one = {name: inputs[name][:1] for name in ("A", "D", "dt_bias")} | {"runs": inputs["runs"]}
        one["x"] = np.concatenate([x[:, start : start + many] for start, many in at], axis=1)
        one["dt"], one["state"] = inputs["dt"][:, :1], state._replace(shape=(1, *state.shape[1:]))
        found = scan.SCAN.reference(**one, groups=1, state_size=size, dt_limits=None)
        part = slice(state.place, state.place + size * width)
        return {
            "out": ((slice(None), slice(width)), found["out"]),
            "state.tensor": ((slice(None), part), found["state.tensor"][:, part]),
        }

    return expected


def conv_sizes(rng):
    """Qwen3.5-9B: 8,192 channels, four inputs, silu; LFM2-1.2B: 2,048 between two gates, three inputs."""
    near = Tolerance(4e-6, 2**-8, "as in the operation's cases")
    for model, channels, kernel, gated in (("Qwen3.5-9B", 8192, 4, False), ("LFM2-1.2B", 2048, 3, True)):
        for name, lengths in batches():
            tokens, runs = sum(lengths), random_runs(rng, lengths)
            state = random_state(rng, runs, (kernel - 1, channels))
            weight = rng.standard_normal((channels, kernel)).astype(np.float32)
            x = rng.standard_normal((tokens, 3 * channels if gated else channels), np.float32)
            inputs = {"x": x, "weight": weight, "bias": None, "state": state, "runs": runs}
            out = OutputSpec((tokens, channels), "bf16" if gated else "float32", near)
            options = {"activation": "" if gated else "silu", "gated": gated, "longest_run": max(lengths)}
            yield Case(f"{model}, {name}", inputs, {"out": out, **state_output(state, near)}, options), None


def gated_norm_sizes(rng, family: str = "gpu"):
    """Qwen3.5-9B: 32 heads of 128; Granite 4 h-small: one part of 8,192, gated first."""
    near = Tolerance(1e-6, 2**-8, "as in the operation's cases")
    for model, groups, width, first in (("Qwen3.5-9B", 32, 4096, False), ("Granite 4 h-small", 1, 8192, True)):
        for name, lengths in batches():
            x, z = (rng.standard_normal((sum(lengths), width), np.float32) for _ in range(2))
            inputs = {"x": x, "z": z, "weight": np.ones(width // groups, np.float32)}
            options = {"eps": 1e-5, "groups": groups, "gate_first": first}
            yield Case(f"{model}, {name}", inputs, {"out": OutputSpec(x.shape, "bf16", near)}, options), None
