"""GGUF files: header, metadata and tensor index (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Arrays under `tokenizer.` and long ones stay in the file (zse.formats.arrays); everything else is decoded at open.

Row order: converters to GGUF permute the rows of attn_q and attn_k of the `llama` architecture so that RoPE can rotate
neighbours (2i, 2i + 1) of a head; kernels here rotate halves (i, i + head_dim/2). source.rope_row_order() undoes it.
"""

import math
import os
import struct

from zse.errors import FormatError, UnsupportedError
from zse.formats.arrays import SCALARS, ScalarArray, StringArray, find_string_array
from zse.formats.file import INCOMPLETE, ModelFile
from zse.formats.ggml import BLOCKS, OTHER_TYPES, TYPES
from zse.formats.source import INTERLEAVED_ROPE, ModelSource, TensorInfo, TokenizerSource

STRING, ARRAY = 8, 9
VALUE_TYPES = dict(enumerate("u8 i8 u16 i16 u32 i32 f32 bool - - u64 i64 f64".split()))  # "-": STRING and ARRAY

# Far above every public model, and low enough that a hostile header costs little.
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 17
MAX_PARTS = 1024
MAX_KEY_BYTES = 1 << 10
MAX_TENSOR_NAME_BYTES = 256
MAX_TEXT_BYTES = 1 << 24
MAX_DIMENSIONS = 4
MAX_LAYERS = 4096
MAX_ELEMENTS = 1 << 44
MAX_ALIGNMENT = 1 << 16
MAX_LIST_LENGTH = 1 << 12  # longer arrays stay in the file
_WINDOW_BYTES = 1 << 16

_U32, _U64, _KEY_HEAD = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<II")


class _Cursor:
    """Sequential reading through a window; `at` is the absolute offset of the next byte."""

    __slots__ = ("file", "at", "_base", "_window")

    def __init__(self, file: ModelFile):
        self.file, self.at, self._base, self._window = file, 0, 0, b""

    def take(self, nbytes: int, field: str) -> tuple[bytes, int]:
        """The window and where in it the next `nbytes` are; moves past them."""
        start = self.at - self._base
        if start < 0 or start + nbytes > len(self._window):
            self.file.check(self.at, nbytes, field)
            self._window = self.file.read(self.at, min(max(nbytes, _WINDOW_BYTES), self.file.size - self.at), field)
            self._base, start = self.at, 0
        self.at += nbytes
        return self._window, start

    def u32(self, field: str) -> int:
        window, start = self.take(4, field)
        return _U32.unpack_from(window, start)[0]

    def u64(self, field: str) -> int:
        window, start = self.take(8, field)
        return _U64.unpack_from(window, start)[0]

    def text(self, field: str, max_bytes: int) -> str:
        offset = self.at
        nbytes = self.u64(field)
        if nbytes > max_bytes:
            raise self.file.wrong(offset, field, f"{nbytes} bytes of text; at most {max_bytes} are read")
        window, start = self.take(nbytes, field)
        try:
            return window[start : start + nbytes].decode()
        except UnicodeDecodeError:
            raise self.file.wrong(offset + 8, field, "is not UTF-8") from None


def open_gguf(file: ModelFile) -> ModelSource:
    """Reads the header of an open GGUF file (version 2 or 3, little endian), or of the first part of one and then those
    of all its parts, which lie beside it."""
    metadata, tensors = _read_header(file)
    files = [file]
    try:
        _open_parts(files, metadata, tensors)
        _find_factors(tensors, metadata.get("general.architecture"))
        _check_metadata(file, metadata)
    except Exception:
        for part in files[1:]:
            part.close()
        raise
    fields = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    template = metadata.get("tokenizer.chat_template")
    return ModelSource(
        "gguf",
        file.path,
        "gguf",
        files,
        tensors,
        metadata=metadata,
        tokenizer=TokenizerSource("gguf", fields) if "tokenizer.ggml.model" in fields else None,
        chat_template=template if isinstance(template, str) else None,
        interleaved_rope=metadata.get("general.architecture") in INTERLEAVED_ROPE["gguf"],
    )


