"""What some models do to their logits: a factor (Granite, Cohere, MiniCPM), a soft cap (Gemma 2); and logits of some of the
vocabulary's tokens among all."""

from zse import kernel as zl
from zse.kernels.op import EXACT, Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.lazy import numpy as np
from zse.runtime.args import Args

CHUNK = 4096  # columns of one block: 16 KB, and a vocabulary of 32,000 occupies 8 threads
WALKS: dict[str, dict[str, int]] = {"cpu": {"chunk": CHUNK}, "gpu": {}}  # a GPU's threads share a row as the grid is


@zl.kernel
def scale_logits_chunk(
    logits: zl.Ptr[zl.f32], width: zl.i64, chunk: zl.i64, scale: zl.f32, cap: zl.f32, CAP: zl.static
):
    """Grid (chunks of columns, rows)."""
    L = zl.target.lanes
    row = logits + zl.block_index(1) * width
    begin = zl.block_index(0) * chunk
    end = min(begin + chunk, width)
    whole = begin + (end - begin) // L * L
    for k in range(begin, whole, L):
        value = zl.load(row + k, L) * scale
        zl.store(row + k, zl.tanh(value) * cap if CAP else value)
    for k in range(whole, end):
        rest = row[k] * scale
        row[k] = zl.tanh(rest) * cap if CAP else rest


@zl.kernel
def spread_logits_chunk(
    x: zl.Ptr[zl.f32, "const"], ids: zl.Ptr[zl.i32, "const"], out: zl.Ptr[zl.f32], width: zl.i64, vocab: zl.i64
):
    """Grid (chunks of the vocabulary, rows)."""
    source = x + zl.block_index(1) * width
    row = out + zl.block_index(1) * vocab
    begin = zl.block_index(0) * CHUNK
    for k in range(begin, min(begin + CHUNK, vocab)):
        own = ids[k]
        if own >= 0:
            row[k] = source[zl.i64(own)]
        else:
            row[k] = zl.f32(float("-inf"))


def scale_logits(recorder, logits, scale: float = 1.0, cap: float = 0.0) -> None:
    """logits f32 [R, V] = logits * scale, then cap * tanh(logits / cap) (cap 0: no cap), in place."""
    rows, width = logits.shape
    check("scale_logits logits", logits, "f32", rows, width)
    require(scale > 0 and cap >= 0, f"scale_logits: scale {scale} and cap {cap} are not positive")
    chunks = -(-width // CHUNK)
    walk = WALKS[recorder.device.kernels]
    args = Args(logits=logits, width=width, **walk, scale=scale / cap if cap else float(scale), cap=float(cap))
    recorder.launch("scale_logits_cap" if cap else "scale_logits", args, (chunks, rows))


def spread_logits(recorder, x, ids, out) -> None:
    """out f32 [R, V] = x f32 [R, W] at ids i32 [V], minus infinity where ids is -1; the caller guarantees ids < W."""
    rows, vocab = out.shape
    check("spread_logits x", x, "f32", rows, None)
    check("spread_logits ids", ids, "i32", vocab)
    check("spread_logits out", out, "f32", rows, vocab)
    args = Args(x=x, ids=ids, out=out, width=x.shape[1], vocab=vocab)
    recorder.launch("spread_logits", args, (-(-vocab // CHUNK), rows))


def _reference(logits, scale=1.0, cap=0.0):
    values = np.asarray(logits, np.float64) * scale
    return {"logits": np.tanh(values / cap) * cap if cap else values}


def _cases(rng, family="cpu"):
    for rows, width, scale, cap in ((1, 32000, 0.0625, 0.0), (3, 5003, 1.0, 30.0), (2, 37, 0.25, 5.0)):
        logits = (rng.standard_normal((rows, width)) * 40).astype(np.float32)
        near = Tolerance(1e-6 * cap, 1e-6, "tanh within 3e-7, then the rounding of the product")
        output = OutputSpec((rows, width), "float32", near, inout=logits)
        yield Case(f"{rows}x{width} cap {cap}", {}, {"logits": output}, {"scale": scale, "cap": cap})


def _cost(case: Case) -> Cost:
    rows, width = case.outputs["logits"].shape
    return Cost(rows * width * 8, rows * width * 4)


def _variants(target):
    return [zl.Variant(f"scale_logits{suffix}", scale_logits_chunk, {"CAP": bool(suffix)}) for suffix in ("", "_cap")]


def _spread_reference(x, ids):
    return {"out": np.where(ids >= 0, x[:, np.maximum(ids, 0)], -np.inf)}


def _spread_cases(rng, family="cpu"):
    for rows, width, vocab in ((1, 1000, 9001), (3, 5, 7), (2, 64, 64), (4, 1, 4097)):
        ids = np.full(vocab, -1, np.int32)
        ids[rng.permutation(vocab)[:width]] = np.arange(width)
        x = rng.standard_normal((rows, width)).astype(np.float32)
        x[0, 0] = np.nan  # has to fail the request
        yield Case(
            f"{rows}x{width} of {vocab}", {"x": x, "ids": ids}, {"out": OutputSpec((rows, vocab), "float32", EXACT)}
        )


def _spread_cost(case: Case) -> Cost:
    rows, vocab = case.outputs["out"].shape
    return Cost(rows * (8 * vocab + 4 * case.inputs["x"].shape[1]), 0)


SPREAD_LOGITS = Op(
    "spread_logits",
    lambda target: [zl.Variant("spread_logits", spread_logits_chunk)],
    spread_logits,
    _spread_reference,
    _spread_cases,
    _spread_cost,
    later("gpu.join", "spread_variants"),
)
SCALE_LOGITS = Op(
    "scale_logits", _variants, scale_logits, _reference, _cases, _cost, later("gpu.step", "logit_variants")
)
