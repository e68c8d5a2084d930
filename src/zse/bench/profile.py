"""Where a step of a whole model spends its time: the host's phases, and every kernel of the recording.

Steps are driven one at a time here, so that the phases of a step stand beside each other; a server on a GPU schedules,
fills and submits the next step while one runs. Kernels are timed by Graph.profile(), each waiting for the one before:
the time of a replay, in which they may overlap, stands beside their sum.
"""

import os
import time
from functools import reduce
from typing import Any, NamedTuple

from zse.bench.floors import Floors
from zse.bench.roofline import Launches, Work
from zse.bench.speed import greedy, prompt_ids
from zse.errors import ConfigError, EngineError
from zse.scheduler.options import RequestOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.engine.load import Loaded

WARM_UP = 2  # prompts, and decode steps, that do not count: a GPU alternates between two recordings
PROMPTS = 3  # that count
MAX_REPLAYS, REPLAY_S = 20, 0.2  # replays in a row: so many, or as many as fit so many seconds
TRACE_GAP_US = 100.0  # between the steps of a trace


class LaunchTime(NamedTuple):
    """One launch: the kernel's name ("upload" and "download" are copies), its grid, microseconds, what it must do."""

    name: str
    grid: tuple[int, ...]
    us: float
    work: Work = Work()


class StepProfile(NamedTuple):
    """A step. kind: "prefill" or "decode"; tokens: of the step; rows: sequences; context: tokens of the longest one
    after the step. phases: [(name, microseconds)] of the host, in order: schedule, fill (the inputs), submit (on a CPU
    the step runs in it), wait, commit. replay_us: of the recording as the engine replays it. experts: what the median
    step counted of experts in host memory, by the counters' names; empty without such."""

    kind: str
    tokens: int
    rows: int
    context: int
    phases: list[tuple[str, float]]
    replay_us: float
    kernels: list[LaunchTime]
    experts: dict[str, float] = {}

    @property
    def host_us(self) -> float:
        return sum(us for _, us in self.phases)

    @property
    def kernels_us(self) -> float:
        """Of all launches, one by one."""
        return sum(kernel.us for kernel in self.kernels)

    def work(self, name: str = "") -> Work:
        """Of all launches of a kernel, or of all."""
        return reduce(Work.plus, (kernel.work for kernel in self.kernels if name in ("", kernel.name)), Work())

    def totals(self) -> list[tuple[str, int, float]]:
        """(kernel, launches, microseconds) by name, the longest first."""
        times: dict[str, list[float]] = {}
        for kernel in self.kernels:
            times.setdefault(kernel.name, []).append(kernel.us)
        return sorted(((name, len(us), sum(us)) for name, us in times.items()), key=lambda item: -item[2])


class _Step(NamedTuple):
    """A step that was run. replay: (Graph, symbols); its inputs stay as they are until the next step."""

    tokens: int
    rows: int
    context: int
    phases: list[tuple[str, float]]
    replay: tuple[Any, dict[str, int]]
    outputs: list
    runner: Any
    experts: dict[str, float] = {}

    @property
    def us(self) -> float:
        return sum(us for _, us in self.phases)


def profile(
    loaded: "Loaded", *, rows: int = 1, prompt_tokens: int = 512, steps: int = 16, repeats: int = 5
) -> list[StepProfile]:
    """A prefill step and a decode step of an engine that has no requests.

    rows: sequences that decode together, each after a prompt of `prompt_tokens` random tokens. The prefill step is the
    last full one of a prompt alone. Host phases are those of the median step (of 3 prompts; of `steps` decode steps),
    kernels those of the best of `repeats` profiles. Raises ConfigError when prompts and replies do not fit the
    context or the KV cache.
    """
    engine, vocabulary = loaded.engine, loaded.model_config
    length = prompt_tokens + WARM_UP + steps + 1
    if length > loaded.config.max_context:
        raise _too_long(prompt_tokens, steps, loaded.config.max_context)
    needed = rows * engine.scheduler.cache.pages_needed(length)
    if needed > loaded.config.num_pages:
        raise ConfigError(
            f"{rows} rows of {prompt_tokens} prompt tokens need {needed} pages of KV cache, this "
            f"engine has {loaded.config.num_pages}: take fewer rows, or a larger --max-memory"
        )
    prompts = [prompt_ids(vocabulary, prompt_tokens, seed) for seed in range(WARM_UP + PROMPTS + rows)]
    return [_prefill(engine, prompts[rows:], repeats), _decode(engine, prompts[:rows], steps, repeats)]


