"""`zse verify`: reads a whole model and says whether it is sound."""

import os
from collections import namedtuple
from collections.abc import Callable

from zse.formats import quantized_fp4
from zse.formats.arrays import ScalarArray, StringArray
from zse.formats.file import parse_object
from zse.formats.gguf_blocks import dequantize, scales_of
from zse.formats.matrix import FLOATS, FP8_TYPES, Rows, widen
from zse.formats.opening import open_model
from zse.formats.quantized import INTEGERS
from zse.formats.source import BNB4_LAYOUT, ModelSource, TensorInfo
from zse.formats.zse import ENTRY, HEADER, read_sections
from zse.lazy import numpy as np
from zse.quant.affine import AffineArrays
from zse.quant.lut4 import Lut4Arrays, Lut4Scheme
from zse.quant.pack import e4m3_to_f32
from zse.quant.superblock import SuperblockScheme

_CHUNK_BYTES = 1 << 22
_CHUNK_ELEMENTS = 1 << 20


class VerifyReport(namedtuple("VerifyReport", "path kind num_tensors nbytes checks")):
    """What was verified: the model's kind, tensors and bytes read, and a line for every kind of check that passed."""

    __slots__ = ()


def verify(
    path: str | os.PathLike, progress: Callable[[int, int, str], None] | None = None, *, numbers: bool = True
) -> VerifyReport:
    """Checks a model from end to end. Raises FormatError at the first damage, naming file, offset and tensor.

    Every format: the structure (as every opening does), every byte readable, the vocabulary's strings, and with
    `numbers` no NaN or infinity in weights, scales and offsets. `.zse`: all checksums too, and zeros between tensors.
    progress(done_bytes, total_bytes, tensor).
    """
    with open_model(path) as model:
        checks = ["structure: every number in the headers fits the file"]
        if model.kind == "zse":
            _verify_gaps(model)
            checks.append("padding: zeros between sections and tensors")
        if _verify_tokenizer(model):
            checks.append("tokenizer: vocabulary complete")
        total = sum(info.nbytes for info in model.tensors.values())
        done = 0
        for info in model.tensors.values():
            checked = numbers and _verify_numbers(model, info)
            if info.crc32 is not None or not checked:
                model.check_sum(info)
            done += info.nbytes
            if progress:
                progress(done, total, info.name)
        if model.kind == "zse":
            checks.append("checksums: header, sections, vocabulary, every tensor")
        checks.append("data: every byte was read" + (", and no weight or scale is NaN or infinite" if numbers else ""))
        model.check_unchanged()
        return VerifyReport(model.path, model.kind, len(model.tensors), total, tuple(checks))


def _verify_tokenizer(model: ModelSource) -> bool:
    tokenizer = model.tokenizer
    if tokenizer is None:
        return False
    if tokenizer.image is not None:
        tokenizer.image()  # reads and checks
    if tokenizer.kind == "hf":
        parse_object(tokenizer.json, model.path, 0, "tokenizer.json")
        return True
    for array in tokenizer.fields.values():
        if isinstance(array, StringArray | ScalarArray):
            _ = array.raw  # reads, walks and checks
    return True


def _verify_numbers(model: ModelSource, info: TensorInfo) -> bool:
    """FormatError for NaN and infinities; False if the tensor is not of numbers that could be such."""
    if info.layout in INTEGERS:
        return _verify_numbers(model, info.parts["scale"])
    is_fp8 = info.type in FP8_TYPES
    if info.layout == "rows" and info.type not in FLOATS and not is_fp8:
        return False
    if len(info.shape) < 2:  # a number, or a vector, perhaps of blocks
        parts, row_bytes = [(0, 1)], info.nbytes
    else:
        row_bytes = info.nbytes // info.shape[0]
        rows = max(128, _CHUNK_ELEMENTS * info.shape[0] // info.num_elements // 128 * 128)
        parts = [(start, min(start + rows, info.shape[0])) for start in range(0, info.shape[0], rows)]
    arrays: dict[str, np.ndarray]
    for start, stop in parts:
        if info.layout in ("mxfp8", BNB4_LAYOUT):
            arrays = {"w": Rows(model, info, start, stop).f32()}
        elif info.layout in quantized_fp4.LAYOUTS:
            try:
                found = Rows(model, info, start, stop).arrays()
                assert isinstance(found, AffineArrays | Lut4Arrays)
                arrays = {"scale": found.steps() if isinstance(found, Lut4Arrays) else found.scale}
            except ValueError as error:
                raise info.wrong(str(error)) from None
        elif info.layout == "r16" or is_fp8:
            planes = Rows(model, info, start, stop).planes()
            arrays = {name: planes[name] for name in ("scale", "offset") if name in planes}
            if isinstance(info.scheme, SuperblockScheme):
                arrays = {"scale": planes["factor"]}
            if isinstance(info.scheme, Lut4Scheme):
                arrays = {"scale": info.scheme.unpack(planes, stop - start, info.shape[1]).steps()}
            if "w" in planes:
                arrays["w"] = e4m3_to_f32(planes["w"]) if is_fp8 else widen(planes["w"], info.type)
        else:
            raw = model.read(info, start * row_bytes, (stop - start) * row_bytes)
            if info.layout == "rows":
                arrays = {"w": dequantize(info.type, raw, (-1,))}
            else:
                arrays = {"scale": scales_of(info.type, raw)}
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                what = {"w": "weight"}.get(name, name)
                raise info.wrong(f"a {what} in rows [{start}, {stop}) is NaN or infinite")
    return True


def _verify_gaps(model: ModelSource) -> None:
    """A .zse holds nothing but its sections and tensors: everything between them is zero."""
    file = model.files[0]
    sections = read_sections(file)
    taken = [(0, HEADER.size + len(sections) * ENTRY.size)]
    for section in sections.values():
        if section.name != "weights":
            taken.append((section.offset, section.offset + section.nbytes))
    taken += [(offset, offset + nbytes) for info in model.tensors.values() for _, offset, nbytes in info.ranges()]
    taken.append((file.size, file.size))
    end = 0
    for start, stop in sorted(taken):
        while end < start:
            data = file.read(end, min(_CHUNK_BYTES, start - end), "padding")
            if data.count(0) != len(data):
                raise file.wrong(end, "padding", f"bytes [{end}, {start}) are not zero")
            end += len(data)
        end = max(end, stop)
