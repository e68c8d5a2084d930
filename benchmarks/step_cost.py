"""What a step costs in Python, with a device that computes nothing.

    python benchmarks/step_cost.py MODEL [--rows 256] [--steps 400] [--family cpu|gpu] [--profile]

All rows decode, the prefix cache is on. Timed: schedule (with expire), fill (with the sampler's parameters), read (of what
the sampler left) and commit; medians and 99th percentiles in microseconds. 256 rows must stay below 500 in all. The model
gives the shapes only. gpu: the launches of a GPU, on a device that knows no kernels, one step ahead.
"""

import argparse
import gc
import random
import statistics
import time


def make(path: str, rows: int, family: str):
    from zse.cache.prefix import PrefixCache
    from zse.engine.config import EngineConfig, resolve, settle
    from zse.engine.runner import Runner
    from zse.formats.source import open_model
    from zse.models.load import load_model, plan_model
    from zse.runtime.null import NullDevice
    from zse.scheduler.scheduler import Scheduler

    device = NullDevice(family=family, arch=90 if family == "gpu" else 0)
    device.num_sms = 132
    plan = plan_model(open_model(path), family=family)
    config = EngineConfig(model=path, max_rows=rows, max_context=2048, num_pages=rows * 80, max_tokens_per_step=512)
    settled = resolve(config, settle(config, family), device="null", model_context=plan.config.max_context,
                      page_bytes=1, threads=1, memory_bytes=1 << 40)
    runner = Runner(device, load_model(device, plan, start=False), settled)
    scheduler = Scheduler(
        num_pages=settled.num_pages, max_rows=rows, max_tokens=512, max_context=2048, policy=settled.policy,
        vocab_size=plan.config.vocab_size, prefix_cache=PrefixCache(settled.num_pages, "lru"), mixed_tokens=512)
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


def run(scheduler, runner, rows: int, steps: int) -> Clock:
    from zse.sampling.params import SamplingParams
    rng = random.Random(1)
    now = 0.0
    for id in range(rows):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(20, 60))]
        scheduler.submit(id, prompt, SamplingParams(max_tokens=1500, temperature=0.7, ignore_eos=True), seed=id, now=now)

    def schedule():
        scheduler.expire(now)
        return scheduler.schedule(now)

    def submit(batch):
        return runner.fill(batch).sampler, batch

    flight = None
    clock = Clock()
    warm_up = True
    while len(clock.parts["commit"]) < steps:
        now += 0.01
        if warm_up and scheduler.num_waiting == 0 and all(
                len(request.tokens) > request.prompt_len + 20 for request in scheduler.running()):
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
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--family", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--profile", action="store_true", help="the functions that take the time, instead")
    args = parser.parse_args()
    scheduler, runner = make(args.model, args.rows, args.family)
    if args.profile:
        import cProfile
        import pstats
        profile = cProfile.Profile()
        profile.runcall(run, scheduler, runner, args.rows, args.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    clock = run(scheduler, runner, args.rows, args.steps)
    total = [sum(step) for step in zip(*clock.parts.values(), strict=False)]
    for name, times in (*clock.parts.items(), ("step", total)):
        ordered = sorted(times)
        print(f"{name:9} p50 {1e6 * statistics.median(times):6.0f} us   p99 {1e6 * ordered[int(len(ordered) * .99)]:6.0f} us")


if __name__ == "__main__":
    main()
