"""Sizes that are known when a graph runs, not when it is recorded: tokens of this step, rows of this step."""

from typing import NamedTuple


class Sym(NamedTuple):
    """`ceil(symbol / divisor) * factor`; a plain symbol has divisor and factor 1. Usable as a tensor's first dimension,
    as a launch argument and as a grid dimension; equal if written equal."""

    name: str
    divisor: int = 1
    factor: int = 1

    def ceil_div(self, n: int) -> "Sym":
        """How many groups of n; only of a plain symbol."""
        if self.divisor != 1 or self.factor != 1:
            raise ValueError(f"ceil_div of {self!r}")
        return Sym(self.name, n)

    def __mul__(self, k: int) -> "Sym":  # type: ignore[override]
        return Sym(self.name, self.divisor, self.factor * k)

    def __rmul__(self, k: int) -> "Sym":  # type: ignore[override]
        return self * k

    def value(self, symbols: dict[str, int]) -> int:
        """The number for this run."""
        return -(-symbols[self.name] // self.divisor) * self.factor


Size = int | Sym


def ceil_div(size: Size, n: int) -> Size:
    """ceil(size / n) of a number or a symbol."""
    return size.ceil_div(n) if isinstance(size, Sym) else -(-size // n)
