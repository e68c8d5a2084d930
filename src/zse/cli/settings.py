"""Where the value of an option comes from: its default < the configuration file < the environment < the command line.

The names are those of the command's own table of arguments: `--max-context` is `max-context` in the table [serve] of
zse.toml and ZSE_SERVE_MAX_CONTEXT in the environment. Without a file and such a variable nothing is read and the parser
does all."""

import argparse
import os
from collections import namedtuple

from zse import env
from zse.cli import parser as parsers
from zse.errors import ConfigError, one_line
from zse.formats import store
from zse.lazy import tomllib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

# The commands whose options a file and the environment can give.
COMMANDS = ("serve", "run", "chat")
# Switches (zse.env) that their options know already: they stand for the environment, so a file's value does not count
# beside one.
SWITCHES = {"threads": "ZSE_THREADS", "api_key": "ZSE_API_KEY", "log_level": "ZSE_LOG", "log_format": "ZSE_LOG_FORMAT"}
# Of which one can be given: what a higher source says of one of them takes the others' place.
RIVALS = (("api_key", "api_key_file"), ("json_schema", "regex", "choice", "grammar"))
SECRETS = ("api_key",)
MAX_BYTES = 1 << 20
NAME = "zse.toml"

# value: as the parser would give it. source: for readers, a path or a variable.
Setting = namedtuple("Setting", "value source")


def parse(
    command: str,
    parser: parsers.Parser,
    argv: list[str],
    told: bool = False,
    environment: "Mapping[str, str] | None" = None,
) -> argparse.Namespace:
    """The arguments of a command from all sources. Raises ConfigError. told: `sources` is wanted in any case.
    environment: None: this process's.

    Of the result: config_path, the file that was read, or None; sources, dest → where from, of what no default decided,
    empty where only the command line was asked; environment, as it was."""
    if command not in COMMANDS:
        return parser.parse_strict(argv)
    environment = os.environ if environment is None else environment
    path = config_path(argv)
    values = found(command, parser, argv, environment)
    if values or told:
        args = _parse_over(parser, argv, values)
    else:
        args = parser.parse_strict(argv)
        args.sources = {}
    args.config_path = path
    # A copy where it is looked at again: the command may change it for its children.
    args.environment = environment if path is None else dict(environment)
    return args


def found(
    command: str, parser: parsers.Parser, argv: list[str], environment: "Mapping[str, str] | None" = None
) -> "dict[str, Setting]":
    """dest → what file and environment say. Raises ConfigError."""
    environment = os.environ if environment is None else environment
    of_file = _of_file(config_path(argv), command, parser)
    return _merged(of_file, _of_environment(command, parser, environment), environment)


def config_path(argv: list[str]) -> str | None:
    """The file to read: --config, else ZSE_CONFIG, else zse.toml under ZSE_HOME where there is one; "none" is no
    file."""
    given = env.get("ZSE_CONFIG")
    for index, word in enumerate(argv):
        if word == "--":
            break
        if word == "--config":
            given = "".join(argv[index + 1 : index + 2])
        elif word.startswith("--config="):
            given = word.partition("=")[2]
    if given == "none":
        return None
    if given:
        return os.path.abspath(os.path.expanduser(given))
    path = os.path.join(store.home(), NAME)
    return path if os.path.exists(path) else None


def options(parser: parsers.Parser) -> "dict[str, argparse.Action]":
    """Name, without dashes → action, of what a file and the environment may give."""
    found = {}
    for action in parser._actions:
        names = [name[2:] for name in action.option_strings if name.startswith("--")]
        if isinstance(action, argparse.BooleanOptionalAction):
            names = names[:1]  # --no-X is X = false
        if not action.option_strings and action.nargs in ("*", "?"):
            names = [action.dest]
        if action.dest not in ("help", "config", "prompt"):
            found.update(dict.fromkeys(names, action))
    return found


def variable(command: str, name: str) -> str:
    return f"ZSE_{command}_{name}".upper().replace("-", "_")


def is_list(action: argparse.Action) -> bool:
    return action.nargs == "*" or type(action).__name__ in ("_AppendAction", "_Joined")


def _of_file(path: str | None, command: str, parser: parsers.Parser) -> "dict[str, Setting]":
    if path is None:
        return {}
    table = read(path).get(command, {})
    known, found = options(parser), {}
    for written, value in table.items():
        where, name = f"{path}: [{command}] {one_line(written)}", written.replace("_", "-")
        if name not in known:
            raise ConfigError(f"{where} is no option of `zse {command}`{parsers.hint(name, known)}")
        action = known[name]
        if action.dest in found:
            raise ConfigError(f"{where}: the same option stands there by another name")
        found[action.dest] = Setting(_value(parser, action, value, where), path)
    if "api_key" in found and os.stat(path).st_mode & 0o077:
        raise ConfigError(f"{path} holds a key and other users can read or change it: run chmod 600 {path}")
    return found


