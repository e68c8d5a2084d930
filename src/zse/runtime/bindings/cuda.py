"""The CUDA driver (libcuda.so.1): what is used of it, as cuda.h of CUDA 12.3 to 13 declares it."""

import ctypes
import os
from ctypes import byref, c_char, c_char_p, c_int

from zse import env
from zse.errors import DeviceError
from zse.runtime.bindings.driver import CUDA, Driver, DriverError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# cuda.h: CUdevice_attribute
CLOCK_KHZ = 13
MULTIPROCESSORS = 16
COMPUTE_MODE = 20
L2_BYTES = 38
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76
SHARED_BYTES_OPTIN = 97
VMM_SUPPORTED = 102
READ_ONLY_REGISTER = 113
MPS_ENABLED = 133

# CUfunction_attribute
MAX_DYNAMIC_SHARED_BYTES = 8
NON_PORTABLE_CLUSTER = 14

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGN = 64

# 12.3: programmatic dependent launches become edges of a captured graph.
NEEDED_VERSION = 12030
LEAST_ARCH = 80  # bf16 tensor cores, cp.async
COMPUTE_PROHIBITED = 2  # CU_COMPUTEMODE_PROHIBITED
# Hardware queues of a context, one for each of our streams. Fewer make the context sooner: 50 ms with 2, 90 without the
# variable, 121 with 8 (H200); copies and kernels overlap all the same.
CONNECTIONS = ("CUDA_DEVICE_MAX_CONNECTIONS", "2")

_DRIVER_HINT = (
    "install the NVIDIA driver, version 545 or later (580 or later for kernels compiled by CUDA 13), or use "
    "--device cpu"
)


class CUDADriver(Driver):
    """libcuda, opened when the object is made."""

    vendor = "NVIDIA"
    libraries = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")
    missing_hint = _DRIVER_HINT
    # Illegal address and its kin, a launch that was killed, ECC and NVLink faults, a context that is gone.
    sticky = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 806, 810, 999})
    column = CUDA
    hints = {
        "CUDA_ERROR_NO_DEVICE": (
            "no NVIDIA GPU is visible: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, in a container pass the GPU in "
            "(--gpus all), or use --device cpu"
        ),
        "CUDA_ERROR_INVALID_DEVICE": "there is no GPU of that number: see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES",
        "CUDA_ERROR_DEVICE_UNAVAILABLE": (
            "another process holds the GPU (exclusive compute mode) or it failed: see `nvidia-smi`, or use --device cpu"
        ),
        "CUDA_ERROR_OUT_OF_MEMORY": (
            "close other programs on the GPU (`nvidia-smi` lists them), or use a smaller context or a quantized model"
        ),
        "CUDA_ERROR_STUB_LIBRARY": "libcuda.so.1 is the toolkit's stub, not the driver: take it out of LD_LIBRARY_PATH",
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
            "the driver was updated while loaded: restart the machine or reload the nvidia modules"
        ),
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
            "remove the CUDA compatibility libraries from LD_LIBRARY_PATH, or " + _DRIVER_HINT
        ),
        "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, or wait until it is up",
        "CUDA_ERROR_UNKNOWN": "often a driver that was suspended or half loaded: check `nvidia-smi`",
        "CUDA_ERROR_NO_BINARY_FOR_GPU": (
            "the kernels were compiled for another GPU or by a newer CUDA than the driver: run `zse kernels build`, or "
            "update the driver"
        ),
        "CUDA_ERROR_INVALID_IMAGE": "a compiled kernel is damaged or too new for the driver: run `zse kernels build`",
        "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory failed: see `nvidia-smi -q -d ECC`",
        "CUDA_ERROR_ILLEGAL_ADDRESS": ("a kernel touched memory that is not its own; ZSE_GPU_CHECK=1 names the kernel"),
        "CUDA_ERROR_LAUNCH_FAILED": "a kernel failed; ZSE_GPU_CHECK=1 names it",
        "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel made a misaligned access; ZSE_GPU_CHECK=1 names it",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel ran an instruction that this GPU lacks; ZSE_GPU_CHECK=1 names it",
    }

    context = 0  # after start()
    device = version = arch = 0
    product = isa = ""

    def start(self, ordinal: int, retained: bool = False) -> int:
        """cuInit and the primary context of GPU `ordinal`, once: what takes long (0.15 to 0.3 s, outside Python), with
        nothing imported but this. retained: the context was retained before, for us (native.GPUOpening): that is given
        back. Returns the context. DeviceError for what cannot be used."""
        if not self.context:
            try:
                self._start(ordinal)
            finally:
                if retained:
                    self.context_release(self.integer("device_get", ordinal))
        return self.context

    def _start(self, ordinal: int) -> None:
        self.version = self.integer("driver_version")  # works before cuInit; 12030 for CUDA 12.3
        if self.version < NEEDED_VERSION:
            raise DeviceError(
                f"the NVIDIA driver is for CUDA {_dotted(self.version)}; CUDA {_dotted(NEEDED_VERSION)} is "
                f"needed: {self.missing_hint}"
            )
        os.environ.setdefault(*CONNECTIONS)
        self.init(0)
        count = self.integer("device_count")
        if not count:
            raise self.error("device_count", 100)
        if ordinal >= count:
            raise DeviceError(
                f"there is no cuda:{ordinal}: {count} GPU(s) are visible (CUDA_VISIBLE_DEVICES, `nvidia-smi -L`)"
            )
        self.device = device = self.integer("device_get", ordinal)
        self.product, self.arch = self.identify(device).values()
        if self.arch < LEAST_ARCH:
            raise DeviceError(
                f"{self.product} is sm_{self.arch}; sm_{LEAST_ARCH} (Ampere) or later is needed: use --device cpu"
            )
        if self.integer("device_attribute", COMPUTE_MODE, device) == COMPUTE_PROHIBITED:
            raise DeviceError(
                f"{self.product}: its compute mode is Prohibited; run `nvidia-smi -c DEFAULT`, or use --device cpu"
            )
        if self._has_mps(device) and env.get("ZSE_MPS") != "1":
            raise DeviceError(
                f"{self.product}: CUDA MPS runs kernels of several processes side by side; blocks of ours wait for each other, for ever "
                "where another's keep some from the GPU: end it (`echo quit | nvidia-cuda-mps-control`), or set ZSE_MPS=1 where nobody "
                "else computes on this GPU"
            )
        # Instructions of sm_90a and sm_100a are not carried over to later architectures: kernels are compiled for one.
        self.isa = f"sm_{self.arch}{'a' if self.arch >= 90 else ''}"
        self.context = self.pointer("context_retain", device)

    def _has_mps(self, device: int) -> bool:
        try:
            return self.integer("device_attribute", MPS_ENABLED, device) == 1
        except DriverError:
            return False  # older drivers do not know it

    def stop(self) -> None:
        """Give the context back."""
        context, self.context = self.context, 0
        if context:
            self.context_release(self.device)

    def identify(self, device: int) -> "dict[str, Any]":
        name = (c_char * 256)()
        self.device_name(ctypes.cast(name, c_char_p), 256, device)
        major, minor = (
            self.integer("device_attribute", attribute, device) for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR)
        )
        return {"name": name.value.decode("utf-8", "replace"), "arch": 10 * major + minor}

    def describe(self, code: int) -> tuple[str, str]:
        found: list[str] = []
        for symbol in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            if getattr(self.library, symbol)(c_int(code), byref(text)) or not text.value:
                found.append("" if found else f"CUDA error {code}")
            else:
                found.append(text.value.decode("utf-8", "replace"))
        return found[0], found[1]


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
