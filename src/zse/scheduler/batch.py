"""What a step runs and what comes of it: the batch that goes to a runner, the outputs that go to who asked; and how a
batch is made: how many tokens it may have; rows that decode first, then chunks of prompts, then who can be admitted."""

from collections.abc import Collection, Container, Sequence

import msgspec

from zse.cache.pages import BLOCK
from zse.errors import RequestError
from zse.scheduler import images
from zse.scheduler.fairness import EVERYBODY, StepPlan
from zse.scheduler.lifecycle import Lifecycle, choose_victim
from zse.scheduler.request import Request
from zse.tensor import SHORT_RUN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.cache.grouped import WindowTable

# A step of this length lets cancellations, heartbeats and other requests' tokens through often enough. Prompts of slow
# models run in chunks that last about this long.
STEP_TARGET_S = 0.5
# The share of a step's tokens that prompts get at least, however many rows decode: new requests must not wait for
# running ones to end. And where measured times give prompts their share of the machine.
LEAST_PREFILL_SHARE, LEAST_MEASURED_SHARE = 1 / 16, 1 / 64
# Weights of the newest step. Decode steps are many and even; a mixed step tells the cost of the next. Slow steps are
# the upper end of those without prompts, drafts included (an expectile of 0.8): the replies waited for them already.
DECODE_STEP, TOKEN_STEP = 1 / 8, 1 / 2
SLOWER_STEP, FASTER_STEP = 1 / 8, 1 / 32
# A budget grows at most so much from one step to the next: a single quick step proves little.
MAX_GROWTH = 2.0


def unread(place: int) -> int:
    """What stands for a draft that the host has not read yet: of its place among a device's results, and the other way round.
    Below -1, which no token is."""
    return -2 - place


# Structs: 256 of each are made in a step, in C.
class Entry(msgspec.Struct, eq=False, gc=False):
    """`count` tokens of a request from position `start`; the last `samples` of them have a line of logits each, which
    is sampled: 0 (a chunk that does not end the prompt), 1, or 1 + k where k drafts are verified.
    pages: the request's page table in token order, at least as long as start + count tokens need. drafts: token ids
    that stand behind request.tokens in this entry, or what unread() says; without them, where start == len(request.tokens), the token is the
    one that the batch in flight samples for this request. windows: the WindowTable of models with layers in groups.
    slot: of the request's state, of models with one, and kept: of the states behind each of its tokens but the last, where
    drafts are verified. rank: that has the pages, where ranks have pages of their own."""

    request: Request
    start: int
    count: int
    pages: list[int]
    samples: int
    drafts: Sequence[int] = ()
    windows: "WindowTable | None" = None
    slot: int = -1
    kept: Sequence[int] = ()
    rank: int = 0


class Batch:
    """What one step runs: decode rows first, then prompt chunks, oldest request first in each. Never empty.
    transfers: ("copy", page, page), ("out", page, slot), ("in", slot, page), those of states (StateSlots), to be done in
    this order before the entries run."""

    __slots__ = ("entries", "num_decode", "num_drafts", "num_rows", "num_samples", "num_tokens", "transfers")

    def __init__(self, entries: list[Entry], num_rows: int, transfers: list[tuple[str, int, int]], num_drafts: int = 0):
        """num_rows: entries that decode; num_drafts: draft tokens that they have together."""
        self.entries, self.num_rows, self.num_drafts, self.transfers = entries, num_rows, num_drafts, transfers
        self.num_decode = num_rows + num_drafts  # tokens of those that decode
        self.num_tokens = self.num_decode + sum([entry.count for entry in entries[num_rows:]])
        self.num_samples = self.num_decode + sum([entry.samples for entry in entries[num_rows:]])

    def by_entry(self, sampled: list) -> list:
        """The results of each entry: a result where there is one, a list of them where drafts are verified, else
        None."""
        results, at = [], 0
        for entry in self.entries:
            first, at = at, at + entry.samples
            results.append(sampled[first:at] if entry.drafts else sampled[first] if entry.samples else None)
        return results


