"""Copies beside kernels, over a driver whose streams run as late, or whose copies run as early, as a driver may."""

import struct

import pytest
from gpu_fixtures import Fake, compile_driver, kernels

from zse.errors import DeviceError
from zse.runtime.args import Args
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cuda import CUDADevice
from zse.runtime.fetch import await_fetch, fetch, link_bytes_per_s
from zse.tensor import Tensor

LAYERS, WIDTH = 5, 3


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(params=[0, 1], ids=["late", "early"])
def fake(request, library, tmp_path):
    made = Fake(library, tmp_path)
    made.set(eager_copies=request.param)
    return made


@pytest.fixture
def device(fake):
    with CUDADevice(0, CUDADriver(fake.path), kernels()) as made:
        yield made


def floats(device, tensor):
    return list(struct.unpack(f"{tensor.nbytes // 4}f", device.read(tensor)))


def step(device, slots=2):
    """A graph that adds up: out[layer] = the layer's numbers times two, by way of slots that layers take turns in."""
    host = device.host_memory(4 * LAYERS * WIDTH, "layers")
    weights = [Tensor(host, (WIDTH,), "f32", 4 * WIDTH * layer) for layer in range(LAYERS)]
    for layer, weight in enumerate(weights):
        device.write(weight, struct.pack(f"{WIDTH}f", *[10.0 * layer + i for i in range(WIDTH)]))
    memory = device.alloc(4 * WIDTH * slots, "slots")
    places = [Tensor(memory, (WIDTH,), "f32", 4 * WIDTH * number) for number in range(slots)]
    out = Tensor(device.alloc(4 * LAYERS * WIDTH, "out"), (LAYERS * WIDTH,), "f32")
    recorder = device.record()
    for number in range(slots):
        fetch(recorder, number, places[number], weights[number])
    for layer in range(LAYERS):
        number = layer % slots
        await_fetch(recorder, number)
        line = Tensor(out.buffer, (WIDTH,), "f32", 4 * WIDTH * layer)
        for factor in (1.0, 2.0):
            recorder.launch("scale_rows", Args(x=places[number], out=line, width=WIDTH, factor=factor, add=0.0), 1)
        if layer + slots < LAYERS:
            fetch(recorder, number, places[number], weights[layer + slots])
    return recorder.finish(), out, weights


def expected(change=0.0):
    return [2 * (10.0 * layer + i) + change for layer in range(LAYERS) for i in range(WIDTH)]


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_layers_find_their_bytes(capture, slots, device, fake):
    device.supports_capture = capture
    graph, out, weights = step(device, slots)
    for turn in range(4):
        device.write(out, bytes(out.nbytes))
        fake.log()
        graph.run()
        assert floats(device, out) == expected(), turn
    assert graph.num_captured == capture and fake.count("graph_launch") == 3 * capture
    # No kernel begins before the one before has ended: it could read a slot too early.
    assert [line[-1] for line in fake.log()] == ["0", "0"] * LAYERS
    tickets = [graph.submit() for _ in range(3)]
    tickets[-1].wait()
    assert floats(device, out) == expected()
    # What the host's memory has is what the next step computes with.
    for weight in weights:
        device.write(weight, struct.pack(f"{WIDTH}f", *[number + 1 for number in floats(device, weight)]))
    graph.run()
    assert floats(device, out) == expected(2.0)
    assert len(graph.profile()) == len(graph.launches)
    with pytest.raises(DeviceError, match="used by 1 recorded graph"):
        weights[0].buffer.free()
    graph.close()
    weights[0].buffer.free()


def test_a_failed_copy_is_named(device, fake):
    device.supports_capture = False
    graph, _, _ = step(device)
    fake.fail("to_device_async", 1, after=2)
    with pytest.raises(DeviceError, match="cuMemcpyHtoDAsync_v2 .*fetch, launch 5"):
        graph.run()
    fake.fail("stream_wait_event", 1, after=2)
    with pytest.raises(DeviceError, match="cuStreamWaitEvent .*await, launch 2"):
        graph.run()


def test_the_link_is_measured_and_nothing_stays(device, fake):
    before = fake.memory_used
    assert link_bytes_per_s(device) > 1e6
    assert fake.memory_used == before and device.memory() == {}


def test_sizes_agree(device):
    buffer = device.alloc(64, "slot")
    with pytest.raises(ValueError, match="a fetch of 32 bytes into 64"):
        fetch(device.record(), 0, Tensor(buffer, (64,), "u8"), Tensor(buffer, (32,), "u8"))
