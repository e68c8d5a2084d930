"""Which files are run as code: whose they may be, and what shows that they are whole.

*Installed* files lie beside the package's Python: who can write one kind can write the other, so they are held to the
same owner and mode, and nothing is read for it. *Kept* files (ZSE_HOME/kernels) were made on this machine and lie where
other programs write too: nobody but this user or root may be able to write them or their folders, no symbolic link
leads there, and a SHA-256 covers every byte that is used. What fails is not loaded. Every refusal is a PermissionError:
callers treat it like a file that cannot be read."""

import errno
import os
import stat

from zse import env
from zse.lazy import ctypes, hashlib, logging

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

PACKAGE = os.path.dirname(os.path.abspath(__file__))
SUM = ".sha256"  # ends the name of the file that holds another one's hash

_warned: set[str] = set()


def warn_once(reason: str, *arguments: object) -> None:
    """Log a warning that this process has not given yet. reason: a format of logging."""
    if reason not in _warned:
        _warned.add(reason)
        logging.getLogger("zse.kernels").warning(reason, *arguments)


def _refuse(path: str, found: os.stat_result, why: str) -> None:
    said = f"{why} (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o})"
    raise PermissionError(errno.EPERM, said, path)


# installed files ------------------------------------------------------------------------------------------------------


def check_installed(path: str) -> None:
    """PermissionError where the file or its folder can be written by somebody who cannot write this package. OSError
    where it is not there. Symbolic links are followed: installers make them."""
    ours = os.stat(PACKAGE)
    for place in (path, os.path.dirname(path)):
        found = os.stat(place)
        if found.st_uid not in (os.geteuid(), 0, ours.st_uid):
            _refuse(place, found, "belongs to another user")
        writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if writers & ~ours.st_mode or (writers & stat.S_IWGRP and found.st_gid != ours.st_gid):
            _refuse(place, found, "others can write it: `chmod go-w` it")


def native_dir() -> str:
    """The folder of the compiled CPU libraries."""
    return env.get("ZSE_NATIVE_DIR") or os.path.join(PACKAGE, "_native")


def kernel_sources() -> list[str]:
    """What the kernels' text depends on: the files of the language, the kernels, and the schemes that they bind."""
    folders = [each for name in ("kernel", "kernels", "quant") for each in os.walk(os.path.join(PACKAGE, name))]
    return sorted(os.path.join(top, name) for top, _, names in folders for name in names if name.endswith(".py"))


def has_newer_sources(path: str) -> bool:
    """Whether the kernels' text may have changed since the file was made. In a checkout only: nobody edits what is
    installed. 2 ms, where hashing the sources takes 30."""
    if not os.path.exists(os.path.join(PACKAGE, "..", "..", ".git")):
        return False
    made = os.stat(path).st_mtime_ns
    return any(os.stat(source).st_mtime_ns > made for source in kernel_sources())


def installed_library(path: str) -> "ctypes.CDLL":
    """A compiled library of the package. OSError where it is not there, cannot be loaded, or may be another user's
    work."""
    check_installed(path)
    return ctypes.CDLL(path)


# kept files -----------------------------------------------------------------------------------------------------------


def _check_kept(path: str, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode) or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        _refuse(path, found, "is a link or no file")
    if found.st_uid not in (os.geteuid(), 0):
        _refuse(path, found, "belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _refuse(path, found, "others can write it")


def _folders(path: str, root: str) -> "list[str]":
    """`root` and the folders from there to the file, outermost first."""
    inner = os.path.relpath(os.path.dirname(path), root)
    parts = [] if inner == "." else inner.split(os.sep)
    return [os.path.join(root, *parts[:count]) for count in range(len(parts) + 1)]


def open_kept(path: str, root: str) -> "BinaryIO":
    """A kept file below `root`, to read. PermissionError where others could have written it, OSError where it cannot be
    read. Its time of change becomes now: what was not used for longest is what prune() deletes."""
    for folder in _folders(path, root):
        _check_kept(folder, os.lstat(folder))
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PermissionError(errno.EPERM, "is a link", path) from None
    try:
        found = os.fstat(handle)
        _check_kept(path, found)
        if found.st_uid == os.geteuid():
            os.utime(handle)
    except PermissionError:
        os.close(handle)
        raise
    except OSError:
        pass  # a disk that is read-only
    return open(handle, "rb")


def write_kept(path: str, data: bytes, root: str) -> None:
    """Whole or not at all, for this user alone (files 0600, folders 0700). OSError where it cannot be: also where a
    folder is another user's or a link."""
    make_private(os.path.dirname(path), root)
    write_whole(path, data, 0o600)


def make_private(place: str, root: str) -> None:
    """Make the folder, and those from `root` to it, for this user alone. As write_kept()."""
    for folder in _folders(os.path.join(place, "file"), root):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
        if found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode):
            os.chmod(folder, 0o700)  # what others put there before is theirs, and is not read
        else:
            _refuse(folder, found, "is a link or belongs to another user")


def write_whole(path: str, data: bytes, mode: int, sync: bool = True) -> None:
    """Write a file beside its place, with `sync` to the disk, and rename it: whole or not at all. OSError."""
    half = f"{path}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
    try:
        handle = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(handle)
        os.replace(half, path)
    except BaseException:
        remove(half)
        raise


def write_once(path: str, data: bytes) -> None:
    """Write a private file that nobody has written yet, to the disk, whole or not at all; one that another process wrote first
    stays. OSError."""
    half = f"{path}.{os.urandom(8).hex()}.tmp"  # in a container each start has the same process id, and one may have died here
    try:
        handle = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        try:
            os.link(half, path)
        except FileExistsError:
            pass
    finally:
        remove(half)


def sync(path: str) -> None:
    """Bring a file, or a folder's names, to the disk. OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(*paths: str) -> None:
    """Delete files, those that are there."""
    for path in paths:
        try:
            os.unlink(path)
        except OSError:
            pass


def prune(root: str, most_bytes: int, now: float) -> None:
    """Delete what was not used for longest until the files below `root` have at most `most_bytes` together, and what
    killed writers left. now: seconds as time.time() gives them."""
    found = []
    for folder, _, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in names):
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if path.endswith(".tmp") and status.st_mtime < now - 3600:
                remove(path)
            else:
                found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most_bytes:
            break
        remove(path)
        total -= size


# hashes beside files --------------------------------------------------------------------------------------------------


def sum_of(path: str) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def put_sum(path: str) -> None:
    """Write the file's hash beside it."""
    write_whole(path + SUM, sum_of(path).encode(), 0o644, sync=False)


def is_whole(path: str) -> bool:
    """Whether the file is there and has the hash that stands beside it."""
    try:
        with open(path + SUM, encoding="ascii", errors="replace") as file:
            return file.read(100) == sum_of(path)
    except OSError:
        return False
