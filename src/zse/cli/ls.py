"""zse ls: the models that can be served now, and those that can be pulled."""

import json
import sys

from zse.cli.parser import DEVICE, FLAG, JSON, option
from zse.cli.terminal import notice, size, table
from zse.formats import catalog, fit, store
from zse.formats.catalog import CATALOG, CatalogEntry, HubModel

ARGUMENTS = (
    option("--available", FLAG, "all names that can be pulled: parameters, licence, download, whether it fits"),
    DEVICE,
    JSON,
)


def run(args) -> int:
    return _available(args) if args.available else _stored(args)


def _stored(args) -> int:
    stored, partials = store.entries(), store.partials()
    names = {model["name"] for model in stored}
    available = [entry for entry in CATALOG.values() if entry.name not in names]
    if args.json:
        shown = [{name: getattr(entry, name) for name in ("name", "download_bytes", "summary")} for entry in available]
        print(json.dumps({"stored": stored, "partial": partials, "catalog": shown}, indent=1))
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
    notice(f"{len(catalog.HUB_MODELS)} more can be pulled: zse ls --available")
    return 0


def _available(args) -> int:
    memory = fit.memory_for(args.device)
    models: list[dict] = []
    rows = [("MODEL", "PARAMETERS", "DOWNLOAD", "FITS", "LICENCE")]
    entries: list[CatalogEntry | HubModel] = [*CATALOG.values(), *catalog.HUB_MODELS.values()]
    for entry in entries:
        if isinstance(entry, HubModel):
            tag = fit.best(entry, memory)
            file = tag or entry.quantizations.split()[-1]
            nbytes, fits, source = entry.nbytes(file), tag is not None, entry.source(file)
            download = f"≈ {size(nbytes)} {file}"
        else:
            file, nbytes, source = entry.filename, entry.download_bytes, entry.source
            fits, download = entry.size <= fit.MOST * memory.nbytes, size(nbytes)
        models.append(
            {"name": entry.name, "billions": entry.billions, "file": file, "download_bytes": nbytes, "fits": fits,
             "licence": entry.licence, "source": source}
        )  # fmt: skip
        rows.append((entry.name, parameters(entry.billions), download, "yes" if fits else "no", entry.licence))
    if args.json:
        print(json.dumps({"memory_bytes": memory.nbytes, "memory_of": memory.owner, "models": models}, indent=1))
        return 0
    sys.stdout.write(table(rows))
    notice(f"fits: weights take at most {fit.MOST:.0%} of {memory}; `zse show NAME` lists a model's other files")
    return 0


def parameters(billions: float) -> str:
    """A number of parameters for people: 0.6 B, 270 M."""
    return f"{billions:.3g} B" if billions >= 0.5 else f"{1000 * billions:.0f} M"
