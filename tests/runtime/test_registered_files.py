"""Files that a parked engine has registered with its GPU's driver before it knows which it will load; over the fake driver."""

import os
import random
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_fixtures import Fake, kernels

from zse.engine import registered_files, worker
from zse.engine.messages import Expect, FrameReader, FrameSocket, FromEngine, LoadModel, Parked, encode
from zse.engine.metrics import Phases
from zse.engine.registered_files import RegisteredFiles
from zse.errors import DeviceLost
from zse.runtime import gpu_load, probe
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cuda import CUDADevice
from zse.runtime.load import LoadJob
from zse.tensor import Tensor

CHUNK = 256 << 10
SIZE = 1_234_567  # five chunks, the last of them not whole


@pytest.fixture
def device(fake, small_chunks):
    with CUDADevice(0, CUDADriver(fake.path), kernels()) as made:
        yield made
    refused = getattr(fake, "refused", 0)
    assert fake.count("host_register") - refused == fake.count("host_unregister"), "everything is given back"


@pytest.fixture
def models(tmp_path):
    """Three files of weights."""
    paths = []
    for seed in range(3):
        path = tmp_path / f"model{seed}.zse"
        path.write_bytes(random.Random(seed).randbytes(SIZE))
        paths.append(str(path))
    return paths


def load(device, path: str, ranges=((0, SIZE),)) -> bytes:
    """What a load brings of the file, and the load is tidy behind it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        buffer, at, jobs = device.alloc(sum(size for _, size in ranges), "weights"), 0, []
        for offset, size in ranges:
            jobs.append(LoadJob(fd, offset, size, None, {"destination": Tensor(buffer, (size,), "u8", at)}))
            at += size
        loading = device.load(jobs)
        loading.wait()
        device.tidy_loads()
        found = bytes(device.read(buffer))
        buffer.free()
        return found
    finally:
        os.close(fd)


def content(path: str, ranges=((0, SIZE),)) -> bytes:
    data = Path(path).read_bytes()
    return b"".join(data[offset : offset + size] for offset, size in ranges)


def registered(files: RegisteredFiles) -> int:
    """How often register_next() found something."""
    count = 0
    while files.register_next():
        count += 1
    return count


RANGES = {
    "whole": ((0, SIZE),),
    "unaligned": ((1, 300_001), (300_002, 5), (300_007, 900_000)),
    "backwards": ((1_000_000, 234_567), (3, 4_096), (500_000, 400_000)),
    "last": ((1_200_000, 34_567),),
}


@pytest.mark.parametrize("name", RANGES)
def test_a_load_copies_from_what_is_registered(device, fake, models, name):
    files = RegisteredFiles(device)
    files.want(models[:2], 1 << 30)
    assert registered(files) == 10 == fake.count("host_register")
    assert load(device, models[1], RANGES[name]) == content(models[1], RANGES[name])
    assert fake.count("host_register") == 10 == fake.count("host_unregister"), "nothing anew, and the other file's, too"
    assert fake.count("host_alloc") == 0, "nothing was read"
    assert load(device, models[0], RANGES[name]) == content(models[0], RANGES[name]), (
        "the next load registers for itself"
    )


@pytest.mark.parametrize("chunks", range(5))
def test_a_load_goes_on_where_registering_was_interrupted(device, fake, models, chunks):
    files = RegisteredFiles(device)
    files.want(models[:1], 1 << 30)
    assert all(files.register_next() for _ in range(chunks))
    assert load(device, models[0]) == content(models[0])
    assert fake.count("host_register") == 5


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_load_that_reads_gives_back_what_was_registered(device, fake, models, wanted):
    """While the device's memory is asked for files are read: those that others wait for, and one that is registered in part."""
    files = RegisteredFiles(device)
    files.want(models[-wanted:], 1 << 30)
    assert all(files.register_next() for _ in range(3))
    device.allocates = True
    assert load(device, models[1]) == content(models[1])
    assert fake.count("host_register") == 3 + gpu_load.READERS == fake.count("host_unregister")


