"""Reference, cases and cost of the sampler."""

from zse.kernels import feed
from zse.kernels.gpu.sample_parts import RECORD as GPU_RECORD
from zse.kernels.op import EXACT, Case, Cost, OutputSpec, Tolerance
from zse.kernels.sample import MAX_LOGPROBS, PARAMETERS
from zse.lazy import numpy as np


def philox(seed: int, counter: int) -> float:
    """Philox4x32-10 (Salmon et al. 2011) as a number in [0, 1) of 53 bits."""
    mask = 0xFFFFFFFF
    c, key = [counter & mask, counter >> 32, 0, 0], [seed & mask, seed >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return ((c[1] << 32 | c[0]) >> 11) * 2.0**-53


def change_logits(x, r, params):
    """Row r's logits after biases and penalties, f32 as in the kernel."""
    x = x.copy()
    for j in range(params["bias_start"][r], params["bias_start"][r + 1]):
        x[params["bias_ids"][j]] += params["bias_values"][j]
    for j in range(params["seen_start"][r], params["seen_start"][r + 1]):
        id, count = params["seen_ids"][j], params["seen_counts"][j]
        value = x[id] / params["repetition"][r] if x[id] > 0 else x[id] * params["repetition"][r]
        value = value - params["frequency"][r] * np.float32(count)
        x[id] = value - params["presence"][r] if count > 0 else value
    return x


def kept_set(x, temperature, **values):
    """(kept ids ascending, their probabilities, margin): margin is how near a limit came to going the other way.
    values: of PARAMETERS that cut, others are passed over; one that is left out is off."""
    x, heat = x.astype(np.float64), float(temperature)
    z = x / heat
    weights = np.exp(z - z.max())
    order = np.lexsort((np.arange(len(x)), -x))
    margin = 1.0
    for name, parameter in PARAMETERS.items():
        value = values.get(name, parameter.off)
        if parameter.floor is not None and value != parameter.off:
            floor = parameter.floor(x, heat, float(value))
            margin = min(margin, float(np.abs(x - floor).min()) / heat)
            order = order[x[order] >= floor]
    top_k, top_p = values.get("top_k", 0), values.get("top_p", 1)
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1:
        mass = np.cumsum(weights[order]) / weights[order].sum()
        margin = min(margin, float(np.abs(mass - top_p).min()))
        order = order[: int(np.searchsorted(mass, top_p)) + 1]
    ids = np.sort(order)
    return ids, weights[ids] / weights[ids].sum(), margin


def draw(x, r, params):
    """(token, margin) of row r for changed logits x."""
    if params["temperature"][r] < 1e-5 or params["top_k"][r] == 1:
        return int(np.argmax(x)), 1.0
    ids, p, margin = kept_set(x, **{name: params[name][r] for name in PARAMETERS})
    u = philox(int(params["seed"][r]), int(params["counter"][r]))
    cumulative = np.cumsum(p)
    index = min(int(np.searchsorted(cumulative, u, side="right")), len(ids) - 1)
    return int(ids[index]), min(margin, float(np.abs(cumulative[:-1] - u).min()) if len(ids) > 1 else 1.0)


def log_softmax(x):
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def lists_of_history(params):
    """A GPU case's parameters with its history as lists of seen tokens, as the CPU's are."""
    history, starts, ids, counts = params["history"], [0], [], []
    for r, length in enumerate(params["history_len"]):
        pages = history.page_table[params["history_row"][r]] // history.blocks_per_page
        said = history.tokens[pages[: -(-length // 16)]].reshape(-1)[:length]
        seen = {int(id): 0 for id in said}
        for id in said[params["prompt_len"][r] :]:
            seen[int(id)] += 1
        ids += seen.keys()
        counts += seen.values()
        starts.append(len(ids))
    return params | {"seen_start": starts, "seen_ids": ids, "seen_counts": np.array(counts, np.int32)}


def history_of_lists(rng, params):
    """The reverse: a CPU case's parameters with its lists of seen tokens as a history that they could come from."""
    rows = len(params["temperature"])
    said, prompts = [], []
    for r in range(rows):
        part = slice(params["seen_start"][r], params["seen_start"][r + 1])
        ids, counts = params["seen_ids"][part], params["seen_counts"][part]
        prompt = np.concatenate([ids[counts == 0], rng.choice(ids, len(ids) // 2)]) if len(ids) else ids
        said.append(np.concatenate([rng.permutation(prompt), rng.permutation(np.repeat(ids, counts))]))
        prompts.append(len(prompt))
    lines = rng.permutation(rows + 2)[:rows]
    lengths = np.zeros(rows + 2, np.int32)
    lengths[lines] = [len(ids) for ids in said]
    max_pages = int(lengths.max()) // 16 + 2
    table, tokens = feed.make_history(rng, lengths, max_pages, 3, (rows + 2) * max_pages)
    for line, ids in zip(lines, said, strict=True):
        for position, id in enumerate(ids):
            tokens[table[line, position // 16] // 3, position % 16] = id
    kept = {name: value for name, value in params.items() if not name.startswith("seen_")}
    cuts = [params[name] != parameter.off for name, parameter in PARAMETERS.items() if parameter.cuts]
    return kept | {
        "filtered": np.any(cuts, axis=0).astype(np.int32),
        "history": feed.TokenHistory(tokens, table, 3),
        "history_row": lines.astype(np.int32),
        "history_len": lengths[lines],
        "prompt_len": np.array(prompts, np.int32),
    }


def sample_reference(logits, **params):
    rows = len(logits)
    gpu = "history" in params
    if gpu:
        params = lists_of_history(params)
    out = {
        "tokens": np.zeros(rows, np.int32),
        "status": np.zeros(rows, np.int32),
        "logprob": np.zeros(rows),
        "top_ids": np.full((rows, MAX_LOGPROBS), -1, np.int32),
        "top_logprobs": np.zeros((rows, MAX_LOGPROBS)),
        "logits": logits.copy(),
    }
    for r, x in enumerate(logits):
        changed = change_logits(x, r, params)
        if gpu:
            out["logits"][r] = changed
        if np.isnan(x).any() or not np.isfinite(x.max()):
            out["status"][r] = 1
            continue
        out["tokens"][r] = draw(changed, r, params)[0]
        if params["num_logprobs"][r] < 0:
            continue
        logs = log_softmax(x)
        out["logprob"][r] = logs[out["tokens"][r]]
        best = np.lexsort((np.arange(len(x)), -x))[: params["num_logprobs"][r]]
        best = best[x[best] > -np.inf]
        out["top_ids"][r, : len(best)], out["top_logprobs"][r, : len(best)] = best, logs[best]
    return out


_NUMPY = {"f32": "float32", "i32": "int32", "u64": "uint64", "i64": "int64"}


def make_parameters(rows: int, **values):
    """Parameter arrays for `rows` rows: defaults (greedy, everything off) but for the given scalars or sequences."""
    params = {
        name: np.broadcast_to(np.asarray(values.get(name, parameter.off), _NUMPY[parameter.dtype]), rows).copy()
        for name, parameter in PARAMETERS.items()
    }
    return params | {
        "bias_start": np.zeros(rows + 1, np.int32),
        "bias_ids": np.zeros(1, np.int32),
        "bias_values": np.zeros(1, np.float32),
        "seen_start": np.zeros(rows + 1, np.int32),
        "seen_ids": np.zeros(1, np.int32),
        "seen_counts": np.zeros(1, np.int32),
    }


def add_lists(rng, params, rows: int, vocab: int, chosen) -> None:
    """Biases and penalties for the rows in `chosen`."""
    biases = [rng.choice(vocab, 5, replace=False) if r in chosen else [] for r in range(rows)]
    seen = [rng.choice(vocab, min(vocab, 40), replace=False) if r in chosen else [] for r in range(rows)]
    for name, lists in (("bias", biases), ("seen", seen)):
        params[f"{name}_start"] = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])]).astype(np.int32)
        params[f"{name}_ids"] = np.concatenate(lists).astype(np.int32)
    params["bias_values"] = (rng.standard_normal(len(params["bias_ids"])) * 5).astype(np.float32)
    params["seen_counts"] = rng.integers(0, 4, len(params["seen_ids"])).astype(np.int32)


def make_sample_case(name, logits, params, rng=None) -> Case:
    """A case with scratch and poisoned outputs around logits and parameters. rng: for a GPU, which has a history."""
    rows, vocab = logits.shape
    near = Tolerance(1e-5, 1e-6, "f32 sums of exponentials over chunks of 8,192, logits of up to 30")
    changed = EXACT
    if rng is None:
        scratch = {
            "bias_saved": np.full(len(params["bias_ids"]), np.nan, np.float32),
            "seen_saved": np.full(len(params["seen_ids"]), np.nan, np.float32),
            "partial": np.full((rows, -(-vocab // 8192), 48), np.nan, np.float32),
        }
    else:
        params = history_of_lists(rng, params)
        scratch = {"records": np.full((rows, -(-vocab // 4096), GPU_RECORD), 0xFFFFFFFF, np.uint32)}
        near = Tolerance(1e-5, 1e-6, "as on the CPU; a penalized token's logit is worked back from the penalized one")
        changed = Tolerance(1e-6, 1e-6, "one rounding for each penalty")
    outputs = {
        "logits": OutputSpec(logits.shape, "float32", changed, inout=logits),
        "tokens": OutputSpec((rows,), "int32", EXACT),
        "status": OutputSpec((rows,), "int32", EXACT),
        "logprob": OutputSpec((rows,), "float32", near),
        "top_ids": OutputSpec((rows, MAX_LOGPROBS), "int32", EXACT),
        "top_logprobs": OutputSpec((rows, MAX_LOGPROBS), "float32", near),
    }
    return Case(name, params | scratch, outputs)


def settle(rng, logits, params, least: float = 3e-6) -> bool:
    """Draw seeds, and parameters where a limit itself is too near, until f32 rounding cannot change a row's token. False where a
    row's logits have no such draw."""
    settled = True
    for r, x in enumerate(logits):
        changed = change_logits(x, r, params)
        for attempt in range(200):
            params["seed"][r] = rng.integers(0, 2**64, dtype="uint64")
            params["counter"][r] = rng.integers(0, 2**40)
            if draw(changed, r, params)[1] > least:
                break
            if attempt % 20 == 19:
                for name, parameter in PARAMETERS.items():
                    if parameter.cuts and parameter.dtype == "f32" and params[name][r] != parameter.off:
                        params[name][r] *= 0.99
        else:
            settled = False
    return settled


VOCABULARIES = {"cpu": (1003, 20011), "gpu": (1003, 20011, 40000)}


def sample_cases(rng, family="cpu"):
    pages = {"gpu": rng}.get(family)
    for vocab in VOCABULARIES[family]:
        rows = 12
        logits = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
        logits[3] = np.round(logits[3] * 2) / 2  # many ties
        logits[4] = np.round(logits[4])
        logits[7] = 1.5  # all alike
        logits[8, rng.random(vocab) < 0.7] = -np.inf  # masked
        params = make_parameters(rows, **{name: parameter.cases for name, parameter in PARAMETERS.items()})
        add_lists(rng, params, rows, vocab, {1, 2, 5, 10})
        settle(rng, logits, params)
        yield make_sample_case(f"mixed, vocabulary {vocab}", logits, params, pages)
    logits = (rng.standard_normal((5, 700)) * 3).astype(np.float32)
    logits[0, 33], logits[1, 699], logits[2], logits[3, 5] = np.nan, np.inf, -np.inf, -np.nan
    yield make_sample_case(
        "broken rows", logits, make_parameters(5, temperature=[0, 1, 1, 0, 0], num_logprobs=4), pages
    )
    logits = rng.standard_normal((2, 7)).astype(np.float32)
    params = make_parameters(2, temperature=1, top_k=[3, 0], num_logprobs=20)
    settle(rng, logits, params)
    yield make_sample_case("seven tokens", logits, params, pages)


def sample_cost(case: Case) -> Cost:
    rows, vocab = case.outputs["logits"].shape
    return Cost(rows * vocab * 4, rows * vocab)


def logprob_rows_reference(logits, targets, logprob=None, argmax=None):
    logs = np.stack([log_softmax(x) for x in logits])
    return {"logprob": logs[np.arange(len(logits)), targets], "argmax": logits.argmax(axis=1)}


def logprob_rows_cases(rng, family="cpu"):
    near = Tolerance(1e-5, 1e-6, "f32 sums of exponentials over chunks of 8,192")
    for rows, vocab in ((3, 49152), (4, 1001), (1, 5)):
        logits = (rng.standard_normal((rows, vocab)) * 5).astype(np.float32)
        logits[0] = np.round(logits[0])
        yield Case(
            f"{rows}x{vocab}",
            {"logits": logits, "targets": rng.integers(0, vocab, rows).astype(np.int32)},
            {"logprob": OutputSpec((rows,), "float32", near), "argmax": OutputSpec((rows,), "int32", EXACT)},
        )


def logprob_rows_cost(case: Case) -> Cost:
    rows, vocab = case.inputs["logits"].shape
    return Cost(rows * vocab * 8, rows * vocab * 20)