def _open_parts(files: list[ModelFile], metadata: dict, tensors: dict[str, TensorInfo]) -> None:
    """Adds the parts after the first, and their tensors, where the file is the first of several (llama.cpp's
    gguf-split)."""
    first = files[0]
    number, count, total = (metadata.get(f"split.{key}", 0) for key in ("no", "count", "tensors.count"))
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise first.wrong(0, "split.count", f"{str(count)[:40]} is not a number of parts up to {MAX_PARTS}")
    if count < 2:
        return
    ending = f"-00001-of-{count:05d}.gguf"
    if number != 0:
        named = f"-{number + 1:05d}-of-{count:05d}.gguf" if type(number) is int else ""
        start = os.path.basename(first.path).removesuffix(named) + ending
        raise first.wrong(0, "split.no", f"this is not the first of {count} parts: open {start}")
    if not first.path.endswith(ending):
        raise first.wrong(0, "split.count", f"the first of {count} parts, whose name does not end with {ending}")
    for index in range(1, count):
        path = f"{first.path.removesuffix(ending)}-{index + 1:05d}-of-{count:05d}.gguf"
        if not os.path.exists(path):
            raise FormatError(path, 0, "file", f"is missing: part {index + 1} of {count}{INCOMPLETE}")
        part = ModelFile(path)
        files.append(part)
        own, found = _read_header(part)
        if (own.get("split.no"), own.get("split.count")) != (index, count):
            raise part.wrong(0, "split.no", f"is not part {index + 1} of {count} of this model")
        for name, info in found.items():
            if name in tensors:
                raise part.wrong(info.offset, name, f"stands also in {tensors[name].file.path}")
            tensors[name] = info
    if total != len(tensors):
        raise first.wrong(0, "split.tensors.count", f"{str(total)[:40]}, but the parts hold {len(tensors)} tensors")


def _read_header(file: ModelFile) -> tuple[dict[str, object], dict[str, TensorInfo]]:
    """Metadata and tensors of one file."""
    cursor = _Cursor(file)
    magic, _ = cursor.take(4, "magic")
    if magic[:4] != b"GGUF":
        raise file.wrong(0, "magic", "is not GGUF")
    version = cursor.u32("version")
    if version not in (2, 3):
        if version >> 16 and not version & 0xFFFF:
            raise UnsupportedError("GGUF byte order", "big endian", ("little endian",))
        raise UnsupportedError("GGUF version", version, (2, 3))
    num_tensors = _count(cursor, "tensor_count", MAX_TENSORS, 32)  # name, rank, one size, type, offset
    num_keys = _count(cursor, "metadata_kv_count", MAX_KEYS, 13)  # key, type, at least one byte
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        offset = cursor.at
        key = cursor.text("metadata key", MAX_KEY_BYTES)
        if not key:
            raise file.wrong(offset, "metadata key", "is empty")
        if key in metadata:
            raise file.wrong(offset, key, "stands twice in the metadata")
        metadata[key] = _value(cursor, key)
    return metadata, _tensor_index(cursor, num_tensors, _alignment(file, metadata))


def _find_factors(tensors: dict[str, TensorInfo], architecture: object) -> None:
    """NVFP4's scales of blocks are relative to one number, which stands beside the weight as NAME.scale."""
    for name, info in tensors.items():
        factor = tensors.get(name.removesuffix(".weight") + ".scale")
        # Gemma 4's forward multiplies with those of its experts, whatever their type (zse.models.names.BESIDE).
        is_forwards = architecture == "gemma4" and name.endswith(".ffn_down_exps.weight")
        if info.type == "NVFP4" and factor is not None and not is_forwards:
            counts = (1, info.shape[0]) if len(info.shape) == 3 else (1,)  # each expert of a stack may have its own
            if factor.type != "F32" or len(factor.shape) != 1 or factor.num_elements not in counts:
                raise factor.wrong(f"is {factor.type} {list(factor.shape)}, expected one F32 for the whole of {name}")
            tensors[name] = info._replace(factor=factor)


