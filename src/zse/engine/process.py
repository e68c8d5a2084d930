"""Starting the engine process, before anything heavy is imported: os.posix_spawn and one socket pair.

Only the standard library's light modules are used here; `zse serve` calls spawn() a few ms after exec.
"""

import os
import signal
import socket
import sys
import time

WORKER = ("-P", "-m", "zse.engine.worker")  # -P: a file in the working directory must not shadow a module


class EngineProcess:
    """A started engine: its pid and the server's end of the socket pair. `started`: time.monotonic()."""

    def __init__(self, pid: int, sock: socket.socket):
        self.pid, self.sock, self.started = pid, sock, time.monotonic()
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit code (negative: the signal's number), or None while it runs. Reaps it."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else reaped it: it is gone, its status is not known
                pid, status = self.pid, 0
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        """SIGKILL, unless it has been reaped already (the pid may belong to another process by then)."""
        if self.poll() is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def wait(self, timeout: float) -> int | None:
        """Block until it has exited, at most `timeout` seconds; the exit code or None."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._status


def spawn(arguments: list[str], worker: tuple[str, ...] = WORKER) -> EngineProcess:
    """Start `python -m zse.engine.worker --fd N ARGUMENTS...` and return at once.

    The child has its own process group, so that Ctrl-C in the terminal reaches only the server, which drains. It
    learns of the server's death by end-of-file on the socket (and, on Linux, by die_with_parent()).
    """
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    environment.pop("ZSE_API_KEY", None)  # no business of the engine's
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.basename(root) not in ("site-packages", "dist-packages"):
        # A source checkout: the child finds the same package without relying on the working directory.
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    try:
        theirs.set_inheritable(True)
        command = [sys.executable, *worker, "--fd", str(theirs.fileno()), *arguments]
        pid = os.posix_spawn(sys.executable, command, environment, setpgroup=0, setsigmask=(),
                             setsigdef=(signal.SIGINT, signal.SIGTERM))
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return EngineProcess(pid, ours)


def die_with_parent(parent: int) -> None:
    """Called first thing in the engine: be killed when process `parent` dies (Linux; elsewhere end-of-file on the
    socket is the sign). Exits at once if the parent died before this call."""
    if sys.platform == "linux":
        import ctypes
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
