"""The CUDA runtime on a GPU: lists and captured graphs, staging, clusters, tensor maps, growing memory, loading,
faults."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from gpu.machine import isa
from zse import kernel as zl
from zse.errors import DeviceError
from zse.kernel.nvrtc import compile_variant
from zse.runtime.args import Args
from zse.runtime.cuda import CUDADevice, list_devices
from zse.runtime.gpu import CompiledKernels
from zse.runtime.load import LoadJob
from zse.tensor import Tensor

TILE_ROWS, TILE_COLUMNS = 8, 32
SHARED_FLOATS = 40_000


@zl.kernel
def scale_rows(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], width: zl.i32, factor: zl.f32, add: zl.f32):
    zl.grid_launch_dependents()
    zl.grid_wait()
    for i in range(zl.thread_index(), width, zl.target.threads):
        out[zl.block_index(0) * width + i] = x[zl.block_index(0) * width + i] * factor + add


@zl.kernel
def append(out: zl.Ptr[zl.i64], value: zl.i64):
    zl.grid_launch_dependents()
    zl.grid_wait()
    if zl.thread_index() == 0 and zl.block_index(0) == 0:
        out[0] = out[0] * zl.i64(2) + value


@zl.kernel
def reverse_shared(out: zl.Ptr[zl.f32]):
    kept = zl.shared_array(zl.f32, SHARED_FLOATS)
    zl.grid_launch_dependents()
    zl.grid_wait()
    for i in range(zl.thread_index(), SHARED_FLOATS, zl.target.threads):
        kept[i] = zl.f32(i)
    zl.barrier()
    for i in range(zl.thread_index(), SHARED_FLOATS, zl.target.threads):
        out[i] = kept[SHARED_FLOATS - 1 - i]


@zl.kernel
def ranks(out: zl.Ptr[zl.i32]):
    zl.grid_launch_dependents()
    zl.grid_wait()
    if zl.thread_index() == 0:
        out[zl.block_index(0)] = zl.cluster_rank()


@zl.kernel
def box(map: zl.TensorMap, out: zl.Ptr[zl.f32], row: zl.i32, column: zl.i32):
    tile = zl.shared_array(zl.f32, TILE_ROWS * TILE_COLUMNS, align=128)
    ready = zl.mbarrier_array(1)
    zl.grid_launch_dependents()
    zl.grid_wait()
    if zl.thread_index() == 0:
        zl.mbarrier_init(ready, 1)
        zl.mbarrier_init_fence()
        zl.mbarrier_expect(ready, TILE_ROWS * TILE_COLUMNS * 4)
        zl.tma_load(tile, map, (column, row), ready)
    zl.barrier()
    zl.mbarrier_wait(ready, 0)
    for i in range(zl.thread_index(), TILE_ROWS * TILE_COLUMNS, zl.target.threads):
        out[i] = tile[i]


@zl.kernel
def poke(out: zl.Ptr[zl.f32], at: zl.i64):
    zl.grid_wait()
    out[at] = 1.0


VARIANTS = [
    zl.Variant("scale_rows", scale_rows, threads=128),
    zl.Variant("append", append, threads=32),
    zl.Variant("reverse_shared", reverse_shared, threads=256),
    zl.Variant("ranks", ranks, threads=32, cluster=4),
    zl.Variant("box", box, threads=64),
    zl.Variant("poke", poke, threads=32),
]


def opened() -> CUDADevice:
    """The device with the kernels above."""
    known = [
        variant for variant in VARIANTS if list_devices()[0]["arch"] >= 90 or variant.symbol not in ("ranks", "box")
    ]
    compiled = {variant.symbol: compile_variant(variant, isa()) for variant in known}
    manifest = {symbol: one.manifest() | {"image": symbol} for symbol, one in compiled.items()}
    return CUDADevice(kernels=CompiledKernels(manifest, lambda symbol: compiled[symbol].cubin))


GPU = opened()
# wgmma, TMA and thread block clusters are instructions of Hopper: earlier GPUs have kernels without them, which are tested here, too.
needs_hopper = pytest.mark.skipif(GPU.arch < 90, reason="sm_90 and later")


def array(content) -> Tensor:
    content = np.ascontiguousarray(content)
    dtype = {"float32": "f32", "int64": "i64", "int32": "i32"}[content.dtype.name]
    made = Tensor(GPU.alloc(content.nbytes, "test"), content.shape, dtype)
    GPU.write(made, content.tobytes())
    return made


def numbers(tensor, dtype="float32"):
    return np.frombuffer(GPU.read(tensor), dtype).reshape(tensor.shape)


def graph_of(*launches, **symbols):
    recorder = GPU.record()
    syms = {name: recorder.symbol(name, most) for name, most in symbols.items()}
    for name, args, grid in launches:
        recorder.launch(
            name,
            Args({key: syms.get(arg, arg) if isinstance(arg, str) else arg for key, arg in args.items()}),
            syms.get(grid, grid) if isinstance(grid, str) else grid,
        )
    return recorder.finish()


def test_memory_is_zeroed():
    for nbytes in (1, 1000, 10_000_001):
        assert GPU.read(GPU.alloc(nbytes)) == bytes(nbytes)


def test_lists_and_captured_graphs_say_the_same():
    x = np.random.default_rng(1).standard_normal((37, 129)).astype(np.float32)
    given, out = array(x), array(np.zeros_like(x))
    graph = graph_of(
        ("scale_rows", Args(x=given, out=out, width=129, factor=2.0, add=1.0), "rows"),
        ("scale_rows", Args(x=out, out=out, width=129, factor=3.0, add=-1.0), "rows"),
        rows=37,
    )
    for rows in (37, 5, 5, 5, 37, 37, 0, 0, 0):
        GPU.write(out, bytes(out.nbytes))
        graph.run(rows=rows)
        wanted = np.where(np.arange(37)[:, None] < rows, (x * 2 + 1) * 3 - 1, 0)
        np.testing.assert_allclose(numbers(out), wanted, rtol=1e-6, atol=1e-6)
    assert graph.num_captured == 3
    assert all(ns > 0 for _, ns in graph.profile(rows=37))


@pytest.mark.parametrize("blocks", [1, 3, 200])
def test_launches_that_overlap_keep_their_order(blocks):
    out = array(np.zeros(1, np.int64))
    graph = graph_of(*[("append", Args(out=out, value=turn % 3 == 0), blocks) for turn in range(40)])
    expected = 0
    for _ in range(5):
        graph.run()
        for turn in range(40):
            expected = expected * 2 + (turn % 3 == 0)
        assert int(numbers(out, "int64")[0]) & (1 << 64) - 1 == expected & (1 << 64) - 1


def test_more_shared_memory_than_the_default():
    out = array(np.zeros(SHARED_FLOATS, np.float32))
    GPU.run(lambda recorder: recorder.launch("reverse_shared", Args(out=out), 2))
    np.testing.assert_array_equal(numbers(out), np.arange(SHARED_FLOATS, dtype=np.float32)[::-1])


@needs_hopper
def test_clusters_in_lists_and_graphs():
    out = array(np.zeros(16, np.int32))
    graph = graph_of(("ranks", Args(out=out), 16), ("ranks", Args(out=out), 16))
    for _ in range(3):
        GPU.write(out, bytes(64))
        graph.run()
        np.testing.assert_array_equal(numbers(out, "int32"), np.arange(16) % 4)
    assert graph.num_captured == 1


@needs_hopper
def test_a_tensor_map_reads_zeros_outside():
    x = np.arange(64 * 96, dtype=np.float32).reshape(64, 96)
    given, out = array(x), array(np.zeros((TILE_ROWS, TILE_COLUMNS), np.float32))
    graph = graph_of(
        ("box", Args(map=GPU.tensor_map(given, (TILE_ROWS, TILE_COLUMNS)), out=out, row="row", column="column"), 1),
        ("append", Args(out=array(np.zeros(1, np.int64)), value=1), 1),
        row=63,
        column=95,
    )
    padded = np.pad(x, ((0, TILE_ROWS), (0, TILE_COLUMNS)))
    for row, column in ((0, 0), (8, 32), (60, 80), (60, 80), (60, 80)):
        graph.run(row=row, column=column)
        np.testing.assert_array_equal(numbers(out), padded[row : row + TILE_ROWS, column : column + TILE_COLUMNS])


def test_staging_in_a_pipeline():
    """Two turns, each step submitted before the one before is waited for."""
    turns = []
    for _ in range(2):
        given, got = GPU.staging(400, "in"), GPU.staging(400, "out")
        recorder = GPU.record()
        recorder.upload(given)
        recorder.launch("scale_rows", Args(x=given.buffer, out=got.buffer, width=100, factor=2.0, add=1.0), 1)
        recorder.download(got)
        turns.append((given.host.cast("f"), got.host.cast("f"), recorder.finish()))
    tickets: list = [None, None]
    for step in range(200):
        given, got, graph = turns[step % 2]
        if tickets[step % 2] is not None:
            tickets[step % 2].wait()
            assert list(got) == [2.0 * (step - 2 + i) + 1 for i in range(100)]
        for i in range(100):
            given[i] = step + i
        tickets[step % 2] = graph.submit()
    for ticket in tickets:
        ticket.wait()


def test_memory_grows_under_a_captured_graph():
    if (
        not GPU.supports_growth
    ):  # a driver in a virtual machine may lack it; buffers are whole from the start then, as other tests see
        pytest.skip("no virtual memory management")
    buffer = GPU.alloc_growing(4096, 64 << 20, "kv")
    x = Tensor(buffer, (1,), "f32")
    graph = graph_of(
        ("scale_rows", Args(x=x, out=x, width=1024, factor=0.0, add=7.0), "rows"),
        ("append", Args(out=array(np.zeros(1, np.int64)), value=1), 1),
        rows=1 << 14,
    )
    for _ in range(3):
        graph.run(rows=1)
    free = GPU.memory_free
    buffer.grow(32 << 20)
    assert free - GPU.memory_free <= 32 << 20
    for _ in range(3):
        graph.run(rows=8192)
    assert GPU.read(buffer) == struct.pack("f", 7.0) * (8 << 20)
    graph.close()
    buffer.free()


def test_too_much_memory_is_refused_and_nothing_is_lost():
    with pytest.raises(DeviceError, match="not enough memory on cuda:0"):
        GPU.alloc(1 << 42, "too much")
    assert GPU.read(GPU.alloc(10)) == bytes(10)


@pytest.mark.parametrize("way", ["mapped", "read", "slow", "early"])
def test_loading(way, tmp_path, monkeypatch):
    from zse.runtime import gpu_load

    content = np.random.default_rng(2).integers(0, 256, 300_000_001, dtype=np.uint8).tobytes()
    path = tmp_path / "weights"
    path.write_bytes(content)
    monkeypatch.setattr(gpu_load, "SLOW_US", 1 if way == "slow" else 0)
    monkeypatch.setattr(gpu_load, "CHUNK_BYTES", 16 << 20)
    monkeypatch.setattr(GPU, "can_register", way != "read")
    monkeypatch.setattr(GPU, "allocates", way == "early")
    fd = os.open(path, os.O_RDONLY)
    try:
        buffer = GPU.alloc(len(content), "weights")
        cuts = [0, 5, 1 << 20, 99_999_999, len(content)]
        load = GPU.load(
            [
                LoadJob(fd, start, end - start, None, {"destination": Tensor(buffer, (end - start,), "u8", start)})
                for start, end in zip(cuts, cuts[1:], strict=False)
            ],
            8,
        )
        load.wait()
        assert GPU.read(buffer) == content
        assert load.mapped == (way == "mapped")
        GPU.tidy_loads()
    finally:
        os.close(fd)


FAULT = """
import sys
sys.path[:0] = {path!r}
from tests_gpu_runtime import *
out = array(np.zeros(1, np.float32))
graph = graph_of(("append", Args(out=array(np.zeros(1, np.int64)), value=1), 1), ("poke", Args(out=out, at=1 << 40), 1))
try:
    graph.run()
except DeviceError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("check", ["", "1"])
def test_a_fault_ends_the_process_cleanly(check, tmp_path):
    (tmp_path / "tests_gpu_runtime.py").symlink_to(__file__)
    script = FAULT.format(path=[str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"ZSE_GPU_CHECK": check},
    )
    assert done.returncode == 75 and not done.stderr, done.stderr
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout
    assert ("(poke, launch 1, grid" in done.stdout) == bool(check)
