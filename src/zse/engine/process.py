"""Starting the engine process, before anything heavy is imported: os.posix_spawn and one socket pair.

Only the standard library's light modules are used here; `zse serve` calls fork() a few ms after exec.
"""

import os
import signal
import socket
import sys
import time

from zse.errors import missing_package

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# -P: a file in the working directory must not shadow a module. -S: without site, whose .pth files cost up to 30 ms; the
# folders of packages are handed over in PYTHONPATH instead.
WORKER = ("-S", "-P", "-m", "zse.engine.worker")


class EngineProcess:
    """A started engine: its pid and the server's end of the socket pair. `started`: time.monotonic().

    load: for a parked engine that is taken into use, the arguments of the LoadModel message that it gets first. expects: the models that it was told
    it may become.
    """

    def __init__(self, pid: int, sock: socket.socket):
        self.pid, self.sock, self.started = pid, sock, time.monotonic()
        self.load: list[str] | None = None
        self.expects: list[str] = []
        self._status: int | None = None

    @property
    def is_parked(self) -> bool:
        """Whether a parked engine has said that it is up. Reads nothing from the socket."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

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


def spawn(arguments: list[str], command: tuple[str, ...] = WORKER) -> EngineProcess:
    """Start `python -m zse.engine.worker --fd N ARGUMENTS...` and return at once.

    The child has its own process group, so that Ctrl-C in the terminal reaches only the server, which drains. It
    learns of the server's death by end-of-file on the socket (and, on Linux, by a signal).
    """
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    environment.pop("ZSE_API_KEY", None)  # no business of the engine's
    # A source checkout is found without relying on the working directory, packages without `site`.
    folders = [folder for folder in (_root(), *sys.path) if folder == _root() or _is_packages(folder)]
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    try:
        theirs.set_inheritable(True)
        line = [sys.executable, *command, "--fd", str(theirs.fileno()), *arguments]
        pid = os.posix_spawn(
            sys.executable, line, environment, setpgroup=0, setsigmask=(), setsigdef=(signal.SIGINT, signal.SIGTERM)
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return EngineProcess(pid, ours)


def _root() -> str:
    """The folder that the package `zse` lies in."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _is_packages(folder: str) -> bool:
    return os.path.basename(folder) in ("site-packages", "dist-packages")


def fork(arguments: list[str], clock, main: "Callable[..., int]", close: tuple[int, ...] = ()) -> EngineProcess:
    """The engine as a copy of this process: it need not start an interpreter again (35 ms on a server's CPU, 6 of them
    Python's own). Only for a process of one thread that has imported nothing heavy yet; elsewhere it spawns.

    clock: () → seconds since exec, for the engine's phases. main(arguments, clock): of the worker, imported in the copy. close: descriptors that are no business of the engine's.
    """
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) != 1:
        return spawn(arguments)
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return EngineProcess(pid, ours)
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ours.close()
        for descriptor in close:
            os.close(descriptor)
        os.environ.pop("ZSE_API_KEY", None)
        code = main(["--fd", str(theirs.detach()), *arguments], clock=clock)
    except BaseException as error:  # the child must end here, whatever happens
        missing = missing_package(error) if isinstance(error, ModuleNotFoundError) else None
        sys.stderr.write(f"zse engine: {missing or f'{type(error).__name__}: {error}'}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
