"""Tokens that are drawn before they are masked: the distribution, the checks, and that how masks are computed changes no
token."""

import copy
import math
import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_model
import tiny_text
from schemas import SCHEMAS, check_text
from test_engine import drain, options, params, text_of
from test_masks import THINKING, Walk, json_structure, vocabulary  # noqa: F401

import zse.engine.masking as masking
from zse.engine.config import EngineConfig
from zse.engine.lazy_masks import SECOND_DRAW, DrawnRun, may_draw_first
from zse.engine.load import load_engine
from zse.engine.masking import Masking, StepMasks
from zse.engine.metrics import Phases
from zse.errors import RequestError
from zse.runtime.cpu import CPUDevice
from zse.sampling.params import SamplingParams
from zse.sampling.state import SamplerState
from zse.scheduler.options import RequestOptions
from zse.structured import service
from zse.structured.messages import WHOSE
from zse.structured.options import TEXT, Structure, Thinking, read_structure
from zse.structured.service import Grammars, Masks
from zse.tensor import Tensor
from zse.tokenizer.load import load_tokenizer

VOCAB, ROWS = 48, 32


class FixedGrammar:
    """In place of Grammars: the same tokens are allowed everywhere. often: masks are computed ahead."""

    def __init__(self, allowed, often=False):
        self.allowed, self.often = allowed, often
        self.line_nbytes = (VOCAB + 31) // 32 * 4
        mask = bytearray(self.line_nbytes)
        for id in allowed:
            mask[id >> 3] |= 1 << (id & 7)
        self.memory = memoryview(bytes(mask) * ROWS)
        self.asks, self.noted = [], []

    def begin(self, asks):
        self.asks = list(asks)

    def finish(self):
        num_allowed = [
            next((at for at, token in enumerate(ask.drawn) if token not in self.allowed), len(ask.drawn))
            for ask in self.asks
        ]
        return Masks([ask.line for ask in self.asks if not ask.drawn], {}, num_allowed)

    def note(self, id, refused):
        self.noted.append(refused)

    def refuses_often(self, id):
        return self.often


def sampled_counts(logits, grammar, steps=250, **more):
    """How often each token came, in `steps` x ROWS draws with different seeds and positions."""
    with CPUDevice(threads=1) as device:
        tensor = Tensor(device.alloc(4 * ROWS * VOCAB, label="test"), (ROWS, VOCAB), "f32")
        lines = tensor.view()
        sampler = SamplerState(device, VOCAB, max_rows=ROWS, max_tokens=ROWS * 64)
        turn = SimpleNamespace(number=0, sampler=sampler, results=None)
        recorder = device.record()
        sampler.record(recorder, tensor)
        graph, masker = recorder.finish(), Masking(device, tensor)
        requests = [
            SimpleNamespace(
                id=line,
                arrival=line,
                seed=1000003 * line + 7,
                prompt_len=1,
                stop_ids=frozenset(),
                tokens=[3, 5, 5],
                options=SimpleNamespace(structure=True),
                params=SamplingParams(**more),
            )
            for line in range(ROWS)
        ]
        batch = SimpleNamespace(
            entries=[SimpleNamespace(request=request, samples=1, drafts=()) for request in requests]
        )
        counts = np.zeros(VOCAB, int)
        for step in range(steps):
            lines[:] = memoryview(np.tile(logits, ROWS).astype(np.float32))
            sampler.prepare(requests, [step + 3] * ROWS)
            masks = StepMasks.of_batch(batch, grammar, {}, lazy=True)
            graph.run()
            assert masks.draws_first and not masks.come_first
            masker.settle(turn, ROWS, masks)
            for token, _ in sampler.read():
                counts[token] += 1
        graph.close()
        masker.close()
    return counts


