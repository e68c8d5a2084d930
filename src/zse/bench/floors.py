"""The floors of a CPU, which no figure can beat: how fast it reads memory and multiplies with all threads of the
engine.

They are measured by kernels that do nothing else (zse.kernels.floor), of the level that the engine's kernels are
compiled for. A machine that others share is noisy by a factor of 1.5: measure them in turn with the figures."""

import statistics
import time
from typing import Any, NamedTuple

from zse.bench import kernels
from zse.kernels import floor
from zse.runtime.args import Args

LARGE_BYTES = 2 << 30  # four times what servers show as their last cache
BLOCKS = 256  # of multiply-adds: 5 to 20 ms of one core


class Floors(NamedTuple):
    """read: GB/s; int8, f32: 10^9 multiply-adds a second. Of a GPU these are its data sheet's with 8-bit and 16-bit
    floats."""

    read: float
    int8: float
    f32: float

    def line(self) -> str:
        return f"read {self.read:.1f} GB/s; multiply-adds 8-bit {self.int8:.0f}, wider {self.f32:.0f} G/s"


class FloorMeter:
    """Measures a CPU device's floors as often as it is asked. nbytes: of the memory that is read."""

    def __init__(self, device: Any, nbytes: int = LARGE_BYTES):
        blocks = -(-nbytes // floor.READ_BYTES)
        self._device = device
        self._source = device.alloc(blocks * floor.READ_BYTES, "bench")
        self._out = device.alloc(max(blocks, BLOCKS) * floor.OUT_BYTES, "bench")
        view = self._source.view()
        for at in range(0, len(view), 4096):
            view[at] = 1  # pages that nobody wrote are all the same one
        view.release()
        products = {name: Args(w=self._source, a=self._source, out=self._out) for name in ("int8", "f32")}
        self._amounts = {
            "read": blocks * floor.READ_BYTES,
            "int8": 4 * BLOCKS * floor.PRODUCTS,
            "f32": BLOCKS * floor.PRODUCTS,
        }
        self._graphs = {}
        for name, args in ({"read": Args(src=self._source, out=self._out)} | products).items():
            recorder = device.record()
            recorder.launch(f"floor_{name}", args, (blocks if name == "read" else BLOCKS,))
            self._graphs[name] = recorder.finish()

    def measure(self, seconds: float = 0.15) -> Floors:
        """The best of each within about so many seconds."""
        found = []
        for name in Floors._fields:
            graph, best = self._graphs[name], float("inf")
            graph.run()
            end = time.perf_counter() + seconds / len(self._graphs)
            while True:
                start = time.perf_counter()
                graph.run()
                best = min(best, time.perf_counter() - start)
                if time.perf_counter() > end:
                    break
            found.append(self._amounts[name] / best / 1e9)
        return Floors(*found)

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._source.free()
        self._out.free()


def of_device(device: Any) -> Floors | None:
    """Measured on a CPU. On a GPU reading is, and multiplying is what its clock and units give; None where these are
    not known."""
    if device.kernels == "cpu":
        meter = FloorMeter(device)
        try:
            return meter.measure(0.5)
        finally:
            meter.close()
    if not device.products_per_s:
        return None
    wide = device.products_per_s / 1e9
    return Floors(kernels.read_ceiling(device), wide * (2 if device.arch >= 89 else 1), wide)


def medians(runs: list[Floors]) -> Floors:
    return Floors(*(statistics.median(values) for values in zip(*runs, strict=True)))


def best(runs: list[Floors]) -> Floors:
    return Floors(*map(max, zip(*runs, strict=True)))
