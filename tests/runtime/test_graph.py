"""Recording and replaying graphs in depth, with kernels written by hand in C: types, symbols, groups, threads,
lifetimes."""

import gc
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from zse import build
from zse.errors import DeviceError
from zse.runtime.args import Args
from zse.runtime.cpu import CPUDevice
from zse.runtime.symbol import ceil_div
from zse.tensor import Tensor

MANIFEST = {
    name: {"params": params}
    for name, params in {
        "count_blocks": [["out", "ptr"]],
        "reverse_add": [["x", "ptr"], ["out", "ptr"], ["add", "i64"]],
        "scale_rows": [
            ["x", "ptr"],
            ["out", "ptr"],
            ["width", "i64"],
            ["factor", "f32"],
            ["bias", "f64"],
            ["shift", "i32"],
        ],
        "write_grid": [["out", "ptr"]],
        "empty": [],
        "busy": [["iterations", "i64"]],
        "send_to_sleep": [["caller", "i64"], ["slept", "ptr"]],
    }.items()
}


@pytest.fixture(scope="module")
def hand_written(tmp_path_factory) -> str:
    build.build(isas=(), quiet=True)
    folder = tmp_path_factory.mktemp("hand-written")
    build.Builder(folder, 1, quiet=True).host_library("kernels", [Path(__file__).with_name("kernels.c")])
    return str(folder / "kernels.so")


@pytest.fixture(scope="module", params=[1, 2, 5], ids=["1-thread", "2-threads", "5-threads"])
def any_device(request, hand_written):
    """One thread, two, and more threads than cores."""
    with CPUDevice(request.param, hand_written, MANIFEST) as device:
        yield device


@pytest.fixture(scope="module")
def two_threads(hand_written):
    with CPUDevice(2, hand_written, MANIFEST) as device:
        yield device


def new(device, count, dtype="i64"):
    return Tensor(device.alloc(count * 8, "test"), (count,), dtype)


def test_every_block_runs_once_a_replay(any_device):
    sizes = [0, 1, 2, 3, 7, 64, 1000, 4097]
    tensors = [new(any_device, size + 1, "i32") for size in sizes]
    recorder = any_device.record()
    for tensor, size in zip(tensors, sizes, strict=True):
        recorder.launch("count_blocks", Args(out=tensor), size)
    graph = recorder.finish()
    for _ in range(50):
        graph.run()
    for tensor, size in zip(tensors, sizes, strict=True):
        assert list(tensor.view()) == [50] * size + [0]


def test_a_launch_sees_all_that_was_written_before_it(any_device):
    count, steps = 257, 40
    a, b = new(any_device, count), new(any_device, count)
    recorder = any_device.record()
    for step in range(steps):
        source, target = (a, b) if step % 2 == 0 else (b, a)
        recorder.launch("reverse_add", Args(x=source, out=target, add=step), count)
    graph = recorder.finish()
    for _ in range(100):
        graph.run()
    assert list(a.view()) == [100 * sum(range(steps))] * count


def test_independent_launches_all_run_before_the_next(any_device):
    count = 100
    a, b, c, d = (new(any_device, count) for _ in range(4))
    recorder = any_device.record()
    recorder.launch("reverse_add", Args(x=a, out=b, add=1), count)
    recorder.launch("reverse_add", Args(x=a, out=c, add=2), count, independent=True)
    recorder.launch("reverse_add", Args(x=b, out=d, add=10), count)
    recorder.launch("reverse_add", Args(x=c, out=a, add=0), count)
    graph = recorder.finish()
    for step in range(1, 200):
        graph.run()
        assert a.view()[0] == 2 * step
        assert list(d.view()) == [2 * (step - 1) + 11] * count


def test_arguments_of_every_type_reach_the_kernel(any_device):
    x, out = new(any_device, 12, "f32"), new(any_device, 12, "f32")
    for i in range(12):
        x.view()[i] = i
    recorder = any_device.record()
    recorder.launch("scale_rows", Args(x=x, out=out, width=4, factor=0.5, bias=100.25, shift=-3), (3,))
    recorder.finish().run()
    assert list(out.view()[:12]) == [i * 0.5 + 97.25 for i in range(12)]


