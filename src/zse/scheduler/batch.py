"""What a step runs and what came of it: the batch that goes to a runner, the outputs that go to who asked."""

from collections.abc import Sequence

import msgspec

from zse.errors import RequestError
from zse.scheduler.request import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.cache.grouped import WindowTable


# Structs: 256 of each are made in a step, in C.
class Entry(msgspec.Struct, eq=False, gc=False):
    """`count` tokens of a request from position `start`; the last `samples` of them have a line of logits each, which
    is sampled: 0 (a chunk that does not end the prompt), 1, or 1 + k where k drafts are verified.
    pages: the request's page table in token order, at least as long as start + count tokens need. drafts: token ids
    that stand behind request.tokens in this entry; without them, where start == len(request.tokens), the token is the
    one that the batch in flight samples for this request. windows: the WindowTable of models with layers in groups."""

    request: Request
    start: int
    count: int
    pages: list[int]
    samples: int
    drafts: Sequence[int] = ()
    windows: "WindowTable | None" = None


class Batch:
    """What one step runs: decode rows first, then prompt chunks, oldest request first in each. Never empty.
    transfers: ("copy", page, page), ("out", page, slot), ("in", slot, page), to be done in this order before the
    entries run."""

    __slots__ = ("entries", "num_decode", "num_drafts", "num_samples", "num_tokens", "transfers")

    def __init__(
        self, entries: list[Entry], num_decode: int, transfers: list[tuple[str, int, int]], num_drafts: int = 0
    ):
        """num_decode: entries that decode; num_drafts: draft tokens that they have together."""
        self.entries, self.transfers, self.num_drafts = entries, transfers, num_drafts
        self.num_decode = num_decode + num_drafts  # lines: decoded tokens, drafts among them
        self.num_tokens = self.num_decode + sum([entry.count for entry in entries[num_decode:]])
        self.num_samples = self.num_decode + sum([entry.samples for entry in entries[num_decode:]])

    def by_entry(self, sampled: list) -> list:
        """The results of each entry: a result where there is one, a list of them where drafts are verified, else None."""
        if not self.num_drafts and self.num_samples == len(self.entries):
            return sampled
        results, at = [], 0
        for entry in self.entries:
            first, at = at, at + entry.samples
            results.append(sampled[first:at] if entry.drafts else sampled[first] if entry.samples else None)
        return results


class Output(msgspec.Struct, eq=False, gc=False):
    """What a step says of a request: sampled tokens, and how it ended if it did.

    finish: None while running, "stop" (a stop id, which is the last of `tokens`), "length", "error" or "timeout" (no
    tokens, nothing follows, `error` says why). logprobs: one per token, as the runner gave them, or None. cached_tokens:
    of the prompt, that were in the prefix cache; told with the first tokens of a request, else 0."""

    id: int
    tokens: list[int]
    logprobs: list | None
    finish: str | None
    cached_tokens: int = 0
    error: RequestError | None = None


def numerical_error() -> RequestError:
    return RequestError(
        "the model gave numbers that are not finite for this request",
        status=500,
        type="server_error",
        code="numerical_error",
    )


def timeout_error() -> RequestError:
    return RequestError(
        "the deadline passed while the request waited",
        status=504,
        type="server_error",
        code="timeout",
        param="deadline_ms",
    )
