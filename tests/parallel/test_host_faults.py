"""Collectives in shared memory where it is hard: many rounds, threads, odd sizes, ranks that die, leave or stay away."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import message_of, recorded_sum, run_ranks

from zse import build
from zse.errors import GroupError
from zse.parallel.group import RankGroup
from zse.runtime.cpu import CPUDevice
from zse.tensor import Tensor

CSRC = Path(build.__file__).parent / "runtime" / "csrc"
ROWS = (1, 3, 1024, 0, 11, 1000)


@pytest.fixture
def create():
    """Rank 0 of new groups; other ranks join by the descriptor after the fork."""
    made = []

    def group(size: int) -> RankGroup:
        made.append(RankGroup.create(size))
        return made[-1]

    yield group
    for one in made:
        one.close()


def mine(group: RankGroup, rank: int) -> RankGroup:
    return RankGroup.join(rank, group.size, group.descriptor) if rank else group


def part(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(100 * count + rank).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_the_bits_of_the_order_of_ranks(create, size):
    """Parts of one barrier and of two, of several threads, after one another in one recording."""
    first, width = create(size), 97

    def work(rank):
        group, found = mine(first, rank), []
        with CPUDevice(3) as device:
            group.connect(device)
            x, out = device.alloc(4 * 1024 * width), device.alloc(4 * 1024 * width)
            recorder = device.record()
            rows = recorder.symbol("rows", 1024)
            hidden, other = Tensor(x, (rows, width), "f32"), Tensor(out, (rows, width), "f32")
            group.all_reduce(recorder, hidden, other)
            group.all_reduce(recorder, other, other)
            group.broadcast(recorder, hidden)
            graph = recorder.finish()
            for count in ROWS:
                device.write(hidden.with_rows(count), part(rank, count * width).tobytes())
                graph.run(rows=count)
                found += [device.read(other.with_rows(count)), device.read(hidden.with_rows(count))]
            graph.close()
        return found

    expected = []
    for count in ROWS:
        total = part(0, count * width)
        for rank in range(1, size):
            total = total + part(rank, count * width)
        again = total
        for _ in range(1, size):
            again = again + total
        expected += [again.tobytes(), part(0, count * width).tobytes()]
    for found in run_ranks(size, work):
        assert found == expected


def test_ten_thousand_rounds_of_all_kinds(create):
    """Small and large parts, of any kind, in any order: no slot is written while another rank reads it."""
    first, rounds, most = create(2), 10_000, 100_000

    def work(rank):
        group, bad = mine(first, rank), 0
        with CPUDevice(1) as device:
            group.connect(device)
            x, out = device.alloc(4 * most), device.alloc(8 * most)
            numbers, both = np.frombuffer(x.view(), np.float32), np.frombuffer(out.view(), np.float32)

            def recorded(kind):
                recorder = device.record()
                count = recorder.symbol("count", most)
                one = Tensor(x, (count, 1), "f32")
                record = (
                    lambda: group.all_reduce(recorder, one, one),
                    lambda: group.gather(recorder, one, Tensor(out, (count, 2), "f32"), (1, 1)),
                    lambda: group.broadcast(recorder, one),
                )
                record[kind]()
                return recorder.finish()

            graphs = [recorded(kind) for kind in range(3)]
            order = np.random.default_rng(3)
            kinds, sizes = order.integers(0, 3, rounds).tolist(), order.integers(1, 400, rounds)
            sizes[order.integers(0, rounds, 300)] = most
            for number, (kind, count) in enumerate(zip(kinds, sizes.tolist(), strict=True)):
                numbers[:count] = number + rank
                graphs[kind].run(count=count)
                if kind == 1:
                    bad += not rank and not (both[: 2 * count].reshape(count, 2) == (number, number + 1)).all()
                else:
                    bad += not (numbers[:count] == (2 * number + 1, 0, number)[kind]).all()
            for graph in graphs:
                graph.close()
        return bad

    assert run_ranks(2, work) == [0, 0]


def test_a_killed_rank_ends_the_group_by_name(create):
    """Of three ranks one dies in the middle, without a word: the others know within a second, one in a recording and one
    in an exchange."""
    first = create(3)

    def work(rank):
        group = mine(first, rank)
        with CPUDevice(2) as device:
            group.connect(device)
            graph = recorded_sum(group, device)
            for _ in range(50):
                graph.run()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            message = message_of(graph.run if rank else lambda: group.exchange(b"more"))
            again = message_of(graph.run)
            return message, again, time.monotonic() - begin

    first_answer, _, third = run_ranks(3, work, killed=(1,))
    for message, again, seconds in (first_answer, third):
        assert "rank 1 (process " in message and message == again
        assert seconds < 1
    assert "has ended" in first_answer[0] or "has ended" in third[0]


def test_a_rank_that_leaves_or_stays_away_ends_the_group(create, monkeypatch):
    monkeypatch.setenv("ZSE_GROUP_TIMEOUT_S", "0.3")
    leaving, waiting = create(2), create(2)

    def work(rank):
        group, other = mine(leaving, rank), mine(waiting, rank)
        with CPUDevice(2) as device:
            group.connect(device)
            other.connect(device)
            graph, late = recorded_sum(group, device), recorded_sum(other, device)
            if rank:
                group.host.close()
                time.sleep(0.8)
                return message_of(lambda: group.exchange(b"")), message_of(late.run)
            left, begin = message_of(graph.run), time.monotonic()
            return left, message_of(late.run), time.monotonic() - begin

    (left, late, seconds), (closed, told) = run_ranks(2, work)
    assert left.startswith("rank 0 of 2: rank 1 (process ") and left.endswith(" has left the group")
    assert late.startswith("rank 0 of 2: waited 0.3 s for rank 1 (process ") and 0.25 < seconds < 2
    assert closed == "rank 1 of 2: the group was closed"
    assert told.startswith("rank 1 of 2: another rank ended the group because of rank 1 (process ")


def test_what_does_not_fit_is_refused(create):
    group, gone = create(2), subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(GroupError, match=f"rank 1 \\(process {gone.pid}\\) has ended"):
        group.host.watch([os.getpid(), gone.pid])
    with CPUDevice(1) as device:
        x = device.alloc(64)
        recorder = device.record()
        rows = recorder.symbol("rows", 1 << 20)
        wide = Tensor(x, (rows, 256), "f32")
        with pytest.raises(ValueError, match="a part of 1,073,741,824 bytes; ranks share at most 268,435,456"):
            group.host.all_reduce(recorder, wide, wide)
        with pytest.raises(ValueError, match="all_reduce of i32"):
            group.host.all_reduce(recorder, Tensor(x, (4,), "i32"), Tensor(x, (4,), "i32"))
        with pytest.raises(ValueError, match="gather of f32"):
            group.host.gather(recorder, Tensor(x, (4, 2), "f32"), Tensor(x, (4, 2), "f32"), (2, 1))
        with pytest.raises(ValueError, match="widths"):
            group.host.gather(recorder, Tensor(x, (4, 2), "f32"), Tensor(x, (4, 2), "f32"), (2,))


@pytest.mark.parametrize("ranks, hosts", [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_no_data_race(tmp_path, ranks, hosts):
    """Ranks as threads of one process, under ThreadSanitizer; the ring, and sockets between hosts."""
    compiler, _ = build.find_compiler()
    program = tmp_path / "stress"
    sources = [Path(__file__).with_name("collective_stress.c"), CSRC / "collective.c", CSRC / "collective_hosts.c"]
    flags = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-fsanitize=thread", f"-I{CSRC}"]
    done = subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], capture_output=True, text=True)
    if done.returncode and ("tsan" in done.stderr or "sanitize" in done.stderr):
        pytest.skip(f"this compiler has no ThreadSanitizer: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(program), str(ranks), str(hosts), "500"], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run under this kernel's address layout")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[:4000]
