"""What the CUDA runtime itself costs: opening, memory, launches, a step's round trip, loading weights.

    python benchmarks/gpu_runtime.py [--gib 4] [--folder /tmp]

One line a figure. Needs NVRTC for two kernels, and --gib of disk and page cache in --folder. Loading is measured from
a file as `zse convert` leaves it, as a sequential copy leaves it, and dropped from the page cache (the disk's speed).
"""

import argparse
import os
import subprocess
import sys
import threading
import time

from zse import kernel as zl
from zse.bench.startup import drop_page_cache
from zse.runtime import gpu_graph, gpu_load
from zse.runtime.args import Args
from zse.runtime.gpu import CompiledKernels
from zse.runtime.load import LoadJob
from zse.tensor import Tensor

LAUNCHES = 300


@zl.kernel
def append(out: zl.Ptr[zl.i64], value: zl.i64):
    zl.grid_launch_dependents()
    zl.grid_wait()
    if zl.thread_index() == 0 and zl.block_index(0) == 0:
        out[0] = out[0] * zl.i64(2) + value


@zl.kernel
def scale_rows(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], width: zl.i32, factor: zl.f32, add: zl.f32):  # noqa: F821
    zl.grid_launch_dependents()
    zl.grid_wait()
    for i in range(zl.thread_index(), width, zl.target.threads):
        out[zl.block_index(0) * width + i] = x[zl.block_index(0) * width + i] * factor + add


VARIANTS = (zl.Variant("append", append, threads=64), zl.Variant("scale_rows", scale_rows, threads=64))
OPENING = """
import time
start = time.perf_counter()
def ms(): return (time.perf_counter() - start) * 1e3
from zse.runtime.opening import PendingDevice
opening = PendingDevice("cuda")
asked = ms()
{beside}
beside = ms()
while not opening.done: time.sleep(0.0002)
context = ms()
opening.result()
print(f"asked for after {{asked:.1f}} ms, imports beside until {{beside:.1f}}, context {{context:.1f}}, device {{ms():.1f}}")
import os
os._exit(0)
"""


