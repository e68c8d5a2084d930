"""Hugging Face checkpoints with 4-bit floats: weights as indices into the table of E2M1, as lut4 (zse.quant.lut4).

| checkpoint | stored | becomes |
|---|---|---|
| compressed-tensors nvfp4-pack-quantized | weight_packed, weight_scale e4m3, weight_global_scale | `lut4-fp4-g16-e4m3`, factor = 1 / global |
| ModelOpt NVFP4 | weight u8, weight_scale e4m3, weight_scale_2 | `lut4-fp4-g16-e4m3`, factor = weight_scale_2 |
| compressed-tensors mxfp4-pack-quantized | weight_packed, weight_scale u8 (e8m0) | `lut4-fp4-g32-e8m0` |
| mxfp4 (gpt-oss) | NAME_blocks u8 [E, rows, K/32, 16], NAME_scales u8 | `lut4-fp4-g32-e8m0`, [E * rows, K] under NAME |

The low nibble of a byte is the even column. Indices, scales of groups and exponents are taken as they lie; the factor
is an f32, of compressed-tensors the rounded inverse (2**-24 of a weight). Scales of activations are not used: weights
meet activations of their usual form."""

import math

from zse.errors import UnsupportedError
from zse.formats.source import FP4_LAYOUTS, TensorInfo
from zse.lazy import numpy as np
from zse.quant.lut4 import Lut4Arrays, Lut4Scheme

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.typing import NDArray

NVFP4, MXFP4 = Lut4Scheme("fp4", "e4m3", 16), Lut4Scheme("fp4", "e8m0", 32)
# kind → the weight's tensor, the factor's, the layout
KINDS = {
    "fp4": ("weight_packed", "weight_global_scale", "fp4-inverse"),
    "modelopt": ("weight", "weight_scale_2", "fp4"),
    "mxfp4": ("", "", "fp4"),
}
UNUSED = ("input_global_scale", "input_scale")
LAYOUTS = FP4_LAYOUTS


def combine(tensors: dict[str, TensorInfo], kind: str) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint with every weight of 4-bit floats as one of them; the others stay. FormatError for
    parts that are missing or do not fit together."""
    if kind == "mxfp4":
        return _combine_blocks(tensors)
    weight, factor, layout = KINDS[kind]
    result: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        stem, _, part = name.rpartition(".")
        first = tensors.get(f"{stem}.{weight}")
        if (
            first is None
            or first.type != "U8"
            or part not in (weight, "weight_scale", factor, *UNUSED, "pre_quant_scale")
        ):
            result[name] = info
        elif part == "pre_quant_scale":
            raise UnsupportedError(f"{name}: scales of a weight's inputs", "pre_quant_scale (AWQ)", ["none"])
        elif part == weight:
            scale = tensors.get(f"{stem}.weight_scale")
            parts, scheme = {"q": info, "scale": scale}, MXFP4
            if scale is None or scale.type != "U8":
                scheme, parts["factor"] = NVFP4, tensors.get(f"{stem}.{factor}")
            result[f"{stem}.weight"] = _weight(f"{stem}.weight", scheme, layout, info.shape, parts)
    return result


def _combine_blocks(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    result: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name.endswith("_blocks") and info.type == "U8":
            stem = name.removesuffix("_blocks")
            if len(info.shape) < 3 or info.shape[-1] != 16:
                raise info.wrong(f"has shape {list(info.shape)}, expected [experts, rows, columns / 32, 16]")
            shape = math.prod(info.shape[:-2]), 16 * info.shape[-2]
            parts = {"q": info, "scale": tensors.get(f"{stem}_scales")}
            result[stem] = _weight(stem, MXFP4, "fp4", shape, parts)
        elif not (name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in tensors):
            result[name] = info
    return result


def _weight(name: str, scheme: Lut4Scheme, layout: str, stored: tuple[int, ...], parts: dict) -> TensorInfo:
    """stored: shape of the bytes, [rows, columns / 2]."""
    info = parts["q"]
    if len(stored) != 2:
        raise info.wrong(f"has shape {list(info.shape)}, expected [rows, columns / 2]")
    rows, columns = stored[0], 2 * stored[1]
    if not scheme.fits(columns):
        raise UnsupportedError(
            f"{name}: columns of a weight with groups of {scheme.group}", columns, ["multiples of 32"]
        )
    types = {"scale": ("F8_E4M3",) if scheme == NVFP4 else ("U8",), "factor": ("F32",)}
    counts = {"scale": rows * scheme.groups(columns), "factor": 1}
    found = {"q": info._replace(shape=(rows, columns // 2))}
    for role in list(parts)[1:]:
        part = parts[role]
        if part is None:
            raise info.wrong(f"has no {role} beside it")
        if part.type not in types[role] or part.num_elements != counts[role]:
            expected = f"{types[role][0]} of {counts[role]} numbers"
            raise part.wrong(
                f"is {part.type} {list(part.shape)}, expected {expected} for a weight of {[rows, columns]}"
            )
        found[role] = part._replace(shape=(rows, scheme.groups(columns))) if role == "scale" else part
    nbytes = sum(part.nbytes for part in found.values())
    return TensorInfo(name, scheme.name, (rows, columns), info.file, info.offset, nbytes, layout, parts=found)


def to_lut4(info: TensorInfo, q: bytes, scale: bytes, factor: bytes) -> Lut4Arrays:
    """Some rows of a weight of LAYOUTS from their bytes; factor: of the whole weight, or b"". ValueError for scales
    that are none."""
    scheme, columns = info.scheme, info.shape[1]
    assert isinstance(scheme, Lut4Scheme)
    packed = np.frombuffer(q, np.uint8).reshape(-1, columns // 2)
    index = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), columns)
    scales = np.frombuffer(scale, np.uint8).reshape(len(packed), -1)
    return Lut4Arrays(scheme, index, scales, _factor(info, scales, factor))


def _factor(info: TensorInfo, scales: "NDArray", raw: bytes) -> "NDArray | None":
    if info.scheme != NVFP4:
        return None
    if scales.max(initial=0) >= 127:
        raise ValueError("a scale is negative or NaN")
    with np.errstate(divide="ignore"):
        value = np.frombuffer(raw, np.float32)[0]
        factor = np.float32(1) / value if info.layout == "fp4-inverse" else value
    if not np.isfinite(factor):
        raise ValueError(f"the scale of the whole weight is {value}")
    return np.full((len(scales), 1), factor, np.float32)