def deviation(counts, logits, allowed):
    """Chi-square of the counts against the softmax over `allowed`, in standard deviations beyond its mean."""
    assert counts[[id for id in range(VOCAB) if id not in allowed]].sum() == 0
    mass = np.exp(logits[sorted(allowed)] - logits.max())
    expected = counts.sum() * mass / mass.sum()
    assert expected.min() > 5, "the statistic wants more draws"
    chi_square = ((counts[sorted(allowed)] - expected) ** 2 / expected).sum()
    freedom = len(allowed) - 1
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.fixture(scope="module")
def shape():
    """Logits, and allowed tokens that have 0.3 of the mass."""
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 1.2, VOCAB).astype(np.float32)
    allowed = {int(id) for id in rng.permutation(VOCAB)[:14]}
    mass = np.exp(logits) / np.exp(logits).sum()
    logits[sorted(allowed)] += math.log(0.3 / 0.7 * (1 - mass[sorted(allowed)].sum()) / mass[sorted(allowed)].sum())
    return logits, allowed


@pytest.mark.parametrize("often", [False, True])
def test_the_distribution_is_that_of_drawing_under_the_mask(shape, often):
    logits, allowed = shape
    grammar = FixedGrammar(allowed, often)
    assert abs(deviation(sampled_counts(logits, grammar), logits, allowed)) < 5
    assert 0.6 < np.mean(grammar.noted) < 0.8, "0.7 of the draws are refused"


def test_penalties_and_biases_are_in_the_distribution(shape):
    logits, allowed = shape
    changed = logits.copy().astype(np.float64)
    some, other = sorted(allowed)[:2]
    changed[some] += 1.5
    changed[5] -= 2 * 0.4
    changed[3] = changed[3] - 0.0
    counts = sampled_counts(
        logits, FixedGrammar(allowed), logit_bias={some: 1.5, other: 0.0}, frequency_penalty=0.4, temperature=0.8
    )
    assert abs(deviation(counts, changed / 0.8, allowed)) < 5


@pytest.mark.parametrize("second", [0, 1])
def test_a_biased_second_draw_is_seen(shape, second, monkeypatch):
    """With the random number of the first draw the test above fails; with the next token's other tokens come."""
    logits, allowed = shape
    monkeypatch.setattr(masking, "SECOND_DRAW", second)
    if second:
        counts = sampled_counts(logits, FixedGrammar(allowed), steps=2)
        monkeypatch.setattr(masking, "SECOND_DRAW", SECOND_DRAW)
        assert (counts != sampled_counts(logits, FixedGrammar(allowed), steps=2)).any()
    else:
        assert deviation(sampled_counts(logits, FixedGrammar(allowed)), logits, allowed) > 20


def test_what_may_be_drawn_first():
    assert all(
        may_draw_first(SamplingParams(**given))
        for given in (
            {},
            {"temperature": 0.0, "top_p": 0.5},
            {"top_k": 1},
            {"temperature": 0.3, "presence_penalty": 1.0},
        )
    )
    assert not any(
        may_draw_first(SamplingParams(**given))
        for given in ({"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_n_sigma": 2.0})
    )


# -- checks against masks


class Checked(Walk):
    """A walk that compares, for every token, what a check says and what the mask says."""

    def masks(self, drafts=()):
        lines = super().masks(drafts)
        allowed = set(range(self.vocabulary.vocab_size)) if lines[0] is None else set(lines[0])
        taken = {id for id in range(self.vocabulary.vocab_size) if self.copy().take_allowed([id])}
        assert taken == allowed, self.text()
        return lines

    def copy(self):
        other = copy.copy(self.guide)
        for name in ("_closing", "_opening", "_forced"):
            setattr(other, name, list(getattr(other, name)))
        if other.matcher is not None:
            other.matcher = other.matcher.deep_copy()
        return other


