"""Beam search against transformers' on tiny random models, and what it leaves behind."""

import json
import math
import sys
from pathlib import Path

import pytest
import tiny_model
from tiny_engines import TinyEngines, prompt
from tiny_model import CONTEXT, EOS, NAN_TOKEN, VOCAB

from zse.engine.messages import Ask
from zse.errors import RequestError
from zse.sampling.beam import BeamParams, BeamSearch
from zse.sampling.fields import checked
from zse.sampling.params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import tiny


@pytest.fixture
def engine_of(model):
    with TinyEngines(model, kv_dtype="f32") as engines:
        yield engines


def drain(engine):
    """{id: Searched or RequestError}, {id: tokens}"""
    over, tokens = {}, {}
    for _ in range(3000):
        for output in engine.step():
            tokens.setdefault(output.id, []).extend(output.tokens)
        over |= {search.id: search.result or search.error for search in engine.take_completed()}
        assert engine.scheduler.check_integrity() == []
        if not engine.has_work:
            assert engine.scheduler.cache.allocator.num_free == engine.scheduler.cache.allocator.num_pages
            assert not engine.feature("beams")._searches and not engine.feature("beams")._search_of
            return over, tokens
    raise AssertionError("it does not end")


def search(engine, *asked):
    for id, (ids, params) in enumerate(asked):
        engine.submit(id, ids, params)
    over, _ = drain(engine)
    return [over[id] for id in range(len(asked))]


REFERENCES = json.loads((Path(tiny.__file__).parent / "beams.json").read_text())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", sorted({case["family"] for case in REFERENCES}))
def test_as_transformers(engine_of, family, ahead, tmp_path):
    """beams.json: made by tests/models/make_beams.py. All searches at once, with rows for some of their beams."""
    engine = engine_of(ahead=ahead, model=str(tiny.write(family, tmp_path)), max_rows=32)
    cases = [case for case in REFERENCES if case["family"] == family]
    results = search(
        engine,
        *(
            (
                case["prompt"],
                BeamParams(
                    beam_width=case["num_beams"],
                    max_tokens=case["max_new_tokens"],
                    length_penalty=case["length_penalty"],
                    early_stopping=case["early_stopping"],
                    stop_token_ids=tuple(case["eos"]),
                    ignore_eos=True,
                ),
            )
            for case in cases
        ),
    )
    for case, result in zip(cases, results, strict=True):
        assert [reply.tokens for reply in result.replies] == case["tokens"], case
        assert [reply.score for reply in result.replies] == pytest.approx(case["scores"], rel=1e-5)
        for reply in result.replies:
            assert math.fsum(entry.logprob for entry in reply.logprobs) == pytest.approx(reply.total, rel=1e-5)
            assert len(reply.logprobs) == len(reply.tokens)
            assert (reply.finish == "stop") == (reply.tokens[-1] in case["eos"])


@pytest.mark.parametrize("ahead", [False, True])
def test_few_rows_and_pages_change_nothing(engine_of, ahead):
    """Held beams give up what others of their search wait for."""
    asked = [
        (prompt(30), BeamParams(beam_width=5, max_tokens=20, ignore_eos=True)),
        (prompt(20, 1), BeamParams(beam_width=3, max_tokens=30, ignore_eos=True, logprobs=2)),
    ]
    expected = search(engine_of(ahead=ahead), *asked)
    assert [len(result.replies) for result in expected] == [5, 3]
    assert all(len(entry.top) == 2 for reply in expected[1].replies for entry in reply.logprobs)
    for options in (
        dict(max_rows=2),
        dict(max_rows=8, num_pages=6, max_context=96),
        dict(prefix_cache=False, max_rows=3),
        dict(max_rows=4, num_pages=5, prefix_cache=False, max_context=80),
        dict(max_rows=8, num_pages=40, max_context=96, kv_layout="contiguous"),
    ):
        engine = engine_of(ahead=ahead, **options)
        assert search(engine, *asked) == expected, options


