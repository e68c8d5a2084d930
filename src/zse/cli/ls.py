"""zse ls: the models that can be served now, and those that can be pulled."""

import json
import sys

from zse.cli.parser import JSON
from zse.cli.terminal import size, table
from zse.formats import store
from zse.formats.catalog import CATALOG

ARGUMENTS = (JSON,)


def run(args) -> int:
    stored, partials = store.entries(), store.partials()
    names = {model["name"] for model in stored}
    available = [entry for entry in CATALOG.values() if entry.name not in names]
    if args.json:
        catalog = [
            {"name": entry.name, "download_bytes": entry.download_bytes, "summary": entry.summary}
            for entry in available
        ]
        print(json.dumps({"stored": stored, "partial": partials, "catalog": catalog}, indent=1))
        return 0
    rows = [("MODEL", "SIZE", "STATE", "LICENCE")]
    rows += [(model["name"], size(model["bytes"]), "stored", model["licence"] or "-") for model in stored]
    rows += [(part["name"], size(part["bytes"]), "partial: pull again to resume", "-") for part in partials]
    resumed = {part["name"] for part in partials}
    rows += [
        (entry.name, size(entry.download_bytes), "can be pulled", entry.licence)
        for entry in available
        if entry.name not in resumed
    ]
    sys.stdout.write(table(rows))
    return 0
