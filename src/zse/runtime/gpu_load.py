"""Loading weights onto a GPU: C threads map or read files and copy beside Python's imports and recording
(csrc/gpu_load.c)."""

import ctypes
from ctypes import byref, c_int32, c_uint64

from zse.runtime import native
from zse.runtime.args import encode
from zse.runtime.bindings.driver import pointer_array
from zse.runtime.device import buffers_of
from zse.runtime.load import Load, fill_job, path_of, read_error
from zse.runtime.probe import allowed_cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from zse.runtime.gpu import GPUDevice
    from zse.runtime.load import LoadJob

# Bytes of a file mapping that are registered at once: 64 to 256 MiB take the same time (H200), and the last chunk's
# copy is what the loader waits for at the end.
CHUNK_BYTES = 64 << 20
# Pieces that are read, and pinned memory for them: two slots a thread. Pinning costs 0.4 ms a MiB. 4 GiB from the page
# cache take 100 ms with 8 threads and slots of 2 MiB, pinning included; 159 with 4, 105 with 12, 105 with slots of 4
# MiB.
SLOT_BYTES = 2 << 20
READERS = 8
WARM_PERCENT = 95
# A chunk takes 1.3 ms to register beside the copy of the one before; 2.9 where reading with 8 threads is faster.
SLOW_US = 2000
REGISTER_READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY, hipHostRegisterReadOnly
SHORT, READ, DRIVER, MEMORY = 1, 2, 3, 4


