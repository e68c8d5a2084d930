"""Structured requests in the engine: beside others, waiting for a grammar, refused, and when the grammar process dies."""

import json
import os
import re
import signal
import time

import pytest
import tiny_model
import tiny_text
from schemas import SCHEMAS, check_text

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.engine.runner import Runner
from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions
from zse.structured.options import Structure, read_structure
from zse.tokenizer.load import load_tokenizer

# Compiles for tens of seconds when it is left alone.
SLOW = {"type": "integer", "multipleOf": 9999991, "minimum": 0, "maximum": 10**18}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    tiny_text.write(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(model):
    config = EngineConfig(model=str(model), threads=2, activations="f32", device="cpu", num_pages=64, max_context=256)
    made = load_engine(config, Phases(lambda: 0.0))
    yield made
    made.engine.close()
    made.source.close()


@pytest.fixture
def engine(loaded):
    yield loaded.engine
    for id in list(loaded.engine.scheduler.requests):
        loaded.engine.cancel(id)
    drain(loaded.engine)
    assert loaded.engine.feature("grammars").num_live == 0 and loaded.engine.scheduler.check_integrity() == []


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return load_tokenizer(loaded.source)


def options(fields):
    return RequestOptions(structure=fields if isinstance(fields, Structure) else read_structure(fields))


def params(seed=0, **more):
    return SamplingParams(**(dict(max_tokens=120, temperature=1.0, seed=seed) | more))


def drain(engine, seconds=60.0):
    """{id: (tokens, finish or RequestError)}"""
    replies, end = {}, time.monotonic() + seconds
    while engine.has_work and time.monotonic() < end:
        for output in engine.step():
            tokens, _ = replies.get(output.id, ([], None))
            replies[output.id] = tokens + output.tokens, output.error or output.finish
    assert not engine.has_work
    return replies


def text_of(tokenizer, reply):
    tokens, finish = reply
    assert finish == "stop" and tokens[-1] == tiny_model.EOS
    return tokenizer.decode(tokens[:-1])


def test_a_batch_of_schemas_beside_free_text(engine, tokenizer):
    names = ["person", "enum", "array", "one of", "date"]
    engine.submit(99, [5, 6, 7], params(7, ignore_eos=True))
    alone = drain(engine)[99]
    engine.submit(99, [5, 6, 7], params(7, ignore_eos=True))
    for id, name in enumerate(names):
        engine.submit(id, [3 + id, 9], params(id), options({"json": SCHEMAS[name]}))
    replies = drain(engine)
    assert replies[99] == alone, "masks of others do not change free text"
    for id, name in enumerate(names):
        check_text(text_of(tokenizer, replies[id]), SCHEMAS[name])


def test_a_grammar_beside_forbidden_tokens(engine, tokenizer):
    """Masks of both kinds in one step."""
    ruled = params(7, ignore_eos=True, allowed_token_ids=(20, 30, 40, 50), bad_token_ids=((20, 30), (40,)))
    engine.submit(99, [5, 6, 7], ruled)
    alone = drain(engine)[99]
    assert {*alone[0]} == {20, 30, 50} and (20, 30) not in zip(alone[0], alone[0][1:], strict=False)
    engine.submit(99, [5, 6, 7], ruled)
    for id, more in enumerate(({}, {"top_k": 20}, {"temperature": 0.0})):  # drawn first, or masked first
        engine.submit(id, [3 + id, 9], params(id, **more), options({"json": SCHEMAS["person"]}))
    replies = drain(engine)
    assert replies.pop(99) == alone
    for reply in replies.values():
        check_text(text_of(tokenizer, reply), SCHEMAS["person"])


def test_steps_that_run_ahead(model, loaded, tokenizer):
    engine = load_engine(
        EngineConfig(model=str(model), threads=1, activations="f32", device="cpu", num_pages=64, max_context=256),
        Phases(lambda: 0.0),
    ).engine
    engine.runner = Runner(engine.runner.device, engine.runner.model, engine.runner.config, runs_ahead=True)
    try:
        engine.submit(1, [5, 6, 7], params(7, ignore_eos=True))
        for id, name in enumerate(("person", "enum"), 2):
            engine.submit(id, [3, 9], params(id), options({"json": SCHEMAS[name]}))
        replies = drain(engine)
        for id, name in enumerate(("person", "enum"), 2):
            check_text(text_of(tokenizer, replies[id]), SCHEMAS[name])
        assert len(replies[1][0]) == 120
    finally:
        engine.close()


def test_drafts_are_verified_under_masks(model, tokenizer):
    """With drafts from prompt lookup the tokens are those without."""
    pattern = r"(\{abcd: (true|null)\}, ){8}"
    prompt = tokenizer.encode("{abcd: true}, {abcd: null}, {abcd: true}, {abcd: null}, ", add_bos=False)
    replies = {}
    for speculation in ("none", "ngram"):
        engine = load_engine(
            EngineConfig(
                model=str(model),
                threads=1,
                activations="f32",
                device="cpu",
                num_pages=64,
                max_context=256,
                speculation=speculation,
            ),
            Phases(lambda: 0.0),
        ).engine
        if speculation != "none":  # whether they pay is not what this is about
            speculator = engine.feature("speculation")
            speculator.room = lambda rows, most: most
            speculator.choose = lambda candidates, *_: [min(candidate.room, 4) for candidate in candidates]
        try:
            for id in range(3):
                engine.submit(id, prompt, params(id, max_tokens=150), options({"regex": pattern}))
            replies[speculation] = drain(engine)
            if speculation != "none":
                assert engine.counters()["accepted_tokens"] > 10
        finally:
            engine.close()
    assert replies["none"] == replies["ngram"]
    for reply in replies["ngram"].values():
        assert re.fullmatch(pattern, text_of(tokenizer, reply))


def test_alone_and_in_a_batch_the_same_tokens(engine):
    structure = options({"json": SCHEMAS["person"]})
    engine.submit(1, [5, 9, 4], params(3), structure)
    alone = drain(engine)[1]
    for id in range(4):
        engine.submit(id, [5, 9, 4] if id == 1 else [7 + id], params(3 if id == 1 else id), structure)
    assert drain(engine)[1] == alone


def test_length_ends_a_grammar_too(engine):
    engine.submit(1, [5], params(max_tokens=4), options({"regex": "[a-z]{40}"}))
    tokens, finish = drain(engine)[1]
    assert finish == "length" and len(tokens) == 4


def test_ignore_eos_does_not_go_on_behind_the_grammar(engine, tokenizer):
    engine.submit(1, [5], params(ignore_eos=True), options({"choice": ["on", "in"]}))
    assert text_of(tokenizer, drain(engine)[1]) in ("on", "in")


def test_logprobs_are_those_of_allowed_tokens(engine, tokenizer):
    engine.submit(1, [5], params(logprobs=20, temperature=0.0), options({"regex": "[xy]"}))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    first = outputs[0].logprobs[0]
    shown = {tokenizer.decode([id]) for id, value in first.top if value > -1e30}
    assert shown == {"x", "y"} and first.logprob <= 0


@pytest.mark.timed
def test_a_hostile_grammar_is_refused_while_others_run(engine):
    engine.submit(1, [5], params(ignore_eos=True, max_tokens=200))
    engine.submit(2, [5], params(), options({"choice": ["on"]}))  # the grammar process is there
    while engine.feature("grammars").has_work:
        engine.step()
    engine.submit(3, [5], params(), options({"json": SLOW}))
    started, gaps, last, error = time.monotonic(), [], time.monotonic(), None
    while error is None:
        for output in engine.step():
            error = output.error or error
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
        if engine.scheduler.requests.get(1) is None:
            engine.submit(1, [5], params(ignore_eos=True, max_tokens=200))
    assert error.code == "schema_too_complex" and error.status == 400 and time.monotonic() - started < 2.5
    assert sorted(gaps)[len(gaps) * 99 // 100] < 0.2, "the engine goes on stepping"


@pytest.mark.timed
@pytest.mark.exhaustive("times beside a load")
def test_a_tenant_s_slow_grammars_hold_up_nobody_else_s(engine):
    """Sixty of them took 45 s of two compilers, and another tenant's trivial one waited for all."""
    slow = [SLOW | {"multipleOf": 9999991 + number} for number in range(12)]
    for id, schema in enumerate(slow):
        engine.submit(id, [5], params(), RequestOptions(tenant="a", structure=read_structure({"json": schema})))
    engine.submit(99, [5], params(), RequestOptions(tenant="b", structure=read_structure({"choice": ["on"]})))
    started, ended = time.monotonic(), {}
    while 99 not in ended:
        ended |= {output.id: output.error for output in engine.step() if output.finish or output.error}
    assert time.monotonic() - started < 1.7, "no later than when the first of the others is given up"
    for id in range(6, 12):  # never checked: their requests are gone
        engine.cancel(id)
    errors = ended | {id: error for id, (_, error) in drain(engine).items()}
    assert all(errors[id].code == "schema_too_complex" for id in range(6))
    again = time.monotonic()
    engine.submit(1, [5], params(), RequestOptions(tenant="b", structure=read_structure({"json": slow[0]})))
    assert drain(engine)[1][1].code == "schema_too_complex" and time.monotonic() - again < 0.5, "refused from memory"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"regex": "[0-9"}, "invalid_schema"),
        ({"json": {"$ref": "#/nowhere"}}, "invalid_schema"),
        ({"grammar": "root ::= ((("}, "invalid_schema"),
    ],
)
def test_a_bad_grammar_fails_its_request_alone(engine, fields, code):
    engine.submit(1, [5], params(max_tokens=5, ignore_eos=True))
    engine.submit(2, [5], params(), options(fields))
    replies = drain(engine)
    assert replies[1][1] == "length" and len(replies[1][0]) == 5
    tokens, error = replies[2]
    assert isinstance(error, RequestError) and error.code == code and not tokens


