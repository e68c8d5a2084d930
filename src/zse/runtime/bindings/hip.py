"""HIP (libamdhip64) of ROCm 5.6 to 7: what is used of it. The calls are CUDA's driver calls under other names."""

import ctypes
from ctypes import c_int

from zse.runtime.bindings.driver import HIP, Driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# hip_runtime_api.h: hipDeviceAttribute_t
COMPUTE_MODE = 6
L2_BYTES = 19
MULTIPROCESSORS = 63
SHARED_BYTES = 74
WARP_SIZE = 87
VMM_SUPPORTED = 89
HOST_REGISTER = 90

PROPERTIES_BYTES = 4096  # hipDeviceProp_t has 1,472 in ROCm 6; later ones may have more
ARCH_NAME_AT = 1160  # its gcnArchName

_HINT = "install ROCm 5.6 or later (https://rocm.docs.amd.com), or use --device cpu"


class HIPDriver(Driver):
    """libamdhip64, opened when the object is made."""

    vendor = "AMD"
    libraries = (
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so.5",
        "libamdhip64.so",
        "/opt/rocm/lib/libamdhip64.so",
    )
    missing_hint = _HINT
    sticky = frozenset({4, 214, 700, 702, 709, 710, 719, 999})
    column = HIP
    arguments = {"set_current": "int", "context_release": ""}
    hints = {
        "hipErrorNoDevice": (
            "no AMD GPU is visible: check `rocminfo`, HIP_VISIBLE_DEVICES and that you may open /dev/kfd (groups "
            "render, video), or use --device cpu"
        ),
        "hipErrorOutOfMemory": "close other programs on the GPU, or use a smaller context or a quantized model",
        "hipErrorNoBinaryForGpu": "the kernels were compiled for another GPU: run `zse kernels build`",
        "hipErrorInvalidImage": "a compiled kernel is damaged: run `zse kernels build`",
        "hipErrorInsufficientDriver": "the amdgpu kernel driver is too old for this ROCm: update it",
        "hipErrorIllegalAddress": "a kernel touched memory that is not its own; ZSE_GPU_CHECK=1 names the kernel",
        "hipErrorLaunchFailure": "a kernel failed; ZSE_GPU_CHECK=1 names it",
    }

    def identify(self, device: int) -> "dict[str, Any]":
        memory = (ctypes.c_char * PROPERTIES_BYTES)()
        self.device_properties(ctypes.addressof(memory), device)
        raw = memory.raw
        name, arch = (raw[at : raw.index(b"\0", at)].decode("utf-8", "replace") for at in (0, ARCH_NAME_AT))
        return {"name": name, "isa": arch.partition(":")[0]}

    def describe(self, code: int) -> tuple[str, str]:
        texts = []
        for symbol in ("hipGetErrorName", "hipGetErrorString"):
            function = getattr(self.library, symbol)
            function.restype, function.argtypes = ctypes.c_char_p, [c_int]
            texts.append((function(code) or b"").decode("utf-8", "replace"))
        return texts[0] or f"HIP error {code}", texts[1]
