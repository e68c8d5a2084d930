"""The model store under ZSE_HOME/models.

    NAME/            one model: its files and model.json (name, source, licence, size and SHA-256 of every file)
    .partial/NAME/   a download in progress, or one that was killed: the next try resumes from it
    .locks/NAME      held (flock) while NAME is written, by us or by a downloader that we started
    .trash/          what is being deleted

A model appears and disappears by one rename, so a folder NAME/ is always complete. Only hub.py and remove() write here.
"""

import errno
import fcntl
import os
import time
from contextlib import suppress

from zse import env, trust
from zse.errors import ModelNotFoundError, ZSEError
from zse.formats import catalog
from zse.lazy import ctypes, json, pathlib, shutil

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "model.json"
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_MODEL_SUFFIXES = (".gguf", ".zse")


def home() -> str:
    """ZSE_HOME as an absolute path. It need not exist."""
    return os.path.abspath(os.path.expanduser(env.get("ZSE_HOME")))


def database_path() -> str:
    """Of the server's database, where no other is named. It need not exist."""
    return os.path.join(home(), "server.db")


def models_dir() -> str:
    return os.path.join(home(), "models")


def is_path(name: str) -> bool:
    """True when the text can only mean a path: absolute, ~, ./ or ../"""
    return name.startswith(("/", "~", "./", "../")) or name in (".", "..")


def folder_name(name: str) -> str | None:
    """The store's folder for a model name, or None when the text cannot be a name.

    A short name is letters, digits, '.', '_', '-'; `NAME:TAG` becomes `NAME=TAG`. `hf:ORG/NAME[@REV][:FILE]` becomes
    `hf--ORG--NAME[@REV][=FILE]`: Hugging Face allows no '--' in names, so two names never share a folder.
    """
    if not name.startswith("hf:"):
        legal = name.count(":") <= 1 and all(
            0 < len(part) <= 128 and part[0] not in "._-" and _NAME_CHARACTERS.issuperset(part) and "--" not in part
            for part in name.split(":")
        )
        return name.replace(":", "=") if legal else None
    repo, _, file = name[3:].partition(":")
    repo, at, revision = repo.partition("@")
    if repo.count("/") != 1 or (at and not revision) or (":" in name[3:] and not file) or len(name) > 200:
        return None
    parts = [*repo.split("/"), *(revision.split("/") if at else ()), *(file.split("/") if file else ())]
    for part in parts:
        if not part or part[0] in "._-" or not _NAME_CHARACTERS.issuperset(part) or "--" in part or ".." in part:
            return None
    folder = "hf--" + repo.replace("/", "--")
    if revision:
        folder += "@" + revision.replace("/", "--")
    return folder + ("=" + file.replace("/", "--") if file else "")


def _find(folder: str) -> str | None:
    """The stored model's path: its .gguf or .zse file, of several parts the first; else the folder itself
    (safetensors)."""
    path = os.path.join(models_dir(), folder)
    try:
        files = [entry for entry in os.listdir(path) if entry.endswith(_MODEL_SUFFIXES)]
        if len(files) > 1:  # a GGUF in parts is opened by the first
            files = [entry for entry in files if entry[-20:-10] == "-00001-of-"] or files
    except OSError:
        return None
    return os.path.join(path, files[0]) if len(files) == 1 else path


def _stored(name: str) -> str | None:
    """The folder of a stored model; it need not exist. NAME also finds NAME:TAG, of several the first by name."""
    folder = None if is_path(name) else folder_name(name)
    if folder is not None and not name.startswith("hf:") and not os.path.isdir(os.path.join(models_dir(), folder)):
        with suppress(OSError):
            tagged = (entry for entry in os.listdir(models_dir()) if entry.startswith(folder + "="))
            return min(tagged, default=folder)
    return folder


def stored_name(path: str) -> str | None:
    """The name under which the model at `path` is stored; None when it lies elsewhere."""
    root, path = models_dir(), os.path.abspath(path)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return os.path.basename(folder).replace("=", ":") if os.path.dirname(folder) == root else None


def resolve(name_or_path: "str | os.PathLike") -> "Path":
    """locate() as a Path."""
    return pathlib.Path(locate(name_or_path))


def locate(name_or_path: "str | os.PathLike") -> str:
    """The model's file or folder. A stored name wins over a path of the same spelling; write ./NAME for the path.

    Does no network access and imports nothing: safe on the start path.
    Errors: ModelNotFoundError that says how to get the model, or lists what there is.
    """
    name = os.fspath(name_or_path)
    folder = _stored(name)
    if folder is not None and (found := _find(folder)) is not None:
        return found
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return path
    raise _not_found(name)


def can_be_pulled(name: str) -> bool:
    """Whether the text is a name of the catalog or of a Hugging Face repository."""
    return folder_name(name) is not None and (name.startswith("hf:") or catalog.find(name) is not None)


