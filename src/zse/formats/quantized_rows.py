"""Rows of integer weights that AWQ, GPTQ or compressed-tensors stored, as affine groups (NumPy).

These formats pack 32-bit words along one axis, lowest bits first and without gaps between words: AWQ along the outputs
in an order of its own, GPTQ and compressed-tensors along the inputs. A weight's words are read once (N * K / 2 bytes)
and rows taken from them."""

import numpy as np
from numpy.typing import NDArray

from zse.formats.column_order import order_of
from zse.formats.quantized import AWQ_ORDER, WORDS
from zse.formats.source import ModelSource, TensorInfo
from zse.quant.affine import AffineArrays
from zse.quant.pack import bf16_to_f32
from zse.quant.scheme import AffineScheme

_DTYPE = {"I32": np.uint32, "U32": np.uint32, "I8": np.int8, "F16": np.float16, "BF16": np.uint16, "F32": np.float32}


class CheckpointRows:
    """A weight of integers (zse.formats.quantized.INTEGERS), opened: rows and columns in the orders that its parts
    "rows" and "columns" say. arrays() may be called from several threads."""

    def __init__(self, source: ModelSource, info: TensorInfo):
        self.info = info
        scheme, parts = info.scheme, info.parts
        assert isinstance(scheme, AffineScheme)
        self.scheme, (n, k) = scheme, info.shape
        groups = scheme.groups(k)
        self._columns = order_of(parts["columns"], groups) if "columns" in parts else None
        rows = order_of(parts["rows"]) if "rows" in parts else None
        stored = {
            role: np.frombuffer(source.read(part), _DTYPE[part.type]).reshape(part.shape)
            for role, part in parts.items()
            if role not in ("columns", "rows")
        }
        self._by_column = info.layout in ("awq", "gptq", "gptq+1")
        # Bits as they are stored: the scheme may have more.
        self._bits = stored["q"].size * 32 // (n * k) if info.layout in WORDS else scheme.bits
        self._q, scale = stored["q"], stored["scale"]
        scale = scale.T if self._by_column else scale.reshape(-1, scale.shape[-1] if scale.ndim > 1 else 1)[:, :groups]
        wide = bf16_to_f32(scale) if parts["scale"].type == "BF16" else scale.astype(np.float32)
        if np.abs(wide).max(initial=0) > 65504:
            raise ValueError("a scale does not fit in f16")
        self._scale, self._zero = np.broadcast_to(wide.astype(np.float16), (n, groups)), None
        if "zero" in stored:
            self._zero = self._points(stored["zero"])
        if rows is not None:
            self._q = self._q[:, rows] if self._by_column else self._q[rows]
            self._scale = self._scale[rows]
            self._zero = None if self._zero is None else self._zero[rows]

    def _points(self, zero: NDArray) -> NDArray:
        """Zero points f32 [N, G]."""
        layout, (n, groups) = self.info.layout, self._scale.shape
        if layout == "int8":
            return zero.astype(np.float32) + np.float32(1 << (self._bits - 1))
        if layout == "packed":
            found = unpack(np.ascontiguousarray(zero.T), self._bits).T
        else:
            found = unpack(zero, self._bits, AWQ_ORDER if layout == "awq" else None)
            found = found if layout == "gemv" else found.T
        # The stored zero point of GPTQ's first version is one less than the one that is meant, in its few bits.
        if layout == "gptq+1":
            found = (found + 1) & ((1 << self._bits) - 1)
        return found[:n, :groups].astype(np.float32)

    def arrays(self, start: int, stop: int) -> AffineArrays:
        """Rows [start, stop); start is a multiple of the outputs that share a word of AWQ, 8."""
        layout, scale, offset = self.info.layout, self._scale[start:stop], None
        if layout == "awq":
            q = unpack(self._q[:, start // 8 : -(-stop // 8)], self._bits, AWQ_ORDER).T
        elif layout == "int8":
            q = self._q[start:stop].view(np.uint8) + np.uint8(1 << (self._bits - 1))
        else:
            words = self._q[:, start:stop].T if self._by_column else self._q[start:stop]
            q = unpack(np.ascontiguousarray(words), self._bits)
        if self.scheme.symmetric and self.scheme.bits > self._bits:
            q = q + np.uint8((1 << (self.scheme.bits - 1)) - (1 << (self._bits - 1)))
        if self._columns is not None:
            q = q[:, self._columns]
        if self._zero is not None:
            offset = np.ascontiguousarray(-self._zero[start:stop] * scale.astype(np.float32)).astype(np.float16)
            if not np.isfinite(offset).all():
                raise ValueError("an offset does not fit in f16")
        return AffineArrays(self.scheme, np.ascontiguousarray(q), np.ascontiguousarray(scale), offset)


def unpack(words: NDArray, bits: int, order: tuple[int, ...] | None = None) -> NDArray:
    """u32 [R, W] → u8 [R, W * 32 / bits]: field i of a line is its i-th from the lowest bits, put at order[i] of its
    word's."""
    rows = words.shape[0]
    if 32 % bits:
        line = np.unpackbits(words.view(np.uint8).reshape(rows, -1), axis=1, bitorder="little")
        fields = line[:, : line.shape[1] // bits * bits].reshape(rows, -1, bits)
        return np.packbits(fields, axis=2, bitorder="little")[:, :, 0]
    out = np.empty((*words.shape, 32 // bits), np.uint8)
    for field, place in enumerate(order or range(32 // bits)):
        np.copyto(out[:, :, place], (words >> np.uint32(bits * field)) & np.uint32((1 << bits) - 1), casting="unsafe")
    return out.reshape(rows, -1)
