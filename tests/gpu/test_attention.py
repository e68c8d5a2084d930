"""What attention promises beyond its reference: a row's bits depend neither on the batch nor on who sums what."""

import numpy as np
import pytest

from gpu.harness import device, read_back, to_tensor, upload
from gpu.heads import same_as_two_launches
from zse.kernels.attention import attention
from zse.kernels.attention_cases import attention_reference, gpu_batch
from zse.kernels.gpu.attention_plan import HEADER, TASK, AttentionScratch, plan_attention
from zse.kernels.op import HostArray
from zse.quant import pack

GPU = device()


def run(batch, chosen, heads, kv_heads, head_dim, window, longest_run, blocks=None):
    """(bit patterns of the tokens `chosen`, the tasks). blocks: as many as the plan reckons with, and are launched."""
    part = dict(
        batch,
        q=HostArray("bf16", batch["q"].array[chosen]),
        token_row=batch["token_row"][chosen],
        positions=batch["positions"][chosen],
    )
    tensors = {name: to_tensor(GPU, value) for name, value in part.items()}
    out = upload(GPU, np.full((len(chosen), heads * head_dim), 0x7FFF, np.uint16), "bf16")
    scratch = AttentionScratch.make(
        GPU, heads, kv_heads, head_dim, [window], len(chosen), batch["page_table"].shape[1] * 16
    )
    if blocks:
        scratch = scratch._replace(blocks=blocks)

    def record(recorder):
        plan_attention(
            recorder, scratch, tensors["token_row"], tensors["positions"], tensors["k_pages"].dtype, longest_run
        )
        mine = {(kv_heads, head_dim): scratch}
        attention(recorder, out=out, scale=0.1, window=window, scratch=mine, longest_run=longest_run, **tensors)

    GPU.run(record)
    result, plan = read_back(GPU, out, np.uint16), read_back(GPU, scratch.plans[window], np.int32)
    assert not read_back(GPU, scratch.counters, np.int32).any()
    for tensor in (*tensors.values(), out, scratch.counters, scratch.records, scratch.totals, scratch.plans[window]):
        tensor.buffer.free()
    return result, plan[HEADER : HEADER + plan[0] * TASK].reshape(-1, TASK)


@pytest.mark.parametrize("dtype", ["bf16", "i8", "e4m3"])
@pytest.mark.parametrize("heads, kv_heads, head_dim, window", [(28, 4, 128, 0), (4, 1, 256, 1500), (9, 3, 64, 0)])
def test_decoded_rows_are_the_same_however_they_are_cut(dtype, heads, kv_heads, head_dim, window):
    """As chunks, segments or whole; alone or among others; in a recording for one token a row or for several."""
    rng = np.random.default_rng()
    lengths = [int(n) for n in rng.integers(1, 2500, 9)] + [2600, 256, 257, 1024, 1025]
    batch = gpu_batch(rng, [(length - 1, 1) for length in lengths], heads, kv_heads, head_dim, dtype)
    shape = (heads, kv_heads, head_dim, window)
    everything = np.arange(len(lengths))
    spans = set()
    results = []
    for blocks in (1, 3, 12, 25, 40, 132, 500):
        result, tasks = run(batch, everything, *shape, 1, blocks)
        spans.add(int((tasks[:, 5] - tasks[:, 4]).max()))
        results.append(result)
    assert 256 in spans and max(spans) > 1024, f"longest tasks of {spans} keys: chunks and whole tiles were to be tried"
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    assert (results[0] != 0x7FFF).all()
    np.testing.assert_array_equal(run(batch, everything, *shape, None)[0], results[0])
    for size in (1, 1, 3, 7):
        chosen = np.sort(rng.choice(everything, size, replace=False))
        np.testing.assert_array_equal(run(batch, chosen, *shape, 1)[0], results[0][chosen])


@pytest.mark.parametrize("dtype", ["bf16", "i8", "e4m3"])
@pytest.mark.parametrize("first, page_size", [(0, 16), (29_999, 128)])
def test_prompts_of_32k_tokens(dtype, first, page_size):
    """Whole, and what is left of one behind a chunk that ends within a page; some tokens against the reference."""
    rng = np.random.default_rng()
    heads, kv_heads, head_dim = 7, 1, 128
    count = 32_768 - first
    batch = gpu_batch(rng, [(first, count)], heads, kv_heads, head_dim, dtype, page_size)
    bits, tasks = run(batch, np.arange(count), heads, kv_heads, head_dim, 0, None)
    assert len(tasks) == 0 and (bits != 0x7FFF).all()
    chosen = np.unique([0, 1, 127, 128, count - 1, *rng.integers(0, count, 12)])
    part = batch | {name: batch[name][chosen] for name in ("token_row", "positions")}
    wanted = attention_reference(**part | {"q": HostArray("bf16", batch["q"].array[chosen])}, scale=0.1)["out"]
    np.testing.assert_allclose(pack.bf16_to_f32(bits[chosen]), wanted, rtol=6e-3, atol=6e-3)


def test_a_plan_without_room_for_records_takes_tiles_whole():
    rng = np.random.default_rng()
    batch = gpu_batch(rng, [(2000, 1), (1500, 1), (700, 1)], 8, 2, 64, "bf16")
    everything = np.arange(3)
    expected, tasks = run(batch, everything, 8, 2, 64, 0, 1)
    assert len(tasks) > 3
    tensors = {name: to_tensor(GPU, value) for name, value in batch.items()}
    scratch = AttentionScratch.make(GPU, 8, 2, 64, [0], 3, 16)  # for contexts of 16 tokens: three records
    out = upload(GPU, np.full((3, 512), 0x7FFF, np.uint16), "bf16")

    def record(recorder):
        plan_attention(recorder, scratch, tensors["token_row"], tensors["positions"], "bf16", 1)
        attention(recorder, out=out, scale=0.1, scratch={(2, 64): scratch}, longest_run=1, **tensors)

    GPU.run(record)
    assert read_back(GPU, scratch.plans[0], np.int32)[0] == 3
    np.testing.assert_array_equal(read_back(GPU, out, np.uint16), expected)


@pytest.mark.parametrize("heads, kv_heads, head_dim, norm", [(28, 4, 128, False), (16, 2, 64, True)])
def test_heads_made_by_attention_have_the_bits_of_their_own_launch(heads, kv_heads, head_dim, norm):
    """Results and pages, however the rows are cut."""
    same_as_two_launches(GPU, heads, kv_heads, head_dim, norm)
