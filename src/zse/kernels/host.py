"""Weights on the host, for references and cases: planes as NumPy arrays beside what they mean."""

from dataclasses import dataclass
from typing import Any


@dataclass
class HostWeight:
    """shape (N, K); planes: name → NumPy array as `scheme.planes(N, K)` lists them."""
    shape: tuple[int, int]
    scheme: Any
    planes: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    def dequantize(self):
        """f32 [N, K]."""
        from zse.quant import pack
        if self.scheme.kind == "affine":
            return pack.unpack(self.scheme, self.planes, *self.shape).dequantize()
        w = pack.unpack_dense(self.scheme, self.planes, *self.shape)
        return pack.bf16_to_f32(w) if self.scheme.dtype == "bf16" else w.astype("float32")


def random_weight(rng, rows: int, width: int, scheme) -> HostWeight:
    """A weight with values near a unit normal's: q uniform, scales positive and of mixed size."""
    import numpy as np

    from zse.quant import pack
    if scheme.kind == "dense":
        w = rng.standard_normal((rows, width)).astype(np.float32)
        w = pack.f32_to_bf16(w) if scheme.dtype == "bf16" else w.astype(pack.NUMPY_DTYPE[scheme.dtype])
        return HostWeight((rows, width), scheme, pack.pack_dense(scheme, w))
    groups = scheme.groups(width)
    q = rng.integers(0, 1 << scheme.bits, (rows, width)).astype(np.uint8)
    scale = ((0.25 + rng.random((rows, groups))) * 2 / (1 << scheme.bits)).astype(np.float16)
    offset = None if scheme.symmetric else (-rng.random((rows, groups))).astype(np.float16)
    return HostWeight((rows, width), scheme, pack.pack(pack.AffineArrays(scheme, q, scale, offset)))
