"""The loader and launch lists in C under the sanitizers, with a driver that copies at once (gpu_stress.c)."""

import random
import subprocess
from pathlib import Path

import pytest

from zse import build

HERE = Path(__file__).parent
CSRC = Path(build.__file__).parent / "runtime" / "csrc"


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_race_and_no_stray_access(tmp_path, sanitizer):
    program, file = tmp_path / "stress", tmp_path / "file"
    file.write_bytes(random.Random(3).randbytes(700_001))
    compiler, _ = build.find_compiler()
    done = subprocess.run(
        [
            compiler,
            "-std=gnu11",
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
            f"-fsanitize={sanitizer}",
            f"-I{CSRC}",
            str(HERE / "gpu_stress.c"),
            str(CSRC / "load.c"),
            str(CSRC / "load_map.c"),
            str(CSRC / "load_step.c"),
            str(CSRC / "checksum.c"),
            str(CSRC / "gpu_launch.c"),
            "-o",
            str(program),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode and ("san" in done.stderr and "cannot find" in done.stderr):
        pytest.skip(f"this compiler lacks a sanitizer: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(program), str(file), "60"], capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run under this kernel's address layout")
    assert done.returncode == 0 and not done.stderr, done.stderr[:4000]
