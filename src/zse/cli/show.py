"""zse show: where a model came from, its terms, its files."""

import json
import sys
from contextlib import suppress

from zse.cli.ls import parameters
from zse.cli.parser import DEVICE, JSON, arg
from zse.cli.terminal import size, table
from zse.errors import FormatError, UnsupportedError
from zse.formats import catalog, fit, opening, store
from zse.formats.catalog import CatalogEntry
from zse.formats.recommended import recommended

ARGUMENTS = (arg("model", metavar="MODEL", help="a stored or catalog name"), DEVICE, JSON)


def run(args) -> int:
    facts = _facts(args.model, args.device)
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    rows = [
        (key, size(value) if key.endswith("bytes") else str(value))
        for key, value in facts.items()
        if key != "files" and value
    ]
    sys.stdout.write(table(rows))
    for file in facts["files"]:
        print(f"  {file['sha256']}  {size(file['size']):>9}  {file['name']}")
    return 0


def _facts(name: str, device: str) -> dict:
    """What is known of the model: from the catalog, from the store, or both."""
    stored = store.describe(name)
    entry = catalog.find(name)
    if stored is None and entry is None:
        store.resolve(name)  # raises for an unknown name
        return {"name": name, "state": "a path: see zse info", "files": []}
    facts: dict = {"name": name, "state": "stored" if stored else "in the catalog, not pulled"}
    if entry:
        facts |= {"parameters": parameters(entry.billions), "licence": entry.licence}
    if isinstance(entry, CatalogEntry):
        facts |= {"summary": entry.summary, "source": entry.source}
    values, place = (entry.sampling, "the catalog") if entry else ({}, "")
    if stored:
        with suppress(FormatError, UnsupportedError), opening.open_model(store.resolve(name)) as file:
            values, place = recommended(file)
    if values:
        facts["sampling"] = f"{', '.join(f'{name} {value:g}' for name, value in values.items())} (by {place})"
    if stored:
        facts |= {key: value for key, value in stored.items() if value is not None}
    elif isinstance(entry, CatalogEntry):
        facts |= {
            "download_bytes": entry.download_bytes,
            "bytes": entry.size,
            "files": [{"name": entry.filename, "size": entry.size, "sha256": entry.sha256}],
        }
    elif entry:
        memory = fit.memory_for(device)
        facts |= {
            "repository": f"hf:{entry.gguf}",
            "weights": entry.weights and f"hf:{entry.weights}",
            "files to choose": ", ".join(f"{tag} ≈ {size(entry.nbytes(tag))}" for tag in entry.tags),
            "zse pull takes": f"{fit.best(entry, memory) or 'none: none fits'} ({memory})",
            "files": [],
        }
    return facts
