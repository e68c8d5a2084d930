"""Attention and qkv_post on a GPU: microseconds of one layer beside their floors.

    PYTHONPATH=src python benchmarks/gpu_attention.py [--heads 28 --kv-heads 4 --head-dim 128 --kv bf16] [--layers 28]
    PYTHONPATH=src python benchmarks/gpu_attention.py --compare bf16 i8 e4m3

Every figure is a graph of `--layers` layers, each with pages of its own in the cache's layout (pages in random order),
replayed until 50 ms have passed; decode reads its context once, so the floor is KV bytes / 4.3 TB/s, prefill's is
FLOPs / 790 TFLOP/s.
"""

import argparse
import random
import time
from array import array
from functools import cache

from zse.kernels.attention import attention
from zse.kernels.gpu.attention_plan import AttentionScratch, plan_attention
from zse.kernels.heads_attention import FEW_TOKENS, heads_attention, takes
from zse.kernels.kv_pages import BLOCK, head_nbytes, pages_shape
from zse.kernels.qkv_post import qkv_post
from zse.runtime.opening import open_device
from zse.tensor import Tensor

BANDWIDTH, FLOPS = 4.3e12, 790e12
DECODE = {
    "1 x 128": [128],
    "1 x 1k": [1024],
    "1 x 4k": [4096],
    "1 x 32k": [32768],
    "1 x 8k": [8192],
    "4 x 1k": [1024] * 4,
    "8 x 1k": [1024] * 8,
    "8 x 8k": [8192] * 8,
    "16 x 1k": [1024] * 16,
    "16 x 4k": [4096] * 16,
    "16 x 8k": [8192] * 16,
    "64 x 1k": [1024] * 64,
    "64 x 8k": [8192] * 64,
    "256 x 1k": [1024] * 256,
    "64, 50 to 8k": [50 + 126 * i for i in range(64)],
}
PREFILL = {
    "128": [(0, 128)],
    "512": [(0, 512)],
    "1,024": [(0, 1024)],
    "2,048": [(0, 2048)],
    "7,000": [(0, 7000)],
    "8 x 512": [(0, 512)] * 8,
    "512 after 6.5k": [(6488, 512)],
    "512 after 4k": [(4096, 512)],
    "2,048 after 4k": [(4096, 2048)],
}


@cache
def moderate_bytes() -> bytes:
    """16 MiB of random bytes whose bf16, f32, i8 and e4m3 values are of moderate size."""
    piece = bytes(byte if i % 2 == 0 else 0x3C | byte & 0x83 for i, byte in enumerate(random.randbytes(1 << 20)))
    return piece * 16


