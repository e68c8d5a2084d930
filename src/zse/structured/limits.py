"""Limits of the processes that run strangers' grammars: addresses, processor time, and what they may reach.

Kernel's interfaces: setrlimit(2); seccomp(2), a classic BPF program over the number of each system call. The limits are
Linux's; elsewhere the processes have only their clock."""

import contextlib
import ctypes
import os
import resource
import struct
import sys

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # prctl(2)
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_CLONE_THREAD = 0x10000
# (the kernel's number of the machine, clone, clone3, calls that are refused): new files, sockets and programs, names of
# files, other processes' memory, rings that would do all that without a call.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        56,
        435,
        # open creat openat openat2 | socket socketpair connect bind accept accept4 | fork vfork execve execveat
        (2, 85, 257, 437, 41, 53, 42, 49, 43, 288, 57, 58, 59, 322)
        # rename link symlink unlink mkdir rmdir chmod chown truncate, and their …at forms | ptrace
        # process_vm_readv/writev | io_uring
        + (82, 86, 88, 87, 83, 84, 90, 92, 76, 264, 316, 265, 266, 263, 258, 268, 260, 101, 310, 311, 425),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        435,
        (56, 437, 198, 199, 203, 200, 202, 242, 221, 281, 38, 276, 37, 36, 35, 34, 53, 54, 45, 117, 270, 271, 425),
    ),
}


def limit_memory(more: int) -> None:
    """From now on this process may have at most `more` bytes of addresses beside those that it has. A core of it would
    hold users' words."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))


def limit_processor(seconds: int) -> None:
    """From now on all threads of this process may compute for so many seconds together, until this is called again; it
    is killed then (SIGXCPU)."""
    with contextlib.suppress(OSError, ValueError):
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def close_in(may_start_threads: bool = False) -> None:
    """From now on this process opens no file and no socket, writes no file, changes no name and starts no program and
    no process."""
    limits = {
        "RLIMIT_NOFILE": 3,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_NPROC": 0,
    }  # poll(2) wants a limit of as many as it is given
    if may_start_threads:
        del limits["RLIMIT_NPROC"]  # which counts threads
    for name, most in limits.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, name), (most, most))
    _refuse_calls()


def _refuse_calls() -> None:
    """Install the filter of system calls, in all threads from now on. Where a kernel or a container has no seccomp the
    limits above are all."""
    machine = _MACHINES.get(os.uname().machine)
    if sys.platform != "linux" or machine is None or sys.maxsize < 2**32:
        return
    arch, clone, clone3, refused = machine
    # Offsets of struct seccomp_data: number 0, machine 4, lower half of the first argument 16.
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _ERRNO | _EPERM), (_LOAD, 0, 0, 0)]
    body: list[tuple[int, int | str, int | str, int]] = [
        (_AT_LEAST, "refuse", 0, 0x40000000)
    ]  # x86-64's other numbers (x32)
    body += [(_EQUAL, "refuse", 0, number) for number in refused]
    body += [
        (_EQUAL, "absent", 0, clone3),
        (_EQUAL, 0, 2, clone),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 0, "refuse", _CLONE_THREAD),
    ]
    places = {"refuse": len(body) + 1, "absent": len(body) + 2}
    for at, (code, *targets, value) in enumerate(body):
        yes, no = (places[target] - at - 1 if isinstance(target, str) else target for target in targets)
        program.append((code, yes, no, value))  # type: ignore[arg-type]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    packed = b"".join(struct.pack("<HBBI", *line) for line in program)
    text = ctypes.create_string_buffer(packed, len(packed))
    head = struct.pack("@HP", len(program), ctypes.addressof(text))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    none = ctypes.c_char_p()
    if prctl(_NO_NEW_PRIVILEGES, 1, none, 0, 0) == 0:
        prctl(_SET_SECCOMP, _FILTER, head, 0, 0)
