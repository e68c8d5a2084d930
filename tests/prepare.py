"""Makes, once and with all cores, what several processes of tests need: `python tests/prepare.py [--rest]`.

The package's own kernels come with `python -m zse.build`. --rest: the kernels of this machine's lower CPU levels as well, which
`make test` does not run, and those of arm64 where there is a cross compiler."""

import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
MANY = 50  # modules of tests


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs and clones, by content: ZSE_TEST_CACHE, or zse-tests in the user's
    cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("ZSE_TEST_CACHE") or os.path.join(home, "zse-tests"))


def rewriting() -> list[subprocess.Popen]:
    """pytest collects all tests, a share on each core, so that their modules are kept as it rewrites them: 18 s of a core, which in
    a fresh clone each process of tests took. Nothing where most are there."""
    modules = sorted(path for path in TESTS.rglob("test_*.py") if path.parent.name != "gpu")
    kept = {path.name.partition(".")[0] for path in TESTS.rglob("*-pytest-*.pyc")}
    if sum(path.stem not in kept for path in modules) < MANY:
        return []
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    writes = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    cores, silent = min(os.cpu_count() or 1, 4), subprocess.DEVNULL
    return [
        subprocess.Popen([*command, *modules[core::cores]], cwd=TESTS.parent, env=writes, stdout=silent, stderr=silent)
        for core in range(cores)
    ]


def main(arguments: list[str]) -> None:
    os.environ["ZSE_HOME"] = str(cache_folder())
    from kernel.compiled import host_isas

    from zse.build import build
    from zse_emulator import device

    started, collecting = time.perf_counter(), rewriting()
    device.core()
    print(f"the emulated GPU: compiled or found in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    for each in collecting:
        each.wait()  # what is wrong with a module its tests say
    if collecting:
        print(f"the tests: rewritten in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if "--rest" in arguments:
        build(isas=host_isas())
        from kernels import arm64

        if arm64.has_tools():
            arm64.build_level()


if __name__ == "__main__":
    main(sys.argv[1:])
