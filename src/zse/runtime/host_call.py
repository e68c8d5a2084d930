"""Calls of the host between launches: what stands before a call is done, what stands behind it waits. Of Python on a device that
runs a step when it is submitted, of C on a GPU."""

from zse.runtime.args import Args

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from zse.runtime.device import Recorder


class HostCall:
    """run(symbols): called at every replay."""

    __slots__ = ("run", "args")

    symbol, grid, independent = "host call", (1,), False

    def __init__(self, run: "Callable[[dict[str, int]], None]"):
        self.run, self.args = run, Args()


class HostFunction:
    """function: address of a C function void (*)(void *), which calls no driver; argument: what it gets. keep: what must stay."""

    __slots__ = ("function", "argument", "keep", "args")

    symbol, grid = "host function", (1,)

    def __init__(self, function: int, argument: int, keep: object):
        self.function, self.argument, self.keep, self.args = function, argument, keep, Args()


def call_host(recorder: "Recorder", run: "Callable[[dict[str, int]], None]") -> None:
    """Record a call of the host. Only for a CPU."""
    recorder.launches.append(HostCall(run))  # type: ignore[arg-type]
