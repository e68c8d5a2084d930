"""argparse with this program's manners: whole option names, one error line, a hint for a misspelled option."""

import argparse
import os
from collections import namedtuple

from zse.cli import aliases
from zse.engine import config
from zse.errors import ConfigError, one_line
from zse.lazy import difflib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn, TypeAlias

    Argument = tuple[tuple[str, ...], dict[str, Any]]
    Arguments: TypeAlias = "Iterable[Argument | Group | Kinds | Callable[[Any], None]]"


class Parser(argparse.ArgumentParser):
    """`zse COMMAND`'s parser. A usage error is a ConfigError, shown like every other error: one line, exit code 2."""

    def __init__(self, **options):
        options.setdefault("formatter_class", _formatter)
        super().__init__(allow_abbrev=False, **options)

    def parse_strict(self, argv: list[str]) -> argparse.Namespace:
        """parse_args(), with the names of zse.cli.aliases, and a hint for what is not known."""
        known = {name for action in self._all_actions() for name in action.option_strings}
        if self._subparsers is None:
            if any(word[:1] == "-" and word.partition("=")[0] not in known for word in argv):
                argv = aliases.translate(argv, known)
            # Intermixed: otherwise PROMPT after an option (`zse run MODEL --raw PROMPT`) is an error of argparse's.
            args, unknown = self.parse_known_intermixed_args(argv)
        else:
            args, unknown = self.parse_known_args(argv)
        if unknown:
            option = next((word for word in unknown if word.startswith("-") and word != "-"), None)
            if option is None:
                self.error(f"unexpected argument {unknown[0]!r}")
            name = option.partition("=")[0]
            self.error(f"unknown option {name}{hint(name, [*known, *aliases.names(known)])}")
        return args

    def _all_actions(self):
        for action in self._actions:
            yield action
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._all_actions()

    def error(self, message: str) -> "NoReturn":
        hint = f" (see `{self.prog} --help`)" if self.add_help else ""
        raise ConfigError(message.removeprefix("argument ") + hint)


def _formatter(prog: str) -> argparse.HelpFormatter:
    """With the width given: otherwise argparse asks shutil at every add_argument(), an import of 8 ms."""
    try:
        width = os.get_terminal_size(1).columns
    except OSError:
        width = 120
    return argparse.RawDescriptionHelpFormatter(prog, width=max(60, min(width, 120)))


def hint(word: str, known: "Iterable[str]") -> str:
    """The known word that is most like `word`, as a question; or nothing. The dashes that all options begin with do not
    count: --bogus is not like --host."""
    bare = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-"), bare, n=1)
    return f"; did you mean {bare[close[0]]}?" if close else ""


def arg(*names: str, **settings: "Any") -> "tuple[tuple[str, ...], dict[str, Any]]":
    """A row of a command's table of arguments: what add_argument() takes. A default is told behind the help that does
    not."""
    if isinstance(settings.get("type"), Amount):
        settings.setdefault("metavar", settings["type"].shown)
    default, help = settings.get("default"), settings.get("help", "")
    if default and isinstance(default, int | float | str) and default is not True and "(default" not in help:
        told = f"{default:g}" if isinstance(default, float) else default
        settings["help"] = f"{help} (default: {told})"
    return names, settings


FLAG, SWITCH = "flag", "switch"  # kinds of option(): given or not; --NAME or --no-NAME


class ReadBy(namedtuple("ReadBy", "read metavar")):
    """A kind of option(): what reads the value, and what stands for it in the help."""

    __slots__ = ()


class Many(namedtuple("Many", "metavar")):
    """A kind of option(): a text, and the option may be repeated."""

    __slots__ = ()


def option(
    names: str,
    kind: "str | tuple[str, ...] | Amount | ReadBy | Many",
    help: str,
    default: "Any" = None,
    **settings: "Any",
) -> "Argument":
    """A row of a command's table of arguments that is an option. names: with a space between. kind: FLAG, SWITCH, an Amount, a
    ReadBy, a Many, the words that it takes, or what stands for a text in the help. default: None: what the help says."""
    settings["help"] = help
    if kind in (FLAG, SWITCH):
        settings["action"] = "store_true" if kind == FLAG else argparse.BooleanOptionalAction
    elif isinstance(kind, Amount):
        settings["type"] = kind
    elif isinstance(kind, ReadBy):
        settings |= {"type": kind.read, "metavar": kind.metavar}
    elif isinstance(kind, Many):
        settings |= {"action": "append", "metavar": kind.metavar, "default": []}
    else:
        settings["metavar" if isinstance(kind, str) else "choices"] = kind
    if default is not None:
        settings["default"] = default
    return arg(*names.split(), **settings)


