"""Starting the engine process, before anything heavy is imported: a fork, else a new process (child.py)."""

import os
import signal
import socket
import sys

from zse.engine import worker
from zse.engine.child import WORKER, EngineProcess, spawn
from zse.errors import missing_package

__all__ = ["WORKER", "EngineProcess", "fork", "spawn"]


def fork(arguments: list[str], clock, close: tuple[int, ...] = ()) -> EngineProcess:
    """The engine as a copy of this process: it need not start an interpreter again (35 ms on a server's CPU, 6 of them
    Python's own). Only for a process of one thread that has imported nothing heavy yet; elsewhere it spawns.

    clock: () → seconds since exec, for the engine's phases. close: descriptors that are no business of the engine's.
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
        code = worker.main(["--fd", str(theirs.detach()), *arguments], clock=clock)
    except BaseException as error:  # the child must end here, whatever happens
        missing = missing_package(error) if isinstance(error, ModuleNotFoundError) else None
        sys.stderr.write(f"zse engine: {missing or f'{type(error).__name__}: {error}'}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
