"""What is shared, copied, swapped or found again gives the tokens that computing it gives, on the CPU device."""

import pytest
import tiny_model
from tiny_engines import TinyEngines, prompt
from tiny_model import NAN_TOKEN

from zse.cache.pages import HostPool
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions


@pytest.fixture(scope="module")
def nan_model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "nan", nan=True)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def engine_of(model, request):
    with TinyEngines(model, threads=1, max_rows=4, ahead=request.param) as engines:
        yield engines


def greedy(max_tokens=12):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def sampled(seed, max_tokens=12, **changes):
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True, **changes)


class Said:
    """What requests said: tokens by id, cached_tokens by id, finish by id."""

    def __init__(self, engine):
        self.tokens, self.cached, self.finish = {}, {}, {}
        self.engine = engine

    def step(self):
        for output in self.engine.step():
            self.tokens.setdefault(output.id, []).extend(output.tokens)
            self.cached[output.id] = self.cached.get(output.id, 0) + output.cached_tokens
            self.finish[output.id] = output.finish
        assert self.engine.scheduler.check_integrity() == []

    def drain(self):
        while self.engine.has_work:
            self.step()
        return self


def run(engine, *requests, tenant=""):
    """Said of requests (prompt, params) that are submitted together, ids from 0."""
    for id, (ids, params) in enumerate(requests):
        engine.submit(id, ids, params, RequestOptions(tenant=tenant))
    return Said(engine).drain()


def test_a_hit_gives_what_a_miss_gives(engine_of):
    base, engine = prompt(70, 1), engine_of()
    plain = engine_of(prefix_cache=False)
    requests = [
        (base, greedy()),
        (base[:64], greedy()),
        (base[:65], sampled(3)),
        (base[:40] + prompt(9, 2), sampled(4)),
        (base, sampled(5, presence_penalty=1.0, repetition_penalty=1.2)),
        (base[:16], greedy()),
    ]
    for request, cached in zip(requests, (0, 63, 64, 40, 69, 15), strict=True):
        said = run(engine, request)
        assert said.cached[0] == cached
        assert said.tokens == run(plain, request).tokens
    assert engine.scheduler.cache.allocator.num_free == engine.scheduler.cache.allocator.num_pages


def test_the_next_turn_of_a_conversation_finds_prompt_and_reply(engine_of):
    first, engine = prompt(21, 3), engine_of()
    reply = run(engine, (first, greedy(20))).tokens[0]
    second = first + reply + prompt(5, 4)
    said = run(engine, (second, greedy()))
    assert said.cached[0] == 40  # the reply's last token was never fed back
    assert said.tokens == run(engine_of(prefix_cache=False), (second, greedy())).tokens


def test_tenants_and_salts_share_nothing(engine_of):
    engine, ids = engine_of(), prompt(50, 5)
    assert run(engine, (ids, greedy()), tenant="a").cached[0] == 0
    assert run(engine, (ids, greedy()), tenant="b").cached[0] == 0
    engine.submit(7, ids, greedy(), RequestOptions(tenant="a", cache_salt="x"))
    assert Said(engine).drain().cached[7] == 0
    assert run(engine, (ids, greedy()), tenant="a").cached[0] == 49


def test_a_running_request_is_hit(engine_of):
    engine, ids = engine_of(), prompt(50, 6)
    engine.submit(0, ids, greedy(60))
    said = Said(engine)
    for _ in range(30):
        said.step()
    longer = ids + said.tokens[0][:20]
    engine.submit(1, longer, greedy())
    said.drain()
    assert said.cached[1] == 69 - 69 % 16 or said.cached[1] == 69
    plain = run(engine_of(prefix_cache=False), (ids, greedy(60)), (longer, greedy()))
    assert said.tokens == plain.tokens


def test_choices_of_one_prompt_compute_it_once(engine_of):
    engine, ids = engine_of(max_rows=8, max_tokens_per_step=40), prompt(150, 7)
    requests = [(ids, sampled(seed)) for seed in range(8)]
    said = run(engine, *requests)
    assert [said.cached[id] for id in range(8)] == [0] + 7 * [149]
    assert engine.scheduler.counters.scheduled_tokens == 150 + 7 + 8 * 11
    assert said.tokens == run(engine_of(max_rows=8, prefix_cache=False), *requests).tokens


