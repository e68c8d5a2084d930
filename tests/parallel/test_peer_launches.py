"""What PeerCollectives records: launches that fit the kernels' parameters, forms by size, parts of what no box holds, and the
numbers of a group of one in the emulator. (Kernels among several ranks: test_peer_kernels.py; on GPUs: tests/gpu.)"""

import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

from zse.errors import ConfigError, DeviceError, GroupError
from zse.kernel import cache
from zse.kernel.emit import emit_gpu
from zse.kernels.gpu import peers
from zse.parallel.collectives import peer
from zse.parallel.group import RankGroup
from zse.runtime.null import NullGPU
from zse.tensor import Tensor
from zse_emulator import EmulateDevice


class AlonePeers(peer.PeerCollectives):
    """Whose peers are itself."""

    def _map(self, group, device, nbytes):
        self._buffer = device.alloc(nbytes, "peers")
        return [self._buffer.address] * group.size


class Manifest(dict):
    """Parameters of the package's kernels, staged when asked for."""

    def __missing__(self, symbol):
        self[symbol] = {"params": emit_gpu(cache.package_variants("sm_90a")[symbol], "sm_90a")[1]["params"]}
        return self[symbol]


@pytest.fixture
def group():
    made = RankGroup.create(2)
    yield made
    made.close()


@pytest.fixture
def recorded(group):
    device = NullGPU(manifest=Manifest(none={}))
    return AlonePeers(group, device), device


def test_forms_by_size(recorded, monkeypatch):
    collectives, device = recorded
    recorder = device.record()
    memory = device.alloc(64)
    rows, many = recorder.symbol("rows", 16), recorder.symbol("many", 8192)

    def symbols(tensor, out=None):
        recorder.launches.clear()
        collectives.all_reduce(recorder, tensor, out or tensor)
        return [(launch.symbol, launch.grid, launch.args["begin"]) for launch in recorder.launches]

    (small,) = symbols(Tensor(memory, (rows, 4096), "f32"))
    assert small[0] == "all_reduce_small_f32_2" and small[1][0].value({"rows": 3}) == 12
    assert [name for name, _, _ in symbols(Tensor(memory, (2, 4096), "bf16"))] == ["all_reduce_small_bf16_2"]
    pieces = symbols(Tensor(memory, (many, 4096), "f32"))
    assert [begin for _, _, begin in pieces] == [0, 8 << 20, 16 << 20, 24 << 20]
    assert {name for name, _, _ in pieces} == {"all_reduce_large_half_2"}
    assert {grid for _, grid, _ in pieces} == {(128,)}  # in place; else as many blocks add
    apart = symbols(Tensor(memory, (many, 4096), "f32"), Tensor(device.alloc(64), (many, 4096), "f32"))
    assert {grid for _, grid, _ in apart} == {(256,)} and {launch.args["in_place"] for launch in recorder.launches} == {
        0
    }
    # 64 rows of 5,120 numbers are just too many as f32, and go one way as bf16.
    (half,) = symbols(Tensor(memory, (recorder.symbol("middle", 64), 5120), "f32"))
    assert half[0] == "all_reduce_small_half_2" and half[1][0].value({"middle": 3}) == 15
    # Sums of squares are as narrow, and stay f32 however many they are.
    assert [symbols(Tensor(memory, (rows, 8), "f32"))[0][0] for rows in (4096, 1 << 20)] == [
        "all_reduce_small_f32_2",
        "all_reduce_large_f32_2",
    ]
    collectives._group.exact = True
    exact = AlonePeers(collectives._group, device)
    monkeypatch.setenv("ZSE_ALL_REDUCE", "int8")
    short = AlonePeers(collectives._group, device)
    for collectives, form in ((exact, "f32"), (short, "int8")):
        assert symbols(Tensor(memory, (many, 64), "f32"))[0][0] == f"all_reduce_large_{form}_2"
    assert recorder.checks == [recorded[0].check, exact.check, short.check]
    monkeypatch.setenv("ZSE_ALL_REDUCE", "fp8")
    with pytest.raises(ConfigError, match="ZSE_ALL_REDUCE=fp8: expected one of f32, bf16, int8"):
        AlonePeers(collectives._group, device)
    for shape, dtype in (((4, 12), "f32"), ((4, 8), "i32")):
        with pytest.raises(ValueError, match="all_reduce of"):
            symbols(Tensor(memory, shape, dtype))


def test_gather_and_broadcast(recorded):
    collectives, device = recorded
    recorder, memory = device.record(), device.alloc(64)
    rows = recorder.symbol("rows", 64)
    collectives.gather(
        recorder, Tensor(memory, (rows, 80_000), "f32"), Tensor(memory, (rows, 152_000), "f32"), (80_000, 72_000)
    )
    wide = Tensor(memory, (rows, 160_000), "bf16"), Tensor(memory, (rows, 304_000), "bf16")
    collectives.gather(recorder, *wide, (160_000, 144_000), every=True)
    collectives.broadcast(recorder, Tensor(memory, (rows,), "i32"))
    assert [launch.symbol for launch in recorder.launches] == ["gather_peers_2"] * 3 + ["broadcast_peers_2"]
    assert [launch.args["begin"] for launch in recorder.launches[:3]] == [0, 0, 55]
    assert [launch.args["most"] for launch in recorder.launches[:3]] == [116, 55, 55]  # every rank's part comes to each
    assert [launch.args["every"] for launch in recorder.launches[:3]] == [0, 1, 1]
    with pytest.raises(ValueError, match="gather of"):
        collectives.gather(recorder, Tensor(memory, (1, 6), "f32"), Tensor(memory, (1, 12), "f32"), (6, 6))
    with pytest.raises(ValueError, match="broadcast of"):
        collectives.broadcast(recorder, Tensor(memory, (3,), "u8"))


