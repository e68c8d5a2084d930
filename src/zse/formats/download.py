"""What downloads into the store share: the callbacks, hashes, and the bytes that have arrived."""

import hashlib
import os
import threading
from collections.abc import Callable

from zse.formats import store

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all
Notice = Callable[[str], None]  # one line for the user

_CHUNK = 1 << 20
_WATCH_SECONDS = 0.1


def sha256_file(path: str | os.PathLike, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hex. progress(bytes done)."""
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
            done += len(block)
            if progress:
                progress(done)
    return digest.hexdigest()


class watch_folder:
    """While the block runs, call progress(done) with the bytes of `size` that have arrived under `folder`: never fewer than before,
    where who writes them copies or deletes."""

    def __init__(self, folder: str, size: int, progress: Callable[[int], None]):
        self._folder, self._size, self._progress, self._stop = folder, size, progress, threading.Event()
        self._thread = threading.Thread(target=self._run, name="zse-download-progress", daemon=True)

    def _run(self) -> None:
        done = 0
        while not self._stop.wait(_WATCH_SECONDS):
            done = max(done, min(store.tree_bytes(self._folder), self._size))
            self._progress(done)

    def __enter__(self) -> None:
        self._progress(0)
        self._thread.start()

    def __exit__(self, kind, error, traceback) -> None:
        self._stop.set()
        self._thread.join()
