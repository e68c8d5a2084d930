"""The figures that `zse run --stats` prints: times since exec, speed, memory."""

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
    """Largest resident size of this process so far."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def text(llm, first: float, last: float, num_tokens: int) -> str:
    """first, last: perf_counter at the first and last token. llm.phases_ms: name → milliseconds since exec."""
    lines = [("tokens", str(num_tokens))]
    if num_tokens and (ttft := since_exec_ms(first)) is not None:
        lines.append(("exec to first token", f"{ttft:.0f} ms"))
    if num_tokens > 1 and last > first:
        lines.append(("decode", f"{(num_tokens - 1) / (last - first):.1f} tok/s"))
    lines.append(("peak memory", f"{peak_memory_bytes() / 2**20:.0f} MiB"))
    lines += [(f"  {name}", f"{ms:.0f} ms") for name, ms in llm.phases_ms.items()]
    return "".join(f"{name:<24}{value}\n" for name, value in lines)
