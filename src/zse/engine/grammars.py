"""Requests that ask for a form of their answer: the scheduler holds them before their last prompt token until their
grammar is compiled."""

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
from zse.scheduler.request import RUNNING
from zse.structured.plain import is_plain
from zse.structured.service import Grammars

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.engine.core import Engine

IDLE_WAIT_S = 0.002  # in which nothing else happens while a grammar is compiled
# A grammar that was compiled before is told within 0.7 ms (99 of 100): its prompt waits for that, where nothing else
# runs, and is one step, where two would take a step more than one.
KNOWN_WAIT_S = 0.001
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
        self._asks_ahead = False  # whether a step asks for nothing but the mask behind the last token
        self._waiting: set[int] = set()  # those whose grammar is being compiled
        self._wait_s = 0.0  # that the next step may wait for a grammar if there are no other requests
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
            self._asks_ahead = self._scheduler.max_drafts == 0 and self._scheduler.micro_batches == 1
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
        """Queue a request, whose prompt is computed beside its grammar. Raises RequestError."""
        scheduler, structure = self._scheduler, options.structure
        assert structure is not None
        scheduler.check_room(id, (), scheduler.queue.num_waiting)
        self.start()
        # A plain one of six fields takes 2 ms, 34 at most: it is compiled while the prompt runs, whose step waits for it as
        # for its mask, where nobody else can be held up.
        is_held = bool(scheduler.requests) or not self._grammars.is_up or not is_plain(structure)
        self._wait_s = self._wait_s if scheduler.requests else KNOWN_WAIT_S
        self._grammars.open(id, structure, options.tenant)
        try:
            self._engine.queue(id, prompt, params, options, now)
        except RequestError:
            self._close(id)
            raise
        if is_held:
            scheduler.hold(id)
            self._waiting.add(id)
        self.num_live = self._grammars.num_live

    def cancel(self, id: int) -> bool:
        """Forget the grammar of a request; the request is the scheduler's."""
        if self.num_live:
            self._close(id)
        return False

    def before_schedule(self, now: float) -> list[StepOutput]:
        """Let requests go on whose grammar is compiled; the outputs of those that are refused."""
        outputs: list[StepOutput] = []
        wait_s, self._wait_s = self._wait_s, 0.0
        if not self._grammars.is_compiling:
            return outputs
        for id, error in self._grammars.poll(wait_s if len(self._waiting) == len(self._scheduler.requests) else 0.0):
            if id not in self._scheduler.requests:  # it ended in this step
                continue
            if error is None:
                if id in self._waiting:
                    self._waiting.discard(id)
                    self._scheduler.resume(id, self._scheduler.requests[id].tokens[-1])
                continue
            self._waiting.discard(id)
            computed = self._scheduler.num_computed(id)
            self._scheduler.cancel(id)
            outputs.append(self._failed(id, error, computed))
        return outputs

    def before_run(self, batch: Batch) -> StepMasks | None:
        """Ask for the masks of the batch; None when no request in it has a grammar."""
        return StepMasks.of_batch(batch, self._grammars, self._failures, self._engine.runner.lazy_masks)

    def after_commit(self, batch: Batch, seconds: float) -> None:
        """Ask for the next mask of a request that runs alone, without drafts, whose next step will want nothing else."""
        if self._asks_ahead and len(batch.entries) == 1 == batch.num_samples:
            request = batch.entries[0].request
            if request.options.structure is not None and request.state is RUNNING:
                self._grammars.ahead(request, 0)

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

    def after_step(self, ran: bool) -> bool:
        """Who waits for a grammar gives its row and pages back where others wait for these."""
        self._wait_s = 0.0 if ran else IDLE_WAIT_S
        if self._waiting:
            self._scheduler.life.make_way(self._waiting)
        return False

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
        self._waiting.discard(id)
        self._grammars.close(id)
        self.num_live = self._grammars.num_live
