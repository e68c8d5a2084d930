"""zse keys: the API keys in the server's database, which a server that runs sees within a second, and what they
used."""

import json
import os
import time
from argparse import ArgumentTypeError
from functools import partial

from zse.cli.parser import JSON, SWITCH, Amount, Kinds, ReadBy, arg, option
from zse.cli.terminal import notice, table
from zse.errors import ConfigError
from zse.formats import store
from zse.server import keys as key_files
from zse.server.database import connection, keys, usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

EPILOG = """examples:
  zse keys create alice                             prints the key, this once
  zse keys create batch --tenant alice --rpm 600 --tpm 200000 --weight 0.25
  zse keys create ci --models smollm2 --routes /v1/embeddings --expires 2027-01-31
  zse keys update alice --concurrency 8 --tpm none
  zse keys rotate alice                             prints a new key; the old one ends
  zse keys revoke ci
  zse keys usage alice --since 2027-01-01 --by day

`zse serve` uses the database when it is there (--database), and a server with a database asks every client for a key."""

ACTOR = "cli"  # in the audit log
# What takes a limit away.
_WITHOUT = {"models": "all", "routes": "all", "expires": "never"}


def _limit(field: str, text: str):
    """argparse type: a word of the key file, or what stands for no limit."""
    if text == _WITHOUT.get(field, "none"):
        return 0 if field in key_files.Quota._fields else None
    try:
        value = key_files.READERS[field](text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return sorted(value) if isinstance(value, frozenset) else value


def _name(text: str) -> str:
    """argparse type: a name as the key file has them."""
    if not key_files.NAME.fullmatch(text):
        raise ArgumentTypeError("a name is 1 to 64 letters, digits, '.', '_' and '-'")
    return text


def _time(text: str) -> float:
    """argparse type: seconds since 1970."""
    try:
        return key_files.READERS["expires"](text)
    except ValueError as error:
        raise ArgumentTypeError(str(error).removeprefix("expires must be ")) from None


def _settings(*flags: str, help: str, field: str = "", **more):
    field = field or flags[0][2:].replace("-", "_")
    return arg(*flags, type=partial(_limit, field), default=..., help=help, **more)


_PRICE = Amount(float, 0, 1e9, shown="PRICE")
DATABASE = option("--database", "PATH", "(default: server.db in ZSE_HOME)")
NAMED = arg("name", metavar="NAME", help="its name, or the beginning of the key that `zse keys ls` shows")
SETTINGS = (
    option("--tenant", ReadBy(_name, "NAME"), "who owns its cached prompts (default: its name)", ...),
    option("--admin", SWITCH, "it may read the figures of all and change keys", ...),
    _settings("--models", metavar="NAME,…|all", help="models that it may use"),
    _settings("--routes", metavar="PATH,…|all", help="routes that it may use, such as /v1/embeddings"),
    _settings("--rpm", metavar="N|none", help="requests a minute"),
    _settings("--tpm", metavar="N|none", help="tokens a minute, of prompts and answers"),
    _settings("--concurrency", metavar="N|none", help="answers at once"),
    _settings("--weight", metavar="W|none", help="of its share of queue and engine (default: 1)"),
    _settings("--expires", metavar="DATE|never", help="YYYY-MM-DD or YYYY-MM-DDTHH:MMZ: from then on it is no key"),
    option("--input-price", _PRICE, "of a million tokens of prompts, for the cost in its usage", default=...),
    option("--cached-price", _PRICE, "of those in the prefix cache (default: as --input-price)", default=...),
    option("--output-price", _PRICE, "of a million tokens of answers", default=...),
)
ARGUMENTS = (
    Kinds(
        {
            "create": (
                "make a key and print it, this once",
                (arg("name", type=_name, metavar="NAME", help="of the key"), *SETTINGS, DATABASE, JSON),
            ),
            "ls": ("list the keys, without their text", (DATABASE, JSON)),
            "update": ("change what a key may do", (NAMED, *SETTINGS, DATABASE, JSON)),
            "revoke": ("end a key; answers that run with it end, too", (NAMED, DATABASE, JSON)),
            "usage": (
                "show what keys used: requests, tokens, times, costs",
                (
                    arg("key", nargs="?", metavar="NAME", help="of one key (default: all)"),
                    option("--since", ReadBy(_time, "DATE"), "from this hour on: YYYY-MM-DD or YYYY-MM-DDTHH:MMZ"),
                    option("--until", ReadBy(_time, "DATE"), "before this hour"),
                    option("--by", tuple(usage.PERIODS), "a row for each, or for all together", "all"),
                    DATABASE,
                    JSON,
                ),
            ),
            "audit": (
                "show who changed keys, the latest change first",
                (option("--last", Amount(int, 1, 1 << 20), "changes", 50), DATABASE, JSON),
            ),
            "rotate": ("give a key a new text and print it, this once; the old one ends", (NAMED, DATABASE, JSON)),
        }
    ),
)


def run(args) -> int:
    path = os.path.abspath(os.path.expanduser(args.database or store.database_path()))
    if args.kind != "create" and not os.path.exists(path):
        raise ConfigError(f"there is no database {path} yet; `zse keys create NAME` makes it")
    changes = {name: value for name, value in vars(args).items() if name in keys.CHANGEABLE and value is not ...}
    if args.kind == "update" and not changes:
        raise ConfigError("nothing to change; `zse keys update --help` lists what can be")
    try:
        with connection.Database(path) as database:
            return _done(args, changes, database)
    except connection.StorageError as error:
        raise ConfigError(f"the database {path}: {error.reason}") from None


def _done(args, changes: dict, database: connection.Database) -> int:
    if args.kind in ("ls", "usage", "audit"):
        now, rows, shown = time.time(), [], []
        if args.kind == "ls":
            found = database.now(keys.listed, writes=False)
            rows, shown = _key_rows(found, now), [key.public(now) for key in found]
        elif args.kind == "usage":
            read = partial(usage.totals, since=args.since, until=args.until, key=args.key, by=args.by)
            used = database.now(read, writes=False)
            rows, shown = _usage_rows(used), list(map(_fields, used))
        else:
            lines = database.now(partial(keys.audit, last=args.last), writes=False)
            rows, shown = _audit_rows(lines), list(map(_fields, lines))
        print(json.dumps(shown, indent=1) + "\n" if args.json else table(rows), end="")
        return 0
    work = partial(getattr(keys, "change" if args.kind == "update" else args.kind), name=args.name, actor=ACTOR)
    done = database.now(partial(work, **changes))
    key, text = done if isinstance(done, tuple) else (done, "")
    if args.json:
        print(json.dumps(key.public(time.time()) | ({"key": text} if text else {}), indent=1))
        return 0
    if text:
        print(text)
    notice(f"{key.name}: {key.state(time.time())}, {_about(key)}" + ("; the key is not shown again" if text else ""))
    return 0


def _fields(row: "Any") -> dict:
    return {name: getattr(row, name) for name in row.__struct_fields__}


def _key_rows(found: "Iterable[keys.StoredKey]", now: float) -> list[tuple[str, ...]]:
    rows = [(key.name, key.tenant, key.prefix + "…", key.state(now), _about(key)) for key in found]
    return [("NAME", "TENANT", "KEY", "STATE", "MAY"), *rows]


def _usage_rows(found: "Iterable[usage.UsageTotals]") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("TIME", "TENANT", "KEY", "MODEL", "REQUESTS", "PROMPT", "CACHED", "ANSWERS", "FIRST MS", "MS", "COST")
    ]
    for row in found:
        counts = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
        times = ("-" if ms is None else f"{ms:.0f}" for ms in (row.mean_first_token_ms, row.mean_ms))
        at = "all" if row.at is None else _told(row.at)
        rows.append((at, row.tenant or "-", row.key or "-", row.model, *map(str, counts), *times, f"{row.cost:.4f}"))
    return rows


def _audit_rows(lines: "Iterable[keys.AuditLine]") -> list[tuple[str, ...]]:
    rows = [(_told(line.at), line.actor, line.action, line.subject, json.dumps(line.detail)) for line in lines]
    return [("TIME", "BY", "WHAT", "KEY", "DETAIL"), *rows]


def _told(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _about(key: keys.StoredKey) -> str:
    """What a key may do, in words of the key file."""
    words = ["admin"] * key.admin
    words += [f"{name}={','.join(of)}" for name in ("models", "routes") if (of := getattr(key, name)) is not None]
    words += [f"{name}={of:g}" for name in ("rpm", "tpm", "concurrency", "weight") if (of := getattr(key, name))]
    if key.expires is not None:
        words.append(f"expires={_told(key.expires)}")
    return " ".join(words) or "all models and routes, without limits"
