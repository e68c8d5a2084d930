"""zse check: whether a model does here what its authors mean."""

import json

from zse.bench import check
from zse.cli.options import ENGINE_OPTIONS, locate, open_llm
from zse.cli.parser import MODEL, arg
from zse.cli.terminal import printable

EPILOG = """Reads the config, counts the tensors that the model reads and those that it does not, sends texts through the tokenizer and back,
asks a question, measures the perplexity of a fixed text and tokens a second, and, where transformers is installed, compares the
logits of a Hugging Face folder with its own. Ends with 1 where something cannot be right."""
ARGUMENTS = (MODEL, arg("--json", action="store_true", help="print JSON"), ENGINE_OPTIONS)


def run(args) -> int:
    path = locate(args.model, args.quantize, args.device)
    with open_llm(args, max_rows=1, prefix_cache=False, speculation="none") as llm:
        result = check.check(llm, path)
    print(json.dumps(result, indent=1, ensure_ascii=False) if args.json else _text(result))
    return 1 if result["wrong"] else 0


def _text(result: dict) -> str:
    config, tensors, speed, compared = (result[name] for name in ("config", "tensors", "speed", "compared"))
    left = tensors["not_read"]
    some = f": {', '.join(left[:4])}{', …' if left[4:] else ''}" if left else ""
    if "left_out" in compared:
        logits = f"not compared: {compared['left_out']}"
    else:
        logits = (
            f"transformers {compared['transformers']}: the same next token at {compared['same_next_token']:.1%} of {compared['tokens']} "
            f"places, mean difference {compared['mean_difference']:.3g} (mean logit {compared['mean_logit']:.3g})"
        )
    texts = result["tokenizer"]
    rows = {
        "config": ", ".join(f"{name} {value}" for name, value in config.items()),
        "tensors": f"{tensors['read']} read, {len(left)} not read{some}",
        "tokenizer": f"{texts['texts'] - len(texts['wrong'])} of {texts['texts']} texts come back as they were",
        "answer": f"{result['answer']['prompt']} → {result['answer']['text']}",
        "perplexity": f"{result['perplexity']['perplexity']:.3f} over {result['perplexity']['tokens']} tokens",
        "speed": f"prompt {speed['prompt_tok_per_s']:.0f} tok/s, reply {speed['reply_tok_per_s']:.1f} tok/s",
        "logits": logits,
    }
    rows |= {"wrong": "; ".join(result["wrong"])} if result["wrong"] else {}
    return "\n".join(f"{name:<11}{printable(text)}" for name, text in rows.items())
