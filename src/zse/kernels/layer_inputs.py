"""What Gemma 4 adds to a decoder: embeddings of each layer's own, a factor on each layer's output, and beside its
experts a dense MLP: both are normalized before they are added, and each expert has a factor."""

from zse import kernel as zl
from zse.kernels.norm import inverse_rms
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.kernels.qkv_post import LANES, head_factor
from zse.lazy import numpy as np
from zse.runtime.args import Args

HALF = 0.5**0.5
CHUNK = 4096  # columns of one block of scale_rows
WALKS: dict[str, dict[str, int]] = {"cpu": {"chunk": CHUNK}, "gpu": {}}  # a GPU's threads share a row as the grid is


class LayerInputs(zl.Record):
    """Parameters of layer_inputs."""

    product: zl.Ptr[zl.f32, "const"]
    rows: zl.Ptr[zl.f32, "const"]
    norm: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    layers: zl.index
    width: zl.index
    stride: zl.i64
    eps: zl.f32


@zl.kernel
def layer_inputs_heads(p: LayerInputs):
    """Grid (layers, tokens)."""
    layer = zl.block_index(0)
    token = zl.block_index(1)
    at = (token * p.layers + layer) * p.width
    factor = head_factor(p.product + at, p.width, p.eps)
    to = p.out + layer * p.stride + token * p.width
    for i in range(0, p.width, LANES):
        value = zl.load(p.product + at + i, LANES) * factor * zl.load(p.norm + i, LANES)
        zl.store(to + i, (value + zl.load(p.rows + at + i, LANES)) * HALF)


@zl.kernel
def scale_rows_chunk(x: zl.Ptr[zl.f32], factor: zl.Ptr[zl.f32, "const"], width: zl.i64, chunk: zl.i64):
    """Grid (chunks of columns, rows)."""
    L = zl.target.lanes
    row = x + zl.block_index(1) * width
    begin = zl.block_index(0) * chunk
    end = min(begin + chunk, width)
    whole = begin + (end - begin) // L * L
    for k in range(begin, whole, L):
        zl.store(row + k, zl.load(row + k, L) * factor[0])
    for k in range(whole, end):
        row[k] = row[k] * factor[0]


class NormSum(zl.Record):
    """Parameters of norm_sum."""

    a: zl.Ptr[zl.f32, "const"]
    b: zl.Ptr[zl.f32, "const"]
    a_weight: zl.Ptr[zl.f32, "const"]
    b_weight: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    width: zl.index
    eps: zl.f32


@zl.kernel
def norm_sum_row(p: NormSum):
    """Grid (rows,)."""
    L = zl.target.lanes
    at = zl.block_index(0) * p.width
    of_a, of_b = inverse_rms(p.a + at, p.width, p.eps), inverse_rms(p.b + at, p.width, p.eps)
    whole = p.width // L * L
    for k in range(0, whole, L):
        left = zl.load(p.a + at + k, L) * of_a * zl.load(p.a_weight + k, L)
        right = zl.load(p.b + at + k, L) * of_b * zl.load(p.b_weight + k, L)
        zl.store(p.out + at + k, left + right)
    for k in range(whole, p.width):
        p.out[at + k] = p.a[at + k] * of_a * p.a_weight[k] + p.b[at + k] * of_b * p.b_weight[k]


@zl.kernel
def scale_choices_token(
    ids: zl.Ptr[zl.i32, "const"], weights: zl.Ptr[zl.f32], factors: zl.Ptr[zl.f32, "const"], chosen: zl.i64
):
    """Grid (tokens,)."""
    first = zl.block_index(0) * chosen
    for j in range(first, first + chosen):
        weights[j] = weights[j] * factors[zl.i64(ids[j])]


