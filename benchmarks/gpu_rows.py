"""Row-wise kernels and the sampler on a GPU: microseconds a launch beside the floor.

    PYTHONPATH=src python benchmarks/gpu_rows.py [--only sample] [--hidden 3584 --intermediate 18944 --vocab 152064]

A figure is a graph of many launches, one after another as in a model's step, over inputs that together exceed L2 where
they are not small; the best of 12 replays. floor: bytes that must move / 4.3 TB/s. Logits are normal with a standard
deviation of 3 ("flat": 6,500 tokens hold 90 %) or 8 (a few tokens do, as in a language model's).
"""

import argparse
import time

import numpy as np

from zse.dtypes import ITEM_BYTES
from zse.kernels.activation import gated
from zse.kernels.embed import embed
from zse.kernels.feed import TokenHistory, feed_tokens
from zse.kernels.gather import gather_rows
from zse.kernels.host import random_weight
from zse.kernels.norm import add_rmsnorm
from zse.kernels.quantize import quantize
from zse.kernels.rope import rope_table
from zse.kernels.sample import PARAMETERS, logprob_rows, row_parameters, sample, sample_tensors
from zse.quant.scheme import memory_layout, parse_scheme
from zse.runtime.opening import open_device
from zse.tensor import Fp8Activation, Tensor, Weight, sum_width

BANDWIDTH = 4.3e12
ROWS = (1, 16, 64, 256, 4096)
SAMPLED = ((1, 8), (1, 3), (16, 8), (64, 8), (256, 8), (256, 3))  # rows, standard deviation of the logits
NUMPY = {"f32": np.float32, "i32": np.int32, "u64": np.uint64, "i64": np.int64}
NEUTRAL = {name: parameter.off for name, parameter in PARAMETERS.items()}
SAMPLERS = {
    "greedy": {},
    "greedy, 5 log-probabilities": {"num_logprobs": 5},
    "temperature": {"temperature": 1},
    "top-k 40": {"temperature": 1, "top_k": 40},
    "top-p 0.9": {"temperature": 1, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1, "min_p": 0.05},
    "temperature 0.7, top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "the same, repetition 1.05 over 2k tokens": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition": 1.05,
        "history_len": 2048,
    },
}


class Bench:
    """A device and a table of results."""

    def __init__(self, device):
        self.device, self.rng = device, np.random.default_rng(1)

    def new(self, dtype, *shape):
        count = ITEM_BYTES[dtype]
        for size in shape:
            count *= size
        return Tensor(self.device.alloc(count, label="bench"), shape, dtype)

    def put(self, values, dtype=None):
        values = np.ascontiguousarray(values)
        names = {
            "float32": "f32",
            "int32": "i32",
            "uint64": "u64",
            "int64": "i64",
            "uint8": "u8",
            "uint16": "bf16",
            "float16": "f16",
        }
        tensor = self.new(dtype or names[str(values.dtype)], *values.shape)
        self.device.write(tensor, values.tobytes())
        return tensor

    def random(self, dtype, *shape, scale=1.0):
        """Normal values (a block of 2^20 of them, repeated)."""
        count = int(np.prod(shape))
        values = np.resize((self.rng.standard_normal(min(count, 1 << 20)) * scale).astype(np.float32), count)
        return self.put((values if dtype == "f32" else (values.view(np.uint32) >> 16).astype(np.uint16)).reshape(shape))

    def time(self, name, launch, inputs, nbytes, launches=200):
        recorder = self.device.record()
        for i in range(launches):
            launch(recorder, inputs[i % len(inputs)])
        graph = recorder.finish()
        for _ in range(3):  # the second submission captures
            graph.run()
        best = float("inf")
        for _ in range(12):
            start = time.perf_counter()
            graph.run()
            best = min(best, time.perf_counter() - start)
        graph.close()
        print(f"{name:64s} {best / launches * 1e6:9.2f} us   floor {nbytes / BANDWIDTH * 1e6:8.2f}", flush=True)


