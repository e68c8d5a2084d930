"""Facts about this process and machine that every figure needs beside it."""

import os
import resource
import socket
import subprocess
import sys
import time

import zse
from zse.lazy import platform
from zse.runtime import probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_bytes(device: "Any") -> dict[str, int]:
    """What this process takes now, as it goes beside a figure: its largest resident size; on a GPU what the engine has
    allocated there, and what is taken of the GPU in all, contexts and other processes included."""
    found = {"peak_memory_bytes": peak_memory_bytes()}
    if not device.shares_memory:
        found["gpu_allocated_bytes"] = sum(device.memory().values())
        found["gpu_taken_bytes"] = device.memory_total - device.memory_free
    return found


def machine() -> dict:
    """The machine and the versions, as they go beside a measured number."""
    return {
        "zse": zse.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": probe.cpu_model(),
        "logical_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def stop(process: "subprocess.Popen", seconds: float) -> None:
    """Ask a process to end; kill it if it has not ended after so many seconds."""
    process.terminate()
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
