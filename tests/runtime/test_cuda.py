"""The CUDA device over a fake driver: memory, launch lists, captured graphs, staging, tensor maps, threads."""

import gc
import struct
import threading

import pytest
from gpu_fixtures import Fake, kernels

from zse.errors import DeviceError
from zse.runtime import gpu_graph
from zse.runtime.args import Args
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cuda import CUDADevice
from zse.runtime.gpu import SharedStream
from zse.runtime.gpu_memory import GrowingBuffer
from zse.tensor import Tensor


@pytest.fixture
def device(fake):
    with CUDADevice(0, CUDADriver(fake.path), kernels()) as made:
        yield made
    assert fake.contexts == 0


def tensor(device, values, dtype="f32"):
    made = Tensor(device.alloc(4 * len(values), "test"), (len(values),), dtype)
    device.write(made, struct.pack(f"{len(values)}f", *values))
    return made


def floats(device, tensor):
    return list(struct.unpack(f"{tensor.nbytes // 4}f", device.read(tensor)))


def number(device, tensor):
    return struct.unpack("q", device.read(tensor))[0]


def counter(device):
    return Tensor(device.alloc(8, "counter"), (1,), "i64")


def test_facts(device):
    assert (device.name, device.kernels, device.isa, device.arch) == ("cuda", "gpu", "sm_90a", 90)
    assert device.product == "Fake GPU 0" and device.num_sms == 132 and device.threads == 0
    assert device.symbols() == ["append", "describe_map", "next_bytes", "poke", "scale_rows"]


def test_memory_is_zeroed_counted_and_given_back(device, fake):
    buffers = [device.alloc(size, label) for size, label in ((1000, "a"), (1 << 20, "b"), (24, "a"), (0, "none"))]
    assert device.read(buffers[0]) == bytes(1000)
    assert device.memory() == {"a": 1024, "b": 1 << 20}
    assert device.memory_free < device.memory_total
    buffers[1].free()
    buffers[1].free()
    assert device.memory() == {"a": 1024} and buffers[1].freed
    buffers.clear()
    gc.collect()
    assert device.memory() == {} and fake.memory_used == 0


def test_the_host_sees_no_device_memory(device):
    made = tensor(device, [1.0])
    with pytest.raises(DeviceError, match="no host view"):
        made.view()


def test_read_and_write_check_sizes(device):
    made = tensor(device, [1.0, 2.0])
    assert floats(device, made) == [1.0, 2.0]
    with pytest.raises(ValueError, match="3 bytes for a destination of 8"):
        device.write(made, b"abc")
    with pytest.raises(ValueError, match="12 bytes end 4 behind their buffer"):
        device.write(made.with_rows(3), bytes(12))


def test_copies_keep_the_order_of_what_is_submitted(device):
    first, second = tensor(device, [1.0, 2.0, 3.0, 4.0]), tensor(device, [0.0] * 4)
    recorder = device.record()
    recorder.launch("scale_rows", Args(x=first, out=first, width=4, factor=2.0, add=0.0), 1)
    graph = recorder.finish()
    graph.submit()
    device.copy(second.address + 4, first.address, 8)
    ticket = graph.submit()
    ticket.wait()
    assert floats(device, second) == [0.0, 2.0, 4.0, 0.0] and floats(device, first) == [4.0, 8.0, 12.0, 16.0]


def test_not_enough_memory_names_label_and_bytes(device, fake):
    fake.set(memory=1 << 20)
    held = device.alloc(1000, "weights")
    with pytest.raises(
        DeviceError,
        match=r"cuda:0: 2,000,000 bytes for kv cache; 1,0.*of 1,048,576 bytes are free; allocated here: "
        r"weights 1,000; .*nvidia-smi",
    ):
        device.alloc(2_000_000, "kv cache")
    assert device.memory() == {"weights": held.nbytes}


@pytest.mark.parametrize("vmm", [0, 1])
def test_a_growing_buffer_keeps_its_address(driver_library, tmp_path, vmm):
    fake = Fake(driver_library, tmp_path)
    fake.set(vmm=vmm)
    with CUDADevice(0, CUDADriver(fake.path), kernels()) as device:
        buffer = device.alloc_growing(100, 40 << 20, "kv")
        assert isinstance(buffer, GrowingBuffer) == vmm
        before = fake.memory_used
        assert before == (2 << 20 if vmm else 40 << 20)
        address = buffer.address
        device.write(Tensor(buffer, (25,), "f32"), b"x" * 100)
        buffer.grow(9 << 20)
        assert buffer.address == address and fake.memory_used == (10 << 20 if vmm else 40 << 20)
        assert device.memory() == {"kv": 9 << 20 if vmm else 40 << 20}
        content = device.read(Tensor(buffer, (9 << 20,), "u8"))
        assert content == b"x" * 100 + bytes((9 << 20) - 100)
        with pytest.raises(ValueError, match="at most"):
            buffer.grow(41 << 20)
        buffer.free()
        assert fake.memory_used == 0 and device.memory() == {}


