"""Which steps an engine records before a request asks for one."""

from typing import Any

# Tokens of a prompt that a first request on a GPU is likely not to have more of: its recording is made first.
SHORT_PROMPT = 64


def first_recordings(runner: Any) -> list[tuple[str, int, int]]:
    """Of a Runner: (kind, size, number of the StepSet) of the graphs to record when there is time, in this order: a first
    request's first."""
    config, sizes = runner.config, runner.planner.sizes
    if not runner.model.config.causal:
        return []
    if runner.runs_ahead:
        numbers = range(2)
        prompts = [size for size in sizes if size > 1]
        short = runner.size_for("mixed", min(SHORT_PROMPT, config.max_tokens_per_step))
        first = [("mixed", short, 0), *(("decode", 1, number) for number in reversed(numbers))]
        first += [("mixed", size, number) for number in numbers for size in prompts if size >= short]
        first += [
            ("decode", size, number)
            for size in sizes[1:]
            for number in numbers
            if sizes[sizes.index(size) - 1] < config.max_rows
        ]
        first += [
            ("verify", size, number)
            for size in sizes[1:]
            for number in numbers
            if config.max_drafts and sizes[sizes.index(size) - 1] < config.max_lines
        ]
    else:
        split = runner.size_for("mixed", 2)
        first = [("mixed", config.max_tokens_per_step, 0), ("decode", 1, 0), ("mixed", split, 0)]
        if config.max_lines > 1:
            first.append(("decode", split, 0))
        if config.max_lines > split:
            first.append(("decode", sizes[-1], 0))
    return list(dict.fromkeys(first))