class StepOutput(msgspec.Struct, eq=False, gc=False):
    """What a step says of a request: sampled tokens, and how it ended if it did.

    finish: None while running, "stop" (a stop id, which is the last of `tokens`), "length", "error" or "timeout" (no
    tokens, nothing follows, `error` says why). logprobs: one per token, as the runner gave them, or None.
    cached_tokens: of the prompt, that were in the prefix cache, and waited_s: seconds in the queue; told with the first
    tokens of a request, else 0. computed: of a request that ends with an error, tokens computed for it
    (Request.num_computed)."""

    id: int
    tokens: list[int]
    logprobs: list | None
    finish: str | None
    cached_tokens: int = 0
    waited_s: float = 0.0
    error: RequestError | None = None
    computed: int = 0


def _error(message: str, status: int, code: str, param: str | None = None) -> RequestError:
    return RequestError(message, status=status, type="server_error", code=code, param=param)


def numerical_error() -> RequestError:
    return _error("the model gave numbers that are not finite for this request", 500, "numerical_error")


def timeout_error() -> RequestError:
    return _error("the deadline passed while the request waited", 504, "timeout", "deadline_ms")


def tired_error() -> RequestError:
    message = "the request did not begin within the time that requests may wait here; try again later"
    return _error(message, 503, "overloaded")


