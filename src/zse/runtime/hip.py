"""The HIP device: an AMD GPU through ROCm's runtime. Same launch lists, memory and loader as CUDA's.

It has not run on hardware yet: it is tested over a driver without a GPU (tests/runtime/fake_driver.c), its kernels are
compiled by clang (kernel/amd.py) and run in the emulator."""

from zse.errors import DeviceError
from zse.kernel import cache
from zse.runtime.bindings import hip
from zse.runtime.gpu import CompiledKernels, GPUDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

COMPUTE_PROHIBITED = 2
# CDNA 1 to 4 and RDNA 2 to 4; wave64 kernels with mfma on CDNA, wave32 on RDNA.
SUPPORTED = ("gfx90", "gfx94", "gfx95", "gfx103", "gfx11", "gfx12")


class HIPDevice(GPUDevice):
    """GPU number `ordinal` of those that HIP_VISIBLE_DEVICES leaves. driver, kernels: others (tests). Raises
    DeviceError, ConfigError where no kernels are compiled for its architecture."""

    name = "hip"
    simt = True

    def __init__(self, ordinal: int = 0, driver: "hip.HIPDriver | None" = None, kernels: CompiledKernels | None = None):
        self.driver = driver = driver or hip.HIPDriver()
        driver.init(0)
        self.driver_version = driver.integer("driver_version")
        count = driver.integer("device_count")
        if ordinal >= count:
            raise DeviceError(
                f"there is no hip:{ordinal}: {count} GPU(s) are visible (HIP_VISIBLE_DEVICES, `rocminfo`)"
            )
        self._device = device = driver.integer("device_get", ordinal)
        self.product, self.isa = driver.identify(device).values()
        if not self.isa.startswith(SUPPORTED):
            raise DeviceError(
                f"{self.product} is {self.isa}; kernels are written for {', '.join(SUPPORTED)}: use --device cpu"
            )
        if kernels is None:
            cache.resolve_arch(self.isa)
        if self._attribute(hip.COMPUTE_MODE) == COMPUTE_PROHIBITED:
            raise DeviceError(f"{self.product}: its compute mode is Prohibited; use --device cpu")
        self.num_sms = self._attribute(hip.MULTIPROCESSORS)
        self.warp = self._attribute(hip.WARP_SIZE)
        self.shared_bytes = self._attribute(hip.SHARED_BYTES)
        self.l2_bytes = self._attribute(hip.L2_BYTES)
        self.supports_growth = bool(self._attribute(hip.VMM_SUPPORTED))
        self.can_register = bool(self._attribute(hip.HOST_REGISTER))
        super().__init__(driver, ordinal, ordinal, kernels)


def list_devices(driver: "hip.HIPDriver | None" = None) -> "list[dict[str, Any]]":
    """As of Driver.list_devices. DeviceError without a driver."""
    return (driver or hip.HIPDriver()).list_devices()