def test_cancelled_while_its_grammar_is_compiled(engine):
    engine.submit(1, [5], params(), options({"regex": "[a-f]{30}"}))
    assert engine.feature("grammars").has_work
    with pytest.raises(RequestError, match="in use"):
        engine.submit(1, [5], params(), options({"regex": "a"}))
    assert engine.cancel(1) and not engine.cancel(1)
    assert not engine.has_work and engine.feature("grammars").num_live == 0


def test_a_deadline_that_passes_while_the_grammar_is_compiled(engine):
    structure = read_structure({"regex": "[a-e]{31}"})
    engine.submit(1, [5], params(), RequestOptions(structure=structure, deadline_ms=0.01))
    tokens, finish = drain(engine)[1]
    assert not tokens and finish not in ("stop", "length") and engine.feature("grammars").num_live == 0


def test_the_grammar_process_dies_and_comes_back(engine, tokenizer):
    structure = options({"json": SCHEMAS["uuid"]})
    engine.submit(1, [5], params(11), structure)
    whole = drain(engine)[1]
    engine.submit(1, [5], params(11), structure)
    tokens = []
    while len(tokens) < 6:
        tokens += [token for output in engine.step() for token in output.tokens]
    os.kill(engine.feature("grammars")._grammars._pid, signal.SIGKILL)
    rest, finish = drain(engine)[1]
    assert (tokens + rest, finish) == whole
    check_text(text_of(tokenizer, whole), SCHEMAS["uuid"])
    assert engine.counters()["grammar_process_restarts"] >= 1


