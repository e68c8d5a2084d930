"""Devices: memory, compiled kernels, graphs that are recorded once and replayed many times."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.device import Device

NAMES = ("auto", "cpu", "cuda", "cuda:N", "hip", "hip:N", "metal", "null")


def open_device(name: str = "cpu", threads: int | None = None) -> "Device":
    """The device called `name`: "cpu", "cuda" (the first visible GPU), "cuda:1", "hip", "metal", "null", or "auto": the
    first NVIDIA GPU that can be used, else the CPU (hip and metal have not run on hardware: they are asked for by
    name).

    threads: of the CPU's pool; default ZSE_THREADS, else the physical cores. Raises UnsupportedError for another name,
    DeviceError when the device cannot be used ("auto" logs why and takes the CPU).
    """
    if name == "auto":
        from zse.errors import DeviceError
        try:
            return open_device("cuda")
        except DeviceError as error:
            import logging
            logging.getLogger("zse.runtime").info("computing on the CPU: %s", error)
            name = "cpu"
    if name == "cpu":
        from zse.runtime.cpu import CPUDevice
        return CPUDevice(threads)
    kind, _, number = name.partition(":")
    if kind == "hip" and (name == "hip" or number.isdecimal()):
        from zse.runtime.hip import HIPDevice
        return HIPDevice(int(number or 0))
    if name == "metal":
        from zse.runtime.metal import MetalDevice
        return MetalDevice()
    if kind == "cuda" and (name == "cuda" or number.isdecimal()):
        from zse.runtime.bindings.cuda import CUDADriver
        driver = CUDADriver()
        driver.start(int(number or 0))      # before the other imports: another thread makes them meanwhile
        from zse.runtime.cuda import CUDADevice
        return CUDADevice(int(number or 0), driver)
    if name == "null":
        from zse.runtime.null import NullDevice
        return NullDevice(threads or 1)
    from zse.errors import UnsupportedError
    raise UnsupportedError("device", name, NAMES)


class PendingDevice:
    """A device that opens on a thread of its own: a driver and its context take some 0.3 s, most of it outside
    Python."""

    def __init__(self, name: str, threads: int | None = None):
        import threading
        self._device: Device | None = None
        self._error: BaseException | None = None
        self._arguments = (name, threads)
        self._thread = threading.Thread(target=self._open, name="device", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        try:
            self._device = open_device(*self._arguments)
        except BaseException as error:      # handed to whoever asks for the result
            self._error = error

    @property
    def done(self) -> bool:
        """Whether result() would return at once."""
        return not self._thread.is_alive()

    def result(self) -> "Device":
        """The device, when it is open. Raises what opening it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._device is not None
        return self._device


def open_device_async(name: str = "cpu", threads: int | None = None) -> PendingDevice:
    """Start to open a device; `.result()` waits for it. Arguments and errors as of open_device."""
    return PendingDevice(name, threads)
