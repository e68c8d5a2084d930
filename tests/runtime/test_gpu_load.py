"""Loading weights onto a (fake) GPU: mapped or read, in order, repacked on the way, and every way to fail."""

import mmap
import os
import random
import struct
import sys
import time

import pytest
from gpu_fixtures import Fake, kernels

from zse.errors import DeviceError, DeviceLost, FormatError
from zse.runtime import gpu_load
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cpu import CPUDevice
from zse.runtime.cuda import CUDADevice
from zse.runtime.load import LoadJob
from zse.tensor import Tensor

PAGE = mmap.PAGESIZE


@pytest.fixture
def device(fake, small_chunks):
    with CUDADevice(0, CUDADriver(fake.path), kernels()) as made:
        yield made


@pytest.fixture
def file(tmp_path):
    """2.3 MB of noise, in the page cache."""
    path = tmp_path / "weights.bin"
    path.write_bytes(random.Random(5).randbytes(2_345_678))
    fd = os.open(path, os.O_RDONLY)
    yield path, fd
    os.close(fd)


def copies(device, fd, ranges, buffer=None):
    """Jobs that copy (offset, nbytes) pieces, one behind the other in the device's memory."""
    total = sum(nbytes for _, nbytes in ranges)
    buffer = buffer or device.alloc(total, "weights")
    jobs, at = [], 0
    for number, (offset, nbytes) in enumerate(ranges):
        jobs.append(
            LoadJob(
                fd, offset, nbytes, None, {"destination": Tensor(buffer, (nbytes,), "u8", at)}, field=f"tensor {number}"
            )
        )
        at += nbytes
    return jobs, buffer


RANGES = {
    "whole": [(0, 2_345_678)],
    "unaligned": [(1, 300_001), (300_002, 5), (300_007, 1_000_000)],
    "backwards": [(2_000_000, 345_678), (1_000_000, 777_777), (3, 4_096), (0, 0), (500_000, 600_000)],
    "many": [(at * 23_456, 23_456) for at in range(100)],
    "sparse": [(at * 400_000 + 17, 1000) for at in range(5)],
    "overlapping": [(0, 600_000), (100_000, 600_000), (0, 600_000)],
}


def arrived(device, file, ranges, threads=None):
    """The load of these ranges, when it is done: every byte is where it belongs."""
    path, fd = file
    jobs, buffer = copies(device, fd, ranges)
    load = device.load(jobs, threads)
    load.wait()
    content = path.read_bytes()
    assert device.read(buffer) == b"".join(content[offset : offset + nbytes] for offset, nbytes in ranges)
    return load


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", RANGES)
def test_bytes_arrive(device, fake, file, name, mapped):
    device.can_register = mapped
    load = arrived(device, file, RANGES[name])
    assert load.finished and load.mapped == mapped
    load.wait()
    device.tidy_loads()
    assert fake.count("host_register") == fake.count("host_unregister") > 0
    assert fake.count("host_alloc") == 0  # threads that read register memory of their own
    if not mapped:
        assert fake.count("host_register") == min(gpu_load.READERS, num_pieces(RANGES[name]))