def test_growing_over_the_memory_leaves_what_was_there(device, fake):
    fake.set(memory=8 << 20)
    buffer = device.alloc_growing(4 << 20, 64 << 20, "kv")
    with pytest.raises(DeviceError, match="bytes for kv"):
        buffer.grow(16 << 20)
    assert buffer.nbytes == 4 << 20 and device.memory() == {"kv": 4 << 20}
    buffer.grow(8 << 20)
    assert device.read(Tensor(buffer, (8 << 20,), "u8")) == bytes(8 << 20)


def test_a_failed_mapping_gives_everything_back(device, fake):
    fake.fail("vmm_map", 1)
    with pytest.raises(DeviceError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        device.alloc_growing(1, 1 << 20, "kv")
    assert fake.memory_used == 0 and device.memory() == {}


def test_launches_run_in_order_with_symbols(device, fake):
    x, out = tensor(device, range(12)), tensor(device, [-1.0] * 12)
    recorder = device.record()
    rows = recorder.symbol("rows", 4)
    recorder.launch("scale_rows", Args(x=x, out=out, width=3, factor=2.0, add=1.0), rows)
    recorder.launch("scale_rows", Args(x=out, out=out, width=3, factor=10.0, add=0.5), rows)
    graph = recorder.finish()
    graph.run(rows=3)
    assert floats(device, out) == [(2 * i + 1) * 10 + 0.5 for i in range(9)] + [-1.0] * 3
    graph.run(rows=0)
    assert [line[:3] for line in fake.log()] == [["scale_rows", "3,1,1", "64"]] * 2
    with pytest.raises(ValueError, match="rows = 5 is not from 0 to 4"):
        graph.run(rows=5)
    with pytest.raises(TypeError, match="missing: rows"):
        graph.run()
    with pytest.raises(TypeError, match="unknown: columns"):
        graph.run(rows=1, columns=2)
    with pytest.raises(TypeError):
        graph.run(rows=1.5)


def test_every_launch_carries_the_overlap_attribute_from_sm_90_on(driver_library, tmp_path):
    for major, overlaps in ((8, "0"), (9, "1"), (10, "1")):
        (folder := tmp_path / str(major)).mkdir()
        fake = Fake(driver_library, folder)
        fake.set(major=major)
        with CUDADevice(0, CUDADriver(fake.path), kernels()) as device:
            out = counter(device)
            device.run(lambda recorder, out=out: recorder.launch("append", Args(out=out, value=1), 1))
            assert fake.log() == [["append", "1,1,1", "64", "0", "0", overlaps]]


def test_shared_memory_and_clusters(fake):
    more = kernels(append={"shared_bytes": 100_000, "cluster": 16}, poke={"shared_bytes": 1 << 20})
    with CUDADevice(0, CUDADriver(fake.path), more) as device:
        out = counter(device)
        device.run(lambda recorder: recorder.launch("append", Args(out=out, value=1), 32))
        assert fake.log() == [["append", "32,1,1", "64", "100000", "16", "1"]]
        assert fake.count("function_set_attribute") == 2  # shared memory, cluster over 8
        with pytest.raises(ValueError, match="no multiple of its cluster of 16"):
            device.run(lambda recorder: recorder.launch("append", Args(out=out, value=1), 20))
        with pytest.raises(DeviceError, match="poke needs 1,048,576 bytes of shared memory; Fake GPU 0 has 232,448"):
            device.program("poke")


def test_a_graph_is_captured_when_the_same_numbers_come_again(device, fake):
    x, out = tensor(device, range(12)), tensor(device, [-1.0] * 12)
    recorder = device.record()
    rows = recorder.symbol("rows", 4)
    recorder.launch("scale_rows", Args(x=x, out=out, width=3, factor=2.0, add=1.0), rows)
    recorder.launch("scale_rows", Args(x=out, out=out, width=3, factor=10.0, add=0.5), rows)
    graph = recorder.finish()
    for turn, count in enumerate((2, 3, 2, 3, 2, 2, 3, 4)):
        device.write(out, struct.pack("12f", *[-1.0] * 12))
        graph.run(rows=count)
        assert floats(device, out) == [(2 * i + 1) * 10 + 0.5 for i in range(3 * count)] + [-1.0] * (12 - 3 * count), (
            turn
        )
    assert graph.num_captured == 2 and fake.count("graph_instantiate") == 2 and fake.count("graph_launch") == 5
    graph.close()
    assert fake.count("executable_destroy") == 2 and fake.count("graph_destroy") == 2


def test_a_graph_can_be_captured_before_its_first_replay(device, fake):
    out = counter(device)
    recorder = device.record()
    value = recorder.symbol("value", 10)
    for _ in range(2):
        recorder.launch("append", Args(out=out, value=value), 1)
    graph = recorder.finish()
    graph.prepare(value=1)
    graph.prepare(value=1)
    assert number(device, out) == 0 and fake.count("graph_instantiate") == 1 == graph.num_captured
    graph.run(value=1)
    assert number(device, out) == 3 and fake.count("graph_launch") == 1
    with pytest.raises(ValueError, match="value = 11"):
        graph.prepare(value=11)
    with pytest.raises(TypeError, match="missing: value"):
        graph.prepare()
    graph.run(value=2)
    assert number(device, out) == 18


def test_captured_graphs_are_bounded(device, fake, monkeypatch):
    monkeypatch.setattr(gpu_graph, "MAX_CAPTURED", 3)
    monkeypatch.setattr(gpu_graph, "MAX_REMEMBERED", 6)
    out = counter(device)
    recorder = device.record()
    value = recorder.symbol("value")
    for _ in range(2):
        recorder.launch("append", Args(out=out, value=value), 1)
    graph = recorder.finish()
    expected = 0
    for turn in range(60):
        now = turn // 2 if turn < 20 else turn % 4
        graph.run(value=now)
        expected = ((expected * 2 + now) * 2 + now) & ((1 << 64) - 1)
        assert number(device, out) & ((1 << 64) - 1) == expected
        assert graph.num_captured <= 3 and len(graph._captured) <= 6
    assert fake.count("graph_instantiate") - fake.count("executable_destroy") == graph.num_captured
    other = counter(device)
    recorder = device.record()
    recorder.launch("append", Args(out=other, value=1), 1)
    recorder.launch("append", Args(out=other, value=1), 1)
    second = recorder.finish()
    for _ in range(3):
        second.run()  # the bound is the device's: the first graph gives one up
    assert (graph.num_captured, second.num_captured) == (2, 1)
    graph.close()
    assert second.num_captured == len(device.captured) == 1
    second.close()
    assert not device.captured and fake.count("graph_instantiate") == fake.count("executable_destroy")


def test_the_collector_may_close_a_graph_while_another_is_submitted(device, monkeypatch):
    out = counter(device)

    def made():
        recorder = device.record()
        recorder.launch("append", Args(out=out, value=1), 1)
        recorder.launch("append", Args(out=out, value=1), 1)
        return recorder.finish()

    graph, held = made(), [made()]
    held[0].run()
    take = device.take_event

    def collected():
        held.clear()
        gc.collect()
        return take()

    monkeypatch.setattr(device, "take_event", collected)
    graph.run()
    assert number(device, out) == 15 and len(device._graphs) == 1


def test_a_capture_that_fails_is_no_error(device, fake, caplog):
    out = counter(device)
    recorder = device.record()
    recorder.launch("append", Args(out=out, value=1), 1)
    recorder.launch("append", Args(out=out, value=0), 1)
    graph = recorder.finish()
    fake.fail("graph_instantiate", 801)
    for turn in range(1, 5):
        graph.run()
        assert number(device, out) == (4**turn - 1) // 3 * 2
    assert graph.num_captured == 0 and not graph.can_capture
    assert "launches go one by one: cuGraphInstantiateWithFlags: CUDA_ERROR_NOT_SUPPORTED" in caplog.text


def test_a_device_that_must_not_capture_walks_its_lists(device, fake):
    device.supports_capture = False  # --no-graphs
    out = counter(device)
    recorder = device.record()
    recorder.launch("append", Args(out=out, value=1), 1)
    recorder.launch("append", Args(out=out, value=0), 1)
    graph = recorder.finish()
    graph.prepare()
    for turn in range(1, 5):
        graph.run()
        assert number(device, out) == (4**turn - 1) // 3 * 2
    assert graph.num_captured == 0 == fake.count("graph_instantiate")


def test_submit_returns_before_the_work_is_done(device):
    out = counter(device)
    recorder = device.record()
    recorder.launch("append", Args(out=out, value=1), 1)
    graph = recorder.finish()
    tickets = [graph.submit() for _ in range(5)]
    assert not tickets[4].done
    tickets[4].wait()
    assert all(ticket.done for ticket in tickets)
    tickets[0].wait()
    assert number(device, out) == 31
    events = len(device._events)
    for _ in range(10):
        graph.submit().wait()
    assert len(device._events) == events


def test_devices_of_one_gpu_compute_in_one_stream(driver_library, tmp_path):
    """Launches of two models of a process: the second's wait for all of the first's, whose blocks may wait for each other."""
    fake = Fake(driver_library, tmp_path)
    fake.set(devices=2)
    first, second = (CUDADevice(0, CUDADriver(fake.path), kernels()) for _ in range(2))
    other = CUDADevice(1, CUDADriver(fake.path), kernels())
    assert first.stream == second.stream != other.stream and first.submit_lock is second.submit_lock
    outs = []
    for device in (first, second, other):
        out = tensor(device, [0.0] * 3)
        recorder = device.record()
        recorder.launch("scale_rows", Args(x=out, out=out, width=3, factor=1.0, add=1.0), 1)
        outs.append((device, recorder.finish()))
    waiting = [graph.submit() for _, graph in (outs[0], outs[2])]
    outs[1][1].run()
    assert [line[0] for line in fake.log()] == ["scale_rows"] * 2  # not what the other GPU was given
    for ticket in waiting:
        ticket.wait()
    first.close()
    outs[1][1].run()
    for device in (second, other):
        device.close()
    with CUDADevice(0, CUDADriver(fake.path), kernels()) as again:
        assert floats(again, tensor(again, [2.0])) == [2.0]
    assert not SharedStream.opened


def test_a_dropped_ticket_gives_its_event_back(device, fake):
    out = counter(device)
    recorder = device.record()
    recorder.launch("append", Args(out=out, value=1), 1)
    graph = recorder.finish()
    for _ in range(20):
        graph.submit()
    assert fake.count("event_create") == 1
    assert number(device, out) == (1 << 20) - 1


@pytest.mark.parametrize("capture", [False, True])
def test_staging_goes_up_and_down_in_the_order_of_the_launches(device, capture):
    inputs, outputs = device.staging(32, "inputs"), device.staging(32, "outputs")
    assert bytes(inputs.host) == bytes(32) and device.memory() == {"inputs": 32, "outputs": 32}
    recorder = device.record()
    recorder.upload(inputs)
    recorder.launch("scale_rows", Args(x=inputs.buffer, out=outputs.buffer, width=8, factor=2.0, add=0.0), 1)
    recorder.download(outputs, 4, 8)
    graph = recorder.finish()
    graph.can_capture = capture
    given, got = inputs.host.cast("f"), outputs.host.cast("f")
    for turn in range(5):
        for index in range(8):
            given[index] = turn + index
        ticket = graph.submit()
        ticket.wait()
        assert list(got) == [0.0, 2 * (turn + 1), 2 * (turn + 2), *[0.0] * 5]
    assert graph.num_captured == capture
    with pytest.raises(DeviceError, match="used by 1 recorded graph"):
        inputs.free()
    graph.close()
    del given, got
    inputs.free()
    inputs.free()
    with pytest.raises(ValueError, match="8 bytes at 28 of a staging of 32"):
        device.record().upload(outputs, 28, 8)


def test_tensor_maps(device):
    x = Tensor(device.alloc(64 * 96 * 2, "x"), (64, 96), "bf16")
    out = Tensor(device.alloc(64, "out"), (8,), "i64")
    made = device.tensor_map(x, (8, 64), swizzle=128)
    assert made.host_address % 64 == 0
    recorder = device.record()
    recorder.launch("describe_map", Args(map=made, out=out), 1)
    graph = recorder.finish()
    del made
    gc.collect()
    for _ in range(3):
        graph.run()
        assert list(struct.unpack("8q", device.read(out))) == [2, 3, 96, 64, 64, 8, 9, 1]
    with pytest.raises(DeviceError, match="used by 1 recorded graph"):
        x.buffer.free()
    with pytest.raises(TypeError, match="map is a tensor map"):
        device.record().launch("describe_map", Args(map=x, out=out), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"box": (8,)}, "same 1 to 5 dimensions"),
        ({"box": (8, 257)}, "from 1 to 256"),
        ({"box": (8, 128), "swizzle": 128}, "256 bytes: a multiple of 16, at most the swizzle of 128"),
        ({"box": (8, 4)}, "8 bytes: a multiple of 16"),
        ({"box": (8, 64), "swizzle": 100}, "swizzle 100"),
        ({"box": (8, 64), "strides": (100,)}, "multiples of 16"),
        ({"box": (8, 64), "dims": (65, 96)}, "12480 bytes of a tensor in 12288"),
    ],
)
def test_a_tensor_map_that_cannot_be(device, arguments, message):
    x = Tensor(device.alloc(64 * 96 * 2, "x"), (64, 96), "bf16")
    with pytest.raises(ValueError, match=message):
        device.tensor_map(x, **arguments)


