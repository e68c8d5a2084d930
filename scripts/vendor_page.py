"""What the web page takes from others, in src/zse/server/static/vendor: `.venv/bin/python scripts/vendor_page.py`.

The packages of PACKAGES come from npm's registry (`npm pack`), held to their hashes; a file of them is copied with its licence above
it, without the name of its source map, and with its imports as paths, since a page has no other way to find them. The files are
committed: neither a build nor a start fetches anything. tests/server/test_page_files.py holds them to WRITTEN.
"""

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

TARGET = Path(__file__).resolve().parents[1] / "src" / "zse" / "server" / "static" / "vendor"


class Package(NamedTuple):
    """integrity: of the archive, as npm's lock files have it. files: name here → name in the archive."""

    name: str
    version: str
    licence: str
    integrity: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        "MIT",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"preact.js": "dist/preact.mjs", "hooks.js": "hooks/dist/hooks.mjs", "preact.LICENSE": "LICENSE"},
    ),
    Package(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"htm.js": "dist/htm.module.js", "htm.LICENSE": "LICENSE"},
    ),
)
# SHA-256 of what this script writes.
WRITTEN: dict[str, str] = {
    "preact.js": "7db66df09cb76025ddb8d83aa1cc13cf4f1dc1d78846cf37294f4dafacc93fb1",
    "hooks.js": "f6bc23a1f6ff6c48410b1ecc3d5baff815f073d8d355a08cd6b9bb64d4753cf9",
    "preact.LICENSE": "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    "htm.js": "97fb575c2f02c1348288918934fa296931add17ab0619a84d14167f70c05d1fe",
    "htm.LICENSE": "68d1c1e641d96334b549a3b5fb45b579fc613fdb98d2c2b86068d89a20ed2f84",
}


def archive(package: Package, folder: Path) -> Path:
    """The package as npm has it. Raises SystemExit for another content than the table's."""
    name = f"{package.name}@{package.version}"
    subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    path = folder / f"{package.name}-{package.version}.tgz"
    found = "sha512-" + base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    if found != package.integrity:
        raise SystemExit(f"{name} has the hash {found}, expected {package.integrity}")
    return path


def written(package: Package, name: str, text: str) -> str:
    """The content of a file here."""
    if not name.endswith(".js"):
        return text.strip("\n") + "\n"
    code = text.partition("\n//# sourceMappingURL=")[0].strip().replace('from"preact"', 'from"./preact.js"')
    head = f"/* {package.name} {package.version}, {package.licence}: {package.name}.LICENSE */"
    return f"{head}\n{code}\n"


def main() -> int:
    TARGET.mkdir(parents=True, exist_ok=True)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            with tarfile.open(archive(package, Path(folder))) as tar:
                for name, source in package.files.items():
                    member = tar.extractfile(f"package/{source}")
                    assert member is not None, source
                    text = written(package, name, member.read().decode("utf-8"))
                    (TARGET / name).write_text(text, encoding="utf-8")
                    found = hashlib.sha256(text.encode()).hexdigest()
                    if WRITTEN.get(name) != found:
                        wrong.append(f'    "{name}": "{found}",')
    if wrong:
        print("WRITTEN has other hashes; these were written:", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