def _uncached() -> RequestOptions:
    """For a request that finds nothing cached, of an earlier profile or of a prompt that begins with the same token."""
    return RequestOptions(cache_salt=os.urandom(8).hex())


def _prefill(engine, prompts: list[list[int]], repeats: int) -> StepProfile:
    found: list[_Step] = []
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, greedy(1), _uncached())
        left = len(prompt)
        while engine.has_work:
            step = _run_step(engine)
            left -= step.tokens
            if len(found) == number and left < step.tokens:  # what follows is shorter
                found.append(step)
                if number == len(prompts) - 1:
                    measured = _measure(step, repeats)
    return _profile("prefill", found[WARM_UP:], *measured)


def _decode(engine, prompts: list[list[int]], steps: int, repeats: int) -> StepProfile:
    ids = [-1 - row for row in range(len(prompts))]  # of no prefill request
    for id, prompt in zip(ids, prompts, strict=True):
        # As long as the context, so that none ends before the others.
        engine.submit(id, prompt, greedy(None), _uncached())
    found: list[_Step] = []
    while len(found) < WARM_UP + steps:
        step = _run_step(engine)
        if any(output.finish for output in step.outputs):
            raise _too_long(len(prompts[0]), steps, engine.scheduler.max_context)
        if step.tokens == step.rows == len(prompts):
            found.append(step)
    measured = _measure(found[-1], repeats)
    for id in ids:
        engine.cancel(id)
    return _profile("decode", found[WARM_UP:], *measured)


def _too_long(prompt_tokens: int, steps: int, context: int) -> ConfigError:
    return ConfigError(f"{prompt_tokens} prompt tokens and {steps} steps do not fit the context of {context} tokens")


def _run_step(engine) -> _Step:
    scheduler, runner, before = engine.scheduler, engine.runner, engine.counters()
    phases: list[tuple[str, float]] = []

    def timed(name: str, call, *args):
        start = time.perf_counter()
        result = call(*args)
        phases.append((name, 1e6 * (time.perf_counter() - start)))
        return result

    batch = timed("schedule", scheduler.schedule, time.monotonic())
    if batch is None:
        raise EngineError("the engine has requests and runs none of them")
    filled = timed("fill", runner.fill, batch)
    ticket = timed("submit", runner.launch, filled)
    timed("wait", ticket.wait)
    context = max(entry.start + entry.count for entry in batch.entries)
    outputs = timed("commit", lambda: scheduler.commit(batch, runner.collect((ticket, filled.buffers.sampler))))
    after = engine.counters()
    experts = {name: after[name] - before[name] for name in after if name.startswith("expert_")}
    replay = filled.graph, filled.symbols
    return _Step(batch.num_tokens, len(batch.entries), context, phases, replay, outputs, runner, experts)


def _measure(step: _Step, repeats: int) -> tuple[float, list[LaunchTime]]:
    """(replay_us, kernels) of the step that ran last: its inputs are still there, so each replay computes the same."""
    graph, symbols = step.replay
    best = min((graph.profile(**symbols) for _ in range(repeats)), key=lambda run: sum(ns for _, ns in run))
    does = Launches(step.runner)
    kernels = [
        LaunchTime(name, grid, ns / 1e3, does.work(launch, symbols, step.rows, step.context))
        for (name, ns), grid, launch in zip(best, graph.grids(**symbols), graph.launches, strict=True)
    ]
    for _ in range(2):  # a GPU captures the list at the second
        graph.run(**symbols)
    start = time.perf_counter()
    graph.run(**symbols)
    count = max(1, min(MAX_REPLAYS, int(REPLAY_S / (time.perf_counter() - start))))
    rounds = []  # the least, as of the launches: another process may have its turn on the device in one
    for _ in range(repeats):
        start = time.perf_counter()
        tickets = [graph.submit(**symbols) for _ in range(count)]
        tickets[-1].wait()
        rounds.append(time.perf_counter() - start)
    return 1e6 * min(rounds) / count, kernels


