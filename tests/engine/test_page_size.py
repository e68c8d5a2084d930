"""Pages of 32 and 64 tokens: everything that counts, shares, copies or moves pages gives the tokens that it gives with
pages of 16."""

import pytest
from test_prefix_cache import Said, greedy, prompt, run, sampled
from tiny_engines import TinyEngines, close

from zse.cache.pages import HostPool
from zse.engine.messages import Ask
from zse.sampling.beam import BeamParams
from zse.sampling.params import SamplingParams
from zse.speculative.speculator import Speculator


class Knowing(Speculator):
    """Drafts of known replies, some of them wrong."""

    replies: dict[int, list[int]]

    def before_schedule(self, now):
        for request in self.scheduler.decoding():
            said = len(request.tokens) - request.prompt_len
            request.drafts = [
                draft ^ ((said + at) % 9 == 8) for at, draft in enumerate(self.replies[request.id][said : said + 4])
            ]
        return []

    def after_commit(self, batch, seconds):
        self.reads_tokens = not self.reads_tokens


SIZES = pytest.mark.parametrize(("size", "ahead"), [(32, True), (64, False)], ids=["32 ahead", "64"])


@pytest.fixture
def engine_of(model):
    with TinyEngines(model, threads=1, max_rows=4, page_size=16) as engines:
        yield engines
        for loaded, _ in engines.made:
            assert loaded.config.page_size == loaded.engine.scheduler.cache.page_size


@SIZES
def test_hits_and_copies_say_the_same(engine_of, size, ahead):
    base = prompt(200, 1)
    requests = [
        (base, greedy()),
        (base[:64], greedy()),
        (base[:129], sampled(3)),
        (base[:40] + prompt(90, 2), sampled(4)),
        (base, sampled(5, presence_penalty=1.0, repetition_penalty=1.2)),
        (base[:16], greedy()),
    ]
    plain, engine = engine_of(prefix_cache=False), engine_of(page_size=size, ahead=ahead)
    for request, cached in zip(requests, (0, 63, 128, 40, 199, 15), strict=True):
        said = run(engine, request)
        assert said.cached[0] == cached  # within a page too: that one is copied
        assert said.tokens == run(plain, request).tokens
    assert engine.scheduler.cache.allocator.num_free == engine.scheduler.cache.allocator.num_pages
    assert engine.scheduler.snapshot()["prefix_copied_pages"] >= 4


@SIZES
def test_choices_and_forks_say_the_same(engine_of, size, ahead):
    engine, plain, ids = (
        engine_of(page_size=size, ahead=ahead, max_rows=8),
        engine_of(max_rows=8, prefix_cache=False),
        prompt(150, 7),
    )
    requests = [(ids, sampled(seed, 50)) for seed in range(6)]
    said = run(engine, *requests)
    assert [said.cached[id] for id in range(6)] == [0] + 5 * [149]
    assert said.tokens == run(plain, *requests).tokens
    engine.submit(0, ids, greedy(60))
    said = Said(engine)
    while len(said.tokens.get(0, ())) < 8:
        said.step()
    known = engine.scheduler.requests.get(0).tokens.tolist()
    begins = [(None, ()), (len(known) - 1, (5,)), (151, (6, 7))]
    for id, (length, append) in enumerate(begins, 1):
        engine.scheduler.fork(0, id, seed=id, length=length, append=append)
    said.drain()
    for id, (length, append) in enumerate(begins, 1):
        begin = [*known[:length], *append]
        assert said.tokens[id] == run(plain, (begin, greedy(len(ids) + 60 - len(begin)))).tokens[0]


@SIZES
@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_preempted_requests_say_the_same(engine_of, size, ahead, how):
    requests = [(prompt(20, seed), sampled(seed, 90)) for seed in range(4)]
    plain = run(engine_of(prefix_cache=False), *requests)
    for prefix_cache in (False, True):
        engine = engine_of(
            page_size=size,
            ahead=ahead,
            reserve_output=False,
            num_pages=18 if size == 32 else 20,
            prefix_cache=prefix_cache,
        )
        scheduler = engine.scheduler
        scheduler.life.should_swap = lambda request: how == "swap"
        scheduler.cache.host.num_slots = engine.runner.pages.slots.count = 32
        assert run(engine, *requests).tokens == plain.tokens
        counters = scheduler.snapshot()
        assert counters["preemptions"] > 0 and (counters["swapped_out_pages"] > 0) == (how == "swap")
        if how == "swap":
            assert counters["recomputed_tokens"] == 0
        assert isinstance(scheduler.cache.host, HostPool) and scheduler.cache.check_integrity() == []


