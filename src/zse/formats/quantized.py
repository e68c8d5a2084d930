"""Hugging Face checkpoints that others quantized: AWQ, GPTQ, compressed-tensors and fp8, as weights of this package.

`config.json` says how (`quantization_config`); each weight is stored as several tensors. `combine()` replaces those by
one TensorInfo under the name that the weight has in an unquantized checkpoint ("....q_proj.weight"), whose `parts` are
the stored tensors:

| quant_method | stored | becomes | equal |
|---|---|---|---|
| awq ("gemm") | qweight, qzeros, scales | `int4-g<G>`: scale, offset = -zero * scale | offset rounded to f16 |
| gptq, symmetric | qweight, qzeros, scales | `int4-g<G>-sym`, `int8-g<G>-sym` | bit for bit |
| gptq, with zero points | the same | `int4-g<G>`, `int8-g<G>` | offset rounded to f16 |
| compressed-tensors pack-quantized | weight_packed, weight_scale | `int4-g<G>-sym`, `int8-g<G>-sym` | bit for bit |
| fp8 and compressed-tensors float-quantized | weight, weight_scale | `fp8-row`, `fp8-tensor` | bit for bit |
| fp8 with weight_block_size (DeepSeek, Qwen) | weight, weight_scale_inv | `fp8-block` | bit for bit |
| fp8 of one scale a tensor (Mistral) | weight, weight_scale_inv | `fp8-tensor` | bit for bit |

Rounding an offset to f16 moves a weight by at most 2**-12 of the offset, about 0.2 % of a quantization step. Scales of
activations that a checkpoint brings are not used: activations get their scales when they are computed.
"""

from array import array
from collections import Counter
from typing import Any

from zse.errors import FormatError, UnsupportedError
from zse.formats.source import TensorInfo
from zse.quant.scheme import FP8_BLOCK, GROUPS, AffineScheme, Fp8Scheme, Scheme

METHODS = ("awq", "gptq", "compressed-tensors", "fp8")
# Nibble i of a word of AWQ's "gemm" format is column AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "fp8": ("weight", "weight_scale", "weight_scale_inv", "activation_scale", "input_scale", "output_scale"),
}
SAMPLED_WEIGHTS, SAMPLED_GROUPS = 4, 1024  # matrices that are looked at, and groups that say something of zero points
_FLOAT_SCALES = ("F32", "F16", "BF16")


class Method:
    """What a `quantization_config` says. layout: "awq", "gptq", "packed" or "rows" (fp8). group: columns of a scale,
    0 for a whole row. zero_offset: what is added to GPTQ's stored zero points."""

    def __init__(self, layout: str, bits: int, group: int, symmetric: bool, zero_offset: int = 0):
        self.layout, self.bits, self.group, self.symmetric = layout, bits, group, symmetric
        self.zero_offset = zero_offset


def read_method(path: str, config: dict) -> Method:
    """The method of a config.json's `quantization_config`. UnsupportedError names what is not known."""
    name = config.get("quant_method")
    if name is None and config.get("format"):
        name = "compressed-tensors"  # early files of that library
    if name == "awq":
        _one_of(path, "AWQ version", str(config.get("version", "gemm")).lower(), ("gemm",))
        bits = _one_of(path, "bits", config.get("bits"), (4,))
        return Method("awq", bits, _group(path, config.get("group_size", 128)), False)
    if name == "gptq":
        bits = _one_of(path, "bits", config.get("bits"), (4, 8))
        kind = str(config.get("checkpoint_format", "gptq")).lower()
        _one_of(path, "GPTQ checkpoint_format", kind, ("gptq", "gptq_v2"))
        group, symmetric = _group(path, config.get("group_size", 128)), bool(config.get("sym", True))
        return Method("gptq", bits, group, symmetric, 1 if kind == "gptq" else 0)
    if name == "fp8":
        _one_of(path, "weight_block_size", config.get("weight_block_size"), ([FP8_BLOCK, FP8_BLOCK], None))
        return Method("rows", 8, 0, True)
    if name == "compressed-tensors":
        return _compressed(path, config)
    raise UnsupportedError(
        f"{path}: quantization method", str(name)[:80], (*METHODS, "none (zse convert --quant makes a model small)")
    )


