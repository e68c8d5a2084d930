"""A driver between ZSE and the real one (or fake_driver.c) that counts every call and makes the N-th fail, and the sweep over all N.

The library is made from the table of roles: each function passes its arguments on as words, which is what the calling conventions of
x86-64 and arm64 do with integers and pointers; no role takes a float. After an error that a driver does not recover from every
further call fails with it, as the driver's would; a capture that fails to end has ended."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zse.errors import DeviceError, DeviceLost
from zse.runtime.args import Args
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.bindings.driver import ROLES
from zse.runtime.cuda import CUDADevice
from zse.tensor import Tensor

OUT_OF_MEMORY = 2
CODES = {"OOM": OUT_OF_MEMORY, "illegal address": 700, "ECC": 214, "launch timeout": 702, "device lost": 999}
# What a lost device still answers.
FREE = "init driver_version device_count device_get device_name device_attribute device_total_memory".split()
LAUNCHES = 8
_HEAD = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
typedef long (*call_t)(long, long, long, long, long, long, long, long, long, long, long, long);
static void *driver;
static long seen, at = -1;
static int code, is_sticky, lost;
static const char *names[100000];
__attribute__((constructor)) static void open_driver(void) {
    driver = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (!driver) { fprintf(stderr, "%s\\n", dlerror()); abort(); }
}
void faulty_arm(long n, int status, int sticky) { seen = 0; at = n; code = status; is_sticky = sticky; lost = 0; }
long faulty_seen(void) { return seen; }
const char *faulty_name(long n) { return names[n]; }
static int point(const char *role, int is_free) {
    long n = __atomic_fetch_add(&seen, 1, __ATOMIC_SEQ_CST);
    if (n < 100000) names[n] = role;
    if (lost && !is_free) return lost;
    if (n != at) return 0;
    if (is_sticky) lost = code;
    return code;
}
"""
_CALL = """long %(symbol)s(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l) {
    static call_t real;
    if (!real) real = (call_t)dlsym(driver, "%(symbol)s");
    int status = %(point)s;
    if (status && !%(ends)d) return status;
    long done = real(a, b, c, d, e, f, g, h, i, j, k, l);
    return status ? status : (int)done;
}
"""


class Faulty:
    """The library over `driver` (a path, or a name for dlopen), made in `folder`."""

    def __init__(self, driver: str, folder: Path):
        there = ctypes.CDLL(driver)
        text = _HEAD.replace("DRIVER", f'"{driver}"')
        for role, (symbol, *_) in ROLES.items():
            if symbol and hasattr(there, symbol):
                point = f'point("{role}", {int(role in FREE)})'
                text += _CALL % {"symbol": symbol, "point": point, "ends": role == "end_capture"}
        for symbol in ("cuGetErrorName", "cuGetErrorString"):
            text += _CALL % {"symbol": symbol, "point": "0", "ends": 0}
        source, self.path = folder / "faulty.c", str(folder / "libfaulty.so")
        source.write_text(text)
        command = ["cc", "-std=gnu11", "-O1", "-shared", "-fPIC", str(source), "-o", self.path, "-ldl"]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(self.path)
        self._library.faulty_name.restype = ctypes.c_char_p
        self._library.faulty_seen.restype = ctypes.c_long

    def arm(self, at: int, code: int) -> None:
        """From now on calls count from 0; call `at` (-1: none) fails with `code`."""
        self._library.faulty_arm(ctypes.c_long(at), code, code in CUDADriver.sticky)

    @property
    def seen(self) -> list[str]:
        """The roles of the calls since."""
        return [self._library.faulty_name(ctypes.c_long(n)).decode() for n in range(self._library.faulty_seen())]


def use(device: CUDADevice) -> int:
    """Memory, copies, launches, a captured graph and events: what the kernels made of zero."""
    buffer = device.alloc(8, "out")
    out = Tensor(buffer, (1,), "i64")
    pinned = device.staging(64)
    device.write(out, bytes(8))
    recorder = device.record()
    for _ in range(2):
        recorder.launch("append", Args(out=out, value=1), 1)
    graph = recorder.finish()
    try:
        for _ in range(LAUNCHES // 2 - 1):
            graph.run()
        graph.submit().wait()
    finally:
        device.synchronize()  # what was launched before a fault still writes
    result = int.from_bytes(device.read(out), "little")
    assert device.memory_free > 0
    graph.profile()
    graph.close()
    pinned.free()
    buffer.free()
    return result


class Attempt(NamedTuple):
    """where: which phase raised ("": none); error: what; device: if it was opened."""

    where: str
    error: DeviceError | None
    device: CUDADevice | None


def attempt(open_device: Callable[[], CUDADevice]) -> Attempt:
    device, where = None, "open"
    try:
        device = open_device()
        where = "use"
        assert use(device) == 2**LAUNCHES - 1, "a fault that nobody told changed the result"
        where = "close"
        device.close()
        where = ""
    except DeviceError as error:
        return Attempt(where, error, device)
    return Attempt("", None, device)


def sweep(faulty: Faulty, open_device: Callable[[], CUDADevice], codes: dict[str, int] = CODES) -> int:
    """Every call of an opening, a use and a closing fails once with every code; how many runs that were. AssertionError where
    something else than one DeviceError came of it, where an error that passes leaves the device useless, or a lost one usable."""
    faulty.arm(-1, 0)
    assert attempt(open_device).error is None
    calls, runs = faulty.seen, 0
    for name, code in codes.items():
        for at, role in enumerate(calls):
            faulty.arm(at, code)
            where, error, device = attempt(open_device)
            said = f"{name} in {role} (call {at} of {len(calls)}, while it is {where or 'done'}): {error}"
            assert len(str(error).splitlines()) == 1, said
            is_lost = device is not None and device.driver.lost is not None
            if code in CUDADriver.sticky:
                assert device is None or is_lost or error is None, said
            else:
                assert not isinstance(error, DeviceLost), said
            faulty.arm(-1, 0)
            if is_lost:
                try:
                    device.alloc(8)
                    raise AssertionError(f"a lost device gives memory: {said}")
                except DeviceLost as lost:
                    assert lost.exit_code == 75, said
            elif where == "use":
                assert use(device) == 2**LAUNCHES - 1, f"the next use is wrong: {said}"
            if device is not None:
                device.close()
                assert device.closed, said
            runs += 1
    faulty.arm(-1, 0)
    assert attempt(open_device).error is None, "the driver is of no use afterwards"
    return runs
