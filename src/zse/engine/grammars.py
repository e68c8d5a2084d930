"""Requests that ask for a form of their answer: they wait here for their grammar, then in the scheduler's queue."""

from importlib.util import find_spec
from typing import Any

from zse.engine.masking import StepMasks
from zse.engine.step import logit_rows
from zse.errors import RequestError
from zse.lazy import logging
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import Batch, StepOutput
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions
from zse.structured.service import Grammars

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.engine.core import Engine

IDLE_WAIT_S = 0.002  # in which nothing else happens while a grammar is compiled
# The process starts ahead of requests in an engine that has been idle for so long: its vocabulary takes a core for 0.3
# to 2 s, which the first answers must not share.
WARM_AFTER_S = 1.0


class GrammarQueue(Feature):
    """The requests with a grammar. The grammar process starts with the first of them; where the engine's `warm` names
    grammars, in idle time before, and stays for as long as the engine."""

    def __init__(self, engine: "Engine"):
        self._engine, self._scheduler = engine, engine.scheduler
        self._warm = "grammars" in engine.warm
        self._idle_since, self._idle_steps = 0.0, -1
        self._grammars: Any = None
        self._waiting: dict[int, tuple] = {}  # id → arguments of Engine.queue behind it
        self._failures: dict[int, RequestError] = {}
        self.num_live = 0  # requests with a grammar, waiting or not

    @property
    def is_live(self) -> bool:  # type: ignore[override]
        return self.num_live > 0

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self._waiting)

    def start(self) -> None:
        """Begin to build what every grammar needs, before the first request comes."""
        if self._grammars is None:
            engine = self._engine
            if engine.model is None:
                raise RequestError(
                    "this engine has no tokenizer, which structured output needs",
                    code="unsupported_parameter",
                    param="structure",
                )
            if find_spec("llguidance") is None:
                raise RequestError(
                    "structured output needs the Python package llguidance, which this server lacks: "
                    "install it there (`zse doctor` shows the command) and start the server again",
                    code="unsupported_parameter",
                    param="structure",
                )
            config = engine.runner.config
            lines = logit_rows(config.max_lines, config.max_tokens_per_step)
            looks_ahead = self._scheduler.max_drafts > 0 and not engine.runner.runs_ahead
            self._grammars = Grammars(
                engine.model, self._scheduler.vocab_size, self._scheduler.eos_ids, lines, looks_ahead
            )
        self._grammars.start()

    def idle(self, now: float) -> bool:
        """Start the process where the engine has made no step for WARM_AFTER_S."""
        if not self._warm or self._grammars is not None:
            return False
        steps = self._scheduler.totals.steps
        if steps != self._idle_steps:
            self._idle_steps, self._idle_since = steps, now
        elif now - self._idle_since >= WARM_AFTER_S:
            if self._engine.model is None or not self._scheduler.eos_ids or find_spec("llguidance") is None:
                self._warm = False
                return False
            try:
                self.start()
            except OSError as error:  # the first request with a grammar tries again, and says why
                logging.getLogger("zse.engine").warning("the grammar process is not started yet: %s", error)
                self._warm = False
        return False

    def submit(self, id: int, prompt: list[int], params: SamplingParams, options: RequestOptions, now: float) -> None:
        """Queue a request until its grammar is compiled. Raises RequestError."""
        self._scheduler.check_room(id, self._waiting, len(self._waiting))
        self.start()
        self._grammars.open(id, options.structure, options.tenant)
        self._waiting[id] = prompt, params, options, now
        self.num_live = self._grammars.num_live

    def cancel(self, id: int) -> bool:
        """Whether the request waited for its grammar. One that has it is forgotten here, and left to the scheduler."""
        if not self.num_live:
            return False
        waited = self._waiting.pop(id, None) is not None
        self._close(id)
        if waited:
            self._scheduler.counters.cancelled += 1
        return waited

    def before_schedule(self, now: float) -> list[StepOutput]:
        """Hand requests whose grammar is compiled to the scheduler; the outputs of those that are refused."""
        outputs: list[StepOutput] = []
        if not self._waiting and not self._grammars.has_news:
            return outputs
        # Nothing else is to be done: it may wait a moment.
        wait = self._waiting and not self._scheduler.requests
        for id, error in self._grammars.poll(IDLE_WAIT_S if wait else 0.0):
            waiting = self._waiting.pop(id, None)
            if waiting is not None and error is None:
                try:
                    self._engine.queue(id, *waiting)
                except RequestError as refused:
                    error = refused
            if error is not None:
                computed = self._scheduler.num_computed(id)
                if waiting is None:
                    self._scheduler.cancel(id)
                outputs.append(self._failed(id, error, computed))
        return outputs

    def before_run(self, batch: Batch) -> StepMasks | None:
        """Ask for the masks of the batch; None when no request in it has a grammar."""
        return StepMasks.of_batch(batch, self._grammars, self._failures, self._engine.runner.lazy_masks)

    def filter_outputs(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Forget requests that ended; end those whose grammar cannot go on."""
        if self._failures:
            failures, self._failures = self._failures, {}
            dropped = [output for output in outputs if output.error is None and output.id in failures]
            outputs = [output for output in outputs if output.error is not None or output.id not in failures]
            # The scheduler knows no more of a request whose last token is of this step.
            ended = {output.id: output.computed for output in dropped if output.finish is not None}
            for id, error in failures.items():
                computed = ended[id] if id in ended else self._scheduler.num_computed(id)
                if id in ended or self._scheduler.cancel(id):
                    outputs.append(self._failed(id, error, computed))
        for output in outputs:
            if output.finish is not None:
                self._close(output.id)
        return outputs

    def counters(self) -> dict[str, float]:
        """What the grammar process counts. Asked with every heartbeat, which is when it may end for want of
        requests."""
        if self._grammars is None:
            return {}
        if not self.num_live and not self._warm:
            self._grammars.rest()
        return self._grammars.counters()

    def close(self) -> None:
        """End the grammar process."""
        self._waiting.clear()
        if self._grammars is not None:
            self._grammars.stop()
            self.num_live = 0

    def _failed(self, id: int, error: RequestError, computed: int) -> StepOutput:
        self._close(id)
        return StepOutput(id, [], None, "error", error=error, computed=computed)

    def _close(self, id: int) -> None:
        self._grammars.close(id)
        self.num_live = self._grammars.num_live
