"""From exec to the first token: `zse run` in a fresh process, watched from outside."""

import os
import statistics
import subprocess
import sys
from time import perf_counter

from zse.errors import EngineError


def startup(model: str, repeats: int, options: list[str]) -> dict:
    """Milliseconds from starting `zse run` to the first byte of its reply and to its end. The first start is not
    counted: it brings the model's file into the page cache."""
    first_ms, end_ms = [], []
    for repeat in range(repeats + 1):
        first, end = _once(
            [sys.executable, "-m", "zse", "run", model, "Hello", "--max-tokens", "4", "--temperature", "0", *options]
        )
        if repeat:
            first_ms.append(first)
            end_ms.append(end)
    return {
        "exec_to_first_token_ms": statistics.median(first_ms),
        "exec_to_exit_ms": statistics.median(end_ms),
        "runs": first_ms,
    }


def _once(command: list[str]) -> tuple[float, float]:
    start = perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    byte = os.read(process.stdout.fileno(), 1)
    first = 1000 * (perf_counter() - start)
    _, stderr = process.communicate()
    if process.returncode or not byte:
        lines = stderr.decode(errors="replace").strip().splitlines() or ["no reply"]
        raise EngineError(
            f"zse run failed with exit code {process.returncode}: {lines[-1].removeprefix('zse: error: ')}"
        )
    return first, 1000 * (perf_counter() - start)