def sets_for(nbytes: int) -> int:
    """How many inputs of a size pass L2."""
    return max(1, min(16, int(120e6 // max(nbytes, 1))))


def fp8(bench, rows, width):
    return Fp8Activation(
        bench.new("e4m3", rows, width), bench.new("f32", rows), bench.new("f16", rows, sum_width(width))
    )


def norms(bench, hidden):
    for rows in ROWS:
        size, launches = rows * hidden, 200 if rows < 1024 else 60
        inputs = [
            (
                bench.random("f32", rows, hidden),
                bench.random("f32", rows, hidden, scale=1e-3),
                bench.random("f32", hidden),
                bench.new("bf16", rows, hidden),
                fp8(bench, rows, hidden),
            )
            for _ in range(sets_for(size * 11))
        ]
        for name, launch, each in (
            ("add_rmsnorm to bf16", lambda r, s: add_rmsnorm(r, s[0], None, None, s[2], s[3], 1e-6), 6),
            ("add_rmsnorm to fp8", lambda r, s: add_rmsnorm(r, s[0], None, None, s[2], s[4], 1e-6), 5),
            ("add_rmsnorm adds, to bf16", lambda r, s: add_rmsnorm(r, s[0], s[1], None, s[2], s[3], 1e-6), 14),
            ("add_rmsnorm post-norm, to bf16", lambda r, s: add_rmsnorm(r, s[0], s[1], s[2], s[2], s[3], 1e-6), 14),
            ("quantize", lambda r, s: quantize(r, s[3], s[4]), 3),
        ):
            bench.time(f"{name} {rows} x {hidden}", launch, inputs, size * each, launches)


def activations(bench, width):
    for rows in ROWS[::2]:
        size, launches = rows * width, 200 if rows < 1024 else 20
        inputs = [
            (
                bench.random("f32", rows, 2 * width),
                bench.random("bf16", rows, 2 * width),
                bench.new("bf16", rows, width),
                fp8(bench, rows, width),
            )
            for _ in range(sets_for(size * 15))
        ]
        for name, launch, each in (
            ("gated f32 to bf16", lambda r, s: gated(r, s[0], s[2], "silu"), 10),
            ("gated bf16 to bf16", lambda r, s: gated(r, s[1], s[2], "silu"), 6),
            ("quantize", lambda r, s: quantize(r, s[2], s[3]), 3),
        ):
            bench.time(f"{name} {rows} x {width}", launch, inputs, size * each, launches)


def step(bench, hidden):
    """What a step begins with."""
    for name in ("int4-g128-sym", "int8-g128-sym", "bf16"):
        scheme = parse_scheme(name)
        host = random_weight(bench.rng, 2048, hidden, scheme, memory_layout(scheme, "gpu"))
        table = Weight(
            host.shape, scheme, {plane: bench.put(values) for plane, values in host.planes.items()}, host.layout
        )
        for rows in (1, 256):
            ids, out = bench.put(bench.rng.integers(0, 2048, rows).astype(np.int32)), bench.new("f32", rows, hidden)
            bench.time(
                f"embed {name} {rows} x {hidden}", lambda r, s: embed(r, ids, table, out), [0], rows * hidden * 4
            )
    inv_freq = bench.put((1e6 ** -(np.arange(0, 128, 2) / 128)).astype(np.float32))
    for rows in ROWS[::2]:
        positions, ids = bench.put(np.arange(rows, dtype=np.int32)), bench.put(np.zeros(rows, np.int32))
        source, out = bench.put(np.full(rows, -1, np.int32)), bench.new("f32", rows, 128)
        history = TokenHistory(bench.new("i32", 512, 16), bench.put(np.arange(512, dtype=np.int32).reshape(1, 512)), 1)
        bench.time(f"rope_table {rows} x 128", lambda r, s: rope_table(r, positions, inv_freq, out), [0], rows * 516)
        bench.time(
            f"feed_tokens {rows}",
            lambda r, s: feed_tokens(r, ids, source, ids, positions, ids, history),
            [0],
            rows * 20,
        )
    x, rows, out = (
        bench.random("f32", 64, hidden),
        bench.put(np.arange(64, dtype=np.int32)),
        bench.new("f32", 64, hidden),
    )
    bench.time(f"gather_rows 64 x {hidden}", lambda r, s: gather_rows(r, x, rows, out), [0], 64 * hidden * 8)


def samplers(bench, vocab):
    history = TokenHistory(
        bench.put(bench.rng.integers(0, vocab, (2048, 16)).astype(np.int32)),
        bench.put(np.arange(2048, dtype=np.int32).reshape(1, 2048)),
        1,
    )
    for rows, deviation in SAMPLED:
        logits = [bench.random("f32", rows, vocab, scale=deviation) for _ in range(max(2, sets_for(rows * vocab * 4)))]
        for name, values in SAMPLERS.items():
            cut = any(parameter.cuts and name in values for name, parameter in PARAMETERS.items())
            values = NEUTRAL | {"seed": np.arange(rows), "counter": np.arange(rows), "filtered": cut} | values
            tensors = {
                key: bench.put(np.broadcast_to(np.asarray(values.get(key, 0), NUMPY[dtype]), rows))
                for key, dtype in row_parameters("gpu").items()
            }
            for key, (dtype, shape) in sample_tensors(rows, vocab, 1, 0, "gpu").items():
                tensors.setdefault(key, bench.new(dtype, *shape))
            bench.time(
                f"sample {rows} x {vocab}, deviation {deviation}: {name}",
                lambda r, s: sample(r, s, history=history, **tensors),
                logits,
                rows * vocab * 4,
                60,
            )
        if rows == 16:
            targets, out, best = bench.put(np.zeros(16, np.int32)), bench.new("f32", 16), bench.new("i32", 16)
            bench.time(
                f"logprob_rows 16 x {vocab}",
                lambda r, s: logprob_rows(r, s, targets, out, best),
                logits,
                16 * vocab * 4,
                60,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=("norms", "activations", "step", "sample"))
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--intermediate", type=int, default=18944)
    parser.add_argument("--vocab", type=int, default=152064)
    args = parser.parse_args()
    with open_device(args.device) as device:
        bench = Bench(device)
        for name, run, size in (
            ("norms", norms, args.hidden),
            ("activations", activations, args.intermediate),
            ("step", step, args.hidden),
            ("sample", samplers, args.vocab),
        ):
            if args.only in (None, name):
                run(bench, size)


if __name__ == "__main__":
    main()
