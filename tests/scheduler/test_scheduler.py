from array import array

import pytest
from simulator import EOS, VOCAB, FakeDevice, next_token

from zse.cache.pages import BLOCK as PAGE
from zse.cache.pages import HostPool
from zse.cache.prefix import PrefixCache
from zse.cache.states import StateSlots
from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.lifecycle import MAX_PREEMPTIONS
from zse.scheduler.options import PlacedImage, RequestOptions, SchedulingPolicy
from zse.scheduler.scheduler import Scheduler


def make(**changes):
    options = dict(
        num_pages=16, max_rows=4, max_tokens=32, max_context=200, vocab_size=VOCAB, eos_ids=frozenset((EOS,))
    )
    return Scheduler(**(options | changes))


# Admits as long as prompts fit, so that replies run out of pages.
EAGER = SchedulingPolicy(reserve_output=False)


def greedy(max_tokens, **changes):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **changes)


def shape(batch):
    return [(entry.request.id, entry.start, entry.count, entry.samples) for entry in batch.entries]


def step(scheduler, token=1):
    batch = scheduler.schedule()
    outputs = scheduler.commit(batch, [(token, None)] * batch.num_samples)
    assert scheduler.check_integrity() == []
    return shape(batch), outputs


def test_several_requests_run_as_one_batch_and_long_prompts_in_chunks():
    scheduler = make()
    scheduler.submit(1, [1] * 10, greedy(3), seed=0)
    scheduler.submit(2, [2] * 60, greedy(3), seed=0)
    scheduler.submit(3, [3] * 5, greedy(3), seed=0)
    assert step(scheduler)[0] == [(1, 0, 10, True), (2, 0, 22, False)]
    # Beside a decode row prompts get a quarter of the step: 32 / 4 - 1.
    assert step(scheduler)[0] == [(1, 10, 1, True), (2, 22, 7, False)]
    assert step(scheduler)[0] == [(1, 11, 1, True), (2, 29, 7, False)]
    assert step(scheduler)[0] == [(2, 36, 24, True), (3, 0, 5, True)]
    assert step(scheduler)[0] == [(2, 60, 1, True), (3, 5, 1, True)]


def test_decode_rows_come_before_prompts():
    scheduler = make(max_tokens=4)
    scheduler.submit(1, [1] * 12, greedy(2), seed=0)
    scheduler.submit(2, [2], greedy(9), seed=0)
    for start in (0, 4):
        assert step(scheduler)[0] == [(1, start, 4, False)]
    assert step(scheduler)[0] == [(1, 8, 4, True)]
    assert step(scheduler)[0] == [(1, 12, 1, True), (2, 0, 1, True)]


def test_rows_run_out_first_come_first_served():
    scheduler = make(max_rows=2)
    for id in range(4):
        scheduler.submit(id, [1, 2], greedy(2), seed=0)
    assert [row[0] for row in step(scheduler)[0]] == [0, 1]
    assert (len(scheduler.running), scheduler.queue.num_waiting) == (2, 2)
    _, outputs = step(scheduler)
    assert [(output.id, output.finish) for output in outputs] == [(0, "length"), (1, "length")]
    assert [row[0] for row in step(scheduler)[0]] == [2, 3]


def test_a_request_that_waits_for_pages_is_not_overtaken():
    scheduler = make(num_pages=6)
    scheduler.submit(1, [1] * (3 * PAGE), greedy(1), seed=0)
    scheduler.submit(2, [1] * (5 * PAGE), greedy(1), seed=0)
    scheduler.submit(3, [1], greedy(1), seed=0)
    assert step(scheduler)[0] == [(1, 0, 32, False)]
    assert step(scheduler)[0] == [(1, 32, 16, True)]
    assert [row[0] for row in step(scheduler)[0]] == [2]


def test_finish_reasons():
    scheduler = make()
    scheduler.submit(1, [1], SamplingParams(max_tokens=5), seed=0)
    scheduler.submit(2, [1], SamplingParams(max_tokens=5, ignore_eos=True), seed=0)
    scheduler.submit(3, [1], SamplingParams(max_tokens=5, ignore_eos=True, stop_token_ids=(EOS,)), seed=0)
    scheduler.submit(4, [1], SamplingParams(max_tokens=1, ignore_eos=True), seed=0)
    _, outputs = step(scheduler, token=EOS)
    assert [(o.id, o.tokens, o.finish) for o in outputs] == [
        (1, [EOS], "stop"),
        (2, [EOS], None),
        (3, [EOS], "stop"),
        (4, [EOS], "length"),
    ]