@pytest.mark.parametrize("ahead", [False, True])
def test_beside_requests_and_cancelled(engine_of, ahead):
    engine = engine_of(ahead=ahead, max_rows=8)
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=5, ignore_eos=True)
    beams = BeamParams(beam_width=4, max_tokens=15, ignore_eos=True)
    (expected,) = search(engine, (prompt(40), beams))
    engine.submit(1, prompt(25), params)
    _, alone = drain(engine)
    engine.submit(1, prompt(25), params)
    said = []
    for id in range(2, 5):
        engine.submit(id, prompt(40), beams)
    for _ in range(4):
        said += [token for output in engine.step() for token in output.tokens]
    assert engine.cancel(3) and not engine.cancel(3)
    over, tokens = drain(engine)
    assert said + tokens[1] == alone[1] and set(over) == {2, 4}
    assert over[2].replies == over[4].replies == expected.replies
    assert over[4].cached_tokens > 0  # the prompt was computed once
    engine.submit(9, prompt(40), beams)
    engine.step()
    engine.close()
    assert not engine.feature("beams")._searches and not engine.scheduler.requests


@pytest.mark.parametrize("num_pages", [1, 3])
def test_a_job_and_a_search_that_both_want_the_last_pages_end(engine_of, num_pages):
    """The job left the pages alone for a beam that was held and had come before it; the search's other beams, which had
    come behind it, left them to the job."""
    ids = prompt(16 * num_pages - 8)
    beams = BeamParams(beam_width=4, max_tokens=6, ignore_eos=True)
    (expected,) = search(engine_of(), (ids, beams))
    for step in (1, 3, 6):
        engine = engine_of(num_pages=num_pages, max_context=16 * num_pages)
        engine.submit(0, ids, beams)
        for _ in range(step):
            engine.step()
        engine.submit(1, prompt(len(ids), 1), Ask("last"))
        over, _ = drain(engine)
        assert over[0].replies == expected.replies and over[1].vector, step


def test_refusals_and_failures(engine_of, tmp_path):
    engine = engine_of(model=str(tiny_model.write(tmp_path / "nan", nan=True)), max_waiting=3)
    for params, param in (
        (BeamParams(beam_width=17), "beam_width"),
        (BeamParams(beam_width=0), "beam_width"),
        (BeamParams(length_penalty=math.nan), "length_penalty"),
        (BeamParams(beam_width=16, stop_token_ids=tuple(range(5, 10))), "beam_width"),
        (BeamParams(stop_token_ids=(VOCAB,)), "stop_token_ids"),
        (BeamParams(logprobs=21), "logprobs"),
        (BeamParams(max_tokens=CONTEXT), None),
    ):
        with pytest.raises(RequestError) as caught:
            engine.submit(1, prompt(5), checked(params))
        assert caught.value.param == param and caught.value.status == 400
    assert not engine.has_work
    engine.submit(1, prompt(5), BeamParams(max_tokens=2))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(1, prompt(5), BeamParams(max_tokens=2))
    engine.submit(2, [5, NAN_TOKEN, 6], BeamParams(max_tokens=3))
    over, _ = drain(engine)
    assert len(over[1].replies) == 4 and over[2].code == "numerical_error"


def test_the_rest_of_the_context(engine_of):
    (result,) = search(engine_of(), (prompt(CONTEXT - 4), BeamParams(beam_width=2, ignore_eos=True)))
    assert [(len(reply.tokens), reply.finish) for reply in result.replies] == [(4, "length")] * 2


def test_ties_and_ends():
    """Equal candidates: the first beam's, then the likelier token's; an end that is not among the best is no reply."""
    search = BeamSearch(BeamParams(beam_width=2, length_penalty=0.0, early_stopping=True), frozenset((EOS,)), 10)
    assert search.num_candidates == 3
    assert search.advance([[(7, -1.0), (8, -1.0), (EOS, -2.0)]]) == [0, 0] and search.finished == []
    assert search.advance([[(5, -1.0), (EOS, -1.0), (6, -1.5)], [(5, -1.0), (6, -3.0), (EOS, -9.0)]]) == [0, 1]
    assert [beam.tokens for beam in search.beams] == [[7, 5], [8, 5]]
    assert [(found.tokens, found.score, found.finish) for found in search.finished] == [([7, EOS], -2.0, "stop")]
    assert search.advance([[(EOS, -0.1), (5, -3.0), (6, -4.0)], [(EOS, -0.2), (5, -3.0), (6, -4.0)]]) == []
    assert search.is_completed and [found.tokens for found in search.finished] == [[7, EOS], [7, 5, EOS]]
