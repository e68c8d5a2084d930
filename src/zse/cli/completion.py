"""zse completion: a shell's completions, made from the tables of commands and arguments that the parsers are made
of."""

import argparse
import re
import sys
from collections import namedtuple

from zse.cli import main, parser
from zse.cli.parser import arg
from zse.formats import catalog

EPILOG = """examples:
  zse completion bash > ~/.local/share/bash-completion/completions/zse
  zse completion zsh > "${fpath[1]}/_zse"                                      a folder of fpath; then a new shell
  zse completion fish > ~/.config/fish/completions/zse.fish"""

ARGUMENTS = (arg("shell", choices=("bash", "zsh", "fish"), metavar="bash|zsh|fish", help="whose script to print"),)

# What follows a command's name. words: the command's, a kind of it behind. kinds: name → what it does. models: whether
# a name of a model may stand there. choices: of the words behind it.
Place = namedtuple("Place", "words help options kinds models choices")
# names: with their dashes. values: words that it takes; "file": a path; "": anything; None: it is a flag. repeats: may
# be given twice.
Option = namedtuple("Option", "names help values repeats")


def run(args) -> int:
    sys.stdout.write({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](places()))
    return 0


def places() -> list[Place]:
    """Of every command and of every kind of one."""
    found = []
    for name, help in main.COMMANDS.items():
        made = main.parser_of(name)
        kinds = next((each.choices for each in made._actions if isinstance(each, argparse._SubParsersAction)), {})
        found.append(_place((name,), help, made, {kind: sub.description for kind, sub in kinds.items()}))
        found += [_place((name, kind), sub.description or "", sub, {}) for kind, sub in kinds.items()]
    return found


def _place(words: tuple[str, ...], help: str, of: parser.Parser, kinds: dict[str, str]) -> Place:
    bare = [action for action in of._actions if not action.option_strings]
    options = [
        Option(tuple(action.option_strings), _help(action), _values(action), type(action).__name__ == "_AppendAction")
        for action in of._actions
        if action.option_strings
    ]
    choices = [] if kinds else [str(word) for action in bare for word in action.choices or ()]
    return Place(words, help, options, kinds, any(action.metavar == "MODEL" for action in bare), choices)


def _help(action: argparse.Action) -> str:
    """The first clause: the rest would fill the screen."""
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return re.split(r"; |\. | \(default|, for example|: ", text)[0]


def _values(action: argparse.Action) -> list[str] | str | None:
    if action.nargs == 0:
        return None
    if action.choices is not None:
        return [str(word) for word in action.choices]
    shown = str(action.metavar or "")
    if re.search("FILE|FOLDER|PATH|DIR", shown):
        return "file"
    return [word for word in shown.split("|") if re.fullmatch("[a-z0-9]+", word)] if "|" in shown else ""


def _names() -> str:
    """Of models that can be fetched."""
    return " ".join(sorted({*catalog.CATALOG, *catalog.HUB_MODELS}))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _bash(found: list[Place]) -> str:
    kinds, values, flags, bare = [], [], [], []
    for place in found:
        name = " ".join(place.words)
        if place.kinds:
            kinds.append(f"        {_quoted(name)}) kinds={_quoted(' '.join(place.kinds))} ;;")
        names = [word for option in place.options for word in option.names]
        flags.append(f"        {_quoted(name)}) words={_quoted(' '.join(names))} ;;")
        words = "$(_zse_models)" if place.models else " ".join(place.choices)
        if words:
            bare.append(f'        {_quoted(name)}) words="{words}" ;;')
        for option in place.options:
            if option.values is not None:
                does = {"file": "return", "": "COMPREPLY=(); compopt +o default; return"}.get(
                    option.values if isinstance(option.values, str) else "words", ""
                )
                does = does or f"words={_quoted(' '.join(option.values))}; known=1"
                at = "|".join(_quoted(f"{name} {word}") for word in option.names)
                values.append(f"        {at}) {does} ;;")
    lines = "\n".join
    return f"""# bash completion of zse: made by `zse completion bash`
_zse_models() {{
    local folder=${{ZSE_HOME:-$HOME/.cache/zse}}/models
    [[ -d $folder ]] && command ls -- "$folder"
    echo {_names()}
}}
_zse() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} place=${{COMP_WORDS[1]}} words="" kinds="" known=""
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W {_quoted(" ".join(main.COMMANDS) + " --help --version")} -- "$word"))
        return
    fi
    case $place in
{lines(kinds)}
    esac
    if [[ -n $kinds ]]; then
        if (( COMP_CWORD == 2 )); then
            COMPREPLY=($(compgen -W "$kinds" -- "$word"))
            return
        fi
        place="$place ${{COMP_WORDS[2]}}"
    fi
    case "$place $before" in
{lines(values)}
    esac
    if [[ -z $known && $word == -* ]]; then
        case $place in
{lines(flags)}
        esac
    elif [[ -z $known ]]; then
        case $place in
{lines(bare)}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _zse zse
"""


