"""Recurrent layers on a CPU. Prompts: chunks against one token after another, and against the multiply-adds that a core can do. One token of
each sequence: states read and written against what a core changes in memory in place.

    python benchmarks/recurrent.py [--tokens 64,512,2048] [--chunks 16,32,64] [--sequences 64]

Processor time of one thread, the best of some runs, so that other processes cost little; one layer of each shape. Of operations those of
the recurrence are counted: chunks have more, which is what the share of a core's peak leaves out.
"""

import argparse
import time
from typing import Any

import numpy as np

from zse import kernel as zl
from zse.bench.kernels import joined, outputs, place, release
from zse.bench.own_kernels import cpu_device
from zse.kernels import delta, scan
from zse.kernels.op import Op
from zse.runtime.args import Args

SUMS = 16  # chains of multiply-adds: two units of four cycles want eight


@zl.kernel
def multiply_adds(x: zl.Ptr[zl.f32], rounds: zl.i64):
    L = zl.target.lanes
    sums = [zl.load(x + i * L, L) for i in zl.static(range(SUMS))]
    factor, addend = zl.load(x, L), zl.load(x + L, L)
    for _ in range(rounds):
        for i in zl.static(range(SUMS)):
            sums[i] = zl.fma(sums[i], factor, addend)
    for i in zl.static(range(SUMS)):
        zl.store(x + i * L, sums[i])


@zl.kernel
def shrink(x: zl.Ptr[zl.f32], size: zl.i64):
    L = zl.target.lanes
    for i in range(0, size, 4 * L):
        for u in zl.static(range(4)):
            zl.store(x + i + u * L, zl.load(x + i + u * L, L) * 0.999)


def processor_ms(device: Any, record: Any, runs: int = 12) -> float:
    """Of one replay."""
    recorder = device.record()
    record(recorder)
    graph, best = recorder.finish(), float("inf")
    for _ in range(runs):
        start = time.process_time()
        graph.run()
        best = min(best, time.process_time() - start)
    graph.close()
    return 1e3 * best


def peak_gflops() -> float:
    """Of one core's f32 multiply-adds."""
    op: Any = Op("peak", lambda target: [zl.Variant("multiply_adds", multiply_adds)], None, None, None, None)
    device, rounds = cpu_device(op, 1), 1_000_000
    x = place(device, np.full(SUMS * 16, 0.5, np.float32))
    ms = processor_ms(device, lambda recorder: recorder.launch("multiply_adds", Args(x=x, rounds=rounds), (1,)))
    lanes = 16 if "avx512f" in open("/proc/cpuinfo").read() else 8  # noqa: SIM115
    device.close()
    return 2 * SUMS * lanes * rounds / ms / 1e6


def in_place_gbytes() -> float:
    """GB/s that one core reads and writes of memory that no cache holds."""
    op: Any = Op("shrink", lambda target: [zl.Variant("shrink", shrink)], None, None, None, None)
    device, size = cpu_device(op, 1), 1 << 26
    x = place(device, np.ones(size, np.float32))
    ms = processor_ms(device, lambda recorder: recorder.launch("shrink", Args(x=x, size=size), (1,)), 5)
    device.close()
    return 8 * size / ms / 1e6


def decode(sequences: int) -> None:
    """One token of each of so many sequences."""
    rng, ceiling = np.random.default_rng(2), in_place_gbytes()
    print(f"memory that one core changes in place: {ceiling:.0f} GB/s")
    lengths = (1,) * sequences
    cases = [
        (delta.DELTA, name, delta.make_case(rng, "head", sizes, lengths, (), 0, delta.NEAR))
        for name, sizes in delta.MODELS.items()
    ]
    cases += [
        (scan.SCAN, name, scan.make_case(rng, sizes, lengths, (), 0, None, scan.NEAR))
        for name, sizes in scan.MODELS.items()
    ]
    for op, name, case in cases:
        device = cpu_device(op, 1)
        call = joined({key: place(device, value) for key, value in case.inputs.items()} | outputs(device, case))
        ms = processor_ms(
            device, lambda recorder, op=op, call=call, case=case: op.launch(recorder, **call, **case.options)
        )
        rate = op.cost(case).bytes / ms / 1e6
        print(
            f"{op.name}, {name}, {sequences} sequences: {ms:.2f} ms, {rate:.0f} GB/s ({100 * rate / ceiling:.0f} %)",
            flush=True,
        )
        device.close()


def forms():
    """(operation, its name, kernel, static arguments, the case of so many tokens) of every shape."""
    rng = np.random.default_rng(1)
    for model, sizes in delta.MODELS.items():
        for decay in delta.CHUNKS:
            case = lambda tokens, s=sizes, d=decay: delta.make_case(rng, d, s, (tokens,), (), 0, delta.NEAR)  # noqa: E731
            yield (
                delta.DELTA,
                f"{model}, decays of a {decay}",
                f"delta_{decay}",
                delta.delta_head,
                {"DECAY": decay},
                case,
            )
    for model, sizes in scan.MODELS.items():
        case = lambda tokens, s=sizes: scan.make_case(rng, s, (tokens,), (), 0, None, scan.NEAR)  # noqa: E731
        yield scan.SCAN, model, "scan", scan.scan_heads, {}, case


def device_of(op: Op, module: Any, symbol: str, kernel: Any, fixed: dict, chunk: int | None) -> Any:
    """With one form of the kernel; chunk: None for one token after another."""
    short = module.SHORT
    module.SHORT = 1 << 30 if chunk is None else short
    try:
        variant = zl.Variant(symbol, kernel, fixed | {"CHUNK": chunk or 16})
        return cpu_device(Op(op.name, lambda target: [variant], op.launch, op.reference, op.cases, op.cost), 1)
    finally:
        module.SHORT = short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="64,512,2048")
    parser.add_argument("--chunks", default="16,32,64")
    parser.add_argument("--sequences", type=int, default=64)
    args = parser.parse_args()
    decode(args.sequences)
    chunks, peak = [int(each) for each in args.chunks.split(",")], peak_gflops()
    print(f"multiply-adds of one core: {peak:.0f} GFLOP/s")
    for op, name, symbol, kernel, fixed, case_of in forms():
        module = delta if op is delta.DELTA else scan
        devices = {chunk: device_of(op, module, symbol, kernel, fixed, chunk) for chunk in (*chunks, None)}
        for tokens in (int(each) for each in args.tokens.split(",")):
            case = case_of(tokens)
            found = []
            for chunk, device in devices.items():
                inputs = {key: place(device, value) for key, value in case.inputs.items()}
                call = joined(inputs | outputs(device, case))
                ms = processor_ms(device, lambda recorder, call=call: op.launch(recorder, **call, **case.options))
                share = 100 * op.cost(case).flops / ms / 1e6 / peak
                found.append(f"{f'chunks of {chunk}' if chunk else 'one by one'} {ms:.2f} ms ({share:.0f} %)")
                release(call)
            print(f"{op.name}, {name}, {tokens} tokens: {', '.join(found)}", flush=True)
        for device in devices.values():
            device.close()


if __name__ == "__main__":
    main()
