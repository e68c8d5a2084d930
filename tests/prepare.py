"""Compiles, once and with all cores, what several processes of tests need: `python tests/prepare.py [--rest]`.

The package's own kernels come with `python -m zse.build`. --rest: the kernels of this machine's lower CPU levels as well, which
`make test` does not run, and those of arm64 where there is a cross compiler."""

import os
import sys
import time
from pathlib import Path


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs and clones, by content: ZSE_TEST_CACHE, or zse-tests in the user's
    cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("ZSE_TEST_CACHE") or os.path.join(home, "zse-tests"))


def main(arguments: list[str]) -> None:
    os.environ["ZSE_HOME"] = str(cache_folder())
    from kernel.compiled import host_isas

    from zse.build import build
    from zse_emulator import device

    started = time.perf_counter()
    device.core()
    print(f"the emulated GPU: compiled or found in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if "--rest" in arguments:
        build(isas=host_isas())
        from kernels import arm64

        if arm64.has_tools():
            arm64.build_level()


if __name__ == "__main__":
    main(sys.argv[1:])
