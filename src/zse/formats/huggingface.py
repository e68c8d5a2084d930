"""`zse pull hf:ORG/NAME[@REV][:FILE]`: the data files of a Hugging Face repository.

huggingface_hub's settings apply (HF_ENDPOINT, HF_TOKEN, proxies; zse.formats.hub_client). Files land in the partial
folder, where an interrupted download continues from its last byte. LFS files are checked against the SHA-256 that the
hub publishes, the others against their git object id; a file for which it publishes neither is refused."""

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zse.errors import ModelNotFoundError, UnsupportedError, ZSEError
from zse.formats import hub_client, store
from zse.formats.download import Notice, Progress, sha256_file
from zse.formats.file import parse_object, read_whole

_LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md", "USE_POLICY.md", "README.md")
_SIDE_FILES = (
    *"config.json generation_config.json model.safetensors.index.json tokenizer.json tokenizer_config.json".split(),
    *"tokenizer.model special_tokens_map.json added_tokens.json vocab.json merges.txt".split(),
    *"chat_template.jinja chat_template.json vocab.txt modules.json".split(),
    *"preprocessor_config.json processor_config.json".split(),
    *"sentence_bert_config.json config_sentence_transformers.json".split(),
    *_LICENCES,
)
# `gguf-split`'s names of parts; what other programs need beside a model, as those who publish quantizations call it.
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_COMPANION = re.compile(r"(?:^|/)mmproj|imatrix|(?:^|[-./])mtp(?:[-./]|$)|assistant", re.IGNORECASE)
# What an embedding model's vectors are made of its hidden states by; in the store it has its folder in its name.
_MODULES = re.compile(r"\d+_(Pooling/config\.json|Dense/(config\.json|model\.safetensors))")
_CODE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".py")
_CONFIG_LIMIT_BYTES = 1 << 20
_MAX_FAILURES = 4  # in a row, without one byte arriving


Check = Callable[
    [str, dict], object
]  # of where a config.json is from, and the config: raises for one that is not served


def parse(name: str) -> tuple[str, str | None, str | None]:
    """hf:ORG/NAME[@REV][:FILE] → repository, revision, file. The text has passed store.folder_name()."""
    repo, _, file = name[3:].partition(":")
    repo, _, revision = repo.partition("@")
    return repo, revision or None, file or None


def ggufs_of(names: list[str], file: str | None = None) -> dict[str, list[str]]:
    """The models among a repository's GGUF files, its folders included: name, without what numbers a part → its files
    in their order. What goes with a model (projectors of images, importance matrices, drafters) is left out where there
    are others; projectors are not where `file`, what is asked for, is one."""
    models: dict[str, list[str]] = {}
    for name in sorted(name for name in names if name.endswith(".gguf")):
        models.setdefault(_PART.sub(".gguf", name), []).append(name)
    if file is not None and "mmproj" in file.lower():
        return {name: files for name, files in models.items() if "mmproj" in name.lower()}
    return {name: files for name, files in models.items() if not _COMPANION.search(name)} or models


