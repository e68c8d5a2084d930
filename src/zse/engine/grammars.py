"""Requests that ask for a form of their answer: they wait here for their grammar, then in the scheduler for their turn."""

from typing import Any

from zse.errors import RequestError
from zse.scheduler.batch import Output
from zse.scheduler.scheduler import Scheduler

IDLE_WAIT_S = 0.002  # in which nothing else happens while a grammar is compiled
# The process starts ahead of requests in an engine that has been idle for so long: its vocabulary takes a core for 0.3 to
# 2 s, which the first answers must not share.
WARM_AFTER_S = 1.0


class GrammarQueue:
    """model: path, None: requests with a grammar are refused. The grammar process starts with the first of them; where
    `warm` is set, in idle time before, and stays for as long as the engine."""

    def __init__(self, scheduler: Scheduler, model: str | None, runner: Any, warm: bool = False):
        self.warm = warm
        self._idle_since: float | None = None
        self._scheduler, self._model, self._runner = scheduler, model, runner
        self._grammars: Any = None
        self._waiting: dict[int, tuple] = {}  # id → arguments of Scheduler.submit
        self._failures: dict[int, RequestError] = {}
        self.num_live = 0  # requests with a grammar, waiting or not: 0 is all that a step without them looks at

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        """Begin to build what every grammar needs, before the first request comes."""
        if self._grammars is None:
            if self._model is None:
                raise RequestError(
                    "this engine has no tokenizer, which structured output needs",
                    code="unsupported_parameter",
                    param="structure",
                )
            from zse.engine.runner import logit_rows
            from zse.structured.service import Grammars

            config = self._runner.config
            lines = logit_rows(config.max_lines, config.max_tokens_per_step)
            self._grammars = Grammars(self._model, self._scheduler.vocab_size, self._scheduler.eos_ids, lines)
        self._grammars.start()

    def idle(self, now: float) -> None:
        """Nothing is to be done at `now`, in seconds."""
        if not self.warm or self._grammars is not None:
            return
        if self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= WARM_AFTER_S:
            from importlib.util import find_spec

            if self._model is None or not self._scheduler.eos_ids or find_spec("llguidance") is None:
                self.warm = False
                return
            try:
                self.start()
            except OSError as error:  # the first request with a grammar tries again, and says why
                import logging

                logging.getLogger("zse.engine").warning("the grammar process is not started yet: %s", error)
                self.warm = False

    def busy(self) -> None:
        """Something is done."""
        self._idle_since = None

    def submit(self, id: int, prompt: list[int], params, *, seed: int, now: float, options) -> None:
        """Queue a request until its grammar is compiled. Raises RequestError."""
        if id in self._waiting or self._scheduler.request(id) is not None:
            raise RequestError(f"request id {id} is in use", status=409, code="conflict")
        if len(self._waiting) >= self._scheduler.max_waiting:
            raise RequestError(
                f"{self._scheduler.max_waiting} requests are waiting already; try again later",
                status=503,
                type="server_error",
                code="overloaded",
            )
        self.start()
        self._grammars.open(id, options.structure)
        self._waiting[id] = prompt, params, seed, now, options
        self._count()

    def cancel(self, id: int) -> bool:
        """Whether the request waited for its grammar. One that has it is forgotten here, and left to the scheduler."""
        if not self.num_live:
            return False
        waited = self._waiting.pop(id, None) is not None
        self._close(id)
        if waited:
            self._scheduler.counters.cancelled += 1
        return waited

    def take_compiled(self, idle: bool) -> list[Output]:
        """Hand requests whose grammar is there to the scheduler; news of those that are refused. idle: nothing else is to
        be done, so that it may wait a moment."""
        outputs = []
        for id, error in self._grammars.poll(IDLE_WAIT_S if idle and self._waiting else 0.0):
            waiting = self._waiting.pop(id, None)
            if waiting is not None and error is None:
                prompt, params, seed, now, options = waiting
                try:
                    self._scheduler.submit(id, prompt, params, seed=seed, now=now, options=options)
                except RequestError as refused:
                    error = refused
            if error is not None:
                if waiting is None:
                    self._scheduler.cancel(id)
                outputs.append(self._failed(id, error))
        return outputs

    def masks(self, batch, lazy: bool = False):
        """The StepMasks of a batch, None when no request in it has a grammar. lazy: tokens may be drawn before they are
        masked."""
        from zse.engine.masking import StepMasks

        return StepMasks.of_batch(batch, self._grammars, self._failures, lazy)

    def settle(self, outputs: list[Output]) -> list[Output]:
        """After a commit: requests that ended are forgotten, those whose grammar cannot go on end."""
        if self._failures:
            failures, self._failures = self._failures, {}
            outputs = [output for output in outputs if output.id not in failures]
            for id, error in failures.items():
                if self._scheduler.cancel(id):
                    outputs.append(self._failed(id, error))
        for output in outputs:
            if output.finish is not None:
                self._close(output.id)
        return outputs

    def counters(self) -> dict[str, float]:
        """What the grammar process counts. Asked with every heartbeat, which is when it may end for want of requests."""
        if self._grammars is None:
            return {}
        if not self.num_live and not self.warm:
            self._grammars.rest()
        return self._grammars.counters()

    def close(self) -> None:
        """End the grammar process."""
        self._waiting.clear()
        if self._grammars is not None:
            self._grammars.stop()
        self._count()

    def _failed(self, id: int, error: RequestError) -> Output:
        self._close(id)
        output = Output(id, [], None, "error")
        output.error = error
        return output

    def _close(self, id: int) -> None:
        self._grammars.close(id)
        self._count()

    def _count(self) -> None:
        self.num_live = 0 if self._grammars is None else self._grammars.num_live
