"""Products of weight schemes on one core of a CPU, from its second cache: what unpacking costs, whatever else the machine does.

    python benchmarks/cpu_matmul.py int4-g32 lut4-iq4-g32-i8 --tokens 1 64

The schemes take turns for --seconds; each one's best time counts, beside the first one's.
"""

import argparse
import time

import numpy as np

from zse.bench import kernels
from zse.kernels.host import random_weight
from zse.kernels.matmul import MATMUL
from zse.kernels.op import Case, HostActivation, OutputSpec, Tolerance
from zse.quant.scheme import parse_scheme
from zse.runtime.cpu import CPUDevice


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("schemes", nargs="+")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--shape", type=int, nargs=2, default=[512, 4096], help="rows and columns: 1 MB of 4 bits")
    parser.add_argument("--activations", choices=("int8", "int16"), default="int8")
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    rng, (rows, columns) = np.random.default_rng(), args.shape
    print("| tokens | scheme | bits a weight | µs | ÷ |\n|---|---|---|---|---|")
    with CPUDevice(1) as device:
        weights = {name: random_weight(rng, rows, columns, parse_scheme(name)) for name in args.schemes}
        for tokens in args.tokens:
            x = HostActivation.quantize(rng.standard_normal((tokens, columns)).astype(np.float32), args.activations)
            out, graphs, held = OutputSpec((tokens, rows), "float32", Tolerance(1, 1, "")), {}, []
            for name, weight in weights.items():
                case = Case(name, {"a": x, "weight": weight, "bias": None}, {"out": out})
                placed = {key: kernels.place(device, value) for key, value in case.inputs.items()}
                held.append(kernels.joined({**placed, **kernels.outputs(device, case)}))
                recorder = device.record()
                MATMUL.launch(recorder, **held[-1], max_tokens=tokens)
                graphs[name] = recorder.finish()
            best, end = dict.fromkeys(graphs, float("inf")), time.monotonic() + args.seconds
            while time.monotonic() < end:
                for name, graph in graphs.items():
                    start = time.perf_counter()
                    graph.run()
                    best[name] = min(best[name], time.perf_counter() - start)
            for name, seconds in best.items():
                bits, ratio = 8 * weights[name].nbytes / rows / columns, seconds / best[args.schemes[0]]
                print(f"| {tokens} | {name} | {bits:.2f} | {seconds * 1e6:.0f} | {ratio:.2f} |")
            for graph in graphs.values():
                graph.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
