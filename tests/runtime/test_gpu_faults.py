"""What can be wrong with a GPU and its driver: each is one line that says what to do, and the CPU always works."""

import ctypes
import subprocess
import sys
import threading
import time

import pytest
from gpu_fixtures import Fake, compile_driver, kernels

from zse.errors import DeviceError, DeviceLost, UnsupportedError
from zse.runtime.args import Args
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.bindings.driver import ROLES
from zse.runtime.cuda import CUDADevice, list_devices
from zse.runtime.gpu import SharedStream
from zse.runtime.opening import PendingDevice, open_device
from zse.tensor import Tensor


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def fake(library, tmp_path, monkeypatch):
    made = Fake(library, tmp_path)
    monkeypatch.setattr(CUDADriver, "libraries", (made.path,))
    return made


@pytest.fixture
def device(fake):
    made = CUDADevice(kernels=kernels())
    yield made
    made.close()
    assert not SharedStream.opened  # a lost device's is no other's


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (
            {"version": 12020},
            r"driver is for CUDA 12.2; CUDA 12.3 is needed: install the NVIDIA driver, version 545 or later",
        ),
        ({"devices": 0}, r"cuDeviceGetCount: CUDA_ERROR_NO_DEVICE \(100\).*CUDA_VISIBLE_DEVICES.*--device cpu"),
        ({"major": 7, "minor": 5}, r"Fake GPU 0 is sm_75; sm_80 \(Ampere\) or later is needed: use --device cpu"),
        ({"mps": 1}, r"Fake GPU 0: CUDA MPS runs kernels of several processes.*nvidia-cuda-mps-control.*ZSE_MPS=1"),
        ({"mode": 2}, r"Fake GPU 0: its compute mode is Prohibited; run `nvidia-smi -c DEFAULT`"),
    ],
)
def test_a_device_that_cannot_be_used(fake, trouble, message):
    fake.set(**trouble)
    with pytest.raises(DeviceError, match=message):
        open_device("cuda")
    assert open_device("auto").name == "cpu" and open_device("cpu").name == "cpu"
    assert fake.contexts == 0


