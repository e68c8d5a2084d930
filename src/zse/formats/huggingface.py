"""`zse pull hf:ORG/NAME[@REV][:FILE]`: the data files of a Hugging Face repository, by huggingface_hub.

huggingface_hub's own settings apply (HF_ENDPOINT, HF_TOKEN, proxies). Files land in the partial folder, where an
interrupted download continues from its last byte. LFS files are checked against the SHA-256 that the hub publishes, the
others against their git object id.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

from zse.errors import ModelNotFoundError, UnsupportedError, ZSEError
from zse.formats import store
from zse.formats.download import Notice, Progress, sha256_file
from zse.formats.file import parse_object, read_whole
from zse.lazy import hub_errors, hub_utils, huggingface_hub

_LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md", "USE_POLICY.md", "README.md")
_SIDE_FILES = (
    *"config.json generation_config.json model.safetensors.index.json tokenizer.json tokenizer_config.json".split(),
    *"tokenizer.model special_tokens_map.json added_tokens.json vocab.json merges.txt".split(),
    *"chat_template.jinja chat_template.json".split(),
    *_LICENCES,
)
_CODE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".py")
_CONFIG_LIMIT_BYTES = 1 << 20
_TIMEOUT_SECONDS = 30
_MAX_FAILURES = 4  # in a row, without one byte arriving


def parse(name: str) -> tuple[str, str | None, str | None]:
    """hf:ORG/NAME[@REV][:FILE] → repository, revision, file. The text has passed store.folder_name()."""
    repo, _, file = name[3:].partition(":")
    repo, _, revision = repo.partition("@")
    return repo, revision or None, file or None


def select(repo: str, names: list[str], file: str | None) -> list[str]:
    """The files to fetch: safetensors with their side files, or one GGUF. Only plain names at the top of the
    repository.

    file: a GGUF's exact name, or a part of it that fits only one (Q4_K_M). Errors: ZSEError when the repository holds
    only pickles or code, nothing usable, or several GGUF files and no choice.
    """
    names = sorted(name for name in names if "/" not in name and "\\" not in name and not name.startswith("."))
    ggufs = [name for name in names if name.endswith(".gguf")]
    licences = [name for name in names if name in _LICENCES]
    weights = [name for name in names if name.endswith(".safetensors")]
    weights = [name for name in weights if name.startswith("model")] or weights
    if file is not None:
        ends = (f"-{file}.gguf".lower(), f".{file}.gguf".lower())  # Q6_K is not Q6_K_L
        matching = (
            [name for name in ggufs if name == file]
            or [name for name in ggufs if name.lower().endswith(ends) and "-UD-" not in name]
            or [name for name in ggufs if file.lower() in name.lower()]
        )
        if len(matching) != 1:
            raise ModelNotFoundError(
                f"hf:{repo}: {file!r} fits {len(matching)} files; the repository has: {', '.join(ggufs) or 'no GGUF'}"
            )
        return [_whole(matching[0]), *licences]
    if weights:
        if "config.json" not in names:
            raise ZSEError(f"hf:{repo}: has safetensors but no config.json, so its architecture is unknown")
        return [name for name in names if name in _SIDE_FILES] + weights
    if len(ggufs) == 1:
        return [_whole(ggufs[0]), *licences]
    if ggufs:
        raise ZSEError(
            f"hf:{repo}: has several GGUF files; name one: hf:{repo}:FILE with FILE one of {', '.join(ggufs)}"
        )
    code = [name for name in names if name.endswith(_CODE_SUFFIXES)]
    if code:
        raise ZSEError(
            f"hf:{repo}: refused: {', '.join(code[:4])} can run code when loaded; only .safetensors and .gguf "
            "weights are served"
        )
    raise UnsupportedError(
        f"hf:{repo}: the kind of weights", ", ".join(names[:8]) or "an empty repository", (".safetensors", ".gguf")
    )


def _whole(name: str) -> str:
    if "-00001-of-" in name or "-of-0" in name:
        raise UnsupportedError("split GGUF file", name, ("a GGUF in one file", "safetensors"))
    return name


def pull(name: str, stage: store.PartialFolder, progress: Progress, notice: Notice, licence: str | None = None) -> Path:
    """Fetch into `stage` and commit. licence: where the repository's card names none. Errors: ZSEError in one line for
    everything that the hub or the network can do."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        session = hub_utils.get_session()
    except ImportError as error:
        raise ZSEError(
            f"pulling from Hugging Face needs the package {error.name}; run: pip install huggingface_hub"
        ) from None
    repo, revision, file = parse(name)
    # huggingface_hub's HTTP client is httpx or its successor, depending on its version: take the errors of the one in
    # use.
    http_error = sys.modules[type(session).__module__.partition(".")[0]].HTTPError
    try:
        return _pull(session, http_error, repo, revision, file, stage, progress, notice, licence)
    except hub_errors.GatedRepoError:
        raise ZSEError(
            f"hf:{repo}: the owner asks for a login and accepted terms; do that on its page, then set HF_TOKEN"
        ) from None
    except hub_errors.RepositoryNotFoundError:
        raise ModelNotFoundError(f"hf:{repo}: no such repository (or it is private: set HF_TOKEN)") from None
    except hub_errors.RevisionNotFoundError:
        raise ModelNotFoundError(f"hf:{repo}: no revision {revision!r}") from None
    except (hub_errors.HfHubHTTPError, http_error, ConnectionError, TimeoutError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ZSEError(
            f"hf:{repo}: the download failed: {line}; check the network and its proxy (HTTPS_PROXY, HF_ENDPOINT), then run "
            "the same command again to resume"
        ) from None
    except ValueError:  # of a JSON parser, or ours for a page in the place of a file
        raise ZSEError(
            f"hf:{repo}: what answers is not a Hugging Face hub but a web page, of a proxy or a login: check HTTPS_PROXY and "
            "HF_ENDPOINT, then run the same command again"
        ) from None


def _pull(session, http_error, repo, revision, file, stage, progress, notice, licence) -> Path:
    info = huggingface_hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
    records = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    chosen = select(repo, list(records), file)
    sizes = {filename: records[filename].size or 0 for filename in chosen}
    if any(records[filename].size is None for filename in chosen) or info.sha is None:
        raise ZSEError(f"hf:{repo}: the hub does not give the files' sizes and commit, so they cannot be checked")
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

        path = os.path.join(stage.path, filename)
        if not os.path.isfile(path) or os.path.getsize(path) != sizes[filename]:
            _download(session, http_error, repo, info.sha, records[filename], path, report)
        files.append(_check(repo, path, records[filename], report))
        if filename == "config.json":
            _refuse_code(repo, path)
        base += files[-1]["size"]
    said = getattr(info.card_data, "license", None) if info.card_data else None
    return stage.commit(files, licence=said or licence, source=f"Hugging Face {repo} at {info.sha}", revision=info.sha)


def _download(session, http_error, repo: str, commit: str, record, path: str, report) -> None:
    """Fetch one file into `path`, continuing what an earlier try left in `path`.HASH.download.

    huggingface_hub's own download starts again from zero in a new process (it names its partial files at random), so
    the bytes are fetched here, with its session, headers and error mapping. A commit's files never change, so a range
    fits.
    """
    content_id = record.lfs.sha256 if record.lfs else record.blob_id or commit
    partial = f"{path}.{content_id[:16]}.download"
    url = huggingface_hub.hf_hub_url(repo, record.rfilename, revision=commit)
    what, failures = f"hf:{repo}: {record.rfilename}", 0
    with open(partial, "ab") as out:
        if out.tell() > record.size:
            out.truncate(0)
        while (start := os.fstat(out.fileno()).st_size) < record.size:
            # Compressed transfer would make the byte positions meaningless.
            headers = {**hub_utils.build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={start}-"}
            try:
                options = {"headers": headers, "timeout": _TIMEOUT_SECONDS, "follow_redirects": True}
                with session.stream("GET", url, **options) as response:
                    hub_utils.hf_raise_for_status(response)
                    if response.headers.get("Content-Type", "").startswith("text/html"):
                        raise ValueError("a web page")
                    if start and response.status_code != 206:
                        out.truncate(0)
                    done = begun = os.fstat(out.fileno()).st_size
                    for block in response.iter_raw(1 << 18):
                        done += len(block)
                        if done > record.size:
                            raise ZSEError(f"{what}: the server sends more than the {record.size} bytes announced")
                        out.write(block)
                        failures = 0
                        report("downloading", done)
                out.flush()
                if done == begun or (response.status_code == 200 and done < record.size):
                    raise ZSEError(
                        f"{what}: the server sends {done} of {record.size} bytes and no more; try again later"
                    )
            except http_error as error:
                out.flush()
                failures += 1
                # 4xx is the hub's answer, which asking again does not change.
                if failures == _MAX_FAILURES or getattr(getattr(error, "response", None), "status_code", 500) < 500:
                    raise
                time.sleep(failures)
    os.rename(partial, path)


def _refuse_code(repo: str, path: str) -> None:
    if "auto_map" in parse_object(read_whole(path, "config.json", _CONFIG_LIMIT_BYTES), path, 0, "config.json"):
        raise ZSEError(f"hf:{repo}: refused: its config.json asks to run the repository's own Python code (auto_map)")


def _check(repo: str, path: str, record, report) -> dict:
    """The manifest record of a downloaded file; ZSEError and the file deleted when size or hash are not the hub's."""
    size, filename = os.path.getsize(path), record.rfilename
    sha256 = sha256_file(path, lambda done: report("checking", done))
    expected: object = record.size
    got: object = size
    if size == record.size and record.lfs is not None:
        expected, got = record.lfs.sha256, sha256
    elif size == record.size and record.blob_id:
        with open(path, "rb") as file:
            # git's object id; the files that are not in LFS are small texts.
            got = hashlib.sha1(b"blob %d\0" % size + file.read(), usedforsecurity=False).hexdigest()
        expected = record.blob_id
    if got != expected:
        os.unlink(path)
        wrong = f"{filename} is damaged ({got} instead of {expected})"
        raise ZSEError(f"hf:{repo}: {wrong}; it was deleted, pull again to fetch it anew")
    return {"name": filename, "size": size, "sha256": sha256}
