"""Products that push their part to both ranks, and the launch that adds them: kernels of both ranks in the emulator, one after the other."""

import numpy as np
import pytest
from test_peer_launches import AlonePeers
from test_sum_norm import normed, special

from zse.kernels.gpu import gemm_launch, peers
from zse.kernels.gpu.gemm_push import ROWS
from zse.parallel.collectives.peer import push_slots
from zse.parallel.group import RankGroup
from zse.quant.pack import bf16_to_f32, f32_to_bf16
from zse.quant.scheme import DenseScheme
from zse.tensor import Tensor, Weight
from zse_emulator import EmulateDevice


class Pair:
    """Two ranks' collectives on one device."""

    def __init__(self, device):
        self.device, self.groups = device, [RankGroup.create(2) for _ in range(2)]
        self.ranks = [AlonePeers(group, device) for group in self.groups]
        addresses = [rank._buffer.address for rank in self.ranks]
        for number, (group, rank) in enumerate(zip(self.groups, self.ranks, strict=True)):
            group.rank, rank._addresses = number, addresses

    def close(self):
        for group, rank in zip(self.groups, self.ranks, strict=True):
            rank.close()
            group.close()


def held(device, array: np.ndarray, dtype: str, rows=None) -> Tensor:
    buffer = device.alloc(array.nbytes)
    device.write(buffer, array.tobytes())
    return Tensor(buffer, (array.shape[0] if rows is None else rows, *array.shape[1:]), dtype)


@pytest.mark.each()
@pytest.mark.parametrize("out", ["bf16", "none"])
@pytest.mark.parametrize("tokens, cols, width", [(64, 128, 256), (37, 272, 1096), (17, 144, 64), (64, 400, 640)])
def test_both_ranks_add_what_both_pushed(tokens, cols, width, out, kept_kernels):
    """By turns, with parts of tiles that several blocks have and whole ones; slots are zero afterwards, and bits alike."""
    seed = int(np.random.default_rng().integers(2**31))
    rng, weight = np.random.default_rng(seed), None
    with EmulateDevice("sm_90a", seed=seed, dependent=False) as device:  # pushed_norm waits word by word
        pair = Pair(device)
        norm = special(rng, cols)
        stream = special(rng, tokens, cols)
        xs = [held(device, stream, "f32") for _ in range(2)]
        outs = [held(device, np.full((tokens, cols), 0xFFFF, np.uint16), "bf16") for _ in range(2)]
        weight = held(device, norm, "f32")
        wanted = stream.astype(np.float64)
        for turn in (0, 1, 0):
            for rank in range(2):
                a, w = (f32_to_bf16(special(rng, *shape)) for shape in ((tokens, width), (cols, width)))
                made = Weight((cols, width), DenseScheme("bf16"), {"w": held(device, w, "bf16")}, "rows")
                shift = rng.standard_normal(cols).astype(np.float32)
                bias = held(device, shift, "f32") if rank == 0 and turn else None
                assert gemm_launch.can_push(device, made, "bf16", 64)
                rows = np.full((ROWS, width), 0x7FC0, np.uint16)  # whose tokens are not there, are NaN
                rows[:tokens] = a
                given, slots = held(device, rows, "bf16", tokens), pair.ranks[rank].slots(turn)[0]
                device.run(lambda recorder, *args: gemm_launch.launch_push(recorder, given, made, bias, slots, 64))
                wanted += 0 if bias is None else shift.astype(np.float64)
                wanted = wanted + bf16_to_f32(a).astype(np.float64) @ bf16_to_f32(w).astype(np.float64).T
            for rank in range(2):
                result = outs[rank] if out == "bf16" else None
                device.run(
                    lambda recorder, *args: pair.ranks[rank].pushed_norm(
                        recorder, turn, xs[rank], weight if result else None, result, 1e-5
                    )
                )
        found = [np.frombuffer(device.read(x), np.float32).reshape(tokens, cols) for x in xs]
        assert np.array_equal(found[0].view(np.uint32), found[1].view(np.uint32)), f"seed {seed}"
        bound = 6 * 2.0**-8 * np.sqrt(width) * 4  # each of six parts is rounded once
        assert np.abs(found[0] - wanted).max() < bound, f"seed {seed}"
        assert np.abs(found[0] - wanted).mean() < 6 * 2.0**-9 * np.sqrt(width), f"seed {seed}"
        if out == "bf16":
            rows = bf16_to_f32(np.frombuffer(device.read(outs[0]), np.uint16).reshape(tokens, cols))
            exact = normed(found[0], norm, 1e-5)
            assert (np.abs(rows - exact) <= 2.0**-8 * np.abs(exact) + 1e-6).all(), f"seed {seed}"
        for rank in pair.ranks:
            assert not any(device.read(rank._buffer)[8 * push_slots(2) :][: 12 * peers.SMALL_VALUES]), f"seed {seed}"
        pair.close()
