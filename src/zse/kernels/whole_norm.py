"""RMSNorm of q and of k over all heads together where a rank has some of the heads (docs/design/0011): each rank's sums of squares,
which the ranks add up, then the norm by those."""

from zse import kernel as zl
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.kernels.qkv_post import LANES, sources
from zse.lazy import numpy as np
from zse.runtime.args import Args

# f32 numbers of a token that are added up: of q, of k, and zeros, for sums between GPUs are of 16 and 32 bytes at a time.
SUMS = 8
CHUNK = 1024  # columns of q or k of one block that normalizes


class WholeNorm(zl.Record):
    """q, k f32, rows q_stride and k_stride apart. share: of k's sum that is this rank's, where others have the same heads.
    q_whole, k_whole: columns of all ranks together."""

    q: zl.Ptr[zl.f32]
    k: zl.Ptr[zl.f32]
    q_stride: zl.index
    k_stride: zl.index
    q_width: zl.index
    k_width: zl.index
    q_norm: zl.Ptr[zl.f32, "const"]
    k_norm: zl.Ptr[zl.f32, "const"]
    sums: zl.Ptr[zl.f32]
    share: zl.f32
    q_whole: zl.f32
    k_whole: zl.f32
    eps: zl.f32


@zl.inline
def squares(x, width):
    sums = zl.f32.x(LANES)(0)
    for i in range(0, width, LANES):
        value = zl.load(x + i, LANES)
        sums = zl.fma(value, value, sums)
    return zl.reduce_add(sums)


@zl.kernel
def head_squares_token(p: WholeNorm):
    """Grid (tokens)."""
    token = zl.block_index(0)
    found = p.sums + token * SUMS
    for i in zl.static(range(SUMS)):
        found[i] = zl.f32(0)
    found[0] = squares(p.q + token * p.q_stride, p.q_width)
    found[1] = squares(p.k + token * p.k_stride, p.k_width) * p.share


@zl.inline
def scale_chunk(row, weight, width, factor):
    begin = zl.block_index(0) * CHUNK
    for i in range(begin, min(begin + CHUNK, width), LANES):
        zl.store(row + i, zl.load(row + i, LANES) * factor * zl.load(weight + i, LANES))


@zl.kernel
def whole_norm_chunk(p: WholeNorm):
    """Grid (chunks of columns, tokens)."""
    token = zl.block_index(1)
    q_factor = 1.0 / zl.sqrt(p.sums[token * SUMS] / p.q_whole + p.eps)
    k_factor = 1.0 / zl.sqrt(p.sums[token * SUMS + 1] / p.k_whole + p.eps)
    scale_chunk(p.q + token * p.q_stride, p.q_norm, p.q_width, q_factor)
    scale_chunk(p.k + token * p.k_stride, p.k_norm, p.k_width, k_factor)


def head_squares(recorder, qkv, widths: tuple[int, int], sums, share: float = 1.0) -> None:
    """sums f32 [M, SUMS] = of each token the sum of the squares of q, `share` times that of k, zeros. qkv: as qkv_post() takes
    it. widths: columns of q and of k, multiples of 8."""
    args = _args(qkv, widths, sums, "head_squares") | dict(share=float(share))
    recorder.launch("head_squares", Args(**args), (sums.shape[0],))


