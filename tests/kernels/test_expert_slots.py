"""Places of experts on a GPU, in the emulator: against a cache of the least recently used in Python, bytes and counts."""

import numpy as np
import pytest
from gpu.harness import upload

from zse.kernel import cache
from zse.kernels.gpu import expert_slots
from zse.kernels.route import sorted_pairs
from zse_emulator import EmulateDevice


class Slots:
    """What the kernels do. place(experts that are used, ascending) → expert → place; kept: slot → expert or None."""

    def __init__(self, slots, first):
        self.kept, self.ages, self.first = [None] * slots, [expert_slots.NEVER] * slots, first
        self.counts = [0, 0, 0]

    def place(self, used):
        missing = [e for e in used if e not in self.kept]
        free = [s for s, e in enumerate(self.kept) if e not in used]
        free.sort(key=lambda s: -self.ages[s])
        spilled = {}
        for number, e in enumerate(missing):
            if number < len(free):
                self.kept[free[number]] = e
            else:
                spilled[e] = self.first[1] + number - len(free)
        for s, e in enumerate(self.kept):
            if e is not None:
                self.ages[s] = 0 if e in used else self.ages[s] + 1
        self.counts[0] += len(used) - len(missing)
        self.counts[1] += len(missing) - len(spilled)
        self.counts[2] += len(spilled)
        return {e: spilled[e] if e in spilled else self.first[0] + self.kept.index(e) for e in used}, missing


@pytest.mark.parametrize("like", ["sm_90a", "sm_80", "gfx90a", "metal3.1"])
@pytest.mark.parametrize("experts, slots, chosen", [(5, 1, 2), (40, 9, 3), (300, 200, 8), (70, 70, 4)])
def test_places_and_bytes(experts, slots, chosen, like, kept_kernels):
    """Steps of one token, of some and of so many that all experts are used, as they come."""
    seed = int(np.random.default_rng().integers(2**32))
    rng = np.random.default_rng(seed)
    first = 3, 3 + slots + 2
    sizes = [int(4 * size) for size in rng.integers(1, 60, 3)] + [16 * 700]  # bytes of an expert's planes
    host = [rng.integers(0, 256, (experts, size)).astype(np.uint8) for size in sizes]
    places = first[1] + experts - slots
    with EmulateDevice(like, cache.package_variants(like), seed=seed) as device:
        starts = [np.cumsum([0, *(-(-size * n // 16) * 16 for size in sizes)]) for n in (experts, places)]
        memory, pool = device.host_memory(int(starts[0][-1]), "experts"), device.alloc(int(starts[1][-1]), "places")
        for at, plane in zip(starts[0], host, strict=False):
            memory.view()[at : at + plane.nbytes] = plane.tobytes()
        segments = np.array([[starts[0][n], starts[1][n], size] for n, size in enumerate(sizes)], np.int64)
        tables = dict(
            slot_of=upload(device, np.full(experts, -1, np.int32)),
            expert_of=upload(device, np.full(slots, -1, np.int32)),
            age=upload(device, np.full(slots, expert_slots.NEVER, np.int32)),
            copies=upload(device, np.full(1 + 2 * experts, -1, np.int32)),
            counts=upload(device, np.zeros(3, np.int64)),
            told=upload(device, np.zeros(3, np.int64)),
            segments=upload(device, segments),
        )
        model = Slots(slots, first)
        for tokens in (1, 1, 2, 1, 5, 1, 60, 1, 1):
            ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
            if tokens == 5:
                ids[:] = ids[0]  # an expert has several tasks
            expected = sorted_pairs(ids, experts, 4).tasks
            tasks = upload(device, expected)
            recorder = device.record()
            expert_slots.launch(recorder, tasks, tables, first, memory, pool)
            graph = recorder.finish()
            graph.run()
            used = sorted(set(ids.reshape(-1).tolist()))
            place_of, missing = model.place(used)
            got = np.frombuffer(device.read(tasks), np.int32).reshape(-1, 3)
            is_real = expected[:, 2] > expected[:, 1]
            expected[is_real, 0] = [place_of[e] for e in expected[is_real, 0].tolist()]
            np.testing.assert_array_equal(got, expected, err_msg=f"seed {seed}")
            copies = np.frombuffer(device.read(tables["copies"]), np.int32)
            assert copies[: 1 + 2 * len(missing)].tolist() == [
                len(missing),
                *(n for e in missing for n in (e, place_of[e])),
            ]
            content = np.frombuffer(device.read(pool), np.uint8)
            for at, plane in zip(starts[1], host, strict=False):
                stack = content[at : at + places * plane.shape[1]].reshape(places, -1)
                for e in used:
                    np.testing.assert_array_equal(stack[place_of[e]], plane[e], err_msg=f"seed {seed}")
            for name in ("counts", "told"):
                assert np.frombuffer(device.read(tables[name]), np.int64).tolist() == model.counts
            kept = np.frombuffer(device.read(tables["expert_of"]), np.int32)
            assert kept.tolist() == [-1 if e is None else e for e in model.kept], f"seed {seed}"
            graph.close()
            tasks.buffer.free()
        assert model.counts[0] and model.counts[1] and (slots == experts or model.counts[2])
