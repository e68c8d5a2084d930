"""Who goes first, who must yield, and what is kept free: the choices of the scheduler, each of which can be switched off.

Within a tenant requests go by `due_time`; between tenants by the share of the engine that they have had (queue.py).
"""

from collections.abc import Iterable

import msgspec

from zse.scheduler.options import RequestOptions
from zse.scheduler.request import Request

# A request that was preempted this often is admitted again only with all the pages that it can ever need, and is
# never chosen again (it is pinned): the request finishes.
MAX_PREEMPTIONS = 3
# So is every request while preemptions have thrown away more than this share of all tokens that ran.
MAX_RECOMPUTED = 1 / 4
# The share of a step's tokens that prompts get at least, however many rows decode: new requests must not wait for running
# ones to end.
LEAST_PREFILL_SHARE = 1 / 16
# And where measured times give prompts their share of the machine.
LEAST_MEASURED_SHARE = 1 / 64
# With so many rows one is kept for a tenant that has none.
LEAST_ROWS_TO_KEEP = 4
# A request without a deadline is ordered as if it had this one: those that must be done sooner go ahead of it.
PATIENCE_S = 30.0


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How a Scheduler chooses; EngineConfig has these fields for users.

    batching: "continuous", or "static": nobody is admitted while a batch runs. chunked_prefill: prompts share steps with
    running replies; without it replies wait until prompts are computed. fair_share: tenants get the engine in proportion
    to their weights (tenant_weights, else 1). ageing_s: a request of one level of priority more goes ahead of those
    that came up to so much earlier. max_waiting_tokens: prompt tokens that may queue. reserve_output: room for
    an expected reply is kept free at admission. mixed_ratio: a step that also computes prompts may take so many times
    a decode step (0: a fixed number of tokens). preemption: "recompute", "swap" to host slots as far as there are any, or
    "auto", whichever is quicker by measured times, where a page takes page_transfer_s each way."""

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


def due_time(options: RequestOptions, now: float, ageing_s: float) -> float:
    """When the request should be done, for the order only: a level of priority counts like `ageing_s` earlier.

    The value is fixed when the request comes (earliest virtual deadline first), so a request is overtaken only by those
    that come within PATIENCE_S + ageing_s * (levels above it) after it: every wait is bounded.
    """
    patience = PATIENCE_S if options.deadline_ms is None else min(options.deadline_ms / 1000, PATIENCE_S)
    return now + patience - ageing_s * options.priority


def age_order(request: Request) -> tuple[float, int]:
    """Sort key: the waiting queue and the running list are kept in this order."""
    return request.due, request.arrival


def choose_victim(requests: Iterable[Request]) -> Request | None:
    """The request that gives up its pages when a decode step finds none: the last in order, unpinned."""
    return max((request for request in requests if not request.is_pinned), key=age_order, default=None)


def swap_is_quicker(policy: Policy, length: int, num_pages: int, token_s: float) -> bool:
    """Whether a preempted request with `length` tokens in `num_pages` pages should go to the host and back. token_s:
    seconds to compute one again, 0 when not measured."""
    if policy.preemption != "auto":
        return policy.preemption == "swap"
    # Nothing measured: copies are taken to be quicker.
    return not token_s or 2 * policy.page_transfer_s * num_pages < token_s * length


def prefill_budget(max_tokens: int, num_decode: int, mixed_tokens: int) -> int:
    """Prompt tokens that may run in a step of `max_tokens` which also decodes `num_decode` rows.

    A step takes as long as its prompt tokens: beside running replies at most `mixed_tokens` in all, so that their next
    tokens are not held up for a whole chunk (256 tokens of a 135M model are about 0.3 s on two cores).
    """
    return max_tokens if not num_decode else max(1, int(max_tokens * LEAST_PREFILL_SHARE), mixed_tokens - num_decode)
