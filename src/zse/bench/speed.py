"""Speed of the engine in this process: prefill, decode after a context, several sequences decoded together.

Prompts are pseudo-random token ids, different in every repeat, so that no prefix cache helps; replies ignore the end
token. Every figure is the median over the repeats, after one warm-up that is not counted.
"""

import random
import statistics
from math import ceil
from time import perf_counter

from zse.errors import EngineError
from zse.sampling.params import SamplingParams

WARM_UP_TOKENS = 4


def prompt_ids(llm, length: int, seed: int) -> list[int]:
    """`length` ordinary token ids of the LLM's (or ModelConfig's) vocabulary. Its first quarter holds the control
    tokens in some models: skip 1,000."""
    low = min(1000, llm.vocab_size // 2)
    # Other lengths do not begin alike. Of text: 15 << 32 | 16 draws what 16 does.
    draw = random.Random(f"{seed} {length}")
    return [draw.randrange(low, llm.vocab_size) for _ in range(length)]


def greedy(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def decode(llm, context: int, tokens: int, repeats: int) -> dict:
    """Tokens a second of one sequence, from its first new token to its last, after a prompt of `context` tokens."""
    rates = []
    for repeat in range(repeats + 1):
        count = tokens if repeat else WARM_UP_TOKENS
        clocks = [perf_counter() for _ in llm.stream(prompt_ids(llm, context, repeat), greedy(count + 1))]
        if repeat:
            rates.append(tokens / (clocks[-1] - clocks[0]))
    return {"context": context, "tokens": tokens, "tok_per_s": statistics.median(rates), "runs": rates}


def prefill(llm, tokens: int, repeats: int) -> dict:
    """Prompt tokens a second, from the call to the first new token."""
    rates = []
    for repeat in range(repeats + 1):
        prompt = prompt_ids(llm, tokens, repeat)
        start = perf_counter()
        for _ in llm.stream(prompt, greedy(1)):
            if repeat:
                rates.append(tokens / (perf_counter() - start))
    return {"tokens": tokens, "tok_per_s": statistics.median(rates), "runs": rates}


def batch(llm, sequences: int, context: int, tokens: int, repeats: int) -> dict:
    """Tokens a second of `sequences` sequences together, from when each has its first new token to when each has
    `tokens` more: in one run, for the difference of two is anything on a busy machine."""
    rates = []
    for repeat in range(repeats + 1):
        prompts = [prompt_ids(llm, context, sequences * repeat + row) for row in range(sequences)]
        rate = _rate_together(llm, prompts, tokens if repeat else min(tokens, WARM_UP_TOKENS))
        if repeat:
            rates.append(rate)
    return {
        "sequences": sequences,
        "context": context,
        "tokens": tokens,
        "tok_per_s": statistics.median(rates),
        "runs": rates,
    }


def _rate_together(llm, prompts: list[list[int]], tokens: int) -> float:
    engine, ids = llm._engine, range(llm._next_id, llm._next_id + len(prompts))
    llm._next_id = ids.stop
    made = dict.fromkeys(ids, 0)
    # The first to begin go on beside the others' prompts, as far as the context reaches.
    beside = ceil(sum(map(len, prompts)) / llm.config.max_tokens_per_step) + len(prompts)
    most = max(tokens + 1, min(tokens + 1 + beside, llm.config.max_context - max(map(len, prompts))))

    def step_until(least: int) -> int:
        while min(made.values()) < least:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                made[output.id] += len(output.tokens)
                if output.finish and not min(made.values()):
                    raise EngineError(
                        f"batch: {len(ids)} sequences do not run at once: give more --tokens, fewer --sequences or more memory"
                    )
        return sum(made.values())

    try:
        for id, prompt in zip(ids, prompts, strict=True):
            engine.submit(id, prompt, greedy(most))
        before, start = step_until(1), perf_counter()
        return (step_until(tokens + 1) - before) / (perf_counter() - start)
    finally:
        for id in ids:
            engine.cancel(id)


def latency(llm, prompt_tokens: int, tokens: int, repeats: int) -> dict:
    """Milliseconds of one sequence alone: from the call to its first token (TTFT), and from each token to the next
    (ITL), `tokens` of them a reply. Percentiles over all repeats, by nearest rank: of few values p99 is the largest."""
    first, between = [], []
    for repeat in range(repeats + 1):
        start = perf_counter()
        count = tokens if repeat else min(tokens, WARM_UP_TOKENS)
        clocks = [perf_counter() for _ in llm.stream(prompt_ids(llm, prompt_tokens, repeat), greedy(count + 1))]
        if repeat:
            first.append(1e3 * (clocks[0] - start))
            between += [1e3 * (clock - before) for before, clock in zip(clocks, clocks[1:], strict=False)]
    return {"prompt_tokens": prompt_tokens, "ttft_ms": percentiles(first), "itl_ms": percentiles(between)}


def percentiles(values: list[float]) -> dict[str, float]:
    """{"p50", "p95", "p99"} by nearest rank: the smallest value that so many percent are not above."""
    ranked = sorted(values)
    return {f"p{percent}": ranked[ceil(percent * len(ranked) / 100) - 1] for percent in (50, 95, 99)}
