"""Where values lie in a piece of memory: two share a place where one is done with before the other begins."""

from typing import NamedTuple

ALIGN = 256  # bytes; tensor maps and 16-byte copies want less


class Life(NamedTuple):
    """nbytes are used from launch number `first` to `last`, both included."""

    nbytes: int
    first: int
    last: int


def place(lives: list[Life]) -> tuple[list[int], int]:
    """(the offset of each, bytes of all). The largest are placed first, each as low as those that live beside it allow."""
    offsets = [0] * len(lives)
    placed: list[tuple[int, int, Life]] = []  # (offset, end, life), by offset
    total = 0
    for index in sorted(range(len(lives)), key=lambda index: (-lives[index].nbytes, index)):
        life, at = lives[index], 0
        for offset, end, other in placed:
            if other.first <= life.last and life.first <= other.last:
                if at + life.nbytes <= offset:
                    break
                at = max(at, end)
        offsets[index], end = at, aligned(at + life.nbytes)
        placed.append((at, end, life))
        placed.sort(key=lambda one: one[0])
        total = max(total, end)
    return offsets, total


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
