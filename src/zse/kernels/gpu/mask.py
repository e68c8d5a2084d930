"""Masks of the vocabulary on a GPU: a thread takes 4 logits, a warp reads one word of the mask for 32 of them."""

from zse.kernel import (
    Ptr,
    Variant,
    block_index,
    f32,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    kernel,
    static,
    target,
    thread_index,
)

THREADS = 256
EACH = 4
CHUNK = THREADS * EACH


@kernel
def mask_logits_gpu(logits: Ptr[f32], mask: Ptr[i32, "const"], line_of_row: Ptr[i32, "const"], vocab: i32):
    """Grid (chunks of the vocabulary, rows). Allowed logits are neither read nor written."""
    grid_launch_dependents()
    grid_wait()
    row = block_index(1)
    line = line_of_row[row]
    if line >= 0:
        x = logits + i64(row) * vocab
        bits = mask + i64(line) * ((vocab + 31) // 32)
        for j in static(range(EACH)):
            at = block_index(0) * CHUNK + j * target.threads + thread_index()
            if at < vocab:
                if (bits[at // 32] >> (at % 32)) & 1 == 0:
                    # A NaN stays: it has to fail the request.
                    if x[at] == x[at]:
                        x[at] = f32(float("-inf"))


def mask_variants(target):
    return [Variant("mask_logits", mask_logits_gpu, threads=THREADS)]