def num_pieces(ranges) -> int:
    """Of files that are read."""
    return sum(-(-nbytes // gpu_load.SLOT_BYTES) for _, nbytes in ranges)


@pytest.mark.parametrize("name", RANGES)
def test_files_are_read_while_memory_is_asked_for(device, fake, file, name):
    """The driver gives none while it registers a file."""
    device.allocates = True
    load = arrived(device, file, RANGES[name])
    device.tidy_loads()
    assert not load.mapped and fake.count("host_register") == min(gpu_load.READERS, num_pieces(RANGES[name]))


def test_a_window_bounds_what_is_registered(device, fake, file, monkeypatch):
    monkeypatch.setattr(device, "register_window", lambda: 600 << 10)
    ranges = RANGES["many"] + RANGES["backwards"] + RANGES["overlapping"]
    arrived(device, file, ranges)
    device.tidy_loads()
    assert fake.count("host_register") == fake.count("host_unregister") > 10


def test_zeroing_does_not_overtake_the_copies(device, file):
    """The copy stream waits for the compute stream, where fresh memory is zeroed."""
    path, fd = file
    for _ in range(5):
        jobs, buffer = copies(device, fd, [(0, 100_000)])
        device.load(jobs).wait()
        device.synchronize()
        assert device.read(buffer) == path.read_bytes()[:100_000]


def test_no_jobs(device):
    load = device.load([])
    load.wait()
    assert load.finished


def test_a_file_that_is_not_cached_is_read(device, fake, file, monkeypatch):
    monkeypatch.setattr(gpu_load, "WARM_PERCENT", 101)  # whatever mincore says
    load = arrived(device, file, RANGES["unaligned"])
    assert not load.mapped and fake.count("host_register") == gpu_load.READERS


@pytest.mark.parametrize("after", [0, 3])
def test_a_mapping_that_the_driver_refuses_is_read(device, fake, file, after):
    fake.fail("host_register", 801, after)
    ranges = RANGES["many"]
    load = arrived(device, file, ranges)
    assert not load.mapped
    device.tidy_loads()
    assert fake.count("host_unregister") == fake.count("host_register") - 1


@pytest.mark.parametrize("name", RANGES)
def test_where_registering_is_slow_the_rest_is_read(device, fake, file, monkeypatch, name):
    monkeypatch.setattr(gpu_load, "reads_beside", lambda: True)
    monkeypatch.setattr(gpu_load, "SLOW_US", 1)
    fake.set(register_us=500)
    load = arrived(device, file, RANGES[name], 8)
    if name in ("whole", "many"):
        assert not load.mapped and fake.count("host_register") == 2 + 8


@pytest.mark.parametrize("refused", [None, *range(9)])  # of the chunks and of the threads' own memory
@pytest.mark.parametrize("mapped", [True, False])
def test_kernels_of_the_cpu_repack_on_the_way(device, fake, file, mapped, refused):
    """Jobs with and without a kernel in one load; the same jobs on the CPU make the same bytes."""
    path, fd = file
    device.can_register = mapped
    if refused is not None:
        fake.fail("host_register", 801, refused)
    with CPUDevice(1) as host:
        order = Tensor(host.alloc(64, "order"), (16,), "i32")
        order.view()[:] = memoryview(bytes(struct.pack("16i", *reversed(range(16))))).cast("i")
        sizes = [16 * count for count in (1, 100, 3000, 17)]
        contents = []
        for target in (host, device):
            buffer = target.alloc(4 * sum(sizes) + 400_000, "weights")
            jobs, at = [], 0
            for number, size in enumerate(sizes):
                out = Tensor(buffer, (size,), "f32", at)
                jobs.append(
                    LoadJob(
                        fd,
                        64 * number,
                        2 * size,
                        "convert_bf16",
                        {
                            "out": out,
                            "order": order,
                            "count": size,
                            "factor": 0.5,
                            "add": 1.0,
                            "has_order": 1,
                            "unit": 16,
                        },
                        (1,),
                        field="norm",
                    )
                )
                jobs.append(
                    LoadJob(
                        fd,
                        1000 * number,
                        100_000,
                        None,
                        {"destination": Tensor(buffer, (100_000,), "u8", 4 * sum(sizes) + 100_000 * number)},
                        field="copy",
                    )
                )
                at += 4 * size
            load = target.load(jobs)
            load.wait()
            contents.append(target.read(buffer))
        assert contents[0] == contents[1]


def test_jobs_with_kernels_are_checked(device, file):
    _, fd = file
    out = Tensor(device.alloc(64, "out"), (16,), "f32")
    good = {"out": out, "order": None, "count": 16, "factor": 1.0, "add": 0.0, "has_order": 0, "unit": 1}
    for changes, error, message in (
        ({"units": 1}, TypeError, "convert_f32: unknown units; it takes out, order"),
        ({"out": out.address}, TypeError, "out is an address"),
        ({"out": None}, ValueError, "no argument of convert_f32 lies in the memory of cuda"),
        ({"count": "16"}, TypeError, "count is i64, got str"),
    ):
        with pytest.raises(error, match=message):
            device.load([LoadJob(fd, 0, 64, "convert_f32", good | changes, field="norm")])
    with pytest.raises(ValueError, match="100 bytes into 64"):
        device.load([LoadJob(fd, 0, 100, None, {"destination": out}, field="norm")])
    with pytest.raises(DeviceError, match="no kernel 'convert_f23'"):
        device.load([LoadJob(fd, 0, 64, "convert_f23", {"out": out}, field="norm")])


@pytest.mark.parametrize("mapped", [True, False])
def test_a_short_file_names_file_offset_and_field(device, file, mapped):
    path, fd = file
    device.can_register = mapped
    jobs, _ = copies(device, fd, [(0, 1000), (2_300_000, 100_000), (0, 50)])
    load = device.load([job._replace(path=str(path)) for job in jobs])
    with pytest.raises(
        FormatError, match=r"weights.bin: offset 2345678: tensor 1: the file ends here; 54322 more bytes expected"
    ):
        load.wait()
    with pytest.raises(FormatError):
        load.wait()


def test_a_file_that_cannot_be_read(device, tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    jobs, _ = copies(device, fd, [(0, 1000)])
    with pytest.raises(DeviceError, match="EISDIR"):
        device.load(jobs).wait()
    os.close(fd)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_copy_that_fails(device, fake, file, mapped):
    path, fd = file
    device.can_register = mapped
    jobs, buffer = copies(device, fd, RANGES["many"])
    fake.fail("to_device_async", 1, 40)
    with pytest.raises(
        DeviceError, match=r"cuMemcpyHtoDAsync_v2 \(loading .*weights.bin: 23456 bytes at \d+ for tensor \d+"
    ):
        device.load(jobs).wait()
    buffer.free()


def test_a_device_that_is_lost_while_loading(driver_library, tmp_path, file):
    (tmp_path / "lost").mkdir()
    fake = Fake(driver_library, tmp_path / "lost")
    device = CUDADevice(0, CUDADriver(fake.path), kernels())
    jobs, buffer = copies(device, file[1], RANGES["many"])
    fake.fail("to_device_async", 700, 10)
    with pytest.raises(DeviceLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.load(jobs).wait()
    with pytest.raises(DeviceLost):
        device.alloc(10)
    device.close()
    buffer.free()


def test_no_memory_to_pin(device, fake, file):
    device.can_register = False
    jobs, _ = copies(device, file[1], RANGES["whole"])
    fake.fail("host_register", 801, times=-1)
    device.load(jobs).wait()  # memory of the driver's then
    fake.fail("host_alloc", 2, times=-1)
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        device.load(jobs).wait()
    device.tidy_loads()
    assert fake.count("host_free") == gpu_load.READERS and fake.count("host_unregister") == 0


def test_cancel_and_drop(device, fake, file):
    for mapped in (True, False):
        device.can_register = mapped
        for action in ("cancel", "drop", "close"):
            jobs, buffer = copies(device, file[1], RANGES["many"])
            load = device.load(jobs)
            with pytest.raises(DeviceError, match="used by 1 recorded graph"):
                buffer.free()
            if action == "cancel":
                load.cancel()
                load.cancel()
                load.wait()
            elif action == "drop":
                del load
            if action != "close":
                del jobs
                buffer.free()
    device.close()
    assert fake.count("host_register") == fake.count("host_unregister")
    assert fake.count("host_alloc") == fake.count("host_free")


def test_events_are_given_back(device, fake, file):
    for _ in range(5):
        jobs, _ = copies(device, file[1], [(0, 100_000)])
        device.load(jobs).wait()
        device.tidy_loads()
    assert fake.count("event_create") <= 2 * 8 + 4


@pytest.mark.timed
def test_the_next_load_does_not_wait_for_the_last_ones_tidying(device, fake, file):
    for _ in range(3):
        jobs, _ = copies(device, file[1], RANGES["whole"])
        started = time.monotonic()
        device.load(jobs).wait()
        assert time.monotonic() - started < 0.8  # tidying begins a second later
    assert fake.count("host_unregister") == 0 and len(device._tidying) == 3
    device.tidy_loads()
    assert fake.count("host_unregister") == fake.count("host_register") == 27


def test_two_loads_at_once(device, file):
    path, fd = file
    loads = [(device.load(jobs), buffer) for jobs, buffer in (copies(device, fd, RANGES["whole"]) for _ in range(2))]
    for load, buffer in loads:
        load.wait()
        assert device.read(buffer) == path.read_bytes()


def test_nothing_slow_is_imported(driver_library):
    import subprocess

    script = (
        "import sys\nimport zse.runtime.cuda, zse.runtime.gpu_load, zse.runtime.gpu_graph\n"
        "print(sorted({'numpy', 'json', 'asyncio', 'logging', 'subprocess', 'cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
