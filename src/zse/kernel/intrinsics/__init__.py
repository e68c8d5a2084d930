"""Intrinsics as data: name, signature, meaning, and one body per target, in one table per family."""

from zse.kernel.intrinsics import arithmetic, block, dot, shape
from zse.kernel.intrinsics.row import Intrinsic

INTRINSICS: dict[str, Intrinsic] = {
    row.name: row for family in (arithmetic, block, dot, shape) for row in family.TABLE
}