def read(path: str) -> "dict[str, dict[str, Any]]":
    """Command → its table, of a file. Raises ConfigError, which names the place."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes")
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOMLDecodeError, UnicodeDecodeError and numbers of too many digits are ValueErrors
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise ConfigError(f"{path} is not TOML: {reason}") from None
    for name, table in tables.items():
        if name not in COMMANDS or not isinstance(table, dict):
            told = ", ".join(f"[{command}]" for command in COMMANDS)
            raise ConfigError(f"{path}: {one_line(name)} is none of its tables, {told}{parsers.hint(name, COMMANDS)}")
    return tables


def _of_environment(command: str, parser: parsers.Parser, environment: "Mapping[str, str]") -> "dict[str, Setting]":
    prefix = variable(command, "")
    given = {name: value for name, value in environment.items() if name.startswith(prefix) and value}
    if not given:
        return {}
    known, found = {variable(command, name): action for name, action in options(parser).items()}, {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{one_line(name)} stands for no option of `zse {command}`{parsers.hint(name, known)}")
        action = known[name]
        read: Any = value.split(",") if is_list(action) else value
        if action.nargs == 0:  # a flag
            read = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(value.lower())
            if read is None:
                raise ConfigError(f"{name}: {one_line(value)!r} is not true or false")
        found[action.dest] = Setting(_value(parser, action, read, name), name)
    return found


def _value(parser: parsers.Parser, action: argparse.Action, value: "Any", where: str) -> "Any":
    """What the parser would make of a value that a file or the environment gives. Raises ConfigError, which says
    where."""
    if action.nargs == 0:
        if type(value) is not bool:
            raise ConfigError(f"{where}: it takes true or false")
        return (
            value if isinstance(action, argparse.BooleanOptionalAction) else action.const if value else not action.const
        )
    if is_list(action):
        if not isinstance(value, list):
            value = [value]
        read = [_text(parser, action, one, where) for one in value]
        return ",".join(read) if type(action).__name__ == "_Joined" else read
    return _text(parser, action, value, where)


def _text(parser: parsers.Parser, action: argparse.Action, value: "Any", where: str) -> "Any":
    if type(value) not in (str, int, float):
        raise ConfigError(f"{where}: it takes one text or number")
    try:
        read = parser._get_value(action, str(value))
        parser._check_value(action, read)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    return read


def _merged(
    file: "dict[str, Setting]", told: "dict[str, Setting]", environment: "Mapping[str, str]"
) -> "dict[str, Setting]":
    for dest, switch in SWITCHES.items():
        if environment.get(switch):
            file.pop(dest, None)
    for dest in told:
        _drop_rivals(dest, file)
    return {**file, **told}


def _drop_rivals(dest: str, of: "dict[str, Setting]") -> None:
    for group in RIVALS:
        for rival in group if dest in group else ():
            if rival != dest:
                of.pop(rival, None)


def _parse_over(parser: parsers.Parser, argv: list[str], values: "dict[str, Setting]") -> argparse.Namespace:
    """The command line, and below it what was found."""
    defaults = {action.dest: action.default for action in parser._actions}
    absent: dict[str, list] = {
        action.dest: [] for action in parser._actions if action.nargs == "*"
    }  # as argparse has it
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # what the command line does not give is not there
    try:
        args = parser.parse_strict(argv)
    finally:
        for action in parser._actions:
            action.default = defaults[action.dest]
    sources = dict.fromkeys(vars(args), "command line")
    for dest in sources:
        _drop_rivals(dest, values)
    for dest, default in defaults.items():
        if dest in values and dest not in sources:
            setattr(args, dest, values[dest].value)
            sources[dest] = values[dest].source
        elif dest not in sources and default is not argparse.SUPPRESS:
            setattr(args, dest, absent.get(dest, default))
    args.sources = sources
    return args


def explained(command: str, parser: parsers.Parser, argv: list[str]) -> "list[tuple[str, Any, str]]":
    """(option, value, source) of every option of a command line, in the order of its help."""
    args = parse(command, parser, argv, told=True)
    rows: dict[str, tuple[str, Any, str]] = {}
    for name, action in options(parser).items():
        value, source = getattr(args, action.dest), args.sources.get(action.dest, "default")
        switch = SWITCHES.get(action.dest)
        if switch and source == "default" and os.environ.get(switch):
            value, source = os.environ[switch], switch
        rows.setdefault(action.dest, (name, "(set)" if action.dest in SECRETS and value else value, source))
    return list(rows.values())