def test_messages(recorded, group):
    """By the boxes as far as these have room, else through the host's memory; never a kernel that meets all ranks."""
    collectives, device = recorded
    recorder, memory = device.record(), device.alloc(64)
    rows, many = recorder.symbol("rows", 16), recorder.symbol("many", 4096)
    group.peers, staged = collectives, []
    group._staged = SimpleNamespace(
        send=lambda recorder, x: staged.append(x), receive=lambda recorder, x: staged.append(x)
    )
    group.send(recorder, Tensor(memory, (rows, 96), "f32"))
    group.receive(recorder, Tensor(memory, (many, 4096), "f32"))
    assert [launch.symbol for launch in recorder.launches] == ["send_peer_2", "receive_peer_2", "receive_peer_2"]
    assert [launch.args["begin"] for launch in recorder.launches] == [0, 0, 8 << 20]
    assert [launch.grid for launch in recorder.launches] == [(1,), (32,), (32,)] and not staged
    assert recorder.launches[0].args["count"].value({"rows": 3}) == 288
    for shape in ((many, 4100), (rows, 6)):
        group.send(recorder, Tensor(memory, shape, "f32"))
        group.receive(recorder, Tensor(memory, shape, "f32"))
        with pytest.raises(ValueError, match="send of f32"):
            collectives.send(recorder, Tensor(memory, shape, "f32"))
    assert len(staged) == 4 and len(recorder.launches) == 3


def test_a_message_to_itself(kept_kernels):
    """A group of one is its own next rank: what it sends comes back, again and again."""
    group = RankGroup.create(1)
    with EmulateDevice("sm_90a") as device:
        collectives = AlonePeers(group, device)
        given = np.random.default_rng(2).standard_normal((5, 1000)).astype(np.float32)
        recorder = device.record()
        rows = recorder.symbol("rows", 5)
        x, out = (Tensor(device.alloc(given.nbytes), (rows, 1000), "f32") for _ in range(2))
        collectives.send(recorder, x)
        collectives.receive(recorder, out)
        graph = recorder.finish()
        for count in (5, 1, 0, 3):
            device.write(x.with_rows(5), (given + count).tobytes())
            device.write(out.with_rows(5), bytes(given.nbytes))
            graph.run(rows=count)
            found = np.frombuffer(device.read(out.with_rows(5)), np.float32).reshape(given.shape)
            assert np.array_equal(found[:count], (given + count)[:count]) and not found[count:].any()
        graph.close()
        collectives.close()
    group.close()


def test_a_group_of_one_sums_its_own(kept_kernels):
    group = RankGroup.create(1)
    with EmulateDevice("sm_90a") as device:
        collectives = AlonePeers(group, device)
        given = np.random.default_rng(1).standard_normal((3, 1024)).astype(np.float32)
        x, out = (Tensor(device.alloc(given.nbytes), given.shape, "f32") for _ in range(2))
        device.write(x, given.tobytes())
        for form in ("small", "int8", "small half"):
            device.run(lambda recorder, form=form: collectives.reduce_by(form, recorder, x, out))
            found = np.frombuffer(device.read(out), np.float32).reshape(given.shape)
            assert np.abs(found - given).max() <= (0 if form == "small" else np.abs(given).max() / 250), form
            device.write(out, bytes(given.nbytes))
        collectives.close()
    group.close()


def test_a_process_that_ends_stops_the_kernels(recorded):
    collectives, _ = recorded
    reading, writing = os.pipe()
    collectives.watch([reading])
    collectives.check()
    os.close(writing)  # as a pidfd becomes readable
    end = time.monotonic() + 5
    while not collectives._stop_word.value and time.monotonic() < end:
        time.sleep(0.001)
    with pytest.raises(GroupError, match="rank 0 of 2: another rank has ended"):
        collectives.check()
    collectives._stop_word.value = peers.GAVE_UP
    with pytest.raises(GroupError, match="waited 60 s for the other GPUs"):
        collectives.check()
    collectives.close()
    os.close(reading)


def test_kernels_that_wait_end_when_the_group_is_closed(recorded):
    """Also where nobody has seen a process end yet: the driver would wait for them."""
    collectives, device = recorded
    reading, writing = os.pipe()
    collectives.watch([reading])
    collectives.close()
    assert collectives._stop_word.value == peers.STOPPED_BY_HOST
    for end in (reading, writing):
        os.close(end)


def test_more_ranks_than_kernels_are_for():
    group = RankGroup.create(9)
    with pytest.raises(DeviceError, match="up to 8 GPUs"):
        AlonePeers(group, NullGPU())
    group.close()
