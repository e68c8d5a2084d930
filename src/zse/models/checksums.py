"""Checksums of weights, compared while they are loaded. Only a `.zse` has them: a CRC-32 of each tensor.

Where the host reads the weights into its own memory, the loader's threads sum what they read while it lies in their
cache: that costs a start nothing that could be measured (benchmarks/LOG.md), and every tensor that is stored as the
kernels read it is checked. `verify` checks all of them, on every device: what the loader did not sum is read once more,
for a GPU beside the copies."""

from functools import cached_property
from itertools import groupby

from zse.formats.source import ModelSource, TensorInfo
from zse.runtime import native
from zse.runtime.load import BackgroundLoad, LoadJob

PIECE_BYTES = 8 << 20  # of a job that only reads: threads share a large tensor
READERS = 8  # threads beside a GPU's copies


class Checks:
    """The checks of one load. verify: every tensor (True), those that cost nothing (None), or none (False)."""

    def __init__(self, source: ModelSource, device, verify: bool | None):
        self.source, self.device, self.verify = source, device, verify
        self._beside: BackgroundLoad | None = None

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Those to check, by name."""
        if self.verify is False:
            return {}
        return {info.name: info for info in self.source.tensors.values() if info.crc32 is not None}

    @cached_property
    def sums(self) -> bool:
        """Whether the loader is to sum what it reads."""
        return bool(self.tensors) and (self.verify or bool(native.runtime().zse_crc32_is_fast()))

    def begin(self) -> None:
        """When the load begins: a GPU's copies are not seen by the host, so that it reads everything beside them."""
        if self.verify and self.tensors and not self.device.shares_memory:
            self._beside = self.device.host.load(read_jobs(list(self.tensors.values())), READERS, sums=True)

    @property
    def finished(self) -> bool:
        """Whether finish() need not wait for anything but the load itself."""
        return self._beside is None or self._beside.finished

    def finish(self, loading: BackgroundLoad) -> None:
        """Compare, after `loading` was waited for. FormatError names the file and the tensor that differs."""
        left = dict(self.tensors) if self.sums else {}
        self._compare(loading, left)
        if self._beside is None and self.verify and left:
            self._beside = self.device.load(read_jobs(list(left.values())), sums=True)
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.wait()
            self._compare(beside, left)

    def _compare(self, loading: BackgroundLoad, left: dict[str, TensorInfo]) -> None:
        """Tensors that `loading` read as a whole, one job after the other, are taken from `left`."""
        for name, group in groupby(loading.sums, lambda entry: entry[0].field):
            info = left.get(name)
            if info is None:
                continue
            nbytes = crc32 = 0
            for job, of_job in group:
                crc32 = native.runtime().zse_crc32_joined(crc32, of_job, job.nbytes) if nbytes else of_job
                nbytes += job.nbytes
            if nbytes == info.nbytes:
                if crc32 != info.crc32:
                    raise info.damaged(crc32)
                del left[name]

    def cancel(self) -> None:
        """Read no further."""
        if self._beside is not None:
            self._beside.cancel()


def read_jobs(tensors: list[TensorInfo]) -> list[LoadJob]:
    """Jobs that read the tensors for their checksums alone, in the order of their bytes."""
    return [
        LoadJob(file.fd, offset + at, min(PIECE_BYTES, nbytes - at), None, {}, (1,), file.path, info.name)
        for info in tensors
        for file, offset, nbytes in info.ranges()
        for at in range(0, nbytes, PIECE_BYTES)
    ]
