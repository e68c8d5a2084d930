"""What a request may ask of the scheduler and the cache, beside what it asks of the sampler (sampling/params.py), and
how the scheduler chooses."""

from typing import Annotated, Any

import msgspec

from zse.errors import ConfigError
from zse.sampling.fields import ROUTES, Boolean, Field, Integer, Number, String
from zse.structured.options import Structure

MAX_WEIGHT = 1000.0
# A request without a deadline is ordered as if it had this one: those that must be done sooner go ahead of it.
PATIENCE_S = 30.0
LOWEST = -10  # priority


class PlacedImage(msgspec.Struct, frozen=True):
    """An image of `count` tokens from `start` on. key: what its content is called. numbers: i32 [count] in bytes, all
    below 0: what stands for its tokens where prefixes are compared, equal for equal images alone. whole: its tokens
    see each other, so that one step computes all of them. content: the engine's Encoding. grid: rows and columns of an image
    whose tokens turn by their place in it, (0, 0): by their place in the prompt."""

    start: int
    count: int
    key: bytes
    numbers: bytes
    whole: bool = False
    content: Any = None
    grid: tuple[int, int] = (0, 0)

    @property
    def end(self) -> int:
        return self.start + self.count


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The second part of the table of request fields; what stands without a Field is the server's to fill in.

    tenant: who pays: shares are counted, and cached prefixes kept apart, by it. weight: of the tenant's share, None:
    what the engine was started with (EngineConfig.tenant_weights, else 1). priority: higher goes first. deadline_ms:
    from submission to the last token, None: none. cache_salt: keeps cached prefixes apart further. speculation: whether
    drafts may be verified for it (its tokens are the same). adapter: the id of a loaded one, the hash of what it holds;
    "": none. state_points: numbers of tokens of the prompt, ascending, behind which messages begin: where another prompt
    is likely to go another way, a model with a state keeps it there. structure: the form of the answer, None: any.
    max_wait_s: how long it may wait before it begins, None: any time. session: the name (32 hex digits) of the session that
    it is of, "": of none; session_ttl: seconds for which that is kept from now on. images: of the prompt, in its order: the
    engine's ImageInputs, in the scheduler PlacedImages. rank: the one to whose pages the prompt's beginning was read, where ranks have pages
    of their own (the engine's to fill in), -1: of none."""

    tenant: str = ""
    weight: Annotated[float | None, Field(Number(0, MAX_WEIGHT, above_low=True), routes=())] = None
    priority: Annotated[
        int,
        Field(
            Integer(LOWEST, 10),
            "From -10 to 10: higher goes first among the requests of one key; one that waits gains on newer ones "
            "(--ageing-ms).",
            routes=ROUTES,
        ),
    ] = 0
    deadline_ms: Annotated[
        float | None,
        Field(
            Number(1.0, 86_400_000.0),
            "When the whole answer is wanted, from now: sooner goes first; answered 504 if it passes before the request "
            "has begun.",
            routes=ROUTES,
        ),
    ] = None
    cache_salt: Annotated[
        str, Field(String(256, empty=False), "Keeps cached prompts apart: only requests with the same one share.")
    ] = ""
    speculation: Annotated[
        bool, Field(Boolean(), "false verifies no drafts for this request; its answer is the same.")
    ] = True
    adapter: str = ""
    state_points: tuple[int, ...] = ()
    session: str = ""
    session_ttl: float = 0.0
    structure: Structure | None = None
    max_wait_s: float | None = None
    images: tuple[Any, ...] = ()
    rank: int = -1


DEFAULT = RequestOptions()


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


class SchedulingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a Scheduler chooses, as EngineConfig and docs/cli.md have it. Each can be switched off.

    Args:
        ageing_s: a request of one level of priority more goes ahead of those submitted up to so much earlier.
        page_transfer_s: what a page takes to host memory, or back.
    """

    batching: str = "continuous"
    chunked_prefill: bool = True
    fair_share: bool = True
    tenant_weights: dict[str, float] = {}
    ageing_s: float = 10.0
    max_waiting_tokens: int = 1 << 22
    reserve_output: bool = True
    mixed_ratio: float = 0.0
    preemption: str = "auto"
    page_transfer_s: float = 0.0

    def swap_is_quicker(self, length: int, num_pages: int, token_s: float) -> bool:
        """Whether a preempted request with `length` tokens in `num_pages` pages should go to the host and back.

        token_s: seconds to compute a token again; 0 when not measured: copies are taken to be quicker."""
        if self.preemption != "auto":
            return self.preemption == "swap"
        return not token_s or 2 * self.page_transfer_s * num_pages < token_s * length
