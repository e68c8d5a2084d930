"""Kernels of peers in the emulator, all ranks in one launch: numbers, bits that agree, races, ranks that are rounds ahead."""

import numpy as np
import peer_kernels
import pytest

from zse import kernel as zl
from zse.kernels.gpu import all_reduce, peer_messages, peers
from zse.quant.pack import bf16_to_f32, f32_to_bf16
from zse.runtime.args import Args
from zse_emulator import EmulateDevice

BOX = 16384  # bytes
PATIENCE = 1 << 60
TYPES = {form: dict(T=T, M=M) for form, T, M in all_reduce.FORMS}


def kernel_of(kernel, size: int, threads: int = 32, **statics) -> dict:
    world = next(world for world in peers.WORLDS if world >= size)
    return {"k": zl.Variant("k", kernel, {"WORLD": world, **statics}, threads=threads)}


class Group:
    """Buffers of `size` ranks in an emulated device."""

    def __init__(self, device: EmulateDevice, size: int):
        self.device, self.size = device, size
        self.inbox = (peers.HEADER_BYTES + (2 * size + 1) * peers.SMALL_VALUES * 8) // 8
        self.outbox = self.inbox + BOX // 8
        self.stride = self.outbox + BOX // 8
        self.base, self.stop = device.alloc(8 * self.stride * size), device.alloc(4)

    def run(self, grid: int, rounds: int = 1, patience: int = PATIENCE, **args) -> None:
        common = dict(base=self.base, stride=self.stride, stop=self.stop, size=self.size, rounds=rounds)
        common |= dict(inbox=self.inbox, outbox=self.outbox, patience=patience)
        self.device.run(lambda recorder: recorder.launch("k", Args(**common, **args), (grid, self.size)))

    def filled(self, array: np.ndarray):
        buffer = self.device.alloc(array.nbytes)
        self.device.write(buffer, array.tobytes())
        return buffer


def reduced(
    kind: str, size: int, form: str, count: int, grid: int, rounds: int, seed: int, repeats: int = 1, in_place: int = 0
):
    """(numbers of every rank f32 [rounds, size, count], what each got), through `repeats` launches with the same buffers."""
    rng, dtype = np.random.default_rng(seed), "bf16" if form == "bf16" else "f32"
    with EmulateDevice("sm_90a", kernel_of(peer_kernels.reduce_ranks, size, KIND=kind, **TYPES[form]), seed) as device:
        group = Group(device, size)
        for _ in range(repeats):
            given = rng.standard_normal((rounds, size, count)).astype(np.float32)
            if dtype == "bf16":
                given = bf16_to_f32(f32_to_bf16(given))
            x = group.filled(given if dtype == "f32" else f32_to_bf16(given))
            out = (
                x if in_place else group.filled(np.full(given.shape, 0xFF, np.uint32 if dtype == "f32" else np.uint16))
            )
            group.run(grid, rounds, x=x, out=out, count=count, begin=0, most=count, in_place=in_place)
            raw = np.frombuffer(device.read(out), np.float32 if dtype == "f32" else np.uint16).reshape(given.shape)
        assert not any(device.read(group.stop))
    return given, raw if dtype == "f32" else bf16_to_f32(raw)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["small", "large"])
def test_in_place(kind, size, kept_kernels):
    seed = int(np.random.default_rng().integers(2**31))
    given, found = reduced(kind, size, "f32", 1512, 12 if kind == "small" else 4, 1, seed, repeats=3, in_place=1)
    assert np.array_equal(found, np.repeat(in_order(given)[:, None], size, 1)), f"seed {seed}"


def in_order(given: np.ndarray) -> np.ndarray:
    """The sum over ranks, f32, rank by rank."""
    total = given[:, 0]
    for rank in range(1, given.shape[1]):
        total = total + given[:, rank]
    return total


def rounded(numbers: np.ndarray) -> np.ndarray:
    return bf16_to_f32(f32_to_bf16(numbers))