@pytest.mark.parametrize("name", ["person", "enum", "array", "one of", "date", "uuid"])
def test_checks_and_masks_agree(vocabulary, name):  # noqa: F811
    check_text(Checked(vocabulary, json_structure(SCHEMAS[name])).run(), SCHEMAS[name])


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "ab?|[0-9]{2,4}x*"},
        {"choice": ["on", "in", "only"]},
        {"json": True},
        {"grammar": 'root ::= "x" digit+ end?\ndigit ::= [0-9]\nend ::= "." ("a" | "b")'},
    ],
)
def test_checks_and_masks_agree_in_other_grammars(vocabulary, fields):  # noqa: F811
    for seed in range(3):
        Checked(vocabulary, read_structure(fields), seed).run()


def test_checks_and_masks_agree_around_reasoning(vocabulary):  # noqa: F811
    walk = Checked(vocabulary, Structure(kind="regex", source="ab?", thinking=THINKING))
    for text in ("<think>", "so", "</think>", "a", "b"):
        walk.masks()
        walk.take(*walk.ids(text))
    assert walk.masks() == [[tiny_model.EOS]]
    for structure in (
        Structure(kind=TEXT, thinking=Thinking(opening="<think>", closing="</think>", is_open=True, budget=2)),
        Structure(kind="regex", source="z", thinking=Thinking(opening="[T]", closing="[/T]", is_open=True, budget=0)),
    ):
        walk = Checked(vocabulary, structure)
        for _ in range(8):
            allowed = walk.masks()[0]
            walk.take(*(allowed[:1] if allowed is not None else walk.ids("x")))


def test_a_check_takes_tokens_up_to_the_first_that_is_refused(vocabulary):  # noqa: F811
    walk = Walk(vocabulary, Structure(kind="regex", source="abcd"))
    assert walk.guide.take_allowed(walk.ids("abx")) == 2
    assert walk.masks()[0] == walk.ids("c")
    assert walk.guide.take_allowed(walk.ids("cd")) == 2 and walk.masks()[0] == [tiny_model.EOS]


def test_of_a_run_only_what_the_drafts_hold_is_asked_about():
    def drawn(tokens, drafts, stops=()):
        return DrawnRun(SimpleNamespace(stop_ids=frozenset(stops)), 1, drafts).drawn([99, *tokens])

    assert drawn([4], []) == [4] and drawn([-1], []) == []
    assert drawn([4, 5, 6], [4, 5]) == [4, 5, 6] and drawn([4, 7, 6], [4, 5]) == [4, 7]
    assert drawn([4, -1, 6], [4, 5]) == [4] and drawn([4, 5, 6], [4, 5], stops=[5]) == [4, 5]


# -- in the engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    tiny_text.write(folder)
    return folder


def make(model, **more):
    config = EngineConfig(
        **(
            dict(
                model=str(model),
                threads=1,
                activations="f32",
                device="cpu",
                num_pages=96,
                max_context=256,
                speculation="none",
            )
            | more
        )
    )
    return load_engine(config, Phases(lambda: 0.0))


@pytest.fixture(scope="module")
def engines(model):
    """One draws first, one masks first."""
    made = {lazy: make(model, lazy_masks=lazy) for lazy in (True, False)}
    yield {lazy: loaded.engine for lazy, loaded in made.items()}
    for loaded in made.values():
        loaded.engine.close()
        loaded.source.close()


@pytest.fixture(scope="module")
def tokenizer(model):
    from zse.formats.opening import open_model

    with open_model(str(model)) as source:
        return load_tokenizer(source)


@pytest.fixture
def lazy(engines):
    engine = engines[True]
    yield engine
    for id in list(engine.scheduler.requests):
        engine.cancel(id)
    drain(engine)
    assert engine.feature("grammars").num_live == 0 and engine.scheduler.check_integrity() == []


@pytest.fixture
def always(monkeypatch):
    """Grammars are asked about every token, however many they refuse: the tiny model knows none of them."""
    monkeypatch.setattr(Grammars, "refuses_often", lambda self, id: False)
    monkeypatch.setattr(masking, "MOST_AHEAD", 0)


GRAMMARS = {name: {"json": SCHEMAS[name]} for name in ("person", "array", "enum", "one of")} | {
    "regex": {"regex": "([A-Z][a-z]+ [0-9]{1,3}, ){3}"},
    "choice": {"choice": ["on", "in", 'true "x"']},
}


