"""zse ls: the models that can be served now, and those that can be pulled."""

import json
import sys

from zse.cli import terminal
from zse.formats import catalog as formats_catalog
from zse.formats import store


def add_arguments(parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args) -> int:
    stored, partials = store.entries(), store.partials()
    names = {model["name"] for model in stored}
    available = [entry for entry in formats_catalog.CATALOG.values() if entry.name not in names]
    if args.json:
        catalog = [
            {"name": entry.name, "download_bytes": entry.download_bytes, "summary": entry.summary}
            for entry in available
        ]
        print(json.dumps({"stored": stored, "partial": partials, "catalog": catalog}, indent=1))
        return 0
    rows = [("MODEL", "SIZE", "STATE", "LICENCE")]
    rows += [(model["name"], terminal.size(model["bytes"]), "stored", model["licence"] or "-") for model in stored]
    rows += [(part["name"], terminal.size(part["bytes"]), "partial: pull again to resume", "-") for part in partials]
    resumed = {part["name"] for part in partials}
    rows += [
        (entry.name, terminal.size(entry.download_bytes), "can be pulled", entry.licence)
        for entry in available
        if entry.name not in resumed
    ]
    sys.stdout.write(terminal.table(rows))
    return 0