def _not_found(name: str) -> ModelNotFoundError:
    if can_be_pulled(name):
        if any(part["name"] == name for part in partials()):
            return ModelNotFoundError(f"model {name} was not fetched to its end; go on with: zse pull {name}")
        return ModelNotFoundError(f"model {name} is not in the store yet; fetch it with: zse pull {name}")
    if name.startswith("hf:"):
        return ModelNotFoundError(f"{name!r} names no repository: the form is hf:ORG/NAME[@REV][:FILE]")
    if is_path(name) or "/" in name or name.endswith(_MODEL_SUFFIXES):
        is_repository = not is_path(name) and name.count("/") == 1 and folder_name(f"hf:{name}")
        hint = f" (a Hugging Face repository is hf:{name})" if is_repository else ""
        return ModelNotFoundError(f"{name}: no such file or folder{hint}")
    stored = [model["name"] for model in entries()]
    return ModelNotFoundError(
        f"unknown model {name!r}{catalog.did_you_mean(name, stored)}; the catalog has: {catalog.SUMMARY}; "
        f"the store has: {', '.join(stored) or 'nothing'}; "
        "others: hf:ORG/NAME, or the path of a .zse or .gguf file or a Hugging Face folder"
    )


def manifest(folder: str) -> dict | None:
    """model.json of a stored folder; None when the folder was put there by hand. A damaged one is an error."""
    path = os.path.join(models_dir(), folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ZSEError(f"{path}: not valid JSON ({error}); remove the model and pull it again") from None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not isinstance(data.get("files"), list):
        raise ZSEError(f"{path}: not a model manifest; remove the model and pull it again")
    return data


def entries() -> list[dict]:
    """Every stored model: name, path, bytes, licence, source, pulled (ISO date or None), in name order."""
    root = models_dir()
    try:
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        return []
    return [_describe(folder) for folder in folders]


def describe(name: str) -> dict | None:
    """The entry (as in entries()) of one stored model, with its `files`; None when it is not stored."""
    folder = _stored(name)
    if folder is None or _find(folder) is None:
        return None
    return {**_describe(folder), "files": (manifest(folder) or {}).get("files", [])}


def _describe(folder: str) -> dict:
    data = manifest(folder) or {}
    return {
        "name": data.get("name", folder),
        "path": str(_find(folder)),
        "bytes": tree_bytes(os.path.join(models_dir(), folder)),
        "licence": data.get("licence"),
        "source": data.get("source"),
        "revision": data.get("revision"),
        "pulled": data.get("pulled"),
    }


def partials() -> list[dict]:
    """Downloads that did not end: name, bytes on disk. `zse pull NAME` resumes one, `zse rm NAME` deletes it."""
    root = os.path.join(models_dir(), ".partial")
    try:
        folders = sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    return [
        {"name": _partial_name(root, folder), "bytes": tree_bytes(os.path.join(root, folder))} for folder in folders
    ]


def _partial_name(root: str, folder: str) -> str:
    try:
        with open(os.path.join(root, folder, ".name"), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return folder


def model_files(path: str) -> list[str]:
    """A model's file, the files of its folder, or all parts of a GGUF. Raises OSError."""
    folder, name = os.path.split(path)
    if os.path.isdir(path):
        return sorted(entry.path for entry in os.scandir(path) if entry.is_file())
    if "-00001-of-" not in name:
        return [path]
    head, tail = name[:-19], name[-14:]
    return sorted(part.path for part in os.scandir(folder) if part.name.startswith(head) and part.name.endswith(tail))


def tree_bytes(path: str) -> int:
    """Bytes of all files under a folder; files that vanish meanwhile count 0."""
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size
            except FileNotFoundError:
                continue
    return total


def check_space(needed_bytes: int) -> None:
    """ZSEError when the store's disk has less than `needed_bytes` free."""
    path = home()
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    stats = os.statvfs(path)
    free_bytes = stats.f_bavail * stats.f_frsize
    if free_bytes < needed_bytes:
        sizes = f"{needed_bytes / 2**20:.0f} MiB needed, {free_bytes / 2**20:.0f} MiB free"
        raise ZSEError(
            f"not enough disk space under {home()}: {sizes}; free some, or set ZSE_HOME to a folder on another disk"
        )


class PartialFolder:
    """A model being written. Use as a context manager; it holds the lock of that name until it is left.

    path: the partial folder; it survives a failure, and the next PartialFolder of the name finds what is there.
    lock_fd: pass it on to child processes that write into `path`, so that the lock lives as long as they do.
    """

    def __init__(self, name: str, notice=None):
        folder = folder_name(name)
        if folder is None:
            raise ModelNotFoundError(
                f"{name!r} cannot be a model name: use letters, digits, '.', '_', '-', or hf:ORG/NAME[@REV][:FILE]"
            )
        self.name, self.folder = name, folder
        self._notice = notice or (lambda line: None)
        root = models_dir()
        self.path = os.path.join(root, ".partial", folder)
        self.final = os.path.join(root, folder)

    def __enter__(self):
        self.lock_fd = _lock(self.folder, self.name, self._notice)
        try:
            os.makedirs(self.path, exist_ok=True)
            with open(os.path.join(self.path, ".name"), "w", encoding="utf-8") as file:
                file.write(self.name)
        except BaseException as error:
            os.close(self.lock_fd)
            _explain(error)
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if os.path.isdir(self.path) and os.listdir(self.path) == [".name"]:
            shutil.rmtree(self.path)
        os.close(self.lock_fd)
        _explain(error)

    def discard(self) -> None:
        """Delete what has been downloaded so far (it is known to be bad)."""
        _delete(self.path)

    def commit(self, files: list[dict], **facts) -> "Path":
        """Make the model visible: write model.json, flush everything to the disk, rename into place.

        files: {"name", "size", "sha256"} of every file that belongs to the model; anything else in the partial folder
        is deleted first. A model of that name that is already there is replaced.
        """
        keep = {record["name"] for record in files}
        for folder, folders, names in os.walk(self.path, topdown=False):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.relpath(path, self.path) not in keep:
                    os.unlink(path)
            for name in folders:
                if not os.listdir(os.path.join(folder, name)):
                    os.rmdir(os.path.join(folder, name))
        pulled = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with open(os.path.join(self.path, MANIFEST), "w", encoding="utf-8") as file:
            json.dump({"name": self.name, **facts, "pulled": pulled, "files": files}, file, indent=1)
        for folder, _, names in os.walk(self.path):
            for path in (*(os.path.join(folder, name) for name in names), folder):
                trust.sync(path)
        _put_in_place(self.path, self.final)
        trust.sync(models_dir())
        _empty_trash()
        return resolve(self.name)


def removable(name: str) -> tuple[str, list[str]]:
    """(the folder, what remove() deletes). ModelNotFoundError when there is neither a model nor a partial download."""
    folder = folder_name(name)
    if folder is not None:
        root = models_dir()
        paths = [os.path.join(root, folder), os.path.join(root, ".partial", folder)]
        if any(map(os.path.isdir, paths)):
            return folder, paths
    stored = ", ".join(model["name"] for model in [*entries(), *partials()]) or "nothing"
    raise ModelNotFoundError(f"model {name!r} is not in the store; the store has: {stored}")


def remove(name: str) -> int:
    """Delete a stored model and any partial download of it; returns the bytes freed. ModelNotFoundError when neither is
    there."""
    folder, paths = removable(name)
    lock_fd = _lock(folder, name, lambda line: None, wait=False)
    try:
        freed = sum(tree_bytes(path) for path in paths)
        for path in paths:
            _delete(path)
    finally:
        os.close(lock_fd)
    return freed


def _lock(folder: str, name: str, notice, wait: bool = True) -> int:
    """An fd that holds the exclusive lock of a name. The kernel frees it when its last holder dies: no stale locks."""
    locks = os.path.join(models_dir(), ".locks")
    try:
        os.makedirs(locks, exist_ok=True)
        fd = os.open(os.path.join(locks, folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ZSEError(
            f"cannot write to the model store {models_dir()}: {error.strerror}; set ZSE_HOME to a folder you own"
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise ZSEError(f"model {name} is being pulled by another process; try again when it is done") from None
            notice(f"another process is pulling {name}; waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _delete(path: str) -> None:
    _move_to_trash(path)
    _empty_trash()


def _put_in_place(new: str, path: str) -> None:
    """Give a complete folder its name. Where there is one of that name, the two are exchanged in one step, so that who
    dies here leaves the one or the other; only where the system cannot do that (Linux can), the old one goes first."""
    if os.path.lexists(path):
        exchange = getattr(ctypes.CDLL(None), "renameat2", None)
        at_cwd, rename_exchange = -100, 2
        if exchange is not None and not exchange(at_cwd, os.fsencode(new), at_cwd, os.fsencode(path), rename_exchange):
            _move_to_trash(new)
            return
        _move_to_trash(path)
    os.rename(new, path)


def _move_to_trash(path: str) -> None:
    """Take a folder out of sight by one rename: nobody ever sees half a model."""
    if os.path.lexists(path):
        trash = os.path.join(models_dir(), ".trash")
        os.makedirs(trash, exist_ok=True)
        os.rename(path, os.path.join(trash, f"{os.path.basename(path)}.{os.getpid()}.{os.urandom(4).hex()}"))


def _empty_trash() -> None:
    """Delete what lies in the trash, also what a killed run left there."""
    shutil.rmtree(os.path.join(models_dir(), ".trash"), ignore_errors=True)


def _explain(error: BaseException | None) -> None:
    """Raise a full disk or a missing permission as one line with what to do."""
    if not isinstance(error, OSError) or isinstance(error, ZSEError):
        return
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise ZSEError(
            f"the disk under {home()} is full ({error.strerror}); what has been downloaded is kept: free some space "
            "and run the same command again to resume, or set ZSE_HOME to a folder on another disk"
        ) from error
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        raise ZSEError(f"cannot write to {home()}: {error.strerror}; set ZSE_HOME to a folder you own") from error
