"""What a request may ask of the scheduler and the cache, beside what it asks of the sampler (sampling/params.py)."""

import msgspec

from zse.errors import ConfigError, RequestError
from zse.structured.options import Structure

PRIORITIES = (-10, 10)
MAX_DEADLINE_MS = 86_400_000.0
MAX_WEIGHT = 1000.0


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """tenant: who pays: shares are counted, and cached prefixes kept apart, by it. weight: of the tenant's share, None:
    what the engine was started with (EngineConfig.tenant_weights, else 1).
    priority: higher goes first, within PRIORITIES. deadline_ms: from submission to the last token, None: none.
    cache_salt: keeps cached prefixes apart further. speculate: whether drafts may be verified for it (its tokens are the
    same). structure: the form of the answer, None: any."""

    tenant: str = ""
    weight: float | None = None
    priority: int = 0
    deadline_ms: float | None = None
    cache_salt: str = ""
    speculate: bool = True
    structure: Structure | None = None

    @property
    def salt(self) -> tuple[str, ...]:
        """What must be equal beside the tokens for two requests to share a KV page."""
        return self.tenant, self.cache_salt


DEFAULT = RequestOptions()


def check_options(options: RequestOptions) -> None:
    """Raises RequestError for a value outside its range."""
    low, high = PRIORITIES
    if not low <= options.priority <= high:
        raise RequestError(f"priority must be from {low} to {high}", code="out_of_range", param="priority")
    if options.deadline_ms is not None and not 0 < options.deadline_ms <= MAX_DEADLINE_MS:
        raise RequestError(
            f"deadline_ms must be above 0 and at most {MAX_DEADLINE_MS:.0f}", code="out_of_range", param="deadline_ms"
        )
    if options.weight is not None and not 0 < options.weight <= MAX_WEIGHT:
        raise RequestError(f"weight must be above 0 and at most {MAX_WEIGHT:.0f}", code="out_of_range", param="weight")


def parse_weights(text: str) -> dict[str, float]:
    """The weights of "name=2,other=0.5". Raises ConfigError."""
    weights = {}
    for part in text.split(",") if text else ():
        name, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or name in weights or not 0 < weight <= MAX_WEIGHT:
            raise ConfigError(
                f"tenant_weights: {part!r} is not NAME=WEIGHT with a new name and a weight above 0, at "
                f"most {MAX_WEIGHT:.0f}"
            )
        weights[name] = weight
    return weights
