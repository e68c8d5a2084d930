"""Hugging Face checkpoints of bitsandbytes with 4 bits: nf4 as lut4 (zse.quant.lut4), fp4 as the dense numbers that it
computes with.

A weight NAME is stored as `NAME` u8 [N * K / 2, 1], the even number of a pair in the high nibble; `NAME.quant_map` f32
[16], the table; `NAME.absmax`, a factor for each block of the numbers in a row (64, say); and
`NAME.quant_state.bitsandbytes__nf4` (or `__fp4`), JSON that has the shape, the block's size and a dtype. With double
quantization absmax is u8, and a block's factor is `NAME.nested_quant_map[absmax] * NAME.nested_absmax[block //
nested_blocksize] + nested_offset`.

A weight is table[index] * factor in f32, rounded to the dtype, which is what bitsandbytes multiplies with, bit for bit:
rows_of(). In memory an nf4 weight whose blocks are whole groups of 32 columns takes 4 bits, `lut4-nf4-g32`: its table in
8 bits, its factors in f16. The others (fp4, whose numbers are multiples of 1/192 up to 1) take 16, or what they are
converted to."""

from typing import NamedTuple

from zse.errors import UnsupportedError
from zse.formats.source import BNB4_LAYOUT, TensorInfo
from zse.lazy import json
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.lut4 import NF4, NF4_UNIT, Lut4Arrays, Lut4Scheme

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zse.formats.source import ModelSource

KINDS = ("nf4", "fp4")
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = ".quant_state.bitsandbytes__"
MAX_STATE_BYTES = 4096
IN_FOUR_BITS = Lut4Scheme("nf4", "f16", 32)


class State(NamedTuple):
    """What a weight's JSON says. dtype: "bf16", "f16" or "f32"; block: numbers of a factor; nested: factors of a factor
    of their own, 0: they have none; offset: what is added to them then."""

    dtype: str
    block: int
    nested: int
    offset: float


