"""The sum of two ranks' parts with the norm behind it: the kernel in the emulator, both ranks in one launch, beside all_reduce and
add_rmsnorm; what PeerCollectives records of it, and where a recording of a model takes it."""

import numpy as np
import peer_kernels
import pytest
from test_peer_kernels import PATIENCE, Group, in_order, kernel_of, rounded
from test_peer_launches import group, recorded  # noqa: F401

from zse import kernel as zl
from zse.kernels.gpu import peers, sum_norm
from zse.quant.pack import bf16_to_f32
from zse.runtime.args import Args
from zse.tensor import Fp8Activation, Tensor
from zse_emulator import EmulateDevice

FORMS = dict(sum_norm.FORMS)
POISON = 0x7FC0DEAD  # a NaN


def special(rng, *shape: int) -> np.ndarray:
    """Normal numbers, among them zeros of both signs, pairs and fours of them, and what rounds to zero."""
    found = rng.standard_normal(shape).astype(np.float32)
    for value in (0.0, -0.0, 1e-42):
        found[rng.random(shape) < 0.1] = value
    found.reshape(-1, 4)[rng.random(found.size // 4) < 0.2] = 0.0
    return found


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + eps) * weight


def run(
    form: str,
    out: str,
    rows: int,
    width: int,
    rounds: int,
    seed: int,
    turns: bool = False,
    vectors: int = 1,
    repeats: int = 1,
):
    """Yields (stream, parts, weight, stream then, what came out, numbered sums) of launches with the same buffers."""
    rng, shape = np.random.default_rng(seed), (rounds, 2, rows, width)
    kernels = kernel_of(peer_kernels.sum_norm_ranks, 2, M=FORMS[form], OUT=out, V=vectors, TURNS=turns)
    with EmulateDevice("sm_90a", kernels, seed) as device:
        peer = Group(device, 2)
        for _ in range(repeats):
            x, delta, weight = special(rng, *shape), special(rng, *shape), special(rng, width)
            poison = np.full(shape, POISON, np.uint32)
            held = {"x": peer.filled(x), "delta": peer.filled(delta), "weight": peer.filled(weight)}
            held |= {name: peer.filled(poison) for name in ("out", "q", "scale", "sums")}
            peer.run(rows, rounds, **held, width=width, eps=1e-5)
            then, sums = (np.frombuffer(device.read(held[name]), np.float32).reshape(shape) for name in ("x", "sums"))
            yield x, delta, weight, then, {name: device.read(held[name]) for name in ("out", "q", "scale")}, sums
            slots = device.read(peer.base)  # nothing is left in slots without numbers
            for rank in range(2):
                at = 8 * (rank * peer.stride) + peers.HEADER_BYTES + 32 * peers.SMALL_VALUES
                assert not any(slots[at : at + 8 * peers.SMALL_VALUES]), f"seed {seed}"
        assert not any(device.read(peer.stop))


@pytest.mark.each()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width, vectors", [(128, 1), (72, 1), (200, 2), (680, 8)])
def test_bits_are_those_of_two_launches(form, width, vectors, kept_kernels):
    """32 threads, several rows, launches one after the other with the same buffers, as a graph is replayed."""
    seed, rows = int(np.random.default_rng().integers(2**31)), 3
    for x, delta, weight, then, made, _ in run(form, "bf16", rows, width, 1, seed, vectors=vectors, repeats=3):
        parts = rounded(delta) if form == "half" else delta
        total = x + in_order(parts)[:, None]
        assert np.array_equal(then, total), f"seed {seed}"
        raw = np.frombuffer(made["out"], np.uint16)
        out = bf16_to_f32(raw[: then.size]).reshape(then.shape)
        wanted = normed(total, weight, 1e-5)
        assert (np.abs(out - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-6).all(), f"seed {seed}"


def test_as_fp8(kept_kernels):
    seed = int(np.random.default_rng().integers(2**31))
    ((x, delta, weight, then, made, _),) = run("half", "fp8", 2, 256, 1, seed, vectors=2)
    assert np.array_equal(then, x + in_order(rounded(delta))[:, None]), f"seed {seed}"
    q = np.frombuffer(made["q"], np.uint8)[: then.size].reshape(then.shape)
    sign, exponent, mantissa = (q >> 7).astype(np.int32), (q >> 3 & 15).astype(np.int32), (q & 7).astype(np.float64)
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9) * (1 - 2 * sign)
    scale = np.frombuffer(made["scale"], np.float32)[:4].reshape(1, 2, 2, 1)
    wanted = normed(then, weight, 1e-5)
    off = np.abs(value * scale - wanted)
    assert (off <= 2.0**-4 * np.abs(wanted) + scale * 2.0**-9).all(), f"seed {seed}"


@pytest.mark.parametrize("turns", [False, True])
def test_ranks_that_run_ahead_overwrite_nothing(turns, kept_kernels):
    """One row and many rounds: each rank goes on as soon as it has what it needs; with sums that carry numbers between."""
    seed = int(np.random.default_rng().integers(2**31))
    ((x, delta, _, then, _, sums),) = run("f32", "bf16", 1, 128, 40, seed, turns=turns)
    assert np.array_equal(then, x + in_order(delta)[:, None]), f"seed {seed}"
    if turns:
        assert np.array_equal(sums, np.repeat(in_order(delta)[:, None], 2, 1)), f"seed {seed}"


def test_a_rank_that_never_comes_is_given_up(kept_kernels):
    kernels = kernel_of(peer_kernels.sum_norm_ranks, 2, M=zl.f32, OUT="bf16", V=1, TURNS=False)
    with EmulateDevice("sm_90a", kernels, 5) as device:
        for told, patience in ((0, 0), (peers.STOPPED_BY_HOST, PATIENCE)):
            peer = Group(device, 2)
            device.write(peer.stop, told.to_bytes(4, "little"))
            held = {
                name: peer.filled(np.ones((2, 64), np.float32))
                for name in ("x", "delta", "weight", "out", "q", "scale", "sums")
            }
            args = dict(base=peer.base, stride=peer.stride, stop=peer.stop, inbox=peer.inbox, outbox=peer.outbox)
            args |= dict(size=2, rounds=1, patience=patience, width=64, eps=1e-5)
            device.run(lambda recorder, args=args, held=held: recorder.launch("k", Args(**args, **held), (1, 1)))
            assert int.from_bytes(device.read(peer.stop), "little") == (told or peers.GAVE_UP)


def test_what_is_recorded(recorded, monkeypatch):  # noqa: F811
    collectives, device = recorded
    assert not collectives.joins(16, 5120) and not collectives.pushes(
        64, 5120
    )  # only where ZSE_JOINED_SUMS asks for it
    monkeypatch.setattr(collectives, "_joins", True)
    recorder, memory = device.record(), device.alloc(64)
    assert [collectives.joins(rows, 5120) for rows in (1, 51, 52, 102, 103)] == ["f32", "f32", "half", "half", ""]
    assert not collectives.joins(1, 5124) and not collectives.joins(1, 16_392)
    for name, most, width, out, symbol in (
        ("few", 16, 5120, "bf16", "sum_norm_f32_bf16_v4"),
        ("some", 64, 5120, "bf16", "sum_norm_half_bf16_v4"),
        ("more", 32, 9216, "fp8", "sum_norm_half_fp8_v8"),
    ):
        rows = recorder.symbol(name, most)
        stream, part = (Tensor(memory, (rows, width), "f32") for _ in range(2))
        weight, normed_rows = Tensor(memory, (width,), "f32"), Tensor(memory, (rows, width), "bf16")
        if out == "fp8":
            scale, sums = Tensor(memory, (rows,), "f32"), Tensor(memory, (rows, -(-width // 1024) * 8), "f16")
            normed_rows = Fp8Activation(Tensor(memory, (rows, width), "e4m3"), scale, sums)
        collectives.sum_norm(recorder, stream, part, weight, normed_rows, 1e-5)
        assert recorder.launches[-1].symbol == symbol and recorder.launches[-1].grid[0].value({name: 3}) == 3
    many = recorder.symbol("many", 4096)
    stream = Tensor(memory, (many, 5120), "f32")
    with pytest.raises(ValueError, match="sum_norm of"):
        collectives.sum_norm(
            recorder, stream, stream, Tensor(memory, (5120,), "f32"), Tensor(memory, (many, 5120), "bf16"), 1e-5
        )
