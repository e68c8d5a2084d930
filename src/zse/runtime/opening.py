"""Opening devices by name."""

import os
from contextlib import suppress

from zse.errors import DeviceError, UnsupportedError
from zse.lazy import logging
from zse.runtime import cpu, cuda, hip, metal, native, null
from zse.runtime.bindings import cuda as cuda_driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.device import Device
    from zse.runtime.native import GPUOpening

NAMES = ("auto", "cpu", "cuda", "cuda:N", "hip", "hip:N", "metal", "null")


def _ordinal(name: str, kind: str) -> int | None:
    """N of "KIND:N", 0 of "KIND", None of another name."""
    found, colon, number = name.partition(":")
    if found != kind or (colon and not number.isdecimal()):
        return None
    return int(number or 0)


def open_device(name: str = "cpu", threads: int | None = None, opening: "GPUOpening | None" = None) -> "Device":
    """The device called `name`: "cpu", "cuda" (the first visible GPU), "cuda:1", "hip", "metal", "null", or "auto": the
    first NVIDIA GPU that can be used, else the CPU (hip and metal have not run on hardware: they are asked for by
    name).

    threads: of the CPU's pool; default ZSE_THREADS, else the physical cores. opening: the CUDA context, which a C
    thread opens; what was wrong with it is found again here. Raises UnsupportedError for another name, DeviceError when
    the device cannot be used ("auto" logs why and takes the CPU)."""
    if name == "auto":
        try:
            return open_device("cuda", threads, opening)
        except DeviceError as error:
            logging.getLogger("zse.runtime").info("computing on the CPU: %s", error)
            name = "cpu"
    if name == "cpu":
        return cpu.CPUDevice(threads)
    if name == "metal":
        return metal.MetalDevice()
    if name == "null":
        return null.NullDevice(threads or 1)
    if (ordinal := _ordinal(name, "hip")) is not None:
        return hip.HIPDevice(ordinal)
    if (ordinal := _ordinal(name, "cuda")) is not None:
        retained = opening.wait() if opening is not None else False
        driver = cuda_driver.CUDADriver()
        driver.start(ordinal, retained)
        return cuda.CUDADevice(ordinal, driver)
    raise UnsupportedError("device", name, NAMES)


class PendingDevice:
    """A device that is being opened. For CUDA a C thread does what takes long (the driver and a context: 0.15 to 0.3
    s), so that imports go on undisturbed; the rest, and other devices whole, are made by result(). Arguments and errors
    as of open_device."""

    def __init__(self, name: str, threads: int | None = None):
        self._name, self.threads = name, threads  # threads may be set until result() is called
        self._device: Device | None = None
        self._opening: GPUOpening | None = None
        ordinal = 0 if name == "auto" else _ordinal(name, "cuda")
        if ordinal is not None:
            os.environ.setdefault(*cuda_driver.CONNECTIONS)
            with suppress(DeviceError):  # no compiled library: result() says so
                self._opening = native.GPUOpening(cuda_driver.CUDADriver.libraries[0], ordinal)

    @property
    def done(self) -> bool:
        """Whether result() would return soon."""
        return self._opening is None or self._opening.done

    def result(self) -> "Device":
        """The device, when it is open. Raises what opening it raises."""
        if self._device is None:
            self._device = open_device(self._name, self.threads, self._opening)
        return self._device
