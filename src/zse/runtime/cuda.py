"""The CUDA device: an NVIDIA GPU through its driver alone. No toolkit and no CUDA runtime library is needed to
compute."""

import ctypes
from ctypes import c_char, c_uint32, c_uint64

from zse.dtypes import ITEM_BYTES
from zse.runtime.bindings import cuda
from zse.runtime.device import Program
from zse.runtime.gpu import CompiledKernels, GPUDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

PORTABLE_CLUSTER = 8
# CUtensorMapDataType
_TENSOR_TYPES = {
    dtype: number
    for number, dtypes in enumerate(
        ("u8 i8 e4m3 bool", "u16 i16", "u32", "i32", "u64", "i64", "f16", "f32", "f64", "bf16")
    )
    for dtype in dtypes.split()
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


# From compute capability on: dense bf16 multiply-adds of a multiprocessor in a clock (NVIDIA's architecture white
# papers).
PRODUCTS = ((120, 512), (100, 4096), (90, 2048), (86, 512), (80, 1024))


class TensorMap:
    """A descriptor of the tensor memory accelerator: how boxes of a tensor in global memory are copied to shared
    memory. An argument of kernels; made by `device.tensor_map`. buffer, address: the tensor's."""

    __slots__ = ("address", "buffer", "host_address", "box", "_memory")

    def __init__(self, tensor: "Any", box: "tuple[int, ...]"):
        self.buffer, self.address, self.box = getattr(tensor, "buffer", tensor), tensor.address, box
        # The driver reads a CUtensorMap at a 64-byte boundary.
        self._memory = (c_char * (cuda.TENSOR_MAP_BYTES + cuda.TENSOR_MAP_ALIGN))()
        start = ctypes.addressof(self._memory)
        self.host_address = start + -start % cuda.TENSOR_MAP_ALIGN


class CUDADevice(GPUDevice):
    """GPU number `ordinal` of those that CUDA_VISIBLE_DEVICES leaves.

    driver: another library than libcuda.so.1; kernels: other kernels than the compiled pack (both for tests).
    """

    name, loads_modules = "cuda", True

    def __init__(
        self, ordinal: int = 0, driver: "cuda.CUDADriver | None" = None, kernels: CompiledKernels | None = None
    ):
        self.driver = driver = driver or cuda.CUDADriver()
        context = driver.start(ordinal)
        try:
            self._device, self.driver_version = driver.device, driver.version
            self.product, self.arch, self.isa = driver.product, driver.arch, driver.isa
            self.num_sms = self._attribute(cuda.MULTIPROCESSORS)
            self.shared_bytes = self._attribute(cuda.SHARED_BYTES_OPTIN)
            self.l2_bytes = self._attribute(cuda.L2_BYTES)
            self.supports_growth = bool(self._attribute(cuda.VMM_SUPPORTED))
            self.can_register = bool(self._attribute(cuda.READ_ONLY_REGISTER))
            self.overlaps = self.arch >= 90
            super().__init__(driver, ordinal, context, kernels)
        except BaseException:
            driver.stop()
            raise

    @property
    def products_per_s(self) -> float:  # type: ignore[override]
        of_clock = next((count for arch, count in PRODUCTS if self.arch >= arch), 0)
        return 1e3 * self._attribute(cuda.CLOCK_KHZ) * self.num_sms * of_clock

    def _prepare_function(self, program: Program) -> None:
        # Always: static and dynamic shared memory share the default limit of 48 KiB.
        if program.shared_bytes:
            self.driver.function_set_attribute(program.address, cuda.MAX_DYNAMIC_SHARED_BYTES, program.shared_bytes)
        if program.cluster > PORTABLE_CLUSTER:
            self.driver.function_set_attribute(program.address, cuda.NON_PORTABLE_CLUSTER, 1)

    def tensor_map(
        self,
        tensor: "Any",
        box: "Sequence[int]",
        *,
        swizzle: int = 0,
        l2_promotion: int = 128,
        dims: "Sequence[int] | None" = None,
        strides: "Sequence[int] | None" = None,
    ) -> TensorMap:
        """A map of `tensor` for TMA copies of boxes. What lies outside of dims reads as zero and is not written.

        Args:
            tensor: in this device's memory, 16-byte aligned.
            box: elements of a copy, outermost first, as shapes are; at most 256 a dimension.
            swizzle: 0, 32, 64 or 128 bytes, the width of the pattern in shared memory; then the box's innermost
                dimension is at most that many bytes.
            l2_promotion: 0, 64, 128 or 256 bytes fetched into L2 at once.
            dims: other sizes than the tensor's shape, outermost first.
            strides: bytes between elements of every dimension but the innermost, outermost first, multiples of 16;
                default: row-major.
        Raises ValueError, TypeError.
        """
        shape = tuple(dims if dims is not None else tensor.shape)
        box = tuple(box)
        kind = _TENSOR_TYPES.get(tensor.dtype)
        if kind is None:
            raise TypeError(f"tensor_map: dtype {tensor.dtype}; supported: {', '.join(_TENSOR_TYPES)}")
        rank, item = len(shape), ITEM_BYTES[tensor.dtype]
        if not 1 <= rank <= 5 or len(box) != rank:
            raise ValueError(f"tensor_map: shape {shape} and box {box} must have the same 1 to 5 dimensions")
        if any(not isinstance(size, int) or not 1 <= size <= 1 << 32 for size in shape):
            raise ValueError(f"tensor_map: shape {shape}: sizes are integers from 1 to 2^32")
        if any(not 1 <= size <= 256 for size in box):
            raise ValueError(f"tensor_map: box {box}: sizes are from 1 to 256")
        if swizzle not in _SWIZZLES or l2_promotion not in _PROMOTIONS:
            raise ValueError(
                f"tensor_map: swizzle {swizzle}, l2_promotion {l2_promotion}: 0, 32, 64, 128; 0, 64, 128, 256"
            )
        inner = box[-1] * item
        if inner % 16 or (swizzle and inner > swizzle):
            raise ValueError(
                f"tensor_map: the box's rows are {inner} bytes: a multiple of 16"
                f"{f', at most the swizzle of {swizzle}' if swizzle else ''}"
            )
        if strides is None:
            row, found = item, []
            for size in reversed(shape[1:]):
                row *= size
                found.append(row)
            strides = found[::-1]
        if len(strides) != rank - 1 or any(stride % 16 or not 0 < stride < 1 << 40 for stride in strides):
            raise ValueError(f"tensor_map: strides {tuple(strides)}: {rank - 1} multiples of 16 bytes below 2^40")
        if tensor.address % 16:
            raise ValueError("tensor_map: the tensor is not 16-byte aligned")
        end = sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=False)) + shape[-1] * item
        buffer = getattr(tensor, "buffer", None)
        # A growing buffer's addresses are all there; a kernel reads only where there is memory by then.
        room = end if buffer is None else getattr(buffer, "maximum", buffer.nbytes) - getattr(tensor, "offset", 0)
        if end > room:
            raise ValueError(f"tensor_map: {end} bytes of a tensor in {room}")
        found_map = TensorMap(tensor, box)
        self.use()
        self.driver.tensor_map(
            found_map.host_address,
            kind,
            rank,
            tensor.address,
            (c_uint64 * rank)(*reversed(shape)),
            (c_uint64 * max(rank - 1, 1))(*reversed(strides)),
            (c_uint32 * rank)(*reversed(box)),
            (c_uint32 * rank)(*[1] * rank),
            0,
            _SWIZZLES[swizzle],
            _PROMOTIONS[l2_promotion],
            0,
        )
        return found_map

    def _release_context(self) -> None:
        self.driver.stop()


def list_devices(driver: "cuda.CUDADriver | None" = None) -> "list[dict[str, Any]]":
    """As of Driver.list_devices. DeviceError without a driver."""
    return (driver or cuda.CUDADriver()).list_devices()