@pytest.mark.parametrize("warm", [True, False])
def test_the_grammar_process_starts_in_idle_time(model, warm, monkeypatch):
    """Not before the engine has been idle for a while; --no-warm-grammars leaves it to the first request."""
    from zse.structured import service

    monkeypatch.setattr(service, "IDLE_S", 0.0)
    engine = load_engine(
        EngineConfig(
            model=str(model),
            threads=1,
            activations="f32",
            device="cpu",
            num_pages=16,
            max_context=128,
            warm_grammars=warm,
        ),
        Phases(lambda: 0.0),
    ).engine
    now = [10.0]
    engine.clock = lambda: now[0]

    def idle(seconds):
        now[0] += seconds
        while engine.use_idle_time():
            pass
        return engine.feature("grammars")._grammars is not None

    try:
        assert not idle(0) and not idle(0.9)
        engine.submit(1, [5], params(max_tokens=3, ignore_eos=True))
        drain(engine)
        assert not idle(0.2) and not idle(0.9) and idle(0.2) is warm
        if warm:
            pid = engine.feature("grammars")._grammars._pid
            engine.counters()  # which ends what nobody wants any more
            engine.submit(2, [5], params(max_tokens=60), options({"regex": "[a-d]{5}"}))
            assert drain(engine)[2][1] == "stop" and engine.feature("grammars")._grammars._pid == pid
    finally:
        engine.close()


