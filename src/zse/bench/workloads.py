"""The workloads of `zse bench serve --workload`: who asks for what, and when. Equal seeds give equal requests.

infer's five are its benchmarks/bench_serving.py (github.com/paladin8/infer): the same numbers of requests, lengths,
arrivals, two warm-up requests and seed 42, drawn in the same order, so that request 7 of ours asks for as many tokens
as request 7 of theirs. ZedInfer's are docs/design/benchmark_plan.md (github.com/tianyuxbear/zedinfer): A–E one request
at a time after one that is not counted, MU-A–MU-D all at once. Neither gives numbers for a sweep over request rates:
ours is 32 Poisson arrivals at 1, 2, 4, 8 and 16 a second, prompts of 128–384 and replies of 64–192 tokens, which puts
the knee of a small model on a CPU and of a larger one on a GPU inside the range. Ours too is `ablation`: 32 Poisson
arrivals at 8 a second.

Prompts are text, one common English word for each token (about right for every current tokenizer; the server's count
is what is reported), or random token ids, which are exact but not taken by every server.
"""

import random
from dataclasses import dataclass, replace

from zse.errors import ConfigError, UnsupportedError

SEED = 42
_SEEDS = 2**31  # of a prompt

Lengths = tuple[int, int]  # least, most; both can occur


@dataclass(frozen=True)
class Workload:
    """arrival: "sequential" (the next when the last is done), "burst" (all at once), "uniform" or "poisson" (at `rate`
    requests a second). prompt, output, prefix: tokens; `long_share` of the requests take `prompt`, the others
    `short_prompt`; `prefix` tokens that all prompts begin with come on top. rates: a sweep, one run for each."""

    name: str
    arrival: str
    requests: int
    prompt: Lengths
    output: Lengths
    measures: str
    rate: float = 0.0
    short_prompt: Lengths | None = None
    long_share: float = 1.0
    prefix: int = 0
    warm_up: int = 2
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class LoadRequest:
    """at_s: when it is sent, after the start; None: when the one before it is done. prompt: text or token ids."""

    at_s: float | None
    prompt: str | list[int]
    prompt_tokens: int
    output_tokens: int


def _fixed(
    name: str, arrival: str, requests: int, prompt: int, output: int, measures: str, warm_up: int = 1
) -> Workload:
    return Workload(name, arrival, requests, (prompt, prompt), (output, output), measures, warm_up=warm_up)


INFER = (
    _fixed("baseline", "sequential", 10, 256, 256, "one request alone", warm_up=2),
    Workload("continuous_batching", "uniform", 32, (64, 512), (64, 256), "joining a running batch", rate=4),
    Workload("paged_attention", "burst", 48, (128, 384), (128, 256), "requests that fit in the KV memory"),
    Workload("chunked_prefill", "poisson", 48, (1024, 2048), (64, 256), "inter-token latency beside long prompts",
             rate=6, short_prompt=(64, 128), long_share=0.75),
    Workload("prefix_caching", "uniform", 48, (32, 128), (256, 256), "a prefix that all share", rate=8, prefix=1024),
)  # fmt: skip
ZEDINFER = (
    _fixed("zedinfer_a", "sequential", 5, 32, 256, "decode: a chat"),
    _fixed("zedinfer_b", "sequential", 5, 128, 128, "balanced"),
    _fixed("zedinfer_c", "sequential", 5, 512, 64, "prefill: a document"),
    _fixed("zedinfer_d", "sequential", 3, 2048, 128, "long context"),
    _fixed("zedinfer_e", "sequential", 10, 16, 32, "least latency"),
    _fixed("zedinfer_mu_a", "burst", 4, 128, 128, "4 users"),
    _fixed("zedinfer_mu_b", "burst", 16, 64, 64, "16 users"),
    _fixed("zedinfer_mu_c", "burst", 32, 32, 32, "32 users"),
    _fixed("zedinfer_mu_d", "burst", 4, 2048, 128, "4 users of a long context"),
)
# Something for each row of an ablation: a burst that a server with 64 rows takes at once, a prefix that all share, long
# prompts beside short ones, replies of different lengths.
ABLATION = Workload(
    "ablation", "poisson", 32, (384, 512), (32, 160), "what each optimization adds", rate=8, short_prompt=(16, 64),
    long_share=0.25, prefix=256,
)  # fmt: skip
SWEEP = Workload(
    "qps_sweep", "poisson", 32, (128, 384), (64, 192), "latency over the request rate", rates=(1, 2, 4, 8, 16)
)
WORKLOADS = {workload.name: workload for workload in (*INFER, *ZEDINFER, ABLATION, SWEEP)}
GROUPS = {
    "infer": [workload.name for workload in INFER],
    "zedinfer": [workload.name for workload in ZEDINFER[:5]],
    "all": list(WORKLOADS),
}

