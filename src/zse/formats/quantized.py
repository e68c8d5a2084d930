"""Hugging Face checkpoints that others quantized: AWQ, GPTQ, compressed-tensors and fp8, as weights of this package.

`config.json` says how (`quantization_config`); each weight is stored as several tensors. `combine()` replaces those by
one TensorInfo under the name that the weight has in an unquantized checkpoint ("....q_proj.weight"), whose `parts` are
the stored tensors:

| quant_method | stored | becomes | equal |
|---|---|---|---|
| awq ("gemm", "gemv") | qweight, qzeros, scales | `int4-g<G>`: scale, offset = -zero * scale | offset rounded to f16 |
| gptq, symmetric | qweight, qzeros, scales, g_idx | `int4-g<G>-sym`, `int8-g<G>-sym` | bit for bit |
| gptq, with zero points | the same | `int4-g<G>`, `int8-g<G>` | offset rounded to f16 |
| compressed-tensors pack-quantized | weight_packed, weight_scale | `int<B>-g<G>-sym` | bit for bit where scales fit in f16 |
| compressed-tensors int-quantized | weight (I8), weight_scale | `int8-row-sym` | the same |
| fp8 and compressed-tensors float-quantized | weight, weight_scale | `fp8-row`, `fp8-tensor` | bit for bit |
| fp8 with weight_block_size (DeepSeek, Qwen) | weight, weight_scale_inv | `fp8-block` | bit for bit |
| fp8 of one scale a tensor (Mistral) | weight, weight_scale_inv | `fp8-tensor` | bit for bit |
| compressed-tensors mxfp8 | weight, weight_scale (2**n for 32 columns) | `bf16` | bit for bit |
| ModelOpt FP8 | weight, weight_scale | `fp8-tensor`, `fp8-row` | bit for bit |
| bitsandbytes nf4 | zse.formats.bitsandbytes says | `lut4-nf4-g32` | to 0.28 % of a block's largest, a factor to 2**-11 |
| bitsandbytes fp4 | the same | `bf16`, `f16` | bit for bit |
| 4-bit floats (NVFP4, MXFP4) | zse.formats.quantized_fp4 says | `lut4-fp4-...` | bit for bit |

2 and 3 bits are stored in 4, 7 bits in 8: the numbers are the same. Columns of groups that lie scattered (act-order)
are sorted by zse.formats.column_order.

Rounding an offset to f16 moves a weight by at most 2**-12 of the offset, about 0.2 % of a quantization step. Scales of
activations that a checkpoint brings are not used: activations get their scales when they are computed.
"""

from array import array
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from zse.errors import FormatError, UnsupportedError
from zse.formats import bitsandbytes, column_order, quantized_fp4
from zse.formats.source import BNB4_LAYOUT, TensorInfo
from zse.quant.affine import BITS
from zse.quant.scheme import FP8_BLOCK, GROUPS, AffineScheme, Fp8Scheme, Scheme

METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "modelopt", "mxfp4", "bitsandbytes")
# Nibble i of a word of AWQ's "gemm" format is column AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORDS = ("awq", "gemv", "gptq", "gptq+1", "packed")  # layouts of 32-bit words
INTEGERS = (*WORDS, "int8")
# What a weight is stored as by layout: the part that every such weight has, and the others.
_PARTS: dict[str, tuple[str, ...]] = {
    "awq": ("qweight", "qzeros", "scales"),
    "gemv": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "int8": ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point"),
    "fp8": ("weight", "weight_scale", "weight_scale_inv", "activation_scale", "input_scale", "output_scale"),
}
_TYPES = {"int8": "I8", "fp8": "F8_E4M3"}  # of "weight"; a weight of another type was left alone
SAMPLED_WEIGHTS, SAMPLED_GROUPS = 4, 1024  # matrices that are looked at, and groups that say something of zero points
MX_GROUP = 32  # columns of a scale of mxfp8
_FLOAT_SCALES = ("F32", "F16", "BF16")


class Method(NamedTuple):
    """One way in which a `quantization_config` says that weights are stored. layout: a key of _PARTS, or of 4-bit
    floats one of quantized_fp4.KINDS. group: columns of a scale, 0 for a whole row. zero_offset: what is added to
    GPTQ's stored zero points."""

    layout: str
    bits: int = 8
    group: int = 0
    symmetric: bool = True
    zero_offset: int = 0


