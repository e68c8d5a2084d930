"""Points at which a process writes: each may fail, or be the last thing that the process does.

A point is a call of os (open for writing, write, pwrite, fsync, rename, replace, link, unlink, rmdir, mkdir, ftruncate, …) or a write
of a file object. `kill`: the process ends before that call, or in the middle of a write (what a SIGKILL leaves: the kernel keeps
what it was given). `error`: the call raises OSError. A run happens in a fork, so nothing of it stays in this process."""

import builtins
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CALLS = "mkdir rmdir unlink rename replace link symlink truncate ftruncate posix_fallocate fsync write pwrite chmod utime".split()
WRITES = {"write": 1, "pwrite": 1}  # which argument is what is written
KILLED = 137


class Outcome(NamedTuple):
    """points: calls that the run made. acknowledged: it returned. error: what it raised, as text; killed: at the point."""

    points: list[str]
    acknowledged: bool
    error: str
    killed: bool


class Points:
    """Counts the points from 0 on. at: the one that goes wrong, None: none. how: an errno; "kill"; "die": killed, in the middle
    of the data where the call writes some."""

    def __init__(self, at: int | None, how: str | int):
        self.at, self.how, self.seen = at, how, []

    def reach(self, name: str, write: Callable[[], object] | None = None) -> None:
        """One more. write: writes half of the data, of calls that write."""
        number = len(self.seen)
        self.seen.append(name)
        if number != self.at:
            return
        if isinstance(self.how, int):
            raise OSError(self.how, os.strerror(self.how))
        if self.how == "die" and write is not None:
            write()
        os._exit(KILLED)

    @contextlib.contextmanager
    def installed(self):
        real = {name: getattr(os, name) for name in [*CALLS, "open"]}
        real_open = io.open

        def wrapped(name):
            def call(*arguments, **options):
                half = None
                if name in WRITES:
                    data = memoryview(arguments[1]).cast("B")
                    half = lambda: real[name](arguments[0], data[: len(data) // 2], *arguments[2:])  # noqa: E731
                self.reach(name, half)
                return real[name](*arguments, **options)

            return call

        def os_open(path, flags, *rest, **options):
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.reach("open")
            return real["open"](path, flags, *rest, **options)

        def file_open(file, mode="r", *rest, **options):
            if not set(mode) & set("wax+"):
                return real_open(file, mode, *rest, **options)
            self.reach("open")
            opened = real_open(file, mode, *rest, **options)
            return File(self, opened)

        for name in CALLS:
            setattr(os, name, wrapped(name))
        os.open, io.open, builtins.open = os_open, file_open, file_open
        try:
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            io.open = builtins.open = real_open


class File:
    """A file object whose writes are points and reach the kernel at once."""

    def __init__(self, points: Points, inner):
        self._points, self._inner = points, inner

    def write(self, data):
        def half() -> None:
            self._inner.write(data[: len(data) // 2])
            self._inner.flush()

        self._points.reach("file.write", half)
        written = self._inner.write(data)
        self._inner.flush()
        return written

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._inner.close()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def __iter__(self):
        return iter(self._inner)


def attempt(
    work: Callable[[], object], at: int | None = None, how: str | int = "kill", allowed: tuple = (OSError,)
) -> Outcome:
    """work() in a fork, where point `at` goes wrong. allowed: errors that it may end with; any other is told as a bug."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code, said, points = 2, "", Points(at, how)
        try:
            os.close(reading)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            try:
                with points.installed():
                    work()
                code = 0
            except allowed as error:
                code, said = 1, f"{type(error).__name__}: {error}"
            except BaseException:
                said = traceback.format_exc(limit=-4)
            os.write(writing, ("\n".join([str(code), " ".join(points.seen), said]))[:60000].encode())
        finally:
            sys.stderr.flush()
            os._exit(0 if code < 2 else code)
    os.close(writing)
    data = b""
    while piece := os.read(reading, 1 << 16):
        data += piece
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == KILLED:
        return Outcome([], False, "", True)
    code, points, said = data.decode().split("\n", 2)
    assert code != "2", said
    return Outcome(points.split(), code == "0", said, False)


def each_point(
    prepare: Callable[[], Path],
    work: Callable[[Path], object],
    check: Callable[[Path, bool], None],
    hows: tuple[str | int, ...],
    allowed: tuple,
) -> int:
    """For every point of the work and every way to go wrong there: prepare, run, check what is left, run again, check.

    check(folder, acknowledged): what must hold; acknowledged: the work said that it is done. Returns how many runs there were."""
    folder = prepare()
    whole = attempt(lambda: work(folder), allowed=allowed)
    assert whole.acknowledged, whole.error
    check(folder, True)
    count = 0
    for at, name in enumerate(whole.points):
        for how in hows:
            folder = prepare()
            where = f"{name} (point {at} of {len(whole.points)}), {how}"
            outcome = attempt(lambda: work(folder), at, how, allowed)
            try:
                check(folder, outcome.acknowledged)
                again = attempt(lambda: work(folder), allowed=allowed)
                assert again.acknowledged, f"the same again fails: {again.error}"
                check(folder, True)
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from error
            count += 1
    return count