@pytest.mark.parametrize("how", ["written", "replaced", "longer"])
def test_a_file_that_changed_is_loaded_as_it_is(device, models, how):
    files = RegisteredFiles(device)
    files.want(models[:1], 1 << 30)
    assert registered(files) == 5
    if how == "replaced":
        os.replace(models[1], models[0])
    else:
        Path(models[0]).write_bytes(random.Random(9).randbytes(SIZE + 4096 * (how == "longer")))
        os.utime(models[0], ns=(5, 5))
    assert load(device, models[0]) == content(models[0])


def test_other_files_take_the_place_of_those_that_nobody_wants(device, fake, models):
    files = RegisteredFiles(device)
    files.want(models[:2], 1 << 30)
    registered(files)
    files.want([models[1], models[2]], 1 << 30)
    assert registered(files) == 5 and fake.count("host_unregister") == 5
    Path(models[2]).write_bytes(b"other")
    files.want([models[1], models[2]], 1 << 30)
    assert registered(files) == 1 and fake.count("host_unregister") == 10, "the changed one, as it is now"
    assert load(device, models[1]) == content(models[1])


def test_a_bound_holds(device, fake, models, monkeypatch):
    files = RegisteredFiles(device)
    files.want(models, 2 * SIZE)
    assert registered(files) == 10
    files.want(models, SIZE)
    assert registered(files) == 0 and fake.count("host_unregister") == 5, "the first one is left"
    assert [file.path for file in files._files] == models[:1]
    files.want((), None)
    assert fake.count("host_unregister") == 10
    monkeypatch.setattr(probe, "memory_bytes", lambda: {"available": 5 * SIZE, "limit": None, "total": 1 << 30})
    files.want(models, None)
    assert registered(files) == 5, "a quarter of what is available"
    monkeypatch.setattr(probe, "memory_bytes", lambda: {"available": 0, "limit": 1 << 30, "total": 1 << 30})
    files.want(models, None)
    assert registered(files) == 0 and fake.count("host_unregister") == 15, "nothing is left of the container's limit"
    monkeypatch.setattr(device, "register_window", lambda: 2 * SIZE)
    files.want(models, 1 << 30)
    assert registered(files) == 10


def test_those_that_are_needed_first_take_the_place_of_later_ones(device, fake, models):
    """A model that was unloaded comes before those that nobody has asked for, and there is room for two."""
    files = RegisteredFiles(device)
    files.want([models[0], models[1]], 2 * SIZE)
    registered(files)
    files.want([models[2], models[1], models[0]], 2 * SIZE)
    assert registered(files) == 5 and fake.count("host_unregister") == 5
    assert sorted(file.path for file in files._files) == models[1:]
    Path(models[0]).write_bytes(bytes(3 * SIZE))
    files.want([models[0], models[1], models[2]], 2 * SIZE)
    assert registered(files) == 0 and fake.count("host_unregister") == 5, "for what has no room nothing is given back"


def test_models_of_one_file_have_it_once(device, fake, models):
    files = RegisteredFiles(device)
    files.want([models[0], models[0], models[1]], 2 * SIZE)
    assert registered(files) == 10 and [file.path for file in files._files] == models[:2]
    assert load(device, models[1]) == content(models[1])


def test_a_window_holds_for_what_was_registered_before(device, fake, models, monkeypatch):
    files = RegisteredFiles(device)
    files.want(models[:2], 1 << 30)
    registered(files)
    monkeypatch.setattr(device, "register_window", lambda: 2 * CHUNK)
    assert load(device, models[2]) == content(models[2])
    files.want(models[:1], 1 << 30)
    registered(files)
    assert load(device, models[0], RANGES["backwards"]) == content(models[0], RANGES["backwards"])


