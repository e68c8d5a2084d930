"""Loading weights onto a GPU: files are mapped or read, and copied in a stream of their own."""

import ctypes

from zse.runtime import native
from zse.runtime.bindings.driver import pointer_array
from zse.runtime.load import READERS, BackgroundLoad, path_of, reads_beside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from zse.runtime.gpu import GPUDevice
    from zse.runtime.load import LoadJob

# Bytes of a file mapping that are registered at once: 64 to 256 MiB take the same time (H200), and the last chunk's
# copy is what the loader waits for at the end.
CHUNK_BYTES = 64 << 20
# Pieces that are read, and pinned memory for them: two slots a thread. Pinning costs 0.4 ms a MiB. 4 GiB from the page
# cache take 100 ms with 8 threads and slots of 2 MiB, pinning included; 159 with 4, 105 with 12, 105 with slots of 4
# MiB.
SLOT_BYTES = 2 << 20
WARM_PERCENT, NEVER_PERCENT = 95, 101
# A chunk takes 1.3 ms to register beside the copy of the one before; 2.9 where reading with 8 threads is faster.
SLOW_US = 2000
REGISTER_READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY, hipHostRegisterReadOnly


class GPULoad(BackgroundLoad):
    """A BackgroundLoad that copies in the device's copy stream. Its destinations are Tensors in the device's memory."""

    def __init__(self, device: "GPUDevice", jobs: "Sequence[LoadJob]", threads: int):
        self._gpu = device
        registered = device.registered if device.can_register else None
        found = [] if registered is None else registered.take()
        self._kept = (native.LoadKept * len(found))(*found)
        super().__init__(device, jobs, threads)
        if registered is not None:
            registered.given()
        device._loads.add(self)

    def _options(self, threads: int) -> native.LoadOptions:
        device: GPUDevice = self._gpu  # type: ignore[assignment]
        device.use()
        driver = device.driver
        self._events = [device.take_event() for _ in range(2 * threads + 1)]
        self._event_array = pointer_array(self._events)
        # Fresh buffers are zeroed in the compute stream: the copies come after.
        fence = device.take_event()
        driver.event_record(fence, device.stream)
        driver.stream_wait_event(device.copy_stream, fence, 0)
        device.give_event(fence)
        return native.LoadOptions(
            chunk_bytes=CHUNK_BYTES if device.can_register else 0,
            window_bytes=device.register_window(),
            slot_bytes=SLOT_BYTES,
            pin=driver.address("host_alloc"),
            unpin=driver.address("host_free"),
            stream=device.copy_stream,
            events=ctypes.addressof(self._event_array),
            threads=threads,
            warm_percent=NEVER_PERCENT if device.allocates else WARM_PERCENT,
            register_flags=REGISTER_READ_ONLY,
            slow_us=SLOW_US if threads >= READERS and reads_beside() else 0,
            kept=ctypes.addressof(self._kept),
            num_kept=len(self._kept),
        )

    @property
    def mapped(self) -> bool:
        """After wait(): whether the files were read through mappings, from the page cache."""
        return bool(self._result.mapped)

    def _release(self, handle: int) -> None:
        # The threads go on to unregister and unmap what they used (26 ms for 4 GiB), beside other work.
        device: GPUDevice = self._gpu  # type: ignore[assignment]
        device._tidying.append((handle, self._events))

    def _error(self, job: "LoadJob", result: native.LoadResult) -> Exception:
        if not result.from_driver:
            return super()._error(job, result)
        where = f"{job.nbytes} bytes at {job.offset} for {job.field} (load job {result.job})"
        doing = f"loading {job.path or path_of(job.fd)}: {where}"
        return self._gpu.driver.error("to_device_async", result.code, doing)  # type: ignore[union-attr]