def test_symbols_set_arguments_and_grids(any_device):
    grid_out, rows = new(any_device, 3), new(any_device, 100, "i32")
    x, out = new(any_device, 100, "f32"), new(any_device, 100, "f32")
    recorder = any_device.record()
    tokens = recorder.symbol("tokens", 90)
    assert recorder.symbol("tokens") == tokens
    recorder.launch("write_grid", Args(out=grid_out), (tokens.ceil_div(16) * 3, 2, tokens))
    recorder.launch("count_blocks", Args(out=rows), ceil_div(tokens, 2))
    recorder.launch("scale_rows", Args(x=x, out=out, width=tokens, factor=0.0, bias=1.0, shift=0), 1)
    graph = recorder.finish()
    expected = [0] * 100
    for value in (1, 16, 17, 90, 5, 0, 33):
        grid_out.view()[:] = memoryview(bytes(24)).cast("q")
        out.view()[:] = memoryview(bytes(out.nbytes)).cast("f")
        graph.run(tokens=value)
        if value:
            assert list(grid_out.view()) == [-(-value // 16) * 3, 2, value]
        expected = [old + (i < -(-value // 2)) for i, old in enumerate(expected)]
        assert list(rows.view()) == expected
        assert list(out.view()[:100]) == [1.0] * value + [0.0] * (100 - value)


def test_wrong_symbols_are_named(two_threads):
    recorder = two_threads.record()
    recorder.launch("empty", Args(), recorder.symbol("tokens", 8))
    recorder.launch("empty", Args(), recorder.symbol("rows"))
    graph = recorder.finish()
    with pytest.raises(TypeError, match="missing: rows; unknown: none"):
        graph.run(tokens=1)
    with pytest.raises(TypeError, match="missing: none; unknown: splits"):
        graph.run(tokens=1, rows=1, splits=1)
    with pytest.raises(ValueError, match="tokens = 9 is not from 0 to 8"):
        graph.run(tokens=9, rows=1)
    with pytest.raises(ValueError, match="rows = -1"):
        graph.run(tokens=1, rows=-1)
    with pytest.raises(TypeError, match="tokens = 1.5 is not an integer"):
        graph.run(tokens=1.5, rows=1)
    with pytest.raises(DeviceError, match="blocks"):
        graph.run(tokens=1, rows=1 << 30)
    graph.run(tokens=8, rows=1)


def scaled(**changed):
    """Arguments of scale_rows, some of them `changed`."""
    return Args(x=None, out=None, width=1, factor=1.0, bias=1.0, shift=1) | changed


@pytest.mark.parametrize(
    ("symbol", "args", "grid", "error", "message"),
    [
        ("emty", {}, 1, DeviceError, "near: empty"),
        ("busy", [1], 1, TypeError, "busy: arguments are given by name: Args.x=x, .*, not list"),
        ("empty", {"more": 1}, 1, TypeError, "empty: unknown more; it takes no arguments"),
        ("busy", {}, 1, TypeError, "busy: missing iterations; it takes iterations"),
        ("busy", {"iteration": 1}, 1, TypeError, "busy: missing iterations; unknown iteration; it takes iterations"),
        ("reverse_add", {"x": 0, "out": 0, "add": 1, "bias": 0}, 1, TypeError, "unknown bias; it takes x, out, add"),
        ("busy", {"iterations": 1.5}, 1, TypeError, "iterations is i64, got float"),
        ("busy", {"iterations": 1 << 63}, 1, ValueError, "iterations = 9223372036854775808 does not fit i64"),
        ("busy", {"iterations": 1}, -1, ValueError, "grid"),
        ("busy", {"iterations": 1}, 1 << 28, ValueError, "grid"),
        ("busy", {"iterations": 1}, (1, 1, 1, 1), ValueError, "4 dimensions"),
        ("busy", {"iterations": 1}, (), ValueError, "0 dimensions"),
        ("busy", {"iterations": 1}, 2.0, ValueError, "2.0 is not an integer"),
        ("write_grid", {"out": "text"}, 1, TypeError, "out is a pointer, got str"),
        ("write_grid", {"out": -1}, 1, TypeError, "out is a pointer"),
        ("scale_rows", scaled(width=None), 1, TypeError, "width is i64, got NoneType"),
        ("scale_rows", scaled(factor="x"), 1, TypeError, "factor is f32, got str"),
        ("scale_rows", scaled(factor=1e40), 1, ValueError, "factor = 1e.40 does not fit f32"),
        ("scale_rows", scaled(shift=1 << 31), 1, ValueError, "shift = 2147483648 does not fit i32"),
    ],
)
def test_wrong_launches_are_refused_when_recorded(two_threads, symbol, args, grid, error, message):
    recorder = two_threads.record()
    with pytest.raises(error, match=message):
        recorder.launch(symbol, Args(args) if isinstance(args, dict) else args, grid)
    assert recorder.launches == []


def test_a_name_given_twice_is_refused():
    common = {"x": None, "out": None}
    with pytest.raises(TypeError, match="'out'"):
        Args(**common, out=1)


def test_arguments_are_placed_by_their_names(two_threads):
    x, out = new(two_threads, 4), new(two_threads, 4)
    recorder = two_threads.record()
    recorder.launch("reverse_add", Args(add=7, out=out, x=x), 1)
    recorder.launch("reverse_add", Args(x=None, out=out, add=7), 1)
    assert [launch.slots for launch in recorder.launches] == [[x.address, out.address, 7], [0, out.address, 7]]


def test_symbols_are_checked_when_recorded(two_threads):
    recorder, other = two_threads.record(), two_threads.record()
    stranger = other.symbol("stranger")
    with pytest.raises(ValueError, match="'stranger' was not declared"):
        recorder.launch("empty", Args(), stranger)
    with pytest.raises(TypeError, match="factor is f32, a symbol is an integer"):
        recorder.launch("scale_rows", Args(scaled(factor=recorder.symbol("n"))), 1)


def test_an_empty_graph_runs(two_threads):
    two_threads.record().finish().run()


def test_a_graph_keeps_its_buffers(two_threads):
    tensor = new(two_threads, 10, "i32")
    recorder = two_threads.record()
    recorder.launch("count_blocks", Args(out=tensor), 10)
    graph = recorder.finish()
    with pytest.raises(DeviceError, match="used by 1 recorded graph"):
        tensor.buffer.free()
    graph.run()
    graph.close()
    tensor.buffer.free()
    with pytest.raises(DeviceError, match="closed"):
        graph.run()
    with pytest.raises(DeviceError, match="freed"):
        recorder.finish()


def test_memory_of_dropped_graphs_comes_back(two_threads):
    gc.collect()
    before = two_threads.memory().get("test", 0)
    for _ in range(20):
        tensor = new(two_threads, 1000, "i32")
        recorder = two_threads.record()
        recorder.launch("count_blocks", Args(out=tensor), 10)
        recorder.finish().run()
    del tensor, recorder
    gc.collect()
    assert two_threads.memory().get("test", 0) == before


def test_profile_times_every_launch(two_threads):
    recorder = two_threads.record()
    n = recorder.symbol("n")
    recorder.launch("busy", Args(iterations=200_000), n)
    recorder.launch("empty", Args(), 1, independent=True)
    graph = recorder.finish()
    (first, long), (second, short) = graph.profile(n=2)
    assert (first, second) == ("busy", "empty")
    assert long > short >= 0
    assert graph.grids(n=2) == [(2,), (1,)]
    with pytest.raises(TypeError, match="missing: n"):
        graph.profile()
    with pytest.raises(ValueError, match="n = -1"):
        graph.profile(n=-1)
    graph.close()
    with pytest.raises(DeviceError, match="closed"):
        graph.profile(n=2)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a thread's own signal")
def test_launches_are_timed_while_the_caller_sleeps(two_threads):
    """Each has its own time, not nothing for what others ran meanwhile and all of it for the launch that the caller woke in."""
    slept, before = new(two_threads, 1, "i32"), signal.getsignal(signal.SIGUSR2)
    recorder = two_threads.record()
    recorder.launch("busy", Args(iterations=1_000_000), 16)  # both threads are there
    recorder.launch("send_to_sleep", Args(caller=threading.get_native_id(), slept=slept), 64)
    for _ in range(12):
        recorder.launch("busy", Args(iterations=1_000_000), 1)
    graph = recorder.finish()
    shares = []
    try:
        for _ in range(300):
            count = slept.buffer.view().cast("i")[0]
            times = [ns for _, ns in graph.profile()][2:]
            if slept.buffer.view().cast("i")[0] > count:  # a worker ran it, so the caller slept
                shares.append(min(times) / sorted(times)[6])
            if len(shares) == 5:
                break
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(shares) == 5 and sorted(shares)[2] > 0.4, shares
    graph.close()


def test_other_python_threads_run_during_a_replay(two_threads):
    recorder = two_threads.record()
    recorder.launch("busy", Args(iterations=100_000_000), 2)
    graph = recorder.finish()
    thread = threading.Thread(target=graph.run)
    thread.start()
    steps = 0
    while thread.is_alive():
        steps += 1
    thread.join()
    assert steps > 100


def test_two_python_threads_may_replay(two_threads):
    tensors = [new(two_threads, 50, "i32") for _ in range(2)]
    graphs = []
    for tensor in tensors:
        recorder = two_threads.record()
        recorder.launch("count_blocks", Args(out=tensor), recorder.symbol("n", 50))
        graphs.append(recorder.finish())

    def replay(graph):
        for _ in range(2000):
            graph.run(n=50)

    threads = [threading.Thread(target=replay, args=(graph,)) for graph in graphs * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(list(tensor.view()[:50]) == [4000] * 50 for tensor in tensors)


def test_a_forked_child_can_still_replay(two_threads):
    tensor = new(two_threads, 10, "i32")
    recorder = two_threads.record()
    recorder.launch("count_blocks", Args(out=tensor), 10)
    graph = recorder.finish()
    child = os.fork()
    if child == 0:
        try:
            graph.run()
            graph.close()
            two_threads.close()
            os._exit(0 if list(tensor.view()[:10]) == [1] * 10 else 3)
        except BaseException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(tensor.view()[:10]) == [0] * 10


def test_many_tiny_launches(any_device):
    """100,000 launches whose blocks depend on each other, over replays of a changing size."""
    a, b = new(any_device, 8), new(any_device, 8)
    recorder = any_device.record()
    n = recorder.symbol("n", 8)
    for step in range(1000):
        x, out = (a, b) if step % 2 == 0 else (b, a)
        recorder.launch("reverse_add", Args(x=x, out=out, add=1), n)
    graph = recorder.finish()
    for replay in range(100):
        graph.run(n=1 + replay % 8)
    # Size s adds 1,000 to its first s items, an even number of reversals.
    assert list(a.view()) == [1000 * sum(1 + replay % 8 > item for replay in range(100)) for item in range(8)]