def test_only_weights_that_are_copied_as_they_lie_and_are_in_memory(device, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "a.safetensors", "b.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(bytes(CHUNK))
    (tmp_path / "x.gguf").write_bytes(bytes(CHUNK))
    (tmp_path / "empty.zse").write_bytes(b"")
    files = RegisteredFiles(device)
    files.want(
        [str(folder), str(tmp_path / "x.gguf"), str(tmp_path / "empty.zse"), str(tmp_path / "none.zse")], 1 << 30
    )
    assert registered(files) == 2
    files.want((), None)
    with open(folder / "b.safetensors", "wb") as file:
        file.truncate(CHUNK)  # a hole: no page of it is in memory, whatever is_cold says
    monkeypatch.setattr(registered_files.ModelFile, "is_cold", False)
    files.want([str(folder)], 1 << 30)
    assert registered(files) == 1
    files.want((), None)
    with open(folder / "b.safetensors", "r+b") as file:
        file.write(bytes(CHUNK * 31 // 32))
    files.want([str(folder)], 1 << 30)
    assert registered(files) == 2, "what no model needs of its file is not there after a load, but is little"
    files.want((), None)
    with monkeypatch.context() as patched:
        patched.setattr(registered_files, "_is_same", lambda file: False)
        files.want([str(folder)], 1 << 30)
        assert registered(files) == 0, "a file system of which fstat() and stat() say different things"
    monkeypatch.setattr(registered_files.ModelFile, "is_cold", True)
    files.want([str(folder)], 1 << 30)
    assert registered(files) == 0


def test_what_the_driver_refuses_is_left_to_the_load(device, fake, models):
    files = RegisteredFiles(device)
    fake.refused = 1
    fake.fail("host_register", 801, after=2)
    files.want(models[:2], 1 << 30)
    assert registered(files) == 2
    files.look_again()
    assert registered(files) == 0, "it is not asked over and over"
    assert load(device, models[0]) == content(models[0])


def test_a_device_that_is_lost_says_so(driver_library, tmp_path, models, monkeypatch):
    monkeypatch.setattr(gpu_load, "CHUNK_BYTES", CHUNK)
    fake = Fake(driver_library, tmp_path)
    device = CUDADevice(0, CUDADriver(fake.path), kernels())
    files = RegisteredFiles(device)
    fake.fail("host_register", 700, times=-1)
    files.want(models[:1], 1 << 30)
    with pytest.raises(DeviceLost):
        files.register_next()
    device.close()


def test_a_device_that_cannot_read_files_registers_none(device, fake, models):
    device.can_register = False
    files = RegisteredFiles(device)
    files.want(models, 1 << 30)
    assert registered(files) == 0
    assert load(device, models[0]) == content(models[0])


def test_a_load_that_fails_gives_everything_back(device, fake, models):
    files = RegisteredFiles(device)
    files.want(models, 1 << 30)
    registered(files)
    fake.fail("to_device_async", 1)
    with pytest.raises(Exception, match="loading"):
        load(device, models[0])
    device.tidy_loads()
    assert fake.count("host_unregister") == 15


def test_whether_nothing_is_left_to_register(device, models):
    """Then a load may begin before the engine is built."""
    files, opened = RegisteredFiles(device), [registered_files.ModelFile(path) for path in models[:2]]
    files.want(models[:2], 1 << 30)
    while not files.hold(opened[:1]):
        assert files.register_next()
    assert not files.hold(opened)
    registered(files)
    assert files.hold(opened)
    os.utime(models[1], ns=(5, 5))
    assert files.hold(opened[:1]) and not files.hold(opened[1:])
    for file in opened:
        file.close()


def test_a_parked_engine_registers_what_it_may_load(device, fake, models, monkeypatch):
    """It goes on until it is told which one it is, and says nothing meanwhile."""
    monkeypatch.setattr(worker.load, "park", lambda options: SimpleNamespace(result=lambda: device))
    monkeypatch.setattr(worker, "LOOK_AGAIN_S", 0.05)
    ours, theirs = socket.socketpair()
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(worker._wait_for_load(FrameSocket(theirs), [], Phases(time.perf_counter)))
    )
    waiting.start()
    ours.sendall(encode(Expect(models[:2], None)))
    deadline = time.monotonic() + 30
    while fake.count("host_register") < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.count("host_register") == 10
    # A file that was replaced is not kept on its disk and in memory, and the new one is there as soon.
    os.replace(models[2], models[0])
    deadline = time.monotonic() + 30
    while fake.count("host_register") < 15 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.count("host_register") == 15 and fake.count("host_unregister") == 5
    ours.sendall(encode(LoadModel(["--model", models[1]])))
    waiting.join()
    assert found[0][0] == ["--model", models[1]]
    assert load(device, models[1]) == content(models[1]) and fake.count("host_register") == 15
    assert FrameReader(FromEngine).feed(ours.recv(1 << 16))[0].__class__ is Parked
    ours.close(), theirs.close()


def test_close_gives_everything_back(device, models):
    files = RegisteredFiles(device)
    files.want(models, 1 << 30)
    registered(files)
