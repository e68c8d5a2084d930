"""The command `zse`: a table of commands, each a module that is imported only when it is used.

A command module has HELP (one line), add_arguments(parser) and run(args) → exit code; EPILOG (examples) is optional.
Exit codes: 0 done, 1 failed, 2 wrong usage or unusable input, 130 interrupted, 141 the reader of our output went away.
"""

import os
import sys

# In the order in which `zse --help` lists them.
COMMANDS = {
    "serve": "zse.cli.serve",
    "run": "zse.cli.run",
    "chat": "zse.cli.chat",
    "pull": "zse.cli.pull",
    "ls": "zse.cli.ls",
    "show": "zse.cli.show",
    "rm": "zse.cli.rm",
    "convert": "zse.cli.convert",
    "info": "zse.cli.info",
    "verify": "zse.cli.verify",
    "bench": "zse.cli.bench",
    "profile": "zse.cli.profile",
    "kernels": "zse.cli.kernels",
    "doctor": "zse.cli.doctor",
    "version": "zse.cli.version",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: sys.argv) and return its exit code. Never raises for a user's mistake."""
    from zse.errors import ZSEError

    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except ZSEError as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit; that must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def fail(message: str, exit_code: int) -> int:
    """Print the one line of an error and return its exit code."""
    line = " ".join(message.split("\n"))
    sys.stderr.write(f"zse: error: {line}\n")
    return exit_code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        if len(argv) > 1 and argv[0] == "help" and argv[1] in COMMANDS:
            return _dispatch([argv[1], "--help"])
        sys.stdout.write(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        argv = ["version", "--short"]
    name = argv[0]
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        return fail(f"unknown {what} {name}{_hint(name, COMMANDS)}; `zse --help` lists the commands", 2)
    module = load(name)
    from zse.cli.parser import Parser

    parser = Parser(prog=f"zse {name}", description=module.HELP, epilog=getattr(module, "EPILOG", None))
    module.add_arguments(parser)
    try:
        args = parser.parse_strict(argv[1:])
    except SystemExit:  # argparse leaves this way after --help
        return 0
    args.command_line = argv
    return module.run(args)


def load(name: str):
    """The module of a command."""
    from importlib import import_module

    return import_module(COMMANDS[name])


def usage() -> str:
    """The text of `zse --help`."""
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:<{width}}{load(name).HELP}" for name in COMMANDS)
    return (
        "usage: zse COMMAND [OPTIONS]\n\nRun and serve open-weight language models.\n\n"
        f"{commands}\n\n`zse COMMAND --help` explains one command. A MODEL is a name from `zse ls`, hf:ORG/NAME, or "
        "the path of a\n"
        ".zse or .gguf file or of a Hugging Face folder.\n"
    )


def _hint(word: str, known) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


if __name__ == "__main__":
    sys.exit(main())
