"""Which tokens the GPU's sampler keeps, against the rule: shared by the tests in the emulator and on a GPU."""

import numpy as np
from gpu.harness import run_case

from zse.kernels.sample import SAMPLE
from zse.kernels.sample_cases import draw, make_parameters, make_sample_case, settle

LIMITS = [
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_k": 200, "top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 7, "top_p": 0.999},
    {"top_p": 0.05},
    {"min_p": 0.01, "top_k": 900, "top_p": 0.9},
    {"top_k": 3000},
    {"top_p": 0.9999},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.5, "top_p": 0.9, "min_p": 0.001},
    {},
]
KINDS = ["smooth", "ties", "flat", "peaked", "bf16", "two values", "masked"]


def sampled_on(gpu, logits, params):
    return run_case(SAMPLE, make_sample_case("test", logits, params, np.random.default_rng(0)), gpu)


def logits_of(kind, rng, vocab):
    x = rng.standard_normal(vocab).astype(np.float32) * np.float32({"flat": 0.01, "peaked": 12}.get(kind, 3))
    if kind == "ties":
        x = np.round(x * 2) / 2
    if kind == "bf16":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    if kind == "two values":
        x = np.where(x > 0, np.float32(1.25), np.float32(-0.5))
    if kind == "masked":
        x[rng.random(vocab) < 0.9] = -np.inf
    return x


def check_kept_sets(values, kind, gpu, rows, most):
    rng = np.random.default_rng()
    for _ in range(50):
        vocab = int(rng.integers(1000, most))
        x = logits_of(kind, rng, vocab)
        logits = np.tile(x, (rows, 1))
        params = make_parameters(rows, temperature=rng.choice([0.5, 1.0, 1.7], rows), **values)
        if settle(
            rng, logits, params, min(1e-5, 0.1 / vocab)
        ):  # of 30,000 tokens of two values limits are 1.7e-5 apart
            break
    else:
        raise AssertionError(f"no logits of 50 whose tokens rounding cannot change: {kind}, {values}")
    got = sampled_on(gpu, logits, params)["tokens"]
    np.testing.assert_array_equal(got, [draw(x, r, params)[0] for r in range(rows)])
