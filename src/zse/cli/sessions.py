"""zse sessions: the conversations that a server keeps for requests with a session_id."""

import json
import sys
from datetime import datetime
from urllib.parse import quote

from zse.cli.parser import FLAG, JSON, Kinds, arg, option
from zse.cli.remote import SERVER, server_of
from zse.cli.terminal import notice, size, table
from zse.errors import ZSEError

EPILOG = """examples:
  zse sessions ls
  zse sessions rm chat-1
  zse sessions rm --all --server http://10.0.0.7:8000 --api-key $KEY

They are those of the key's tenant. What a model computed for them is in the prefix cache and, with --cache-disk, in
files; rm removes it with them, but for beginnings that others have, too."""

NEEDS = "a key whose tenant has them"
PAGE = 100  # sessions that the server lists at once
_KEY = option(
    "--api-key", "KEY", "the key whose tenant's they are, where the server asks for one (default: ZSE_API_KEY)"
)
ARGUMENTS = (
    Kinds(
        {
            "ls": (
                "list the sessions, the last used first",
                (SERVER, _KEY, JSON, option("-q --quiet", FLAG, "names only")),
            ),
            "rm": (
                "remove sessions",
                (
                    arg("sessions", nargs="*", metavar="SESSION", help="names"),
                    option("--all", FLAG, "all of them"),
                    SERVER,
                    _KEY,
                ),
            ),
        }
    ),
)


def run(args) -> int:
    return {"ls": _ls, "rm": _rm}[args.kind](args)


def _listed(server) -> list[dict]:
    """All that there are."""
    found: list[dict] = []
    while True:
        after = f"&after={quote(found[-1]['id'], safe='')}" if found else ""
        page = server.ask("GET", f"/v1/sessions?limit={PAGE}{after}")
        found += page["data"]
        if not page["has_more"]:
            return found


def _ls(args) -> int:
    found = _listed(server_of(args, NEEDS))
    if args.json:
        print(json.dumps(found, indent=1))
    elif args.quiet:
        sys.stdout.write("".join(f"{session['id']}\n" for session in found))
    elif found:
        rows: list[tuple[str, ...]] = [("SESSION", "TURNS", "SIZE", "LAST USED", "EXPIRES")]
        rows += [
            (
                session["id"],
                str(session["turns"]),
                size(session["bytes"]),
                _time(session["last_used_at"]),
                _time(session["expires_at"]),
            )
            for session in found
        ]
        sys.stdout.write(table(rows))
    else:
        notice("there are no sessions")
    return 0


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _rm(args) -> int:
    if bool(args.sessions) == args.all:
        notice("zse: error: name the sessions to remove, or give --all")
        return 2
    server, failed = server_of(args, NEEDS), False
    for id in args.sessions or [session["id"] for session in _listed(server)]:
        try:
            server.ask("DELETE", f"/v1/sessions/{id}")
            sys.stdout.write(f"{id} is removed\n")
        except ZSEError as error:
            failed = True
            notice(f"zse: error: {id}: {error}")
    return int(failed)
