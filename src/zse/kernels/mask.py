"""Masks of the vocabulary: what a grammar forbids becomes minus infinity, in place."""

from zse import kernel as zl
from zse.kernels.op import EXACT, Case, Cost, Op, OutputSpec, check, later
from zse.lazy import numpy as np
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div

CHUNKS = {"cpu": 8192, "gpu": 1024}  # logits of one block: 32 KiB; four of each thread


@zl.kernel
def mask_logits_chunk(
    logits: zl.Ptr[zl.f32], mask: zl.Ptr[zl.i32, "const"], line_of_row: zl.Ptr[zl.i32, "const"], vocab: zl.i64
):
    """Grid (chunks of the vocabulary, rows). A word of the mask that allows all of its 32 tokens is passed over."""
    row = zl.block_index(1)
    line = line_of_row[row]
    if line >= 0:
        x = logits + row * vocab
        bits = mask + zl.i64(line) * ((vocab + 31) // 32)
        first = zl.block_index(0) * CHUNKS["cpu"]
        last = min(first + CHUNKS["cpu"], vocab)
        for at in range(first, last, 32):
            word = bits[at // 32]
            if word != -1:
                for j in range(min(zl.i64(32), last - at)):
                    # A NaN stays: it has to fail the request.
                    if (word >> zl.i32(j)) & 1 == 0 and x[at + j] == x[at + j]:
                        x[at + j] = zl.f32(float("-inf"))


def mask_logits(recorder, logits, mask, line_of_row) -> None:
    """logits f32 [R, V], in place: minus infinity where bit t % 32 of mask i32 [L, ceil(V / 32)] [line_of_row[r], t //
    32] is 0; NaN stays. line_of_row i32 [R]: -1 leaves the row as it is; the caller guarantees line_of_row < L."""
    rows, vocab = logits.shape
    check("mask_logits logits", logits, "f32", None, None)
    check("mask_logits mask", mask, "i32", None, ceil_div(vocab, 32))
    check("mask_logits line_of_row", line_of_row, "i32", rows)
    args = Args(logits=logits, mask=mask, line_of_row=line_of_row, vocab=vocab)
    recorder.launch("mask_logits", args, (ceil_div(vocab, CHUNKS[recorder.device.kernels]), rows))


def _reference(logits, mask, line_of_row):
    out = logits.copy()
    vocab = logits.shape[1]
    allowed = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    for row, line in enumerate(line_of_row):
        if line >= 0:
            out[row, ~allowed[line] & ~np.isnan(out[row])] = -np.inf
    return {"logits": out}


def _cases(rng, family="cpu"):
    for rows, vocab, lines, density in ((1, 5, 1, 0.5), (3, 160, 2, 0.02), (4, 8193, 4, 0.5), (2, 20011, 1, 0.999)):
        logits = rng.standard_normal((rows, vocab)).astype(np.float32)
        words = (vocab + 31) // 32
        bits = rng.random((lines, words * 32)) < density
        bits[:, :64] = True
        mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        line_of_row = rng.integers(-1, lines, rows).astype(np.int32)
        line_of_row[0] = 0
        yield Case(
            f"{rows} x {vocab}",
            {"mask": mask, "line_of_row": line_of_row},
            {"logits": OutputSpec((rows, vocab), "float32", EXACT, inout=logits)},
        )


def _cost(case: Case) -> Cost:
    rows, vocab = case.outputs["logits"].shape
    return Cost(rows * (4 * vocab + vocab // 8), 0)


MASK_LOGITS = Op(
    "mask_logits",
    lambda target: [zl.Variant("mask_logits", mask_logits_chunk)],
    mask_logits,
    _reference,
    _cases,
    _cost,
    later("gpu.mask", "mask_variants"),
)
