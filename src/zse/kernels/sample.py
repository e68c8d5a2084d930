"""From logits to tokens: penalties, temperature, min-p, top-nσ, top-k, top-p, a seeded draw, log-probabilities.

Two launches: `sample_scan` and `sample_row` (sample_kernels.py). Nothing is sorted: the boundary of a kept set is found
exactly by three histograms over order-preserving bits of the logits (11, 11 and 10 bits), and the draw is an inverse
distribution function in index order. A row's result depends on nothing but its own logits and parameters.

Order of the steps, as in vLLM: bias, repetition, frequency and presence penalties, temperature, min-p, top-k, top-p.
Tokens are ordered by (logit descending, id ascending): top-k keeps exactly k, top-p the shortest prefix whose mass
reaches p.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from zse.kernels import gpu
from zse.kernels.op import Op, check, later, launcher, require
from zse.lazy import numpy as np
from zse.runtime.args import Args

CHUNK = 8192  # logits of one block of the scan: 32 KiB
MAX_LOGPROBS = 20  # alternatives, the API's limit
RECORD = 48  # words of a chunk's record: max, argmax, raw sum, tempered sum, top values (20), top ids (20)
MAX_VOCAB = 4096 * 1024  # of a row: the blocks that sample_parts.pick keeps sums of


class Parameter(NamedTuple):
    """What each row of logits has one value of. A new one needs a line here and its kernels alone.

    dtype: of its values. off: the value that does nothing. cases: the values of the twelve rows of sample_cases(), or
    one for all. cuts: whether it leaves some of the likeliest tokens to draw from. floor: of one that leaves the logits
    from a bound on, the bound: (logits f64, temperature, value) → f64, the reference of the kernels."""

    dtype: str
    off: float = 0
    cases: float | tuple[float, ...] = 0
    cuts: bool = False
    floor: Callable[[Any, float, float], Any] | None = None


PARAMETERS = {
    "temperature": Parameter("f32", cases=(0, 1, 0.7, 1, 1.5, 1, 0.9, 1, 1, 2, 0, 1)),
    "top_k": Parameter("i32", cases=(0, 0, 40, 25, 0, 300, 1, 17, 9, 0, 0, 1 << 20), cuts=True),
    "top_p": Parameter("f32", 1, cases=(1, 1, 1, 1, 0.9, 0.8, 1, 0.5, 0.95, 0.99, 1, 0.7), cuts=True),
    "min_p": Parameter(
        "f32",
        cases=(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.02, 0, 0.05),
        cuts=True,
        floor=lambda x, heat, share: x.max() + heat * np.log(share),
    ),
    # Tang et al. 2024, "Top-nσ: Not All Logits Are You Need" (arXiv 2411.07641), over the finite logits.
    "top_n_sigma": Parameter(
        "f32",
        cases=(0, 1.5, 0, 3, 0, 2.5, 0, 0, 2, 1, 0, 0),
        cuts=True,
        floor=lambda x, heat, count: x.max() - count * x[np.isfinite(x)].std(),
    ),
    "repetition": Parameter("f32", 1, cases=1.3),
    "presence": Parameter("f32", cases=0.4),
    "frequency": Parameter("f32", cases=0.2),
    "seed": Parameter("u64"),
    "counter": Parameter("i64"),
    "num_logprobs": Parameter("i32", -1, cases=(20, 0, 5, 20, -1, 1, 3, 20, 20, -1, 2, 0)),
}
# On a GPU penalties read the token history on the device instead of lists, and the scan is told whether the row is cut.
GPU_PARAMETERS = {"filtered": "i32", "history_row": "i32", "history_len": "i32", "prompt_len": "i32"}
MORE_PARAMETERS: dict[str, dict[str, str]] = {"cpu": {}, "gpu": GPU_PARAMETERS}
SCANNED = ("temperature", "top_k", "repetition", "presence", "frequency", "num_logprobs", *GPU_PARAMETERS)


def row_parameters(family: str = "cpu") -> dict[str, str]:
    """name → dtype of what each row has one value of, on a kind of device."""
    return {name: parameter.dtype for name, parameter in PARAMETERS.items()} | MORE_PARAMETERS[family]


def sample_tensors(
    max_rows: int, vocab: int, max_biases: int, max_seen: int, family: str = "cpu"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor argument of sample() but the logits: name → (dtype, shape). max_seen: a GPU has no such lists."""
    rows = {name: (dtype, (max_rows,)) for name, dtype in row_parameters(family).items()}
    biases = {
        "bias_start": ("i32", (max_rows + 1,)),
        "bias_ids": ("i32", (max_biases,)),
        "bias_values": ("f32", (max_biases,)),
    }
    outs = {
        "tokens": ("i32", (max_rows,)),
        "status": ("i32", (max_rows,)),
        "logprob": ("f32", (max_rows,)),
        "top_ids": ("i32", (max_rows, MAX_LOGPROBS)),
        "top_logprobs": ("f32", (max_rows, MAX_LOGPROBS)),
    }
    return rows | biases | OWN_TENSORS[family](max_rows, vocab, max_biases, max_seen) | outs


