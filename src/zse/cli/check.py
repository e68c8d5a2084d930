"""zse check: whether a model does here what its authors mean."""

import json

from zse.bench import check
from zse.cli.options import ENGINE_OPTIONS, locate, open_llm
from zse.cli.parser import FLAG, MODEL, option
from zse.cli.terminal import printable

EPILOG = """Reads the config, counts the tensors that the model reads and those that it does not, sends texts through the tokenizer and back,
asks a question, measures the perplexity of a fixed text and tokens a second, and, where transformers is installed, compares the
logits of a Hugging Face folder with its own. Of encoders, rerankers and embedding models it compares the vectors of three sentences,
and that of a text with transformers'. Ends with 1 where something cannot be right."""
ARGUMENTS = (MODEL, option("--json", FLAG, "print JSON"), ENGINE_OPTIONS)


def run(args) -> int:
    path = locate(args.model, args.quantize, args.device)
    with open_llm(args, max_rows=1, prefix_cache=False, speculation="none") as llm:
        result = check.check(llm, path)
    print(json.dumps(result, indent=1, ensure_ascii=False) if args.json else _text(result))
    return 1 if result["wrong"] else 0


def _text(result: dict) -> str:
    config, tensors, texts, speed = (result[name] for name in ("config", "tensors", "tokenizer", "speed"))
    left = tensors["not_read"]
    some = f": {', '.join(left[:4])}{', …' if left[4:] else ''}" if left else ""
    back = "come back as they were" if "answer" in result else "give their tokens again"
    rows = {
        "config": ", ".join(f"{name} {value}" for name, value in config.items()),
        "tensors": f"{tensors['read']} read, {len(left)} not read{some}",
        "tokenizer": f"{texts['texts'] - len(texts['wrong'])} of {texts['texts']} texts {back}",
    }
    if "answer" in result:
        rows["answer"] = f"{result['answer']['prompt']} → {result['answer']['text']}"
        rows["perplexity"] = f"{result['perplexity']['perplexity']:.3f} over {result['perplexity']['tokens']} tokens"
        rows["speed"] = f"prompt {speed['prompt_tok_per_s']:.0f} tok/s, reply {speed['reply_tok_per_s']:.1f} tok/s"
        rows["logits"] = _beside(result["compared"])
    else:
        rows["speed"] = f"{speed['text_tok_per_s']:.0f} tok/s"
    if "meaning" in result:
        meant = result["meaning"]
        what = (
            "logits"
            if meant["kind"] == "labels"
            else f"{meant['kind']} of {meant['numbers']}, norm {meant['norm']:.4g};"
        )
        rows["vectors"] = f"{what} near {meant['near']:.4f}, far {meant['far']:.4f}"
        rows["compared"] = _beside(result.get("vectors", result["compared"]))
    rows |= {"wrong": "; ".join(result["wrong"])} if result["wrong"] else {}
    return "\n".join(f"{name:<11}{printable(text)}" for name, text in rows.items())


def _beside(compared: dict) -> str:
    """What is beside transformers."""
    if "left_out" in compared:
        return f"not compared: {compared['left_out']}"
    version = f"transformers {compared['transformers']}"
    if "cosine" in compared:
        return (
            f"{version}: cosine {compared['cosine']:.7f} over {compared['tokens']} tokens, mean difference "
            f"{compared['mean_difference']:.3g} (mean number {compared['mean_number']:.3g})"
        )
    return (
        f"{version}: the same next token at {compared['same_next_token']:.1%} of {compared['tokens']} "
        f"places, mean difference {compared['mean_difference']:.3g} (mean logit {compared['mean_logit']:.3g})"
    )
