"""zse info: what is inside a model file, from its headers only."""

import json
import sys

from zse.cli.parser import FLAG, MODEL_FILE, option
from zse.cli.terminal import printable, size, table
from zse.errors import FormatError, UnsupportedError
from zse.formats import store
from zse.formats.info import info
from zse.formats.opening import open_model
from zse.models.load import read_config

ARGUMENTS = (
    MODEL_FILE,
    option("--tensors", FLAG, "list every tensor"),
    option("--metadata", FLAG, "list the file's own metadata"),
    option("--json", FLAG, "print JSON, always with tensors and metadata"),
)


def run(args) -> int:
    path = store.resolve(args.model)
    facts = info(path)
    facts["config"], facts["not_served_because"] = _config(path)
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts, args.tensors, args.metadata)
    return 0


def _config(path) -> tuple[dict | None, str | None]:
    """The numbers of the architecture, or why this model cannot be served: the file can still be looked at."""
    names = "architecture num_layers hidden_size num_heads num_kv_heads head_dim intermediate_size max_context"
    try:
        with open_model(path) as source:
            config = read_config(source)
    except (FormatError, UnsupportedError) as error:
        return None, str(error)
    return {name: getattr(config, name) for name in names.split()}, None


def _print(facts: dict, with_tensors: bool, with_metadata: bool) -> None:
    rows: list[tuple[str, ...]] = [
        ("path", facts["path"]),
        ("format", facts["kind"]),
        ("architecture", facts["architecture"]),
        ("size", size(facts["nbytes"])),
    ]
    rows += [("parameters", f"{facts['num_parameters'] / 1e6:.1f} M, {facts['bits_per_weight']:.2f} bits each")]
    rows += [("vocabulary", str(facts["vocab_size"])), ("chat template", "yes" if facts["chat_template"] else "no")]
    if facts["tokenizer"]:
        rows.append(("tokenizer", ", ".join(str(value) for value in facts["tokenizer"].values() if value)))
    rows += [
        (name.replace("_", " "), str(value))
        for name, value in (facts["config"] or {}).items()
        if name != "architecture"
    ]
    rows += [
        (f"made: {name.replace('_', ' ')}", _phrase(value)) for name, value in facts["provenance"].items() if value
    ]
    if facts["not_served_because"]:
        rows.append(("cannot be served", facts["not_served_because"]))
    sections: list[list[tuple[str, ...]]] = [rows]
    total = max(1, facts["num_parameters"])
    rows = [("TYPE", "TENSORS", "PARAMETERS", "SIZE")]
    for name, record in facts["types"].items():
        share = f"{record['parameters'] / 1e6:.1f} M ({100 * record['parameters'] / total:.0f} %)"
        rows.append((name, str(record["tensors"]), share, size(record["nbytes"])))
    sections.append(rows)
    if with_metadata:
        sections.append([("METADATA", ""), *((key, str(value)) for key, value in facts["metadata"].items())])
    if with_tensors:
        rows = [("TENSOR", "TYPE", "SHAPE", "SIZE")]
        rows += [(t["name"], t["type"], " × ".join(map(str, t["shape"])), size(t["nbytes"])) for t in facts["tensors"]]
        sections.append(rows)
    # Names and metadata are the file author's text.
    texts = (table([tuple(map(printable, row)) for row in rows]) for rows in sections)
    sys.stdout.write("\n".join(texts))


def _phrase(value: object) -> str:
    """Nested plain data as a short phrase: gguf, files: model.gguf, 98362432."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {_phrase(item)}" for name, item in value.items() if item is not None
        )
    if isinstance(value, list):
        return "; ".join(map(_phrase, value))
    return str(value)
