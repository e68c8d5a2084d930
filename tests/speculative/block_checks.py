"""What tests of all drafts that run beside the model's states ask alike: of a next-token block, of an EAGLE-3 head. `drafting` makes an
engine draft whether it pays or not; `plain` are options of an engine without drafts."""

import pytest
from schemas import SCHEMAS
from test_hybrid_drafts import params, prompt, said

from zse.engine.block_runner import BlockRunner
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions
from zse.structured.options import read_structure

ORDERS = pytest.mark.parametrize(
    "options",
    [
        dict(ahead=True),
        dict(num_pages=12, max_tokens_per_step=24, reserve_output=False),
        dict(max_rows=2, max_tokens_per_step=8),
        dict(prefix_cache=False, page_size=64),
    ],
    ids=["ahead", "preempted", "small steps", "no cache"],
)


def run_ahead(engine) -> None:
    """The block follows a runner that takes a step before the last one is read, and feeds the step with its drafts."""
    speculator, old = engine.feature("speculation"), engine.feature("speculation").runner
    speculator.runs_ahead = speculator.reads_tokens = True
    speculator.runner = BlockRunner(
        old.device, old.model, old.config, engine.runner, speculator.draft_tokens, old.vocabulary
    )
    old.drop_graphs()


def accepted(engine) -> tuple[int, int]:
    counters = engine.scheduler.counters
    return counters.accepted_tokens, counters.drafted_tokens


def drafts_of(engine) -> dict[int, list[int]]:
    """Tokens of the request → the drafts behind them, as they are made."""
    speculator, found = engine.feature("speculation"), {}
    draft = speculator._draft

    def watch(parts, wanted):
        draft(parts, wanted)
        request = parts[0].work.request
        found.setdefault(len(request.tokens), list(request.drafts))

    speculator._draft = watch
    return found


def replies_in_an_order(engines, options, plain, drafting) -> None:
    """The replies are those without drafts, whatever waits for what."""
    requests = [(prompt(length, 2), params(40)) for length in (5, 16, 30, 61, 9)]
    told = said(engines(prefix_cache=False, **plain), requests)
    engine, fed = drafting(engines(**options), "ahead" in options), 0
    speculator = engine.feature("speculation")
    read = speculator._read_drafts

    def count(batch):
        nonlocal fed
        fed += any(entry.drafts and max(entry.drafts) < -1 for entry in batch.entries)
        read(batch)

    speculator._read_drafts = count
    for _ in range(2):
        assert said(engine, requests) == told
    # One step in 16 waits for its drafts, to learn what they take.
    assert (fed > 5) == ("ahead" in options)
    counters = engine.scheduler.snapshot()
    assert counters["accepted_tokens"] > 0 and (counters["preemptions"] > 0) == ("num_pages" in options)


def a_client_that_leaves(engines, plain, drafting) -> None:
    """While the host has not read the drafts of its request: others say what they would, and no slot or page is lost."""
    ids, others = prompt(30, 2), [(prompt(16, 2), params(40)), (prompt(9, 2), params(40))]
    told = said(engines(prefix_cache=False, **plain), others)
    for with_others in (False, True):
        engine = drafting(engines(ahead=True, prefix_cache=False), True)
        speculator, found = engine.feature("speculation"), {0: [], 1: []}
        engine.submit(9, ids, params(60))
        if with_others:
            for id, other in enumerate(others):
                engine.submit(id, *other)
        while not any(request.id == 9 for request in speculator._unread):
            for output in engine.step():
                found.setdefault(output.id, []).extend(output.tokens)
        engine.cancel(9)
        while engine.has_work:
            for output in engine.step():
                assert output.error is None and output.id != 9
                found[output.id] += output.tokens
            assert engine.scheduler.check_integrity() == []
        assert said(engine, others) == told and (not with_others or [found[0], found[1]] == told)
        speculator._forget()
        for pages in (engine.scheduler.cache.allocator, speculator.cache.allocator):
            assert pages.num_free == pages.num_pages


def drafts_that_see_all_at_once(engines, chunk, drafting) -> dict[int, list[int]]:
    """Drafts behind a prompt in chunks, after rejected ones and behind each reply's token are those of who sees all tokens at once; what
    drafts_of() gives of them."""
    engine, ids = drafting(engines(max_tokens_per_step=chunk, max_rows=1)), prompt(50, 3)
    made = drafts_of(engine)
    (reply,) = said(engine, [(ids, params(40))])
    whole = [*ids, *reply]
    again = drafting(engines(max_tokens_per_step=128, max_rows=1, prefix_cache=False))
    wanted = drafts_of(again)
    for length in sorted(made)[:-1]:
        wanted.clear()
        said(again, [(whole[: length - 1], params(5))])
        count = min(len(wanted[length]), len(made[length]))  # near its end a request has fewer
        assert wanted[length][:count] == made[length][:count], length
    assert len(made) > 5
    return made


def replies_under_masks(engine) -> dict[str, list[int]]:
    names = ("person", "array", "pattern", "enum")
    found: dict[str, list[int]] = {name: [] for name in names}
    for id, name in enumerate(names):
        options = RequestOptions(structure=read_structure({"json": SCHEMAS[name]}))
        engine.submit(id, [5 + id, 6, 7], SamplingParams(max_tokens=60, temperature=1.0, seed=id), options)
    while engine.has_work:
        for output in engine.step():
            found[names[output.id]] += output.tokens
    return found
