"""What a step costs in Python, with a device that computes nothing.

    python benchmarks/step_cost.py MODEL [--rows 256] [--steps 400] [--family cpu|gpu] [--profile]
    python benchmarks/step_cost.py MODEL --rows 64 --context 32768 [--page-size auto|16|32|64|128]

All rows decode, the prefix cache is on. Timed: schedule (with expire), fill (with the sampler's parameters), read (of what
the sampler left) and commit; medians and 99th percentiles in microseconds. 256 rows must stay below 500 in all. The model
gives the shapes only. gpu: the launches of a GPU, on a device that knows no kernels, one step ahead.

--context: every row decodes behind a prompt that fills the context but for the tokens of the steps; without --page-size the
automatic one and 16 are measured one after the other. Beside the steps: what a context costs once (turns).
"""

import argparse
import gc
import random
import statistics
import time

MOST_PAGES_BYTES = 8 << 30


def make(path: str, rows: int, family: str, context: int = 2048, page_size: int = 16, num_pages: int | None = None):
    """(scheduler, runner) of a model's shapes. num_pages: of 16 tokens."""
    from zse.cache.groups import PageGeometry
    from zse.cache.prefix import PrefixCache
    from zse.engine.config import EngineConfig, resolve, settle
    from zse.engine.runner import Runner
    from zse.formats.opening import open_model
    from zse.models.load import load_model, plan_model
    from zse.runtime.null import NullDevice, NullGPU
    from zse.scheduler.scheduler import Scheduler

    class Device(NullGPU if family == "gpu" else NullDevice):
        def alloc(self, nbytes, label="other"):
            # Nobody writes pages here, and those of long contexts may be more than this machine has addresses for.
            return super().alloc(min(nbytes, MOST_PAGES_BYTES) if label == "kv cache" else nbytes, label)

    device = Device()
    plan = plan_model(open_model(path), family=family)
    config = EngineConfig(
        model=path,
        max_rows=rows,
        max_context=context,
        num_pages=num_pages or rows * 80,
        page_size=page_size,
        max_tokens_per_step=512,
        chunked_prefill=context == 2048,
    )  # long prompts all first
    settled = resolve(
        config,
        settle(config, family),
        device="null",
        model_context=max(context, plan.config.max_context),
        block_bytes=1,
        threads=1,
        memory_bytes=1 << 40,
    )
    runner = Runner(device, load_model(device, plan, start=False), settled)
    if runner.kv.nbytes > MOST_PAGES_BYTES:
        runner.kv.map_to = lambda page: None
    scheduler = Scheduler(
        num_pages=settled.num_pages,
        max_rows=rows,
        max_tokens=512,
        max_context=context,
        policy=settled.policy,
        vocab_size=plan.config.vocab_size,
        prefix_cache=PrefixCache(settled.num_pages, "lru", settled.page_size),
        mixed_tokens=512,
        geometry=PageGeometry(page_size=settled.page_size),
    )
    return scheduler, runner


class Clock:
    """Seconds by part of a step."""

    def __init__(self):
        self.parts: dict[str, list[float]] = {"schedule": [], "fill": [], "read": [], "commit": []}

    def time(self, part: str, work):
        start = time.perf_counter()
        value = work()
        self.parts[part].append(time.perf_counter() - start)
        return value


def run(scheduler, runner, rows: int, steps: int, prompt_tokens: int = 0) -> Clock:
    """prompt_tokens: 0 for 20 to 60."""
    from zse.sampling.params import SamplingParams

    rng = random.Random(1)
    now = 0.0
    params = SamplingParams(
        max_tokens=min(1500, scheduler.max_context - max(prompt_tokens, 60)), temperature=0.7, ignore_eos=True
    )
    for id in range(rows):
        prompt = rng.choices(range(1000), k=prompt_tokens or rng.randint(20, 60))
        scheduler.submit(id, prompt, params, seed=id, now=now)

    def schedule():
        scheduler.expire(now)
        return scheduler.schedule(now)

    def submit(batch):
        return runner.fill(batch).buffers.sampler, batch

    flight = None
    clock = Clock()
    warm_up = True
    while warm_up or len(clock.parts["commit"]) < steps:
        now += 0.01
        if (
            warm_up
            and scheduler.queue.num_waiting == 0
            and all(len(request.tokens) > request.prompt_len + 20 for request in scheduler.running)
        ):
            warm_up, clock = False, Clock()
            gc.collect()
            gc.freeze()
        batch = clock.time("schedule", schedule)
        ahead = clock.time("fill", lambda batch=batch: submit(batch)) if batch is not None else None
        if not runner.runs_ahead:
            flight, ahead = ahead, None
        if flight is not None:
            sampler, batch = flight
            sampled = clock.time("read", sampler.read)
            clock.time("commit", lambda batch=batch, sampled=sampled: scheduler.commit(batch, sampled))
        flight = ahead
    if flight is not None:
        scheduler.commit(flight[1], flight[0].read())
    return clock