def replies_of(engine, wanted, **more):
    for id, (seed, fields, given) in enumerate(wanted):
        engine.submit(
            id, [3 + seed, 9, 4], params(seed, **(given | more)), options(fields) if fields else RequestOptions()
        )
    return drain(engine)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_greedy_replies_are_those_of_masks_that_come_first(engines, always, rows):
    names = list(GRAMMARS) + ["person", "regex"]
    changes = ({}, {"repetition_penalty": 1.3}, {"logit_bias": {40: 4.0, 2: -3.0}}, {"frequency_penalty": 0.5})
    for first in range(0, len(names) if rows < 8 else 1, rows):
        wanted = [
            (number, GRAMMARS[name], changes[number % 4])
            for number, name in enumerate(names[first : first + rows], first)
        ]
        got = {kind: replies_of(engine, wanted, temperature=0.0, max_tokens=70) for kind, engine in engines.items()}
        assert got[True] == got[False]


def test_how_masks_are_computed_changes_no_token(engines, lazy, monkeypatch):
    """Asked, computed ahead, beside a request that is masked first, beside free text, with log-probabilities: the same."""
    wanted = [(seed, GRAMMARS[name], {}) for seed, name in enumerate(GRAMMARS)]
    computed = replies_of(lazy, wanted)
    for often in (False, True):
        monkeypatch.setattr(Grammars, "refuses_often", lambda self, id, often=often: often)
        assert replies_of(lazy, wanted) == computed
    beside = replies_of(lazy, [*wanted, (50, GRAMMARS["regex"], {"top_p": 0.8}), (51, None, {"ignore_eos": True})])
    assert {id: beside[id] for id in computed} == computed
    assert replies_of(engines[False], [(50, GRAMMARS["regex"], {"top_p": 0.8})])[0] == beside[len(wanted)]
    assert replies_of(lazy, wanted, logprobs=3) == computed
    for id, (seed, fields, _) in enumerate(wanted):
        assert replies_of(lazy, [(seed, fields, {})])[0] == computed[id], "alone as in a batch"


def test_replies_are_of_the_form(lazy, always, tokenizer):
    before = lazy.counters()
    replies = replies_of(
        lazy, [(seed, {"json": schema}, {}) for seed, schema in enumerate(SCHEMAS.values())][:12], max_tokens=200
    )
    ended = [id for id in replies if replies[id][1] == "stop"]
    assert len(ended) > 6
    for id in ended:
        check_text(text_of(tokenizer, replies[id]), list(SCHEMAS.values())[id])
    after = lazy.counters()
    kept, again, masked = (
        after[name] - before.get(name, 0) for name in ("masks_avoided", "tokens_redrawn", "masked_lines")
    )
    assert again == masked and kept + again == sum(len(tokens) for tokens, _ in replies.values()) and kept > 0 < again


def test_log_probabilities_are_those_of_allowed_tokens(engines):
    def lists(engine, **more):
        engine.submit(1, [5, 7], params(4, logprobs=20, max_tokens=12, **more), options({"regex": "[a-f]{12}"}))
        found = []
        while engine.has_work:
            for output in engine.step():
                found += zip(output.tokens, output.logprobs, strict=True)
        return found

    assert lists(engines[True], temperature=0.0) == lists(engines[False], temperature=0.0)
    shown = lists(engines[True])
    for token, logprob in shown:
        top = {id: value for id, value in logprob.top if value > -1e30}
        assert set(top) == set(range(77, 83)), "a to f"
        assert logprob.logprob == pytest.approx(top[token], abs=1e-5)
        assert sum(math.exp(value) for value in top.values()) == pytest.approx(1, abs=1e-4)
    assert len({token for token, _ in shown}) > 1


