"""Weights on the host, for references and cases: planes as NumPy arrays beside what they mean."""

from typing import Any

from zse.kernel.record import Record


class HostWeight(Record):
    """shape (N, K); planes: name → NumPy array as `scheme.planes(N, K, layout)` lists them."""

    shape: tuple[int, int]
    scheme: Any
    planes: dict[str, Any]
    layout: str = "r16"

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    def dequantize(self):
        """f32 [N, K]."""
        from zse.quant import pack

        if self.scheme.kind == "affine":
            return pack.unpack(self.scheme, self.planes, *self.shape).dequantize()
        if self.scheme.kind == "fp8":
            return pack.dequantize_fp8(self.scheme, self.planes, *self.shape)
        w = pack.unpack_dense(self.scheme, self.planes, *self.shape, self.layout)
        return pack.bf16_to_f32(w) if self.scheme.dtype == "bf16" else w.astype("float32")


def random_weight(rng, rows: int, width: int, scheme, layout: str | None = None) -> HostWeight:
    """A weight with values near a unit normal's: q uniform (e4m3: normal), scales positive and of mixed size.

    layout: the scheme's first one by default (r16; rows for fp8).
    """
    import numpy as np

    from zse.quant import pack

    if scheme.kind == "dense":
        w = rng.standard_normal((rows, width)).astype(np.float32)
        w = pack.f32_to_bf16(w) if scheme.dtype == "bf16" else w.astype(pack.NUMPY_DTYPE[scheme.dtype])
        layout = layout or "r16"
        return HostWeight((rows, width), scheme, pack.pack_dense(scheme, w, layout), layout)
    if scheme.kind == "fp8":
        w = pack.f32_to_e4m3(rng.standard_normal((rows, width)).astype(np.float32) * 32)
        scale = ((0.5 + rng.random(scheme.scale_shape(rows, width))) / 32).astype(np.float32)
        return HostWeight((rows, width), scheme, {"w": w, "scale": scale}, "rows")
    groups = scheme.groups(width)
    q = rng.integers(0, 1 << scheme.bits, (rows, width)).astype(np.uint8)
    scale = ((0.25 + rng.random((rows, groups))) * 2 / (1 << scheme.bits)).astype(np.float16)
    offset = None if scheme.symmetric else (-rng.random((rows, groups))).astype(np.float16)
    return HostWeight((rows, width), scheme, pack.pack(pack.AffineArrays(scheme, q, scale, offset)))
