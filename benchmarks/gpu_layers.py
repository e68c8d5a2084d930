"""The matrix products of a 7B model's decode step as the step runs them: one after another, overlapping at the borders.

    python benchmarks/gpu_layers.py [--tokens 1,4] [--formats int4-g128-sym,fp8-row,bf16]

28 layers of qkv, o, gate_up with its gate, and down, in one captured graph, without what stands between them in a model; weights of
eight layers, random, so that the caches hold none. Beside it the time that reading the weights takes at the measured ceiling.
With --norms also with the RMSNorms before qkv and gate_up. --chain: one token of int4 in groups of 128, with the norms and as one
launch (zse.kernels.chain).
`zse kernels bench --op matmul` times (and checks) each of them by itself.
"""

import argparse

import numpy as np

from zse.bench.kernels import measure, place, read_ceiling, release
from zse.kernels.chain import chain, signals_for
from zse.kernels.gpu.matmul_sizes import SHAPES, random_planes
from zse.kernels.matmul import matmul
from zse.kernels.norm import add_rmsnorm
from zse.kernels.op import HostArray
from zse.quant.pack import f32_to_bf16
from zse.quant.scheme import parse_scheme
from zse.runtime.opening import open_device
from zse.tensor import Tensor

LAYERS, DISTINCT = 28, 8


def layer_us(device, scheme, tokens: int, norms: bool = False) -> tuple[float, int]:
    """(microseconds of a layer, bytes of its weights). With norms o and down add to the rows that they read, as in a model."""
    rng = np.random.default_rng()
    shapes = {name: shape for name, shape in SHAPES.items() if name != "head"}
    hosts = {name: random_planes(rng, rows, width, scheme) for name, (rows, width, _) in shapes.items()}
    weights = [{name: place(device, host) for name, host in hosts.items()} for _ in range(DISTINCT)]
    inputs, outs = {}, {}
    for name, (rows, width, epilogue) in shapes.items():
        x = f32_to_bf16(rng.standard_normal((tokens, width)).astype(np.float32))
        inputs[name] = place(device, HostArray("bf16", x))
        shape, dtype = ((tokens, rows // 2), "bf16") if epilogue == "silu" else ((tokens, rows), "f32")
        outs[name] = Tensor(device.alloc(4 * shape[0] * shape[1], label="bench"), shape, dtype)

    hidden = shapes["qkv"][1]
    x, ones = outs["down"], place(device, np.ones(hidden, np.float32))
    if norms:
        device.write(x, rng.standard_normal((tokens, hidden)).astype(np.float32).tobytes())

    def record(recorder, layer: int) -> None:
        for name, (_, width, epilogue) in shapes.items():
            weight, a = weights[layer % DISTINCT][name], inputs[name]
            if norms and epilogue != "accumulate":
                add_rmsnorm(recorder, x, None, None, ones, a, 1e-6)
            if epilogue == "silu":
                matmul(recorder, a, weight, outs[name], gate="silu", max_tokens=tokens)
            else:
                out = x if norms and epilogue == "accumulate" else outs[name]
                matmul(recorder, a, weight, out, max_tokens=tokens, accumulate=epilogue == "accumulate")

    try:
        us = measure(device, record, LAYERS, 1000.0)
    finally:
        release((weights, inputs, outs, ones))
    return us, sum(host.nbytes for host in hosts.values())


def chain_us(device, scheme) -> tuple[float, int]:
    """As layer_us(), of one token and a launch from attention to the next attention's q, k and v."""
    rng = np.random.default_rng()
    hosts = [random_planes(rng, *SHAPES[name][:2], scheme) for name in ("o", "gate_up", "down", "qkv")]
    weights = [tuple(place(device, host) for host in hosts) for _ in range(DISTINCT)]
    (hidden, attended), inner, rows = hosts[0].shape, hosts[2].shape[1], hosts[3].shape[0]
    x, norm = (place(device, rng.standard_normal(shape).astype(np.float32)) for shape in ((1, hidden), hidden))
    a = place(device, HostArray("bf16", f32_to_bf16(rng.standard_normal((1, attended)).astype(np.float32))))
    out = place(device, np.zeros((1, rows), np.float32))

    def record(recorder, layer: int) -> None:
        signals = signals_for(device, hidden, inner, layer, LAYERS)
        chain(recorder, x, a, weights[layer % DISTINCT], (norm, norm), out, signals, eps=1e-6)

    try:
        us = measure(device, record, LAYERS, 1000.0)
    finally:
        release((weights, x, norm, a, out))
    return us, sum(host.nbytes for host in hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,4,8")
    parser.add_argument("--formats", default="int4-g128-sym,fp8-row,bf16")
    parser.add_argument("--norms", action="store_true", help="with the norms before qkv and gate_up")
    parser.add_argument("--chain", action="store_true", help="one token as one launch a layer")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = open_device(args.device)
    ceiling = read_ceiling(device)
    print(f"{device.product}: {ceiling:.0f} GB/s read")
    for name in args.formats.split(","):
        for tokens in map(int, args.tokens.split(",")):
            scheme = parse_scheme(name)
            us, nbytes = chain_us(device, scheme) if args.chain else layer_us(device, scheme, tokens, args.norms)
            floor = nbytes / ceiling / 1e3
            print(
                f"{name:16} {tokens:3} tokens: {us:7.1f} us a layer, floor {floor:6.1f} us ({100 * floor / us:.0f} %)",
                flush=True,
            )


if __name__ == "__main__":
    main()