def _check_metadata(file: ModelFile, metadata: dict) -> None:
    """FormatError where the metadata contradicts itself in ways that a loader would trip over."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, StringArray):
        raise file.wrong(0, "tokenizer.ggml.tokens", "is not an array of strings")
    for key, kind in (
        ("tokenizer.ggml.scores", ScalarArray),
        ("tokenizer.ggml.token_type", ScalarArray),
        ("tokenizer.ggml.merges", StringArray),
    ):
        array = metadata.get(key)
        if array is None:
            continue
        if not isinstance(array, kind):
            raise file.wrong(0, key, "is not an array of its kind")
        if kind is ScalarArray and (tokens is None or array.count != tokens.count):
            size = tokens.count if tokens else 0
            raise file.wrong(array.offset, key, f"{array.count} entries for a vocabulary of {size}")
    layers = metadata.get(f"{metadata.get('general.architecture')}.block_count", 1)
    if type(layers) is not int or not 0 < layers <= MAX_LAYERS:
        raise file.wrong(0, "block_count", f"{str(layers)[:40]} is not a number from 1 to {MAX_LAYERS}")


def _count(cursor: _Cursor, field: str, most: int, item_bytes: int) -> int:
    offset = cursor.at
    count = cursor.u64(field)
    if count > most:
        raise cursor.file.wrong(offset, field, f"{count}; at most {most} are read")
    if count * item_bytes > cursor.file.size:
        raise cursor.file.wrong(offset, field, f"{count} do not fit in {cursor.file.size} bytes{INCOMPLETE}")
    return count


def _value(cursor: _Cursor, key: str) -> object:
    offset = cursor.at
    number = cursor.u32(key)
    if number == STRING:
        return cursor.text(key, MAX_TEXT_BYTES)
    if number == ARRAY:
        return _array(cursor, key)
    return _scalars(cursor, key, _value_type(cursor.file, offset, key, number), 1)[0]


def _value_type(file: ModelFile, offset: int, key: str, number: int) -> str:
    if number not in VALUE_TYPES:
        raise file.wrong(offset, key, f"value type {number} is not known")
    return VALUE_TYPES[number]


def _scalars(cursor: _Cursor, key: str, type: str, count: int) -> tuple:
    letter, nbytes = SCALARS[type]
    offset = cursor.at
    window, start = cursor.take(nbytes * count, key)
    if type == "bool":
        if any(byte > 1 for byte in window[start : start + count]):
            raise cursor.file.wrong(offset, key, "a bool is neither 0 nor 1")
    return struct.unpack_from(f"<{count}{letter}", window, start)


def _array(cursor: _Cursor, key: str) -> "list | StringArray | ScalarArray":
    file, offset = cursor.file, cursor.at
    number, count = cursor.u32(key), cursor.u64(key)
    lazy = key.startswith("tokenizer.") or count > MAX_LIST_LENGTH
    if number == STRING:
        if lazy:
            strings = find_string_array(file, cursor.at, count, key)
            cursor.at += strings.nbytes
            return strings
        file.check(cursor.at, 8 * count, key)
        return [cursor.text(key, MAX_TEXT_BYTES) for _ in range(count)]
    if number == ARRAY:
        raise file.wrong(offset, key, "an array of arrays is not read")
    type = _value_type(file, offset, key, number)
    if not lazy:
        return list(_scalars(cursor, key, type, count))
    array = ScalarArray(file, cursor.at, type, count)
    file.check(cursor.at, array.nbytes, key)
    cursor.at += array.nbytes
    return array


def _alignment(file: ModelFile, metadata: dict) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise file.wrong(0, "general.alignment", f"{alignment!r} is not a power of two between 8 and {MAX_ALIGNMENT}")
    return alignment


def _tensor_index(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    file = cursor.file
    entries: list[tuple[int, str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        start = cursor.at
        name = cursor.text("tensor name", MAX_TENSOR_NAME_BYTES)
        if not name:
            raise file.wrong(start, "tensor name", "is empty")
        offset = cursor.at
        rank = cursor.u32(name)
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise file.wrong(offset, name, f"rank {rank}; 1 to {MAX_DIMENSIONS} are read")
        window, at = cursor.take(8 * rank + 12, name)
        *sizes, number, place = struct.unpack_from(f"<{rank}QIQ", window, at)
        entries.append((start, name, tuple(reversed(sizes)), number, place))
    data = cursor.at + -cursor.at % alignment
    tensors: dict[str, TensorInfo] = {}
    for start, name, shape, number, place in entries:  # shape: outermost first
        if name in tensors:
            raise file.wrong(start, name, "stands twice in the tensor index")
        if number not in TYPES:
            raise UnsupportedError(f"tensor {name}: type", OTHER_TYPES.get(number, number), BLOCKS)
        type, elements, block_bytes = TYPES[number]
        total = math.prod(shape)
        if not 0 < total <= MAX_ELEMENTS:
            raise file.wrong(start, name, f"shape {shape}: {total} elements; 1 to {MAX_ELEMENTS} are read")
        if shape[-1] % elements:
            raise file.wrong(start, name, f"rows of {shape[-1]} are not a multiple of {type}'s {elements}")
        if place % alignment:
            raise file.wrong(start, name, f"data offset {place} is not a multiple of {alignment}")
        nbytes = total // elements * block_bytes
        if data + place > file.size or nbytes > file.size - data - place:
            reason = f"bytes [{data + place}, {data + place + nbytes}) end beyond the file's {file.size}{INCOMPLETE}"
            raise file.wrong(start, name, reason)
        tensors[name] = TensorInfo(name, type, shape, file, data + place, nbytes, "rows" if elements == 1 else "ggml")
    check_overlap(tensors.values())
    return tensors


def check_overlap(infos) -> None:
    """FormatError if two tensors of one file share bytes."""
    end, before = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        if info.offset < end:
            raise info.file.wrong(info.offset, info.name, f"overlaps tensor {before}")
        end, before = info.offset + info.nbytes, info.name
