"""What a model counts whose experts have places on the device by turns, for the engine's heartbeat."""

from zse.scheduler.feature import Feature


class ExpertCounters(Feature):
    """experts: zse.models.host_experts.HostExperts."""

    is_live = False

    def __init__(self, experts):
        self._experts = experts

    def counters(self) -> dict[str, float]:
        """Totals since the start, of all layers."""
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
