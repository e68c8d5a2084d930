"""Collectives in shared memory: real processes, symbolic rows, parts longer than a slot, and ranks that are not there."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from zse.errors import ConfigError, GroupError
from zse.parallel.collectives import host
from zse.parallel.group import RankGroup
from zse.runtime.opening import open_device
from zse.tensor import OwnRows, Tensor

RANK = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from parallel import test_host_collectives as test
test.play(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
"""
WIDTHS = (48, 16, 32)


def numbers(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


def play(rank: int, size: int, descriptor: int, seconds: float = 0.0) -> None:
    """What every rank does; the checks are the same on all."""
    group = RankGroup.join(rank, size, descriptor) if rank else PLAYED[0]
    told = [b"x" * (rank * host.SMALL_BYTES + 1) for rank in range(size)]
    assert group.exchange(told[rank]) == told
    with open_device("cpu", threads=1) as device:
        group.connect(device)
        buffer = device.alloc(1 << 24)
        for dtype, rows, width in (("f32", 7, 96), ("f32", 2000, 1024), ("bf16", 5, 64)):
            check_sum(device, group, buffer, dtype, rows, width)
        for rows in (3, 40_000):
            check_gather(device, group, buffer, rows)
        check_broadcast(device, group, buffer)
        for turn, (rows, width) in enumerate(((5, 24), (900, 1024), (1, 8), (64, 512))):
            check_rows(device, group, rows, width, turn)
    group.close()


def check_sum(device, group, buffer, dtype: str, rows: int, width: int) -> None:
    parts = [numbers(rank, rows, width) for rank in range(group.size)]
    if dtype == "bf16":
        parts = [(part.view(np.uint32) & 0xFFFF0000).view(np.float32) for part in parts]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    mine = parts[group.rank] if dtype == "f32" else (parts[group.rank].view(np.uint32) >> 16).astype(np.uint16)
    recorder = device.record()
    tensor = Tensor(buffer, (recorder.symbol("tokens", rows), width), dtype)
    group.all_reduce(recorder, tensor, tensor)
    graph = recorder.finish()
    whole_tensor = tensor.with_rows(rows)
    whole_tensor.view()[:] = memoryview(np.ascontiguousarray(mine)).cast("B").cast(whole_tensor.view().format)
    graph.run(tokens=rows - 1)
    found = np.array(whole_tensor.view()).reshape(rows, width)
    assert np.array_equal(found[-1], mine[-1])  # beyond the run's tokens nothing is touched
    if dtype == "f32":
        assert np.array_equal(found[:-1], whole[:-1])
    else:
        wide = (found.astype(np.uint32) << 16).view(np.float32)
        assert np.abs(wide[:-1] - whole[:-1]).max() <= 2**-7 * np.abs(whole).max()  # one rounding to 8 bits
    graph.close()


def check_gather(device, group, buffer, rows: int) -> None:
    widths = WIDTHS[: group.size]
    mine = Tensor(buffer, (rows, widths[group.rank]), "f32")
    whole = Tensor(device.alloc(4 * rows * sum(widths)), (rows, sum(widths)), "f32")
    mine.view()[:] = memoryview(numbers(group.rank, rows, widths[group.rank])).cast("B").cast("f")
    device.run(lambda recorder: group.gather(recorder, mine, whole, widths))
    expected = np.concatenate([numbers(rank, rows, width) for rank, width in enumerate(widths)], axis=1)
    found = np.array(whole.view()).reshape(rows, -1)
    assert np.array_equal(found, expected if group.rank == 0 else 0 * expected)
    device.run(lambda recorder: group.all_gather(recorder, mine, whole, widths))
    assert np.array_equal(np.array(whole.view()).reshape(rows, -1), expected)


def check_broadcast(device, group, buffer) -> None:
    tensor = Tensor(buffer, (9,), "i32")
    tensor.view()[:] = memoryview(np.arange(9, dtype=np.int32) + 100 * group.rank).cast("B").cast("i")
    device.run(lambda recorder: group.broadcast(recorder, tensor))
    assert tensor.view().tolist() == list(range(9))


def check_rows(device, group, rows: int, width: int, turn: int) -> None:
    """Rows go to all ranks, parts of sums to who has the row; of some steps a rank has none. Poisoned where nobody may read or write."""
    rng = np.random.default_rng(turn)
    most, recorder = rows + 3, device.record()
    owner = rng.integers(turn == 1, group.size, rows).astype(np.int32)
    mine = np.flatnonzero(owner == group.rank).astype(np.int32)
    place = np.full(rows, most, np.int32)
    place[mine] = np.arange(len(mine))
    own = OwnRows(*(Tensor(device.alloc(4 * most), (most,), "i32") for _ in OwnRows._fields))
    for tensor, numbers_of in ((own.rows, mine), (own.place, place), (own.owner, owner)):
        tensor.with_rows(len(numbers_of)).view()[:] = memoryview(numbers_of)
    tokens, few = recorder.symbol("tokens", most), recorder.symbol("own", most)
    x, parts, whole, sums = (Tensor(device.alloc(4 * most * width), (most, width), "f32") for _ in range(4))
    places = np.where(np.arange(most)[:, None] < len(mine), numbers(group.rank + 10, most, width), np.nan)
    for tensor, filled in ((x, places), (parts, numbers(group.rank, most, width)), (whole, np.nan), (sums, np.nan)):
        tensor.view()[:] = memoryview(np.full((most, width), filled, np.float32).ravel())
    for _ in range(2):
        group.spread_rows(recorder, x.with_rows(few), whole.with_rows(tokens), own)
        group.collect_sums(recorder, parts.with_rows(tokens), sums.with_rows(few), own)
    graph = recorder.finish()
    graph.run(tokens=rows, own=len(mine))
    expected, total = np.full((most, width), np.nan, np.float32), numbers(0, most, width)
    for rank in range(group.size):
        theirs = owner == rank
        expected[:rows][theirs] = numbers(rank + 10, most, width)[: theirs.sum()]
        total = total + numbers(rank, most, width) if rank else total
    found, added = (np.array(tensor.view()).reshape(most, width) for tensor in (whole, sums))
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(added[: len(mine)], total[mine]) and np.isnan(added[len(mine) :]).all()
    with pytest.raises(ValueError, match="spread_rows of f32"):
        group.spread_rows(device.record(), x, Tensor(whole.buffer, (most, width), "i32"), own)
    with pytest.raises(ValueError, match="collect_sums of f32"):
        group.collect_sums(device.record(), parts, Tensor(sums.buffer, (most, width + 1), "f32"), own)
    graph.close()


PLAYED: list[RankGroup] = []


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_same(size):
    group = RankGroup.create(size)
    ranks = []
    os.set_inheritable(group.descriptor, True)
    for rank in range(1, size):
        text = RANK.format(tests=os.path.dirname(os.path.dirname(__file__)))
        command = [sys.executable, "-c", text, str(rank), str(size), str(group.descriptor)]
        ranks.append(subprocess.Popen(command, close_fds=False))
    PLAYED[:] = [group]
    play(0, size, -1)
    assert [rank.wait(20) for rank in ranks] == [0] * (size - 1)


def test_a_rank_that_is_not_there_ends_the_wait(monkeypatch):
    monkeypatch.setenv("ZSE_GROUP_TIMEOUT_S", "0.2")
    group = RankGroup.create(2)
    began = time.monotonic()
    with pytest.raises(GroupError, match="rank 0 waited 0.2 s for the other ranks"):
        group.exchange(b"hello")
    assert time.monotonic() - began < 5
    group.close()
    group.close()


def test_a_rank_that_ended_is_told_at_once():
    group = RankGroup.create(2)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other.send_signal(signal.SIGKILL)

    def look() -> None:
        if other.poll() is not None:
            raise GroupError(f"rank 1 was killed by signal {-other.returncode}")

    group.look = look
    with pytest.raises(GroupError, match="killed by signal 9"):
        group.exchange(b"hello")
    group.close()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "1e9", "nan"])
def test_a_time_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv("ZSE_GROUP_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match=f"ZSE_GROUP_TIMEOUT_S={text} is not a number of seconds"):
        RankGroup.create(2)


def test_memory_of_another_group_is_refused():
    group = RankGroup.create(2)
    for rank, size in ((1, 3), (2, 2), (0, 2)):
        with pytest.raises(GroupError, match="is not that of such a group"):
            RankGroup.join(rank, size, group.descriptor)
    group.close()