def test_a_buffer_of_a_graph_is_not_freed(device):
    x = tensor(device, [1.0] * 4)
    recorder = device.record()
    recorder.launch("scale_rows", Args(x=x, out=x, width=4, factor=2.0, add=0.0), 1)
    graph = recorder.finish()
    with pytest.raises(DeviceError, match="used by 1 recorded graph"):
        x.buffer.free()
    graph.close()
    graph.close()
    x.buffer.free()
    with pytest.raises(DeviceError, match="graph or its device was closed"):
        graph.run()
    with pytest.raises(DeviceError, match="freed"):
        recorder.finish()


def test_every_thread_has_the_context(device):
    out = [counter(device) for _ in range(4)]
    failures = []

    def work(mine):
        try:
            recorder = device.record()
            recorder.launch("append", Args(out=mine, value=1), 1)
            recorder.launch("append", Args(out=mine, value=1), 1)
            graph = recorder.finish()
            for turn in range(1, 21):
                graph.run()
                assert number(device, mine) == 4**turn - 1
            graph.close()
            device.alloc(100, "thread").free()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in out]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_profile_gives_a_time_for_each_launch(device):
    out = counter(device)
    recorder = device.record()
    value = recorder.symbol("value")
    for _ in range(3):
        recorder.launch("append", Args(out=out, value=value), 1)
    graph = recorder.finish()
    times = graph.profile(value=1)
    assert [name for name, _ in times] == ["append"] * 3 and all(ns > 0 for _, ns in times)
    assert number(device, out) == 7