def _compressed(path: str, config: dict) -> Method:
    kinds = ("pack-quantized", "float-quantized")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise FormatError(path, 0, "config_groups", "is missing or empty")
    methods = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise FormatError(path, 0, "config_groups", "a group has no weights")
        kind = _one_of(path, "compressed-tensors format", group.get("format") or config.get("format"), kinds)
        if kind == "float-quantized":
            _one_of(path, "num_bits", weights.get("num_bits"), (8,))
            methods.append(("rows", 8, 0, True))
            continue
        bits = _one_of(path, "num_bits", weights.get("num_bits"), (4, 8))
        _one_of(path, "actorder", weights.get("actorder"), (None, "weight", "static", False))
        size = weights.get("group_size") if weights.get("strategy") == "group" else 0
        methods.append(("packed", bits, _group(path, size), bool(weights.get("symmetric", True))))
    if len(set(methods)) != 1:
        raise UnsupportedError(f"{path}: config_groups of different kinds", len(set(methods)), (1,))
    return Method(*methods[0])


def _one_of(path: str, key: str, value: Any, known: tuple) -> Any:
    if value not in known:
        raise UnsupportedError(f"{path}: {key}", value if isinstance(value, int) else str(value)[:80], known)
    return value


def _group(path: str, size: object) -> int:
    return int(_one_of(path, "group_size", 0 if size in (-1, None) else size, GROUPS))