def _choose(repo: str, models: dict[str, list[str]], file: str | None) -> list[str]:
    """The files of one of the models."""
    known = ", ".join(models) or "no GGUF"
    if file is None:
        if len(models) > 1:
            raise ZSEError(f"hf:{repo}: has several GGUF files; name one: hf:{repo}:FILE with FILE one of {known}")
        matching = list(models)
    else:
        tag = file.lower()
        ends = (f"-{tag}.gguf", f".{tag}.gguf", f"/{tag}.gguf")  # Q6_K is not Q6_K_L
        matching = (
            [name for name, files in models.items() if file == name or file in files]
            or [name for name in models if f"/{name}".lower().endswith(ends) and "-UD-" not in os.path.basename(name)]
            or [name for name in models if f"/{name}".lower().endswith(ends)]
            or [name for name in models if tag in name.lower()]
        )
        if len(matching) != 1:
            raise ModelNotFoundError(f"hf:{repo}: {file!r} fits {len(matching)} files; the repository has: {known}")
    files = models[matching[0]]
    if part := _PART.search(files[0]):
        stem, count = files[0][: part.start()], int(part[2])
        if files != [f"{stem}-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]:
            raise ZSEError(f"hf:{repo}: {matching[0]} has {count} parts, and these are there: {', '.join(files)}")
    return files


def select(repo: str, names: list[str], file: str | None) -> list[str]:
    """The files to fetch: safetensors at the top of the repository with their side files, or one GGUF with all its
    parts.

    file: a GGUF's exact name, the end of one (Q4_K_M), or a part of one that fits only one. Errors: ZSEError when the
    repository holds only pickles or code, nothing usable, several GGUF files and no choice, or not all parts of one.
    """
    names = [name for name in names if "\\" not in name and not any(part[:1] in ("", ".") for part in name.split("/"))]
    ggufs = ggufs_of(names, file)
    modules = [name for name in names if _MODULES.fullmatch(name)]
    names = sorted(name for name in names if "/" not in name)
    licences = [name for name in names if name in _LICENCES]
    weights = [name for name in names if name.endswith(".safetensors")]
    weights = [name for name in weights if name.startswith("model")] or weights
    if file is not None:
        return [*_choose(repo, ggufs, file), *licences]
    if weights:
        if "config.json" not in names:
            raise ZSEError(f"hf:{repo}: has safetensors but no config.json, so its architecture is unknown")
        return [name for name in names if name in _SIDE_FILES] + modules + weights
    if ggufs:
        return [*_choose(repo, ggufs, None), *licences]
    code = [name for name in names if name.endswith(_CODE_SUFFIXES)]
    if code:
        raise ZSEError(
            f"hf:{repo}: refused: {', '.join(code[:4])} can run code when loaded; only .safetensors and .gguf "
            "weights are served"
        )
    raise UnsupportedError(
        f"hf:{repo}: the kind of weights", ", ".join(names[:8]) or "an empty repository", (".safetensors", ".gguf")
    )


def pull(
    name: str,
    stage: store.PartialFolder,
    progress: Progress,
    notice: Notice,
    licence: str | None = None,
    check: Check | None = None,
) -> Path:
    """Fetch into `stage` and commit; files of folders come to lie beside one another. licence: where the repository's
    card names none. check: of config.json, before weights are fetched. Errors: ZSEError in one line for everything that
    the hub or the network can do."""
    repo, revision, file = parse(name)
    try:
        return _pull(repo, revision, file, stage, progress, notice, licence, check)
    except hub_client.HubError as error:
        raise _explained(error, repo, revision) from None
    except ValueError:  # of a JSON parser, or ours for a page in the place of a file
        raise ZSEError(
            f"hf:{repo}: what answers is not a Hugging Face hub but a web page, of a proxy or a login: check HTTPS_PROXY and "
            "HF_ENDPOINT, then run the same command again"
        ) from None


def _explained(error: "hub_client.HubError", repo: str, revision: str | None) -> ZSEError:
    """What a user can do about it."""
    if error.code == "GatedRepo":
        return ZSEError(
            f"hf:{repo}: the owner asks for a login and accepted terms; do that on its page, then set HF_TOKEN"
        )
    if error.code == "RevisionNotFound":
        return ModelNotFoundError(f"hf:{repo}: no revision {revision!r}")
    if error.code == "RepoNotFound" or error.status == 401:
        return ModelNotFoundError(f"hf:{repo}: no such repository (or it is private: set HF_TOKEN)")
    return ZSEError(
        f"hf:{repo}: the download failed: {error}; check the network and its proxy (HTTPS_PROXY, HF_ENDPOINT), then run "
        "the same command again to resume"
    )


def _records(info: dict) -> dict[str, dict]:
    """File → {"size": bytes or None, "sha256": of a file in LFS, "blob": the git object id of another one}; None for a
    hash that the hub does not give. ValueError, or what follows from a field of another kind, for an answer that is no
    hub's."""
    found = {}
    for sibling in info.get("siblings") or ():
        lfs = sibling.get("lfs")
        # In LFS the git object is a pointer: its id says nothing of the weights.
        hashes = {"sha256": lfs.get("sha256") if lfs else None, "blob": None if lfs else sibling.get("blobId")}
        for name, digits in (("sha256", 64), ("blob", 40)):
            value: Any = hashes[name]
            if value is not None and not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
                raise ValueError(f"{name} {value}")
        found[str(sibling["rfilename"])] = {"size": sibling.get("size"), **hashes}
    return found


def _stored_name(filename: str) -> str:
    return filename.replace("/", "_") if _MODULES.fullmatch(filename) else os.path.basename(filename)


def _hash_of(record: dict) -> str:
    return record["sha256"] or record["blob"] or ""


def _pull(repo, revision, file, stage, progress, notice, licence, check) -> Path:
    info = hub_client.model(repo, revision)
    try:
        records, commit, card = _records(info), info.get("sha"), info.get("cardData") or {}
        said = card.get("license")
    except (TypeError, KeyError, AttributeError):
        raise ValueError("not a hub's answer") from None
    chosen = select(repo, list(records), file)
    sizes = {filename: records[filename]["size"] or 0 for filename in chosen}
    unchecked = [name for name in chosen if not isinstance(records[name]["size"], int) or not _hash_of(records[name])]
    if unchecked or not isinstance(commit, str):
        what = f"size and hash of {', '.join(unchecked[:4])}" if unchecked else "commit"
        raise ZSEError(
            f"hf:{repo}: the hub does not give the {what}, so the files cannot be checked; nothing was fetched"
        )
    left_out = sorted(other for other in records if other.endswith(_CODE_SUFFIXES))
    if left_out:
        notice(
            f"left out, because loading them could run code: {', '.join(left_out[:6])}{', …' if left_out[6:] else ''}"
        )
    # The small files first: a refusal comes before the weights.
    chosen.sort(key=lambda filename: (filename != "config.json", sizes[filename]))
    total = sum(sizes.values())
    have = min(store.tree_bytes(stage.path), total)
    store.check_space(total - have + (16 << 20))
    if have > 1 << 20:
        notice(f"resuming: {have / 2**20:.0f} of {total / 2**20:.0f} MiB are already there")
    files, base = [], 0
    for filename in chosen:

        def report(label: str, done: int, base: int = base) -> None:
            progress(label, base + done, total)

        path = os.path.join(stage.path, _stored_name(filename))
        if not os.path.isfile(path) or os.path.getsize(path) != sizes[filename]:
            _download(repo, commit, filename, records[filename], path, report)
        files.append(_check(repo, path, filename, records[filename], report))
        if filename == "config.json" and check is not None:
            check(f"hf:{repo}", parse_object(read_whole(path, filename, _CONFIG_LIMIT_BYTES), path, 0, filename))
        base += files[-1]["size"]
    return stage.commit(files, licence=said or licence, source=f"Hugging Face {repo} at {commit}", revision=commit)


def _download(repo: str, commit: str, filename: str, record: dict, path: str, report) -> None:
    """Fetch one file into `path`, continuing what an earlier try left in `path`.HASH.download: a commit's files never
    change, so a range fits."""
    partial = f"{path}.{_hash_of(record)[:16]}.download"
    what, size, failures = f"hf:{repo}: {filename}", record["size"], 0
    with open(partial, "ab") as out:
        if out.tell() > size:
            out.truncate(0)
        while (start := os.fstat(out.fileno()).st_size) < size:
            try:
                with hub_client.file(repo, commit, filename, start) as answer:
                    if answer.is_page:
                        raise ValueError("a web page")
                    if start and answer.status != 206:
                        out.truncate(0)
                    done = begun = os.fstat(out.fileno()).st_size
                    for block in answer.blocks():
                        done += len(block)
                        if done > size:
                            raise ZSEError(f"{what}: the server sends more than the {size} bytes announced")
                        out.write(block)
                        failures = 0
                        report("downloading", done)
                out.flush()
                if done == begun or (answer.status == 200 and done < size):
                    raise ZSEError(f"{what}: the server sends {done} of {size} bytes and no more; try again later")
            except hub_client.HubError as error:
                out.flush()
                failures += 1
                # 4xx is the hub's answer, which asking again does not change.
                if failures == _MAX_FAILURES or 400 <= error.status < 500:
                    raise
                time.sleep(failures)
    os.rename(partial, path)


def _check(repo: str, path: str, filename: str, record: dict, report) -> dict:
    """The manifest record of a downloaded file; ZSEError and the file deleted when size or hash are not the hub's."""
    size = os.path.getsize(path)
    sha256 = sha256_file(path, lambda done: report("checking", done))
    expected: object = record["size"]
    got: object = size
    if size == expected and record["sha256"]:
        expected, got = record["sha256"], sha256
    elif size == expected:
        with open(path, "rb") as file:
            # git's object id; the files that are not in LFS are small texts.
            got = hashlib.sha1(b"blob %d\0" % size + file.read(), usedforsecurity=False).hexdigest()
        expected = record["blob"]
    if got != expected:
        os.unlink(path)
        wrong = f"{filename} is damaged ({got} instead of {expected})"
        raise ZSEError(f"hf:{repo}: {wrong}; it was deleted, pull again to fetch it anew")
    return {"name": _stored_name(filename), "size": size, "sha256": sha256}
