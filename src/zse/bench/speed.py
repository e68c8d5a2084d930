"""Speed of the engine in this process: prefill, decode after a context, several sequences decoded together.

Prompts are pseudo-random token ids, different in every repeat, so that no prefix cache helps; replies ignore the end
token. Every figure is the median over the repeats, after one warm-up that is not counted.
"""

import random
import statistics
from time import perf_counter

from zse.sampling.params import SamplingParams

WARM_UP_TOKENS = 4


def prompt_ids(llm, length: int, seed: int) -> list[int]:
    """`length` ordinary token ids. The first quarter of a vocabulary holds the control tokens in some models: skip
    1,000."""
    low = min(1000, llm.vocab_size // 2)
    draw = random.Random(seed)
    return [draw.randrange(low, llm.vocab_size) for _ in range(length)]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def decode(llm, context: int, tokens: int, repeats: int) -> dict:
    """Tokens a second of one sequence, from its first new token to its last, after a prompt of `context` tokens."""
    rates = []
    for repeat in range(repeats + 1):
        count = tokens if repeat else WARM_UP_TOKENS
        clocks = [perf_counter() for _ in llm.stream(prompt_ids(llm, context, repeat), _greedy(count + 1))]
        if repeat:
            rates.append(tokens / (clocks[-1] - clocks[0]))
    return {"context": context, "tokens": tokens, "tok_per_s": statistics.median(rates), "runs": rates}


def prefill(llm, tokens: int, repeats: int) -> dict:
    """Prompt tokens a second, from the call to the first new token."""
    rates = []
    for repeat in range(repeats + 1):
        prompt = prompt_ids(llm, tokens, repeat)
        start = perf_counter()
        for _ in llm.stream(prompt, _greedy(1)):
            if repeat:
                rates.append(tokens / (perf_counter() - start))
    return {"tokens": tokens, "tok_per_s": statistics.median(rates), "runs": rates}


def batch(llm, sequences: int, context: int, tokens: int, repeats: int) -> dict:
    """Tokens a second of `sequences` sequences together. What their prefill takes is measured alone and taken off."""
    rates = []
    for repeat in range(repeats + 1):
        seconds = []
        for count, salt in ((1, 1), (tokens + 1, 2)):
            prompts = [prompt_ids(llm, context, 1000 * repeat + 2 * row + salt) for row in range(sequences)]
            start = perf_counter()
            llm.generate(prompts, _greedy(count if repeat else min(count, WARM_UP_TOKENS)))
            seconds.append(perf_counter() - start)
        if repeat:
            rates.append(sequences * tokens / (seconds[1] - seconds[0]))
    return {
        "sequences": sequences,
        "context": context,
        "tokens": tokens,
        "tok_per_s": statistics.median(rates),
        "runs": rates,
    }
