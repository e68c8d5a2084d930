"""Where the servers of this user are: ZSE_HOME/servers/ has a file for each one that runs, which `zse ps`, `load` and
`unload` read.

A server holds the lock of its file (flock) until it ends, however it ends; a file without a holder is stale and removed
by whoever sees it. A number of a process would say less: another one may have it by now, or it is of another
container."""

import fcntl
import os
from contextlib import suppress

import msgspec

from zse.formats import store


def _folder() -> str:
    return os.path.join(store.home(), "servers")


class Announcement:
    """The file of this server, 0600: its address, its process, its version. Nothing of a key."""

    def __init__(self, url: str, version: str):
        os.makedirs(_folder(), mode=0o700, exist_ok=True)
        self.path = os.path.join(_folder(), f"{os.urandom(8).hex()}.json")
        # Under a name of its own until it is locked: a reader takes what is not for stale.
        new = self.path.removesuffix(".json")
        self._file = open(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(msgspec.json.encode({"url": url, "pid": os.getpid(), "version": version}))
        self._file.flush()
        os.rename(new, self.path)

    def withdraw(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self._file.close()


def running() -> list[dict]:
    """url, pid and version of each server of this user that runs, by address. Files of those that were killed are
    removed."""
    found = []
    with suppress(FileNotFoundError):
        for name in os.listdir(_folder()):
            if name.endswith(".json"):
                found += _read(os.path.join(_folder(), name))
    return sorted(found, key=lambda server: server["url"])


def _read(path: str) -> list[dict]:
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                # What others wrote there could lead a key to them.
                is_ours = state.st_uid == os.geteuid() and not state.st_mode & 0o077
                return [msgspec.json.decode(file.read(1 << 16))] if is_ours else []
            os.unlink(path)
    except (OSError, ValueError):
        pass  # gone meanwhile, or nothing of ours
    return []
