"""Devices: memory, compiled kernels, graphs that are recorded once and replayed many times."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.device import Device


def open_device(name: str = "cpu", threads: int | None = None) -> "Device":
    """The device called `name` ("cpu" or "null"). threads: default ZSE_THREADS, else the physical cores."""
    if name == "cpu":
        from zse.runtime.cpu import CPUDevice
        return CPUDevice(threads)
    if name == "null":
        from zse.runtime.null import NullDevice
        return NullDevice(threads or 1)
    from zse.errors import UnsupportedError
    raise UnsupportedError("device", name, ("cpu", "null"))