@pytest.mark.parametrize("often", [False, True])
def test_drafts_are_verified_without_masks(model, tokenizer, monkeypatch, often):
    """Lines behind drafts are drawn first too; a second draw may give the draft, and the lines behind it count."""
    monkeypatch.setattr(Grammars, "refuses_often", lambda self, id: often)
    pattern = r"(\{abcd: (true|null)\}, ){8}"
    prompt = tokenizer.encode("{abcd: true}, {abcd: null}, {abcd: true}, {abcd: null}, ", add_bos=False)
    replies = {}
    for speculation in ("none", "ngram"):
        loaded = make(model, speculation=speculation)
        engine = loaded.engine
        if speculation != "none":  # whether they pay is not what this is about
            speculator = engine.feature("speculation")
            speculator.room = lambda rows, most: most
            speculator.choose = lambda candidates, *_: [min(candidate.room, 4) for candidate in candidates]
        try:
            for id in range(3):
                engine.submit(
                    id, prompt, params(id, max_tokens=150, temperature=float(id > 0)), options({"regex": pattern})
                )
            replies[speculation] = drain(engine)
            if speculation != "none":
                assert engine.counters()["accepted_tokens"] > 10
        finally:
            engine.close()
            loaded.source.close()
    assert replies["none"] == replies["ngram"]
    for reply in replies["ngram"].values():
        assert re.fullmatch(pattern, text_of(tokenizer, reply))


def test_few_requests_have_their_masks_beside_the_forward(lazy, monkeypatch):
    kinds = []
    begin = Grammars.begin
    monkeypatch.setattr(Grammars, "begin", lambda self, asks: (kinds.append(len(asks[0].drawn)), begin(self, asks)))
    wanted = [(seed, {"regex": "(.|\\n){60}"}, {}) for seed in range(3)]
    replies = [replies_of(lazy, wanted[:count]) for count in (1, 2)]
    assert not any(kinds)
    kinds.clear()
    monkeypatch.setattr(Grammars, "refuses_often", lambda self, id: False)
    many = replies_of(lazy, wanted)
    assert any(kinds) and [{id: many[id] for id in few} for few in replies] == replies


RECORD = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "street number", "is_member"],
    "properties": {"name": {"enum": ["a", "b"]}, "street number": {"enum": [1, 2]}, "is_member": {"type": "boolean"}},
}


@pytest.mark.parametrize("rows", [1, 2])
def test_names_of_fields_are_drafts(model, tokenizer, rows):
    """Tokens that a grammar leaves no choice about are drafted and accepted; the replies are those without drafts."""
    replies, steps = {}, {}
    for speculation in ("none", "ngram"):
        loaded = make(model, speculation=speculation)
        engine = loaded.engine
        if speculation != "none":
            speculator = engine.feature("speculation")
            speculator.room = lambda rows, most: most
            speculator.choose = lambda candidates, *_: [min(candidate.room, 7) for candidate in candidates]
        try:
            wanted = [(seed, {"json": RECORD}, {"temperature": 0.7 * seed}) for seed in range(rows)]
            replies[speculation] = replies_of(engine, wanted, max_tokens=150)
            steps[speculation] = engine.scheduler.totals.steps
            if speculation != "none":
                drafted, accepted = (engine.counters()[f"{name}_tokens"] for name in ("drafted", "accepted"))
                assert accepted > 20 * rows and accepted >= 0.8 * drafted
        finally:
            engine.close()
            loaded.source.close()
    assert replies["none"] == replies["ngram"] and steps["ngram"] < 0.7 * steps["none"]
    for reply in replies["ngram"].values():
        check_text(text_of(tokenizer, reply), RECORD)


def test_the_only_token_that_may_come_is_not_drawn_again(lazy, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        type(lazy.runner._sets[0].sampler), "draw_again", lambda self, line, more: drawn.append(line), raising=True
    )
    reply = replies_of(lazy, [(1, {"regex": "abcdefgh"}, {})], temperature=0.0, max_tokens=20)[0]
    assert len(reply[0]) >= 8 and not drawn