class Batch:
    """Tensors of one batch. runs: (first position, tokens) of each sequence."""

    def __init__(self, device, args, runs, layers):
        self.device, self.args, self.runs, self.layers = device, args, runs, layers
        rows, used = len(runs), [-(-(first + count) // BLOCK) for first, count in runs]
        self.max_pages, total = max(used), sum(used)
        numbers = list(range(total))
        random.shuffle(numbers)
        table, at = array("i"), 0
        for count in used:
            table.extend([2 * layers * page for page in numbers[at : at + count]] + [0] * (self.max_pages - count))
            at += count
        self.tokens = sum(count for _, count in runs)
        width = args.heads * args.head_dim
        self.page_table = self.put("i32", (rows, self.max_pages), table)
        self.token_row = self.put(
            "i32", (self.tokens,), array("i", [r for r, (_, n) in enumerate(runs) for _ in range(n)])
        )
        self.positions = self.put(
            "i32", (self.tokens,), array("i", [p for first, n in runs for p in range(first, first + n)])
        )
        block = args.kv_heads * head_nbytes(args.head_dim, args.kv)
        self.pages = device.alloc(total * 2 * layers * block, label="kv cache")
        self.fill(self.pages)
        shape = ((total - 1) * 2 * layers + 1, args.kv_heads, *pages_shape(args.head_dim, args.kv, True, "gpu"))
        self.keys = [Tensor(self.pages, shape, args.kv, 2 * layer * block) for layer in range(layers)]
        self.values = [Tensor(self.pages, shape, args.kv, (2 * layer + 1) * block) for layer in range(layers)]
        self.q, self.out = (self.new("bf16", 2, (self.tokens, width)) for _ in range(2))
        self.fill(self.q.buffer)
        self.qkv = self.new("f32", 4, (self.tokens, (args.heads + 2 * args.kv_heads) * args.head_dim))
        self.table = self.new("f32", 4, (self.tokens, args.head_dim))
        self.context = max(first + count for first, count in runs)
        heads = args.heads, args.kv_heads, args.head_dim
        self.scratch = AttentionScratch.make(device, *heads, [args.window], self.tokens, self.context)

    def new(self, dtype, item, shape):
        count = item
        for size in shape:
            count *= size
        return Tensor(self.device.alloc(count, label="bench"), shape, dtype)

    def put(self, dtype, shape, values):
        tensor = self.new(dtype, 4, shape)
        self.device.write(tensor, values.tobytes())
        return tensor

    def fill(self, buffer):
        """moderate_bytes() all over."""
        piece = moderate_bytes()
        for at in range(0, buffer.nbytes, len(piece)):
            size = min(len(piece), buffer.nbytes - at)
            self.device.write(Tensor(buffer, (size,), "u8", at), piece[:size])

    def record_plan(self, recorder, longest):
        plan_attention(recorder, self.scratch, self.token_row, self.positions, self.args.kv, longest)

    def over_pages(self, layer):
        """What both ways to attend take behind their queries."""
        where = self.page_table, self.token_row, self.positions
        return self.keys[layer], self.values[layer], *where, self.out, self.args.head_dim**-0.5, self.args.window

    def record_attention(self, recorder, layer, longest):
        scratch = {(self.args.kv_heads, self.args.head_dim): self.scratch}
        attention(recorder, self.q, *self.over_pages(layer), scratch=scratch, longest_run=longest)

    def record_in_one(self, recorder, layer):
        scratch = {(self.args.kv_heads, self.args.head_dim): self.scratch}
        heads_attention(recorder, self.qkv, None, None, self.table, *self.over_pages(layer), scratch=scratch)

    def record_qkv_post(self, recorder, layer):
        qkv_post(
            recorder,
            self.qkv,
            None,
            None,
            self.table,
            self.q,
            self.keys[layer],
            self.values[layer],
            self.page_table,
            self.token_row,
            self.positions,
        )

    def free(self):
        for tensor in (
            self.page_table,
            self.token_row,
            self.positions,
            self.q,
            self.out,
            self.qkv,
            self.table,
            *self.scratch.plans.values(),
            self.scratch.counters,
            self.scratch.records,
            self.scratch.totals,
        ):
            tensor.buffer.free()
        self.pages.free()


def measure(device, record) -> float:
    """Microseconds of one replay."""
    recorder = device.record()
    record(recorder)
    graph = recorder.finish()
    for _ in range(3):
        graph.run()
    best, count = None, 4
    for _ in range(4):
        start = time.perf_counter()
        tickets = [graph.submit() for _ in range(count)]
        tickets[-1].wait()
        took = (time.perf_counter() - start) / count
        best = took if best is None else min(best, took)
        count = max(4, min(200, int(0.05 / best)))
    graph.close()
    return best * 1e6


def measure_layer(device, batch: Batch, longest: int | None) -> tuple[float, float, float, float, float | None]:
    """Microseconds of a layer's attention, of its qkv_post, of both, of the plan, and of both in one launch, where a
    decode step of so many tokens has it."""

    def attend(recorder, layer):
        batch.record_attention(recorder, layer, longest)

    def of_layers(*parts) -> float:
        def record(recorder):
            batch.record_plan(recorder, longest)
            for layer in range(batch.layers):
                for part in parts:
                    part(recorder, layer)

        return (measure(device, record) - plan) / batch.layers

    plan = measure(device, lambda recorder: [batch.record_plan(recorder, longest) for _ in range(8)]) / 8
    args, in_one = batch.args, None
    group = args.heads // args.kv_heads
    if longest == 1 and batch.tokens <= FEW_TOKENS and takes(device, batch.values[0], group, args.head_dim, None):
        in_one = of_layers(batch.record_in_one)
    both = of_layers(batch.record_qkv_post, attend)
    return of_layers(attend), of_layers(batch.record_qkv_post), both, plan, in_one


def compare(device, args) -> None:
    """Microseconds of a layer's attention for each type of pages, and what it is of the first one's; measured in turn, twice."""
    first = args.compare[0]
    for kind, batches, longest in (("decode", DECODE, 1), ("prefill", PREFILL, None)):
        print(f"{kind:>14} | {first} | " + " | ".join(f"{kv}, of {first}'s" for kv in args.compare[1:]))
        for name, shape in batches.items():
            runs = [(length - 1, 1) for length in shape] if longest else shape
            least = 2 * args.kv_heads * args.head_dim * 2 * sum(first + count for first, count in runs)
            layers = min(args.layers if longest else 8, max(2, int(2e9 / least)))
            best = dict.fromkeys(args.compare, float("inf"))
            for kv in args.compare * 2:
                args.kv = kv
                batch = Batch(device, args, runs, layers)
                best[kv] = min(best[kv], attention_us(device, batch, longest))
                batch.free()
            others = [f"{best[kv]:9.2f} {best[kv] / best[first]:.2f}" for kv in args.compare[1:]]
            print(f"{name:>14} | {best[first]:9.2f} | " + " | ".join(others), flush=True)


def attention_us(device, batch: Batch, longest: int | None) -> float:
    """Microseconds of a layer's attention; the plan, once for all layers, is counted."""

    def record(recorder):
        batch.record_plan(recorder, longest)
        for layer in range(batch.layers):
            batch.record_attention(recorder, layer, longest)

    return measure(device, record) / batch.layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (("heads", 28), ("kv-heads", 4), ("head-dim", 128), ("window", 0), ("layers", 28)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--kv", choices=("bf16", "f16", "i8", "e4m3"), default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--compare", nargs="+", choices=("bf16", "f16", "i8", "e4m3"), help="types of pages beside each other"
    )
    args = parser.parse_args()
    device = open_device(args.device)
    if args.compare:
        compare(device, args)
        return
    token_bytes = 2 * args.kv_heads * head_nbytes(args.head_dim, args.kv) // BLOCK
    print(
        f"{args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.kv} pages, window {args.window or 'none'}; "
        "µs of a layer"
    )
    print(f"{'decode':>14} | attention | + qkv_post | in one | qkv_post | plan, once a step | floor | of bandwidth")
    for name, lengths in DECODE.items():
        layers = min(args.layers, max(4, int(12e9 / (sum(lengths) * token_bytes))))
        batch = Batch(device, args, [(length - 1, 1) for length in lengths], layers)
        alone, post, both, plan, in_one = measure_layer(device, batch, 1)
        floor = sum(min(length, args.window or length) for length in lengths) * token_bytes / BANDWIDTH * 1e6
        one = "-" if in_one is None else f"{in_one:.2f}"
        columns = (
            f"{alone:9.2f} | {both:10.2f} | {one:>6} | {post:8.2f} | {plan:17.2f} | {floor:5.2f} | {floor / alone:.0%}"
        )
        print(f"{name:>14} | {columns}", flush=True)
        batch.free()
    print(f"{'prefill':>14} | attention | qkv_post | plan, once a step | floor | TFLOP/s")
    for name, runs in PREFILL.items():
        batch = Batch(device, args, runs, min(args.layers, 8))
        alone, post, _, plan, _ = measure_layer(device, batch, None)
        flops = sum(4 * args.heads * args.head_dim * (n * first + n * (n + 1) / 2) for first, n in runs)
        columns = f"{alone:9.1f} | {post:8.1f} | {plan:17.1f} | {flops / FLOPS * 1e6:5.1f} | {flops / alone / 1e6:.0f}"
        print(f"{name:>14} | {columns}", flush=True)
        batch.free()


if __name__ == "__main__":
    main()