def read_method(path: str, config: dict) -> tuple[Method, ...]:
    """The methods of a config.json's `quantization_config`, several where compressed-tensors mixes them.
    UnsupportedError names what is not known."""
    name = config.get("quant_method")
    if name is None and config.get("format"):
        name = "compressed-tensors"  # early files of that library
    if name == "awq":
        version = _one_of(path, "AWQ version", str(config.get("version", "gemm")).lower(), ("gemm", "gemv"))
        bits = _one_of(path, "bits", config.get("bits"), (4,))
        layout = "awq" if version == "gemm" else "gemv"
        return (Method(layout, bits, _group(path, config.get("group_size", 128)), False),)
    if name == "gptq":
        bits = _one_of(path, "bits", config.get("bits"), (2, 3, 4, 8))
        kind = str(config.get("checkpoint_format", "gptq")).lower()
        _one_of(path, "GPTQ checkpoint_format", kind, ("gptq", "gptq_v2"))
        group, symmetric = _group(path, config.get("group_size", 128)), bool(config.get("sym", True))
        return (Method("gptq", bits, group, symmetric, 1 if kind == "gptq" else 0),)
    if name == "fp8":
        _one_of(path, "weight_block_size", config.get("weight_block_size"), ([FP8_BLOCK, FP8_BLOCK], None))
        return (Method("fp8"),)
    if name == "compressed-tensors":
        return _compressed(path, config)
    if name == "modelopt":
        _one_of(path, "quant_algo", str(config.get("quant_algo")).upper(), ("NVFP4", "FP8"))
        return Method("modelopt"), Method("fp8")
    if name == "mxfp4":
        return (Method("mxfp4"),)
    if name == "bitsandbytes":
        is_4bit = config.get("load_in_4bit") or config.get("_load_in_4bit")
        _one_of(path, "bitsandbytes bits", 4 if is_4bit else 8, (4,))
        return (Method(BNB4_LAYOUT, 4),)
    raise UnsupportedError(
        f"{path}: quantization method", str(name)[:80], (*METHODS, "none (zse convert --quant makes a model small)")
    )


# compressed-tensors' formats → layouts. Which activations a format was made for is not asked: they are rounded as
# --activations says.
_FORMATS = {
    "pack-quantized": "packed",
    "int-quantized": "int8",
    "float-quantized": "fp8",
    "naive-quantized": "",
    "mxfp8-quantized": "fp8",
    "nvfp4-pack-quantized": "fp4",
    "mxfp4-pack-quantized": "fp4",
}


def _compressed(path: str, config: dict) -> tuple[Method, ...]:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise FormatError(path, 0, "config_groups", "is missing or empty")
    methods = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise FormatError(path, 0, "config_groups", "a group has no weights")
        kind = _one_of(path, "compressed-tensors format", group.get("format") or config.get("format"), _FORMATS)
        layout = _FORMATS[kind] or ("fp8" if weights.get("type") == "float" else "int8")
        if layout in quantized_fp4.KINDS:
            methods.append(Method(layout))
            continue
        if layout == "fp8":
            _one_of(path, "num_bits", weights.get("num_bits"), (8,))
            methods.append(Method("fp8"))
            continue
        bits = _one_of(path, "num_bits", weights.get("num_bits"), tuple(range(1, 9)))
        _one_of(path, "strategy", weights.get("strategy"), ("tensor", "channel", "group"))
        _one_of(path, "actorder", weights.get("actorder"), (None, False, True, "weight", "static", "group", "dynamic"))
        size = weights.get("group_size") if weights.get("strategy") == "group" else 0
        methods.append(Method(layout, bits, _group(path, size), bool(weights.get("symmetric", True))))
    return tuple(dict.fromkeys(methods))


def _one_of(path: str, key: str, value: Any, known: Collection) -> Any:
    if value not in known:
        raise UnsupportedError(f"{path}: {key}", value if isinstance(value, int) else str(value)[:80], known)
    return value


def _group(path: str, size: object) -> int:
    return int(_one_of(path, "group_size", 0 if size in (-1, None) else size, GROUPS))


