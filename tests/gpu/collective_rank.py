"""One rank of tests/gpu/test_collectives.py: `python collective_rank.py RANK SIZE DESCRIPTOR WHAT`, and what rank 0 does as well."""

import os
import signal
import sys
import time
from functools import reduce
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from gpu.harness import LazyKernels
from gpu.machine import isa
from zse.errors import GroupError
from zse.parallel.group import RankGroup
from zse.quant.pack import bf16_to_f32, f32_to_bf16
from zse.quant.scheme import DenseScheme
from zse.runtime.cuda import CUDADevice
from zse.tensor import OwnRows, Tensor, Weight

REPLAYS = 200


def numbers(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1000 * rank + sum(shape)).standard_normal(shape).astype(np.float32)


def tensor(gpu, array: np.ndarray, dtype: str = "f32", rows=None) -> Tensor:
    buffer = gpu.alloc(max(array.nbytes, 1))
    gpu.write(buffer, array.tobytes())
    return Tensor(buffer, (array.shape[0] if rows is None else rows, *array.shape[1:]), dtype)


def read(gpu, like: Tensor, kind, rows: int) -> np.ndarray:
    found = np.frombuffer(gpu.read(like.with_rows(rows)), kind)
    return found.reshape(rows, *like.shape[1:])


def sums(group, gpu) -> None:
    """Every form, of symbolic rows, in one recording that is replayed as a captured graph with several numbers of rows."""
    rank, size, most = group.rank, group.size, 3000
    recorder = gpu.record()
    small, large = recorder.symbol("small", 16), recorder.symbol("large", most)
    inputs = {name: numbers(rank, rows, 1024) for name, rows in (("small", 16), ("large", most))}
    given, out = {}, {}
    for name, rows in (("small", small), ("large", large)):
        for dtype in ("f32", "bf16"):
            array = inputs[name] if dtype == "f32" else f32_to_bf16(inputs[name])
            given[name, dtype] = tensor(gpu, array, dtype, rows)
            out[name, dtype] = tensor(gpu, np.zeros_like(array), dtype, rows)
            group.all_reduce(recorder, given[name, dtype], out[name, dtype])
    eight, half = (tensor(gpu, np.zeros((most, 1024), np.float32), "f32", large) for _ in range(2))
    few = tensor(gpu, np.zeros((16, 1024), np.float32), "f32", small)
    group.peers.reduce_by("int8", recorder, given["large", "f32"], eight)
    group.peers.reduce_by("large half", recorder, given["large", "f32"], half)
    group.peers.reduce_by("small half", recorder, given["small", "f32"], few)
    graph = recorder.finish()
    for rows in ((1, 1), (16, most), (7, 999), (1, 0), (1, 1), (1, 1)):
        graph.run(small=rows[0], large=rows[1])
        for (name, dtype), result in out.items():
            count = rows[name == "large"]
            parts = [numbers(r, *inputs[name].shape)[:count] for r in range(size)]
            halves = [bf16_to_f32(f32_to_bf16(part)) for part in parts]
            if dtype == "bf16":
                parts = halves
            expected = parts[0]
            for part in parts[1:]:
                expected = expected + part
            if dtype == "bf16":
                assert np.array_equal(read(gpu, result, np.uint16, count), f32_to_bf16(expected)), (name, dtype, rows)
            else:
                assert np.array_equal(read(gpu, result, np.float32, count), expected), (name, dtype, rows)
                short = read(gpu, half if name == "large" else few, np.float32, count)
                if name == "small" or size == 2:
                    assert np.array_equal(short, reduce(np.add, halves)), (name, rows)
                else:  # one rank adds, and rounds the sum
                    bound = 2.0**-8 * (sum(map(np.abs, parts)) + np.abs(expected)) * 1.01
                    assert (np.abs(short - expected) <= bound).all(), (name, rows)
        found = read(gpu, eight, np.float32, rows[1])
        parts = [numbers(r, most, 1024)[: rows[1]] for r in range(size)]
        tops = sum(np.abs(part).reshape(-1, 32).max(1) for part in parts).repeat(32).reshape(found.shape)
        assert (np.abs(found - sum(parts)) <= tops * (2.02 / 254)).all()
        told = group.exchange(found.tobytes()[:4096])
        assert all(other == told[0] for other in told)
    graph.close()


