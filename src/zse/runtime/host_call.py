"""Calls of the host between launches, on a device that runs a step when it is submitted: what stands before a call is
done, what stands behind it waits."""

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


def call_host(recorder: "Recorder", run: "Callable[[dict[str, int]], None]") -> None:
    """Record a call of the host. Only for a CPU."""
    recorder.launches.append(HostCall(run))  # type: ignore[arg-type]