# Common words that are one token with the space before them in the usual vocabularies.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college "
    "interest death experience effect use class control field development role effort rate heart drug show leader "
    "light voice wife police mind price report decision son view relationship town road arm difference value building "
    "action season society tax director position player record paper space ground form event official matter center "
    "couple site project activity star table need court oil situation cost industry figure street image phone data "
    "picture practice piece land product doctor wall patient worker news test movie north love support technology"
).split()


def select(names: list[str]) -> list[Workload]:
    """The workloads of names and group names, each once. UnsupportedError: a name that there is not."""
    found: dict[str, Workload] = {}
    for name in names:
        if name not in WORKLOADS and name not in GROUPS:
            raise UnsupportedError("workload", name, [*GROUPS, *WORKLOADS])
        found.update({each: WORKLOADS[each] for each in GROUPS.get(name, [name])})
    return list(found.values())


def runs(workload: Workload, rates: list[float] | None = None) -> list[Workload]:
    """The workload itself, or one for each rate of a sweep, named "qps_sweep@4". rates: others than the sweep's own."""
    if not workload.rates:
        return [workload]
    return [
        replace(workload, name=f"{workload.name}@{rate:g}", rate=rate, rates=()) for rate in rates or workload.rates
    ]


def make_requests(workload: Workload, seed: int = SEED, scale: float = 1.0,
                  vocab_size: int | None = None) -> tuple[list[LoadRequest], list[LoadRequest]]:  # fmt: skip
    """(warm-up requests, requests that count). scale: multiplies the number of requests (at least two count) and all
    lengths (at least four tokens); arrival rates stay, so that the offered tokens a second fall with it. vocab_size:
    token ids below it in place of text. ConfigError: a sweep, whose runs() are meant, or too small a vocabulary.
    """
    if workload.rates:
        raise ConfigError(f"{workload.name} is a sweep: run each of its rates")
    if vocab_size is not None and vocab_size < 200:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens is too small; prompts are made of ids from 100 upwards")
    rng = random.Random(seed)
    total = workload.warm_up + workload.requests
    times = arrivals(workload, total, rng)
    prefix = _prompt(_scaled(workload.prefix, scale), 0, vocab_size) if workload.prefix else None
    made = []
    for at_s in times:
        lengths = workload.prompt
        if workload.short_prompt is not None and rng.random() >= workload.long_share:
            lengths = workload.short_prompt
        prompt_tokens, output_tokens = (_scaled(_draw(rng, each), scale) for each in (lengths, workload.output))
        prompt = _prompt(prompt_tokens, rng.randint(0, _SEEDS), vocab_size)
        if isinstance(prefix, list) and isinstance(prompt, list):
            prompt = prefix + prompt
        elif prefix is not None:
            prompt = f"{prefix} {prompt}"
        if prefix is not None:
            prompt_tokens += _scaled(workload.prefix, scale)
        made.append(LoadRequest(at_s, prompt, prompt_tokens, output_tokens))
    warm_up, rest = made[: workload.warm_up], made[workload.warm_up :]
    rest = rest[: min(len(rest), max(2, round(len(rest) * scale)))]
    start = rest[0].at_s or 0.0  # the first that counts is sent at once: idle time is not throughput
    return warm_up, [replace(each, at_s=None if each.at_s is None else each.at_s - start) for each in rest]


def arrivals(workload: Workload, count: int, rng: random.Random) -> list[float | None]:
    """Seconds after the start at which `count` requests are sent; None: when the one before it is done."""
    if workload.arrival == "sequential":
        return [None] * count
    if workload.arrival == "burst":
        return [0.0] * count
    if workload.arrival == "uniform":
        return [index / workload.rate for index in range(count)]
    times: list[float | None] = []
    now = 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(workload.rate)
    return times


def _draw(rng: random.Random, lengths: Lengths) -> int:
    """A length; a fixed one takes nothing from the generator."""
    return lengths[0] if lengths[0] == lengths[1] else rng.randint(*lengths)


def _scaled(tokens: int, scale: float) -> int:
    return max(4, round(tokens * scale))


def _prompt(tokens: int, seed: int, vocab_size: int | None) -> str | list[int]:
    """`tokens` words, or as many ids; ids below 100 are left out, where special tokens stand."""
    rng = random.Random(seed)
    if vocab_size is not None:
        return [rng.randrange(100, vocab_size) for _ in range(tokens)]
    return " ".join(rng.choices(WORDS, k=tokens))