class Group(namedtuple("Group", "title arguments is_exclusive", defaults=(False,))):
    """Arguments under a title of their own; is_exclusive: of which one at most may be given."""

    __slots__ = ()


class Kinds(namedtuple("Kinds", "kinds")):
    """Subcommands: KIND → (what it does, its arguments). The chosen one is `args.kind`."""

    __slots__ = ()


def add(parser: "Any", arguments: "Arguments") -> None:
    """Add the rows of a table of arguments to a parser: arg(), Group, Kinds, or a function that takes the parser."""
    for row in arguments:
        if isinstance(row, Group):
            add(
                parser.add_mutually_exclusive_group() if row.is_exclusive else parser.add_argument_group(row.title),
                row.arguments,
            )
        elif isinstance(row, Kinds):
            kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
            for name, (text, inner) in row.kinds.items():
                add(kinds.add_parser(name, help=text, description=text), inner)
        elif callable(row):
            row(parser)
        else:
            parser.add_argument(*row[0], **row[1])


class Amount:
    """An argparse type: int or float within [low, high], or greater than `above`. NaN is refused. shown: what stands
    for the value in the help."""

    def __init__(self, kind: type, low=None, high=None, above=None, shown: str = "N"):
        self.kind, self.low, self.high, self.above, self.shown = kind, low, high, above, shown

    def __call__(self, text: str):
        try:
            value = self.kind(text)
        except ValueError:
            value = float("nan")
        # Written so that NaN, which compares false, is refused.
        is_low_enough = abs(value) < float("inf") and (self.high is None or value <= self.high)
        if is_low_enough and (self.low is None or value >= self.low) and (self.above is None or value > self.above):
            return value
        wanted = "a whole number" if self.kind is int else "a number"
        limits = [(self.low, "at least"), (self.above, "more than"), (self.high, "at most")]
        told = " and".join(f" {words} {limit}" for limit, words in limits if limit is not None)
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}{told}")


DEVICE = option(
    "--device",
    "auto|cpu|cuda|hip|metal",
    "whose memory a file of a catalog model should fit (default: the first usable GPU's, else RAM)",
    "auto",
)
CONFIG = option(
    "--config",
    "FILE",
    "a TOML file with values of these options (default: ZSE_CONFIG, else zse.toml under ZSE_HOME, if it is there); none: no file",
)
JSON = option("--json", FLAG, "print JSON")
MODEL = arg("model", metavar="MODEL", help="a name, hf:ORG/NAME, or a path")
MODEL_FILE = arg(
    "model", metavar="MODEL", help="a stored name, or the path of a .zse, .gguf or .safetensors file or a folder"
)


def page_size(text: str) -> int:
    """argparse type: auto (0), 16, 32, 64 or 128."""
    if text == "auto":
        return 0
    if text not in ("16", "32", "64", "128"):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, 16, 32, 64 or 128")
    return int(text)


def resident_layers(text: str) -> int:
    """argparse type: auto (AUTO_LAYERS), or a number of layers."""
    return config.AUTO_LAYERS if text in ("auto", str(config.AUTO_LAYERS)) else Amount(int, 0, 1 << 16)(text)


def draft_vocabulary(text: str) -> int | None:
    """argparse type: auto (None), all (0), or a number of token ids."""
    return {"auto": None, "all": 0}[text] if text in ("auto", "all") else Amount(int, 1, 1 << 24)(text)


def mixed_ratio(text: str) -> float:
    """argparse type: 0, or a number from 1.1 to 1000."""
    return 0.0 if text == "0" else Amount(float, 1.1, 1000)(text)


def tenant_weight(text: str) -> str:
    """argparse type: NAME=W, a weight above 0 and at most 1000."""
    name, _, weight = text.rpartition("=")
    if not name or "," in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=WEIGHT")
    Amount(float, high=1000, above=0)(weight)
    return text


def memory_size(text: str) -> int:
    """argparse type: bytes from "6G", "5.5GiB", "800M" or a plain number; K, M, G, T are powers of 1024."""
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = "KMGT".find(digits[-1:]) + 1 if digits else 0
    try:
        value = float(digits[:-1] if unit else digits) * 1024**unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1 << 50:
        raise argparse.ArgumentTypeError(f"{one_line(text)!r} is not a size such as 6G or 800M")
    return int(value)


def some_memory(text: str) -> int:
    """argparse type: as memory_size, or 0."""
    return 0 if text.strip() == "0" else memory_size(text)


SIZE, SIZE_OR_0 = ReadBy(memory_size, "SIZE"), ReadBy(some_memory, "SIZE")