def combine(path: str, tensors: dict[str, TensorInfo], methods: tuple[Method, ...]) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint with every quantized weight as one of them; the others stay.

    Raises FormatError for parts that are missing or do not fit together.
    """
    for method in methods:
        if method.layout == BNB4_LAYOUT:
            return bitsandbytes.combine(tensors)
        if method.layout in quantized_fp4.KINDS:
            tensors = quantized_fp4.combine(tensors, method.layout)
    taken: dict[str, TensorInfo] = {}
    used: set[str] = set()
    for layout in dict.fromkeys(method.layout for method in methods if method.layout in _PARTS):
        marker, *_ = known = _PARTS[layout]
        for name, info in tensors.items():
            if not name.endswith("." + marker) or info.type != _TYPES.get(layout, info.type):
                continue
            stem = name[: -len(marker) - 1]
            parts = {part: tensors[f"{stem}.{part}"] for part in known if f"{stem}.{part}" in tensors}
            used |= {f"{stem}.{part}" for part in parts}
            make = _fp8 if layout == "fp8" else _integers
            taken[f"{stem}.weight"] = make(f"{stem}.weight", parts, [m for m in methods if m.layout == layout])
    _check_zero_offset([info for info in taken.values() if info.layout.startswith("gptq")], methods[0])
    result: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        stem = name.rpartition(".")[0]
        if name not in used:
            result[name] = info
        elif f"{stem}.weight" in taken:  # where the first of its parts stood
            result[f"{stem}.weight"] = taken.pop(f"{stem}.weight")
    column_order.fold(result)
    return result


def _fp8(name: str, parts: dict[str, TensorInfo], methods: list[Method]) -> TensorInfo:
    weight = parts["weight"]
    scale = parts.get("weight_scale_inv") or parts.get("weight_scale")
    if scale is None:
        raise weight.wrong("has no weight_scale or weight_scale_inv beside it")
    if len(weight.shape) != 2:
        raise weight.wrong(f"has shape {list(weight.shape)}, expected a matrix")
    n, k = weight.shape
    if scale.type in ("U8", "F8_E8M0"):  # mxfp8: powers of two, 2**(byte - 127)
        if scale.shape != (n, k // MX_GROUP) or k % MX_GROUP:
            raise scale.wrong(f"has shape {list(scale.shape)} for a weight of {[n, k]}")
        stored = {"w": weight, "scale": scale}
        return TensorInfo(
            name, "BF16", (n, k), weight.file, weight.offset, weight.nbytes + scale.nbytes, "mxfp8", parts=stored
        )
    if scale.type not in _FLOAT_SCALES:
        raise weight.wrong(f"{list(weight.shape)} with a scale of type {scale.type}")
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


def _integers(name: str, parts: dict[str, TensorInfo], methods: list[Method]) -> TensorInfo:
    layout = methods[0].layout
    marker, *others = _PARTS[layout]
    packed, scale = parts[marker], parts.get("weight_scale") or parts.get("scales")
    zeros = parts.get("weight_zero_point") or parts.get("qzeros")
    if scale is None or scale.type not in _FLOAT_SCALES:
        raise packed.wrong("has no scales beside it")
    if (layout in WORDS and packed.type not in ("I32", "U32")) or len(packed.shape) != 2:
        raise packed.wrong(f"is {packed.type} {list(packed.shape)}, expected I32 words")
    found = [_fit(method, parts, packed, scale, zeros) for method in methods]
    fits = [fit for fit in found if isinstance(fit, _Fit)]
    if not fits:
        raise packed.wrong(
            f"has shape {list(packed.shape)}: {'; or '.join(str(reason) for reason in dict.fromkeys(found))}"
        )
    if len({fit.scheme for fit in fits}) > 1:
        known = [fit.scheme.name for fit in fits]
        raise UnsupportedError(
            f"{name}: what it is of several config_groups", " or ".join(known), ["one (a weight_shape tells)"]
        )
    (n, k), scheme, method = fits[0]
    stored = {"q": packed, "scale": scale}
    if zeros is not None and not (layout in ("packed", "int8") and scheme.symmetric):
        stored["zero"] = zeros
    order = parts.get("weight_g_idx") or parts.get("g_idx")
    if order is not None:
        if order.type != "I32" or order.shape != (k,):
            raise order.wrong(f"is {order.type} {list(order.shape)}, expected I32 [{k}]")
        if column_order.is_trivial(order, k // scheme.groups(k)):
            order = None
        else:
            stored["columns"] = order = order._replace(layout=column_order.G_IDX)
    # A symmetric GPTQ file repeats 2**(bits-1) as every zero point, one less in its first version.
    if layout == "gptq" and method.symmetric:
        _check_symmetric(stored.pop("zero"), method)
    if method.zero_offset and "zero" in stored:
        layout = "gptq+1"
    return _combined(name, scheme, (n, k), layout, stored)._replace(order=order)


class _Fit(NamedTuple):
    shape: tuple[int, int]
    scheme: AffineScheme
    method: Method


def _fit(method: Method, parts: dict[str, TensorInfo], packed, scale, zeros) -> _Fit | str:
    """What a weight's stored tensors are by a method, or why they are not."""
    layout, bits, group = method.layout, method.bits, method.group
    # A width that no scheme has is stored in the next one that has room.
    scheme = AffineScheme(min(width for width in BITS if width >= bits), group, method.symmetric)
    rows, columns = packed.shape
    fields = {"awq": columns, "gptq": rows}.get(layout, columns) * 32 // bits
    n, k = {"awq": (fields, rows), "gptq": (columns, fields), "int8": (rows, columns)}.get(layout, (rows, fields))
    if "weight_shape" in parts and (shape := _stored_shape(parts["weight_shape"])) != (n, k):
        return f"{bits} bits make a weight of {[n, k]}, its weight_shape is {list(shape)}"
    if not scheme.fits(k) or (layout in ("awq", "gptq") and n * bits % 32):
        return f"a weight of {[n, k]} with groups of {group}: neither whole words nor multiples of the group"
    groups = scheme.groups(k)
    filled = {32: 4, 64: 2}.get(group, 1)  # gemv: words of zero points of a row are a multiple of this
    filled *= -(-groups // 8 // filled)
    scales = {"awq": (groups, n), "gptq": (groups, n), "gemv": (n, 8 * filled)}.get(layout, (n, groups))
    if scale.shape != scales and not (layout == "int8" and groups == 1 and scale.num_elements in (1, n)):
        return f"its scales have shape {list(scale.shape)}, expected {list(scales)}"
    points = {"packed": (-(-n * bits // 32), groups), "int8": (n, groups), "gemv": (n, filled)}
    wanted = points.get(layout, (groups, n * bits // 32))
    types = ("I8",) if layout == "int8" else ("I32", "U32")
    if not method.symmetric or layout == "gptq":
        if zeros is None or zeros.type not in types or zeros.shape != wanted:
            return f"there are no zero points {list(wanted)} beside it"
    return _Fit((n, k), scheme, method)


def _stored_shape(info: TensorInfo) -> tuple[int, ...]:
    kind = {"I64": "q", "I32": "i"}.get(info.type)
    if kind is None or info.nbytes > 64:
        raise info.wrong(f"is {info.type} {list(info.shape)}, expected two integers")
    return tuple(array(kind, info.file.read(info.offset, info.nbytes, info.name)))


def _combined(
    name: str, scheme: Scheme, shape: tuple[int, int], layout: str, parts: dict[str, TensorInfo]
) -> TensorInfo:
    first, nbytes = next(iter(parts.values())), sum(part.nbytes for part in parts.values())
    return TensorInfo(name, scheme.name, shape, first.file, first.offset, nbytes, layout, parts=parts)


def _check_zero_offset(weights: list[TensorInfo], method: Method) -> None:
    """FormatError where asymmetric 4-bit zero points are those of the other checkpoint_format. Weights have no mean to
    speak of: with the right zero points the mean of q - zero over the first groups of some matrices is near 0 steps,
    with the others near 1 or -1. Few groups, or 8 bits, whose steps are too small, say nothing."""
    weights = [info for info in weights if "zero" in info.parts][:SAMPLED_WEIGHTS]
    if method.bits != 4 or not weights:
        return
    codes, stored = bytearray(), bytearray()
    for info in weights:
        q, zero = info.parts["q"], info.parts["zero"]
        group_rows = q.shape[0] // zero.shape[0]
        codes += q.file.read(q.offset, 4 * q.shape[1] * group_rows, q.name)
        lines = zero.shape[0] if "columns" in info.parts else 1  # the first columns are of any groups, or of the first
        stored += zero.file.read(zero.offset, 4 * zero.shape[1] * lines, zero.name)
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
    field = (1 << (method.bits - 1)) - method.zero_offset
    words = sum(field << (method.bits * place) for place in range(32)).to_bytes(4 * method.bits, "little")
    stored = zeros.file.read(zeros.offset, zeros.nbytes, zeros.name)
    if stored != (words * (zeros.nbytes // len(words) + 1))[: zeros.nbytes]:
        raise zeros.wrong("the checkpoint calls itself symmetric, but its zero points are not in the middle")
