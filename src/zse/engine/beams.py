"""Beam searches beside other requests: every beam is a request of the scheduler, forked from the one it continues, so
that beams share the KV pages of what they have in common.

Beams advance together: one that has its candidates is held until all of its search have theirs. Where held beams have
the rows or pages that others of their search wait for, nothing can run; then they are preempted.
"""

from typing import Any, NamedTuple

from zse.engine.messages import Searched, SearchedReply, TokenLogprob
from zse.engine.metrics import BEAM_COUNTERS
from zse.errors import RequestError
from zse.sampling.beam import BeamParams, BeamSearch, check_beams
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import StepOutput
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.engine.core import Engine

FIRST_ID = -(1 << 62)  # of the beams' requests: no other request has such an id


class CompletedSearch(NamedTuple):
    """A search that completed: its Searched, or the RequestError that ended it, after so many tokens."""

    id: int
    result: Searched | None
    error: RequestError | None
    computed_len: int


class _Search:
    """ids: of the beams' requests, in the order of search.beams; lines: candidates of those that have them. num_made:
    tokens that were sampled for any of them."""

    def __init__(self, id: int, search: BeamSearch, first: int, num_prompt: int):
        self.id, self.search, self.ids = id, search, [first]
        self.num_prompt, self.cached_tokens, self.num_made = num_prompt, 0, 0
        self.lines: dict[int, list[tuple[int, float]]] = {}


class BeamQueue(Feature):
    """The searches of an engine."""

    def __init__(self, engine: "Engine"):
        self._engine, self._scheduler = engine, engine.scheduler
        self._searches: dict[int, _Search] = {}
        self._search_of: dict[int, _Search] = {}  # by id of a beam's request
        self._completed: list[CompletedSearch] = []
        self._next_id = FIRST_ID
        self._counters = dict(BEAM_COUNTERS)

    @property
    def is_live(self) -> bool:  # type: ignore[override]
        return bool(self._searches)

    def submit(self, id: int, prompt: list[int], params: BeamParams, options: RequestOptions, now: float) -> None:
        """Start a search. Raises RequestError when it is refused."""
        scheduler = self._scheduler
        scheduler.check_room(id, self._searches, 0)
        stop_ids = frozenset(params.stop_token_ids)
        scheduler.limits.check_ids("stop_token_ids", params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= scheduler.eos_ids
        check_beams(params, len(stop_ids))
        if options.structure is not None:
            raise RequestError(
                "beam search does not go with a form of the answer", code="unsupported_parameter", param="structure"
            )
        search = BeamSearch(params, stop_ids, max_tokens=1)
        candidates = max(search.num_candidates, params.logprobs or 0)
        # Greedy: what is sampled is looked at no further than its alternatives.
        sampling = SamplingParams(
            max_tokens=params.max_tokens, temperature=0.0, ignore_eos=True, logprobs=candidates, seed=0
        )
        request = self._engine.queue(self._new_id(), prompt, sampling, options, now)
        # What the scheduler made of max_tokens: None is the rest of the context.
        search.max_tokens = request.max_len - len(prompt)
        request.stepwise, request.drafts = True, None
        self._searches[id] = self._search_of[request.id] = _Search(id, search, request.id, len(prompt))
        self._counters["beam_searches"] += 1

    def cancel(self, id: int) -> bool:
        """Drop a search; False for an unknown or finished one."""
        search = self._searches.get(id)
        if search is None:
            return False
        self._scheduler.counters.cancelled += 1
        self._end(search)
        return True

    def num_computed(self, id: int) -> int | None:
        search = self._searches.get(id)
        return None if search is None else self._computed(search)

    def _computed(self, search: _Search) -> int:
        """Tokens of the prompt that were not cached, and of all beams; before the first of these, of the one that
        begins."""
        if not search.num_made:
            return self._scheduler.num_computed(search.ids[0])
        requests = self._scheduler.requests
        flying = sum(requests[id].pending for id in search.ids if id in requests)
        return search.num_prompt - search.cached_tokens + search.num_made + flying

    def take_completed(self) -> list[CompletedSearch]:
        completed, self._completed = self._completed, []
        return completed

    def filter_outputs(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Take the outputs of beams, and advance the searches that have those of all their beams."""
        others, ready = [], []
        for output in outputs:
            search = self._search_of.get(output.id)
            if search is None:
                others.append(output)
                continue
            if output.finish not in (None, "length"):
                computed = self._computed(search) + 1 if search.num_made else output.computed
                self._completed.append(CompletedSearch(search.id, None, output.error, computed))
                self._end(search)
                continue
            logprobs: Any = output.logprobs
            search.lines[output.id] = logprobs[0].top
            search.cached_tokens = max(search.cached_tokens, output.cached_tokens)
            search.num_made += len(output.tokens)
            if len(search.lines) == len(search.ids):
                ready.append(search)
            elif output.finish is None:
                self._scheduler.hold(output.id)
        for search in ready:
            if search.id in self._searches:
                self._advance(search)
        return others

    def after_step(self, ran: bool) -> bool:
        """Where nothing can run, held beams lose their rows and pages."""
        for search in () if ran else self._searches.values():
            for id in search.lines:
                self._scheduler.preempt(id)
        return False

    def counters(self) -> dict[str, float]:
        return self._counters

    def close(self) -> None:
        for search in list(self._searches.values()):
            self._end(search)

    # -- a step of a search

    def _advance(self, search: _Search) -> None:
        scheduler, state = self._scheduler, search.search
        parents = state.advance([search.lines[id] for id in search.ids])
        self._counters["beam_steps"] += 1
        if state.is_completed:
            computed = self._computed(search)
            self._completed.append(CompletedSearch(search.id, self._result(search, computed), None, computed))
            self._end(search)
            return
        ids = [0] * len(parents)
        kept: set[int] = set()
        # Forks first: a request that continues in place has another last token then.
        for place, parent in enumerate(parents):
            source, token = search.ids[parent], state.beams[place].tokens[-1]
            if source not in kept:
                kept.add(source)
                ids[place] = source
                continue
            request = scheduler.requests.get(source)
            assert request is not None
            child = scheduler.fork(source, self._new_id(), seed=0, length=len(request.tokens) - 1, append=(token,))
            child.drafts = None
            ids[place] = child.id
            self._search_of[child.id] = search
        for place, id in enumerate(ids):
            if id in kept:
                scheduler.resume(id, state.beams[place].tokens[-1])
        for id in search.ids:
            if id not in kept:
                del self._search_of[id]
                scheduler.drop(id)
        search.ids, search.lines = ids, {}

    def _end(self, search: _Search) -> None:
        del self._searches[search.id]
        for id in search.ids:
            del self._search_of[id]
            self._scheduler.drop(id)

    def _result(self, search: _Search, computed: int) -> Searched:
        replies = [
            SearchedReply(
                found.tokens, [TokenLogprob(*entry) for entry in found.entries], found.total, found.score, found.finish
            )
            for found in search.search.finished
        ]
        return Searched(search.id, search.num_prompt, replies, search.cached_tokens, computed)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
