"""LoRA adapters that were uploaded, under ZSE_HOME/adapters.

    HASH/       a PEFT folder and adapter.json, which says whose it is: a model and a name; by the SHA-256 of all three
    .partial/   what is arriving, or is being deleted, or what a death left of that
    .lock       held (flock) while a folder comes or goes

A folder comes and goes by one rename: what has its place is whole, and on the disk."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from zse import trust
from zse.formats import store
from zse.formats.adapter import CONFIG, TENSORS
from zse.lazy import hashlib, json, shutil

MANIFEST = "adapter.json"
STALE_S = 86400.0  # what is arriving for longer is nobody's


class StoredAdapter(NamedTuple):
    """content: HASH. nbytes: of its files; rank: the largest of its modules. uploaded: seconds since 1970."""

    model: str
    name: str
    content: str
    nbytes: int
    rank: int
    uploaded: float

    @property
    def path(self) -> str:
        return os.path.join(folder(), self.content)


def folder() -> str:
    """It need not exist."""
    return os.path.join(store.home(), "adapters")


def _beside() -> str:
    return os.path.join(folder(), ".partial", os.urandom(16).hex())


def listed() -> list[StoredAdapter]:
    """All, by model and name."""
    found = []
    with suppress(FileNotFoundError):
        for content in os.listdir(folder()):
            with suppress(OSError, ValueError, TypeError):  # no adapter, gone meanwhile, or damaged
                with open(os.path.join(folder(), content, MANIFEST), encoding="utf-8") as file:
                    found.append(StoredAdapter(**json.load(file)))
    return sorted(found)


def find(model: str, name: str) -> StoredAdapter | None:
    """The model's adapter of that name."""
    return next((each for each in listed() if (each.model, each.name) == (model, name)), None)


def used_bytes() -> int:
    """Of all folders, without what is arriving."""
    return store.tree_bytes(folder()) - store.tree_bytes(os.path.join(folder(), ".partial"))


@contextmanager
def _locked() -> Iterator[None]:
    with open(os.path.join(folder(), ".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def begin() -> str:
    """A new empty folder for the two files; what deaths have left is deleted."""
    for path in (folder(), os.path.join(folder(), ".partial")):
        os.makedirs(path, mode=0o700, exist_ok=True)
    for entry in os.scandir(os.path.join(folder(), ".partial")):
        if entry.stat(follow_symlinks=False).st_mtime < time.time() - STALE_S:
            discard(entry.path)
    made = _beside()
    os.mkdir(made, 0o700)
    return made


def discard(partial: str) -> None:
    """Delete what is not kept, whatever is there of it."""
    shutil.rmtree(partial, ignore_errors=True)


def put(partial: str, model: str, name: str, rank: int, digests: dict[str, bytes]) -> StoredAdapter:
    """Give a whole folder its place. digests: SHA-256 of its files, which are on the disk. Raises FileExistsError: the
    model has an adapter of that name."""
    content = hashlib.sha256(digests[CONFIG] + digests[TENSORS] + f"{model}\\0{name}".encode()).hexdigest()
    adapter = StoredAdapter(model, name, content, store.tree_bytes(partial), rank, time.time())
    with open(os.path.join(partial, MANIFEST), "x", encoding="utf-8") as file:
        json.dump(adapter._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    trust.sync(partial)
    with _locked():
        if find(model, name) is not None:
            raise FileExistsError(name)
        os.rename(partial, adapter.path)
        trust.sync(folder())
    return adapter


def remove(model: str, name: str) -> StoredAdapter | None:
    """Delete it; what it was."""
    with suppress(FileNotFoundError), _locked():
        found = find(model, name)
        if found is not None:
            trash = _beside()
            os.rename(found.path, trash)
            trust.sync(folder())
            discard(trash)
        return found
    return None
