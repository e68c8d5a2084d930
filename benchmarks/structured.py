"""What structured output costs: replies under a grammar against free text of the same number of tokens, in pairs.

    python benchmarks/structured.py MODEL.gguf [--rows 1 8] [--tokens 96] [--repeats 5] [--device cpu] [--no-lazy-masks]

Each pair is one process with one engine: `--rows` requests together, greedy, first free (ignore_eos), then under each
grammar, in turns, so that whatever else the machine does hits both. The grammars cannot end before `--tokens` tokens.
"short record" and "fresh records" are runs of eight rounds of replies that end by themselves, against free replies as long as
their mean: what a request costs beside its tokens counts. Each round of "fresh records" has a random schema that no round had
before, of three to six fields: what compiling it costs counts too.
Printed: tokens a second of both, their ratio (median of the pairs; the bar is 0.95), what masks and checks took, and the share
of tokens drawn without a mask that the grammar refused.
"""

import argparse
import random
import statistics
import time

from msgspec.structs import replace

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
    "short record": {
        "json": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "age", "member"],
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "member": {"type": "boolean"},
            },
        }
    },
    "fresh records": {},
    "regex": {"regex": "([A-Z][a-z]+ [0-9]{1,3}, ){300}"},
}
ROUNDS = {"short record": 8, "fresh records": 8}
WORDS = (
    "city color count date email height id is_active item level name note owner price rating size state title unit year"
)
TYPES = (
    {"type": "string", "maxLength": 12},
    {"type": "integer", "minimum": 0, "maximum": 120},
    {"type": "boolean"},
    {"enum": ["low", "medium", "high"]},
)


def seconds_of(llm: LLM, prompts: list[list[int]], params: SamplingParams, structure) -> tuple[float, int]:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, structure=structure)
    return time.perf_counter() - start, sum(len(output.token_ids) for output in outputs)


def structure_of(name: str, chance: random.Random) -> dict:
    """The grammar of a round."""
    if name != "fresh records":
        return GRAMMARS[name]
    fields = chance.sample(WORDS.split(), chance.randint(3, 6))
    number = chance.randint(0, 99999)  # no two schemas are equal
    properties = {f"{field}_{number}" if field == "id" else field: chance.choice(TYPES) for field in fields}
    return {
        "json": {
            "title": f"record {number}",
            "type": "object",
            "additionalProperties": False,
            "required": list(properties),
            "properties": properties,
        }
    }


def pair(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, name: str, chance: random.Random
) -> tuple[float, float]:
    """Tokens a second of free text and under the grammar, in turns."""
    rounds = ROUNDS.get(name, 1)
    bound_params = replace(params, ignore_eos=rounds == 1)
    bound = [seconds_of(llm, prompts, bound_params, structure_of(name, chance)) for _ in range(rounds)]
    num_tokens = sum(tokens for _, tokens in bound)
    each = round(num_tokens / rounds / len(prompts))
    free = [seconds_of(llm, prompts, replace(params, max_tokens=each), None) for _ in range(rounds)]
    assert rounds > 1 or num_tokens == len(prompts) * params.max_tokens, "a reply ended early: not the same work"
    return sum(tokens for _, tokens in free) / sum(s for s, _ in free), num_tokens / sum(s for s, _ in bound)


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
    parser.add_argument("--speculation", default="none")
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
        prefix_cache=False,
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
            for name in given.grammars:
                chance = random.Random(rows)
                pair(llm, prompts, params, name, chance)  # recordings, the grammar
                before = llm.metrics()
                free, bound = zip(
                    *(pair(llm, prompts, params, name, chance) for _ in range(given.repeats)), strict=True
                )
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
