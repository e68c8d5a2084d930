"""zse config: what the options of a command are, from defaults, file, environment and command line together."""

import argparse
import json
import sys

from zse.cli import main, settings
from zse.cli.parser import JSON, Kinds, arg
from zse.cli.terminal import notice, table
from zse.errors import ConfigError

EPILOG = """examples:
  zse config show
  zse config show --json serve qwen3-4b --port 9000
  ZSE_SERVE_PORT=9000 zse config show serve --config ./zse.toml

A file has a table for each command, with the names of its options:

  [serve]
  models = ["smollm2", "qwen3-4b"]
  host = "0.0.0.0"
  api-key-file = "/etc/zse/keys"
  max-context = 8192
  idle-timeout = 600
  no-prefix-cache = false

The environment has ZSE_SERVE_MAX_CONTEXT and so on; lists have commas between. The command line wins over the environment, that over the
file. A running server reads the file again on SIGHUP and says in its log what it takes and what waits for a restart."""

ARGUMENTS = (
    Kinds(
        {
            "show": (
                "the value of every option, and where it comes from",
                (
                    JSON,
                    arg(
                        "words",
                        nargs=argparse.REMAINDER,
                        metavar="COMMAND",
                        help=f"of {', '.join(settings.COMMANDS)}, and what is typed behind it (default: serve)",
                    ),
                ),
            )
        }
    ),
)


def run(args) -> int:
    command, *argv = args.words or ["serve"]
    if command not in settings.COMMANDS:
        raise ConfigError(f"{command} has no file: the commands are {', '.join(settings.COMMANDS)}")
    rows = settings.explained(command, main.parser_of(command), argv)
    path = settings.config_path(argv)
    if args.json:
        shown = {name: {"value": value, "source": source} for name, value, source in rows}
        print(json.dumps({"command": command, "file": path, "options": shown}, indent=1, default=str))
        return 0
    sys.stdout.write(table([("OPTION", "VALUE", "FROM"), *((name, _text(value), at) for name, value, at in rows)]))
    notice(f"file: {path or 'none'}")
    return 0


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None or value == "" else str(value)