def _profile(kind: str, steps: list[_Step], replay_us: float, kernels: list[LaunchTime]) -> StepProfile:
    step = sorted(steps, key=lambda step: step.us)[len(steps) // 2]
    context = steps[-1].context
    return StepProfile(kind, step.tokens, step.rows, context, step.phases, replay_us, kernels, step.experts)


def describe(step: StepProfile, floors: Floors | None = None) -> str:
    """The step as a table: microseconds, share and launches of each kernel. floors: of the machine; then also how much
    of the roofline each reaches, the least time for what it must read and multiply over its own, and by which of the
    two."""
    lines = [
        f"{step.kind}: tokens {step.tokens}, sequences {step.rows}, context {step.context}",
        "  host     " + ", ".join(f"{name} {us:.0f}" for name, us in step.phases) + f": {step.host_us:.0f} us",
        f"  kernels  replay {step.replay_us:.0f} us; {len(step.kernels)} launches one by one {step.kernels_us:.0f} us",
    ]
    if step.experts:
        found, missed, read, _ = step.experts.values()
        lines.append(
            f"  experts  {found:.0f} on the device, {missed:.0f} copied from host memory: {read / 2**20:.1f} MiB"
        )
    if floors:
        lines.append(f"  roofline {_of_roofline(step.work(), step.replay_us, floors)} of the replay; {floors.line()}")
    for name, count, us in step.totals():
        share = 100 * us / max(step.kernels_us, 1e-9)
        line = f"  {us:10.1f} us {share:5.1f} %  {count:4} x {us / count:9.2f} us  "
        if floors:
            line += f"{_of_roofline(step.work(name), us, floors):>15}  "
        lines.append(line + name)
    return "\n".join(lines)


def _of_roofline(work: Work, us: float, floors: Floors) -> str:
    """ "87 % reading"; "cached" for what moves faster than memory can: the kernel before has left it near."""
    least = 1e6 * work.seconds(floors)
    if not least:
        return "-"
    by = "reading" if work.bytes / floors.read / 1e3 >= least else "multiplying"
    return f"{100 * least / us:.0f} % {by}" if least <= 1.1 * us else "cached"


def trace(steps: list[StepProfile], about: dict) -> dict:
    """The steps one after another as a Chrome trace (chrome://tracing, ui.perfetto.dev; microseconds), a process each
    with two tracks: the host's phases, and the kernels one by one from where the host submits them. about: of the
    machine, kept beside it. Format: "Trace Event Format", Google, 2016."""
    events: list[dict] = []
    at = 0.0
    for pid, step in enumerate(steps, 1):
        title = f"{step.kind}: tokens {step.tokens}, sequences {step.rows}"
        events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": title}})
        for tid, name in ((1, "host"), (2, "kernels, one by one")):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})

        def add(tid: int, start: float, us: float, name: str, args: dict, pid: int = pid) -> float:
            place = {"ph": "X", "pid": pid, "tid": tid, "ts": round(start, 3), "dur": round(us, 3)}
            events.append(place | {"name": name, "cat": "host" if tid == 1 else "kernel", "args": args})
            return start + us

        host = kernels = at
        for name, us in step.phases:
            if name == "submit":
                kernels = host
            host = add(1, host, us, name, {})
        for number, kernel in enumerate(step.kernels):
            kernels = add(2, kernels, kernel.us, kernel.name, {"launch": number, "grid": list(kernel.grid)})
        at = max(host, kernels) + TRACE_GAP_US
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}
