"""zse launch: the settings by which a coding agent or a chat front end uses a server that runs."""

import json
import os
import sys

from zse import env, trust
from zse.cli.agents import AGENTS, Endpoint, exports
from zse.cli.parser import FLAG, arg, option
from zse.cli.remote import KEY, SERVER, server_of
from zse.errors import ConfigError

EPILOG = """examples:
  zse launch claude                        what Claude Code needs: variables, and its settings file
  zse launch codex qwen3-8b --write        writes ~/.codex/zse.config.toml; then: codex --profile zse
  eval "$(zse launch aider --env)"         the variables alone, for this shell

--write adds to a JSON file that is there and leaves a YAML or TOML file that is there alone. Files that it writes are 0600: a key may
stand in them."""

ARGUMENTS = (
    arg("agent", metavar="AGENT", choices=tuple(AGENTS), help=", ".join(AGENTS)),
    arg("model", nargs="?", metavar="MODEL", help="the model that it is to use (default: the server's first)"),
    option("--write", FLAG, "write its settings file"),
    option("--env", FLAG, "print only the variables, for a shell"),
    SERVER,
    KEY,
)
NO_KEY = "none"  # clients ask for a key even where the server wants none


def run(args) -> int:
    agent = AGENTS[args.agent]
    settings = agent.settings(_target(args))
    if args.env:
        if not settings.env:
            raise ConfigError(f"{agent.title} takes no variables; see zse launch {args.agent}")
        sys.stdout.write(exports(settings.env))
        return 0
    out = [f"# {agent.title}; its settings: {agent.docs}\n"]
    if args.write:
        if not settings.path:
            raise ConfigError(f"{agent.title} has no settings file to write; see zse launch {args.agent}")
        path = os.path.abspath(os.path.expanduser(settings.path))
        _write(path, settings)
        out.append(f"wrote {path}\n")
    elif settings.path:
        out.append(f"# {settings.path}\n{settings.text()}\n")
    if settings.panel:
        out += [f"{name}: {value}\n" for name, value in settings.panel.items()]
    if settings.env:
        out.append(exports(settings.env))
    if settings.start:
        out.append(f"{settings.start}\n")
    sys.stdout.write("".join(out))
    return 0


def _target(args) -> Endpoint:
    """What the server says of the model. Raises ConfigError, ZSEError."""
    server = server_of(args)
    models = server.ask("GET", "/v1/models")["data"]
    found = next((model for model in models if args.model in (None, model["id"])), None)
    if found is None:
        names = ", ".join(model["id"] for model in models) or "none"
        raise ConfigError(f"{server.url} serves no model {args.model or ''}; it serves: {names}")
    key = args.api_key or env.get("ZSE_API_KEY") or NO_KEY
    return Endpoint(server.url, found["id"], key, found.get("max_model_len"))


def _write(path: str, settings) -> None:
    """The file, whole or as it was. Of a JSON file that is there all other settings stay. Raises ConfigError."""
    text = settings.text()
    if os.path.lexists(path):
        if not path.endswith(".json"):
            raise ConfigError(f"{path} is there already; add what `zse launch` prints, or move it away")
        try:
            with open(path, encoding="utf-8") as file:
                before = json.load(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: not JSON that can be added to ({error})") from None
        if not isinstance(before, dict):
            raise ConfigError(f"{path}: not a JSON object")
        text = json.dumps(_merged(before, settings.value), indent=2) + "\n"
        path = os.path.realpath(path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        trust.write_whole(path, text.encode(), 0o600, sync=False)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _merged(old: dict, new: dict) -> dict:
    both = {
        key: _merged(old[key], value)
        for key, value in new.items()
        if isinstance(old.get(key), dict) and isinstance(value, dict)
    }
    return old | new | both
