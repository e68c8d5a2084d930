"""The command `zse`: a table of commands, each a module that is imported only when it is used.

A command module has ARGUMENTS (zse.cli.parser.add) and run(args) → exit code; EPILOG (examples) is optional.
Exit codes: 0 done, 1 failed, 2 wrong usage or unusable input, 130 interrupted, 141 the reader of our output went away.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module

from zse.cli import parser, settings
from zse.errors import ZSEError

# Name → one line for `zse --help`, in its order; the module is zse.cli.NAME. Here, so that listing them imports none of
# them.
COMMANDS = {
    "serve": "serve models over an OpenAI-compatible HTTP API",
    "ps": "list the servers that run here, and their models",
    "load": "load a model in a server that runs",
    "unload": "end a model's engine in a server that runs",
    "launch": "print or write the settings that a coding agent or chat front end needs for a server",
    "run": "answer one prompt and exit",
    "chat": "talk with a model in the terminal",
    "rag": "add documents to a server that runs, search them, ask about them and get cited answers",
    "sessions": "list and remove the conversations that a server keeps",
    "keys": "make, list, change, revoke and rotate the API keys of `zse serve`; what they used",
    "pull": "fetch a model into the store",
    "ls": "list the stored models and the catalog",
    "show": "show a model's origin, licence, files and architecture",
    "rm": "delete models, and downloads that did not end, from the store",
    "convert": "make a .zse file from a GGUF, safetensors or .zse model",
    "info": "show what is inside a model: architecture, sizes, tensor types",
    "verify": "check a model from end to end: structure, checksums, numbers",
    "check": "see whether a model does here what its authors mean: tensors, tokenizer, an answer, perplexity, logits",
    "bench": "measure decode, prefill, batch, latency, perplexity, startup or serve on this machine; an ablation",
    "profile": "show where a step of a model spends its time, kernel by kernel",
    "kernels": "compile the GPU kernels, list or time them",
    "config": "show the value of every option of a command, and where it comes from",
    "completion": "print the completions of bash, zsh or fish",
    "doctor": "check this machine and installation, and say how to mend what is missing",
    "version": "print the version and build details",
}


def main(argv: list[str] | None = None, begin: Callable[[], None] = lambda: None) -> int:
    """Run one command line (default: sys.argv) and return its exit code. Never raises for a user's mistake. begin:
    called when the line is read and its command about to run."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(argv, begin)
        sys.stdout.flush()
        return code
    except ZSEError as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:  # of a full disk behind our output, of a folder that may not be read
        _drop_output()
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return fail(where + (error.strerror or str(error)), 1)


def _drop_output() -> None:
    """Python flushes stdout once more at exit; that must not raise again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, exit_code: int) -> int:
    """Print the one line of an error and return its exit code."""
    line = " ".join(message.split("\n"))
    sys.stderr.write(f"zse: error: {line}\n")
    return exit_code


def _dispatch(argv: list[str], begin: Callable[[], None]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        if len(argv) > 1 and argv[0] == "help" and argv[1] in COMMANDS:
            return _dispatch([argv[1], "--help"], begin)
        sys.stdout.write(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        argv = ["version", "--short"]
    name = argv[0]
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        return fail(f"unknown {what} {name}{parser.hint(name, COMMANDS)}; `zse --help` lists the commands", 2)
    try:
        args = settings.parse(name, parser_of(name), argv[1:])
    except SystemExit:  # argparse leaves this way after --help
        return 0
    args.command_line = argv
    begin()
    return load(name).run(args)


def parser_of(name: str) -> "parser.Parser":
    """The parser of a command, with its arguments."""
    module = load(name)
    made = parser.Parser(prog=f"zse {name}", description=COMMANDS[name], epilog=getattr(module, "EPILOG", None))
    parser.add(made, module.ARGUMENTS)
    return made


def load(name: str):
    """The module of a command."""
    return import_module(f"zse.cli.{name}")


def usage() -> str:
    """The text of `zse --help`."""
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:<{width}}{help}" for name, help in COMMANDS.items())
    return (
        "usage: zse COMMAND [OPTIONS]\n\nRun and serve open-weight language models.\n\n"
        f"{commands}\n\n`zse COMMAND --help` explains one command. A MODEL is a name from `zse ls`, hf:ORG/NAME, or "
        "the path of a\n"
        ".zse or .gguf file or of a Hugging Face folder.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
