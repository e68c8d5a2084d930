"""Tiny encoders through the GPU's kernels in the emulator: LayerNorm back to the stream, activations of one input, rows of positions and
types added, attention both ways over pages. Not run on a device."""

import numpy as np
import pytest
import tiny_encoders as tiny
from test_emulated_model import load_emulated

from zse.cache.layout import KVCache
from zse.kernel import cache
from zse.models.registry import forward_of
from zse.plan.record import Planner, StepBuffers
from zse.tensor import Tensor
from zse_emulator import EmulateDevice

REFERENCES = np.load(tiny.PATH)
SIZE, BLOCKS = 48, 3


@pytest.mark.parametrize(
    ("family", "like"), [("bert", "sm_90a"), ("modernbert", "sm_80"), ("gemma", "sm_80"), ("nomic_moe", "sm_80")]
)
def test_a_gpu_gives_the_same_numbers(family, like, kept_kernels, tmp_path):
    """Two whole texts in one step, of one of which the second part has type 1. bf16 between the operations."""
    device = EmulateDevice(like, cache.package_variants(like))
    model, _ = load_emulated(device, str(tiny.write(family, tmp_path, "BF16")))
    wanted = [(tiny.texts(family)[1], 1), (tiny.texts(family)[3], 3)]
    rows = [ids for (ids, _), _ in wanted]
    types = [[int(second and at >= second) for at in range(len(ids))] for (ids, second), _ in wanted]
    config, tokens = model.config, sum(map(len, rows))
    kv = KVCache(device, config, len(rows) * BLOCKS, "bf16")
    kv.map_to(len(rows) * BLOCKS - 1)
    buffers = StepBuffers.allocate(device, config, max_tokens=SIZE, max_rows=len(rows), max_pages=BLOCKS)
    planner = Planner(device, forward_of(config), model, kv, buffers)
    type_ids = Tensor(device.alloc(4 * SIZE, label="step"), (SIZE,), "i32")

    def put(tensor, values):
        device.write(tensor.with_rows(len(values)), np.array(values, np.int32).tobytes())

    put(buffers.token_ids, [id for ids in rows for id in ids])
    put(buffers.positions, [at for ids in rows for at in range(len(ids))])
    put(buffers.token_row, [row for row, ids in enumerate(rows) for _ in ids])
    put(type_ids, [kind for each in types for kind in each])
    entries = kv.table_entries(list(range(len(rows) * BLOCKS)), 0, len(rows) * BLOCKS)
    device.write(buffers.page_table, np.array(entries, np.int32).tobytes())
    recorder = device.record()
    planner.record_hidden(recorder, types=type_ids)
    graph = recorder.finish()
    symbols = planner.symbols(tokens, 1, max(map(len, rows)))
    graph.submit(**{name: symbols[name] for name in graph.symbols}).wait()
    found = np.frombuffer(device.read(planner.hidden.with_rows(tokens)), np.float32).reshape(tokens, -1)
    if family == "gemma":  # its final norm is the host's
        final = 1 + tiny.weights(family)["norm.weight"]
        found = found / np.sqrt((found * found).mean(1, keepdims=True) + config.norm_eps) * final
    ends = np.cumsum(tiny.LENGTHS)
    expected = np.concatenate(
        [REFERENCES[family][ends[index] - tiny.LENGTHS[index] : ends[index]] for _, index in wanted]
    )
    assert np.abs(found - expected).max() < 0.06 * np.abs(expected).max()
    assert not np.allclose(found[1:4], found[0])