def show(clock: Clock) -> None:
    total = [sum(step) for step in zip(*clock.parts.values(), strict=False)]
    for name, times in (*clock.parts.items(), ("step", total)):
        ordered = sorted(times)
        print(
            f"{name:9} p50 {1e6 * statistics.median(times):6.0f} us   p99 {1e6 * ordered[int(len(ordered) * 0.99)]:6.0f} us"
        )


def turns(scheduler, runner, count: int = 20) -> dict[str, float]:
    """Least milliseconds of what a long context costs once: to end it (its pages stay cached), to admit its next turn
    (found in the cache), to write its page table, and to check the books."""
    from zse.sampling.params import SamplingParams

    times: dict[str, list[float]] = {"end": [], "admit": [], "table": [], "check": []}
    clock = Clock()
    clock.parts = times
    for number in range(count):
        request = scheduler.running[number % len(scheduler.running)]
        prompt = request.tokens.tolist()
        clock.time("end", lambda id=request.id: scheduler.cancel(id))
        id = 1_000_000 + number
        scheduler.submit(id, prompt, SamplingParams(max_tokens=200, ignore_eos=True), seed=id)
        batch = clock.time("admit", scheduler.schedule)
        if scheduler.requests.get(id).computed_len < len(prompt) - 1:
            raise SystemExit("the next turn was not found in the cache")
        sampler = clock.time("table", lambda batch=batch: runner.fill(batch)).sampler
        scheduler.commit(batch, sampler.read())
        if clock.time("check", scheduler.check_integrity):
            raise SystemExit("the books are wrong")
    return {name: 1000 * min(found) for name, found in times.items()}


def long_contexts(args) -> None:
    """Rows that decode at the end of a long context, for each page size."""
    for page_size in [0, 16] if args.page_size is None else [args.page_size]:
        # Room for a whole context a row, and what turns() adds.
        scheduler, runner = make(
            args.model,
            args.rows,
            args.family,
            args.context,
            page_size,
            num_pages=(args.rows + 2) * -(-args.context // 128) * 8,
        )
        cache = scheduler.cache
        print(
            f"{args.rows} rows of {args.context} tokens, pages of {cache.page_size}"
            f"{' (auto)' if not page_size else ''}: {cache.allocator.num_pages} pages"
        )
        clock = run(scheduler, runner, args.rows, args.steps, args.context - args.steps - 300)
        show(clock)
        print(
            f"{cache.allocator.num_pages - cache.allocator.num_free} pages held, {cache.prefix.num_nodes} nodes; "
            + ", ".join(f"{name} {ms:.2f} ms" for name, ms in turns(scheduler, runner).items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--family", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--profile", action="store_true", help="the functions that take the time, instead")
    parser.add_argument("--context", type=int, help="tokens of every row's context, from 1024 on")
    parser.add_argument(
        "--page-size",
        type=lambda text: 0 if text == "auto" else int(text),
        metavar="auto|16|32|64|128",
        help="with --context (default: auto, then 16)",
    )
    args = parser.parse_args()
    if args.context is not None:
        if args.profile or args.context < args.steps + 1024:
            parser.error("--context goes without --profile, and with at least 1024 tokens more than --steps")
        long_contexts(args)
        return
    if args.page_size is not None:
        parser.error("--page-size goes with --context")
    scheduler, runner = make(args.model, args.rows, args.family)
    if args.profile:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.runcall(run, scheduler, runner, args.rows, args.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    show(run(scheduler, runner, args.rows, args.steps))


if __name__ == "__main__":
    main()
