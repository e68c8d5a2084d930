"""Masks of the vocabulary on a GPU: a thread takes 4 logits, a warp reads one word of the mask for 32 of them."""

from zse import kernel as zl
from zse.kernels.mask import CHUNKS

EACH = 4
CHUNK = CHUNKS["gpu"]
THREADS = CHUNK // EACH


@zl.kernel
def mask_logits_gpu(
    logits: zl.Ptr[zl.f32], mask: zl.Ptr[zl.i32, "const"], line_of_row: zl.Ptr[zl.i32, "const"], vocab: zl.i32
):
    """Grid (chunks of the vocabulary, rows). Allowed logits are neither read nor written."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    row = zl.block_index(1)
    line = line_of_row[row]
    if line >= 0:
        x = logits + zl.i64(row) * vocab
        bits = mask + zl.i64(line) * ((vocab + 31) // 32)
        for j in zl.static(range(EACH)):
            at = zl.block_index(0) * CHUNK + j * zl.target.threads + zl.thread_index()
            if at < vocab:
                if (bits[at // 32] >> (at % 32)) & 1 == 0:
                    # A NaN stays: it has to fail the request.
                    if x[at] == x[at]:
                        x[at] = zl.f32(float("-inf"))


def mask_variants(target):
    return [zl.Variant("mask_logits", mask_logits_gpu, threads=THREADS)]