def test_the_context_limits_an_open_ended_request():
    scheduler = make(max_context=12)
    scheduler.submit(1, [1] * 10, SamplingParams(ignore_eos=True), seed=0)
    finishes = [step(scheduler)[1][0].finish for _ in range(2)]
    assert finishes == [None, "length"] and not scheduler.requests


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(11, 1, True), (12, 1, False), (11, 2, False), (12, None, False), (11, None, True)],
)
def test_the_context_limit_at_admission(prompt, max_tokens, fits):
    scheduler = make(max_context=12)
    params = SamplingParams(max_tokens=max_tokens)
    if fits:
        scheduler.submit(1, [1] * prompt, params, seed=0)
        return
    with pytest.raises(RequestError, match=f"context is 12 tokens; the request has {prompt} prompt") as caught:
        scheduler.submit(1, [1] * prompt, params, seed=0)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert scheduler.counters.refused == 1 and not scheduler.requests


def test_what_can_never_fit_the_cache_is_refused():
    scheduler = make(num_pages=2)
    scheduler.submit(1, [1] * (2 * PAGE), greedy(1), seed=0)  # the sampled token itself needs no page
    with pytest.raises(RequestError, match="KV cache of this engine holds 32 tokens"):
        scheduler.submit(2, [1] * (2 * PAGE), greedy(2), seed=0)


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([VOCAB], greedy(1), "prompt"),
        ([-1], greedy(1), "prompt"),
        ([1], greedy(1, stop_token_ids=(VOCAB,)), "stop_token_ids"),
        ([1], greedy(1, logit_bias={-3: 1.0}), "logit_bias"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(prompt, params, param):
    with pytest.raises(RequestError) as caught:
        make().submit(1, prompt, params, seed=0)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_token_id", param)


def test_other_refusals():
    scheduler = make(max_waiting=1)
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.submit(1, [], greedy(1), seed=0)
    scheduler.submit(1, [1], greedy(1), seed=0)
    with pytest.raises(RequestError, match="waiting already") as caught:
        scheduler.submit(2, [1], greedy(1), seed=0)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    step(scheduler)
    scheduler.submit(2, [1], greedy(5), seed=0)
    with pytest.raises(RequestError, match="id 2 is in use"):
        scheduler.submit(2, [1], greedy(1), seed=0)
    with pytest.raises(ValueError, match="below max_rows"):
        make(max_tokens=3)


@pytest.mark.parametrize(
    "state", ["waiting", "mid-prefill", "decoding", "preempted", "in-flight prefill", "in-flight decode", "finished"]
)
def test_cancel_frees_everything_at_once_in_every_state(state):
    scheduler = make(num_pages=4, max_tokens=8)
    scheduler.submit(1, [1] * 20, greedy(1 if state == "finished" else 20), seed=0)
    batch = None
    if state == "in-flight prefill":
        batch = scheduler.schedule()
    elif state == "mid-prefill":
        step(scheduler)
    elif state != "waiting":
        for _ in range(3):
            step(scheduler)
        if state == "preempted":
            scheduler.preempt(1)
        elif state == "in-flight decode":
            batch = scheduler.schedule()
    assert scheduler.cancel(1) is (state != "finished")
    assert scheduler.cancel(1) is False
    assert not scheduler.requests and scheduler.check_integrity() == []
    if batch:
        assert scheduler.cache.allocator.num_free < 4, "pages in flight must not be reused before the step is over"
        assert scheduler.commit(batch, [(1, None)] * batch.num_samples) == []
        assert scheduler.counters.late_results == 1
    assert scheduler.cache.allocator.num_free == 4 and scheduler.check_integrity() == []
    assert scheduler.counters.ignored_cancels == (2 if state == "finished" else 1)


def test_a_page_shortage_preempts_the_youngest_and_its_tokens_stay_the_same():
    def replies(num_pages):
        scheduler, device, got = (
            make(num_pages=num_pages, policy=EAGER),
            FakeDevice(num_pages, 4),
            {1: [], 2: [], 3: []},
        )
        for id in got:
            scheduler.submit(id, [id] * 14, greedy(40), seed=id)
        while batch := scheduler.schedule():
            for output in scheduler.commit(batch, device.run(batch)):
                got[output.id] += output.tokens
            assert scheduler.check_integrity() == []
        return got, scheduler.counters

    roomy, none = replies(16)
    tight, counters = replies(6)
    assert none.preemptions == 0 and counters.preemptions > 0 and counters.recomputed_tokens > 0
    assert roomy == tight and all(len(reply) == 40 for reply in tight.values())


def test_preemption_takes_the_youngest_and_it_comes_back_first():
    scheduler = make(num_pages=3, policy=EAGER)
    scheduler.submit(1, [1] * 15, greedy(30), seed=0)
    scheduler.submit(2, [2] * 15, greedy(30), seed=0)
    scheduler.submit(3, [3] * 10, greedy(1), seed=0)
    step(scheduler)  # 1 and 2 take a page each; one page a running row stays free, so 3 waits
    assert (len(scheduler.running), scheduler.queue.num_waiting) == (2, 1)
    step(scheduler)  # both fill their page
    ran, _ = step(scheduler)  # 1 takes the last page, 2 must yield
    assert ran == [(1, 16, 1, True)]
    assert (len(scheduler.running), scheduler.queue.num_waiting) == (1, 2)
    assert scheduler.requests.get(2).preemptions == 1 and scheduler.requests.get(2).computed_len == 0
    while scheduler.requests.get(1):
        step(scheduler)
    assert step(scheduler)[0][0] == (2, 0, 17, True)


def test_after_three_preemptions_a_request_is_pinned():
    scheduler = make(num_pages=8, policy=EAGER)
    scheduler.submit(1, [1] * 20, greedy(60), seed=0)
    for _ in range(MAX_PREEMPTIONS):
        step(scheduler)
        scheduler.preempt(1)
    step(scheduler)
    assert len(scheduler.cache.table(1)) == 5  # 20 + 60 - 1 tokens
    scheduler.submit(2, [2] * 20, greedy(60), seed=0)
    while scheduler.requests.get(1):
        step(scheduler)
    assert scheduler.counters.preemptions > MAX_PREEMPTIONS  # 2 had to yield, 1 no more


def test_a_row_that_is_not_finite_fails_alone():
    scheduler = make()
    for id in (1, 2):
        scheduler.submit(id, [id], greedy(5), seed=0)
    batch = scheduler.schedule()
    first, second = scheduler.commit(batch, [(-1, None), (4, None)])
    assert (first.id, first.tokens, first.finish) == (1, [], "error")
    assert (second.id, second.tokens, second.finish) == (2, [4], None)
    assert scheduler.requests.get(1) is None and scheduler.check_integrity() == []
    batch = scheduler.schedule()
    assert scheduler.commit(batch, [(VOCAB, None)])[0].finish == "error"


def test_misuse_is_an_error():
    scheduler = make()
    assert scheduler.schedule() is None
    scheduler.submit(1, [1], greedy(1), seed=0)
    batch = scheduler.schedule()
    assert scheduler.schedule() is None  # the last token is on its way
    with pytest.raises(ValueError, match="0 results for 1"):
        scheduler.commit(batch, [])
    scheduler.commit(batch, [(1, None)])
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        scheduler.commit(batch, [(1, None)])
    scheduler = make()
    scheduler.submit(1, [1], greedy(9), seed=0)
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(RuntimeError, match="batches in flight"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        scheduler.commit(second, [(1, None)])


def test_a_batch_can_be_scheduled_before_the_tokens_of_the_one_before_are_known():
    scheduler = make(max_rows=3)
    for id, tokens in ((1, 3), (2, 2), (3, 9)):
        scheduler.submit(id, [id] * 5, greedy(tokens, stop_token_ids=(7,)), seed=0)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert shape(second) == [(1, 5, 1, True), (2, 5, 1, True), (3, 5, 1, True)]
    outputs = scheduler.commit(first, [(4, None), (5, None), (7, None)])
    assert [(o.id, o.tokens, o.finish) for o in outputs] == [(1, [4], None), (2, [5], None), (3, [7], "stop")]
    # Request 3 ended; its row and pages stay until the step that still writes to them is over.
    assert scheduler.cache.allocator.num_free == 16 - 3 and scheduler.check_integrity() == []
    third = scheduler.schedule()
    assert shape(third) == [(1, 6, 1, True)]  # the last token of 2 is on its way already
    outputs = scheduler.commit(second, [(4, None), (5, None), (6, None)])
    assert [(o.id, o.tokens, o.finish) for o in outputs] == [(1, [4], None), (2, [5], "length")]
    assert scheduler.counters.late_results == 1 and scheduler.cache.allocator.num_free == 15
    assert scheduler.schedule() is None and scheduler.requests
    assert scheduler.commit(third, [(4, None)])[0].finish == "length"
    assert not scheduler.requests and scheduler.cache.allocator.num_free == 16 and scheduler.check_integrity() == []


def test_what_is_kept_of_an_image_s_request_that_ended_in_flight_is_of_that_image():
    """Its state is adopted when the step that was submitted ahead is over."""
    slots = StateSlots(6, 16, HostPool(0), page_size=PAGE)
    scheduler = make(prefix_cache=PrefixCache(16, "lru", PAGE), states=slots)
    prompt, seen, other = [5] * 12 + [9] * 4 + [6] * 4, 0x80000001, 0x80000002

    def asks(id: int, shows: int, *behind: int) -> int:
        """How many tokens are found."""
        image = PlacedImage(12, 4, b"", array("I", [shows] * 4).tobytes())
        options = RequestOptions(images=(image,))
        scheduler.submit(id, [*prompt, *behind], greedy(9, stop_token_ids=(7,)), seed=0, options=options)
        first, ahead = scheduler.schedule(), scheduler.schedule()
        request = scheduler.requests[id]
        found = first.entries[0].start
        scheduler.commit(first, [(7, None)])
        assert request.state == "finished" and request.options.images
        scheduler.commit(ahead, [(8, None)])
        assert not request.options.images and scheduler.check_integrity() == []
        return found

    assert asks(1, seen) == 0
    assert asks(2, other, 7, 8) == 0
    assert asks(3, seen, 7, 8) == 21


def test_nothing_is_preempted_while_a_batch_is_in_flight():
    scheduler = make(num_pages=3, policy=EAGER)
    scheduler.submit(1, [1] * 15, greedy(30), seed=0)
    scheduler.submit(2, [2] * 15, greedy(30), seed=0)
    batches = [scheduler.schedule(), scheduler.schedule()]
    scheduler.commit(batches[0], [(1, None)] * 2)
    assert scheduler.schedule() is None and scheduler.counters.preemptions == 0  # one page for two rows
    assert scheduler.check_integrity() == []
    scheduler.commit(batches[1], [(1, None)] * 2)
    assert shape(scheduler.schedule()) == [(1, 16, 1, True)]
    assert scheduler.counters.preemptions == 1 and scheduler.check_integrity() == []


@pytest.mark.parametrize("micro_batches, shares", [(2, [(1, 2, 3), (4, 5)]), (3, [(1, 2), (3, 4), (5,)])])
def test_rows_are_divided_into_micro_batches(micro_batches, shares):
    """Of five that decode; once one has left, micro_batches differ by one at most again."""
    scheduler = make(max_rows=5, micro_batches=micro_batches, feeds=False)
    for id in range(1, 6):
        scheduler.submit(id, [id], greedy(30), seed=0)
    step(scheduler)
    flying = [scheduler.schedule() for _ in range(micro_batches)]
    for turn in range(8 * micro_batches):
        found = [tuple(entry.request.id for entry in batch.entries) for batch in flying]
        if turn < 2 * micro_batches:
            assert found == shares
            shares = [*shares[1:], shares[0]]
        first = flying.pop(0)
        scheduler.commit(first, [(1, None)] * first.num_samples)
        if turn == 2 * micro_batches:
            scheduler.cancel(2)
        flying.append(scheduler.schedule())
        assert scheduler.check_integrity() == []
    assert sorted(id for ids in found for id in ids) == [1, 3, 4, 5] and max(map(len, found)) == 2


def test_chunks_of_a_prompt_follow_each_other_beside_micro_batches():
    """A batch without rows that decode leaves time for those that are in flight."""
    scheduler = make(micro_batches=2, feeds=False)
    scheduler.submit(1, [1], greedy(9), seed=0)
    step(scheduler)
    scheduler.submit(2, [1] * 60, greedy(9), seed=0)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert shape(first) == [(1, 1, 1, 1), (2, 0, 7, 0)] and shape(second) == [(2, 7, 7, 0)]
    with pytest.raises(RuntimeError):
        scheduler.schedule(), scheduler.schedule()


def test_a_device_that_feeds_tokens_is_given_the_oldest_micro_batch_again():
    scheduler = make(micro_batches=2, feeds=True)
    scheduler.submit(1, [1], greedy(9), seed=0)
    scheduler.submit(2, [2], greedy(9), seed=0)
    step(scheduler)
    batches = [scheduler.schedule() for _ in range(3)]
    assert [shape(batch) for batch in batches] == [[(1, 1, 1, 1)], [(2, 1, 1, 1)], [(1, 2, 1, 1)]]
    assert scheduler.cancel(2)
    for batch in batches[:2]:
        scheduler.commit(batch, [(1, None)])
    assert shape(scheduler.schedule()) == [(1, 3, 1, 1)]  # alone
    assert scheduler.schedule() is None and scheduler.check_integrity() == []


def test_a_prompt_may_fill_what_decode_rows_leave():
    scheduler = make(mixed_tokens=32)
    scheduler.submit(1, [1], greedy(9), seed=0)
    step(scheduler)
    scheduler.submit(2, [1] * 60, greedy(9), seed=0)
    assert step(scheduler)[0] == [(1, 1, 1, True), (2, 0, 31, False)]


def test_the_integrity_check_sees_damage():
    scheduler = make()
    scheduler.submit(1, [1] * 20, greedy(5), seed=0)
    step(scheduler)
    scheduler.cache.table(1).pop()
    assert scheduler.check_integrity()
    scheduler = make()
    scheduler.submit(1, [1], greedy(5), seed=0)
    step(scheduler)
    scheduler.life.free_rows.append(0)
    assert any("rows are lost or shared" in line for line in scheduler.check_integrity())


def test_steps_can_be_made_shorter():
    scheduler = make(max_tokens=64)
    scheduler.submit(1, [1] * 100, greedy(1), seed=0)
    assert step(scheduler)[0] == [(1, 0, 64, False)]
    scheduler.budget.limit(20)
    assert step(scheduler)[0] == [(1, 64, 16, False)]
    scheduler.budget.limit(0)
    assert scheduler.budget.max_tokens == PAGE and scheduler.budget.is_limited
    scheduler.budget.limit(1000)
    assert scheduler.budget.max_tokens == 64 and not scheduler.budget.is_limited


def test_queue_wait_is_counted():
    scheduler = make(max_rows=1)
    scheduler.submit(1, [1], greedy(1), seed=0, now=10.0)
    batch = scheduler.schedule(now=12.5)
    scheduler.commit(batch, [(next_token(0, [1]), None)])
    assert scheduler.counters.queue_wait_s == 2.5


def last_prompt_token_with_drafts(scheduler, id, prompt):
    """All of the prompt but its last token has run, and drafts go with that one."""
    request = scheduler.submit(id, prompt, greedy(9), seed=0)
    step(scheduler)
    assert request.computed_len == len(prompt) - 1 and scheduler.decoding() == [request]
    request.drafts = (1, 1)
    return scheduler.schedule()


def test_a_prompt_that_is_not_finite_is_not_cached_when_drafts_come_with_its_last_token():
    """Found by a walk: the first sampled token says whether the prompt is sound, also where drafts stand behind it."""
    scheduler = make(max_tokens=11, max_drafts=4, prefix_cache=PrefixCache(16, "lru"))
    batch = last_prompt_token_with_drafts(scheduler, 1, [1] * 12)
    assert scheduler.commit(batch, [(-1, None)] * 3) == []
    assert scheduler.requests.get(1).committed_len == 0 and scheduler.preempt(1)
    assert scheduler.cache.prefix.num_nodes == 0


def test_cached_tokens_are_told_with_the_first_token_when_drafts_come_with_it():
    scheduler = make(max_tokens=11, max_drafts=4, prefix_cache=PrefixCache(16, "lru"))
    for id, length, cached in ((1, 12, 0), (2, 26, 14)):
        batch = last_prompt_token_with_drafts(scheduler, id, [1] * length)
        (output,) = scheduler.commit(batch, [(1, None), (1, None), (2, None)])
        assert (output.tokens, output.cached_tokens) == ([1, 1, 2], cached)
        while scheduler.requests.get(id):
            step(scheduler)
