"""Runs an MCP server's program: `launch.py PARENT PROGRAM ARGUMENT…`, and kills its process group when the parent dies, the
children of wrappers such as npx included.

It is run by its path in an isolated Python, so it imports nothing of this package."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """The program's exit code, of one that a signal ended 128 and its number."""
    parent, program = int(arguments[0]), arguments[1]
    signal.signal(signal.SIGUSR1, lambda number, frame: os.killpg(0, signal.SIGKILL))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent:
        return 0  # it died before that
    child = os.fork()
    if not child:
        try:
            os.execv(program, arguments[1:])
        except OSError as error:
            sys.stderr.write(f"{program}: {error.strerror}\n")
            sys.stderr.flush()
        os._exit(127)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is the program's, which may take its time
    for number in (0, 1, 2):  # whoever reads or writes there shall see the program's end
        os.close(number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
