"""A recording as the C runtimes read it: launches, their arguments as 8-byte numbers, and where symbols go."""

from ctypes import c_int32, c_int64, c_uint64
from typing import Any

from zse.runtime import native
from zse.runtime.symbol import Sym

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.device import Graph, Launch


class LaunchList:
    """launches: an array of `kind`, one for each launch of the graph, filled by the caller and by add()."""

    def __init__(self, graph: "Graph", kind: Any):
        self._symbols, self._maxima = graph.symbols, graph.maxima
        self.launches = (kind * len(graph.launches))()
        self.slots: list[int] = []
        self._patches: list[native.Patch] = []

    def add(self, number: int, launch: "Launch") -> Any:
        """Put launch `number`'s arguments and grid there; returns its structure."""
        into = self.launches[number]
        into.first_arg, into.num_args = len(self.slots), len(launch.args)
        for place, sym in launch.syms:
            self._patch(sym, len(self.slots) + place, 0)
        self.slots += launch.slots
        for dim, size in enumerate((*launch.grid, 1, 1)[:3]):
            if isinstance(size, Sym):
                self._patch(size, number * 3 + dim, 1)
            else:
                into.grid[dim] = size
        return into

    def _patch(self, value: Sym, index: int, is_grid: int) -> None:
        symbol = self._symbols.index(value.name)
        self._patches.append(native.Patch(symbol, is_grid, index, 0, value.divisor, value.factor))

    def create(self, call: str) -> int:
        """The handle that the C function `call` makes of all this. DeviceError."""
        status = c_int32()
        handle = getattr(native.runtime(), call)(
            self.launches,
            len(self.launches),
            (c_uint64 * len(self.slots))(*self.slots),
            len(self.slots),
            (native.Patch * len(self._patches))(*self._patches),
            len(self._patches),
            (c_int64 * len(self._maxima))(*self._maxima),
            len(self._maxima),
            status,
        )
        native.check(call, status.value)
        return handle