def combine(path: str, tensors: dict[str, TensorInfo], method: Method) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint with every quantized weight as one of them; the others stay.

    Raises FormatError for parts that are missing or do not fit together, UnsupportedError for act-order.
    """
    marker = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "rows": "weight"}[method.layout]
    stems = [
        name[: -len(marker) - 1]
        for name, info in tensors.items()
        if name.endswith("." + marker) and (method.layout != "rows" or info.type == "F8_E4M3")
    ]
    known = _PARTS["fp8" if method.layout == "rows" else method.layout]
    taken: dict[str, TensorInfo] = {}
    used: set[str] = set()
    for stem in stems:
        parts = {part: tensors[f"{stem}.{part}"] for part in known if f"{stem}.{part}" in tensors}
        used |= {f"{stem}.{part}" for part in parts}
        make = _fp8 if method.layout == "rows" else _integers
        taken[f"{stem}.weight"] = make(f"{stem}.weight", parts, method)
    _check_zero_offset([info for info in taken.values() if info.layout.startswith("gptq")], method)
    result: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        stem = name.rpartition(".")[0]
        if name not in used:
            result[name] = info
        elif f"{stem}.weight" in taken:  # where the first of its parts stood
            result[f"{stem}.weight"] = taken.pop(f"{stem}.weight")
    return result


def _fp8(name: str, parts: dict[str, TensorInfo], method: Method) -> TensorInfo:
    weight = parts["weight"]
    scale = parts.get("weight_scale_inv") or parts.get("weight_scale")
    if scale is None:
        raise weight.wrong("has no weight_scale or weight_scale_inv beside it")
    if scale.type not in _FLOAT_SCALES or len(weight.shape) != 2:
        raise weight.wrong(f"{list(weight.shape)} with a scale of type {scale.type}")
    n, k = weight.shape
    shape = tuple(size for size in scale.shape if size != 1) or (1,)
    by_shape = {(n,): "row", (1,): "tensor"}
    # Despite its name the inverse multiplies; of two dimensions it is of blocks.
    is_inverse = "weight_scale_inv" in parts
    scaling = by_shape.get(shape) if not is_inverse or len(scale.shape) < 2 else None
    if scaling is None and scale.shape == Fp8Scheme("block").scale_shape(n, k):
        scaling = "block"
    if scaling is None:
        raise scale.wrong(f"has shape {list(scale.shape)} for a weight of {[n, k]}")
    return _combined(name, Fp8Scheme(scaling), (n, k), "rows", {"w": weight, "scale": scale})


def _integers(name: str, parts: dict[str, TensorInfo], method: Method) -> TensorInfo:
    layout = method.layout
    packed = parts["weight_packed" if layout == "packed" else "qweight"]
    scale = parts.get("weight_scale" if layout == "packed" else "scales")
    zeros = parts.get("weight_zero_point" if layout == "packed" else "qzeros")
    per_word = 32 // method.bits
    if scale is None or scale.type not in _FLOAT_SCALES or len(scale.shape) != 2:
        raise packed.wrong("has no matrix of scales beside it")
    if packed.type not in ("I32", "U32") or len(packed.shape) != 2:
        raise packed.wrong(f"is {packed.type} {list(packed.shape)}, expected I32 words")
    if layout == "awq":  # [K, N / 8]
        k, n = packed.shape[0], packed.shape[1] * per_word
    elif layout == "gptq":  # [K / 8, N]
        k, n = packed.shape[0] * per_word, packed.shape[1]
    else:  # [N, K / 8]
        n, k = packed.shape[0], packed.shape[1] * per_word
    scheme = AffineScheme(method.bits, method.group, method.symmetric)
    if not scheme.fits(k) or n % per_word:
        what = f"{name}: shape of a weight with groups of {method.group}"
        raise UnsupportedError(what, [n, k], ["multiples of the group"])
    groups = scheme.groups(k)
    expected = (n, groups) if layout == "packed" else (groups, n)
    if scale.shape != expected:
        raise scale.wrong(f"has shape {list(scale.shape)}, expected {list(expected)}")
    if layout != "packed" or not method.symmetric:
        wanted = (n // per_word, groups) if layout == "packed" else (groups, n // per_word)
        if zeros is None or zeros.type not in ("I32", "U32") or zeros.shape != wanted:
            raise packed.wrong(f"has no zero points {list(wanted)} beside it")
    order = parts.get("weight_g_idx") or parts.get("g_idx")
    if order is not None:
        if order.type != "I32" or order.shape != (k,):
            raise order.wrong(f"is {order.type} {list(order.shape)}, expected I32 [{k}]")
        _check_order(order, k // groups)
    stored = {"q": packed, "scale": scale}
    if zeros is not None:
        stored["zero"] = zeros
    # A symmetric GPTQ file repeats 2**(bits-1) as every zero point, one less in its first version.
    if layout == "gptq" and method.symmetric:
        _check_symmetric(zeros, method)  # type: ignore[arg-type]
        del stored["zero"]
    if method.zero_offset and "zero" in stored:
        layout = "gptq+1"
    return _combined(name, scheme, (n, k), layout, stored)


def _combined(
    name: str, scheme: Scheme, shape: tuple[int, int], layout: str, parts: dict[str, TensorInfo]
) -> TensorInfo:
    first, nbytes = next(iter(parts.values())), sum(part.nbytes for part in parts.values())
    return TensorInfo(name, scheme.name, shape, first.file, first.offset, nbytes, layout, parts=parts)


def _check_order(order: TensorInfo, group: int) -> None:
    """GPTQ's act-order: columns of a group may lie anywhere. Then no group is a range of columns."""
    values = array("i", order.file.read(order.offset, order.nbytes, order.name))
    if any(value != column // group for column, value in enumerate(values)):
        known = ("groups of consecutive columns",)
        raise UnsupportedError(f"{order.name}: order of the columns", "act-order (desc_act)", known)


def _check_zero_offset(weights: list[TensorInfo], method: Method) -> None:
    """FormatError where asymmetric 4-bit zero points are those of the other checkpoint_format. Weights have no mean to speak
    of: with the right zero points the mean of q - zero over the first groups of some matrices is near 0 steps, with the
    others near 1 or -1. Few groups, or 8 bits, whose steps are too small, say nothing."""
    weights = [info for info in weights if "zero" in info.parts][:SAMPLED_WEIGHTS]
    if method.bits != 4 or not weights:
        return
    codes, stored = bytearray(), bytearray()
    for info in weights:
        q, zero = info.parts["q"], info.parts["zero"]
        group_rows = q.shape[0] // zero.shape[0]
        codes += q.file.read(q.offset, 4 * q.shape[1] * group_rows, q.name)
        stored += zero.file.read(zero.offset, 4 * zero.shape[1], zero.name)
    if 2 * len(stored) < SAMPLED_GROUPS:
        return
    mean = _mean_nibble(codes, 0)
    declared, other = (mean - _mean_nibble(stored, offset) for offset in (method.zero_offset, 1 - method.zero_offset))
    if abs(declared) > 0.6 and abs(other) < 0.4:
        names = ("gptq_v2", "gptq")
        raise (
            weights[0]
            .parts["zero"]
            .wrong(
                f"these are zero points of checkpoint_format {names[1 - method.zero_offset]}, the config says "
                f"{names[method.zero_offset]}: every weight would be off by one step; mend checkpoint_format in config.json"
            )
        )


def _mean_nibble(data: bytes | bytearray, offset: int) -> float:
    """The mean of the 4-bit numbers, each plus `offset` modulo 16."""
    values = [(value + offset) % 16 for value in range(16)]
    total = sum(count * (values[byte & 15] + values[byte >> 4]) for byte, count in Counter(data).items())
    return total / (2 * len(data))


def _check_symmetric(zeros: TensorInfo, method: Method) -> None:
    nibble = (1 << (method.bits - 1)) - method.zero_offset
    word = sum(nibble << (method.bits * place) for place in range(32 // method.bits)).to_bytes(4, "little")
    if zeros.file.read(zeros.offset, zeros.nbytes, zeros.name) != word * (zeros.nbytes // 4):
        raise zeros.wrong("the checkpoint calls itself symmetric, but its zero points are not in the middle")
