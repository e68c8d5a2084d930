"""Copies of models as a device reads them, kept in the store (`zse serve --cache-converted`): ordinary stored models,
which `zse ls` lists and `zse rm` deletes, under a name that says what was converted, how, and when it was last
changed."""

import hashlib
import os
import re
import shutil

from zse.errors import FormatError, ZSEError
from zse.formats import store
from zse.formats.download import sha256_file

FILE = "model.zse"
LEFT_BYTES = 1 << 30  # of the disk, of what nobody asked for
_IS_COPY = re.compile(r"-for-(cpu|gpu)-[\w-]+-[0-9a-f]{12}$")
FOR_GPU = ("/dev/nvidiactl", "/dev/kfd")


def family_of(device: str) -> str:
    """The kind of device ("cpu", "gpu") that `--device` means here, before any is opened."""
    is_cpu = device == "cpu" or (device == "auto" and not any(map(os.path.exists, FOR_GPU)))
    return "cpu" if is_cpu else "gpu"


def name_of(path: str, quantize: str | None, family: str) -> str:
    """The stored name of a converted copy of the model at `path` as it is now: its real path, and the size and time of
    change of every file, are in the last 12 characters. FormatError where it cannot be read."""
    path = os.path.realpath(path)
    try:
        files = [path] if os.path.isfile(path) else sorted(entry.path for entry in os.scandir(path) if entry.is_file())
        facts = [(name, (status := os.stat(name)).st_size, status.st_mtime_ns) for name in files]
    except OSError as error:
        raise FormatError(path, 0, "file", f"cannot be read: {error.strerror}") from None
    return _prefix(path, quantize, family) + hashlib.sha256(repr((path, facts)).encode()).hexdigest()[:12]


def find(path: str, quantize: str | None, family: str) -> str | None:
    """The copy's file, where one was kept of the model as it is now."""
    kept = os.path.join(store.models_dir(), name_of(path, quantize, family), FILE)
    return kept if os.path.isfile(kept) else None


def write(path: str, quantize: str | None, family: str, convert) -> str | None:
    """Make the copy unless it is there: its file, or None where nothing is to be converted. convert(source, out) writes
    the file. Copies of the same model as it was before are deleted. Raises as the store and convert()."""
    if path.endswith(".zse") or find(path, quantize, family) is not None:
        return find(path, quantize, family)
    name, source = name_of(path, quantize, family), os.path.realpath(path)
    with store.PartialFolder(name) as folder:
        if find(path, quantize, family) is None:  # another process may have made it while this one waited
            out = os.path.join(folder.path, FILE)
            convert(path, out)
            if name_of(path, quantize, family) != name:
                folder.discard()
                raise FormatError(path, 0, "file", "changed while it was converted")
            record = {"name": FILE, "size": os.path.getsize(out), "sha256": sha256_file(out)}
            folder.commit([record], source=source, licence=None, revision=None)
    for old in store.entries():
        if old["name"] != name and old["source"] == source and old["name"][:-12] == name[:-12]:
            store.remove(old["name"])
    return find(path, quantize, family)


def check_room(path: str, most: int) -> None:
    """Raises ZSEError where a copy of the model at `path`, which has about its size, would make all copies more than
    `most` bytes, or leave less than 1 GiB of the disk. Copies of what it was before do not count, they go."""
    source = os.path.realpath(path)
    others = [model for model in store.entries() if _IS_COPY.search(model["name"]) and model.get("source") != source]
    taken, size = sum(model["bytes"] for model in others), sum(map(os.path.getsize, store.model_files(source)))
    if taken + size > most:
        raise ZSEError(
            f"copies take {taken >> 20} of {most >> 20} MiB, it would take {size >> 20}; --cache-converted makes it"
        )
    os.makedirs(store.home(), exist_ok=True)
    free = shutil.disk_usage(store.home()).free
    if free - size < LEFT_BYTES:
        raise ZSEError(f"{free >> 20} MiB of the disk are free, it would take {size >> 20}")


def _prefix(path: str, quantize: str | None, family: str) -> str:
    base = re.sub(r"[^A-Za-z0-9._]+|-+", "-", os.path.basename(path))[:60].strip("._-") or "model"
    return f"{base}-for-{family}-{quantize or 'stored'}-"
