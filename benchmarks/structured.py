"""What structured output costs: replies under a grammar against free text of the same number of tokens, in pairs.

    python benchmarks/structured.py MODEL.gguf [--rows 1 8] [--tokens 96] [--repeats 5] [--device cpu] [--no-lazy-masks]

Each pair is one process with one engine: `--rows` requests together, greedy, first free (ignore_eos), then under each
grammar, in turns, so that whatever else the machine does hits both. The grammars cannot end before `--tokens` tokens.
Printed: tokens a second of both, their ratio (median of the pairs; the bar is 0.95), what masks and checks took, and the share
of tokens drawn without a mask that the grammar refused.
"""

import argparse
import statistics
import time

from zse import LLM, SamplingParams

TEXT = {"type": "string", "minLength": 2000}
GRAMMARS = {
    "json string": {"json": {"type": "object", "properties": {"story": TEXT}, "required": ["story"]}},
    "json records": {
        "json": {
            "type": "array",
            "minItems": 200,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "age", "tags"],
                "properties": {
                    "name": {"type": "string"},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
                },
            },
        }
    },
    "any json": {"json": {"type": "array", "minItems": 500}},
    "regex": {"regex": "([A-Z][a-z]+ [0-9]{1,3}, ){300}"},
}


def seconds_of(llm: LLM, prompts: list[list[int]], params: SamplingParams, structure) -> tuple[float, int]:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, structure=structure)
    return time.perf_counter() - start, sum(len(output.token_ids) for output in outputs)


def refused(before: dict, after: dict) -> str:
    """Share of the tokens drawn without a mask that were drawn again."""
    again, kept = (after[key] - before[key] for key in ("tokens_redrawn", "masks_avoided"))
    return f"{again / (again + kept):.3f}" if again + kept else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--lazy-masks", action=argparse.BooleanOptionalAction)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--grammars", nargs="+", choices=GRAMMARS, default=list(GRAMMARS), metavar="NAME")
    given = parser.parse_args()
    params = SamplingParams(max_tokens=given.tokens, temperature=0.0, ignore_eos=True)
    with LLM(
        given.model,
        device=given.device,
        threads=given.threads,
        max_rows=max(given.rows),
        max_context=1024,
        lazy_masks=given.lazy_masks,
        speculation=given.speculation,
    ) as llm:
        print(
            "| rows | grammar | free tok/s | structured tok/s | ratio | mask µs p50 | p99 | wait µs p50 | p99 | refused |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for rows in given.rows:
            # The prompts differ: a batch of equal ones is cheaper in no way, but looks like it.
            prompts = [
                llm.encode_chat([{"role": "user", "content": f"Write record number {number} as JSON."}])
                for number in range(rows)
            ]
            for name, structure in ((name, GRAMMARS[name]) for name in given.grammars):
                for form in (None, structure):  # recordings, the grammar, the prefix cache
                    seconds_of(llm, prompts, params, form)
                free, bound, before = [], [], llm.metrics()
                for _ in range(given.repeats):
                    for form, speeds in ((None, free), (structure, bound)):
                        seconds, tokens = seconds_of(llm, prompts, params, form)
                        assert tokens == rows * given.tokens, "a reply ended early: not the same work"
                        speeds.append(tokens / seconds)
                ratio = statistics.median(b / f for f, b in zip(free, bound, strict=True))
                counts = llm.metrics()
                print(
                    f"| {rows} | {name} | {statistics.median(free):.1f} | {statistics.median(bound):.1f} | {ratio:.3f} | "
                    + " | ".join(
                        f"{counts[key]:.0f}"
                        for key in ("mask_us_p50", "mask_us_p99", "mask_wait_us_p50", "mask_wait_us_p99")
                    )
                    + f" | {refused(before, counts)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