@SIZES
def test_drafts_and_contiguous_rows_say_the_same(engine_of, size, ahead):
    ids = prompt(30, 12) * 3
    requests = [(ids, greedy(100)), (ids[:70], greedy(60)), (prompt(33, 13), sampled(9, 60))]
    plain = run(engine_of(prefix_cache=False, speculation="none"), *requests)
    engine = engine_of(page_size=size, ahead=ahead)
    speculator = Knowing(engine.scheduler, 4, "cpu", runs_ahead=ahead)
    speculator.replies = plain.tokens
    engine.use("speculation", speculator)
    assert run(engine, *requests).tokens == plain.tokens
    counters = engine.scheduler.counters
    assert 50 < counters.accepted_tokens < counters.drafted_tokens
    engine = engine_of(page_size=size, ahead=ahead, kv_layout="contiguous", num_pages=32, max_context=200)
    assert run(engine, *requests).tokens == plain.tokens


@SIZES
def test_jobs_and_beams_say_the_same(engine_of, size, ahead):
    ids = prompt(150, 20)
    beams = BeamParams(beam_width=4, max_tokens=40, ignore_eos=True)

    def story(engine) -> tuple[dict, dict]:
        over, tokens = {}, {}
        engine.submit(1, ids[:50], sampled(3, 40))
        engine.submit(2, ids, Ask("logprobs", top=1))
        engine.submit(3, ids[:33], Ask("mean"))
        engine.submit(4, ids[:70], beams)
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.id, []).extend(output.tokens)
            over |= {item.id: item.result for item in engine.take_completed()}
            assert engine.scheduler.check_integrity() == [] and engine.feature("jobs").check_integrity() == []
        assert engine.scheduler.cache.allocator.num_free == engine.scheduler.cache.allocator.num_pages
        return {**over, 4: over[4].replies}, tokens  # how much of the prompt was cached may differ

    options = dict(max_rows=5, max_tokens_per_step=48, num_pages=640, kv_dtype="f32")
    expected = story(engine_of(**options))
    engine = engine_of(page_size=size, ahead=ahead, **options)
    assert story(engine) == expected and len(expected[0]) == 3
    assert run(engine, (ids, greedy())).cached[0] == 149  # the job left its prompt
    tight = dict(num_pages=24, max_context=160)
    assert story(engine_of(page_size=size, ahead=ahead, **options | tight)) == expected


@pytest.mark.parametrize("size", [32, 64])
def test_pages_come_back_from_the_host_and_from_files(model, tmp_path, size):
    """From host memory where there are no files; a CPU reads files, in threads, where a step would copy."""
    engines, ids, expected = TinyEngines(model, threads=1, max_rows=2, num_pages=32), prompt(200, 1), None
    for counter, options in (
        ("prefix_onloaded_pages", dict(cache_host_memory=1 << 20)),
        ("prefix_disk_read_pages", dict(cache_disk=str(tmp_path / "kv"))),
    ):
        engine = engines(page_size=size, **options)
        first = run(engine, (ids, greedy())).tokens
        assert first == (expected or first)
        expected = first
        while "cache_disk" in options and engine.counters()["prefix_disk_written_pages"] < 192 // size:
            engine.use_idle_time()  # what is not written yet gives way last
        for seed in range(4):  # others take its place
            run(engine, (prompt(180, 100 + seed), greedy()))
        assert engine.scheduler.snapshot()["prefix_host_pages"] > 3
        again = run(engine, (ids, greedy()))
        assert again.tokens == expected and again.cached[0] == 192  # whole pages
        assert (engine.scheduler.snapshot() | engine.counters())[counter] == 192 // size
        while engine.use_idle_time():
            pass
        close(*engines.made[-1])
    # Files of another page size are not this cache's.
    for other, cached in ((16, 0), (size, 192)):
        engine = engines(page_size=other, **options)
        said = run(engine, (ids, greedy()))
        assert said.tokens == expected and said.cached[0] == cached
        assert engine.counters()["prefix_disk_read_pages"] == cached // size
        assert engine.counters()["prefix_disk_damaged_files"] == 0
        close(*engines.made[-1])


def test_a_draft_model_has_pages_of_the_same_size(model, engine_of):
    requests = [(prompt(70, 3), greedy(80)), (prompt(5, 4), SamplingParams(max_tokens=60, seed=1, ignore_eos=True))]
    expected = run(engine_of(speculation="none"), *requests)
    engine = engine_of(page_size=32, draft_model=str(model), draft_tokens=3)
    speculator = engine.feature("speculation")
    speculator.room = lambda rows, most: most
    speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(3, each.room) for each in candidates]
    assert run(engine, *requests).tokens == expected.tokens
    counters = engine.scheduler.counters
    assert counters.accepted_tokens > 0.9 * counters.drafted_tokens > 20
    assert speculator.cache.page_size == 32 and speculator.cache.check_integrity() == []
