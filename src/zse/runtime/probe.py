"""Facts about this machine: what `zse doctor` prints, and how many threads are worth starting. Nothing is
initialised."""

import ctypes
import os

from zse import env
from zse.errors import ConfigError, ZSEError
from zse.lazy import shutil, subprocess
from zse.runtime import isa, native

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _sysctl(name: str) -> int:
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    if ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)):
        return 0
    return value.value


def allowed_cpus() -> list[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def quota_cpus() -> float | None:
    """CPUs' worth of time that the control group grants, or None without a limit (cgroup v2, then v1)."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    return None


def physical_cores() -> int:
    """Cores that this process may run on: hardware threads of one core count once; on Apple, the performance cores."""
    if isa.machine() == "arm64" and os.uname().sysname == "Darwin":
        return _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu") or os.cpu_count() or 1
    if os.uname().sysname == "Darwin":
        return _sysctl("hw.physicalcpu") or os.cpu_count() or 1
    cores = set()
    for cpu in allowed_cpus():
        siblings = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or f"cpu{cpu}")
    return max(1, len(cores))


def default_threads() -> int:
    """ZSE_THREADS, else the physical cores, within what the control group grants. Raises ConfigError."""
    text = env.get("ZSE_THREADS")
    if text:
        if not text.isdigit() or not 1 <= int(text) <= 1024:
            raise ConfigError(f"ZSE_THREADS={text}: not a number from 1 to 1024")
        return int(text)
    quota = quota_cpus()
    return max(1, min(physical_cores(), int(quota) if quota else 1024))


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return isa.machine()


def memory_bytes() -> dict[str, int | None]:
    """Physical memory, what is available now, of the control group's limit, too, and that limit (None without one)."""
    fields = {
        line.split(":")[0]: line.split()[1] for line in _read("/proc/meminfo").splitlines() if len(line.split()) > 1
    }
    total = (
        int(fields["MemTotal"]) * 1024
        if "MemTotal" in fields
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    found = [int(fields["MemAvailable"]) * 1024] if "MemAvailable" in fields else []
    bounded = limit.isdigit() and int(limit) < total
    if bounded:
        found.append(_left_of(int(limit)))
    return {"total": total, "available": min(found, default=None), "limit": int(limit) if bounded else None}


def _left_of(limit: int) -> int:
    """What is left of the control group's limit, with pages of files, which the system takes back for others; all of it where the
    system does not say. Names of version 2, then those of version 1, of which total_ are with the groups below."""
    used = _read("/sys/fs/cgroup/memory.current") or _read("/sys/fs/cgroup/memory/memory.usage_in_bytes")
    lines = (_read("/sys/fs/cgroup/memory.stat") or _read("/sys/fs/cgroup/memory/memory.stat")).splitlines()
    pages = {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) == 2 and words[1].isdigit()}
    files = sum(pages.get(f"total_{name}", pages.get(name, 0)) for name in ("inactive_file", "active_file"))
    return max(0, limit - max(0, int(used) - files)) if used.isdigit() else limit


def usable_bytes() -> int:
    """Memory that this process may use: the control group's limit, else all there is."""
    facts = memory_bytes()
    return facts["limit"] or facts["total"] or 0


def compiler() -> tuple[str, str] | None:
    """(path, version line) of the C compiler that the build would use, or None."""
    for name in (os.environ.get("CC"), "gcc", "clang", "cc"):
        path = shutil.which(name) if name else None
        if path:
            try:
                answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if answer.returncode == 0:  # on macOS a stub exists before the tools are installed, and fails
                return path, answer.stdout.splitlines()[0] if answer.stdout else ""
    return None


def cuda_driver() -> dict[str, str | None]:
    """The CUDA driver: its library and version as files say them; no driver call is made."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":") + [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib/wsl/lib",
        "/usr/local/nvidia/lib64",
    ]
    places = [os.path.join(folder, "libcuda.so.1") for folder in folders if folder]
    library = next(filter(os.path.exists, places), None)
    version = _read("/sys/module/nvidia/version") or None
    if version is None and library:
        tail = os.path.realpath(library).rpartition(".so.")[2]
        version = tail if "." in tail else None
    numbers = [name[6:] for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    return {
        "library": library,
        "version": version,
        "devices": ", ".join(f"/dev/nvidia{number}" for number in sorted(numbers)) or None,
    }


def facts() -> "dict[str, Any]":
    """Everything, by name. The CPU part is `error: text` when the compiled libraries are missing or do not fit."""
    found: dict[str, Any] = {
        "machine": isa.machine(),
        "cpu": cpu_model(),
        "logical_cpus": len(allowed_cpus()),
        "physical_cores": physical_cores(),
        "cpu_quota": quota_cpus(),
        "memory": memory_bytes(),
        "compiler": compiler(),
        "native_dir": native.native_dir(),
        "cuda": cuda_driver(),
        "compiled": [name for name in isa.LEVELS if os.path.exists(native.kernel_library(name))],
        "features": [],
        "runnable": [],
        **dict.fromkeys(("isa", "threads", "error")),
    }
    try:
        bits = native.runtime().zse_cpu_features()
        found["features"], found["runnable"] = isa.feature_names(bits), isa.runnable_levels(bits)
        found["threads"] = default_threads()
        found["isa"] = native.choose_level()
    except ZSEError as error:
        found["error"] = str(error)
    return found


PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def modules_without_bytecode(folder: str = PACKAGE) -> list[str]:
    """Files that every start compiles anew: their bytecode is missing or older than they are."""
    from importlib.util import cache_from_source  # 2 ms, for zse doctor alone

    missing = []
    for place, _, names in os.walk(folder):
        for path in (os.path.join(place, name) for name in names if name.endswith(".py")):
            try:
                with open(cache_from_source(path), "rb") as file:
                    header = file.read(16)
            except OSError:
                header = b""
            # A flag at byte 4 says that a hash stands there instead of the time.
            made = (int(os.stat(path).st_mtime) & 0xFFFFFFFF).to_bytes(4, "little")
            if len(header) < 16 or not header[4] and header[8:12] != made:
                missing.append(path)
    return missing
