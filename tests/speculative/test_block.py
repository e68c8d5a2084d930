"""Drafts of a model's own next-token block: the same replies whatever it thinks, in batches, under masks, behind cached prefixes,
after preemptions, ahead and of hybrid models; and when it is switched off."""

from array import array

import numpy as np
import pytest
import tiny_families
import tiny_mtp
import tiny_text
from block_checks import (
    ORDERS,
    a_client_that_leaves,
    accepted,
    drafts_of,
    drafts_that_see_all_at_once,
    replies_in_an_order,
    replies_under_masks,
    run_ahead,
)
from session import Session
from test_draft_model import always
from test_hybrid_drafts import params, prompt, said
from test_mtp import Block, pair_of
from tiny_engines import TinyEngines

from zse.engine.config import EngineConfig, settle
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import ConfigError, FormatError
from zse.speculative.speculator import BLOCK, Candidate

FAMILIES = ("qwen3_5", "qwen3_next", "glm4_moe", "deepseek_v3")
NARROW = 128  # of 160 ids
OPTIONS = dict(max_context=128, max_rows=4, draft_tokens=3, kv_dtype="f32", speculation="mtp")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family → a model whose block mostly thinks as it does; with " other" behind it one whose block thinks otherwise."""
    found = {family: tiny_mtp.write(family, tmp_path_factory.mktemp(family), agrees=True) for family in FAMILIES}
    others = {f"{family} other": tiny_mtp.write(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}
    return found | others


@pytest.fixture
def engines(folders, request):
    with TinyEngines(folders[request.param], **OPTIONS) as make:
        yield make


def drafting(engine, is_ahead=False):
    """The engine, whose block drafts whether it pays or not."""
    speculator = engine.feature("speculation")
    always(speculator)
    if is_ahead:
        run_ahead(engine)
    return engine


@pytest.mark.parametrize("engines", [*FAMILIES, "qwen3_5 other", "deepseek_v3 other"], indirect=True)
@pytest.mark.parametrize("vocabulary", [0, NARROW])
def test_replies_are_the_same(engines, vocabulary, request):
    """Greedy and sampled, with penalties and biases, in a batch, with drafts of all ids and of the first alone."""
    biases = {3: 2.0, NARROW - 1: 1.0, NARROW: 3.0, 149: 4.0}  # the last two have no logits where drafts are narrow
    sampled = (
        dict(temperature=0.9, seed=3, logit_bias=biases),
        dict(temperature=1.0, seed=4, top_p=0.9, repetition_penalty=1.3),
    )
    requests = [
        (prompt(length), params(32, **more)) for length, more in ((1, {}), (15, {}), (33, sampled[0]), (40, sampled[1]))
    ]
    told = said(engines(prefix_cache=False, speculation="none"), requests)
    engine = drafting(engines(draft_vocabulary=vocabulary))
    speculator, drafts = engine.feature("speculation"), []
    read = speculator.runner.read_drafts
    speculator.runner.read_drafts = lambda: drafts.append(read()) or drafts[-1]
    for _ in range(2):  # the second time prompts and replies are cached
        assert said(engine, requests) == told
    right, drafted = accepted(engine)
    least = 0.1 if vocabulary else 0.2
    assert (right < 0.1 * drafted) if "other" in request.node.name else (least * drafted < right < drafted), (
        right / drafted
    )
    made = [token for found in drafts for some in found for token in some]
    assert speculator.runner.vocabulary == vocabulary and (max(made) < NARROW) == bool(vocabulary)
    assert max(token for reply in told for token in reply) >= NARROW
    speculator._forget()
    assert speculator.cache.allocator.num_free == speculator.cache.allocator.num_pages


@pytest.mark.parametrize("engines", ["qwen3_5", "deepseek_v3"], indirect=True)
@ORDERS
def test_in_other_orders(engines, options):
    replies_in_an_order(engines, options, dict(speculation="none"), drafting)


@pytest.mark.parametrize("engines", ["qwen3_5", "deepseek_v3"], indirect=True)
def test_a_client_leaves_before_its_drafts_are_read(engines):
    a_client_that_leaves(engines, dict(speculation="none"), drafting)


@pytest.mark.parametrize("engines", ["qwen3_5 other", "glm4_moe other"], indirect=True)
@pytest.mark.parametrize("chunk", [16, 64])
def test_drafts_are_those_of_a_block_that_sees_all_at_once(engines, chunk):
    """Behind a prompt in chunks, after rejected drafts, and behind each reply's token: every state is paired with the token
    behind it, and what was drafted wrongly is written over."""
    drafts_that_see_all_at_once(engines, chunk, drafting)


@pytest.mark.parametrize("engines", ["qwen3_5"], indirect=True)
def test_behind_a_cached_prefix_it_begins_where_its_states_do(engines):
    engine = drafting(engines(state_interval=16))
    speculator = engine.feature("speculation")
    ids = prompt(64, 5)
    said(engine, [(ids, params(4))])
    begun = []
    follow = speculator._follow
    speculator._follow = lambda request, start, end: begun.append(start) or follow(request, start, end)
    told = said(engine, [(ids, params(30))])
    assert min(begun) > 0 and accepted(engine)[1] > 10
    assert told == said(engines(speculation="none"), [(ids, params(30))])


@pytest.mark.parametrize("engines", ["qwen3_5 other"], indirect=True)
@pytest.mark.parametrize("vocabulary", [0, NARROW])
def test_a_request_that_wants_fewer_drafts(engines, vocabulary):
    """Its drafts are the first of those that it has alone, also near its last token, and the others' are theirs."""
    lengths, most = (3, 17, 40), (1, 3, 2)
    requests = [(prompt(length, length), params(20 + length // 4)) for length in lengths]
    alone = {}
    for number, one in enumerate(requests):
        engine = drafting(engines(max_rows=1, draft_vocabulary=vocabulary))
        alone[number] = drafts_of(engine)
        said(engine, [one])
    engine = drafting(engines(draft_vocabulary=vocabulary))
    speculator = engine.feature("speculation")
    number_of = {len(ids): number for number, (ids, _) in enumerate(requests)}
    speculator.choose = lambda candidates, rows, room, round_s=0.0: [
        min(most[number_of[each.request.prompt_len]], each.room) for each in candidates
    ]
    found: dict[int, dict[int, list[int]]] = {number: {} for number in range(3)}
    draft, seen = speculator._draft, set()

    def watch(parts, wanted):
        draft(parts, wanted)
        seen.add(tuple(sorted(wanted.values())))
        for part in parts:
            request = part.work.request
            found[number_of[request.prompt_len]].setdefault(len(request.tokens), list(request.drafts))

    speculator._draft = watch
    said(engine, requests)
    assert (1, 2, 3) in seen
    for number, count in enumerate(most):
        same = [(drafts, alone[number][at]) for at, drafts in found[number].items() if at in alone[number]]
        assert len(same) > 4 and all(0 < len(some) <= count and some == more[: len(some)] for some, more in same)


@pytest.mark.parametrize("engines", ["qwen3_5 other", "deepseek_v3 other"], indirect=True)
@pytest.mark.parametrize("vocabulary", [0, NARROW])
def test_each_draft_is_of_the_one_before(engines, vocabulary, folders, request):
    """What one recording makes is what the block says step by step, of the model's states, then of its own."""
    family = request.node.callspec.params["engines"].split()[0]
    engine, ids = drafting(engines(max_rows=1, draft_vocabulary=vocabulary)), prompt(21, 8)
    made = drafts_of(engine)
    (reply,) = said(engine, [(ids, params(6))])
    model, block = pair_of(engine.runner.device, folders[f"{family} other"])
    options = dict(activations="f32", kv_dtype="f32")
    target, mine = Session(engine.runner.device, model, **options), Block(engine.runner.device, block, **options)
    target.step([(0, ids)])
    logits = mine.pairs(target.decoder.hidden, range(len(ids)), [*ids[1:], reply[0]])[-1:]
    wanted, row = [], len(ids) - 1
    for _ in range(3):
        wanted.append(int(logits[-1][: vocabulary or None].argmax()))
        logits, row = mine.pairs(mine.decoder.hidden, [row], wanted[-1:], again=True), 0
    assert made[len(ids) + 1] == wanted


class Costs:
    """A step as long as what it reads: 18 of the model, 2 of them its head, which a round reads beside 0.4."""

    num_steps = 1

    def __init__(self, seconds):
        self.seconds = lambda count: seconds


@pytest.mark.parametrize("engines", ["qwen3_5"], indirect=True)
@pytest.mark.parametrize("among, is_narrow", [(1.0, True), (0.94, True), (0.5, False), (0.0, False)])
def test_which_drafts_pay(engines, among, is_narrow):
    """By how many of a request's tokens are among the first ids: where few are, the whole head is worth reading."""
    engine = engines(max_rows=1, draft_vocabulary=NARROW)
    speculator = engine.feature("speculation")
    rng, ids = np.random.default_rng(1), []
    for _ in range(100):
        ids.append(int(rng.integers(3, NARROW) if rng.random() < among else rng.integers(NARROW, 150)))
    engine.submit(0, ids, params(4))
    engine.step()
    (running,) = engine.scheduler.running
    assert abs(speculator._among(running) - among) < 0.1
    speculator.cost, speculator._round_costs = Costs(18.0), ((0, Costs(2.4)), (0, Costs(0.9)))
    counts = speculator.choose([Candidate(running, 0.7, BLOCK, 0, 3)], 1, 3)
    assert speculator.is_narrow == is_narrow and counts[0] > 0
    # Of wrong drafts those say nothing that had no chance.
    speculator.is_narrow = True
    running.tokens.append(NARROW)
    assert speculator._tested(running, 3, 1) == 1
    running.tokens[-1] = NARROW - 1
    assert speculator._tested(running, 3, 1) == 2
    assert speculator._tested(running, 3, 3) == 3


@pytest.mark.parametrize("engines", ["qwen3_5"], indirect=True)
@pytest.mark.parametrize("vocabulary", [0, NARROW])  # "a" to "z" and what ends a reply lie behind it
def test_masks_hold(engines, vocabulary, folders, tmp_path):
    tiny_text.write(folders["qwen3_5"])

    told = replies_under_masks(engines(speculation="none"))
    engine = drafting(engines(draft_vocabulary=vocabulary))
    assert replies_under_masks(engine) == told
    assert accepted(engine)[1] > 0 and engine.feature("speculation").runner.vocabulary == vocabulary


@pytest.mark.parametrize("engines", ["qwen3_5"], indirect=True)
def test_what_is_not_accepted_switches_it_off(engines):
    """By what steps cost here: then it sees nothing, and costs nothing."""
    engine = engines(max_rows=1)
    speculator, seen = engine.feature("speculation"), 0
    runner, read = speculator.runner, speculator.runner.read_drafts

    def wrong():
        nonlocal seen
        seen += 1
        return [array("i", [(token + 1) % 150 for token in drafts]) for drafts in read()]

    runner.read_drafts = wrong
    told = said(engine, [(prompt(20), params(100))])
    before, steps = seen, engine.scheduler.totals.steps
    told = said(engine, [(prompt(20), params(100))])
    assert seen - before < (engine.scheduler.totals.steps - steps) // 4
    assert told == said(engines(speculation="none"), [(prompt(20), params(100))])


def test_refused(folders, tmp_path):
    plain = tiny_families.write("qwen3_5", tmp_path)
    with pytest.raises(FormatError, match="has no next-token block to draft with: leave --speculation mtp out"):
        load_engine(EngineConfig(model=str(plain), device="cpu", speculation="mtp"), Phases(lambda: 0.0))
    with pytest.raises(ConfigError, match="--speculation mtp is not possible with --pipeline-parallel-size yet"):
        EngineConfig(model="m", speculation="mtp", pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="not used with speculation mtp"):
        EngineConfig(model="m", speculation="mtp", draft_model="d")
    with pytest.raises(ConfigError, match="draft_vocabulary is for speculation mtp"):
        EngineConfig(model="m", speculation="ngram", draft_vocabulary=64)


@pytest.mark.parametrize(
    "asked, vocabulary, found",
    [(None, 98_304, 65_536), (None, 98_303, 0), (None, 248_320, 65_536), (0, 248_320, 0), (1000, 2000, 1000)],
)
def test_how_many_ids(asked, vocabulary, found):
    config = EngineConfig(model="m", speculation="mtp", draft_vocabulary=asked)
    assert settle(config, "cpu", vocab_size=vocabulary).draft_vocabulary == found
    assert settle(EngineConfig(model="m"), "cpu", vocab_size=vocabulary).draft_vocabulary == 0