@pytest.mark.each()
@pytest.mark.parametrize("form", ["f32", "bf16", "half"])
@pytest.mark.parametrize("kind", ["small", "large"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_has_the_bits_of_the_order_of_ranks(kind, size, form, kept_kernels):
    """Several blocks, launches one after the other with the same buffers, as a graph is replayed. half: of parts that were rounded once;
    large ones of more than two ranks are added by one, whose own part is not, and the sum is rounded."""
    seed = int(np.random.default_rng().integers(2**31))
    count = 1000 if kind == "small" else 1512
    given, found = reduced(kind, size, form, count, -(-count // 128) if kind == "small" else 4, 1, seed, repeats=3)
    shared = form == "half" and kind == "large" and size > 2
    expected = in_order(rounded(given) if form == "half" else given)
    if form == "bf16":
        expected = rounded(expected)
    for rank in range(size):
        if shared:
            assert np.array_equal(found[:, rank], found[:, 0]), f"seed {seed}"
            assert np.array_equal(found[:, rank], rounded(found[:, rank])), f"seed {seed}"
            bound = 2.0**-8 * (np.abs(given).sum(1) + np.abs(expected)) * 1.01
            assert (np.abs(found[:, rank] - in_order(given)) <= bound).all(), f"seed {seed}"
        else:
            assert np.array_equal(found[:, rank], expected), f"seed {seed}"


@pytest.mark.parametrize(
    ("kind", "size", "count"),
    [("small", 2, 128), ("small", 3, 128), ("large", 2, 128), ("large", 2, 2024), ("large", 3, 128), ("int8", 3, 128)],
)
def test_ranks_that_run_ahead_overwrite_nothing(kind, size, count, kept_kernels):
    """One block a rank and many rounds: each goes on as soon as it has what it needs. (2,024 numbers: of four sections.)"""
    seed = int(np.random.default_rng().integers(2**31))
    form = "int8" if kind == "int8" else "f32"
    given, found = reduced(kind, size, form, count, 1, 40 if count == 128 else 8, seed)
    if kind != "int8":
        assert np.array_equal(found, np.repeat(in_order(given)[:, None], size, 1)), f"seed {seed}"
    else:
        assert (np.abs(found - in_order(given)[:, None]) <= int8_bound(given)[:, None]).all(), f"seed {seed}"
        assert (found == found[:, :1]).all(), f"seed {seed}"


def int8_bound(given: np.ndarray) -> np.ndarray:
    """Of the sum: 1/254 of the group's largest number for each part that was sent (all but one's own) and for the sum, which is
    at most the sum of those."""
    rounds, size, count = given.shape
    tops = np.abs(given).reshape(rounds, size, count // 32, 32).max(3).sum(1)
    return (2 * tops / 254 * 1.01).repeat(32, 1)


def test_int8_keeps_to_its_error(kept_kernels):
    seed = int(np.random.default_rng().integers(2**31))
    given, found = reduced("int8", 2, "int8", 4 * 256 + 96, 2, 1, seed, repeats=2)
    assert (found == found[:, :1]).all(), f"seed {seed}"
    error = np.abs(found[:, 0] - in_order(given))
    assert (error <= int8_bound(given)).all() and error.max() > 1e-4, f"seed {seed}"


@pytest.mark.parametrize("rounds", [1, 12])
@pytest.mark.parametrize("kind", ["gather", "all"])
def test_gather(kind, rounds, kept_kernels):
    """To rank 0, and to every rank."""
    seed, rows, widths = int(np.random.default_rng().integers(2**31)), 5, (8, 4, 20)
    rng = np.random.default_rng(seed)
    parts = [[rng.integers(0, 2**32, (rows, width), np.uint32) for width in widths] for _ in range(rounds)]
    with EmulateDevice("sm_90a", kernel_of(peer_kernels.gather_ranks, 3, KIND=kind), seed) as device:
        group = Group(device, 3)
        x = group.filled(np.concatenate([part.ravel() for round in parts for part in round]))
        copies = 3 if kind == "all" else 1
        out = group.filled(np.zeros((rounds, copies, rows, sum(widths)), np.uint32))
        places = {f"width{r}": width for r, width in enumerate(widths)}
        # In two launches, as of more rows than a box has room for.
        for begin in (0, 3) if rounds == 1 else (0,):
            most = 3 if rounds == 1 else rows
            group.run(3 if rounds == 1 else 1, rounds, x=x, out=out, **places, rows=rows, begin=begin, most=most)
        found = np.frombuffer(device.read(out), np.uint32).reshape(rounds, copies, rows, sum(widths))
    whole = np.array([np.concatenate(round, 1) for round in parts])
    assert np.array_equal(found, np.repeat(whole[:, None], copies, 1)), f"seed {seed}"


def test_broadcast(kept_kernels):
    seed, words, rounds = int(np.random.default_rng().integers(2**31)), 77, 9
    given = np.random.default_rng(seed).integers(0, 2**32, (rounds, 3, words), np.uint32)
    with EmulateDevice("sm_90a", kernel_of(peer_kernels.gather_ranks, 3, KIND="broadcast"), seed) as device:
        group = Group(device, 3)
        out = group.filled(given)
        group.run(1, rounds, x=out, out=out, width0=0, width1=0, width2=0, rows=words, begin=0, most=0)
        found = np.frombuffer(device.read(out), np.uint32).reshape(given.shape)
    assert np.array_equal(found, np.repeat(given[:, :1], 3, 1)), f"seed {seed}"


@pytest.mark.parametrize(
    "size, grid, rounds, ahead", [(2, 1, 24, 0), (2, 1, 24, 2), (3, 1, 24, 3), (3, 3, 1, 0), (5, 1, 6, 5)]
)
def test_messages_round_the_ring(size, grid, rounds, ahead, kept_kernels):
    """Messages by turns through two boxes, rank 0 as many ahead as a pipeline has ranks; several launches with the same buffers, whose
    numbers go on."""
    seed = int(np.random.default_rng().integers(2**31))
    count = 128 * grid - 12
    with EmulateDevice("sm_90a", kernel_of(peer_kernels.ring_ranks, size), seed) as device:
        group = Group(device, size)
        for repeat in range(3):
            given = np.random.default_rng(seed + repeat).integers(0, 2**32, (rounds, size, count), np.uint32)
            x, out = group.filled(given), group.filled(np.full_like(given, 0xFFFFFFFF))
            # In pieces, as of more than a box has room for.
            pieces = ((0, count),) if rounds > 1 or grid > 1 else ((0, 64), (64, 64))
            for begin, most in pieces:
                group.run(grid, rounds, x=x, out=out, count=count, begin=begin, most=most, ahead=ahead)
            found = np.frombuffer(device.read(out), np.uint32).reshape(given.shape)
            for rank in range(size):
                added = rank if rank else size - 1
                assert np.array_equal(found[:, rank], given[:, 0] + np.uint32(added)), f"seed {seed}, rank {rank}"
        assert not any(device.read(group.stop))


def test_a_message_that_never_comes_is_given_up(kept_kernels):
    with EmulateDevice("sm_90a", kernel_of(peer_kernels.ring_ranks, 2), 5) as device:
        group = Group(device, 2)
        x = group.filled(np.ones((2, 64), np.uint32))
        args = dict(x=x, out=x, count=64, begin=0, most=64, ahead=0, rounds=1, patience=0, size=2)
        args |= dict(base=group.base, stride=group.stride, stop=group.stop, inbox=group.inbox, outbox=group.outbox)
        device.run(lambda recorder: recorder.launch("k", Args(**args), (1, 1)))
        assert int.from_bytes(device.read(group.stop), "little") == peers.GAVE_UP


@pytest.mark.parametrize("kind", ["small", "large"])
def test_a_rank_that_never_comes_is_given_up(kind, kept_kernels):
    """Of two ranks only one is launched: it says so in `stop` after its patience, or at once where the host has."""
    with EmulateDevice("sm_90a", kernel_of(peer_kernels.reduce_ranks, 2, KIND=kind, **TYPES["f32"]), 5) as device:
        for told, patience in ((0, 0), (peers.STOPPED_BY_HOST, PATIENCE)):
            group = Group(device, 2)
            device.write(group.stop, told.to_bytes(4, "little"))
            x = group.filled(np.ones((2, 64), np.float32))
            args = dict(x=x, out=x, count=64, begin=0, most=64, in_place=1, rounds=1, patience=patience, size=2)
            args |= dict(base=group.base, stride=group.stride, stop=group.stop, inbox=group.inbox, outbox=group.outbox)
            device.run(lambda recorder, args=args: recorder.launch("k", Args(**args), (1, 1)))
            assert int.from_bytes(device.read(group.stop), "little") == (told or peers.GAVE_UP)


def test_metal_has_none():
    class Metal:
        name = "metal3.1"

    assert not all_reduce.variants(Metal) and not peer_messages.variants(Metal)
