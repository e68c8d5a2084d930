"""The HIP device over a fake libamdhip64: the same lists, graphs, memory and loader behind other names."""

import os
import struct

import pytest
from gpu_fixtures import Fake, compile_driver, kernels

from zse.errors import DeviceError, DeviceLost, UnsupportedError
from zse.runtime.args import Args
from zse.runtime.bindings.hip import HIPDriver
from zse.runtime.hip import HIPDevice, list_devices
from zse.runtime.load import LoadJob
from zse.runtime.opening import open_device
from zse.tensor import Tensor


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("driver"), ("-DFAKE_HIP",))


@pytest.fixture
def fake(library, tmp_path, monkeypatch):
    made = Fake(library, tmp_path)
    monkeypatch.setattr(HIPDriver, "libraries", (made.path,))
    return made


@pytest.fixture
def device(fake):
    with HIPDevice(kernels=kernels()) as made:
        yield made


def test_facts(device):
    assert (device.name, device.kernels, device.isa, device.arch, device.warp) == ("hip", "gpu", "gfx942", 0, 64)
    assert list_devices()[0] | {"memory_bytes": 0} == {
        "ordinal": 0,
        "name": "Fake GPU 0",
        "isa": "gfx942",
        "memory_bytes": 0,
        "driver_version": 13000,
    }


def test_memory_lists_graphs_and_staging(device, fake):
    inputs, outputs = device.staging(48, "inputs"), device.staging(48, "outputs")
    recorder = device.record()
    rows = recorder.symbol("rows", 4)
    recorder.upload(inputs)
    recorder.launch("scale_rows", Args(x=inputs.buffer, out=outputs.buffer, width=3, factor=2.0, add=1.0), rows)
    recorder.launch("scale_rows", Args(x=outputs.buffer, out=outputs.buffer, width=3, factor=10.0, add=0.0), rows)
    recorder.download(outputs)
    graph = recorder.finish()
    inputs.host[:] = struct.pack("12f", *range(12))
    for count in (4, 2, 2, 2, 4):
        device.write(outputs.buffer, bytes(48))
        graph.run(rows=count)
        assert list(outputs.host.cast("f")) == [(2 * i + 1) * 10.0 for i in range(3 * count)] + [0.0] * (12 - 3 * count)
    assert graph.num_captured == 2
    assert fake.log()[0] == ["scale_rows", "4,1,1", "64", "0", "0", "0"]
    assert [name for name, _ in graph.profile(rows=1)] == ["upload", "scale_rows", "scale_rows", "download"]


def test_a_kernel_that_needs_more_shared_memory_than_there_is(fake):
    with HIPDevice(kernels=kernels(poke={"shared_bytes": 1 << 20})) as device:
        with pytest.raises(DeviceError, match="poke needs 1,048,576 bytes of shared memory; Fake GPU 0 has 65,536"):
            device.program("poke")


def test_growing_without_virtual_memory(device, fake):
    buffer = device.alloc_growing(100, 1 << 20, "kv")
    buffer.grow(1 << 20)
    assert device.read(buffer) == bytes(1 << 20) and device.memory() == {"kv": 1 << 20}


def test_loading_reads_where_files_cannot_be_registered(device, fake, tmp_path):
    content = os.urandom(200_000)
    (tmp_path / "w").write_bytes(content)
    fd = os.open(tmp_path / "w", os.O_RDONLY)
    buffer = device.alloc(200_000, "weights")
    load = device.load([LoadJob(fd, 0, 200_000, None, {"destination": Tensor(buffer, (200_000,), "u8")})])
    load.wait()
    os.close(fd)
    assert not load.mapped and device.read(buffer) == content


def test_errors(fake, monkeypatch):
    fake.set(devices=0)
    with pytest.raises(DeviceError, match=r"hipGetDeviceCount: hipErrorNoDevice \(100\): .*rocminfo.*--device cpu"):
        open_device("hip")
    fake.set(devices=1, memory=1000)
    with open_device("hip") as device:
        assert device.simt and device.isa == "gfx942"
    with pytest.raises(DeviceError, match="there is no hip:3"):
        open_device("hip:3")
    with HIPDevice(kernels=kernels()) as device:
        with pytest.raises(DeviceError, match="not enough memory on hip:0: 2,000 bytes for weights"):
            device.alloc(2000, "weights")
        out = device.alloc(8)
        with pytest.raises(DeviceLost, match="hipErrorIllegalAddress"):
            device.run(lambda recorder: recorder.launch("poke", Args(out=out, at=1 << 40), 1))
    with pytest.raises(UnsupportedError):
        open_device("hip:")
    monkeypatch.setattr(HIPDriver, "libraries", ("libnowhere.so",))
    with pytest.raises(DeviceError, match="no AMD driver: .*install ROCm"):
        open_device("hip")
    assert open_device("auto").name == "cpu"