def test_grids_over_the_limits(device):
    out = counter(device)
    with pytest.raises(ValueError, match="dimension 1 is at most 65535"):
        device.run(lambda recorder: recorder.launch("append", Args(out=out, value=1), (1, 65536)))
    recorder = device.record()
    rows = recorder.symbol("rows")
    recorder.launch("append", Args(out=out, value=1), (1, rows))
    graph = recorder.finish()
    graph.run(rows=65535)
    with pytest.raises(DeviceError, match="a grid of the graph"):
        graph.run(rows=65536)


def test_an_unknown_kernel_names_near_ones(device):
    with pytest.raises(DeviceError, match="no kernel 'scale_row' for sm_90a; near: scale_rows"):
        device.program("scale_row")


def test_a_module_is_loaded_once_and_a_damaged_one_is_named(fake):
    with CUDADevice(0, CUDADriver(fake.path), kernels(poke={"image": "other"})) as device:
        for _ in range(2):
            device.program("append")
            device.program("scale_rows")
        assert fake.count("module_load") == 1
        with pytest.raises(
            DeviceError, match=r"cuModuleLoadData.*: CUDA_ERROR_INVALID_IMAGE \(200\).*zse kernels build"
        ):
            device.program("poke")


def test_after_close(fake):
    device = CUDADevice(0, CUDADriver(fake.path), kernels())
    buffer, staging = device.alloc(100, "x"), device.staging(64)
    recorder = device.record()
    recorder.launch("append", Args(out=buffer, value=1), 1)
    graph = recorder.finish()
    ticket = graph.submit()
    device.close()
    device.close()
    assert fake.contexts == 0
    for call in (graph.run, ticket.wait, lambda: device.alloc(1), lambda: device.read(buffer)):
        with pytest.raises(DeviceError, match="closed"):
            call()
    buffer.free()
    staging.free()
