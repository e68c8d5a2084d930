"""Steps of a load: kernels of the (fake) GPU that read what was copied, slot after slot, in the stream of the copies."""

import random

import pytest
from test_gpu_load import device, file  # noqa: F401 (fixtures)

from zse.errors import DeviceError
from zse.runtime import gpu_load
from zse.runtime.load import LoadJob, LoadStep
from zse.tensor import Tensor

SLOTS, SLOT_BYTES = 3, 96 << 10


def steps(device, fd, size, seed=0):  # noqa: F811
    """Jobs that bring [0, size) of the file through slots: of one or two pieces a step, of different sizes; and the result."""
    rng, at, jobs, number = random.Random(seed), 0, [], 0
    staging = device.alloc(SLOTS * SLOT_BYTES, "load staging")
    out = device.alloc(size, "weights")
    while at < size:
        nbytes = min(rng.randrange(1, SLOT_BYTES), size - at)
        slot = number % SLOTS * SLOT_BYTES
        args = dict(src=Tensor(staging, (nbytes,), "u8", slot), out=Tensor(out, (nbytes,), "u8", at), count=nbytes)
        step = LoadStep("next_bytes", args, (1,), max(0, number - SLOTS + 1))
        cut = rng.randrange(1, nbytes) if nbytes > 1 and rng.random() < 0.5 else nbytes
        for start, end in ((0, cut), (cut, nbytes)):
            if end > start:
                place = Tensor(staging, (end - start,), "u8", slot + start)
                jobs.append(
                    LoadJob(
                        fd, at + start, end - start, None, {"destination": place}, field=f"step {number}", step=step
                    )
                )
        at, number = at + nbytes, number + 1
    return jobs, out


def expected(path) -> bytes:
    return bytes((byte + 1) % 256 for byte in path.read_bytes())


@pytest.mark.each()
@pytest.mark.parametrize("how", ["mapped", "read", "refused", "slow", "window"])
@pytest.mark.parametrize("threads", [1, 4, 8])
def test_every_step_reads_its_own_bytes(device, fake, file, monkeypatch, how, threads):  # noqa: F811
    path, fd = file
    device.can_register = how != "read"
    if how == "refused":
        fake.fail("host_register", 801, 3)
    if how == "slow":
        monkeypatch.setattr(gpu_load, "SLOW_US", 1)
        monkeypatch.setattr(gpu_load, "reads_beside", lambda: True)
    if how == "window":
        monkeypatch.setattr(device, "register_window", lambda: 600 << 10)
    for seed in range(4):
        jobs, out = steps(device, fd, 2_345_678, seed)
        load = device.load(jobs, threads)
        load.wait()
        assert device.read(out) == expected(path)


def test_steps_beside_plain_copies_and_kernels_of_the_cpu(device, file):  # noqa: F811
    path, fd = file
    jobs, out = steps(device, fd, 1_000_000)
    plain = device.alloc(500_000, "weights")
    vector = Tensor(device.alloc(4000, "weights"), (1000,), "f32")
    jobs.insert(0, LoadJob(fd, 7, 500_000, None, {"destination": plain}))
    args = {"out": vector, "order": None, "count": 1000, "factor": 1.0, "add": 0.0, "has_order": 0, "unit": 1}
    jobs.insert(0, LoadJob(fd, 0, 4000, "convert_f32", args))
    for mapped in (True, False):
        device.can_register = mapped
        device.load(jobs).wait()
        assert device.read(out) == expected(path)[:1_000_000]
        assert device.read(plain) == path.read_bytes()[7:500_007]


@pytest.mark.parametrize(
    "threads, step", [(1, "5"), (8, r"\d+")]
)  # threads together: steps within the slots launch in any order
@pytest.mark.parametrize("mapped", [True, False])
def test_a_launch_that_fails(device, fake, file, mapped, threads, step):  # noqa: F811
    device.can_register = mapped
    fake.fail("launch", 1, 5)
    jobs, _ = steps(device, file[1], 2_345_678)
    with pytest.raises(DeviceError, match=f"for step {step} "):
        device.load(jobs, threads).wait()


@pytest.mark.parametrize("mapped", [True, False])
def test_cancelling_while_threads_wait_for_steps(device, file, mapped):  # noqa: F811
    device.can_register = mapped
    for _ in range(20):
        jobs, _ = steps(device, file[1], 2_345_678)
        device.load(jobs, 8).cancel()


def test_a_file_that_ends_in_the_middle_of_a_step(device, file):  # noqa: F811
    path, fd = file
    with path.open("r+b") as handle:
        handle.truncate(1_000_000)
    jobs, _ = steps(device, fd, 2_345_678)
    with pytest.raises(Exception, match="the file ends here"):
        device.load(jobs).wait()


def test_a_step_wants_bytes_that_are_copied(device, file):  # noqa: F811
    jobs, _ = steps(device, file[1], 1000)
    with pytest.raises(TypeError, match="next_bytes: missing count"):
        device.load([jobs[0]._replace(step=LoadStep("next_bytes", {"src": None, "out": None}, (1,)))])
    with pytest.raises(ValueError, match="a step follows bytes that are copied to a GPU"):
        device.host.load([jobs[0]])
