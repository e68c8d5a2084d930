"""Rows of integer weights that AWQ, GPTQ or compressed-tensors stored, as affine groups (NumPy).

These formats pack 32-bit words along one axis: AWQ along the outputs in an order of its own, GPTQ and
compressed-tensors along the inputs, lowest bits first. A weight's words are read once (N * K / 2 bytes) and rows taken from them.
"""

import numpy as np
from numpy.typing import NDArray

from zse.formats.quantized import AWQ_ORDER
from zse.formats.source import ModelSource, TensorInfo
from zse.quant.affine import AffineArrays
from zse.quant.pack import bf16_to_f32
from zse.quant.scheme import AffineScheme

_DTYPE = {"I32": np.uint32, "U32": np.uint32, "F16": np.float16, "BF16": np.uint16, "F32": np.float32}
LAYOUTS = ("awq", "gptq", "gptq+1", "packed")


class CheckpointRows:
    """A weight of one of LAYOUTS, opened. affine() may be called from several threads."""

    def __init__(self, source: ModelSource, info: TensorInfo):
        self.info = info
        scheme = info.scheme
        assert isinstance(scheme, AffineScheme)
        self.scheme = scheme
        self._parts = {
            role: np.frombuffer(source.read(part), _DTYPE[part.type]).reshape(part.shape)
            for role, part in info.parts.items()
        }
        scale = self._parts["scale"]
        wide = bf16_to_f32(scale) if info.parts["scale"].type == "BF16" else scale.astype(np.float32)
        if np.abs(wide).max(initial=0) > 65504:
            raise ValueError("a scale does not fit in f16")
        self._scale = wide.astype(np.float16)

    def affine(self, start: int, stop: int) -> AffineArrays:
        """Rows [start, stop), both multiples of the outputs that share a word (at most 8), or the end."""
        layout, bits = self.info.layout, self.scheme.bits
        words, scale, zero = self._parts["q"], self._scale, self._parts.get("zero")
        per_word = 32 // bits
        columns = slice(start // per_word, -(-stop // per_word))
        if layout == "awq":
            q = _unpack(words[:, columns], bits, 1, AWQ_ORDER).T
            zeros = None if zero is None else _unpack(zero[:, columns], bits, 1, AWQ_ORDER).T
            scale = scale[:, start:stop].T
        elif layout == "packed":
            q = _unpack(words[start:stop], bits, 1)
            # Zero points are packed along the outputs.
            zeros = None if zero is None else _unpack(zero[columns], bits, 0)
            scale = scale[start:stop]
        else:
            q = _unpack(np.ascontiguousarray(words[:, start:stop].T), bits, 1)
            zeros = None if zero is None else _unpack(zero[:, columns], bits, 1).T
            scale = scale[:, start:stop].T
        offset = None
        if zeros is not None:
            # The stored zero point of GPTQ's first version is one less than the one that is meant, in its few bits.
            points = zeros.astype(np.float32) + (1 if layout == "gptq+1" else 0)
            if layout == "gptq+1":
                points = np.where(points == 1 << bits, np.float32(0), points)
            offset = np.ascontiguousarray(-points * scale.astype(np.float32)).astype(np.float16)
            if not np.isfinite(offset).all():
                raise ValueError("an offset does not fit in f16")
        return AffineArrays(self.scheme, np.ascontiguousarray(q), np.ascontiguousarray(scale), offset)


def _unpack(words: NDArray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> NDArray:
    """u32 words -> u8 values, 32 / bits of them where each word stood along `axis`; value i of a word is its i-th field
    from the lowest bits, put at order[i]."""
    count = 32 // bits
    places = order or tuple(range(count))
    shape = list(words.shape)
    shape.insert(axis + 1, count)
    out = np.empty(shape, np.uint8)
    for field, place in enumerate(places):
        target = out[:, :, place] if axis == 1 else out[:, place]
        np.copyto(target, (words >> np.uint32(bits * field)) & np.uint32((1 << bits) - 1), casting="unsafe")
    shape[axis : axis + 2] = [shape[axis] * count]
    return out.reshape(shape)
