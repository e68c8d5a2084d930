"""A prompt is computed beside its grammar: while the grammar process is stopped all of it but the last token runs."""

import itertools
import os
import signal
import threading
import time

import pytest
import tiny_model
import tiny_text

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions
from zse.structured.options import read_structure

PROMPT = [5 + index % 90 for index in range(150)]
BAD = {"json": {"$ref": "#/nowhere"}}
numbers = itertools.count(20)


def fresh() -> dict:
    """A grammar that no test had before."""
    return {"regex": f"[a-f]{{{next(numbers)}}}"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    tiny_text.write(folder)
    config = EngineConfig(
        model=str(folder),
        threads=2,
        activations="f32",
        device="cpu",
        num_pages=32,
        max_context=256,
        max_rows=2,
        max_tokens_per_step=64,
        prefix_cache=False,
    )
    made = load_engine(config, Phases(lambda: 0.0))
    made.engine.submit(1, [5], SamplingParams(max_tokens=1), options({"choice": ["on"]}))
    drain(made.engine)
    yield made
    made.engine.close()
    made.source.close()


class Gate:
    """What compiles grammars, stopped."""

    def __init__(self, engine):
        self.engine, self.pid = engine, engine.feature("grammars")._grammars._pid

    def __enter__(self):
        os.kill(self.pid, signal.SIGSTOP)
        return self

    def open(self):
        os.kill(self.pid, signal.SIGCONT)

    def __exit__(self, *error):
        try:
            self.open()
        except ProcessLookupError:
            pass


@pytest.fixture
def engine(loaded):
    engine = loaded.engine
    yield engine
    drain(engine)
    assert engine.scheduler.cache.allocator.num_free == 32 and engine.scheduler.check_integrity() == []
    assert engine.feature("grammars").num_live == 0 and not engine.feature("grammars").has_work


@pytest.fixture
def gate(engine):
    with Gate(engine) as made:
        yield made


def options(fields, **more):
    return RequestOptions(structure=read_structure(fields), **more)


def params(max_tokens=12, **more):
    return SamplingParams(**(dict(max_tokens=max_tokens, temperature=1.0, seed=7) | more))


def drain(engine, seconds=30.0):
    """{id: (tokens, finish, error)}"""
    replies, end = {}, time.monotonic() + seconds
    while engine.has_work and time.monotonic() < end:
        for output in engine.step():
            tokens = replies.get(output.id, ([],))[0] + output.tokens
            replies[output.id] = tokens, output.finish, output.error
    assert not engine.has_work
    return replies


def steps(engine, count=12):
    """What is said in so many steps."""
    return [output for _ in range(count) for output in engine.step()]


def test_the_prompt_runs_while_the_grammar_is_compiled(engine, gate):
    structure = options(fresh())
    engine.submit(1, PROMPT, params(), structure)
    assert steps(engine) == [], "no token before the grammar is there"
    request = engine.scheduler.requests[1]
    assert request.computed_len == len(PROMPT) - 1 and engine.num_computed(1) == len(PROMPT) - 1
    before = engine.scheduler.totals.steps
    gate.open()
    said = drain(engine)[1]
    assert engine.scheduler.totals.steps - before == len(said[0]), "its first token is one step away"
    engine.submit(1, PROMPT, params(), structure)  # compiled now
    assert drain(engine)[1] == said and said[1] == "length"


def plain(**more) -> dict:
    """A plain schema that no test had before."""
    return {"json": {"type": "string", "minLength": next(numbers), "maxLength": 80} | more}


def test_a_plain_schema_costs_no_step(engine, gate):
    """The step of the prompt waits for it as for a mask."""
    structure = options(plain())
    before = engine.scheduler.totals.steps
    engine.submit(1, PROMPT[:20], params(2), structure)
    threading.Timer(0.1, gate.open).start()
    assert [len(engine.step()[0].tokens) for _ in range(2)] == [1, 1]
    assert engine.scheduler.totals.steps - before == 2
    assert not engine.feature("grammars")._grammars.is_compiling


def test_a_plain_schema_waits_its_turn_beside_others(engine, gate):
    engine.submit(1, [5, 6], params(60, ignore_eos=True))
    engine.submit(2, PROMPT[:20], params(2), options(plain()))
    assert {output.id for output in steps(engine)} == {1}
    gate.open()
    assert set(drain(engine)) == {1, 2}


def test_a_plain_schema_that_is_refused_says_why(engine):
    """In the step of its prompt, or before it."""
    engine.submit(1, PROMPT[:20], params(2), options(plain(maxLength=1)))
    tokens, finish, error = drain(engine)[1]
    assert (tokens, finish, error.code) == ([], "error", "invalid_schema") and "cannot go on" not in error.message


def test_the_process_dies_while_a_step_waits_for_a_plain_schema(engine, gate):
    """The next one has it checked."""
    engine.submit(1, PROMPT[:20], params(2), options(plain()))
    threading.Timer(0.1, os.kill, (gate.pid, signal.SIGKILL)).start()
    tokens, finish, error = drain(engine)[1]
    assert len(tokens) == 2 and finish == "length", error


@pytest.mark.parametrize("ids", [(1,), (1, 2)])
def test_a_grammar_that_is_known_costs_no_step(engine, ids):
    """Where nothing else runs; a busy machine may be late."""
    structure, firsts = options(fresh()), []
    for _ in range(20):
        for id in ids:
            engine.submit(id, PROMPT[:20], params(1), structure)
        firsts += [[output.id for output in engine.step()][:1]]
        drain(engine)
    assert firsts[0] == [] and [1] in firsts


def test_others_do_not_wait_for_a_grammar(engine, gate, monkeypatch):
    """Not the milliseconds either in which nothing else would run."""
    grammars, waits = engine.feature("grammars")._grammars, []
    poll = grammars.poll
    monkeypatch.setattr(grammars, "poll", lambda timeout: waits.append(timeout) or poll(timeout))
    engine.submit(1, PROMPT[:20], params(), options(fresh()))
    engine.submit(2, [9, 10], params(5, ignore_eos=True))
    while 2 in engine.scheduler.requests:
        engine.step()
    assert len(waits) >= 5 and not any(waits)
    steps(engine, 2)
    assert waits[-1] == 0.002


@pytest.mark.parametrize("max_tokens", [12, 1])
def test_others_run_on(engine, gate, max_tokens):
    """Also those that need the row of who waits for a grammar: its reply is the same all the same."""
    structure = options(fresh())
    for id in (1, 2):
        engine.submit(id, PROMPT[:100], params(), structure)
    assert steps(engine) == []
    engine.submit(3, [9, 10], params(max_tokens, ignore_eos=True))
    said = [output for output in steps(engine, 40) if output.id == 3]
    assert said[-1].finish == "length" and sum(len(output.tokens) for output in said) == max_tokens
    gate.open()
    replies = drain(engine)
    engine.submit(1, PROMPT[:100], params(), structure)
    assert replies[1] == replies[2] == drain(engine)[1]


def test_a_refused_grammar_gives_the_pages_back(engine, gate):
    counters = engine.scheduler.counters
    ends = counters.submitted - counters.finished - counters.cancelled - counters.failed - counters.timed_out
    engine.submit(1, PROMPT, params(), options(BAD))
    assert steps(engine) == [] and engine.scheduler.cache.allocator.num_free < 32
    gate.open()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    (output,) = outputs
    assert (output.finish, output.tokens, output.computed) == ("error", [], len(PROMPT) - 1)
    assert output.error.status == 400 and "\n" not in output.error.message
    assert engine.scheduler.cache.allocator.num_free == 32 and not engine.scheduler.requests
    assert ends == counters.submitted - counters.finished - counters.cancelled - counters.failed - counters.timed_out


def test_cancelled_while_it_is_held(engine, gate):
    engine.submit(1, PROMPT, params(), options(fresh()))
    steps(engine, 1)
    assert engine.num_computed(1) == 64
    assert engine.cancel(1) and not engine.cancel(1) and not engine.has_work
    assert engine.scheduler.cache.allocator.num_free == 32


def test_preempted_while_it_is_held(engine, gate):
    structure = options(fresh())
    engine.submit(1, PROMPT, params(), structure)
    steps(engine)
    assert engine.scheduler.preempt(1) and steps(engine) == []
    assert engine.scheduler.requests[1].row == -1, "it comes back with its grammar"
    gate.open()
    said = drain(engine)[1]
    engine.submit(1, PROMPT, params(), structure)
    assert drain(engine)[1] == said


def test_the_grammar_process_dies_while_it_is_held(engine, gate):
    structure = options(fresh())
    engine.submit(1, PROMPT, params(), structure)
    steps(engine)
    os.kill(gate.pid, signal.SIGKILL)
    said = drain(engine)[1]
    engine.submit(1, PROMPT, params(), structure)
    assert drain(engine)[1] == said and said[1] == "length"


def test_a_refused_prompt_leaves_no_grammar(engine):
    from zse.errors import RequestError

    with pytest.raises(RequestError, match="context"):
        engine.submit(1, PROMPT * 2, params(), options(fresh()))
    assert engine.feature("grammars").num_live == 0 and not engine.has_work


def test_a_deadline_that_has_passed(engine, gate):
    """It never ran: its time is over in the step in which its prompt would begin."""
    engine.submit(1, PROMPT, params(), options(fresh(), deadline_ms=0.001))
    (output,) = steps(engine, 2)
    assert output.finish == "timeout" and not engine.has_work


def test_the_engine_sleeps_while_all_are_held(engine, gate):
    for id in (1, 2):
        engine.submit(id, PROMPT[:20], params(), options(fresh()))
    steps(engine, 4)
    count, started, used = 0, time.monotonic(), time.process_time()
    while time.monotonic() - started < 0.3:
        assert engine.step() == []
        count += 1
    assert count <= 160, "each waits for two milliseconds"
    assert time.process_time() - used < 0.1