def test_counters_of_masks(engine):
    before = engine.counters()
    alone = RequestOptions(structure=read_structure({"regex": "[a-d]{5}"}), speculation=False)  # drafts have masks too
    engine.submit(1, [5], params(), alone)
    drain(engine)
    counters = engine.counters()
    computed, avoided, again = (
        counters[name] - before.get(name, 0) for name in ("masked_lines", "masks_avoided", "tokens_redrawn")
    )
    assert computed + avoided == 6 and computed >= again  # the end token is masked or asked about too
    assert counters["mask_us_p50"] <= counters["mask_us_p99"]


def test_every_counter_has_a_line_in_the_metrics(engine, model, tmp_path):
    from types import SimpleNamespace

    from zse.cache.states import StateSlots
    from zse.engine.expert_counters import ExpertCounters
    from zse.scheduler.counters import NAMES
    from zse.server.engine_counters import COUNTERS

    engine.submit(1, [5], params(), options({"regex": "[a-d]{5}"}))
    drain(engine)
    seen = set(engine.counters()) | {"trimmed_pages"}  # of models with sliding windows (test_layer_groups)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    secret.chmod(0o600)
    listens = {"kv_listen": f"unix:{tmp_path}/s", "kv_peers": f"unix:{tmp_path}/s", "kv_secret": str(secret)}
    for more in ({"kv_layout": "contiguous"}, {"cache_disk": str(tmp_path / "kv")}, listens):
        other = load_engine(
            EngineConfig(model=str(model), threads=1, device="cpu", num_pages=32, max_context=128, **more),
            Phases(lambda: 0.0),
        )
        seen |= set(other.engine.counters())
        other.engine.close()
        other.source.close()
    seen |= set(ExpertCounters(SimpleNamespace(counts=dict, layers=[])).counters())  # of mixtures on a GPU
    seen |= set(StateSlots(1, 512).counters()) | {"state_disk_files", "state_disk_read"}  # test_hybrid_engine
    assert seen == {*COUNTERS, *NAMES}


def test_nothing_is_asked_of_a_model_without_end_tokens(model):
    engine = load_engine(
        EngineConfig(model=str(model), threads=1, activations="f32", device="cpu", num_pages=16, max_context=128),
        Phases(lambda: 0.0),
    ).engine
    engine.scheduler.eos_ids = frozenset()
    try:
        with pytest.raises(RequestError, match="end token"):
            engine.submit(1, [5], params(), options({"regex": "a"}))
    finally:
        engine.close()


def test_smollm2_writes_json(real_models):
    from zse import LLM

    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    with LLM(real_models["smollm2"], threads=2, max_context=256, max_rows=4) as llm:
        question = llm.encode_chat([{"role": "user", "content": "Describe a person as JSON with name and age."}])
        outputs = llm.generate(
            [question, question],
            [SamplingParams(max_tokens=60, temperature=0.0), SamplingParams(max_tokens=60, temperature=1.0, seed=5)],
            structure={"json": schema},
        )
        for output in outputs:
            assert output.finish_reason == "stop"
            check_text(output.text, schema)
            assert json.loads(output.text)["name"]
        pieces = llm.stream(question, SamplingParams(max_tokens=30), structure={"regex": "[A-Z][a-z]{2,8}"})
        assert re.fullmatch("[A-Z][a-z]{2,8}", "".join(delta.text for delta in pieces))