def _zsh(found: list[Place]) -> str:
    def told(text: str) -> str:
        return re.sub(r"([\[\]:\\])", r"\\\1", text)

    def spec(name: str, option: Option) -> str:
        star = "*" if option.repeats else ""
        if option.values is None:
            return _quoted(f"{star}{name}[{told(option.help)}]")
        takes = {"file": "_files", "": " "}.get(option.values if isinstance(option.values, str) else "words")
        takes = takes or f"({' '.join(option.values)})"
        return _quoted(f"{star}{name}{'=' if name.startswith('--') else ''}[{told(option.help)}]:value:{takes}")

    kinds, cases = [], []
    for place in found:
        name = " ".join(place.words)
        if place.kinds:
            rows = " ".join(_quoted(f"{kind}:{help}") for kind, help in place.kinds.items())
            kinds.append(f"        {name}) kinds=({rows}) ;;")
            continue
        rest = "*:model:_zse_models" if place.models else "*:file:_files"
        rest = f"*:word:({' '.join(place.choices)})" if place.choices else rest
        specs = [spec(word, option) for option in place.options for word in option.names]
        cases.append(f"        {_quoted(name)}) _arguments {' '.join(specs)} {_quoted(rest)} ;;")
    commands = " ".join(_quoted(f"{name}:{help}") for name, help in main.COMMANDS.items())
    lines = "\n".join
    return f"""#compdef zse
# zsh completion of zse: made by `zse completion zsh`
_zse_models() {{
    local -a names
    names=(${{ZSE_HOME:-$HOME/.cache/zse}}/models/*(N:t) {_names()})
    compadd -a names
    _files
}}
_zse() {{
    local -a commands kinds
    commands=({commands})
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local place=$words[2]
    case $place in
{lines(kinds)}
    esac
    if (( $#kinds )); then
        if (( CURRENT == 3 )); then
            _describe kind kinds
            return
        fi
        place="$place $words[3]"
        shift words
        (( CURRENT-- ))
    fi
    shift words
    (( CURRENT-- ))
    case $place in
{lines(cases)}
    esac
}}
if [[ $funcstack[1] == _zse ]]; then
    _zse "$@"
else
    compdef _zse zse
fi
"""


def _fish(found: list[Place]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        "# fish completion of zse: made by `zse completion fish`",
        "function __zse_at",
        "    set -l words (commandline -opc)",
        "    set -e words[1]",
        "    test (count $words) -ge (count $argv); or return 1",
        "    for i in (seq (count $argv))",
        '        test "$words[$i]" = "$argv[$i]"; or return 1',
        "    end",
        "end",
        "function __zse_is",
        "    __zse_at $argv; and test (count (commandline -opc)) -eq (math 1 + (count $argv))",
        "end",
        "function __zse_models",
        "    set -q ZSE_HOME; and set -l folder $ZSE_HOME/models; or set -l folder ~/.cache/zse/models",
        "    test -d $folder; and command ls -- $folder",
        f"    string split ' ' {quoted(_names())}",
        "end",
    ]
    for name, help in main.COMMANDS.items():
        lines.append(f"complete -c zse -n 'test (count (commandline -opc)) -eq 1' -f -a {name} -d {quoted(help)}")
    for place in found:
        name = " ".join(place.words)
        for kind, help in place.kinds.items():
            lines.append(f"complete -c zse -n '__zse_is {name}' -f -a {kind} -d {quoted(help)}")
        if place.models:
            lines.append(f"complete -c zse -n '__zse_at {name}' -a '(__zse_models)'")
        if place.choices:
            lines.append(f"complete -c zse -n '__zse_at {name}' -f -a {quoted(' '.join(place.choices))}")
        for option in place.options if not place.kinds else ():
            flags = " ".join(f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" for word in option.names)
            takes = {None: "", "file": " -r -F", "": " -x"}.get(
                option.values if not isinstance(option.values, list) else "words"
            )
            takes = f" -x -a {quoted(' '.join(option.values))}" if takes is None else takes
            lines.append(f"complete -c zse -n '__zse_at {name}' {flags}{takes} -d {quoted(option.help)}")
    return "\n".join(lines) + "\n"
