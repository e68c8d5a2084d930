"""Opening devices by name."""

from contextlib import suppress

from zse.errors import DeviceError, UnsupportedError
from zse.lazy import logging
from zse.runtime import cpu, cuda, hip, metal, null
from zse.runtime.bindings import cuda as cuda_driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.device import Device
    from zse.runtime.native import GPUOpening

NAMES = ("auto", "cpu", "cuda", "cuda:N", "hip", "hip:N", "metal", "null")


def open_device(name: str = "cpu", threads: int | None = None) -> "Device":
    """The device called `name`: "cpu", "cuda" (the first visible GPU), "cuda:1", "hip", "metal", "null", or "auto": the
    first NVIDIA GPU that can be used, else the CPU (hip and metal have not run on hardware: they are asked for by
    name).

    threads: of the CPU's pool; default ZSE_THREADS, else the physical cores. Raises UnsupportedError for another name,
    DeviceError when the device cannot be used ("auto" logs why and takes the CPU).
    """
    return _open(name, threads, None)


def _open(name: str, threads: int | None, opening: "GPUOpening | None") -> "Device":
    """opening: the CUDA context, which a C thread opens; what was wrong with it is found again here."""
    if name == "auto":
        try:
            return _open("cuda", threads, opening)
        except DeviceError as error:
            logging.getLogger("zse.runtime").info("computing on the CPU: %s", error)
            name = "cpu"
    if name == "cpu":
        return cpu.CPUDevice(threads)
    kind, _, number = name.partition(":")
    if kind == "hip" and (name == "hip" or number.isdecimal()):
        return hip.HIPDevice(int(number or 0))
    if name == "metal":
        return metal.MetalDevice()
    if kind == "cuda" and (name == "cuda" or number.isdecimal()):
        retained = opening.wait() if opening is not None else False
        driver = cuda_driver.CUDADriver()
        driver.start(int(number or 0), retained)
        return cuda.CUDADevice(int(number or 0), driver)
    if name == "null":
        return null.NullDevice(threads or 1)
    raise UnsupportedError("device", name, NAMES)


class PendingDevice:
    """A device that is being opened. For CUDA a C thread does what takes long (the driver and a context: 0.15 to 0.3
    s), so that imports go on undisturbed; the rest, and other devices whole, are made by result()."""

    def __init__(self, name: str, threads: int | None = None):
        self._name, self.threads = name, threads  # threads may be set until result() is called
        self._device: Device | None = None
        self._error: BaseException | None = None
        self._opening: GPUOpening | None = None
        kind, _, number = name.partition(":")
        if name in ("auto", "cuda") or (kind == "cuda" and number.isdecimal()):
            with suppress(DeviceError):  # no compiled library: result() says so, or takes the CPU
                self._opening = cuda_driver.CUDADriver.opening(int(number or 0))

    @property
    def done(self) -> bool:
        """Whether result() would return soon."""
        return self._opening is None or self._opening.done

    def result(self) -> "Device":
        """The device, when it is open. Raises what opening it raised."""
        if self._device is None and self._error is None:
            try:
                self._device = _open(self._name, self.threads, self._opening)
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error
        assert self._device is not None
        return self._device


def open_device_async(name: str = "cpu", threads: int | None = None) -> PendingDevice:
    """Start to open a device; `.result()` waits for it. Arguments and errors as of open_device."""
    return PendingDevice(name, threads)