def layer_inputs(recorder, product, rows, norm, out, eps: float) -> None:
    """out f32 [N, most, W], of which the first M tokens are written = (rmsnorm(product) * norm + rows) / sqrt(2), each
    layer's W columns normalized alone. product, rows f32 [M, N * W], norm f32 [W]; W a multiple of 8."""
    tokens, layers = product.shape[0], out.shape[0]
    most, width = out.shape[1:]
    require(width % LANES == 0, f"layer_inputs: width {width} is not a multiple of {LANES}")
    check("layer_inputs product", product, "f32", tokens, layers * width)
    check("layer_inputs rows", rows, "f32", tokens, layers * width)
    check("layer_inputs norm", norm, "f32", width)
    check("layer_inputs out", out, "f32", layers, most, width)
    args = Args(
        product=product, rows=rows, norm=norm, out=out, layers=layers, width=width, stride=most * width, eps=float(eps)
    )
    recorder.launch("layer_inputs", args, (layers, tokens))


def scale_rows(recorder, x, factor) -> None:
    """x f32 [M, W] = x * factor, in place. factor f32 [1]."""
    rows, width = x.shape
    check("scale_rows x", x, "f32", rows, width)
    check("scale_rows factor", factor, "f32", 1)
    args = Args(x=x, factor=factor, width=width, **WALKS[recorder.device.kernels])
    recorder.launch("scale_rows", args, (-(-width // CHUNK), rows))


def norm_sum(recorder, a, b, a_weight, b_weight, out, eps: float) -> None:
    """out f32 [M, W] = rmsnorm(a) * a_weight + rmsnorm(b) * b_weight. a, b f32 [M, W], the weights f32 [W]."""
    rows, width = a.shape
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        check(f"norm_sum {name}", tensor, "f32", rows, width)
    check("norm_sum a_weight", a_weight, "f32", width)
    check("norm_sum b_weight", b_weight, "f32", width)
    args = Args(a=a, b=b, a_weight=a_weight, b_weight=b_weight, out=out, width=width, eps=float(eps))
    recorder.launch("norm_sum", args, (rows,))


def scale_choices(recorder, ids, weights, factors) -> None:
    """weights f32 [M, k] = each times the factor of its expert, in place. ids i32 [M, k], factors f32 [E]."""
    tokens, chosen = ids.shape
    check("scale_choices ids", ids, "i32", tokens, chosen)
    check("scale_choices weights", weights, "f32", tokens, chosen)
    check("scale_choices factors", factors, "f32", None)
    recorder.launch("scale_choices", Args(ids=ids, weights=weights, factors=factors, chosen=chosen), (tokens,))


def _reference(product, rows, norm, eps, out=None):
    layers, _, width = out.shape
    x, added = (
        np.asarray(part, np.float64).reshape(len(part), layers, width).swapaxes(0, 1) for part in (product, rows)
    )
    normed = x / np.sqrt((x * x).mean(axis=2, keepdims=True) + eps) * norm.astype(np.float64)
    result = np.asarray(out, np.float64).copy()
    result[:, : len(product)] = (normed + added) * 0.5**0.5
    return {"out": result}


def _cases(rng, family="cpu"):
    near = Tolerance(1e-6, 2e-6, "norm and sum in f32")
    for tokens, layers, width, most in ((1, 3, 256, 4), (5, 7, 32, 5), (3, 2, 40, 9)):
        product, rows = (rng.standard_normal((tokens, layers * width)).astype(np.float32) for _ in range(2))
        norm = (1 + rng.standard_normal(width) / 4).astype(np.float32)
        before = rng.standard_normal((layers, most, width)).astype(np.float32)
        yield Case(
            f"{tokens}x{layers}x{width} of {most}",
            {"product": product, "rows": rows, "norm": norm},
            {"out": OutputSpec(before.shape, "float32", near, inout=before)},
            {"eps": 1e-3},
        )


def _scale_reference(factor, x=None):
    return {"x": np.asarray(x, np.float64) * factor.astype(np.float64)}


def _scale_cases(rng, family="cpu"):
    near = Tolerance(0.0, 1.2e-7, "one rounding")
    for rows, width in ((1, 5376), (3, 37), (2, 1536)):
        x = rng.standard_normal((rows, width)).astype(np.float32)
        factor = rng.uniform(0.1, 2, 1).astype(np.float32)
        yield Case(f"{rows}x{width}", {"factor": factor}, {"x": OutputSpec(x.shape, "float32", near, inout=x)})


def _sum_reference(a, b, a_weight, b_weight, eps):
    def normed(x, weight):
        x = np.asarray(x, np.float64)
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight.astype(np.float64)

    return {"out": normed(a, a_weight) + normed(b, b_weight)}


def _sum_cases(rng, family="cpu"):
    near = Tolerance(2e-6, 4e-6, "two norms whose squares are summed in f32, then four roundings")
    for rows, width in ((1, 2816), (3, 83), (2, 5), (5, 96)):
        a, b = (rng.standard_normal((rows, width)).astype(np.float32) * 4 + 1 for _ in range(2))
        weights = {f"{x}_weight": (1 + rng.standard_normal(width) / 4).astype(np.float32) for x in "ab"}
        outputs = {"out": OutputSpec((rows, width), "float32", near)}
        yield Case(f"{rows}x{width}", {"a": a, "b": b, **weights}, outputs, {"eps": 1e-5})


def _sum_cost(case: Case) -> Cost:
    numbers = case.inputs["a"].size
    return Cost(numbers * 12, numbers * 10)


def _choice_reference(ids, factors, weights=None):
    return {"weights": np.asarray(weights, np.float64) * factors.astype(np.float64)[ids]}


def _choice_cases(rng, family="cpu"):
    near = Tolerance(0.0, 1.2e-7, "one rounding")
    for tokens, chosen, experts in ((1, 8, 128), (5, 3, 7), (70, 1, 2)):
        ids = rng.integers(0, experts, (tokens, chosen)).astype(np.int32)
        weights = rng.random((tokens, chosen)).astype(np.float32)
        outputs = {"weights": OutputSpec(weights.shape, "float32", near, inout=weights)}
        inputs = {"ids": ids, "factors": rng.uniform(0.1, 2, experts).astype(np.float32)}
        yield Case(f"{tokens} tokens, {chosen} of {experts}", inputs, outputs)


def _choice_cost(case: Case) -> Cost:
    pairs = case.inputs["ids"].size
    return Cost(pairs * 16, pairs)


def _cost(case: Case) -> Cost:
    numbers = case.inputs["product"].size
    return Cost(numbers * 12, numbers * 6)


def _scale_cost(case: Case) -> Cost:
    rows, width = case.outputs["x"].shape
    return Cost(rows * width * 8, rows * width)


def _variants(target):
    return [zl.Variant("layer_inputs", layer_inputs_heads)]


def _scale_variants(target):
    return [zl.Variant("scale_rows", scale_rows_chunk)]


LAYER_INPUTS = Op(
    "layer_inputs", _variants, layer_inputs, _reference, _cases, _cost, later("gpu.step", "layer_input_variants")
)
SCALE_ROWS = Op(
    "scale_rows",
    _scale_variants,
    scale_rows,
    _scale_reference,
    _scale_cases,
    _scale_cost,
    later("gpu.step", "scale_row_variants"),
)
NORM_SUM = Op(
    "norm_sum",
    lambda target: [zl.Variant("norm_sum", norm_sum_row)],
    norm_sum,
    _sum_reference,
    _sum_cases,
    _sum_cost,
    later("gpu.step", "norm_sum_variants"),
)
SCALE_CHOICES = Op(
    "scale_choices",
    lambda target: [zl.Variant("scale_choices", scale_choices_token)],
    scale_choices,
    _choice_reference,
    _choice_cases,
    _choice_cost,
    later("gpu.step", "scale_choice_variants"),
)
