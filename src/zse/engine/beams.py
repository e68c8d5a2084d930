"""Beam searches beside other requests: every beam is a request of the scheduler, forked from the one it continues, so that
beams share the KV pages of what they have in common.

Beams advance together: one that has its candidates is held until all of its search have theirs. When nothing can run
because held beams have the rows or pages that others of their search wait for, they give them up.
"""

from typing import Any, NamedTuple

from zse.engine.messages import Searched, SearchedReply, TokenLogprob
from zse.engine.metrics import BEAM_COUNTERS
from zse.errors import RequestError
from zse.sampling.beam import BeamParams, BeamSearch, check_beams
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import Output
from zse.scheduler.options import DEFAULT, RequestOptions
from zse.scheduler.scheduler import Scheduler

FIRST_ID = -(1 << 62)  # of the beams' requests: no other request has such an id


class OverSearch(NamedTuple):
    """A search that ended: its Searched, or the RequestError that ended it."""

    id: int
    result: Searched | None
    error: RequestError | None


class _Search:
    """ids: of the beams' requests, in the order of search.beams; lines: candidates of those that have them."""

    def __init__(self, id: int, search: BeamSearch, first: int, num_prompt: int):
        self.id, self.search, self.ids = id, search, [first]
        self.num_prompt, self.cached_tokens = num_prompt, 0
        self.lines: dict[int, list[tuple[int, float]]] = {}


class BeamQueue:
    """scheduler runs the beams."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._searches: dict[int, _Search] = {}
        self._search_of: dict[int, _Search] = {}  # by id of a beam's request
        self._over: list[OverSearch] = []
        self._next_id = FIRST_ID
        self.counters = dict(BEAM_COUNTERS)

    @property
    def num_live(self) -> int:
        """Searches that go on."""
        return len(self._searches)

    def submit(
        self, id: int, prompt: list[int], params: BeamParams, options: RequestOptions = DEFAULT, *, now: float = 0.0
    ) -> None:
        """Start a search. Raises RequestError when it is refused."""
        scheduler = self._scheduler
        if id in self._searches or scheduler.request(id) is not None:
            raise RequestError(f"request id {id} is in use", status=409, code="conflict")
        stop_ids = frozenset(params.stop_token_ids)
        scheduler.check_ids("stop_token_ids", params.stop_token_ids)
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
        sampling = SamplingParams(max_tokens=params.max_tokens, temperature=0.0, ignore_eos=True, logprobs=candidates)
        request = scheduler.submit(self._new_id(), prompt, sampling, seed=0, now=now, options=options)
        # What the scheduler made of max_tokens: None is the rest of the context.
        search.max_tokens = request.max_len - len(prompt)
        request.stepwise, request.drafts = True, None
        self._searches[id] = self._search_of[request.id] = _Search(id, search, request.id, len(prompt))
        self.counters["beam_searches"] += 1

    def cancel(self, id: int) -> bool:
        """Drop a search; False for an unknown or finished one."""
        search = self._searches.get(id)
        if search is None:
            return False
        self._scheduler.counters.cancelled += 1
        self._end(search)
        return True

    def take_over(self) -> list[OverSearch]:
        """The searches that ended since last time."""
        over, self._over = self._over, []
        return over

    def settle(self, outputs: list[Output]) -> list[Output]:
        """After a commit: take what is said of beams out of `outputs`, and advance the searches that have all of it."""
        others, ready = [], []
        for output in outputs:
            search = self._search_of.get(output.id)
            if search is None:
                others.append(output)
                continue
            if output.finish not in (None, "length"):
                self._over.append(OverSearch(search.id, None, self._error(output)))
                self._end(search)
                continue
            logprobs: Any = output.logprobs
            search.lines[output.id] = logprobs[0].top
            search.cached_tokens = max(search.cached_tokens, output.cached_tokens)
            if len(search.lines) == len(search.ids):
                ready.append(search)
            elif output.finish is None:
                self._scheduler.hold(output.id)
        for search in ready:
            if search.id in self._searches:
                self._advance(search)
        return others

    def unblock(self) -> bool:
        """Nothing can run: held beams give up their rows and pages. Whether one did."""
        gave = False
        for search in self._searches.values():
            for id in search.lines:
                gave = self._scheduler.give_up(id) or gave
        return gave

    def close(self) -> None:
        for search in list(self._searches.values()):
            self._end(search)

    # -- a step of a search

    def _advance(self, search: _Search) -> None:
        scheduler, state = self._scheduler, search.search
        parents = state.advance([search.lines[id] for id in search.ids])
        self.counters["beam_steps"] += 1
        if state.is_over:
            self._over.append(OverSearch(search.id, self._result(search), None))
            self._end(search)
            return
        ids = [0] * len(parents)
        kept: set[int] = set()
        # Forks first: a request that goes on in place has another last token then.
        for place, parent in enumerate(parents):
            source, token = search.ids[parent], state.beams[place].tokens[-1]
            if source not in kept:
                kept.add(source)
                ids[place] = source
                continue
            request = scheduler.request(source)
            assert request is not None
            child = scheduler.fork(source, self._new_id(), seed=0, length=len(request.tokens) - 1, append=(token,))
            child.drafts = None
            ids[place] = child.id
            self._search_of[child.id] = search
        for place, id in enumerate(ids):
            if id in kept:
                scheduler.go_on(id, state.beams[place].tokens[-1])
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

    def _result(self, search: _Search) -> Searched:
        replies = [
            SearchedReply(
                found.tokens, [TokenLogprob(*entry) for entry in found.entries], found.total, found.score, found.finish
            )
            for found in search.search.finished
        ]
        return Searched(search.id, search.num_prompt, replies, search.cached_tokens)

    @staticmethod
    def _error(output: Output) -> RequestError:
        if output.finish == "timeout":
            return RequestError(
                "the deadline passed while the request waited",
                status=504,
                type="server_error",
                code="timeout",
                param="deadline_ms",
            )
        return RequestError(
            "the model gave numbers that are not finite for this request",
            status=500,
            type="server_error",
            code="numerical_error",
        )

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def live_ids(self) -> list[int]:
        return list(self._searches)