def test_what_is_not_finite_is_not_kept(engine_of, nan_model):
    engine = engine_of(model=str(nan_model))
    ids = prompt(40, 8) + [NAN_TOKEN] + prompt(20, 9)
    for _ in range(2):
        assert run(engine, (ids, greedy())).finish[0] == "error"
        assert engine.scheduler.cache.prefix.num_nodes == 0
    run(engine, (ids[:40], greedy(1)))
    assert run(engine, (ids, greedy())).finish[0] == "error"
    assert engine.scheduler.cache.prefix.num_nodes == 3  # what others computed before stays


def test_rows_of_a_whole_context_each_say_the_same(engine_of):
    """--kv-layout contiguous: fewer run at once, nobody finds anything, nobody is preempted."""
    ids = prompt(40, 9)
    requests = [(ids, greedy(30)), (ids, sampled(2, 40)), (prompt(5, 8), greedy(60)), (ids[:33], sampled(7))]
    expected = run(engine_of(prefix_cache=False), *requests)
    engine = engine_of(kv_layout="contiguous", num_pages=20, max_context=112)
    for id, (tokens, params) in enumerate(requests):
        engine.submit(id, tokens, params)
    said = Said(engine)
    said.step()
    assert len(engine.scheduler.running) == 2  # of seven pages each
    assert said.drain().tokens == expected.tokens and set(said.cached.values()) == {0}
    counters = engine.counters()
    assert counters["preemptions"] == 0 == counters["reserved_pages"] and "prefix_hits" not in counters
    assert list(engine.feature("jobs").score(ids))  # a job borrows pages between the rows


def test_preempted_requests_find_their_pages_again(engine_of):
    engine = engine_of(reserve_output=False, num_pages=9)
    requests = [(prompt(20, seed), sampled(seed, 40, presence_penalty=0.4)) for seed in range(4)]
    said = run(engine, *requests)
    counters = engine.scheduler.snapshot()
    assert counters["preemptions"] > 0 and counters["prefix_hits"] > 0
    assert said.tokens == run(engine_of(prefix_cache=False), *requests).tokens


def test_swapped_requests_go_on_where_they_were(engine_of):
    engine = engine_of(reserve_output=False, num_pages=9, prefix_cache=False)
    scheduler = engine.scheduler
    scheduler.cache.host, scheduler.life.should_swap = HostPool(32), lambda request: True
    engine.runner.pages.slots.count = 32
    requests = [(prompt(20, seed), sampled(seed, 40, presence_penalty=0.4)) for seed in range(4)]
    said = run(engine, *requests)
    counters = scheduler.snapshot()
    assert counters["preemptions"] > 0 and counters["swapped_in_pages"] == counters["swapped_out_pages"] > 0
    assert counters["recomputed_tokens"] == 0 and scheduler.cache.host.num_free == 32
    assert said.tokens == run(engine_of(prefix_cache=False), *requests).tokens


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_forks_go_on_from_where_their_source_is(engine_of, prefix_cache):
    engine, ids = engine_of(prefix_cache=prefix_cache), prompt(37, 10)
    engine.submit(0, ids, greedy(30))
    said = Said(engine)
    while len(said.tokens.get(0, ())) < 8:
        said.step()
    known = engine.scheduler.requests.get(0).tokens.tolist()
    for id, (length, append) in enumerate([(None, ()), (len(known) - 1, (5,)), (40, (6, 7))], 1):
        engine.scheduler.fork(0, id, seed=id, length=length, append=append)
    computed = engine.scheduler.counters.scheduled_tokens
    said.step()
    assert engine.scheduler.counters.scheduled_tokens - computed <= 4 * (1 + engine.runner.runs_ahead) + 12
    said.drain()
    plain = engine_of(prefix_cache=False)
    for id, begin in enumerate((ids, known, [*known[:-1], 5], [*known[:40], 6, 7])):
        again = run(plain, (begin, greedy(len(ids) + 30 - len(begin))))
        assert said.tokens[id] == again.tokens[0]


def test_a_long_hit_has_more_pages_than_a_step_writes_otherwise(engine_of):
    engine, ids = engine_of(max_rows=1, max_tokens_per_step=16), prompt(200, 11)
    first = run(engine, (ids, greedy()))
    again = run(engine, (ids, greedy()))
    assert again.cached[0] == 199 and again.tokens == first.tokens
