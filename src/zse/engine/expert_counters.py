"""What a model counts whose experts have places on the device by turns, for the engine's heartbeat."""

from zse.lazy import logging
from zse.scheduler.feature import Feature


class ExpertCounters(Feature):
    """experts: zse.models.host_experts.HostExperts."""

    is_live = False

    def __init__(self, experts):
        self._experts = experts
        self._last: dict[str, float] | None = None  # once the device is given back

    def counters(self) -> dict[str, float]:
        """Totals since the start, of all layers."""
        if self._last is not None:
            return self._last
        there = kept = spilled = moved = read = 0
        for layer, (here, came, passed) in self._experts.counts().items():
            nbytes = self._experts.layers[layer].expert_bytes
            there, kept, spilled = there + here, kept + came, spilled + passed
            moved, read = moved + came * nbytes, read + (came + passed) * nbytes
        return {
            "expert_hits": there,
            "expert_misses": kept + spilled,
            "expert_read_bytes": read,
            "expert_moved_bytes": moved,
        }

    def close(self) -> None:
        """What there was, for a log at info."""
        self._last = totals = self.counters()
        logging.getLogger("zse.engine").info(
            "experts: %d found on the device, %d copied from host memory, %.0f MiB, of which slots kept %.0f MiB",
            totals["expert_hits"],
            totals["expert_misses"],
            totals["expert_read_bytes"] / 2**20,
            totals["expert_moved_bytes"] / 2**20,
        )
