"""A grammar that cannot go on ends its request, whatever else the step brought."""

from types import SimpleNamespace

from zse.engine.grammars import GrammarQueue
from zse.errors import RequestError
from zse.scheduler.batch import StepOutput


def test_a_mask_that_fails_in_the_step_of_the_last_token_ends_the_request():
    """Its finish was dropped for the failure, and the failure for want of a request: its client waited for ever."""
    closed: list[int] = []
    scheduler = SimpleNamespace(cancel=lambda id: id == 2, num_computed=lambda id: 7 if id == 2 else 0)
    queue = GrammarQueue(SimpleNamespace(scheduler=scheduler, warm=()))
    queue._grammars = SimpleNamespace(close=closed.append, num_live=0)
    error = RequestError("the grammar cannot go on", code="invalid_schema")
    queue._failures = {id: error for id in (1, 2, 3, 5)}
    outputs = queue.filter_outputs(
        [
            StepOutput(1, [5], None, "length", computed=9),
            StepOutput(2, [5], None, None),
            StepOutput(4, [6], None, "stop"),
            StepOutput(5, [], None, "error", error=RequestError("another"), computed=3),
        ]
    )
    told = {output.id: (output.finish, output.computed, output.tokens) for output in outputs}
    assert told.keys() == {1, 2, 4, 5}
    assert told[1] == ("error", 9, []) and told[2] == ("error", 7, []) and told[4][0] == "stop" and told[5][1] == 3
    assert sorted(closed) == [1, 1, 2, 2, 4, 5] and queue._failures == {}
