"""docs/cli.md from the parsers: `python -m zse.cli.reference > docs/cli.md`. A test holds the file to this text."""

import argparse

from zse import env
from zse.cli import aliases, main

_HEAD = """# Command line

Made from the parsers by `python -m zse.cli.reference`; do not edit.

`zse COMMAND [OPTIONS]`. A MODEL is a name from `zse ls`, `hf:ORG/NAME[@REV][:FILE]`, or the path of a `.zse`
or `.gguf` file or of a Hugging Face folder; a stored name wins over a path of the same spelling, so
write `./NAME` for the path.

Errors are one line on standard error. Exit codes: 0 done, 1 failed, 2 wrong usage or unusable input, 130 interrupted,
141 the reader of the output went away.

| command | does |
|---|---|
"""


def text() -> str:
    """The whole page. It does not depend on the width of a terminal or the version of argparse."""
    page = _HEAD + "".join(f"| [{name}](#zse-{name}) | {help} |\n" for name, help in main.COMMANDS.items())
    for name in main.COMMANDS:
        parser = main.parser_of(name)
        page += f"\n## zse {name}\n\n{_sentence(main.COMMANDS[name])}\n\n{_options(parser)}"
        for sub_name, sub in _subparsers(parser).items():
            page += f"\n### zse {name} {sub_name}\n\n{_sentence(sub.description or '')}\n\n{_options(sub)}"
        if parser.epilog:
            page += f"\n```\n{parser.epilog}\n```\n"
    return page + "\n" + _aliases() + "\n" + _switches()


def _aliases() -> str:
    same = ", ".join(f"`{name}`" for name in aliases.SAME)
    return (
        "## Names from other programs\n\n"
        "`zse serve`, `run` and `chat` take what people type for vLLM, llama.cpp and infer, where they have an option for it.\n"
        f"The same as in vLLM: {same}.\n\n| name | of | here |\n|---|---|---|\n{aliases.table()}"
    )


def _switches() -> str:
    rows = "".join(f"| `{name}` | {default or ''} | {help} |\n" for name, (default, help) in env.SWITCHES.items())
    return f"## Environment\n\n| variable | default | meaning |\n|---|---|---|\n{rows}"


def _subparsers(parser: argparse.ArgumentParser) -> dict:
    return next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {})


def _options(parser: argparse.ArgumentParser) -> str:
    rows = "".join(
        _row(action)
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    )
    subs = _subparsers(parser)
    kinds = f"Kinds: {', '.join(f'`{name}`' for name in subs)}.\n" if subs else ""
    return kinds + (f"| argument | meaning |\n|---|---|\n{rows}" if rows else "")


def _row(action: argparse.Action) -> str:
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = str(action.metavar or action.dest.upper())
    names = ", ".join(action.option_strings)
    shown = value if not names else names if action.nargs == 0 else f"{names} {value}"
    if not names and action.nargs in ("*", "+", "?"):
        shown = {"*": f"[{value} …]", "+": f"{value} …", "?": f"[{value}]"}[action.nargs]
    help = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%").replace("|", "\\|")
    return f"| `{shown}` | {help} |\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


if __name__ == "__main__":
    print(text(), end="")
