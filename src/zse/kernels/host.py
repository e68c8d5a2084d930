"""Weights on the host, for references and cases: planes as NumPy arrays beside what they mean."""

from typing import Any

from zse.kernel.language import Record


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
        return self.scheme.dequantize(self.planes, *self.shape, self.layout)


def random_weight(rng, rows: int, width: int, scheme, layout: str | None = None) -> HostWeight:
    """A weight with values near a unit normal's, in `layout` (the scheme's first one by default)."""
    layout = layout or scheme.layouts[0]
    return HostWeight((rows, width), scheme, scheme.random(rng, rows, width, layout), layout)
