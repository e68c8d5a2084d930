"""What the CPU runtime itself costs: a border between dependent launches, a replay from Python, waking the pool.

    python benchmarks/pool_overhead.py [--threads 1 2 4]

Empty kernels, so every figure is overhead; one thread may then do a whole launch before another comes. "With work" gives
every thread 4 blocks of a few microseconds, so that the threads really meet, and counts what a launch takes over its
share. The floor of a border between two cores is two transfers of a cache line, about 0.1 to 0.2 us on one socket.
Medians of 15 rounds; a machine that is shared shows its neighbours.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zse import build
from zse.runtime import probe
from zse.runtime.args import Args
from zse.runtime.cpu import CPUDevice

EMPTY = """#include <stdint.h>
void empty(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) { (void)args; (void)grid; (void)first; (void)last; }
void work(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    (void)grid;
    for (int64_t block = first; block < last; block++)
        for (volatile int64_t i = 0; i < (int64_t)args[0]; i++) { }
}
"""
MANIFEST = {"empty": {"params": []}, "work": {"params": [["iterations", "i64"]]}}
WORK = 2000  # iterations of a block: a few microseconds
LAUNCHES, ROUNDS = 2000, 15


def median_ns(step, rounds: int = ROUNDS, pause_s: float = 0.0) -> float:
    """Median nanoseconds of one call of `step`, after one call to warm up; `pause_s` before each."""
    step()
    times = []
    for _ in range(rounds):
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times)


def graph_of(device: CPUDevice, launches: int, grid, independent: bool = False):
    """A graph of so many empty launches over `grid`; a callable grid is given the recorder."""
    recorder = device.record()
    size = grid(recorder) if callable(grid) else grid
    for _ in range(launches):
        recorder.launch("empty", Args(), size, independent=independent)
    return recorder.finish()


def with_work_ns(device: CPUDevice, alone: CPUDevice) -> float:
    """Nanoseconds that a launch takes over its share of what one thread needs for the same blocks."""
    graphs = []
    for where in (device, alone):
        recorder = where.record()
        for _ in range(LAUNCHES // 4):
            recorder.launch("work", Args(iterations=WORK), device.threads * 4)
        graphs.append(recorder.finish())
    together, single = (median_ns(graph.run) / (LAUNCHES // 4) for graph in graphs)
    return together - single / device.threads


def measure(device: CPUDevice, alone: CPUDevice) -> dict[str, float]:
    """Overheads in nanoseconds by name."""
    one, many = graph_of(device, LAUNCHES, 1), graph_of(device, LAUNCHES, device.threads * 4)
    beside = graph_of(device, LAUNCHES, device.threads * 4, independent=True)
    symbolic = graph_of(device, LAUNCHES, lambda recorder: recorder.symbol("tokens", 64))
    single = graph_of(device, 1, 1)
    calls = 2000

    def replays():
        for _ in range(calls):
            single.run()

    return {
        "border, 1 block": median_ns(one.run) / LAUNCHES,
        "border, 4 blocks a thread": median_ns(many.run) / LAUNCHES,
        "border, with work": with_work_ns(device, alone),
        "independent launch, 4 blocks a thread": median_ns(beside.run) / LAUNCHES,
        "border, symbolic grid": median_ns(lambda: symbolic.run(tokens=device.threads)) / LAUNCHES,
        "replay of one launch, from Python": median_ns(replays) / calls,
        "the same after 5 ms of sleep": median_ns(single.run, 100, 0.005),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, 2, probe.default_threads()}))
    options = parser.parse_args()
    build.build(isas=(), quiet=True)
    print(f"{probe.cpu_model()}, {probe.physical_cores()} cores, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "empty.c", Path(folder) / "empty.so"
        source.write_text(EMPTY, encoding="utf-8")
        subprocess.run(
            [build.find_compiler()[0], "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
        )
        results = {}
        for threads in options.threads:
            with CPUDevice(threads, str(library), MANIFEST) as device, CPUDevice(1, str(library), MANIFEST) as alone:
                results[threads] = measure(device, alone)
    names = list(next(iter(results.values())))
    print(f"{'microseconds':40s}" + "".join(f"{f'{threads} threads':>12s}" for threads in results))
    for name in names:
        print(f"{name:40s}" + "".join(f"{row[name] / 1000:12.2f}" for row in results.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
