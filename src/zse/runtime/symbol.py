"""Sizes that are known when a graph runs, not when it is recorded: tokens of this step, rows of this step."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class Sym:
    """`ceil(symbol / divisor) * factor`; a plain symbol has divisor and factor 1. Usable as a tensor's first dimension,
    as a launch argument and as a grid dimension; equal if written equal. Not to be changed."""

    __slots__ = ("divisor", "factor", "name")

    def __init__(self, name: str, divisor: int = 1, factor: int = 1):
        self.name, self.divisor, self.factor = name, divisor, factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sym) and (self.name, self.divisor, self.factor) == (
            other.name,
            other.divisor,
            other.factor,
        )

    def __hash__(self) -> int:
        return hash((self.name, self.divisor, self.factor))

    def __repr__(self) -> str:
        return f"Sym(name={self.name!r}, divisor={self.divisor}, factor={self.factor})"

    def ceil_div(self, n: int) -> "Sym":
        """How many groups of n; only of a plain symbol."""
        if self.divisor != 1 or self.factor != 1:
            raise ValueError(f"ceil_div of {self!r}")
        return Sym(self.name, n)

    def __mul__(self, k: int) -> "Sym":
        return Sym(self.name, self.divisor, self.factor * k)

    __rmul__ = __mul__

    def value(self, symbols: dict[str, int]) -> int:
        """The number for this run."""
        return -(-symbols[self.name] // self.divisor) * self.factor


Size = int | Sym


def ceil_div(size: Size, n: int) -> Size:
    """ceil(size / n) of a number or a symbol."""
    return size.ceil_div(n) if isinstance(size, Sym) else -(-size // n)


def product(sizes: "Iterable[Any]") -> "Any":
    """Elements of a shape, of which one may be a symbol."""
    count: Any = 1
    for size in sizes:
        count = size * count
    return count


def most_of(size: Size, maxima: dict[str, int]) -> int:
    """The most that a number of a recording can be. maxima: Recorder.maxima."""
    return size.value(maxima) if isinstance(size, Sym) else size
