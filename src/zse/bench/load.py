"""Run workloads against a server and sum up what its clients saw."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from zse.bench.client import Outcome, Target, get_json, stream
from zse.bench.percentiles import summary
from zse.bench.workloads import SEED, LoadRequest, Workload, make_requests, runs
from zse.errors import ConfigError, EngineError


@dataclass(frozen=True)
class LoadSettings:
    """What makes two reports comparable. vocab_size: prompts of token ids below it; None: of text. chat: through
    /chat/completions. ignore_eos: ask for replies of full length, a field that not every server knows."""

    seed: int = SEED
    scale: float = 1.0
    vocab_size: int | None = None
    chat: bool = False
    ignore_eos: bool = True
    timeout_s: float = 300.0


def measure(target: Target, model: str | None, workloads: list[Workload], settings: LoadSettings,
            rates: list[float] | None = None, tell: Callable[[str, dict], None] | None = None) -> dict:  # fmt: skip
    """{"model": its name, "workloads": {name: figures}}; tell(name, figures) is called as they come. model: None for
    the first that the server lists. ConfigError: no server there; EngineError: a workload's warm-up fails."""

    async def run_all() -> dict:
        named, found = model or await _first_model(target), {}
        for workload in workloads:
            for run in runs(workload, rates):
                found[run.name] = await run_workload(target, named, run, settings)
                if tell is not None:
                    tell(run.name, found[run.name])
        return {"model": named, "workloads": found}

    return asyncio.run(run_all())


async def _first_model(target: Target) -> str:
    listed = (await get_json(target, "/models")).get("data")
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict) or "id" not in listed[0]:
        raise ConfigError("the server lists no models; say which with --model NAME")
    return str(listed[0]["id"])


async def run_workload(target: Target, model: str, workload: Workload, settings: LoadSettings) -> dict:
    """The figures of one run, as figures() gives them. EngineError: the warm-up fails, so nothing else would work."""
    warm_up, requests = make_requests(workload, settings.seed, settings.scale, settings.vocab_size)
    for request in warm_up:
        outcome = await _send(target, model, request, settings)
        if outcome.error is not None:
            raise EngineError(f"{workload.name}: a request of the warm-up failed: {outcome.error}")
    start = perf_counter()
    if workload.arrival == "sequential":
        outcomes = [await _send(target, model, request, settings) for request in requests]
    else:
        outcomes = await asyncio.gather(*(_send_at(start, target, model, request, settings) for request in requests))
    described = {
        name: getattr(workload, name) for name in ("arrival", "rate", "prompt", "output", "prefix", "measures")
    }
    return {"workload": described, **figures(requests, outcomes, start)}


async def _send_at(start: float, target: Target, model: str, request: LoadRequest, settings: LoadSettings) -> Outcome:
    """Send it when its time has come: whether the server keeps up does not change the arrivals (an open loop)."""
    await asyncio.sleep(max(0.0, start + (request.at_s or 0.0) - perf_counter()))
    return await _send(target, model, request, settings)


async def _send(target: Target, model: str, request: LoadRequest, settings: LoadSettings) -> Outcome:
    body: dict = {
        "model": model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.chat:
        body["messages"] = [{"role": "user", "content": request.prompt}]
        return await stream(target, "/chat/completions", body, settings.timeout_s)
    return await stream(target, "/completions", {**body, "prompt": request.prompt}, settings.timeout_s)


def figures(requests: list[LoadRequest], outcomes: list[Outcome], start_s: float) -> dict:
    """Throughputs over the wall clock from the start to the last answer, and times in ms, of the requests that did not
    fail; failures with their reasons and counts. itl_ms is over all gaps of all requests, the others are a value each;
    prompt_tokens are as the server counts them, else as they were made."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    reasons = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    seconds = max(outcome.done_s for outcome in outcomes) - start_s
    tokens = sum(outcome.tokens for outcome in good)
    return {
        "requests": len(outcomes),
        "failures": len(outcomes) - len(good),
        "errors": [{"message": message, "count": count} for message, count in reasons.most_common()],
        "seconds": seconds,
        "output_tok_per_s": tokens / seconds,
        "requests_per_s": len(good) / seconds,
        "prompt_tokens": sum(
            request.prompt_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens
            for request, outcome in zip(requests, outcomes)
            if outcome.error is None
        ),
        "cached_tokens": sum(outcome.cached_tokens or 0 for outcome in good),
        "output_tokens": tokens,
        "ttft_ms": summary([outcome.ttft_ms for outcome in good if outcome.ttft_ms is not None]),
        "itl_ms": summary([gap for outcome in good for gap in outcome.itl_ms]),
        "tpot_ms": summary([outcome.tpot_ms for outcome in good if outcome.tpot_ms is not None]),
        "e2e_ms": summary([outcome.e2e_ms for outcome in good]),
        "each": [
            {
                "sent_s": round(outcome.sent_s - start_s, 4),
                "ttft_ms": None if outcome.ttft_ms is None else round(outcome.ttft_ms, 3),
                "e2e_ms": round(outcome.e2e_ms, 3),
                "tokens": outcome.tokens,
                "asked_tokens": request.output_tokens,
                "error": outcome.error,
            }
            for request, outcome in zip(requests, outcomes)
        ],
    }
