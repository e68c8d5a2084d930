"""Rows that ranks have of their own, between GPUs: the kernels in the emulator, all ranks in one launch, against what NumPy makes; and
what PeerCollectives records of them."""

import numpy as np
import peer_row_kernels
import pytest
from test_peer_kernels import BOX, Group, in_order, kernel_of, rounded
from test_peer_launches import AlonePeers, group, recorded  # noqa: F401

from zse import kernel as zl
from zse.parallel.group import RankGroup
from zse.runtime.null import NullGPU
from zse.tensor import OwnRows, Tensor
from zse_emulator import EmulateDevice

POISON = np.uint32(0x7FC0DEAD)  # as f32 a NaN


def owners_of(rng, rounds: int, size: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of rows, of some rounds all one rank's, and places: others' are past the largest."""
    owner = rng.integers(0, size, (rounds, rows)).astype(np.int32)
    owner[rng.random(rounds) < 0.3] = rng.integers(size)
    place = np.full((rounds, size, rows), 1 << 20, np.int32)
    for i in range(rounds):
        for rank in range(size):
            mine = np.flatnonzero(owner[i] == rank)
            place[i, rank, mine] = np.arange(len(mine))
    return owner, place


def run(
    kind: str,
    size: int,
    rows: int,
    width: int,
    grid: int,
    rounds: int,
    seed: int,
    repeats=1,
    pieces=0,
    M=zl.f32,
    chooses=0,
):
    """Several launches with the same buffers: yields owner, place, x, what came out and a bit for each rank that wants a row."""
    rng = np.random.default_rng(seed)
    T = zl.u32 if kind.startswith("spread") else zl.f32
    kernels = kernel_of(peer_row_kernels.row_ranks, size, KIND=kind, T=T, M=M)
    with EmulateDevice("sm_90a", kernels, seed) as device:
        group = Group(device, size)
        for _ in range(repeats):
            owner, place = owners_of(rng, rounds, size, rows)
            x = rng.standard_normal((rounds, size, rows, width)).astype(np.float32)
            if T is zl.u32:
                x = rng.integers(0, 2**32, x.shape, np.uint32)
                for i, rank in np.ndindex(rounds, size):
                    x[i, rank, (owner[i] == rank).sum() :] = POISON  # are nobody's
            wanted = rng.integers(1, 1 << size, (rounds, rows)).astype(np.int32)
            if not chooses:
                wanted[:] = -1
            for i, rank, row in (
                np.argwhere(wanted[:, None] >> np.arange(size)[:, None] & 1 == 0) if T is zl.f32 else ()
            ):
                x[i, rank, row] = 0 if owner[i, row] == rank else np.nan  # has no part
            given, out = group.filled(x), group.filled(np.full(x.shape, POISON))
            places = dict(owner=group.filled(owner), place=group.filled(place), count=rows, width=width)
            places |= dict(wanted=group.filled(wanted), chooses=chooses)
            for begin in range(0, rows, pieces or rows):
                group.run(grid, rounds, x=given, out=out, **places, begin=begin, most=pieces or rows)
            found = np.frombuffer(device.read(out), np.uint32).reshape(x.shape)
            assert not any(device.read(group.stop))
            yield owner, place, x, found, wanted


def check_spread(owner, place, x, found, wanted, why) -> None:
    for i, rank, row in np.ndindex(found.shape[:3]):
        of = owner[i, row]
        if wanted[i, row] >> rank & 1 or of == rank:
            assert np.array_equal(found[i, rank, row], x[i, of, place[i, of, row]]), why
        else:
            assert (found[i, rank, row] == POISON).all(), why


def check_collect(owner, place, x, found, wanted, why, half=False) -> None:
    x = np.where(np.isnan(x), np.float32(0), x)
    numbers, totals = found.view(np.float32), [in_order(rounded(each[None]) if half else each[None])[0] for each in x]
    for i, rank in np.ndindex(found.shape[:2]):
        mine = np.flatnonzero(owner[i] == rank)
        assert np.array_equal(numbers[i, rank, : len(mine)], totals[i][mine]), why
        assert (found[i, rank, len(mine) :] == POISON).all(), why  # is not touched


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("kind", ["small", "large"])
def test_rows_go_to_all_ranks(kind, size, kept_kernels):
    seed, rows, width = int(np.random.default_rng().integers(2**31)), 7, 36
    grid = -(-rows * width // 128) if kind == "small" else 3
    for found in run(f"spread {kind}", size, rows, width, grid, 1, seed, repeats=3):
        check_spread(*found, f"seed {seed}")


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("form", ["f32", "half"])
@pytest.mark.parametrize("kind", ["small", "large"])
def test_sums_go_to_their_owner(kind, form, size, kept_kernels):
    """With the bits of the order of ranks, of parts that were rounded once where they are sent as bf16."""
    seed, rows, width = int(np.random.default_rng().integers(2**31)), 7, 40
    grid = -(-rows * width // 128) if kind == "small" else 3
    M = zl.bf16 if form == "half" else zl.f32
    for found in run(f"collect {kind}", size, rows, width, grid, 1, seed, repeats=3, M=M):
        check_collect(*found, f"seed {seed}", form == "half")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["spread small", "spread large", "collect small", "collect large"])
def test_rows_go_to_who_wants_them(kind, size, kept_kernels):
    """Nobody else's are written; of sums who has no part has numbers that are none. Many rounds: ranks run ahead."""
    seed = int(np.random.default_rng().integers(2**31))
    check = check_spread if kind.startswith("spread") else check_collect
    for found in run(kind, size, 3, 32, 1, 20, seed, chooses=1):
        check(*found, f"seed {seed}")
    grid = -(-7 * 40 // 128) if kind.endswith("small") else 3
    for found in run(kind, size, 7, 40, grid, 1, seed, repeats=3, chooses=1):
        check(*found, f"seed {seed}")


@pytest.mark.parametrize("kind", ["spread", "collect"])
def test_more_rows_than_a_box_has_room_for(kind, kept_kernels):
    seed, width = int(np.random.default_rng().integers(2**31)), 64
    assert 2 * 16 * 4 * width <= BOX
    check = check_spread if kind == "spread" else check_collect
    for found in run(f"{kind} large", 3, 37, width, 2, 1, seed, pieces=16):
        check(*found, f"seed {seed}")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["spread small", "spread large", "collect small", "collect large"])
def test_ranks_that_run_ahead_overwrite_nothing(kind, size, kept_kernels):
    """Many exchanges, of which some ranks send nothing, or need nothing."""
    seed = int(np.random.default_rng().integers(2**31))
    check = check_spread if kind.startswith("spread") else check_collect
    for found in run(kind, size, 3, 32, 1, 40, seed):
        check(*found, f"seed {seed}")


def own_of(device, rows: int) -> OwnRows:
    return OwnRows(*(Tensor(device.alloc(4 * rows), (rows,), "i32") for _ in OwnRows._fields))


def test_forms_by_size(recorded):  # noqa: F811
    collectives, device = recorded
    recorder, memory, own = device.record(), device.alloc(64), own_of(device, 64)
    rows, middle, many = (recorder.symbol(name, most) for name, most in (("rows", 16), ("middle", 64), ("many", 8192)))
    mine = recorder.symbol("own", 8192)

    def launches(call, count, width, dtype="f32"):
        recorder.launches.clear()
        of = (mine, count) if call.__name__ == "spread_rows" else (count, mine)
        call(recorder, *(Tensor(memory, (each, width), dtype) for each in of), own)
        return [(each.symbol, each.grid, each.args["begin"], each.args["most"]) for each in recorder.launches]

    spread, collect = collectives.spread_rows, collectives.collect_sums
    ((symbol, grid, *_),) = launches(spread, rows, 4096, "bf16")
    assert symbol == "spread_rows_small_2" and grid[0].value({"rows": 3}) == 6
    # 64 rows of 8,192 bf16 take all words of a slot, and leave none to greet by.
    assert launches(spread, middle, 8192, "bf16")[0][0] == "spread_rows_large_2"
    assert launches(spread, middle, 8192 - 8, "bf16")[0][0] == "spread_rows_small_2"
    assert launches(spread, many, 5120, "bf16") == [
        ("spread_rows_large_2", (96,), begin, 3276) for begin in (0, 3276, 6552)
    ]
    assert launches(collect, rows, 4096)[0][0] == "collect_sums_small_f32_2"
    assert launches(collect, middle, 5120)[0][0] == "collect_sums_small_half_2"
    assert launches(collect, many, 4096) == [("collect_sums_large_half_2", (96,), begin, 4096) for begin in (0, 4096)]
    collectives._sent = "f32"  # --deterministic
    assert [each[0] for each in launches(collect, many, 4096)] == ["collect_sums_large_f32_2"] * 4
    for call, width in ((spread, 6), (collect, 12)):
        with pytest.raises(ValueError, match=call.__name__):
            launches(call, rows, width)
    with pytest.raises(ValueError, match="collect_sums"):
        launches(collect, rows, 16, "bf16")
    assert recorder.checks == [collectives.check]


def test_what_more_ranks_send_fits_their_boxes():
    made = RankGroup.create(8)
    device = NullGPU()
    collectives, recorder = AlonePeers(made, device), device.record()
    x, out = (Tensor(device.alloc(64), (recorder.symbol(name, 2048), 4096), "f32") for name in ("many", "own"))
    told = []
    collectives._launch = lambda recorder, symbol, args, grid: told.append((symbol, args["begin"], args["most"]))
    collectives.collect_sums(recorder, x, out, own_of(device, 64))
    assert told[:2] == [("collect_sums_large_half_8", 0, 585), ("collect_sums_large_half_8", 585, 585)]
    assert 585 * 7 * 4096 * 2 <= 32 << 20 and len(told) == 4
    made.close()


def test_a_group_of_one_has_all_rows(kept_kernels):
    """The launches in the package's kernels: rows whose number is known at replay."""
    made = RankGroup.create(1)
    with EmulateDevice("sm_90a") as device:
        collectives, recorder = AlonePeers(made, device), device.record()
        given = np.random.default_rng(1).standard_normal((5, 1000)).astype(np.float32)
        tokens = recorder.symbol("tokens", 5)
        x, out = (Tensor(device.alloc(given.nbytes), (tokens, 1000), "f32") for _ in range(2))
        own = own_of(device, 5)
        order = np.arange(5, dtype=np.int32)
        for tensor, numbers in ((own.rows, order), (own.place, order), (own.owner, 0 * order)):
            device.write(tensor, numbers.tobytes())
        collectives.spread_rows(recorder, x, out, own)
        collectives.collect_sums(recorder, out, x, own)
        graph = recorder.finish()
        for count in (5, 1, 3):
            device.write(x.with_rows(5), given.tobytes())
            device.write(out.with_rows(5), bytes(given.nbytes))
            graph.run(tokens=count)
            for tensor, wanted in ((out, given[:count]), (x, given)):
                found = np.frombuffer(device.read(tensor.with_rows(5)), np.float32).reshape(given.shape)
                assert np.array_equal(found[: len(wanted)], wanted) and (tensor is x or not found[count:].any())
        graph.close()
        collectives.close()
    made.close()