def whole_norm(
    recorder, qkv, widths: tuple[int, int], sums, whole: tuple[int, int], q_norm, k_norm, eps: float
) -> None:
    """q and k, in place: times the root of their mean square, then their weights. sums: of all ranks, as head_squares() leaves
    them; whole: columns of q and k of all ranks together; q_norm, k_norm: f32, of this rank's columns. Else as there."""
    for name, weight, width in (("q_norm", q_norm, widths[0]), ("k_norm", k_norm, widths[1])):
        check(f"whole_norm {name}", weight, "f32", width)
    args = _args(qkv, widths, sums, "whole_norm")
    args |= dict(q_norm=q_norm, k_norm=k_norm, q_whole=float(whole[0]), k_whole=float(whole[1]), eps=float(eps))
    recorder.launch("whole_norm", Args(**args), (-(-max(widths) // CHUNK), sums.shape[0]))


def _args(qkv, widths: tuple[int, int], sums, name: str) -> dict:
    """What both launches take; what only the other one reads is absent."""
    (q_width, k_width), tokens = widths, sums.shape[0]
    require(q_width % LANES == k_width % LANES == 0, f"{name}: {q_width} and {k_width} columns, of which each {LANES}")
    check(f"{name} sums", sums, "f32", tokens, SUMS)
    q, k, _, strides = sources(qkv, tokens, q_width, k_width)
    places = dict(q=q, k=k, q_stride=strides[0], k_stride=strides[1], q_width=q_width, k_width=k_width, sums=sums)
    return places | dict(q_norm=None, k_norm=None, share=1.0, q_whole=1.0, k_whole=1.0, eps=0.0)


def _parts(qkv, widths) -> list:
    return [
        part.astype(np.float64) for part in (qkv if isinstance(qkv, tuple) else np.split(qkv, np.cumsum(widths), 1))
    ]


def _squares_reference(qkv, widths, share, sums=None):
    q, k, *_ = _parts(qkv, widths)
    zeros = np.zeros((len(q), SUMS - 2))
    return {"sums": np.concatenate([(q * q).sum(1, keepdims=True), (k * k).sum(1, keepdims=True) * share, zeros], 1)}


def _norm_reference(sums, q_norm, k_norm, widths, whole, eps, qkv=None):
    q, k, v = _parts(qkv, widths)
    done = [
        x / np.sqrt(sums[:, i : i + 1].astype(np.float64) / whole[i] + eps) * weight.astype(np.float64)
        for i, (x, weight) in enumerate(((q, q_norm), (k, k_norm)))
    ]
    return {"qkv": np.concatenate([*done, v], 1)}


SIZES = ((1, (4096, 1024)), (5, (112, 48)), (70, (1016, 2056)), (3, (8, 8)))


def _squares_cases(rng, family="cpu"):
    near = Tolerance(1e-30, 4e-6, "squares of up to 4,096 numbers summed in f32")
    for number, (tokens, widths) in enumerate(SIZES):
        parts = [rng.standard_normal((tokens, width)).astype(np.float32) * 3 for width in (*widths, widths[1])]
        qkv = np.concatenate(parts, 1) if number % 2 else tuple(parts)
        outputs = {"sums": OutputSpec((tokens, SUMS), "float32", near)}
        yield Case(f"{tokens}x{widths}", {"qkv": qkv}, outputs, {"widths": widths, "share": 1 / (1 + number)})


def _norm_cases(rng, family="cpu"):
    near = Tolerance(1e-30, 4e-6, "a mean, its root and two products in f32")
    for tokens, widths in SIZES:
        qkv = rng.standard_normal((tokens, sum(widths) + widths[1])).astype(np.float32) * 3
        weights = [(1 + rng.standard_normal(width) / 4).astype(np.float32) for width in widths]
        sums = (rng.random((tokens, SUMS)) * 1000).astype(np.float32)
        outputs = {"qkv": OutputSpec(qkv.shape, "float32", near, inout=qkv)}
        inputs = {"sums": sums, "q_norm": weights[0], "k_norm": weights[1]}
        options = {"widths": widths, "whole": (2 * widths[0], 3 * widths[1]), "eps": 1e-5}
        yield Case(f"{tokens}x{widths}", inputs, outputs, options)


def _cost(times: int):
    def cost(case: Case) -> Cost:
        qkv = case.inputs["qkv"] if "qkv" in case.inputs else case.outputs["qkv"].inout
        tokens = len(qkv[0]) if isinstance(qkv, tuple) else len(qkv)
        numbers = tokens * sum(case.options["widths"])
        return Cost(4 * times * numbers, 2 * numbers)

    return cost


HEAD_SQUARES = Op(
    "head_squares",
    lambda target: [zl.Variant("head_squares", head_squares_token)],
    head_squares,
    _squares_reference,
    _squares_cases,
    _cost(1),
    later("gpu.whole_norm", "square_variants"),
)
WHOLE_NORM = Op(
    "whole_norm",
    lambda target: [zl.Variant("whole_norm", whole_norm_chunk)],
    whole_norm,
    _norm_reference,
    _norm_cases,
    _cost(2),
    later("gpu.whole_norm", "norm_variants"),
)
