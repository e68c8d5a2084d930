"""Who goes first, who must yield, and how much prompt runs beside running replies.

First come, first served: the oldest request runs, the youngest yields. Other policies (priorities, fairness between
tenants) change age_order; the scheduler relies only on it being a total order over live requests.
"""

from collections.abc import Iterable

from zse.scheduler.request import Request

# A request that was preempted this often is admitted again only with all the pages that it can ever need, and is
# never chosen again: recomputation is bounded and the request finishes.
MAX_PREEMPTIONS = 3
# The share of a step's tokens that prompts get at least, however many rows decode: new requests must not wait for running
# ones to end.
LEAST_PREFILL_SHARE = 1 / 16


def age_order(request: Request) -> int:
    """Sort key: the waiting queue and the running list are kept in this order."""
    return request.arrival


def is_pinned(request: Request) -> bool:
    return request.preemptions >= MAX_PREEMPTIONS


def choose_victim(running: Iterable[Request]) -> Request | None:
    """The running request that gives up its pages when a decode step finds none: the youngest unpinned one."""
    return max((request for request in running if not is_pinned(request)), key=age_order, default=None)


def prefill_budget(max_tokens: int, num_decode: int, mixed_tokens: int) -> int:
    """Prompt tokens that may run in a step of `max_tokens` which also decodes `num_decode` rows.

    A step takes as long as its prompt tokens: beside running replies at most `mixed_tokens` in all, so that their next
    tokens are not held up for a whole chunk (256 tokens of a 135M model are about 0.3 s on two cores).
    """
    return max_tokens if not num_decode else max(1, int(max_tokens * LEAST_PREFILL_SHARE), mixed_tokens - num_decode)