def median_us(action, count: int = 300) -> float:
    """Median of the action's times."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times)[count // 2]


def milliseconds(action) -> float:
    """Of one call."""
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def opening() -> None:
    """In processes of their own: with nothing beside it, and beside what an engine imports."""
    for beside in ("pass", "import zse.engine.load, zse.models.load, zse.engine.runner, zse.runtime.cuda"):
        for _ in range(3):
            done = subprocess.run([sys.executable, "-c", OPENING.format(beside=beside)], capture_output=True, text=True)
            print(f"open, {beside.split()[0]} beside: {done.stdout.strip() or done.stderr.strip()[-300:]}", flush=True)


def memory(device, gib: float) -> None:
    """Allocation, growth, pinning."""
    nbytes = int(gib * 2**30)
    found = []
    allocated = milliseconds(lambda: found.append(device.alloc(nbytes, "bench")))
    zeroed = milliseconds(device.synchronize)
    print(f"alloc {gib:g} GiB: {allocated:.2f} ms, zeroed {zeroed:.2f} ms later")
    found.pop().free()
    if device.supports_growth:
        buffer = device.alloc_growing(0, 2 * nbytes, "bench")
        mapped = milliseconds(lambda: buffer.grow(nbytes))
        device.synchronize()
        small = milliseconds(lambda: [buffer.grow(nbytes + (i << 21)) for i in range(1, 11)])
        print(f"grow by {gib:g} GiB: {mapped:.2f} ms; by 2 MiB ten times: {small:.2f} ms")
        buffer.free()
    pinned = []
    spent = milliseconds(lambda: pinned.append(device.alloc_pinned(64 << 20, "bench")))
    print(f"pin 64 MiB: {spent:.1f} ms")
    device.free_pinned(pinned.pop())


def launches(device) -> None:
    """A list of dependent launches, walked and captured, with and without the attribute of dependent launches."""
    out = Tensor(device.alloc(8, "bench"), (1,), "i64")
    before = device.overlaps
    for overlaps in sorted({False, before}):
        device.overlaps = overlaps
        recorder = device.record()
        for _ in range(LAUNCHES):
            recorder.launch("append", Args(out=out, value=0), 132)
        graph = recorder.finish()
        can_capture, graph.can_capture = graph.can_capture, False
        graph.run()
        submitted = []

        def step(graph=graph, submitted=submitted):
            start = time.perf_counter()
            ticket = graph.submit()
            submitted.append(time.perf_counter() - start)
            ticket.wait()

        whole = median_us(step, 50)
        line = f"walked: {1e6 * sorted(submitted)[25] / LAUNCHES:.2f} us of the CPU, {whole / LAUNCHES:.2f} us in all"
        graph.can_capture = can_capture
        captured = milliseconds(graph.prepare)
        graph.run()
        submitted.clear()
        whole = median_us(step, 50)
        print(
            f"{LAUNCHES} launches, overlapping {overlaps}: a launch {line}; captured in {captured:.2f} ms: submitting all "
            f"{1e6 * sorted(submitted)[25]:.1f} us, {whole / LAUNCHES:.3f} us a launch",
            flush=True,
        )
        graph.close()
    device.overlaps = before


def round_trips(device) -> None:
    """A step that does nothing, with each way to exchange data and to wait."""
    given, copied = device.staging(4096), device.staging(4096)
    polls = gpu_graph.SPIN_US
    for name, got in (("nothing exchanged", None), ("copied in and out", copied)):
        recorder = device.record()
        if got is not None:
            recorder.upload(given)
        for _ in range(2):
            recorder.launch(
                "scale_rows", Args(x=given.buffer, out=(got or copied).buffer, width=1000, factor=2.0, add=1.0), 1
            )
        if got is not None:
            recorder.download(got)
        graph = recorder.finish()
        graph.prepare()
        figures = []
        for gpu_graph.SPIN_US in (polls, 0):
            figures.append(median_us(graph.run))
        gpu_graph.SPIN_US = polls
        print(
            f"round trip of 2 launches, {name}: {figures[0]:.1f} us polling, {figures[1]:.1f} us sleeping", flush=True
        )
        graph.close()


def write_file(path: str, nbytes: int, in_pieces: bool) -> None:
    """The file, as one writer of large pieces or eight of small ones leave it in the page cache."""
    block = os.urandom(16 << 20)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.ftruncate(fd, nbytes)
    piece = 256 << 10 if in_pieces else len(block)

    def part(first: int, step: int) -> None:
        for offset in range(first, nbytes, step):
            os.pwrite(fd, block[: min(piece, nbytes - offset)], offset)

    count = 8 if in_pieces else 1
    threads = [threading.Thread(target=part, args=(number * piece, count * piece)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(fd)
    os.close(fd)


def loading(device, path: str, nbytes: int) -> None:
    """Every way that a file's pages may lie, every way to bring them."""
    buffer = device.alloc(nbytes, "bench")
    slow_us, can_register = gpu_load.SLOW_US, device.can_register

    def load(label: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        start = time.perf_counter()
        loading = device.load([LoadJob(fd, 0, nbytes, None, {"destination": Tensor(buffer, (nbytes,), "u8")})])
        loading.wait()
        seconds = time.perf_counter() - start
        last = min(nbytes, 1 << 20)
        right = device.read(Tensor(buffer, (last,), "u8", nbytes - last)) == os.pread(fd, last, nbytes - last)
        os.close(fd)
        print(
            f"load, {label}: {1e3 * seconds:.1f} ms, {nbytes / seconds / 1e9:.1f} GB/s, "
            f"{'mapped' if loading.mapped else 'read'}{'' if right else ', WRONG BYTES'}",
            flush=True,
        )

    try:
        for name, in_pieces in (("written in large pieces", False), ("written in small pieces", True)):
            write_file(path, nbytes, in_pieces)
            for _ in range(3):
                load(f"{name}, as it chooses")
            gpu_load.SLOW_US = 0
            load(f"{name}, mapped whatever it costs")
            gpu_load.SLOW_US = slow_us
            device.can_register = False
            load(f"{name}, read")
            device.can_register = can_register
        drop_page_cache(path)
        load("not in the page cache")
        load("after that")
        print(f"giving the registrations back at once: {milliseconds(device.tidy_loads):.1f} ms")
    finally:
        gpu_load.SLOW_US, device.can_register = slow_us, can_register
        os.unlink(path)
        buffer.free()


def measure(device, gib: float, folder: str) -> None:
    """Everything but opening."""
    print(f"{device.product}, {device.isa}, driver for CUDA {device.driver_version}, {os.cpu_count()} CPUs")
    memory(device, gib)
    launches(device)
    round_trips(device)
    loading(device, os.path.join(folder, "zse-gpu-runtime.bin"), int(gib * 2**30))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--folder", default="/tmp")
    args = parser.parse_args()
    from zse.kernel.nvrtc import compile_variant
    from zse.runtime.bindings.cuda import CUDADriver
    from zse.runtime.cuda import CUDADevice

    opening()
    driver = CUDADriver()
    driver.start(0)
    compiled = {variant.symbol: compile_variant(variant, driver.isa) for variant in VARIANTS}
    kernels = CompiledKernels(
        {symbol: one.manifest() | {"image": symbol} for symbol, one in compiled.items()},
        lambda symbol: compiled[symbol].cubin,
    )
    with CUDADevice(0, driver, kernels) as device:
        measure(device, args.gib, args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
