"""Files whose pages a GPU's driver can read before a load asks for them. A parked engine registers those of the models that it may
become: the GPU copies them by itself, at the speed of the bus, where a load that begins with nothing registers or reads them first
(4.6 GB in 83 ms for 160, H200)."""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from zse.errors import DeviceError, DeviceLost, ZSEError
from zse.formats import store
from zse.formats.file import ModelFile
from zse.runtime import gpu_load, mappings, native, probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.gpu import GPUDevice

SHARE = (
    4  # by default this part of the memory that is available may be registered: the system cannot take it for others
)


class _Registered(NamedTuple):
    """The file of this path as it was, where it is mapped, and how much of it is registered."""

    path: str
    kept: native.LoadKept


class RegisteredFiles:
    """Of a device that waits for a model. What is not in memory is not read for it. The device's next load has them (GPUDevice.registered)."""

    def __init__(self, device: "GPUDevice"):
        self._device = device
        self._files: list[_Registered] = []
        self._paths: list[str] = []  # all that may be registered, and those of them that have not been looked at
        self._wanted: list[str] = []
        self._left = 0  # bytes that may still be registered
        self._is_refused = False  # by the driver; want() asks it again
        device.registered = self

    def want(self, models: Sequence[str], max_bytes: int | None) -> None:
        """From now on the files of these models, the first ones first, and no others: at most max_bytes of them, or as much as SHARE says."""
        paths = list(dict.fromkeys(path for model in models for path in _files_of(model)))
        for file in [file for file in self._files if file.path not in paths or not _is_same(file)]:
            self._release(file)
        if max_bytes is None:
            max_bytes = (probe.memory_bytes()["available"] or 0) // SHARE
        most = min(max_bytes, self._device.register_window()) if self._device.can_register else 0
        self._left = most - sum(file.kept.nbytes for file in self._files)
        self._paths, self._is_refused = paths, False
        self._make_room(-1, 0)
        held = {file.path for file in self._files}
        self._wanted = [path for path in paths if path not in held]

    def look_again(self) -> None:
        """Give back the files that were removed, replaced or written to meanwhile; what stands in their place is registered next."""
        for file in [file for file in self._files if not _is_same(file)]:
            self._release(file)
            self._wanted.append(file.path)

    def register_next(self) -> bool:
        """One chunk more (1 to 4 ms); False when nothing is left to register."""
        chunk = gpu_load.CHUNK_BYTES
        while not self._is_refused:
            kept = self._files[-1].kept if self._files else None
            if kept is not None and kept.num_chunks * chunk < kept.nbytes:
                begin = kept.num_chunks * chunk
                size = min(chunk, kept.nbytes + -kept.nbytes % mmap.PAGESIZE - begin)
                try:
                    self._device.use()
                    self._device.driver.host_register(kept.map + begin, size, gpu_load.REGISTER_READ_ONLY)
                except DeviceLost:
                    raise
                except DeviceError:  # so much and no more: the load registers the rest itself, or reads it
                    self._is_refused = True
                    return False
                kept.num_chunks += 1
                return True
            if not self._wanted:
                return False
            self._open(self._wanted.pop(0))
        return False

    def _open(self, path: str) -> None:
        """Map a file that is in memory and that there is room for; what is wrong with another one its load will say."""
        try:
            file = ModelFile(path)
        except ZSEError:
            return
        try:
            facts = os.fstat(file.fd)
            if facts.st_size > 0 and not file.is_cold:
                address = mappings.map_file(file.fd, facts.st_size)
                kept = native.LoadKept(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, 0, address)
                found = _Registered(path, kept)
                # is_cold cannot tell of NFS and FUSE, where registering would read all of the file. Where a path is told to be
                # another file than the open one it would be registered and given back for ever.
                is_there = mappings.is_in_memory(address, facts.st_size, gpu_load.WARM_PERCENT) and _is_same(found)
                if is_there and self._make_room(self._paths.index(path), facts.st_size):
                    self._files.append(found)
                    self._left -= facts.st_size
                else:
                    mappings.unmap(address, facts.st_size)
        except OSError:
            pass
        finally:
            file.close()

    def hold(self, files: Sequence[ModelFile]) -> bool:
        """Whether the driver has nothing left to register of these: it gives no memory while it does."""
        chunk = gpu_load.CHUNK_BYTES
        held = {
            file.path for file in self._files if file.kept.num_chunks * chunk >= file.kept.nbytes and _is_same(file)
        }
        return held.issuperset(file.path for file in files)

    def take(self) -> list[native.LoadKept]:
        """Those that a load gives back when it is done, which is told by given()."""
        return [file.kept for file in self._files]

    def given(self) -> None:
        """A load has begun with what take() gave."""
        self._files.clear()
        self._wanted.clear()

    def close(self) -> None:
        self.want((), 0)

    def _make_room(self, place: int, nbytes: int) -> bool:
        """Whether there are bytes left for the file at this place of all, when those that may be needed later are given back."""
        places = {path: at for at, path in enumerate(self._paths)}
        later = sorted(self._files, key=lambda file: -places[file.path])
        later = [file for file in later if places[file.path] > place]
        if nbytes > self._left + sum(file.kept.nbytes for file in later):
            return False
        while self._left < nbytes:
            self._release(later.pop(0))
        return True

    def _release(self, file: _Registered) -> None:
        self._files.remove(file)
        self._left += file.kept.nbytes
        self._device.use()
        for chunk in range(file.kept.num_chunks):
            self._device.driver.host_unregister(file.kept.map + chunk * gpu_load.CHUNK_BYTES)
        mappings.unmap(file.kept.map, file.kept.nbytes)


def _files_of(model: str) -> list[str]:
    """Those that a GPU may copy from as they lie: the threads of a load read GGUF, which they repack."""
    with suppress(OSError):
        return [path for path in store.model_files(model) if path.endswith((".zse", ".safetensors"))]
    return []


def _is_same(file: _Registered) -> bool:
    """Whether the path still names the file that was mapped, unchanged."""
    try:
        facts = os.stat(file.path)
    except OSError:
        return False
    kept = file.kept
    found = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns
    return found == (kept.device, kept.inode, kept.nbytes, kept.changed_ns)