def test_a_request_that_is_refused_often_has_its_masks_ahead(lazy, monkeypatch):
    monkeypatch.setattr(masking, "MOST_AHEAD", 0)
    kinds = []
    begin = Grammars.begin
    monkeypatch.setattr(
        Grammars, "begin", lambda self, asks: (kinds.append([bool(ask.drawn) for ask in asks]), begin(self, asks))
    )
    replies_of(lazy, [(1, {"regex": "[0-9]{60}"}, {})])  # a tenth of the tokens are digits
    assert all(kinds[:9]) and not any(asked for kind in kinds[20:] for asked in kind)
    kinds.clear()
    replies_of(lazy, [(1, {"regex": "(.|\\n){60}"}, {})])
    assert all(asked for kind in kinds for asked in kind) and len(kinds) > 30


@pytest.mark.parametrize("moment", ["asked", "between"])
def test_the_grammar_process_dies_while_it_is_asked(lazy, always, tokenizer, monkeypatch, moment):
    wanted = [(11, GRAMMARS["person"], {}), (12, GRAMMARS["regex"], {})]
    whole = replies_of(lazy, wanted)
    begin, calls = Grammars.begin, []

    def begin_and_kill(self, asks):
        asks = list(asks)
        calls.append(1)
        if len(calls) == 9 and moment == "between":
            os.kill(self._pid, signal.SIGKILL)
        begin(self, asks)
        if len(calls) == 9 and moment == "asked":
            os.kill(self._pid, signal.SIGKILL)

    monkeypatch.setattr(Grammars, "begin", begin_and_kill)
    restarts = lazy.counters()["grammar_process_restarts"]
    assert replies_of(lazy, wanted) == whole
    assert lazy.counters()["grammar_process_restarts"] == restarts + 1


def test_a_mask_that_ends_the_process_twice_ends_its_request_alone(lazy, monkeypatch):
    """It ended the process four times, for which everybody waited, and then every request with a grammar was lost."""
    whole = replies_of(lazy, [(12, GRAMMARS["regex"], {})])[0]
    begin, restarts = Grammars.begin, lazy.counters()["grammar_process_restarts"]
    deadly = []

    def begin_and_die(self, asks):
        asks = list(asks)
        begin(self, asks)
        if any(ask.request.id == deadly[0] for ask in asks):
            os.kill(self._pid, signal.SIGKILL)
            self._words[WHOSE] = deadly[0]

    send_step = Grammars._send_step

    def send_and_die(self, asks):
        send_step(self, asks)
        if self._suspect == deadly[0] in self._live:
            os.kill(self._pid, signal.SIGKILL)
            self._words[WHOSE] = deadly[0]

    deadly.append(1)
    monkeypatch.setattr(service, "MAX_RESTARTS", 100)
    monkeypatch.setattr(Grammars, "begin", begin_and_die)
    monkeypatch.setattr(Grammars, "_send_step", send_and_die)
    lazy.submit(0, [10, 9, 4], params(12), options(GRAMMARS["regex"]))
    lazy.submit(1, [5], params(1), options(GRAMMARS["person"]))
    replies = {0: [], 1: []}
    for _ in range(400):
        for output in lazy.step() if lazy.has_work else ():
            replies[output.id].append(output)
    error = replies[1][-1].error
    assert (error.status, error.code) == (400, "schema_too_complex") and "takes too long" in error.message
    assert replies[0][-1].finish in ("stop", "length") and len(whole[0]) > 3
    assert lazy.counters()["grammar_process_restarts"] == restarts + 2


def test_a_mask_that_takes_long_ends_its_request(model):
    """All requests of a step wait for its masks."""
    script = "import sys\nfrom zse.structured import worker\nworker.MASK_S = -1\nsys.exit(worker.main(sys.argv[1:]))"
    grammars = Grammars(str(model), tiny_model.VOCAB, frozenset({tiny_model.EOS}), 4, command=("-c", script))
    try:
        grammars.open(1, read_structure({"regex": "[a-z]{9}"}))
        while not (found := grammars.poll(1.0)):
            pass
        assert found == [(1, None)]
        request = SimpleNamespace(id=1, prompt_len=1, tokens=[5])
        grammars.begin([service.MaskAsk(request, 0)])
        assert "takes longer than" in grammars.finish().failures[1].message
    finally:
        grammars.stop()


