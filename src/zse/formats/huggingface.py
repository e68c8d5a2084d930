"""`zse pull hf:ORG/NAME[@REV][:FILE]`: the data files of a Hugging Face repository, by huggingface_hub.

huggingface_hub's own settings apply (HF_ENDPOINT, HF_TOKEN, proxies). Files land in the partial folder, where an interrupted
download continues from its last byte. LFS files are checked against the SHA-256 that the hub publishes, the others against
their git object id.
"""

import json
import os
from pathlib import Path

from zse.errors import FormatError, ModelNotFoundError, UnsupportedError, ZSEError
from zse.formats import hub, store

_SIDE_FILES = frozenset(
    "config.json generation_config.json model.safetensors.index.json tokenizer.json tokenizer_config.json tokenizer.model "
    "special_tokens_map.json added_tokens.json vocab.json merges.txt chat_template.jinja chat_template.json "
    "LICENSE LICENSE.txt LICENSE.md NOTICE NOTICE.txt NOTICE.md USE_POLICY.md README.md".split()
)
_CODE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".py")
_CONFIG_LIMIT_BYTES = 1 << 20


def parse(name: str) -> tuple[str, str | None, str | None]:
    """hf:ORG/NAME[@REV][:FILE] → repository, revision, file. The text has passed store.folder_name()."""
    repo, _, file = name[3:].partition(":")
    repo, _, revision = repo.partition("@")
    return repo, revision or None, file or None


def select(repo: str, names: list[str], file: str | None) -> list[str]:
    """The files to fetch: safetensors with their side files, or one GGUF. Only plain names at the top of the repository.

    file: a GGUF's exact name, or a part of it that fits only one (Q4_K_M).
    Errors: ZSEError when the repository holds only pickles or code, nothing usable, or several GGUF files and no choice.
    """
    names = sorted(name for name in names if "/" not in name and "\\" not in name and not name.startswith("."))
    ggufs = [name for name in names if name.endswith(".gguf")]
    licences = [name for name in names if name in _SIDE_FILES and name.startswith(("LICENSE", "NOTICE", "USE_POLICY", "README"))]
    weights = [name for name in names if name.endswith(".safetensors")]
    weights = [name for name in weights if name.startswith("model")] or weights
    if file is not None:
        matching = [name for name in ggufs if name == file] or [name for name in ggufs if file.lower() in name.lower()]
        if len(matching) != 1:
            raise ModelNotFoundError(f"hf:{repo}: {file!r} fits {len(matching)} files; the repository has: {', '.join(ggufs) or 'no GGUF'}")
        return [_whole(matching[0]), *licences]
    if weights:
        if "config.json" not in names:
            raise ZSEError(f"hf:{repo}: has safetensors but no config.json, so its architecture is unknown")
        return [name for name in names if name in _SIDE_FILES] + weights
    if len(ggufs) == 1:
        return [_whole(ggufs[0]), *licences]
    if ggufs:
        raise ZSEError(f"hf:{repo}: has several GGUF files; name one: hf:{repo}:FILE with FILE one of {', '.join(ggufs)}")
    code = [name for name in names if name.endswith(_CODE_SUFFIXES)]
    if code:
        raise ZSEError(
            f"hf:{repo}: refused: {', '.join(code[:4])} can run code when loaded; only .safetensors and .gguf weights are served"
        )
    raise UnsupportedError(f"hf:{repo}: the kind of weights", ", ".join(names[:8]) or "an empty repository", (".safetensors", ".gguf"))


def _whole(name: str) -> str:
    if "-00001-of-" in name or "-of-0" in name:
        raise UnsupportedError("split GGUF file", name, ("a GGUF in one file", "safetensors"))
    return name


def pull(name: str, stage: store.Staging, progress: hub.Progress, notice: hub.Notice) -> Path:
    """Fetch into `stage` and commit. Errors: ZSEError in one line for everything that the hub or the network can do."""
    try:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        import httpx
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ZSEError(f"pulling from Hugging Face needs the package {error.name}; install it with: pip install 'zse[hub]'") from None
    repo, revision, file = parse(name)
    try:
        return _pull(huggingface_hub, name, repo, revision, file, stage, progress, notice)
    except errors.GatedRepoError:
        raise ZSEError(f"hf:{repo}: the owner asks for a login and accepted terms; do that on its page, then set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFoundError(f"hf:{repo}: no such repository (or it is private: set HF_TOKEN)") from None
    except errors.RevisionNotFoundError:
        raise ModelNotFoundError(f"hf:{repo}: no revision {revision!r}") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx.HTTPError, ConnectionError, TimeoutError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ZSEError(f"hf:{repo}: the download failed: {line}; run the same command again to resume") from None


def _pull(hf, name, repo, revision, file, stage, progress, notice) -> Path:
    info = hf.HfApi().model_info(repo, revision=revision, files_metadata=True)
    records = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    chosen = select(repo, list(records), file)
    left_out = [other for other in records if other.endswith(_CODE_SUFFIXES)]
    if left_out:
        notice(f"left out, because loading them could run code: {', '.join(sorted(left_out)[:6])}")
    chosen.sort(key=lambda filename: (filename != "config.json", records[filename].size or 0))  # a refusal comes before the weights
    total = sum(records[filename].size or 0 for filename in chosen)
    have = min(store.tree_bytes(stage.path), total)
    store.check_space(total - have + (16 << 20))
    if have > 1 << 20:
        notice(f"resuming: {have / 2**20:.0f} of {total / 2**20:.0f} MiB are already there")
    with hub.watch_folder(stage.path, "downloading", 0, total, progress):
        for filename in chosen:
            hf.hf_hub_download(repo, filename, revision=info.sha, local_dir=stage.path)
            if filename == "config.json":
                _refuse_code(repo, os.path.join(stage.path, filename))
    files, checked = [], 0
    for filename in chosen:
        path = os.path.join(stage.path, filename)
        files.append(_check(repo, path, records[filename], lambda done, base=checked: progress("checking", base + done, total)))
        checked += files[-1]["size"]
    licence = getattr(info.card_data, "license", None) if info.card_data else None
    facts = {"licence": licence, "source": f"Hugging Face {repo} at {info.sha}", "revision": info.sha}
    return stage.commit(files, **facts)


def _refuse_code(repo: str, path: str) -> None:
    with open(path, "rb") as file:
        text = file.read(_CONFIG_LIMIT_BYTES + 1)
    try:
        config = json.loads(text) if len(text) <= _CONFIG_LIMIT_BYTES else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise FormatError(path, 0, "config.json", "not a JSON object of at most 1 MiB")
    if "auto_map" in config:
        raise ZSEError(f"hf:{repo}: refused: its config.json asks to run the repository's own Python code (auto_map)")


def _check(repo: str, path: str, record, progress) -> dict:
    """The manifest record of a downloaded file; ZSEError and the file deleted when size or hash are not the hub's."""
    import hashlib

    size, filename = os.path.getsize(path), record.rfilename
    sha256 = hub.sha256_file(path, progress)
    expected, got = record.size, size
    if size == record.size and record.lfs is not None:
        expected, got = record.lfs.sha256, sha256
    elif size == record.size and record.blob_id:
        with open(path, "rb") as file:
            # git's object id; the files that are not in LFS are small texts.
            got = hashlib.sha1(b"blob %d\0" % size + file.read(), usedforsecurity=False).hexdigest()
        expected = record.blob_id
    if got != expected:
        os.unlink(path)
        raise ZSEError(f"hf:{repo}: {filename} is damaged ({got} instead of {expected}); it was deleted, pull again to fetch it anew")
    return {"name": filename, "size": size, "sha256": sha256}
