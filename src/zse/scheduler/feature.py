"""What a plug-in of the engine's step is. The table of them is in engine/features.py, who calls them in
engine/core.py."""

from typing import Any

from zse.scheduler.batch import Batch, StepOutput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.scheduler.options import RequestOptions


class Feature:
    """Everything that only some requests need. A subclass overrides what it takes part in; the rest does nothing.

    The engine calls these methods in the order in which they stand here, those of a step only while `is_live` and where
    the subclass has them (`hooks`)."""

    hooks: frozenset[str] = frozenset()

    is_live: bool = True  # whether a request uses it now
    has_work: bool = False  # whether a step would do something for it although no request runs
    reads_tokens: bool = False  # whether the next batch must wait for the tokens of the one in flight
    wake_fd: int = (
        -1
    )  # can be read from, which ends the engine's wait, where a thread of the feature has something to tell

    def __init_subclass__(cls) -> None:
        cls.hooks = frozenset(name for name, inherited in vars(Feature).items() if getattr(cls, name) is not inherited)

    def check(self, params: Any, options: "RequestOptions") -> None:
        """A request is about to be taken by the scheduler or another feature (FeatureRow.checks). Raises RequestError
        to refuse it."""

    def before_submit(self, id: int, prompt: list[int], params: Any, options: "RequestOptions") -> bool:
        """The engine was given a request. True: it is held back here, and given to Engine.submit() again. Raises
        RequestError to refuse it."""
        return False

    def before_queue(self, prompt: list[int], options: "RequestOptions") -> None:
        """The scheduler is about to be given a prompt. Raises RequestError to refuse it."""

    def submit(self, id: int, prompt: list[int], params: Any, options: "RequestOptions", now: float) -> Any:
        """Take a request of this feature's. Raises RequestError, and keeps nothing, when it is refused."""
        raise NotImplementedError

    def before_schedule(self, now: float) -> list[StepOutput]:
        """A batch is about to be scheduled; what there is to tell of requests that never ran."""
        return []

    def before_run(self, batch: Batch) -> Any:
        """The batch is about to be submitted. Returns the StepMasks of its lines (engine/masking.py), or None."""

    def before_commit(self, batch: Batch) -> None:
        """The batch's tokens are drawn, and the scheduler is about to take them."""

    def after_commit(self, batch: Batch, seconds: float) -> None:
        """The scheduler has the batch's tokens. seconds: what it took on the device."""

    def filter_outputs(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """What the engine may tell of `outputs`, and what this feature has to add."""
        return outputs

    def after_step(self, ran: bool) -> bool:
        """A step is over; ran: whether it had a batch. Returns whether this used the device."""
        return False

    def take_completed(self) -> list[Any]:
        """What this feature was submitted and has completed since last time: each with id, result and error."""
        return []

    def idle(self, now: float) -> bool:
        """Nothing is to be done: do some milliseconds of what later requests would wait for. False: there is
        nothing."""
        return False

    def cancel(self, id: int) -> bool:
        """Drop a request. False when it is not this feature's, or is the scheduler's now."""
        return False

    def drop_session(self, session: str) -> None:
        """A session was removed: forget what is of it alone."""

    def num_computed(self, id: int) -> int | None:
        """Tokens computed so far for a request of this feature that has not ended; None when it is not this
        feature's."""
        return None

    def counters(self) -> dict[str, float]:
        """Totals since the start, by name, for the heartbeat."""
        return {}

    def close(self) -> None:
        """The scheduler has no requests any more: give back what this feature holds."""
