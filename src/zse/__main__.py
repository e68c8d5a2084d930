"""python -m zse, and the command `zse`."""

import os
import signal
import sys


def main() -> int:
    """zse.cli.main.main(). Until a command runs Ctrl-C ends the process at once: a KeyboardInterrupt in the middle of
    an import or of argparse becomes other errors there, and nothing is begun that would have to be put in order."""
    waits = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in a shell's background job
    if waits:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

    def begin() -> None:
        if waits:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        return __import__("zse.cli.main", fromlist=["main"]).main(begin=begin)
    except ModuleNotFoundError as error:
        line = __import__("zse.errors", fromlist=["missing_package"]).missing_package(error)
        if line is None:
            raise
        sys.stderr.write(f"zse: error: {line}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