@pytest.mark.parametrize(
    ("role", "code", "message"),
    [
        ("init", 803, "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH .*restart the machine"),
        ("init", 100, "no NVIDIA GPU is visible"),
        ("context_retain", 46, "another process holds the GPU"),
        ("context_retain", 2, "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY .*close other programs"),
        ("stream_create", 1, "cuStreamCreate: CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_a_call_that_fails_while_opening(fake, role, code, message):
    fake.fail(role, code, times=-1)
    with pytest.raises(DeviceError, match=message):
        open_device("cuda")
    assert fake.contexts == 0
    assert open_device("auto").name == "cpu"


def test_no_driver(monkeypatch):
    monkeypatch.setattr(CUDADriver, "libraries", ("libnowhere.so.1",))
    with pytest.raises(
        DeviceError, match="no NVIDIA driver: libnowhere.so.1: .*; install the NVIDIA driver.*or use --device cpu"
    ):
        open_device("cuda")
    assert open_device("auto").name == "cpu"


def test_a_driver_without_a_function(monkeypatch, library, tmp_path):
    fake = Fake(library, tmp_path)
    monkeypatch.setattr(CUDADriver, "libraries", (fake.path,))
    monkeypatch.setitem(ROLES, "launch", ("cuLaunchKernel_v9", *ROLES["launch"][1:]))
    with pytest.raises(DeviceError, match="the NVIDIA driver lacks cuLaunchKernel_v9: it is too old"):
        open_device("cuda")
    assert fake.contexts == 0


def test_mps_where_nobody_else_computes(fake, monkeypatch):
    fake.set(mps=-1)
    open_device("cuda").close()
    fake.set(mps=1)
    monkeypatch.setenv("ZSE_MPS", "1")
    with open_device("cuda") as device:
        assert device.name == "cuda"


def test_names(fake):
    fake.set(devices=2)
    with pytest.raises(DeviceError, match=r"there is no cuda:2: 2 GPU\(s\) are visible"):
        open_device("cuda:2")
    for name in ("cuda:", "cuda:x", "gpu", "cuda:-1", ""):
        with pytest.raises(UnsupportedError, match="device"):
            open_device(name)
    with open_device("cuda:1") as device:
        assert device.product == "Fake GPU 1"
    with open_device("auto") as device:
        assert device.name == "cuda" and device.kernels == "gpu"
    assert [found["name"] for found in list_devices()] == ["Fake GPU 0", "Fake GPU 1"]


def test_opening_in_the_background(fake):
    pending = PendingDevice("cuda")
    with pending.result() as device:
        assert pending.done and device.name == "cuda"
        assert pending.result() is device
        assert device.read(device.alloc(10)) == bytes(10)  # in this thread, which did not open it
    assert fake.contexts == 0
    for trouble, message in (({"major": 7}, "sm_70"), ({"devices": 0}, "NO_DEVICE")):
        fake.set(**trouble)
        pending = PendingDevice("cuda")
        for _ in range(2):
            with pytest.raises(DeviceError, match=message):
                pending.result()
        assert fake.contexts == 0 and PendingDevice("auto").result().name == "cpu"
    assert PendingDevice("cpu").result().name == "cpu"
    with pytest.raises(UnsupportedError):
        PendingDevice("cuda:x").result()


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda"])
def test_a_library_that_is_older_than_its_signatures(fake, monkeypatch, name):
    from zse.runtime import native

    monkeypatch.setattr(native, "_runtime", None)
    monkeypatch.setitem(native._SIGNATURES, "zse_gpu_of_later", (None, []))
    with pytest.raises(DeviceError, match="libzse_runtime.so lacks zse_gpu_of_later; run `python -m zse.build`"):
        PendingDevice(name).result()
    assert fake.contexts == 0


@pytest.mark.timed
def test_other_threads_go_on_while_a_device_opens(fake):
    """The C thread needs nothing from Python: what opening takes passes while this thread computes."""
    fake.set(init_us=200_000)
    started = time.monotonic()
    pending = PendingDevice("cuda")
    assert time.monotonic() - started < 0.1 and not pending.done
    while not pending.done:
        sum(range(1000))
    assert 0.15 < time.monotonic() - started < 2
    fake.set(init_us=0)
    with pending.result() as device:
        assert device.name == "cuda"


def broken(device):
    """A graph that touches memory which is not there."""
    out = device.alloc(8, "out")
    recorder = device.record()
    recorder.launch("poke", Args(out=out, at=1 << 40), 1)
    return recorder.finish()


def test_a_fault_loses_the_device(device, fake):
    graph, held = broken(device), device.alloc(100, "held")
    staging = device.staging(64)
    ticket = graph.submit()
    with pytest.raises(
        DeviceLost, match=r"cuEventSynchronize \(running poke\): CUDA_ERROR_ILLEGAL_ADDRESS \(700\).*ZSE_GPU_CHECK=1"
    ):
        ticket.wait()
    for call in (
        graph.submit,
        lambda: device.alloc(10),
        lambda: device.read(held),
        device.synchronize,
        lambda: device.staging(10),
        lambda: device.memory_free,
        lambda: graph.profile(),
    ):
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
            call()
    calls = fake.count("free")
    staging_error = None
    try:
        staging.free()
    except DeviceError as error:
        staging_error = error
    assert staging_error is None
    graph.close()
    held.free()
    device.close()
    device.close()
    assert fake.count("free") == calls and DeviceLost("x").exit_code == 75


def test_a_fault_seen_by_another_call(device):
    broken(device).submit()
    with pytest.raises(DeviceLost):
        device.synchronize()


def test_checking_names_the_kernel(fake, monkeypatch):
    monkeypatch.setenv("ZSE_GPU_CHECK", "1")
    device = CUDADevice(kernels=kernels())
    out = Tensor(device.alloc(8, "out"), (1,), "i64")
    recorder = device.record()
    recorder.launch("append", Args(out=out, value=1), 1)
    recorder.launch("poke", Args(out=out, at=1 << 40), 2)
    recorder.launch("append", Args(out=out, value=1), 1)
    graph = recorder.finish()
    with pytest.raises(
        DeviceLost, match=r"cuLaunchKernelEx \(poke, launch 1, grid \(2,\)\): CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        graph.run()
    device.close()


def test_a_launch_that_fails_names_kernel_and_place(device, fake):
    out = Tensor(device.alloc(8, "out"), (1,), "i64")
    recorder = device.record()
    for _ in range(3):
        recorder.launch("append", Args(out=out, value=1), 1)
    graph = recorder.finish()
    fake.fail("launch_ex", 1, after=1)
    with pytest.raises(
        DeviceError, match=r"cuLaunchKernelEx \(append, launch 1, grid \(1,\)\): CUDA_ERROR_INVALID_VALUE \(1\)"
    ):
        graph.run()
    graph.run()
    assert int.from_bytes(device.read(out), "little") == 15  # one launch before the failure, three after


def test_a_captured_graph_that_fails_to_launch(device, fake):
    out = Tensor(device.alloc(8, "out"), (1,), "i64")
    recorder = device.record()
    for _ in range(2):
        recorder.launch("append", Args(out=out, value=1), 1)
    graph = recorder.finish()
    for _ in range(3):
        graph.run()
    fake.fail("graph_launch", 2)
    with pytest.raises(DeviceError, match=r"cuGraphLaunch \(append\): CUDA_ERROR_OUT_OF_MEMORY"):
        graph.run()
    graph.run()


def test_no_memory_for_events_or_pinning(device, fake):
    fake.fail("host_alloc", 2)
    with pytest.raises(DeviceError, match="cannot pin 100 bytes of host memory for step"):
        device.staging(100, "step")
    assert device.memory() == {}


def test_close_while_another_thread_waits(fake):
    """Nothing hangs and nothing crashes, whoever comes first."""
    for _ in range(20):
        device = CUDADevice(kernels=kernels())
        out = device.alloc(8, "out")
        recorder = device.record()
        recorder.launch("append", Args(out=out, value=1), 1)
        graph = recorder.finish()
        errors = []

        def work(graph=graph, errors=errors):
            try:
                while True:
                    graph.run()
            except DeviceError as error:
                errors.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        device.close()
        thread.join(10)
        assert not thread.is_alive() and "closed" in errors[0]


def test_a_process_ends_cleanly_after_a_fault(library, tmp_path):
    """With a lost device, buffers, graphs and tickets still alive at the interpreter's end."""
    fake = Fake(library, tmp_path)
    script = f"""
import sys
sys.path.insert(0, {str(__file__).rpartition("/")[0]!r})
from gpu_fixtures import kernels
from zse.errors import ZSEError
from zse.runtime.args import Args
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.bindings.driver import ROLES
from zse.runtime.cuda import CUDADevice
device = CUDADevice(0, CUDADriver({fake.path!r}), kernels())
buffer = device.alloc(100)
recorder = device.record()
recorder.launch("poke", Args(out=buffer, at=1 << 40), 1)
graph = recorder.finish()
tickets = [graph.submit() for _ in range(3)]
try:
    tickets[2].wait()
except ZSEError as error:
    print(error.exit_code, flush=True)
    sys.exit(error.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (75, "75\n", "")


def test_memory_for_copies_that_cannot_be_locked(device, fake):
    size = 4 << 20
    locked = device.host_memory(size, "kv host", for_copies=True)
    assert locked.is_locked and fake.count("host_register") == 1
    fake.fail("host_register", 801)
    plain = device.host_memory(size, "kv host", for_copies=True)
    assert not plain.is_locked and device.memory() == {}
    target = device.alloc(size, "x")
    for number, memory in enumerate((locked, plain)):
        ctypes.memset(memory.address, 7 + number, size)
        device.copy_in(target.address, memory.address, size)
        device.synchronize()
        ctypes.memset(memory.address, 0, size)
        device.copy_out(memory.address, target.address, size)
        device.synchronize()
        assert ctypes.string_at(memory.address, size) == bytes((7 + number,)) * size
        memory.free()
    assert fake.count("host_unregister") == 1