def _cpu_tensors(max_rows: int, vocab: int, max_biases: int, max_seen: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        "bias_saved": ("f32", (max_biases,)),
        "seen_start": ("i32", (max_rows + 1,)),
        "seen_ids": ("i32", (max_seen,)),
        "seen_counts": ("i32", (max_seen,)),
        "seen_saved": ("f32", (max_seen,)),
        "partial": ("f32", (max_rows, -(-vocab // CHUNK), RECORD)),
    }


def _gpu_tensors(max_rows: int, vocab: int, max_biases: int, max_seen: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    parts = gpu.sample_parts
    return {"records": ("u32", (max_rows, -(-vocab // parts.CHUNK), parts.RECORD))}


OWN_TENSORS = {"cpu": _cpu_tensors, "gpu": _gpu_tensors}


def _sample(recorder, logits, history=None, **tensors) -> None:
    """Sample one token for each row of logits f32 [R, V]. The tensors are those of sample_tensors(), for at least R
    rows.

    In, per row: temperature (below 1e-5: greedy, ties to the lowest id), top_k (0: off), top_p (1: off), min_p and
    top_n_sigma (0: off), repetition (1: off), presence and frequency penalties (0: off), seed and counter (the draw is
    a function of both; the counter is the sampled token's position), num_logprobs (-1: none, else alternatives, up to
    20). Row r's biases are entries bias_start[r] .. bias_start[r + 1] of bias_ids (each id once) and bias_values. Its
    penalized tokens, CPU: those of seen_start in seen_ids (each id once: prompt and output) with seen_counts
    (occurrences in the output, 0 for prompt only). GPU: the first history_len[r] tokens (0: no penalties) of line
    history_row[r] of `history`, a TokenHistory; those from position prompt_len[r] on are output.

    Out, per row: tokens, always in [0, V); status 0, or 1 where a logit is NaN or +infinity or all are -infinity (the
    token then means nothing); logprob of the token, top_ids and top_logprobs [20] best first, of the model's own
    distribution (before biases, penalties and temperature); unused places hold id -1. GPU: each is written to_host bytes
    further, too, where that is not 0. CPU: the logits are changed and
    restored; *_saved and partial are scratch. GPU: biases and penalties stay in the logits; records is scratch."""
    chunks = _checked(logits, tensors, "cpu", MAX_VOCAB, CHUNK)
    rows, vocab = logits.shape
    scanned = {name: tensors[name] for name in ("num_logprobs", "temperature", "top_p", "partial")}
    recorder.launch("sample_scan", Args(logits=logits, vocab=vocab, **scanned), (chunks, rows))
    recorder.launch("sample_row", Args(logits=logits, vocab=vocab, **tensors), (rows,))


def _checked(logits, tensors, family: str, most: int, chunk: int) -> int:
    """How many chunks a row of logits has, once it and the tensors are what sample() takes."""
    rows, vocab = logits.shape
    check("sample logits", logits, "f32", rows, vocab)
    require(0 < vocab <= most, f"sample: {vocab} logits a row, at most {most} are supported")
    expected = sample_tensors(1, vocab, 1, 1, family)
    require(
        set(tensors) == set(expected), f"sample: tensors {sorted(set(tensors) ^ set(expected))} are missing or unknown"
    )
    for name, (dtype, shape) in expected.items():
        check(f"sample {name}", tensors[name], dtype, None, *shape[1:])
    return -(-vocab // chunk)


def _sample_gpu(recorder, logits, history=None, to_host: int = 0, **tensors) -> None:
    parts = gpu.sample_parts
    chunks = _checked(logits, tensors, "gpu", parts.MAX_CHUNKS * parts.CHUNK, parts.CHUNK)
    require(history is not None, "sample: a GPU needs the token history")
    rows, vocab = logits.shape
    check("sample history", history.tokens, "i32", None, 16)
    check("sample page_table", history.page_table, "i32", None, None)
    scanned = {name: tensors[name] for name in (*SCANNED, "bias_start", "bias_ids", "bias_values", "records")}
    recorder.launch("sample_scan", Args(logits=logits, vocab=vocab, **history.args(), **scanned), (chunks, rows))
    args = Args(logits=logits, vocab=vocab, chunks=chunks, to_host=to_host, **history.args(), **tensors)
    recorder.launch("sample_row", args, (rows,))


sample = launcher(cpu=_sample, gpu=_sample_gpu)


def logprob_rows(recorder, logits, targets, logprob, argmax) -> None:
    """logits f32 [R, V], targets i32 [R] → logprob f32 [R] of the targets, argmax i32 [R] (ties to the lowest id)."""
    rows, vocab = logits.shape
    check("logprob_rows logits", logits, "f32", rows, vocab)
    check("logprob_rows targets", targets, "i32", rows)
    check("logprob_rows logprob", logprob, "f32", rows)
    check("logprob_rows argmax", argmax, "i32", rows)
    args = Args(logits=logits, targets=targets, logprob=logprob, argmax=argmax, vocab=vocab)
    recorder.launch("logprob_rows", args, (rows,))


SAMPLE = Op(
    "sample",
    later("sample_kernels", "sample_variants"),
    sample,
    later("sample_cases", "sample_reference"),
    later("sample_cases", "sample_cases"),
    later("sample_cases", "sample_cost"),
    later("gpu.sample_row", "sample_variants"),
)
LOGPROB_ROWS = Op(
    "logprob_rows",
    later("sample_kernels", "logprob_variants"),
    logprob_rows,
    later("sample_cases", "logprob_rows_reference"),
    later("sample_cases", "logprob_rows_cases"),
    later("sample_cases", "logprob_rows_cost"),
    later("gpu.logprob", "logprob_variants"),
)