def replays(group, gpu) -> None:
    """A captured graph of in-place sums of all forms, replayed again and again with ranks that are late by turns."""
    rank, size = group.rank, group.size
    recorder, ones = gpu.record(), np.ones((8, 1024), np.float32)
    x = tensor(gpu, ones)
    wide = tensor(gpu, np.ones((2048, 1024), np.float32))
    group.all_reduce(recorder, x, x)
    group.all_reduce(recorder, wide, wide)
    group.all_reduce(recorder, x, x)
    graph = recorder.finish()
    for number in range(REPLAYS):
        gpu.write(x, (ones * (number + rank)).tobytes())
        if number % 20 == rank:
            gpu.write(wide, np.full((2048, 1024), 1, np.float32).tobytes())
            time.sleep(0.002)
        graph.run()
        assert (read(gpu, x, np.float32, 8) == size * (size * number + size * (size - 1) // 2)).all(), number
        gpu.write(wide, np.full((2048, 1024), rank + number, np.float32).tobytes())
    graph.run()
    assert (read(gpu, wide, np.float32, 2048) == size * (REPLAYS - 1) + size * (size - 1) // 2).all()
    graph.close()


def others(group, gpu) -> None:
    """Gathers to one and to all, and broadcast."""
    rank, size = group.rank, group.size
    widths = [64 * (r + 1) for r in range(size)]
    recorder = gpu.record()
    rows = recorder.symbol("rows", 500)
    x = tensor(gpu, numbers(rank, 500, widths[rank]), "f32", rows)
    out = tensor(gpu, np.zeros((500, sum(widths)), np.float32), "f32", rows)
    news = tensor(gpu, np.arange(77, dtype=np.int32) + 1000 * rank, "i32")
    halves = [2 * width for width in widths]  # of two bytes each
    mine = Tensor(x.buffer, (rows, halves[rank]), "bf16", x.offset)
    every = tensor(gpu, np.zeros((500, sum(widths)), np.float32), "f32", rows)
    group.gather(recorder, x, out, widths)
    group.all_gather(recorder, mine, Tensor(every.buffer, (rows, sum(halves)), "bf16", every.offset), halves)
    group.broadcast(recorder, news)
    graph = recorder.finish()
    for count in (1, 500, 3, 3, 3):
        graph.run(rows=count)
        expected = np.concatenate([numbers(r, 500, width)[:count] for r, width in enumerate(widths)], 1)
        assert np.array_equal(read(gpu, every, np.float32, count), expected)
        if not rank:
            assert np.array_equal(read(gpu, out, np.float32, count), expected)
        assert np.array_equal(read(gpu, news, np.int32, 77), np.arange(77))
    graph.close()


def rows(group, gpu) -> None:
    """Rows to all ranks and sums to their owners, one after the other as in a model, replayed as captured graphs with ranks that are late by
    turns, of steps of which some ranks have nothing."""
    rank, size, rng = group.rank, group.size, np.random.default_rng(5)
    for most, width in ((16, 1024), (64, 2048), (3000, 2048)):
        recorder = gpu.record()
        tokens, few = recorder.symbol("tokens", most), recorder.symbol("own", most)
        own = OwnRows(*(tensor(gpu, np.zeros(most, np.int32), "i32") for _ in OwnRows._fields))
        given, added = (numbers(rank, most, width), few), (numbers(rank + size, most, width), tokens)
        x, parts = (tensor(gpu, array, "f32", count) for array, count in (given, added))
        whole, sums_of = (tensor(gpu, np.zeros((most, width), np.float32), "f32", count) for count in (tokens, few))
        halves = [tensor(gpu, array, "bf16", few) for array in (f32_to_bf16(given[0]),)]
        halves.append(tensor(gpu, np.zeros((most, width), np.uint16), "bf16", tokens))
        wanted = tensor(gpu, np.zeros(most, np.int32), "i32", tokens)
        some, some_sums = (tensor(gpu, np.zeros((most, width), np.float32), "f32", count) for count in (tokens, few))
        for _ in range(3):
            group.spread_rows(recorder, x, some, own, wanted)
            group.collect_sums(recorder, parts, some_sums, own, wanted)
            group.spread_rows(recorder, x, whole, own)
            group.spread_rows(recorder, *halves, own)
            group.collect_sums(recorder, parts, sums_of, own)
        graph = recorder.finish()
        for number in range(30):
            count = most if number == 1 else int(rng.integers(1, most + 1))
            owner = rng.integers(0, size, count).astype(np.int32) * int(number % 4 > 0)
            mine = np.flatnonzero(owner == rank).astype(np.int32)
            place = np.full(count, most, np.int32)
            place[mine] = np.arange(len(mine))
            for where, values in ((own.rows, mine), (own.place, place), (own.owner, owner)):
                if len(values):
                    gpu.write(where.with_rows(len(values)), values.tobytes())
            bits = rng.integers(0, 1 << size, count).astype(np.int32)
            gpu.write(wanted.with_rows(count), bits.tobytes())
            gpu.write(some.with_rows(most), np.full((most, width), -7, np.float32).tobytes())
            if number % 10 == rank:
                time.sleep(0.002)
            graph.run(tokens=count, own=len(mine))
            expected = np.zeros((count, width), np.float32)
            for r in range(size):
                expected[owner == r] = numbers(r, most, width)[: (owner == r).sum()]
            total = reduce(np.add, [numbers(r + size, most, width)[:count] for r in range(size)])
            assert np.array_equal(read(gpu, whole, np.float32, count), expected), (most, number)
            assert np.array_equal(read(gpu, halves[1], np.uint16, count), f32_to_bf16(expected)), (most, number)
            if len(mine):
                assert np.array_equal(read(gpu, sums_of, np.float32, len(mine)), total[mine]), (most, number)
                heard = [(bits[mine] >> r & 1 | int(r == rank))[:, None] for r in range(size)]
                counted = [
                    np.where(h, numbers(r + size, most, width)[mine], np.float32(0)) for r, h in enumerate(heard)
                ]
                assert np.array_equal(read(gpu, some_sums, np.float32, len(mine)), reduce(np.add, counted)), (
                    most,
                    number,
                )
            came = (bits >> rank & 1 | (owner == rank))[:, None]
            assert np.array_equal(read(gpu, some, np.float32, count), np.where(came, expected, -7)), (most, number)
        graph.close()


def messages(group, gpu) -> None:
    """Round the ring: small, of two boxes, and of more, which go through the host's memory;
    replayed as captured graphs with ranks that are late by turns."""
    rank, most = group.rank, 40_000
    parts = []
    rows = {"few": 16, "many": 15_000, "most": most}
    for name, count in rows.items():
        recorder = gpu.record()
        given = tensor(gpu, numbers(0, count, 1024), "f32", recorder.symbol(name, count))
        taken = tensor(gpu, np.zeros((count, 1024), np.float32), "f32", recorder.symbol(name, count))
        assert group.peers.fits(recorder, given) == (name != "most")
        if rank:
            group.receive(recorder, taken)
        group.send(recorder, taken if rank else given)
        first = recorder.finish()
        recorder = gpu.record()
        recorder.symbol(name, count)
        if not rank:
            group.receive(recorder, taken)
        parts.append((name, numbers(0, count, 1024), taken, first, recorder.finish() if not rank else None))
    for number in range(30):
        for name, sent, taken, first, second in parts:
            if number % 10 == rank:
                time.sleep(0.002)
            used = min(len(sent), 1 + 700 * number)
            first.submit(**{name: used})
            if second is not None:
                second.run(**{name: used})
                assert np.array_equal(read(gpu, taken, np.float32, used), sent[:used]), (name, number)
    gpu.synchronize()
    for *_, first, second in parts:
        for graph in (first, second):
            if graph is not None:
                graph.close()


def norms(group, gpu) -> None:
    """Sums with the norm behind them, and products that push their parts, as in a model's layers: replayed as a captured graph with ranks that
    are late by turns and any number of rows. Numbers are whole and small, so every sum is exact, as bf16, too."""
    rank, rng, layers, width, inner = group.rank, np.random.default_rng(7), 6, 5120, 1024
    if group.size != 2:
        return
    group.peers._sent, group.peers._joins = "bf16", True
    recorder = gpu.record()
    tokens, whole = recorder.symbol("tokens", 64), lambda *shape: rng.integers(-1, 2, shape).astype(np.float32)
    a, w = ([[whole(rows, inner) for _ in range(2)] for _ in range(2)] for rows in (64, width))  # of turns, of ranks
    added, scale = [whole(64, width) for _ in range(2)], (1 + rng.random(width)).astype(np.float32)
    stream, part = (
        tensor(gpu, np.zeros((64, width), np.float32), "f32", tokens),
        tensor(gpu, added[rank], "f32", tokens),
    )
    weight, outs = tensor(gpu, scale), [tensor(gpu, np.zeros((64, width), np.uint16), "bf16", tokens) for _ in range(2)]
    given = [tensor(gpu, f32_to_bf16(a[turn][rank]), "bf16", tokens) for turn in range(2)]
    weights = [tensor(gpu, f32_to_bf16(w[turn][rank]), "bf16") for turn in range(2)]
    made = [Weight((width, inner), DenseScheme("bf16"), {"w": plane}, "rows") for plane in weights]
    assert group.pushes(64, width) and group.joins(64, width)
    for layer in range(layers):
        for turn in range(2):
            group.push(recorder, turn, given[turn], made[turn], None, 64)
            is_last = layer == layers - 1 and turn == 1
            group.pushed_norm(recorder, turn, stream, None if is_last else weight, None if is_last else outs[0], 1e-5)
        group.sum_norm(recorder, stream, part, weight, outs[1], 1e-5)
    graph, zeros = recorder.finish(), np.zeros((64, width), np.float32)
    each = sum(a[turn][r] @ w[turn][r].T for turn in range(2) for r in range(2)) + added[0] + added[1]
    for number in range(60):
        count = 64 if number < 20 else int(rng.integers(1, 65))
        gpu.write(stream.with_rows(64), zeros.tobytes())
        if number % 10 == rank:
            time.sleep(0.002)
        graph.run(tokens=count)
        found = read(gpu, stream, np.float32, count)
        assert np.array_equal(found, layers * each[:count]), (number, count)
        normed = bf16_to_f32(read(gpu, outs[1], np.uint16, count))
        exact = found / np.sqrt((found.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * scale
        assert (np.abs(normed - exact) <= 2.0**-8 * np.abs(exact) + 1e-6).all(), (number, count)
    graph.close()


def dies(group, gpu) -> None:
    """Rank 1 is killed: the others' kernels stop waiting within two seconds, and say so."""
    x = tensor(gpu, np.ones((8, 1024), np.float32))
    recorder = gpu.record()
    group.all_reduce(recorder, x, x)
    graph = recorder.finish()
    graph.run()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for _ in range(3):
            graph.run()
    except GroupError as error:
        assert "ended" in str(error) and time.monotonic() - begin < 2, error
        graph.close()
        return
    raise AssertionError("a rank that died was not noticed")


def play(group: RankGroup, what: str) -> None:
    with CUDADevice(group.rank, kernels=LazyKernels(isa())) as gpu:
        group.exact = True  # what is rounded is asked for by name
        group.connect(gpu)
        globals()[what](group, gpu)
        if what != "dies":
            group.exchange(b"")  # nobody leaves while another still reads its memory
        group.close()


if __name__ == "__main__":
    number, number_of, descriptor = map(int, sys.argv[1:4])
    play(RankGroup.join(number, number_of, descriptor), sys.argv[4])
