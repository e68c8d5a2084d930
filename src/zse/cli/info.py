"""zse info: what is inside a model file, from its headers only."""

HELP = "show what is inside a model: architecture, sizes, tensor types"


def add_arguments(parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a stored name, or the path of a .zse, .gguf or .safetensors file or a folder")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args) -> int:
    import json

    from zse.formats import store
    from zse.formats.source import open_model

    with open_model(store.resolve(args.model)) as source:
        facts = describe(source, with_tensors=args.tensors)
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts)
    return 0


def describe(source, with_tensors: bool) -> dict:
    """The facts of an open ModelSource as plain data. UnsupportedError for an architecture that cannot be served."""
    from zse.models.load import read_config

    config = read_config(source)
    types: dict[str, dict] = {}
    for tensor in source.tensors.values():
        record = types.setdefault(tensor.type, {"tensors": 0, "parameters": 0, "bytes": 0})
        record["tensors"] += 1
        record["parameters"] += tensor.num_elements
        record["bytes"] += tensor.nbytes
    names = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "max_context")
    facts = {
        "path": source.path,
        "format": source.kind,
        "architecture": config.architecture,
        "bytes": source.nbytes,
        "parameters": sum(record["parameters"] for record in types.values()),
        **{name: getattr(config, name) for name in names},
        "tokenizer": source.tokenizer.kind if source.tokenizer else None,
        "chat_template": source.chat_template is not None,
        "types": types,
    }
    if source.provenance:
        facts["provenance"] = source.provenance
    if with_tensors:
        facts["tensors"] = [{"name": t.name, "type": t.type, "shape": list(t.shape), "bytes": t.nbytes} for t in source.tensors.values()]
    return facts


def _print(facts: dict) -> None:
    import sys

    from zse.cli.terminal import size, table

    rows = []
    for name, value in facts.items():
        if name in ("types", "tensors", "provenance"):
            continue
        shown = size(value) if name == "bytes" else f"{value / 1e6:.1f} M" if name == "parameters" else str(value)
        rows.append((name.replace("_", " "), {"True": "yes", "False": "no", "None": "no"}.get(shown, shown)))
    rows += [(f"made: {name}", str(value)) for name, value in facts.get("provenance", {}).items()]
    sys.stdout.write(table(rows) + "\n")
    total = facts["parameters"] or 1
    rows = [("TYPE", "TENSORS", "PARAMETERS", "SIZE", "BITS A WEIGHT")]
    for name, record in facts["types"].items():
        share = f"{record['parameters'] / 1e6:.1f} M ({100 * record['parameters'] / total:.0f} %)"
        bits = f"{8 * record['bytes'] / max(1, record['parameters']):.2f}"
        rows.append((name, str(record["tensors"]), share, size(record["bytes"]), bits))
    sys.stdout.write(table(rows))
    if "tensors" in facts:
        rows = [("TENSOR", "TYPE", "SHAPE", "SIZE")]
        rows += [(t["name"], t["type"], " × ".join(map(str, t["shape"])), size(t["bytes"])) for t in facts["tensors"]]
        sys.stdout.write("\n" + table(rows))
