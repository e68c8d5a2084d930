"""What came out of a batch: tokens enter their requests, which run on or end, and outputs say so."""

from collections.abc import Sequence

from zse.scheduler.batch import Batch, Entry, Output, numerical_error
from zse.scheduler.lifecycle import Lifecycle
from zse.scheduler.request import FINISHED, RUNNING, Request


class BatchResults:
    """vocab_size: what sampled ids are below."""

    def __init__(self, life: Lifecycle, vocab_size: int):
        self._life, self._cache, self._vocab_size = life, life.cache, vocab_size
        self._page_size, self._grouped = life.cache.page_size, life.cache.grouped

    def take(self, batch: Batch, sampled: list[tuple[int, object]]) -> list[Output]:
        """See Scheduler.commit."""
        outputs: list[Output] = []
        life, grouped, vocab_size = self._life, self._grouped, self._vocab_size
        tell, has_drafts = outputs.append, batch.num_drafts > 0
        for entry, results in zip(batch.entries, batch.by_entry(sampled), strict=True):
            request = entry.request
            if request.state is FINISHED:
                life.counters.late_results += 1
                request.pending -= entry.samples
                request.chunks_in_flight -= not entry.samples
                if not request.in_flight:
                    life.release(request)
            elif has_drafts and entry.drafts:
                outputs += self._take_run(entry, results)
            elif results is not None:
                request.pending -= 1
                token, logprob = results
                if not 0 <= token < vocab_size:
                    tell(self._fail(request))
                    continue
                tokens = request.tokens
                length = request.committed_len = len(tokens)  # all that was known is computed now, and sound
                tokens.append(token)
                cached, finish = 0, None
                if length >= request.checkpoint or token in request.stop_ids:
                    cached = self._pass_checkpoint(request, length, length)
                    finish = self._ended(request, token)
                tell(Output(request.id, [token], None if logprob is None else [logprob], finish, cached))
            else:
                request.chunks_in_flight -= 1
            if grouped is not None and request.state is RUNNING:
                # What is in flight of this request continues from here.
                grouped.trim(request.id, request.committed_len if entry.drafts else entry.start + entry.count)
        return outputs

    def _pass_checkpoint(self, request: Request, first: int, length: int) -> int:
        """`length` tokens of the request are computed and sound, and those from place `first` on were sampled in this
        step: what need not be done after each. How many of the prompt were cached, when its first token is among them."""
        is_first = first == request.prompt_len
        self._life.prompts.end(request)
        self._cache.commit(request.id, request.tokens, length, partial=is_first)
        request.checkpoint = min(length + self._page_size - length % self._page_size, request.max_len - 1)
        return request.cached_len if is_first else 0

    def _take_run(self, entry: Entry, sampled: Sequence[tuple[int, object]]) -> list[Output]:
        """Take the results of an entry with drafts: line i was sampled behind draft i - 1."""
        request, drafts = entry.request, entry.drafts
        request.pending -= entry.samples
        accepted: list[int] = []
        logprobs = []
        for line, (token, logprob) in enumerate(sampled):
            if not 0 <= token < self._vocab_size:
                # A draft may be the cause, also of what stands before it (a kernel multiplies what it masks by 0): the
                # request continues from here without drafts, and the next step finds out.
                request.drafts = None
                break
            accepted.append(token)
            logprobs.append(logprob)
            request.tokens.append(token)
            if self._is_last(request, token) or line < len(drafts) and token != drafts[line]:
                break
        counters = self._life.counters
        counters.verified_runs += 1
        counters.drafted_tokens += len(drafts)
        # Behind these stand K and V of drafts that were not accepted: the next step writes over them before it reads.
        request.computed_len = end = entry.start + len(accepted)
        if not accepted:
            return []  # what is committed stays as it is: this may be the end of a prompt that is not finite
        counters.accepted_tokens += len(accepted) - 1
        request.committed_len = end
        cached = self._pass_checkpoint(request, entry.start + 1, end) if end >= request.checkpoint else 0
        finish = self._ended(request, accepted[-1])
        return [Output(request.id, accepted, None if logprobs[0] is None else logprobs, finish, cached)]

    @staticmethod
    def _is_last(request: Request, token: int) -> bool:
        return token in request.stop_ids or len(request.tokens) >= request.max_len

    def _ended(self, request: Request, token: int) -> str | None:
        """Why the token, which the request has now, is its last, or None; the request has ended then."""
        if not self._is_last(request, token):
            return None
        self._life.finish(request)
        return "stop" if token in request.stop_ids else "length"

    def _fail(self, request: Request) -> Output:
        self._life.counters.failed += 1
        self._cache.distrust(request.id)
        self._life.end(request)
        return Output(request.id, [], None, "error", error=numerical_error())
