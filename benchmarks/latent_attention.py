"""Multi-head latent attention on one core of a CPU: multiply-adds a second of a decoded token, and a prompt's step in the absorbed form
beside the expanded one (keys and values of every head made of the latents, then attention of heads).

    python benchmarks/latent_attention.py
"""

from math import prod
from time import perf_counter

import numpy as np

from zse.dtypes import ITEM_BYTES
from zse.kernels.attention import attention
from zse.kernels.head_product import head_product
from zse.kernels.latent_attention import latent_attention
from zse.kernels.matmul import matmul
from zse.quant.scheme import DenseScheme
from zse.runtime.opening import open_device
from zse.tensor import Tensor, Weight

SHAPES = {
    "MiniCPM 3": (40, 256, 32, 64, 64),
    "DeepSeek-V2-Lite": (16, 512, 64, 128, 128),
}  # heads, rank, rotary, nope, value
STEP = 256  # tokens of a prompt's step


class Bench:
    """Tensors of random numbers and the best time of a recording."""

    def __init__(self):
        self.device, self.rng = open_device("cpu", threads=1), np.random.default_rng(0)

    def tensor(self, dtype: str, *shape: int, values=None) -> Tensor:
        tensor = Tensor(self.device.alloc(prod(shape) * ITEM_BYTES[dtype], label="bench"), shape, dtype)
        if values is None and dtype in ("f16", "f32"):
            values = self.rng.standard_normal(shape, np.float32).astype(np.float16 if dtype == "f16" else np.float32)
        if values is not None:
            self.device.write(tensor, np.ascontiguousarray(values).tobytes())
        return tensor

    def dense(self, rows: int, columns: int) -> Weight:
        tiles = np.zeros((rows // 16, columns, 16), np.uint16)
        plane = self.tensor("bf16", *tiles.shape, values=tiles)
        return Weight((rows, columns), DenseScheme("bf16"), {"w": plane})

    def batch(self, tokens: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
        """page_table, token_row and positions of the last `tokens` of a sequence."""
        pages = np.arange(context // 16, dtype=np.int32)[None]
        positions = np.arange(context - tokens, context, dtype=np.int32)
        row = self.tensor("i32", tokens, values=np.zeros(tokens, np.int32))
        return self.tensor("i32", *pages.shape, values=pages), row, self.tensor("i32", tokens, values=positions)

    def best_ms(self, *launches, repeats: int) -> float:
        recorder = self.device.record()
        for launch in launches:
            launch(recorder)
        graph, times = recorder.finish(), []
        for _ in range(repeats + 1):
            start = perf_counter()
            graph.run()
            times.append(perf_counter() - start)
        return 1e3 * min(times[1:])


def absorbed(bench: Bench, shape, tokens: int, context: int, repeats: int) -> tuple[float, float]:
    """(ms of attention, ms of the products around it)."""
    heads, rank, rotary, nope, value = shape
    q, turned = (bench.tensor("f32", tokens, heads * size) for size in (rank, rotary))
    pages, out = bench.tensor("f16", context // 16, 16, rank + rotary), bench.tensor("f32", tokens, heads * rank)
    places = bench.batch(tokens, context)
    heads_in = bench.tensor("f32", tokens, heads * (nope + rotary))
    result = bench.tensor("f32", tokens, heads * value)
    k_b, v_b = bench.dense(heads * rank, nope), bench.dense(heads * value, rank)
    return (
        bench.best_ms(lambda r: latent_attention(r, q, turned, pages, *places, out, heads, 0.01), repeats=repeats),
        bench.best_ms(
            lambda r: head_product(r, heads_in, k_b, q, heads, max_tokens=tokens),
            lambda r: head_product(r, out, v_b, result, heads, max_tokens=tokens),
            repeats=repeats,
        ),
    )


def expanded(bench: Bench, shape, tokens: int, context: int, repeats: int) -> tuple[float, float]:
    """(ms of attention of heads, ms of the product that makes keys and values of the whole context)."""
    heads, rank, rotary, nope, value = shape
    dim = nope + rotary
    q, out = (bench.tensor("f32", tokens, heads * dim) for _ in range(2))
    keys, values = (bench.tensor("f16", context // 16, heads, *each) for each in ((dim, 16), (16, dim)))
    places = bench.batch(tokens, context)
    kv_b, latents = bench.dense(heads * (nope + value), rank), bench.tensor("f32", context, rank)
    made = bench.tensor("f32", context, heads * (nope + value))
    return (
        bench.best_ms(lambda r: attention(r, q, keys, values, *places, out, 0.01), repeats=repeats),
        bench.best_ms(lambda r: matmul(r, latents, kv_b, made, max_tokens=64), repeats=repeats),
    )


def main() -> None:
    bench = Bench()
    for name, shape in SHAPES.items():
        heads, rank, rotary, nope, value = shape
        attend, products = absorbed(bench, shape, 1, 1024, 9)
        rate = heads * 1024 * (2 * rank + rotary) / attend / 1e6
        read = 2 * heads * rank * (nope + value) / products / 1e6
        print(f"{name}, a token after 1,023: attention {rate:.0f}e9 multiply-adds/s, products {read:.0f} GB/s")
        for context in (256, 1024):
            one, other = (form(bench, shape, STEP, context, 3) for form in (absorbed, expanded))
            print(
                f"{name}, step of {STEP} at {context}: absorbed {one[0]:.0f} + {one[1]:.0f} ms, expanded {other[0]:.0f} + {other[1]:.0f}"
            )


if __name__ == "__main__":
    main()
