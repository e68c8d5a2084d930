"""The C of the parsers under the address and undefined-behaviour sanitizers, on the same mutants (mutator.py).

A variant of `_native`'s hand-written libraries is compiled into a folder of its own and preloaded with the sanitizer's runtime.
ZSE_TEST_MUTANTS: of each format."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src" / "zse"
MUTANTS = int(os.environ.get("ZSE_TEST_MUTANTS", "2000"))
SEED = os.environ.get("ZSE_TEST_SEED", "1")
FLAGS = "-std=gnu11 -O1 -g -fPIC -pthread -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all".split()
LIBRARIES = {"tokenizer": "tokenizer", "formats": "formats", "runtime": "runtime"}


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory) -> dict[str, str]:
    """The environment of a process that uses the sanitized libraries."""
    folder = tmp_path_factory.mktemp("sanitized")
    compiler = os.environ.get("CC", "gcc").split()
    try:
        found = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, timeout=30)
    except OSError:
        pytest.skip("no C compiler")
    runtime = Path(found.stdout.strip())
    if not runtime.is_absolute() or not runtime.exists():
        pytest.skip("this compiler has no libasan")
    for name, part in LIBRARIES.items():
        sources = sorted(map(str, (SOURCE / part / "csrc").glob("*.c")))
        target = str(folder / f"libzse_{name}.so")
        done = subprocess.run(
            [*compiler, *FLAGS, "-shared", *sources, "-o", target, "-lm", "-ldl"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    return os.environ | {
        "ZSE_NATIVE_DIR": str(folder),
        "LD_PRELOAD": str(runtime),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": f"{SOURCE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONMALLOC": "malloc",  # what Python holds is watched too
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", ["vocabulary", "tokenizer.json", "gguf", "zse"])
def test_mutants_touch_no_foreign_memory(format, sanitized, tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "mutator.py", format, str(MUTANTS), SEED, tmp_path],
        capture_output=True,
        text=True,
        env=sanitized,
        timeout=120 + MUTANTS / 4,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failures = [failure for failure in json.loads(done.stdout.splitlines()[-1])["failures"] if "took" not in failure[1]]
    assert not failures, failures[:3]


@pytest.mark.exhaustive
def test_a_stray_read_is_found(sanitized):
    """The sanitizers watch indeed: reading behind a buffer ends the process."""
    code = """
import ctypes
from zse.tokenizer import native
library = native.library()
data = ctypes.cdll.LoadLibrary(None)
data.malloc.restype = ctypes.c_void_p
block = data.malloc(ctypes.c_size_t(8))
out = ctypes.c_void_p()
library.zt_pretokenize(1, ctypes.cast(block, ctypes.c_char_p), 64, ctypes.byref(out), 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=sanitized, timeout=60)
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr, done.stderr[-1500:]
