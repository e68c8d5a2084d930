"""Hugging Face checkpoints of bitsandbytes with 4 bits (nf4, fp4), as the dense numbers that it computes with.

A weight NAME is stored as `NAME` u8 [N * K / 2, 1], the even number of a pair in the high nibble; `NAME.quant_map` f32
[16], the table; `NAME.absmax`, a factor for each block of the numbers in a row (64, say); and
`NAME.quant_state.bitsandbytes__nf4` (or `__fp4`), JSON that has the shape, the block's size and a dtype. With double
quantization absmax is u8, and a block's factor is `NAME.nested_quant_map[absmax] * NAME.nested_absmax[block //
nested_blocksize] + nested_offset`.

A weight is table[index] * factor in f32, rounded to the dtype, which is what bitsandbytes multiplies with, bit for bit.
The numbers of nf4's table are no integers, which lut4 has (zse.quant.lut4), so the weights take 16 bits in memory, or
what they are converted to."""

from typing import NamedTuple

from zse.errors import UnsupportedError
from zse.formats.source import BNB4_LAYOUT, TensorInfo
from zse.lazy import json
from zse.lazy import numpy as np
from zse.quant import pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zse.formats.source import ModelSource

KINDS = ("nf4", "fp4")
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = ".quant_state.bitsandbytes__"
MAX_STATE_BYTES = 4096


class State(NamedTuple):
    """What a weight's JSON says. block: numbers of a factor; nested: factors of a factor of their own, 0: they have
    none; offset: what is added to them then."""

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
        found[weight] = _weight(weight, info, {"q": stored} | parts)
    return {name: found.get(name, info) for name, info in tensors.items() if name not in used}


def _weight(name: str, info: TensorInfo, parts: dict[str, TensorInfo]) -> TensorInfo:
    shape, dtype, state = _read_state(info)
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
    return TensorInfo(name, dtype.upper(), shape, q.file, q.offset, nbytes, BNB4_LAYOUT, None, state, used)


def _read_state(info: TensorInfo) -> tuple[tuple[int, int], str, State]:
    """(shape, dtype, State) of a weight's JSON."""
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
    return shape, DTYPES[dtype], State(block, nested, float(offset))


def rows_of(source: "ModelSource", info: TensorInfo, start: int, stop: int) -> "NDArray":
    """f32 [stop - start, K]: rows of a weight of this layout, rounded to its dtype."""
    columns, state, parts = info.shape[1], info.planes, info.parts
    first, last = start * columns, stop * columns
    packed = np.frombuffer(source.read(parts["q"], first // 2, (last - first) // 2), np.uint8)
    index = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    low, high = first // state.block, -(-last // state.block)
    item = 1 if state.nested else 4
    raw = source.read(parts["absmax"], low * item, (high - low) * item)
    if state.nested:
        above = np.frombuffer(source.read(parts["nested_absmax"]), np.float32)[np.arange(low, high) // state.nested]
        levels = np.frombuffer(source.read(parts["nested_quant_map"]), np.float32)
        factors = levels[np.frombuffer(raw, np.uint8)] * above + np.float32(state.offset)
    else:
        factors = np.frombuffer(raw, np.float32)
    each = factors[np.arange(first, last) // state.block - low]  # not repeated: a block may be said to have any size
    values = np.frombuffer(source.read(parts["quant_map"]), np.float32)[index] * each
    dtype = info.type.lower()
    return pack.widen(pack.narrow(values, dtype), dtype).reshape(-1, columns)
