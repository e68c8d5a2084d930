"""Bytes of the request bodies that a server holds, shared by those who send them."""

from collections import Counter

# One may hold so many times what would then be left for others (dynamic thresholds; Choudhury and Hahne 1998): alone three
# quarters of all, two that flood three sevenths each, and whoever comes next finds room.
SHARE = 3


class Bodies:
    """most: bytes of all bodies together. held: bytes by payer."""

    def __init__(self, most: int):
        self._most = most
        self.total = 0
        self.held: Counter[str] = Counter()

    def add(self, payer: str, size: int) -> bool:
        """Whether `payer` may hold `size` bytes more, which count from now on."""
        left = self._most - self.total - size
        if self.held[payer] + size > SHARE * left:
            return False
        self.held[payer] += size
        self.total += size
        return True

    def remove(self, payer: str, size: int) -> None:
        self.total -= size
        self.held[payer] -= size
        if not self.held[payer]:
            del self.held[payer]
