"""The matrix products of a model's layers on one GPU, without anything between them: time, TFLOP/s and TB/s.

    python benchmarks/gpu_matmul.py [--precisions bf16,fp8,int4,int4-fp8] [--tokens 1,16,64,128,512,1024] [--layers 28] [--each]
        [--cube 8192]

The shapes are those of Qwen2.5-7B (hidden 3584, 28 + 2 * 4 heads of 128, inner 18944). Every layer has weights of its
own, so nothing is found in L2; values are random. --each: every product alone, too. --cube N: also one N x N x N
product in bf16.
"""

import argparse
import random
import statistics
import struct
import sys
import time

from zse.kernels.matmul import matmul
from zse.quant.scheme import AffineScheme, DenseScheme, Fp8Scheme, memory_layout
from zse.runtime.opening import open_device
from zse.runtime.symbol import Sym
from zse.tensor import Fp8Activation, Tensor, Weight, sum_width

HIDDEN, QKV, INNER = 3584, 4608, 18944
SCHEMES = {
    "bf16": DenseScheme("bf16"),
    "fp8": Fp8Scheme("row"),
    "fp8-block": Fp8Scheme("block"),
    "int4": AffineScheme(4, 128, False),
    "int4-fp8": AffineScheme(4, 128, False),
    "int4-g32": AffineScheme(4, 32, False),
    "int5-g32": AffineScheme(5, 32, False),
    "int6-g16": AffineScheme(6, 16, True),
    "int8": AffineScheme(8, 128, True),
    "int8-g32": AffineScheme(8, 32, True),
    "f16": DenseScheme("f16"),
}
OF_FP8 = ("fp8", "fp8-block", "int4-fp8")  # their activations are e4m3 from 9 tokens on
PRODUCTS = (("qkv", QKV, HIDDEN), ("o", HIDDEN, HIDDEN), ("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER))
PATTERN = 8 << 20  # bytes of random values, repeated


def pattern(dtype: str) -> bytes:
    """Random values near a unit normal's, scaled down for scales."""
    rng = random.Random(len(dtype))
    if dtype in ("u8", "e4m3"):
        data = bytearray(rng.randbytes(PATTERN))
        return bytes(data) if dtype == "u8" else bytes(data.translate(bytes(b & 0xBF for b in range(256))))
    if dtype == "bf16":
        values = [struct.pack("<f", rng.gauss(0, 1))[2:] for _ in range(65536)]
    elif dtype == "f16":
        values = [struct.pack("<e", 0.01 + 0.01 * rng.random()) for _ in range(65536)]
    else:
        values = [struct.pack("<f", 0.01 + 0.01 * rng.random()) for _ in range(65536)]
    return b"".join(rng.choices(values, k=PATTERN // len(values[0])))


class Maker:
    """Tensors of random values on the device."""

    def __init__(self, device):
        self.device, self.patterns = device, {}

    def tensor(self, shape, dtype: str) -> Tensor:
        made = Tensor(self.device.alloc(_nbytes(shape, dtype), "benchmark"), tuple(shape), dtype)
        data = self.patterns.setdefault(dtype, pattern(dtype) if dtype not in self.patterns else None)
        for start in range(0, made.nbytes, PATTERN):
            count = min(PATTERN, made.nbytes - start)
            self.device.write(Tensor(made.buffer, (count,), "u8", start), data[:count])
        return made

    def weight(self, scheme, rows: int, width: int) -> Weight:
        layout = memory_layout(scheme, "gpu")
        planes = {plane.name: self.tensor(plane.shape, plane.dtype) for plane in scheme.planes(rows, width, layout)}
        return Weight((rows, width), scheme, planes, layout)


def _nbytes(shape, dtype: str) -> int:
    count = {"u8": 1, "e4m3": 1, "bf16": 2, "f16": 2}.get(dtype, 4)
    for size in shape:
        count *= size
    return count


def timed(graph, tokens: int, times: int = 7) -> float:
    """Median seconds of one replay."""
    for _ in range(3):
        graph.run(tokens=tokens)
    found = []
    for _ in range(times):
        start = time.perf_counter()
        graph.run(tokens=tokens)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def record_products(recorder, layer, inputs, outputs, tokens: int, only: str | None = None) -> None:
    """One layer's products, each with the epilogue it has in a model."""
    for name, _, width in PRODUCTS:
        if only in (None, name):
            if name == "gate_up":
                matmul(recorder, inputs[width], layer[name], outputs[name], gate="silu", max_tokens=tokens)
            else:
                matmul(
                    recorder,
                    inputs[width],
                    layer[name],
                    outputs[name],
                    max_tokens=tokens,
                    accumulate=name in ("o", "down"),
                )


def measure(device, maker, precision: str, layers: list, tokens: int, each: bool) -> None:
    symbol = Sym("tokens")
    fp8 = precision in OF_FP8 and tokens > 8

    def values(width: int):
        whole = maker.tensor((tokens, width), "e4m3" if fp8 else "bf16")
        if not fp8:
            return whole.with_rows(symbol)
        sums = maker.tensor((tokens, sum_width(width)), "f16")
        return Fp8Activation(whole, maker.tensor((tokens,), "f32"), sums).with_rows(symbol)

    inputs = {width: values(width) for width in (HIDDEN, INNER)}
    outputs = {
        "qkv": maker.tensor((tokens, QKV), "f32"),
        "o": maker.tensor((tokens, HIDDEN), "f32"),
        "gate_up": maker.tensor((tokens, INNER), "bf16"),
    }
    outputs = {name: tensor.with_rows(symbol) for name, tensor in outputs.items()}
    outputs["down"] = outputs["o"]

    def run(only: str | None) -> float:
        recorder = device.record()
        recorder.symbol("tokens", tokens)
        for layer in layers:
            record_products(recorder, layer, inputs, outputs, tokens, only)
        graph = recorder.finish()
        seconds = timed(graph, tokens)
        graph.close()
        return seconds

    for only in (None, *(name for name, _, _ in PRODUCTS if each)):
        chosen = [product for product in PRODUCTS if only in (None, product[0])]
        size = sum(rows * width for _, rows, width in chosen)
        bytes_ = sum(plane.nbytes for layer in layers for name, _, _ in chosen for plane in layer[name].planes.values())
        seconds = run(only)
        rate = 2e-12 * tokens * size * len(layers) / seconds
        print(
            f"{precision:9} {tokens:5} tokens {only or 'all':8} {seconds * 1e3:8.3f} ms  "
            f"{seconds * 1e6 / len(layers):7.1f} us a layer  {rate:6.0f} TFLOP/s  "
            f"{bytes_ / seconds / 1e12:5.2f} TB/s",
            flush=True,
        )


def cube(device, maker, size: int) -> None:
    weights = [maker.weight(SCHEMES["bf16"], size, size) for _ in range(2)]
    a, out = maker.tensor((size, size), "bf16"), maker.tensor((size, size), "f32")
    recorder = device.record()
    tokens = recorder.symbol("tokens", size)
    for i in range(8):
        matmul(recorder, a.with_rows(tokens), weights[i % 2], out.with_rows(tokens), max_tokens=size)
    seconds = timed(recorder.finish(), size) / 8
    print(
        f"bf16 {size} x {size} x {size}: {seconds * 1e3:.3f} ms, {2 * size**3 / seconds / 1e12:.0f} TFLOP/s", flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", default="bf16,fp8,int4", help="of " + ", ".join(SCHEMES))
    parser.add_argument("--tokens", default="1,16,64,128,512,1024")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--cube", type=int, default=0)
    args = parser.parse_args()
    device = open_device("cuda")
    maker = Maker(device)
    if args.cube:
        cube(device, maker, args.cube)
    for precision in args.precisions.split(","):
        layers = [
            {name: maker.weight(SCHEMES[precision], rows, width) for name, rows, width in PRODUCTS}
            for _ in range(args.layers)
        ]
        for tokens in args.tokens.split(","):
            measure(device, maker, precision, layers, int(tokens), args.each)
        for layer in layers:
            for weight in layer.values():
                for plane in weight.planes.values():
                    plane.buffer.free()
    return 0


if __name__ == "__main__":
    sys.exit(main())
