"""zse rm: delete models from the store."""

import sys

from zse.cli import terminal
from zse.errors import ConfigError
from zse.formats import store


def add_arguments(parser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a stored name")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(args) -> int:
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError("zse rm asks before it deletes, and stdin is not a terminal; pass -y")
        answer = input(f"delete {', '.join(args.models)}? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing deleted")
            return 1
    for name in args.models:
        print(f"deleted {name}: {terminal.size(store.remove(name))} freed")
    return 0
