"""Warp functions written in the language itself."""

from zse import kernel as zl
from zse.kernel.language import BUILTINS

maximum, minimum, shuffle_xor = BUILTINS["maximum"], BUILTINS["minimum"], BUILTINS["shuffle_xor"]


def _masks(width: int | None, warp: int) -> list[int]:
    """Xor masks of a tree over groups of `width` lanes, the widest first."""
    width = width or warp
    if width < 1 or width > warp or width & (width - 1):
        raise ValueError(f"a group of lanes is a power of two up to {warp}")
    return [1 << i for i in reversed(range(width.bit_length() - 1))]


@zl.inline
def warp_sum(value, width=None):
    """The sum over groups of `width` lanes, in every lane, in the same order."""
    for mask in zl.static(_masks(width, zl.target.warp)):
        value = value + shuffle_xor(value, mask)
    return value


@zl.inline
def warp_max(value, width=None):
    """The largest value of groups of `width` lanes."""
    for mask in zl.static(_masks(width, zl.target.warp)):
        value = maximum(value, shuffle_xor(value, mask))
    return value


@zl.inline
def warp_min(value, width=None):
    """The smallest value of groups of `width` lanes."""
    for mask in zl.static(_masks(width, zl.target.warp)):
        value = minimum(value, shuffle_xor(value, mask))
    return value


FUNCTIONS = {"warp_sum": warp_sum, "warp_max": warp_max, "warp_min": warp_min}
