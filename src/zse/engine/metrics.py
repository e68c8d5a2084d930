"""What an engine counts beside its scheduler, and the times of its start."""

from time import perf_counter, process_time

# Of features that are made when a request asks for them: before that, these zeros are told.
JOB_COUNTERS: dict[str, float] = dict.fromkeys(
    ("jobs_submitted", "jobs_finished", "jobs_cancelled", "jobs_failed", "jobs_refused", "job_tokens"), 0
)
BEAM_COUNTERS: dict[str, float] = dict.fromkeys(("beam_searches", "beam_steps"), 0)
# Adapters that requests may name, those in slots of the device, and how often one was put there.
ADAPTER_COUNTERS: dict[str, float] = dict.fromkeys(("adapters_loaded", "adapters_resident", "adapter_loads"), 0)
# Images that a tower encoded and the seconds that took, images of requests that were there already, embeddings that made
# room for others; what they take of host memory, and requests whose images are not encoded yet.
IMAGE_COUNTERS: dict[str, float] = dict.fromkeys(
    ("images_encoded", "image_seconds", "image_hits", "image_evictions", "image_cache_bytes", "images_waiting"), 0
)


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
