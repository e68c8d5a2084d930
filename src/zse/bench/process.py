"""Facts about this process and machine that every figure needs beside it."""

import os
import time


def since_exec_ms(clock: float | None = None) -> float | None:
    """Milliseconds from this process's exec to `clock` (a perf_counter value; default now). None where /proc is missing.

    The kernel keeps the start in ticks of 10 ms, so this is at most 10 ms too large.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 1000 * (age - (time.perf_counter() - clock if clock is not None else 0.0))


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far, mapped files included."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine() -> dict:
    """The machine and the versions, as they go beside a measured number."""
    import platform

    import zse

    return {
        "zse": zse.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model() or platform.machine(),
        "logical_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cpu_model() -> str | None:
    """The CPU's name from /proc/cpuinfo; None where it is not told."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), None)
    except OSError:
        return None
