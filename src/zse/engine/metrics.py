"""What an engine has done so far: counts and times, cheap enough to keep at every step."""

from time import perf_counter, process_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.scheduler.batch import Batch, Output

# Of features that are made when a request asks for them: before that, these zeros are told.
JOB_COUNTERS: dict[str, float] = dict.fromkeys(
    ("jobs_submitted", "jobs_finished", "jobs_cancelled", "jobs_failed", "jobs_refused", "job_tokens"), 0
)
BEAM_COUNTERS: dict[str, float] = dict.fromkeys(("beam_searches", "beam_steps"), 0)


class EngineMetrics:
    """Totals since the start. prompt_tokens: prefilled (recomputed ones again); sampled_tokens: of replies."""

    __slots__ = ("longest_step_s", "prompt_tokens", "sampled_tokens", "step_s", "steps")

    def __init__(self):
        self.steps = self.prompt_tokens = self.sampled_tokens = 0
        self.step_s = self.longest_step_s = 0.0

    def record_step(self, batch: "Batch", outputs: "list[Output]", seconds: float) -> None:
        """A step ran `batch` and gave `outputs`."""
        self.steps += 1
        self.prompt_tokens += batch.num_tokens - batch.num_samples
        self.sampled_tokens += sum([len(output.tokens) for output in outputs])
        self.step_s += seconds
        if seconds > self.longest_step_s:
            self.longest_step_s = seconds

    def snapshot(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


class Phases:
    """Start-up phases: name → milliseconds since exec, in the order in which they ended."""

    def __init__(self, clock):
        """clock: () → seconds since this process's exec."""
        self._clock = clock
        self.ms: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.ms[name] = round(1000 * self._clock(), 1)


def since_exec_clock():
    """A clock of seconds since this process's exec: time.perf_counter shifted by the processor time used so far.

    Until this call the interpreter was single-threaded and hardly ever waited, so its processor time is its age; the
    kernel's own start time has a resolution of 10 ms only.
    """
    start = perf_counter() - process_time()
    return lambda: perf_counter() - start
