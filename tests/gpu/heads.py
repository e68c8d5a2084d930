"""qkv_post and attention in one launch beside the two, on any device with both."""

import numpy as np

from gpu.harness import free, read_back, to_tensor, upload
from zse.kernels.attention import attention
from zse.kernels.attention_cases import gpu_batch
from zse.kernels.gpu.attention_plan import AttentionScratch, plan_attention
from zse.kernels.heads_attention import heads_attention
from zse.kernels.qkv_post import qkv_post


def same_as_two_launches(gpu, heads: int, kv_heads: int, head_dim: int, norm: bool) -> None:
    """The same bits of results and pages, as chunks, segments and whole."""
    rng = np.random.default_rng()
    lengths = [int(rng.integers(1, 300)), 256, 257, int(rng.integers(1025, 1500))]
    batch = gpu_batch(rng, [(length - 1, 1) for length in lengths], heads, kv_heads, head_dim, "bf16")
    rows, width = len(lengths), (heads + 2 * kv_heads) * head_dim
    qkv = to_tensor(gpu, rng.standard_normal((rows, width)).astype(np.float32))
    angle = rng.uniform(-3, 3, (rows, head_dim // 2))
    table = to_tensor(gpu, np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32))
    norms = [to_tensor(gpu, rng.uniform(0.5, 2, head_dim).astype(np.float32)) if norm else None for _ in range(2)]
    spans = set()
    for blocks in (1, 12, 132):
        results = []
        for in_one in (False, True):
            tensors = {name: to_tensor(gpu, value) for name, value in batch.items()}
            q, out = tensors.pop("q"), upload(gpu, np.full((rows, heads * head_dim), 0x7FFF, np.uint16), "bf16")
            sizes = heads, kv_heads, head_dim, [0], rows, batch["page_table"].shape[1] * 16
            scratch = AttentionScratch.make(gpu, *sizes)._replace(blocks=blocks)
            where, how = tuple(tensors.values()), dict(scale=0.1, scratch={(kv_heads, head_dim): scratch})

            def record(recorder):
                plan_attention(recorder, scratch, tensors["token_row"], tensors["positions"], "bf16", 1)
                if in_one:
                    heads_attention(recorder, qkv, *norms, table, *where, out, eps=1e-6, **how)
                else:
                    qkv_post(recorder, qkv, *norms, table, q, *where, 1e-6)
                    attention(recorder, q, *where, out, longest_run=1, **how)

            gpu.run(record)
            results.append([read_back(gpu, tensor, np.uint16) for tensor in (out, *where[:2])])
            plan = read_back(gpu, scratch.plans[0], np.int32)
            tasks = plan[16 : 16 + 8 * plan[0]].reshape(-1, 8)
            spans.add(int((tasks[:, 5] - tasks[:, 4]).max()))
            assert not read_back(gpu, scratch.counters, np.int32).any()
            free((*tensors.values(), q, out, scratch.counters, scratch.records, scratch.totals, scratch.plans[0]))
        for apart, together in zip(*results, strict=True):
            np.testing.assert_array_equal(together, apart)
        assert (results[0][0] != 0x7FFF).all()
    assert 256 in spans and max(spans) > 1024, f"longest tasks of {spans} keys: chunks and whole rows were to be tried"
