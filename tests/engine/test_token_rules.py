"""min_tokens, bad_words and allowed_token_ids in the engine: each token is the one that biases of -100 on what a plain reading of the
rules forbids would give, alone, in a batch, ahead, behind drafts and after a preemption."""

import msgspec
import pytest
from test_runner import drain, run
from tiny_engines import TinyEngines, prompt
from tiny_model import EOS, VOCAB

from zse.errors import RequestError
from zse.sampling.params import SamplingParams, with_bad_tokens
from zse.scheduler.options import RequestOptions
from zse.structured.options import TEXT, Structure


@pytest.fixture
def engine_of(model):
    with TinyEngines(model) as engines:
        yield engines


def params(max_tokens=20, **given) -> SamplingParams:
    return SamplingParams(**dict(max_tokens=max_tokens, temperature=0.0, ignore_eos=True) | given)


def forbidden(wanted: SamplingParams, reply: list[int]) -> set[int]:
    """A plain reading of the rules."""
    out = set()
    if len(reply) < wanted.min_tokens:
        out |= {*wanted.stop_token_ids} | (set() if wanted.ignore_eos else {EOS})
    for word in wanted.bad_token_ids:
        if len(reply) >= len(word) - 1 and tuple(reply[len(reply) - len(word) + 1 :]) == word[:-1]:
            out.add(word[-1])
    if wanted.allowed_token_ids is not None:
        out |= set(range(VOCAB)) - set(wanted.allowed_token_ids)
    return out


def reference(engine, ids: list[int], wanted: SamplingParams) -> list[int]:
    """The reply token by token, each of a request of its own with biases."""
    reply: list[int] = []
    stop = {*wanted.stop_token_ids} | (set() if wanted.ignore_eos else {EOS})
    while len(reply) < wanted.max_tokens and not (reply and reply[-1] in stop):
        biases = dict.fromkeys(forbidden(wanted, reply), -100.0)
        plain = params(1, temperature=wanted.temperature, seed=wanted.seed, logit_bias=biases)
        reply += run(engine, one=(ids + reply, plain))["one"][0]
    return reply


def cases(engine) -> dict[str, tuple[list[int], SamplingParams]]:
    """Rules about what the model says without them."""
    ids = prompt(9, 3)
    says = run(engine, one=(ids, params(20)))["one"][0]
    stop = says[4]
    return {
        "min": (ids, params(stop_token_ids=(stop,), min_tokens=8)),
        "min reached": (ids, params(stop_token_ids=(stop,), min_tokens=2)),
        "min of one": (ids, params(stop_token_ids=(says[0],), min_tokens=1)),
        "a word": (ids, params(bad_token_ids=((says[2],), (says[9],)))),
        "words": (ids, params(bad_token_ids=(tuple(says[2:4]), tuple(says[6:9]), (5, 6)))),
        "sampled words": (ids, params(temperature=1.0, seed=7, bad_token_ids=((says[0],), (says[1], says[2])))),
        "allowed": (ids, params(allowed_token_ids=(7, 9, 70, 159, says[3]))),
        "sampled allowed": (ids, params(temperature=1.0, seed=8, allowed_token_ids=tuple(range(0, 160, 3)))),
        "all": (
            ids,
            params(
                stop_token_ids=(9,),
                min_tokens=6,
                allowed_token_ids=(7, 9, 70),
                bad_token_ids=((7, 7), (70, 7), (70, 70, 9)),
            ),
        ),
        "free": (ids, params()),
        "end": (ids, params(ignore_eos=False, min_tokens=15, allowed_token_ids=(EOS, 7, 9))),
    }


@pytest.fixture(scope="module")
def wanted(model):
    with TinyEngines(model, max_rows=4) as engines:
        engine = engines()
        given = cases(engine)
        return given, {name: reference(engine, *case) for name, case in given.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ahead": True},
        {"num_pages": 9, "reserve_output": False},
        {"ahead": True, "num_pages": 9, "reserve_output": False},
    ],
    ids=["batch", "ahead", "tight", "tight and ahead"],
)
def test_rules_hold_in_a_batch(engine_of, wanted, options):
    given, told = wanted
    engine = engine_of(max_rows=4, **options)
    replies = run(engine, **given)
    assert {name: reply[0] for name, reply in replies.items()} == told
    assert not engine.feature("rules").is_live
    plain = run(engine, free=given["free"])["free"]
    assert plain[0] == told["free"]
    assert (
        told["min"] != told["min reached"]
        and len(told["min reached"]) == 5
        and told["end"][-1] == EOS
        and len(told["end"]) > 15
    )


