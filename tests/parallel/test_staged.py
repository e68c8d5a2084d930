"""GPUs that do not reach each other: collectives through page-locked memory and what processes share, over the fake driver."""

import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks

from zse.parallel.collectives.staged import StagedCollectives
from zse.parallel.group import RankGroup
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cuda import CUDADevice
from zse.tensor import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import gpu_fixtures

WIDTHS = (40, 24, 8)
SIZE, ROWS = 3, 50_000


def part(rank: int, rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal((rows, width)).astype(np.float32)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return gpu_fixtures.compile_driver(tmp_path_factory.mktemp("driver"))


def test_ranks_agree_without_peers(library, tmp_path):
    """A sum in place and one apart, gathers to one and to all and a broadcast in one recording: walked, then replayed as a captured graph."""
    first = RankGroup.create(SIZE)

    def work(rank):
        folder = tmp_path / str(rank)
        folder.mkdir()
        group = RankGroup.join(rank, SIZE, first.descriptor) if rank else first
        found = []
        with CUDADevice(0, CUDADriver(gpu_fixtures.Fake(library, folder).path), gpu_fixtures.kernels()) as device:
            group.connect(device)
            assert isinstance(group._collectives, StagedCollectives)
            recorder = device.record()
            rows = recorder.symbol("rows", ROWS)
            x, total = (Tensor(device.alloc(4 * ROWS * 8), (rows, 8), "f32") for _ in range(2))
            mine = Tensor(device.alloc(4 * 5 * WIDTHS[rank]), (5, WIDTHS[rank]), "f32")
            whole = Tensor(device.alloc(4 * 5 * sum(WIDTHS)), (5, sum(WIDTHS)), "f32")
            everywhere = Tensor(device.alloc(4 * 5 * sum(WIDTHS)), (5, sum(WIDTHS)), "f32")
            news = Tensor(device.alloc(44), (11,), "i32")
            group.all_reduce(recorder, x, total)
            group.all_reduce(recorder, total, total)
            group.gather(recorder, mine, whole, WIDTHS)
            group.all_gather(recorder, mine, everywhere, WIDTHS)
            group.broadcast(recorder, news)
            graph = recorder.finish()
            device.write(mine, part(rank, 5, WIDTHS[rank]).tobytes())
            for turn in range(4):
                device.write(x.with_rows(ROWS), part(rank + 10 * turn, ROWS, 8).tobytes())
                device.write(news, np.full(11, rank + 100 * turn, np.int32).tobytes())
                graph.run(rows=3)
                found.append([device.read(tensor) for tensor in (total.with_rows(3), whole, everywhere, news)])
            assert graph.num_captured == 1
            graph.close()
            group.close()
        return found

    answers = run_ranks(SIZE, work)
    gathered = np.concatenate([part(rank, 5, width) for rank, width in enumerate(WIDTHS)], 1).tobytes()
    for turn in range(4):
        parts = [part(rank + 10 * turn, ROWS, 8)[:3] for rank in range(SIZE)]
        once = parts[0] + parts[1] + parts[2]
        for rank, found in enumerate(answers):
            total, whole, everywhere, news = found[turn]
            assert total == (once + once + once).tobytes()
            assert whole == (gathered if not rank else bytes(len(gathered)))
            assert everywhere == gathered
            assert news == np.full(11, 100 * turn, np.int32).tobytes()
    first.close()


def test_a_ring_without_peers(library, tmp_path):
    """A pipeline's ranks: rank 0 sends as many messages as there are ranks before it takes the first back, in another recording. They
    are of recordings for few rows and for many by turns, which lie in the same memory."""
    first, turns = RankGroup.create(SIZE), 12

    def work(rank):
        folder = tmp_path / str(rank)
        folder.mkdir()
        group = RankGroup.join(rank, SIZE, first.descriptor) if rank else first
        found = []
        with CUDADevice(0, CUDADriver(gpu_fixtures.Fake(library, folder).path), gpu_fixtures.kernels()) as device:
            group.connect(device)

            def recorded(whole, *what):
                recorder = device.record()
                rows = recorder.symbol("rows", whole.shape[0])
                for each in what:
                    each(recorder, whole.with_rows(rows))
                return recorder.finish()

            steps = []
            for most in (4, 9):
                whole = Tensor(device.alloc(4 * most * 8), (most, 8), "f32")
                both = [[group.send], [group.receive]] if not rank else [[group.receive, group.send], []]
                steps.append((whole, *(recorded(whole, *what) for what in both)))
            for turn in range(turns + SIZE - 1):
                if turn < turns:
                    whole, graph, _ = steps[turn % 2]
                    if not rank:
                        device.write(whole, part(turn, *whole.shape).tobytes())
                    graph.run(rows=2)
                if not rank and turn >= SIZE - 1:
                    whole, _, back = steps[(turn - SIZE + 1) % 2]
                    device.write(whole, bytes(whole.nbytes))
                    back.run(rows=2)
                    found.append(device.read(whole.with_rows(2)))
            group.exchange(b"")
            for _, *graphs in steps:
                for graph in graphs:
                    graph.close()
            group.close()
        return found

    found = run_ranks(SIZE, work)[0]
    assert found == [part(turn, (4, 9)[turn % 2], 8)[:2].tobytes() for turn in range(turns)]
    first.close()