class GPULoad(Load):
    """Jobs that run in C threads. A job without a kernel: args is [destination]. A job with one: the kernel is the
    CPU's; arguments that are Tensors in this device's memory are its outputs, exactly their bytes, which it makes in
    pinned host memory; other pointers are Tensors or Buffers of the host, or 0."""

    def __init__(self, device: "GPUDevice", jobs: "Sequence[LoadJob]", threads: int):
        self._handle: int | None = None
        self._device, self._jobs = device, list(jobs)
        self._runtime = device._runtime
        self._result: native.GPULoadResult | None = None
        self.total_bytes = sum(job.nbytes for job in self._jobs)
        descriptions = (native.GPULoadJobDesc * len(self._jobs))()
        slots: list[int] = []
        outputs: list[native.GPULoadOutput] = []
        for job, into in zip(self._jobs, descriptions, strict=True):
            into.first_arg, into.first_output = len(slots), len(outputs)
            params = fill_job(job, into, device.host_program)
            if job.symbol is None:
                address = encode("load", "destination", "ptr", job.args[0])
                outputs.append(native.GPULoadOutput(address, job.nbytes, 0, 0))
            else:
                slots.append(0)  # the piece
                self._add_arguments(job, params, slots, outputs)
            into.num_outputs = len(outputs) - into.first_output
        self._buffers = buffers_of(job.args for job in self._jobs)
        device.use()
        self._events = [device.take_event() for _ in range(2 * threads + 1)]
        self._event_array = pointer_array(self._events)
        driver = device.driver
        options = native.GPULoadOptions(
            chunk_bytes=CHUNK_BYTES if device.can_register else 0,
            window_bytes=device.register_window(),
            slot_bytes=SLOT_BYTES,
            pin=driver.address("host_alloc"),
            unpin=driver.address("host_free"),
            stream=device.copy_stream,
            events=_address(self._event_array),
            threads=threads,
            warm_percent=WARM_PERCENT,
            register_flags=REGISTER_READ_ONLY,
            slow_us=SLOW_US if threads >= READERS and len(allowed_cpus()) >= READERS else 0,
        )
        # Fresh buffers are zeroed in the compute stream: the copies come after.
        fence = device.take_event()
        driver.event_record(fence, device.stream)
        driver.stream_wait_event(device.copy_stream, fence, 0)
        device.give_event(fence)
        error = c_int32()
        self._handle = self._runtime.zse_gpu_load_start(
            device.table,
            options,
            descriptions,
            len(self._jobs),
            (c_uint64 * len(slots))(*slots),
            len(slots),
            (native.GPULoadOutput * len(outputs))(*outputs),
            len(outputs),
            byref(error),
        )
        native.check("zse_gpu_load_start", error.value)
        for buffer in self._buffers:
            buffer.pin(1)
        device._loads.add(self)

    def _add_arguments(
        self, job: "LoadJob", params: list, slots: list[int], outputs: list[native.GPULoadOutput]
    ) -> None:
        """Of a job whose piece passes a kernel of the CPU."""
        before = len(outputs)
        for place, (arg, (name, kind)) in enumerate(zip(job.args, params, strict=True), 1):
            if kind == "ptr" and arg != 0 and getattr(getattr(arg, "buffer", arg), "device", None) is self._device:
                outputs.append(native.GPULoadOutput(arg.address, arg.nbytes, place, 0))
                slots.append(0)
            elif kind == "ptr" and arg != 0 and isinstance(arg, int):
                raise TypeError(f"load job {job.field}: {name} is an address; on a GPU the memory's Tensor is needed")
            else:
                slots.append(encode(job.symbol or "", name, kind, arg))
        if len(outputs) == before:
            raise ValueError(
                f"load job {job.field}: no argument of {job.symbol} lies in the memory of {self._device.name}"
            )

    @property
    def done_bytes(self) -> int:
        if self._result is not None or not self._handle:
            return self.total_bytes if self._result is not None and self._result.job < 0 else 0
        return self._runtime.zse_gpu_load_bytes(self._handle)

    @property
    def finished(self) -> bool:
        return not self._handle or bool(self._runtime.zse_gpu_load_finished(self._handle))

    @property
    def mapped(self) -> bool:
        """After wait(): whether the files were read through mappings, from the page cache."""
        return self._result is not None and bool(self._result.mapped)

    def wait_for(self, num_jobs: int) -> None:
        """Until the first `num_jobs` jobs are on the device; what is submitted then may read them. Raises as wait
        does."""
        if self._result is not None or not self._handle:
            return
        if num_jobs >= len(self._jobs):
            return self.wait()
        result = native.GPULoadResult()
        self._runtime.zse_gpu_load_wait(self._handle, num_jobs, byref(result))
        if result.job >= 0:
            return self.wait()
        device = self._device
        device.use()
        event = device.take_event()
        device.driver.event_record(event, device.copy_stream)
        device.driver.event_wait(event)
        device.give_event(event)

    def wait(self) -> None:
        if self._result is None:
            if not self._handle:
                return
            self._result = native.GPULoadResult()
            self._runtime.zse_gpu_load_wait(self._handle, len(self._jobs), byref(self._result))
            for buffer in self._buffers:
                buffer.pin(-1)
            self._buffers.clear()
            # The threads go on to unregister and unmap what they used (26 ms for 4 GiB), beside other work.
            handle, self._handle = self._handle, None
            self._device._tidying.append((handle, self._events))
        if self._cancelled:
            return
        if self._result.job >= 0:
            raise self._error(self._result)

    _cancelled = False

    def _error(self, result: native.GPULoadResult) -> Exception:
        job = self._jobs[result.job]
        if result.kind == DRIVER:
            where = f"{job.nbytes} bytes at {job.offset} for {job.field} (load job {result.job})"
            doing = f"loading {job.path or path_of(job.fd)}: {where}"
            return self._device.driver.error("to_device_async", result.code, doing)
        return read_error(job, result.job, 0 if result.kind == SHORT else result.code, result.got)

    def cancel(self) -> None:
        if self._handle and self._result is None:
            self._cancelled = True
            self._runtime.zse_gpu_load_cancel(self._handle)
            self.wait()

    def __del__(self) -> None:
        if self._handle:
            self.cancel()  # the threads write to buffers that are about to go


def _address(array: "Any") -> int:
    return ctypes.addressof(array)