def test_a_check_that_takes_too_long_ends_the_process(lazy, always, monkeypatch):
    wanted = [(11, GRAMMARS["person"], {})]
    whole = replies_of(lazy, wanted)
    monkeypatch.setattr(service, "STEP_S", 0.2)
    begin, calls = Grammars.begin, []

    def begin_and_stop(self, asks):
        calls.append(1)
        if len(calls) == 5:
            os.kill(self._pid, signal.SIGSTOP)
        begin(self, asks)

    monkeypatch.setattr(Grammars, "begin", begin_and_stop)
    monkeypatch.setattr(service, "MAX_RESTARTS", 100)
    assert replies_of(lazy, wanted) == whole
    assert lazy.counters()["grammar_process_restarts"] >= 1


def test_a_process_that_does_not_come_back_fails_its_requests_alone(model, always, monkeypatch):
    loaded = make(model)
    engine = loaded.engine
    try:
        alone = replies_of(engine, [(7, None, {"ignore_eos": True, "max_tokens": 40})])[0]
        monkeypatch.setattr(service, "MAX_RESTARTS", 0)
        engine.submit(0, [10, 9, 4], params(7, ignore_eos=True, max_tokens=40))
        engine.submit(1, [5], params(1), options({"regex": "[a-z]{60}"}))
        replies, end = {0: []}, time.monotonic() + 30.0
        while engine.has_work and time.monotonic() < end:
            request = engine.scheduler.requests.get(1)
            if request is not None and len(request.tokens) == 6:
                os.kill(engine.feature("grammars")._grammars._pid, signal.SIGKILL)
            for output in engine.step():
                replies.setdefault(output.id, []).append(output)
        assert [token for output in replies[0] for token in output.tokens] == alone[0]
        assert isinstance(replies[1][-1].error, RequestError) and replies[1][-1].error.status == 500
        assert engine.feature("grammars").num_live == 0
    finally:
        engine.close()
        loaded.source.close()


def test_cancelled_between_two_checks(lazy, always):
    for id in range(4):
        lazy.submit(id, [5 + id], params(id), options({"regex": "[a-z]{90}"}))
    while len(lazy.scheduler.running) < 4:
        lazy.step()
    lazy.cancel(1)
    lazy.step()
    lazy.cancel(2)
    replies = drain(lazy)
    assert replies[0][1] == replies[3][1] == "stop" and set(replies) >= {0, 3}


def test_smollm2_says_the_same_either_way(real_models):
    from zse import LLM

    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "age", "tags"],
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
        },
    }
    texts = {}
    for lazy_masks in (True, False):
        with LLM(real_models["smollm2"], threads=2, max_context=256, max_rows=4, lazy_masks=lazy_masks) as llm:
            questions = [
                llm.encode_chat([{"role": "user", "content": f"Describe a {what} as JSON with name, age and tags."}])
                for what in ("person", "dog", "city")
            ]
            given = [
                SamplingParams(max_tokens=70, temperature=0.0),
                SamplingParams(max_tokens=70, temperature=0.0),
                SamplingParams(max_tokens=70, temperature=1.0, seed=5),
            ]
            outputs = llm.generate(questions, given, structure={"json": schema})
            again = llm.generate(questions[2:], given[2:], structure={"json": schema})
            texts[lazy_masks] = [output.text for output in outputs[:2]]
            assert again[0].text == outputs[2].text, "a seed's reply is the same alone"
            for output in outputs:
                check_text(output.text, schema)
            if lazy_masks:
                totals = llm.metrics()
                assert totals["masks_avoided"] > 2 * totals["tokens_redrawn"] > 0
    assert texts[True] == texts[False]