def test_rules_hold_behind_drafts(engine_of, wanted):
    """The reply repeats itself, so that prompt lookup finds drafts; which of them are forbidden must not stand."""
    given, told = wanted
    engine = engine_of(max_rows=4, speculation="ngram")
    speculator = engine.feature("speculation")
    speculator.room = lambda rows, most: most
    speculator.choose = lambda candidates, *_: [min(candidate.room, 4) for candidate in candidates]
    replies = run(engine, **given)
    assert {name: reply[0] for name, reply in replies.items()} == told
    assert engine.counters()["drafted_tokens"] > 10


def test_logprobs_are_of_what_may_come(engine_of):
    engine = engine_of()
    ids = prompt(9, 3)
    plain = run(engine, one=(ids, params(1, logprobs=5)))["one"]
    best = plain[0][0]
    other = run(engine, one=(ids, params(1, logprobs=5, bad_token_ids=((best,),))))["one"]
    assert other[0][0] == plain[1][0].top[1][0] and [id for id, _ in other[1][0].top[:1]] != [best]


def test_bad_words_that_leave_nothing_do_not_end_a_reply_too_early(engine_of):
    """They are not looked at then; min_tokens is."""
    wanted = params(5, allowed_token_ids=(7, EOS), bad_token_ids=((7,),), min_tokens=3, ignore_eos=False)
    assert run(engine_of(), one=(prompt(9), wanted))["one"][0] == [7, 7, 7, EOS]
    assert run(engine_of(), one=(prompt(9), params(2, allowed_token_ids=(7,), bad_token_ids=((7,),))))["one"][0] == [
        7,
        7,
    ]


def test_what_goes_wrong(engine_of):
    engine = engine_of()
    ids = prompt(5, 1)

    def refused(code, param, options=None, **given):
        with pytest.raises(RequestError) as caught:
            engine.submit(1, ids, params(**given), options or RequestOptions())
        assert (caught.value.code, caught.value.param) == (code, param)
        assert not engine.has_work

    refused("invalid_token_id", "allowed_token_ids", allowed_token_ids=(VOCAB,))
    refused("invalid_token_id", "bad_words", bad_token_ids=((1, VOCAB),))
    refused("out_of_range", "min_tokens", min_tokens=21)
    refused("invalid_value", "allowed_token_ids", min_tokens=1, allowed_token_ids=(9, 10), stop_token_ids=(9, 10))
    form = RequestOptions(structure=Structure(kind=TEXT))
    for name, given in (("min_tokens", {"min_tokens": 1}), ("bad_words", {"bad_token_ids": ((1,),)})):
        refused("unsupported_parameter", name, form, **given)
    refused("unsupported_parameter", "allowed_token_ids", form, allowed_token_ids=(1,))
    # Bad words that forbid all that is allowed are not looked at: an answer must go on.
    engine.submit(1, ids, params(4, allowed_token_ids=(7,), bad_token_ids=((7,),)))
    assert drain(engine)[1][0] == [7] * 4
    engine.submit(1, ids, params(200, min_tokens=100))
    engine.step()
    assert engine.cancel(1) and not engine.feature("rules").is_live
    drain(engine)


def test_the_tokens_of_words():
    def encode(text: str) -> list[int]:
        return [ord(character) for character in text]

    given = with_bad_tokens(SamplingParams(bad_words=("ab", " c")), encode)
    assert given.bad_token_ids == ((97, 98), (32, 97, 98), (99,), (32, 99)) and given.rule == "bad_words"
    assert SamplingParams().rule == "" and msgspec.structs.replace(given, bad_token_ids=()).rule == ""
