"""Intrinsics as data: name, signature, and how each family of targets spells it, in one table per subject. What each
means stands in language.py: BUILTINS."""

from zse import lazy
from zse.kernel.intrinsics import arithmetic, block, copies, dot, matrix, packed, shape, threads
from zse.kernel.intrinsics.row import Effect, Intrinsic

INTRINSICS: dict[str, Intrinsic] = {
    row.name: row for family in (arithmetic, block, dot, shape, threads, matrix, packed) for row in family.TABLE
}
EFFECTS: dict[str, Effect] = {row.name: row for family in (threads, copies, matrix, packed) for row in family.EFFECTS}

__getattr__ = lazy.submodules(__name__, __path__)
