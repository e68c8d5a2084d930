"""The extra wheel with compiled GPU kernels: `python scripts/make_gpu_wheel.py sm_90a sm_80 --out dist`.

It puts the packs that `zse kernels build` would write beside the package's libraries, where a start finds them: an
installation then needs neither NVRTC nor the minutes of a build. NVRTC is needed here; a GPU is not. A pack belongs to one
version of the kernels' sources, so the wheel asks for exactly the version that it was made from.
"""

import argparse
import base64
import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path

from zse import __version__
from zse.kernel import cache

NAME = "zse_gpu_kernels"
METADATA = f"""Metadata-Version: 2.1
Name: zse-gpu-kernels
Version: {__version__}
Summary: ZSE's GPU kernels, compiled for %s
License: Apache-2.0
Requires-Dist: zse=={__version__}
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: zse\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="+", metavar="ARCH")
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR")
    parser.add_argument("--op", action="append", default=[], metavar="NAME", help="only kernels whose names begin so")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    args = parser.parse_args()
    info = f"{NAME}-{__version__}.dist-info"
    files: dict[str, bytes] = {
        f"{info}/METADATA": (METADATA % ", ".join(args.archs)).encode(),
        f"{info}/WHEEL": WHEEL.encode(),
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, arch in enumerate(args.archs, 1):
            path = Path(folder) / cache.pack_path(arch).name
            done = [0]

            def say(line: str, arch=arch, number=number, done=done) -> None:
                done[0] += 1
                if done[0] % 25 == 0:
                    print(f"{arch} ({number} of {len(args.archs)}): {done[0]} kernels", file=sys.stderr)

            cache.build(arch, path, args.op, jobs=args.jobs, say=say)
            files[f"zse/_native/{path.name}"] = path.read_bytes()
    record = [f"{name},{_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"{NAME}-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)  # of 1980: the same kernels give the same wheel
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            wheel.writestr(entry, data)
    print(target)
    return 0


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main())
