"""The C pool under ThreadSanitizer, and as it is built, with more threads than cores."""

import subprocess
from pathlib import Path

import pytest

from zse import build

HERE = Path(__file__).parent
CSRC = Path(build.__file__).parent / "runtime" / "csrc"


def compiled(folder: Path, *flags: str) -> Path:
    program = folder / "stress"
    compiler, _ = build.find_compiler()
    done = subprocess.run(
        [
            compiler,
            "-std=gnu11",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
            *flags,
            f"-I{CSRC}",
            str(HERE / "stress.c"),
            str(CSRC / "pool.c"),
            "-o",
            str(program),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode and "sanitize" in "".join(flags) and ("tsan" in done.stderr or "sanitize" in done.stderr):
        pytest.skip(f"this compiler has no ThreadSanitizer: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("threads", [2, 4])
def test_no_data_race(tmp_path, threads):
    program = compiled(tmp_path, "-O1", "-fsanitize=thread")
    done = subprocess.run([str(program), str(threads), "400"], capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run under this kernel's address layout")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[:4000]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_numbers_are_right(tmp_path, threads):
    program = compiled(tmp_path, "-O2")
    done = subprocess.run([str(program), str(threads), "3000"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
