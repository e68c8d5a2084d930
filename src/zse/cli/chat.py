"""zse chat: a conversation in the terminal. The commands and the conversation are in chat_session.py; here is the
keyboard."""

import os
import sys
import termios

from zse.cli.chat_session import Session
from zse.cli.options import ADAPTER, ENGINE_OPTIONS, add_sampling_options, open_adapted, sampling_params
from zse.cli.parser import CONFIG, arg, option
from zse.cli.terminal import notice
from zse.errors import ConfigError
from zse.formats import store

EPILOG = """Inside the chat, /help lists the commands. Ctrl-C stops the reply; Ctrl-D or /exit leaves. A line that
ends with \\ goes on in the next line; a line of three double quotes begins and ends a longer text. The input
history is kept in ZSE_HOME/chat_history. When standard input is not a terminal, each line is one message."""

DEFAULT_MAX_TOKENS = 1024
_HISTORY_LINES = 1000
_QUOTES = '"""'


ARGUMENTS = (
    arg("model", metavar="MODEL", nargs="?", default="smollm2", help="a name, hf:ORG/NAME, or a path"),
    option("--system", "TEXT", "system message (default: the model's own, if its template has one)"),
    ADAPTER,
    option("--load", "FILE", "go on with a conversation that /save wrote"),
    lambda parser: add_sampling_options(parser, DEFAULT_MAX_TOKENS),
    ENGINE_OPTIONS,
    CONFIG,
)


def run(args) -> int:
    sampling_params(args)  # what it refuses, it refuses before the model is read
    llm, adapter = open_adapted(args, max_rows=1, prepare_chat=True)
    try:
        if not llm.has_chat_template:
            raise ConfigError(f"{args.model} is a base model without a chat template; use: zse run {args.model} TEXT")
        session = Session(llm, args.model, sampling_params(args, llm.recommended), args.system, adapter)
        if args.load:
            session.load(args.load)
        if sys.stdin.isatty():
            _interactive(session)
        else:
            _piped(session)
    finally:
        llm.close()
    return 0


def _piped(session) -> None:
    while (text := _read_message(lambda prompt: _line_of_stdin(), "", "")) is not None:
        if text.strip() and not session.handle(text):
            return


def _line_of_stdin() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _interactive(session) -> None:
    import readline  # it takes the terminal: only with one

    history = os.path.join(store.home(), "chat_history")
    try:
        readline.read_history_file(history)
    except OSError:
        pass  # the first chat of this user, or a history that cannot be read: start with an empty one
    readline.set_history_length(_HISTORY_LINES)
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims(" ")
    commands = session.commands()
    readline.set_completer(
        lambda text, state: ([name for name in commands if text and name.startswith(text)] + [None])[state]
    )
    readline.parse_and_bind("set echo-control-characters off")
    print(f"{session.model}: /help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves")
    modes = termios.tcgetattr(0)
    # A Ctrl-C in the middle of a reply shows as the end of the reply, not as ^C.
    termios.tcsetattr(0, termios.TCSADRAIN, [*modes[:3], modes[3] & ~termios.ECHOCTL, *modes[4:]])
    try:
        while True:
            try:
                text = _read_message(input, "> ", ". ")
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D leaves)")
                continue
            if text is None:
                print()
                return
            if text.strip() and not session.handle(text):
                return
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, modes)
        _write_history(readline, history)


def _write_history(readline, path: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # What one types to a model is private: the file is created for its owner only.
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.write_history_file(path)
    except OSError as error:
        notice(f"the input history could not be kept: {error}")


def _read_message(read, prompt: str, more: str) -> str | None:
    """One message of one or more lines; None at the end of input."""
    try:
        line = read(prompt)
    except EOFError:
        return None
    lines = []
    try:
        if line.strip() == _QUOTES:
            while (line := read(more)).strip() != _QUOTES:
                lines.append(line)
            return "\n".join(lines)
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = read(more)
    except EOFError:
        line = ""
    return "\n".join([*lines, line]) if lines else line
