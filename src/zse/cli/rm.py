"""zse rm: delete models from the store."""

import sys

from zse.cli.parser import FLAG, arg, option
from zse.cli.terminal import size
from zse.errors import ConfigError
from zse.formats import store

ARGUMENTS = (arg("models", metavar="MODEL", nargs="+", help="a stored name"), option("-y --yes", FLAG, "do not ask"))


def run(args) -> int:
    for name in args.models:
        store.removable(name)  # before the question
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError("zse rm asks before it deletes, and stdin is not a terminal; pass -y")
        answer = input(f"delete {', '.join(args.models)}? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing deleted")
            return 1
    for name in args.models:
        print(f"deleted {name}: {size(store.remove(name))} freed")
    return 0