class StepBudget:
    """How many tokens a step runs, and how many of them are of prompts, from the measured times of steps.

    A step that decodes takes `decode_s`; with p prompt tokens it takes p * token_s more. Replies wait for at most
    `ratio` times what their slow steps take when p = (ratio * slow_s - decode_s) / token_s, and the prompt has the rest
    of the machine: of even steps it takes ratio / (ratio - 1) times as long as alone, 1.5 times at a ratio of 3. The
    cost of a token grows along a prompt (attention looks at more), so the newest steps count most, and the rule is
    applied again before each step.

    max_tokens: of one step, at least max_rows. mixed_tokens: of a step that decodes and prefills (None: a quarter of
    max_tokens). ratio: SchedulingPolicy.mixed_ratio; 0: times are not measured. token_s: seconds of a prompt token
    beside replies, 0 when not measured. configured_tokens: max_tokens as given; is_limited: whether steps are shorter."""

    def __init__(self, max_tokens: int, mixed_tokens: int | None, max_rows: int, ratio: float):
        self.max_tokens = self.configured_tokens = max_tokens
        self._mixed_tokens, self._max_rows = mixed_tokens, max_rows
        self.ratio, self.token_s, self.is_limited = ratio, 0.0, False
        self._decode_s: dict[int, float] = {}  # by the number of rows that decode, in powers of two
        self._slow_s: dict[int, float] = {}
        self._last = 0  # prompt tokens of the last step that had some

    def limit(self, tokens: int) -> None:
        """From now on at most `tokens` in a step: whole blocks, at least one and one token of each row, at most what
        was configured."""
        self.max_tokens = min(self.configured_tokens, max(tokens // BLOCK * BLOCK, BLOCK, self._max_rows))
        self.is_limited = self.max_tokens < self.configured_tokens

    def prefill(self, num_decode: int) -> int:
        """Prompt tokens of a step that decodes `num_decode` lines.

        A step takes as long as its prompt tokens: beside running replies at most `mixed_tokens` in all, so that their
        next tokens are not held up for a whole chunk (256 tokens of a 135M model are about 0.3 s on two cores). Where
        both kinds of steps were measured, as many as the ratio allows."""
        most = self.max_tokens
        if not num_decode:
            return most
        mixed = most // 4 if self._mixed_tokens is None else min(self._mixed_tokens, most)
        tokens = max(1, int(most * LEAST_PREFILL_SHARE), mixed - num_decode)
        if not self.ratio:
            return tokens
        size = num_decode.bit_length()
        decode_s, slow_s = _nearest(self._decode_s, size), _nearest(self._slow_s, size)
        if decode_s is not None and slow_s is not None and self.token_s:
            wanted = (max(slow_s, decode_s) * self.ratio - decode_s) / self.token_s + 1e-6  # 20, not 19.999
            if self._last:
                wanted = min(wanted, MAX_GROWTH * max(self._last, tokens))
            tokens = int(wanted)
        return max(tokens, int(most * LEAST_MEASURED_SHARE), 1)

    def alone_s(self, num_decode: int, num_prompt: int) -> float:
        """What a step of these alone is likely to take."""
        decode_s = _nearest(self._decode_s, num_decode.bit_length()) if num_decode else None
        return (decode_s or 0.0) + self.token_s * num_prompt

    def observe(self, batch: Batch, seconds: float) -> None:
        """The batch took `seconds`."""
        if seconds > STEP_TARGET_S or self.is_limited and batch.num_tokens > batch.num_samples:
            self.limit(int(batch.num_tokens * STEP_TARGET_S / max(seconds, 1e-6)))
        if not self.ratio:
            return
        num_decode, num_prompt = batch.num_rows, batch.num_tokens - batch.num_decode
        size = num_decode.bit_length()
        if not num_prompt:
            slow = self._slow_s.get(size, seconds)
            weight = SLOWER_STEP if seconds > slow else FASTER_STEP
            self._slow_s[size] = slow + (min(seconds, 2 * slow) - slow) * weight
            if batch.num_decode == num_decode:
                known = self._decode_s.get(size, seconds)
                # One late step (another process had the core) must not count for many.
                self._decode_s[size] = known + (min(seconds, 4 * known) - known) * DECODE_STEP
            return
        decode_s = _nearest(self._decode_s, size)
        if num_decode and decode_s is None:
            return
        if not num_decode and self.token_s:
            return  # a whole step of prompts: cheaper for each token than a chunk beside replies
        token_s = max(seconds - (decode_s or 0.0) if num_decode else seconds, 0.05 * seconds) / num_prompt
        if self.token_s:
            token_s = self.token_s + (min(token_s, 4 * self.token_s) - self.token_s) * TOKEN_STEP
        self.token_s = token_s
        self._last = num_prompt


def _nearest(times: dict[int, float], size: int) -> float | None:
    """The seconds of this size, or what those of the nearest that is known make likely: between flat and proportional,
    for a step reads the weights once whatever its rows."""
    if not times or size in times:
        return times.get(size)
    known = min(times, key=lambda other: abs(other - size))
    return times[known] * 2 ** ((size - known) / 2)


class BatchBuilder:
    """Makes batches.

    Args:
        life, budget: who runs and may begin to, and how many tokens a step has.
        chunked_prefill: whether replies run beside prompts.
        max_drafts: draft tokens that all requests of one step may verify together.
        micro_batches: into how many parts the rows that decode are divided; each runs in a batch of its own, and they are in
            flight together, on the ranks of a pipeline.
        feeds: whether a batch may have rows whose last token is still in flight, which the device feeds it.
    """

    def __init__(
        self,
        life: Lifecycle,
        budget: StepBudget,
        chunked_prefill: bool,
        max_drafts: int,
        micro_batches: int = 1,
        feeds: bool = True,
    ):
        self._life, self._budget, self._micro_batches, self._feeds = life, budget, micro_batches, feeds
        self._chunked_prefill, self.max_drafts = chunked_prefill, max_drafts
        self._cache = cache = life.cache
        self._page_size, self._grouped, self._states = cache.page_size, cache.grouped, cache.states
        if (states := cache.states) is not None:  # whoever begins finds a slot
            states.most_kept = min(states.most_kept, states.num_slots - life.max_rows)
            self.max_drafts = min(max_drafts, states.most_kept)

    def has_prompts(self) -> bool:
        """Whether prompts are to be computed: those of running requests, or of one that there is a row for."""
        life = self._life
        return bool(life.queue.num_waiting and life.free_rows) or any(
            len(request.tokens) - request.computed_len > 1 for request in life.running
        )

    def build(self, in_flight: Sequence[Batch], plan: StepPlan) -> Batch | None:
        """The next batch, or None when nothing can run, or nothing without a preemption, which a batch in flight forbids. plan:
        who has to leave this step to others."""
        life, counters = self._life, self._life.counters
        preemptions = counters.preemptions
        decoding: tuple[list[Entry], int] | None = [], 0
        if self._chunked_prefill or not self.has_prompts():
            decoding = self._decode_entries(in_flight, plan.resting)
        if decoding is None:
            return None
        entries, num_drafts = decoding
        num_decode = len(entries)
        lines = num_decode + num_drafts
        left_out, queue = plan.left_out, life.queue
        beside = lines  # what prompts must leave time for
        if not lines and self._micro_batches > 1:
            beside = sum([request.pending for request in life.running])
        budget = min(max(0, self._budget.max_tokens - lines), self._budget.prefill(beside), plan.max_prompt)
        # Pages that a preemption has just freed are for the decode rows: admitting now would take them back.
        may_admit = preemptions == counters.preemptions
        if num_decode < len(life.running):
            for request in queue.by_share(life.running):
                if len(request.tokens) - request.computed_len <= 1 or request.tenant in left_out:
                    continue
                # Prompts of tenants that have less do not wait until this one is computed.
                while (
                    budget
                    and may_admit
                    and queue.is_behind(request.tenant)
                    and (admitted := life.admit((*left_out, request.tenant)))
                ):
                    budget = max(0, budget - self._add_chunk(entries, admitted, budget))
                if budget:
                    budget = max(0, budget - self._add_chunk(entries, request, budget))
        while budget and may_admit and (admitted := life.admit(left_out)):
            budget = max(0, budget - self._add_chunk(entries, admitted, budget))
        life.is_short = budget > 0 and may_admit and queue.num_waiting > 0
        if not entries and not self._chunked_prefill:
            # Nobody could be admitted.
            entries, num_drafts = self._decode_entries(in_flight, plan.resting) or ([], 0)
            num_decode = len(entries)
        if not entries:
            is_stuck = self._grouped is not None and any(not request.held for request in life.running)
            if is_stuck and not in_flight and plan is EVERYBODY:
                # Chunks wait for windowed pages that others share and nobody else gives.
                life.preempt(choose_victim(life.running) or life.running[-1])
                return self.build(in_flight, EVERYBODY)
            return None
        if self._grouped is not None:
            for entry in entries:
                entry.windows = self._grouped.windows(entry.request.id)
        if self._cache.rank_of is not None:
            for entry in entries:
                entry.rank = self._cache.rank_of[entry.request.id]
        if self._states is not None:
            for entry in entries:
                entry.slot = self._states.live[entry.request.id]
        return Batch(entries, num_decode, self._cache.take_transfers(), num_drafts)

    def _micro_batch(self, in_flight: Sequence[Batch]) -> tuple[int, Container[Request]]:
        """Of several micro-batches: how many rows the next may have, so that all get as many, and who of those in flight may be
        among them: those of the oldest, once all are in flight, or where there is nobody else."""
        decoding = [
            request
            for request in self._life.running
            if request.pending or not request.held and len(request.tokens) - request.computed_len == 1
        ]
        fed: Container[Request] = ()
        if self._feeds and in_flight:
            is_alone = len(in_flight) == 1 and all([request.pending for request in decoding])
            if is_alone or len(in_flight) == self._micro_batches:
                fed = {entry.request for entry in in_flight[0].entries if entry.samples}
        return -(-len(decoding) // self._micro_batches), fed

    def _decode_entries(
        self, in_flight: Sequence[Batch], resting: Collection[Request]
    ) -> tuple[list[Entry], int] | None:
        """An entry for each running request that has one token to run, or for a micro-batch of them, and how many drafts they
        have; None when that needs pages that only a preemption gives, which a batch in flight forbids.
        resting: have none now."""
        entries: list[Entry] = []
        most_rows, fed = self._micro_batch(in_flight) if self._micro_batches > 1 else (len(self._life.running), None)
        running, cache = self._life.running, self._cache
        tables, page_size, states = cache.tables, self._page_size, self._states
        num_drafts = 0
        # Every running request can have its token beside the drafts.
        most_drafts = min(self.max_drafts, self._budget.max_tokens - len(running))
        index = 0
        # Preemption takes from the far end of this list, or this request itself.
        while index < len(running) and len(entries) < most_rows:
            request = running[index]
            if resting and request in resting:
                index += 1
                continue
            start, pending = request.computed_len, request.pending
            length = len(request.tokens) + pending
            # The last token that a request may have is never fed back.
            if (
                length - start == 1
                and length < request.max_len
                and not (request.stepwise and (pending or request.held))
                and (not pending or fed is None or pending == 1 and request in fed)
            ):
                # Only the first token of a page can lack its page.
                if not start % page_size and not cache.reserve(request.id, length):
                    if in_flight:
                        for entry in entries:  # none of them runs after all
                            other = entry.request
                            other.computed_len, other.pending = entry.start, other.pending - entry.samples
                            if states is not None and entry.kept:
                                states.settle(other.id)
                        return None
                    if not self._life.make_room(request, length):
                        continue
                if states is not None and start >= request.next_place:
                    self._pass_place(request, start, is_late=True)
                if request.drafts:
                    num_drafts += self._add_run(entries, request, most_drafts - num_drafts)
                else:
                    entries.append(Entry(request, start, 1, tables[request.id], 1))
                    request.computed_len = length
                    request.pending = pending + 1
            index += 1
        return entries, num_drafts

    def _add_run(self, entries: list[Entry], request: Request, most: int) -> int:
        """An entry of the request's next token and its drafts behind it, at most `most` and as far as pages reach
        that nobody else needs now, and slots for the states behind them; how many drafts it has."""
        drafts: Sequence[int] = request.drafts or ()
        request.drafts = ()
        cache, length = self._cache, len(request.tokens)
        count = min(len(drafts), most, request.max_len - length - 1)
        # One page a running row stays free, as at an admission: a draft is not worth a preemption.
        if length + count > cache.covered(request.id) and (
            cache.allocator.num_free <= len(self._life.running) or not cache.reserve(request.id, length + count)
        ):
            count = cache.covered(request.id) - length
        count, kept = max(count, 0), []
        if self._states is not None:
            kept = self._states.save(request.id, min(count, SHORT_RUN - 1))
            count = len(kept)
        start, pages = request.computed_len, cache.tables[request.id]
        entries.append(Entry(request, start, 1 + count, pages, 1 + count, drafts[:count], kept=kept))
        request.computed_len = length + count
        request.pending += 1 + count
        return count

    def _add_chunk(self, entries: list[Entry], request: Request, most: int) -> int:
        """An entry of the next tokens of a prompt, at most `most` and as far as its pages reach, without the last one if
        it is held; how many. An image that one step computes may make them more, as far as a step goes, or none."""
        cache, start = self._cache, request.computed_len
        left = len(request.tokens) - start - request.held
        count = min(left, most)
        if request.options.images and (count := self._uncut(entries, request, start, count)) > left:
            return 0
        if self._grouped is not None:
            if cache.covered(request.id) < start + count:
                cache.reserve(request.id, 0)
            count = min(count, cache.covered(request.id) - start)
            if request.options.images:
                count = images.uncut(request.options.images, start + count) - start
        if count <= 0:
            return 0
        if self._states is not None:
            count = min(count, self._pass_place(request, start) - start)
        end = request.computed_len = start + count
        samples = int(end == len(request.tokens))
        request.pending += samples
        request.chunks_in_flight += not samples
        entries.append(Entry(request, start, count, cache.tables[request.id], samples))
        return count

    def _pass_place(self, request: Request, length: int, is_late: bool = False) -> int:
        """`length` tokens of the request are computed, or will be when this batch runs: its state is kept where that is
        one of its places, or, is_late, where it has passed one. Behind how many it is to be kept next."""
        states = self._states
        assert states is not None
        if length == request.next_place or is_late:
            states.keep(request.id, length)
        if length >= request.next_place:
            request.next_place = states.next_place(request.places, request.prompt_len, length)
        return request.next_place

    def _uncut(self, entries: list[Entry], request: Request, start: int, count: int) -> int:
        """How many tokens from `start` on run in this step, `count` but for images that one step computes."""
        placed = request.options.images
        whole = images.uncut(placed, start + count) - start
        if whole > 0:
            return whole
        image = next(image for image in placed if image.whole and image.start <= start < image.end)
        room = self._budget.configured_tokens - sum(entry.count for entry in entries)
        return image.end - start if image.end - start <= room else 0
