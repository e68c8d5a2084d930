"""Slots of host memory for KV pages that leave the device: swapped requests, and cold prefixes.

Only numbers live here, as for pages: the runner has the memory. A slot holds a whole page and what belongs to it.
"""


class HostPool:
    """`num_slots` slots, each with one owner. Slots that were used are used again before untouched ones."""

    def __init__(self, num_slots: int):
        if num_slots < 0:
            raise ValueError(f"num_slots must not be negative, got {num_slots}")
        self.num_slots = num_slots
        self._free: list[int] = []
        self._untouched = 0

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_slots - self._untouched

    def take(self) -> int:
        """A free slot. IndexError when there is none."""
        if self._free:
            return self._free.pop()
        if self._untouched == self.num_slots:
            raise IndexError("no host slot is free")
        self._untouched += 1
        return self._untouched - 1

    def give(self, slot: int) -> None:
        """The slot's content is not needed any more, once the transfers that were asked for so far are done."""
        self._free.append(slot)

    def check_integrity(self, owned: list[int]) -> list[str]:
        """What is wrong, one line each. owned: all slots that somebody has."""
        if sorted(owned + self._free) != list(range(self._untouched)):
            return [f"host slots are lost or shared: owned {sorted(owned)}, free {sorted(self._free)}"]
        return []
