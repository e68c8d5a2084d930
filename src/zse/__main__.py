"""python -m zse, and the command `zse`."""

import _signal as signal  # built in: the other one imports enum, 4 ms in which a Ctrl-C would be told as a traceback
import _thread
import codecs
import io
import os
import sys
import time


def _shown(error: UnicodeError) -> tuple[str | bytes, int]:
    """Of a text that the output's encoding lacks words for: the bytes of a file's name as they are, else a question mark."""
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    return b"".join(bytes([ord(c) & 255]) if "\udc80" <= c <= "\udcff" else b"?" for c in part), error.end


def open_streams() -> None:
    """Input and outputs that are there and take any text. Where one was closed (`>&-`), the next file or socket would be
    what is printed to. In a locale that is not UTF-8, or for a name of a file that is not, printing would raise."""
    for number, name, mode in (0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            setattr(sys, name, open(number, mode, closefd=False))
    codecs.register_error("zse", _shown)
    for stream, errors in (sys.stdin, "replace"), (sys.stdout, "zse"):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """A Ctrl-C that came while Python called a __del__ is reported, not raised: a load of a model, which frees thousands
    of buffers, would go on. It comes again once that is over; here it would be lost once more."""

    def interrupt() -> None:
        time.sleep(0.001)
        _thread.interrupt_main()

    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(interrupt, ())
    else:
        sys.__unraisablehook__(unraisable)


def main() -> int:
    """zse.cli.main.main(). Until a command runs Ctrl-C ends the process at once: a KeyboardInterrupt in the middle of
    an import or of argparse becomes other errors there, and nothing is begun that would have to be put in order."""
    waits = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in a shell's background job
    if waits:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

    def begin() -> None:
        if waits:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = _interrupt_again

    open_streams()
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
