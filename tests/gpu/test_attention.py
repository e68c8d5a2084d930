"""What attention promises beyond its reference: a row's bits do not depend on the batch around it."""

import numpy as np
import pytest
from gpu.harness import device, read_back, to_tensor, upload

from zse.kernels.attention import attention
from zse.kernels.attention_cases import gpu_batch
from zse.kernels.op import HostArray
from zse.tensor import Tensor

GPU, REASON = device()
needs_gpu = pytest.mark.skipif(GPU is None, reason=REASON)


def run(batch, chosen, width, **options):
    """Attention of the tokens `chosen` of the batch: bit patterns."""
    part = dict(batch, q=HostArray("bf16", batch["q"].array[chosen]), token_row=batch["token_row"][chosen],
                positions=batch["positions"][chosen])
    tensors = {name: to_tensor(GPU, value) for name, value in part.items()}
    out = upload(GPU, np.full((len(chosen), width), 0x7FFF, np.uint16), "bf16")
    GPU.run(lambda recorder: attention(recorder, out=out, scale=0.1, **tensors, **options))
    result = read_back(GPU, out, np.uint16)
    for tensor in (*tensors.values(), out):
        if isinstance(tensor, Tensor):
            tensor.buffer.free()
    return result


@needs_gpu
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("heads, kv_heads, head_dim, window", [(28, 4, 128, 0), (4, 1, 256, 700), (9, 3, 64, 0)])
def test_decoded_rows_are_the_same_alone_and_in_any_batch(dtype, heads, kv_heads, head_dim, window):
    """Alone a row's keys are cut into chunks, in a batch of a hundred they are one task, in between they are segments."""
    rng = np.random.default_rng()
    lengths = [int(n) for n in rng.integers(1, 2500, 100)] + [9000, 256, 257, 1024, 1025]
    batch = gpu_batch(rng, [(length - 1, 1) for length in lengths], heads, kv_heads, head_dim, dtype)
    everything = np.arange(len(lengths))
    whole = run(batch, everything, heads * head_dim, window=window, longest_run=1)
    assert (whole != 0x7FFF).all()
    for size in (1, 1, 1, 3, 17):
        chosen = np.sort(rng.choice(everything, size, replace=False))
        np.testing.assert_array_equal(run(batch, chosen, heads * head_dim, window=window, longest_run=1), whole[chosen])
    for row in everything[-5:]:
        np.testing.assert_array_equal(run(batch, [row], heads * head_dim, window=window, longest_run=1)[0], whole[row])
    # Whether the recording is made for verification does not matter either.
    np.testing.assert_array_equal(run(batch, everything, heads * head_dim, window=window, longest_run=None), whole)
