"""zse unload: end a model's engine in a server that runs."""

import sys

from zse.cli.parser import FLAG, Group, arg, option
from zse.cli.remote import KEY, SERVER, server_of

ARGUMENTS = (
    arg("model", metavar="MODEL", help="a name that the server serves"),
    Group(
        "how",
        (
            option("--force", FLAG, "end the requests that use it; otherwise they are in the way"),
            option("--remove", FLAG, "serve it no more; its requests end first, its files stay"),
        ),
        True,
    ),
    SERVER,
    KEY,
)


def run(args) -> int:
    server = server_of(args)
    if args.remove:
        left = server.ask("DELETE", f"/admin/models/{args.model}")["requests"]
        sys.stdout.write(f"{args.model} is removed{f' once {left} requests have ended' if left else ''}\n")
        return 0
    server.ask("POST", f"/admin/models/{args.model}/unload", {"force": args.force})
    sys.stdout.write(f"{args.model} is unloaded; the next request loads it again\n")
    return 0
