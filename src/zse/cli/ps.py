"""zse ps: the servers of this user that run, and their models."""

import json
import sys

from zse.cli.parser import FLAG, JSON, option
from zse.cli.remote import KEY, SERVER, RemoteServer
from zse.cli.terminal import notice, size, table
from zse.errors import ZSEError
from zse.server import presence

EPILOG = """examples:
  zse ps
  zse ps --server http://10.0.0.7:8000 --api-key $KEY

Each server leaves its address in ZSE_HOME/servers/ while it runs, in a file that its user alone can read."""

ARGUMENTS = (SERVER, KEY, JSON, option("-q --quiet", FLAG, "names of loaded models only"))


def run(args) -> int:
    urls = [args.server] if args.server else [server["url"] for server in presence.running()]
    found, failed = [], False
    for url in urls:
        try:
            found.append({"server": url} | RemoteServer(url, args.api_key).ask("GET", "/admin/models"))
        except ZSEError as error:
            failed = True
            notice(f"zse: error: {error}")
    if args.json:
        print(json.dumps(found, indent=1))
    elif args.quiet:
        print(
            *(model["name"] for server in found for model in server["models"] if model["state"] == "loaded"), sep="\n"
        )
    elif found:
        rows: list[tuple[str, ...]] = [("SERVER", "MODEL", "STATE", "MEMORY", "REQUESTS", "IDLE", "STAYS")]
        rows += [_row(server["server"], model) for server in found for model in server["models"]]
        sys.stdout.write(table(rows))
    elif not failed:
        notice("no server of this user runs here; start one: zse serve MODEL")
    return int(failed)


def _row(url: str, model: dict) -> tuple[str, ...]:
    state = model["state"]
    if model["progress"] is not None:
        state += f" {model['progress']:.0%}"
    memory, idle, stays = model["memory_bytes"], model["idle_s"], model["keep_alive_s"]
    return (
        url,
        model["name"],
        state,
        size(sum(memory.values())) if memory else "-",
        str(model["requests"]),
        f"{idle:.0f} s" if idle is not None else "-",
        f"{stays:g} s" if stays is not None else "for ever",
    )
