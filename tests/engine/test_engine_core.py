import msgspec
import pytest
from fake_engine import EOS, make_engine

from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.options import SchedulingPolicy


def drain(engine):
    replies, finishes = {}, {}
    while engine.has_work:
        for output in engine.step():
            assert output.id not in finishes
            replies.setdefault(output.id, []).extend(output.tokens)
            if output.finish:
                finishes[output.id] = output.finish
        assert engine.scheduler.check_integrity() == []
    return replies, finishes


@pytest.fixture(params=[False, True], ids=["in step", "ahead"])
def make(request):
    """make_engine with and without a step submitted ahead: what is said must be the same."""
    return lambda **changes: make_engine(runs_ahead=request.param, **changes)


def test_requests_that_arrive_together_run_together(make):
    engine = make()
    for id in range(4):
        engine.submit(id, [10 * id + 1], SamplingParams(max_tokens=3))
    replies, finishes = drain(engine)
    assert replies == {id: [10 * id + 2, 10 * id + 3, 10 * id + 4] for id in range(4)}
    assert set(finishes.values()) == {"length"}
    assert len(engine.runner.batches) == 3 and all(len(batch) == 4 for batch in engine.runner.batches)


def test_stop_ids_and_eos(make):
    engine = make()
    engine.submit(1, [97], SamplingParams(max_tokens=10))
    engine.submit(2, [97], SamplingParams(max_tokens=10, stop_token_ids=(99,)))
    engine.submit(3, [97], SamplingParams(max_tokens=4, ignore_eos=True))
    replies, finishes = drain(engine)
    assert replies == {1: [98, 99, EOS], 2: [98, 99], 3: [98, 99, EOS, 1]}
    assert finishes == {1: "stop", 2: "stop", 3: "length"}


def test_a_failed_row_leaves_the_others_alone(make):
    engine = make()
    engine.submit(1, [1], SamplingParams(max_tokens=3))
    engine.submit(2, [666], SamplingParams(max_tokens=3))
    replies, finishes = drain(engine)
    assert replies == {1: [2, 3, 4], 2: []} and finishes == {1: "length", 2: "error"}


def test_a_step_is_submitted_before_the_one_before_is_read():
    engine = make_engine(runs_ahead=True)
    engine.submit(1, [1], SamplingParams(max_tokens=5))
    assert [output.tokens for output in engine.step()] == [[2]]
    assert engine.runner.in_flight == 1 and engine.runner.most_in_flight == 2
    engine.submit(2, [50], SamplingParams(max_tokens=2))
    assert engine.cancel(1) and not engine.scheduler.check_integrity()
    assert engine.step() == []  # the token of request 1 is dropped; request 2 was submitted behind it
    assert [(output.id, output.tokens) for output in engine.step()] == [(2, [51])]
    assert drain(engine) == ({2: [52]}, {2: "length"})
    assert engine.scheduler.cache.allocator.num_free == 64 and engine.runner.in_flight == 0


@pytest.mark.parametrize("num_pages", [64, 5])
def test_running_ahead_changes_no_token(num_pages):
    """Stop tokens, cancellations and preemptions in between; request 6 arrives in the middle."""

    def run(runs_ahead):
        engine = make_engine(
            runs_ahead=runs_ahead, num_pages=num_pages, max_rows=3, policy=SchedulingPolicy(reserve_output=False)
        )
        for id in range(6):
            engine.submit(
                id,
                [30 + 13 * id] * (14 + id),
                SamplingParams(max_tokens=40, ignore_eos=id % 2 == 0, stop_token_ids=(60 + id,)),
            )
        replies, finishes = {}, {}
        for number in range(10_000):
            if number == 9:
                engine.submit(6, [7] * 5, SamplingParams(max_tokens=20))
                engine.cancel(1)
            for output in engine.step():
                replies.setdefault(output.id, []).extend(output.tokens)
                if output.finish:
                    assert output.id not in finishes
                    finishes[output.id] = output.finish
            assert engine.scheduler.check_integrity() == []
            if not engine.has_work:
                replies.pop(1, None)  # what a cancelled request said depends on when that was
                return replies, finishes, engine.scheduler.counters.preemptions
        raise AssertionError("no end")

    (replies, finishes, none), (ahead, ahead_finishes, preemptions) = run(False), run(True)
    assert replies == ahead and finishes == ahead_finishes and len(finishes) == 6
    assert (num_pages == 64) == (preemptions == 0) == (none == 0)


def test_metrics_and_close():
    engine = make_engine()
    assert engine.step() == []
    engine.submit(1, [1] * 40, SamplingParams(max_tokens=3))
    for _ in range(2):
        engine.step()
    metrics = msgspec.structs.asdict(engine.scheduler.totals)
    assert (metrics["steps"], metrics["prompt_tokens"], metrics["sampled_tokens"]) == (2, 39, 1)
    assert metrics["longest_step_s"] <= metrics["step_s"]
    engine.close()
    assert engine.runner.closed and not engine.has_work and engine.scheduler.cache.allocator.num_free == 64


def test_slow_steps_make_shorter_chunks():
    engine = make_engine(step_seconds=0.0, max_tokens=64, max_context=1000, num_pages=100)
    engine.submit(1, [1] * 200, SamplingParams(max_tokens=1))
    engine.step()
    engine.runner.step_seconds = 0.9
    engine.step()
    engine.runner.step_seconds = 0.0
    engine.step()
    engine.step()
    counts = [count for batch in engine.runner.batches for _, _, count in batch]
    assert counts[:2] == [64, 64] and counts[2] in (16, 32)  # 64 * 0.5 / 0.9, in whole pages
    assert counts[3] == min(64, 200 - sum(counts[:3]))  # a fast step lifts the limit


def test_seeds_are_given_or_drawn():
    engine = make_engine()
    for id, seed in enumerate((7, -1, None, None)):
        engine.submit(id, [1], SamplingParams(max_tokens=1, seed=seed))
    given, negative, first, second = (engine.scheduler.requests.get(id).seed for id in range(4))
    assert given == 7 and negative == 2**64 - 1 and first != second


def test_refusals_pass_through():
    with pytest.raises(RequestError, match="context is 256"):
        make_engine().submit(1, [1] * 256, SamplingParams())
