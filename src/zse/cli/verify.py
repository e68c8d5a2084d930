"""zse verify: read a whole model and say whether it is sound."""

import os

from zse.cli.parser import FLAG, MODEL_FILE, option
from zse.cli.terminal import ProgressBar, size
from zse.errors import FormatError
from zse.formats import download, store
from zse.formats.verify import verify

ARGUMENTS = (
    MODEL_FILE,
    option("--fast", FLAG, "do not look for NaN and infinities in the weights"),
    option("-q --quiet", FLAG, "no progress, no report; only the exit code and the error"),
)


def run(args) -> int:
    path = store.resolve(args.model)
    with ProgressBar("verify") as bar:
        checks = _check_hashes(args.model, None if args.quiet else bar)
        progress = None if args.quiet else lambda done, total, name: bar("reading", done, total)
        report = verify(path, progress, numbers=not args.fast)
    if not args.quiet:
        for line in (*checks, *report.checks):
            print(f"ok  {line}")
        print(f"{report.path}: sound, {report.num_tensors} tensors, {size(report.nbytes)}")
    return 0


def _check_hashes(name: str, progress) -> list[str]:
    """Compare a stored model with the SHA-256 of when it was fetched. FormatError for a difference."""
    model = None if store.is_path(name) else store.describe(name)
    if model is None or not model["files"]:
        return []
    folder = os.path.join(store.models_dir(), store.folder_name(name) or "")
    total, base = sum(record["size"] for record in model["files"]), 0
    for record in model["files"]:
        path = os.path.join(folder, record["name"])

        def report(done: int, base: int = base) -> None:
            if progress:
                progress("hashing", base + done, total)

        if not os.path.isfile(path):
            raise FormatError(path, 0, "file", f"is missing; fetch it anew: zse pull --force {name}")
        if os.path.getsize(path) != record["size"] or download.sha256_file(path, report) != record["sha256"]:
            raise FormatError(
                path, 0, "SHA-256", f"differs from the file that was fetched; fetch it anew: zse pull --force {name}"
            )
        base += record["size"]
    return [f"SHA-256: {len(model['files'])} files as they were fetched"]