def combine(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint with every weight of 4 bits as one of them; the others stay. FormatError for parts
    that are missing or do not fit together."""
    found, used = {}, set()
    for name, info in tensors.items():
        weight, marker, kind = name.partition(_STATE)
        if not marker:
            continue
        if kind not in KINDS:
            raise UnsupportedError(f"{name}: kind of 4-bit weights", kind, KINDS)
        stored = tensors.get(weight)
        if stored is None:
            raise info.wrong(f"there is no {weight} beside it")
        parts = {part: tensors[f"{weight}.{part}"] for part in PARTS if f"{weight}.{part}" in tensors}
        used |= {name, *(f"{weight}.{part}" for part in parts)}
        found[weight] = _weight(weight, kind, info, {"q": stored} | parts)
    return {name: found.get(name, info) for name, info in tensors.items() if name not in used}


def _weight(name: str, kind: str, info: TensorInfo, parts: dict[str, TensorInfo]) -> TensorInfo:
    shape, state = _read_state(info)
    n, k = shape
    blocks = -(-n * k // state.block)
    expected = {"q": ("U8", n * k // 2), "absmax": ("F32", blocks), "quant_map": ("F32", 16)}
    if state.nested:
        expected["absmax"] = "U8", blocks
        expected |= {"nested_absmax": ("F32", -(-blocks // state.nested)), "nested_quant_map": ("F32", 256)}
    for role, (type, count) in expected.items():
        part = parts.get(role)
        if part is None:
            raise parts["q"].wrong(f"has no {role} beside it")
        if part.type != type or part.num_elements != count:
            what = f"is {part.type} {list(part.shape)}, expected {type} of {count} numbers for a weight of {[n, k]}"
            raise part.wrong(what)
    q, used = parts["q"], {role: parts[role] for role in expected}
    nbytes = sum(part.nbytes for part in used.values())
    table = used["quant_map"]
    is_lut4 = kind == "nf4" and k % IN_FOUR_BITS.group == 0 and state.block % IN_FOUR_BITS.group == 0
    if is_lut4 and not np.array_equal(
        np.frombuffer(table.file.read(table.offset, 64, table.name), np.float32), np.array(NF4, np.float32)
    ):
        is_lut4 = False  # a table of its own
    type = IN_FOUR_BITS.name if is_lut4 else state.dtype.upper()
    return TensorInfo(name, type, shape, q.file, q.offset, nbytes, BNB4_LAYOUT, None, state, used)


def _read_state(info: TensorInfo) -> tuple[tuple[int, int], State]:
    """(shape, State) of a weight's JSON."""
    if info.type != "U8" or info.nbytes > MAX_STATE_BYTES:
        raise info.wrong(f"is {info.type} of {info.nbytes} bytes, expected U8 of JSON, up to {MAX_STATE_BYTES}")
    try:
        values = json.loads(info.file.read(info.offset, info.nbytes, info.name))
        shape, block, dtype = tuple(values["shape"]), values["blocksize"], values["dtype"]
        nested, offset = values.get("nested_blocksize", 0), values.get("nested_offset", 0.0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise info.wrong(f"is no JSON with shape, blocksize and dtype ({type(error).__name__})") from None
    counts = (*shape, block, nested)
    if any(type(count) is not int or not 0 <= count < 1 << 40 for count in counts) or type(offset) not in (int, float):
        raise info.wrong("has numbers that are none")
    if len(shape) != 2 or shape[0] * shape[1] == 0 or shape[1] % 2 or block < 2:
        raise info.wrong(
            f"says shape {list(shape)} in blocks of {block}, expected a matrix of an even number of columns"
        )
    if dtype not in DTYPES:
        raise UnsupportedError(f"{info.name}: dtype", str(dtype)[:80], DTYPES)
    return shape, State(DTYPES[dtype], block, nested, float(offset))


def rows_of(source: "ModelSource", info: TensorInfo, start: int, stop: int) -> "NDArray":
    """f32 [stop - start, K]: rows of a weight of this layout, rounded to its dtype."""
    index, factors = _stored(source, info, start, stop)
    each = factors[_blocks(info, start, stop)]  # not repeated: a block may be said to have any size
    values = np.frombuffer(source.read(info.parts["quant_map"]), np.float32)[index] * each
    dtype = info.planes.dtype
    return pack.widen(pack.narrow(values, dtype), dtype).reshape(-1, info.shape[1])


def arrays_of(source: "ModelSource", info: TensorInfo, start: int, stop: int) -> Lut4Arrays:
    """The rows in 4 bits: table8[index] * f16(factor / 123.25). ValueError for factors that f16 cannot hold."""
    index, factors = _stored(source, info, start, stop)
    scale = factors[_blocks(info, start, stop, IN_FOUR_BITS.group)] / np.float32(NF4_UNIT)
    if not np.abs(scale).max(initial=0) <= 65504:
        raise ValueError("a scale does not fit in f16")
    rows = stop - start
    return Lut4Arrays(IN_FOUR_BITS, index.reshape(rows, -1), scale.astype(np.float16).reshape(rows, -1))


def _blocks(info: TensorInfo, start: int, stop: int, step: int = 1) -> "NDArray":
    """Of every step-th number of the rows: which of _stored()'s factors it has."""
    first, last, block = start * info.shape[1], stop * info.shape[1], info.planes.block
    return np.arange(first, last, step) // block - first // block


def _stored(source: "ModelSource", info: TensorInfo, start: int, stop: int) -> "tuple[NDArray, NDArray]":
    """(u8 indices of the rows' numbers, f32 factors of the blocks that they lie in)."""
    columns, state, parts = info.shape[1], info.planes, info.parts
    first, last = start * columns, stop * columns
    packed = np.frombuffer(source.read(parts["q"], first // 2, (last - first) // 2), np.uint8)
    index = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    low, high = first // state.block, -(-last // state.block)
    item = 1 if state.nested else 4
    raw = source.read(parts["absmax"], low * item, (high - low) * item)
    if not state.nested:
        return index, np.frombuffer(raw, np.float32)
    above = np.frombuffer(source.read(parts["nested_absmax"]), np.float32)[np.arange(low, high) // state.nested]
    levels = np.frombuffer(source.read(parts["nested_quant_map"]), np.float32)
    return index, levels[np.frombuffer(raw, np.uint8)] * above + np.float32(state.offset)
