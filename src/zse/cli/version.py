"""zse version: this program and what it was built with."""

import os
import sys

import zse
from zse.cli.parser import FLAG, JSON, option
from zse.lazy import json, platform
from zse.runtime import isa, native

ARGUMENTS = (JSON, option("--short", FLAG, "only the version number"))


def run(args) -> int:
    if args.short:
        print(f"zse {zse.__version__}")
        return 0
    facts = _facts()
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    for key, value in facts.items():
        if key == "kernel_libraries":
            for record in value:
                print(f"{'kernels':<12}{', '.join(str(item) for item in record.values() if item)}")
        else:
            print(f"{key:<12}{value}")
    return 0


def _facts() -> dict:
    return {
        "zse": zse.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "package": os.path.dirname(os.path.abspath(zse.__file__)),
        "executable": sys.executable,
        "kernel_libraries": _libraries(),
    }


def _libraries() -> list[dict]:
    """Each compiled kernel library: its ISA level, size, number of kernels, and the compiler where its manifest tells
    it."""
    found = []
    for level in isa.LEVELS:
        path = native.kernel_library(level)
        if not os.path.exists(path):
            continue
        try:
            with open(native.manifest_path(level), encoding="utf-8") as file:
                manifest = json.load(file)
            kernels, compiler = f"{len(manifest['kernels'])} kernels", manifest.get("compiler")
        except (OSError, ValueError, KeyError, TypeError) as error:
            kernels, compiler = f"manifest not readable: {error}", None
        found.append(
            {"level": level, "size": f"{os.path.getsize(path) / 1e6:.1f} MB", "kernels": kernels, "compiler": compiler}
        )
    return found
