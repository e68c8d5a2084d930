"""safetensors files (https://github.com/huggingface/safetensors#format): u64 header length, JSON header, data."""

import math

from zse.errors import FormatError, UnsupportedError
from zse.formats.file import INCOMPLETE, WEB_PAGE, ModelFile, parse_object
from zse.formats.source import ELEMENT_BYTES, TensorInfo

MAX_HEADER_BYTES = 1 << 24  # 60,000 tensors take 8 MB; the format allows 100 MB, which Python would make 1 GB
MAX_RANK = 8
MAX_NAME_BYTES = 1024


def read_header(file: ModelFile) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors of one file, in the order of their data, and its `__metadata__`."""
    length = int.from_bytes(file.read(0, 8, "header length"), "little")
    if length > MAX_HEADER_BYTES or length > file.size - 8:
        if file.read(0, 1) == b"<":
            raise file.wrong(0, "file", WEB_PAGE)
        limits = f"the file has {file.size} bytes and at most {MAX_HEADER_BYTES} are read"
        raise file.wrong(0, "header length", f"{length}; {limits}{INCOMPLETE}")
    header = parse_object(file.read(8, length, "header"), file.path, 8, "header")
    data = 8 + length
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise file.wrong(8, "__metadata__", "is not an object of strings")
    infos = sorted(
        (_tensor(file, name, entry, data) for name, entry in header.items()),
        key=lambda info: (info.offset, info.nbytes),
    )
    end = data
    for info in infos:  # the format allows neither overlaps nor holes
        if info.offset != end:
            relation = "overlaps" if info.offset < end else "leaves a hole after"
            raise file.wrong(info.offset, info.name, f"{relation} the tensor that ends at {end}")
        end = info.offset + info.nbytes
    if end != file.size:
        raise file.wrong(end, "data", f"the tensors end at {end}, the file at {file.size}{INCOMPLETE}")
    return {info.name: info for info in infos}, metadata


def filled(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Those that have elements. The format allows others (quantizers write an empty g_idx where columns stand in their
    order), and nothing reads them."""
    return {name: info for name, info in tensors.items() if info.nbytes}


def _tensor(file: ModelFile, name: str, entry: object, data: int) -> TensorInfo:
    def wrong(reason: str) -> FormatError:
        return file.wrong(8, name[:MAX_NAME_BYTES] or "tensor name", reason)

    if not name or len(name) > MAX_NAME_BYTES:
        raise wrong(f"the name has {len(name)} characters; 1 to {MAX_NAME_BYTES} are read")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("needs exactly dtype, shape and data_offsets")
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise wrong("dtype is not a string")
    if dtype not in ELEMENT_BYTES:
        raise UnsupportedError(f"tensor {name}: dtype", dtype, ELEMENT_BYTES)
    sizes_ok = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes_ok or len(shape) > MAX_RANK:
        raise wrong(f"shape {str(shape)[:80]} is not a list of at most {MAX_RANK} sizes")
    if not isinstance(place, list) or len(place) != 2 or not all(type(at) is int and at >= 0 for at in place):
        raise wrong(f"data_offsets {str(place)[:80]} are not two positions")
    nbytes = math.prod(shape, start=ELEMENT_BYTES[dtype])
    begin, end = place
    if end > file.size - data or begin > end:
        raise wrong(f"data_offsets {place} lie outside the {file.size - data} bytes of data{INCOMPLETE}")
    if end - begin != nbytes:
        raise wrong(f"{dtype} {shape} takes {nbytes} bytes, data_offsets give {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), file, data + begin, nbytes)
