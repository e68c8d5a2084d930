"""Priorities, deadlines, shares of tenants, bounds of the queue, static batching and whole prompts."""

import pytest
from test_scheduler import greedy, make, shape, step

from zse.cache.pages import BLOCK as PAGE
from zse.cache.pages import HostPool
from zse.cache.prefix import PrefixCache
from zse.errors import RequestError
from zse.scheduler.options import PATIENCE_S, RequestOptions, SchedulingPolicy
from zse.scheduler.queue import MAX_REMEMBERED


def submit(scheduler, id, prompt_len=4, max_tokens=2, now=0.0, **options):
    return scheduler.submit(
        id, [1] * prompt_len, greedy(max_tokens), seed=0, now=now, options=RequestOptions(**options)
    )


def order(scheduler, steps=200):
    """Ids in the order in which they are admitted."""
    seen = []
    for _ in range(steps):
        if not scheduler.requests:
            return seen
        for row in step(scheduler)[0]:
            if row[0] not in seen:
                seen.append(row[0])
    raise AssertionError("no end")


def test_a_higher_priority_goes_first_and_age_counts_like_priority():
    scheduler = make(max_rows=1, policy=SchedulingPolicy(ageing_s=10))
    for id, priority, now in ((1, 0, 0.0), (2, 0, 1.0), (3, -1, 1.0), (4, 2, 5.0), (5, 1, 12.0)):
        submit(scheduler, id, now=now, priority=priority)
    # 5 came 12 s after 1, more than a level is worth, and 11 s after 2.
    assert order(scheduler) == [4, 1, 2, 5, 3]


def test_the_wait_of_a_low_priority_is_bounded_under_a_flood_of_high_ones():
    scheduler = make(max_rows=1, policy=SchedulingPolicy(ageing_s=1))
    submit(scheduler, 0, priority=-10, max_tokens=1)
    now = 0.0
    for id in range(1, 1000):
        submit(scheduler, id, now=now, priority=10, max_tokens=1)
        submit(scheduler, 1000 + id, now=now, priority=10, max_tokens=1)
        batch = scheduler.schedule(now)
        if batch.entries[0].request.id == 0:
            break
        scheduler.commit(batch, [(1, None)])
        now += 0.1
    assert 19.5 < now < 45  # twenty levels of a second, and the queue that stood before it then


def test_sooner_deadlines_go_first_and_a_distant_one_is_none():
    scheduler = make(max_rows=1)
    submit(scheduler, 1)
    submit(scheduler, 2, deadline_ms=9000)
    submit(scheduler, 3, deadline_ms=3000)
    submit(scheduler, 4, deadline_ms=1000 * PATIENCE_S * 10)
    assert order(scheduler) == [3, 2, 1, 4]
    assert (scheduler.counters.deadlines_met, scheduler.counters.deadlines_missed) == (3, 0)


def test_a_deadline_that_passes_in_the_queue_ends_the_request_and_one_that_passes_later_is_counted():
    scheduler = make(max_rows=1)
    submit(scheduler, 1, max_tokens=3, deadline_ms=500)
    step(scheduler)
    submit(scheduler, 2, deadline_ms=1000, now=0.1)
    submit(scheduler, 3, now=0.1)
    assert scheduler.expire(1.1) == []
    expired = scheduler.expire(1.2)
    assert [(output.id, output.tokens, output.finish) for output in expired] == [(2, [], "timeout")]
    assert scheduler.check_integrity() == [] and scheduler.requests.get(2) is None and scheduler.expire(9.0) == []
    assert order(scheduler) == [1, 3]
    counters = scheduler.counters
    assert (counters.timed_out, counters.deadlines_met, counters.deadlines_missed) == (1, 0, 1)


def test_a_preempted_request_is_not_timed_out():
    scheduler = make()
    submit(scheduler, 1, deadline_ms=10, max_tokens=9)
    step(scheduler)
    scheduler.preempt(1)
    assert scheduler.expire(5.0) == [] and order(scheduler) == [1]


def test_who_has_not_begun_within_its_patience_is_refused_and_who_shares_a_running_prompt_is_not():
    scheduler = make(max_rows=2, num_pages=64, max_context=600, prefix_cache=PrefixCache(64, "lru"))
    long = [id % 40 for id in range(200)]
    submit(scheduler, 2, max_tokens=400, max_wait_s=1.0)
    step(scheduler)
    scheduler.submit(1, long, greedy(400), seed=0, options=RequestOptions(max_wait_s=1.0))
    step(scheduler)
    submit(scheduler, 3, max_wait_s=1.0, now=0.5)
    submit(scheduler, 4, max_wait_s=9.0, now=0.5)
    submit(scheduler, 5, now=0.5)
    scheduler.submit(6, long, greedy(2), seed=0, now=0.5, options=RequestOptions(max_wait_s=1.0))
    assert scheduler.requests[1].leads and scheduler.expire(1.4) == []
    (tired,) = scheduler.expire(1.7)
    assert (tired.id, tired.finish, tired.error.status, tired.error.code) == (3, "timeout", 503, "overloaded")
    assert scheduler.check_integrity() == [] and set(scheduler.requests) == {1, 2, 4, 5, 6}
    assert scheduler.counters.timed_out == 1


def test_of_many_tenants_that_left_the_last_ones_are_remembered():
    scheduler = make(max_rows=2)
    visitors = scheduler.queue.visitors
    submit(scheduler, 1, tenant="stays", max_tokens=150)
    for id in range(2, 1000):
        submit(scheduler, id, tenant=f"t{id}", max_tokens=1, now=id / 1000)
        while len(scheduler.requests) > 1:
            step(scheduler)
        if "stays" not in scheduler.queue.tenants:
            submit(scheduler, 1, tenant="stays", max_tokens=150, now=id / 1000)
        assert len(visitors) <= MAX_REMEMBERED and {"stays", f"t{id}"} <= visitors.keys()
    assert len(visitors) > MAX_REMEMBERED // 2 and "t2" not in visitors


def test_tenants_take_turns_whatever_one_of_them_asks():
    scheduler = make(max_rows=1)
    for id in range(10):
        submit(scheduler, id, tenant="a", priority=10)
    submit(scheduler, 10, tenant="b")
    submit(scheduler, 11, tenant="b")
    assert order(scheduler)[:4] == [0, 10, 1, 11]
    assert not scheduler.queue.tenants


def test_shares_go_by_weight():
    scheduler = make(max_rows=1, policy=SchedulingPolicy(tenant_weights={"a": 3.0}))
    for id in range(40):
        submit(scheduler, id, tenant="a" if id < 20 else "b")
    first = order(scheduler)[:16]
    assert sum(id < 20 for id in first) == 12
    scheduler = make(max_rows=1)
    for id in range(40):
        submit(scheduler, id, tenant="a" if id < 20 else "b", weight=3.0 if id >= 20 else None)
    assert sum(id < 20 for id in order(scheduler)[:16]) == 4


def test_a_share_is_counted_in_tokens_that_were_used():
    scheduler = make(max_rows=1, num_pages=64)
    for id in range(10):
        submit(scheduler, id, tenant="a", prompt_len=40, max_tokens=8)
        submit(scheduler, 10 + id, tenant="b", prompt_len=4, max_tokens=8)
    first = order(scheduler)[:9]
    assert sum(id < 10 for id in first) == 2  # 47 tokens against 11


def test_idling_earns_nothing_and_leaving_forgives_nothing():
    scheduler = make(max_rows=1)
    for id in range(6):
        submit(scheduler, id, tenant="a")
    for _ in range(6):
        step(scheduler)
    submit(scheduler, 10, tenant="b")
    for id in range(11, 15):
        submit(scheduler, id, tenant="b")
    # Three requests of a are left; b does not catch up on those that a had before.
    assert order(scheduler)[:5] == [10, 3, 11, 4, 12]
    scheduler = make(max_rows=1)
    submit(scheduler, 1, tenant="a", prompt_len=100, max_tokens=1)
    submit(scheduler, 2, tenant="b", max_tokens=1)
    assert order(scheduler) == [1, 2]
    for id in range(3, 6):
        submit(scheduler, id, tenant="a", max_tokens=1)
        submit(scheduler, id + 10, tenant="b", max_tokens=1)
    assert order(scheduler)[:3] == [13, 14, 15]


def test_without_fair_share_the_queue_has_one_order():
    scheduler = make(max_rows=1, policy=SchedulingPolicy(fair_share=False))
    for id in range(3):
        submit(scheduler, id, tenant="a")
    submit(scheduler, 3, tenant="b")
    assert order(scheduler) == [0, 1, 2, 3]


def test_the_queue_is_bounded_in_prompt_tokens():
    scheduler = make(policy=SchedulingPolicy(max_waiting_tokens=20))
    submit(scheduler, 1, prompt_len=30)  # alone it is let in
    with pytest.raises(RequestError, match="30 prompt tokens are waiting") as caught:
        submit(scheduler, 2, prompt_len=1)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    step(scheduler)
    submit(scheduler, 2, prompt_len=15)
    submit(scheduler, 3, prompt_len=5)
    with pytest.raises(RequestError):
        submit(scheduler, 4, prompt_len=1)


def test_admission_keeps_room_for_the_expected_reply():
    def preemptions(**changes):
        scheduler = make(num_pages=12, max_rows=8, max_tokens=64, policy=SchedulingPolicy(**changes))
        for id in range(30):
            submit(scheduler, id, prompt_len=PAGE - 1, max_tokens=40)
        while scheduler.requests:
            step(scheduler)
        return scheduler.counters.preemptions

    assert preemptions(reserve_output=False) > 5
    assert preemptions() == 0


def test_the_expected_reply_follows_the_replies():
    scheduler = make(num_pages=64, max_rows=8, max_tokens=64)
    for id in range(200):
        submit(scheduler, id, prompt_len=2, max_tokens=3)
    while scheduler.requests:
        step(scheduler)
    assert scheduler.life.mean_reply < 4
    request = submit(scheduler, 300, prompt_len=PAGE, max_tokens=None)
    assert scheduler.life.expected_len(request) == 2 * PAGE  # a page more at least


def test_a_static_batch_runs_to_its_end_before_the_next():
    scheduler = make(max_rows=3, policy=SchedulingPolicy(batching="static"))
    for id, tokens in ((1, 1), (2, 5), (3, 3), (4, 2), (5, 2)):
        submit(scheduler, id, max_tokens=tokens)
    rows = []
    while scheduler.requests:
        rows.append([row[0] for row in step(scheduler)[0]])
        if len(rows) == 1:
            submit(scheduler, 6, max_tokens=2)
    assert rows == [[1, 2, 3], [2, 3], [2, 3], [2], [2], [4, 5, 6], [4, 5, 6]]


def test_a_static_batch_is_admitted_over_several_steps():
    scheduler = make(max_rows=3, num_pages=64, policy=SchedulingPolicy(batching="static"))
    for id in (1, 2):
        submit(scheduler, id, prompt_len=40, max_tokens=3)
    step(scheduler)
    submit(scheduler, 3)
    admitted = order(scheduler)
    assert admitted == [1, 2, 3] and scheduler.counters.finished == 3


def test_without_chunked_prefill_replies_wait_for_prompts():
    scheduler = make(policy=SchedulingPolicy(chunked_prefill=False))
    submit(scheduler, 1, max_tokens=4)
    step(scheduler)
    submit(scheduler, 2, prompt_len=40)
    shapes = [step(scheduler)[0] for _ in range(3)]
    assert shapes == [[(2, 0, 32, False)], [(2, 32, 8, True)], [(1, 4, 1, True), (2, 40, 1, True)]]
    # A request that cannot be admitted yet stops nobody.
    scheduler = make(num_pages=4, policy=SchedulingPolicy(chunked_prefill=False))
    submit(scheduler, 1, prompt_len=30, max_tokens=4)
    submit(scheduler, 2, prompt_len=40)
    batch = scheduler.schedule()
    assert shape(batch) == [(1, 0, 30, True)]
    scheduler.commit(batch, [(1, None)])
    assert step(scheduler)[0] == [(1, 30, 1, True)]
    assert order(scheduler) == [1, 2]


@pytest.mark.parametrize(
    ("preemption", "token_s", "page_s", "swaps"),
    [
        ("recompute", 1.0, 0.0, False),
        ("swap", 0.0, 9.0, True),
        ("auto", 0.0, 9.0, True),
        ("auto", 0.01, 0.01, True),
        ("auto", 0.001, 0.1, False),
    ],
)
def test_what_preemption_does(preemption, token_s, page_s, swaps):
    scheduler = make(
        host=HostPool(10), policy=SchedulingPolicy(preemption=preemption, page_transfer_s=page_s, mixed_ratio=3.0)
    )
    scheduler.budget.token_s = token_s
    submit(scheduler, 1, prompt_len=30, max_tokens=5)
    step(scheduler)
    scheduler.preempt(1)
    assert (1 in scheduler.cache.swapped) is swaps
    # Two pages of 30 tokens come back, or are computed again.
    assert step(scheduler)[0] == [(1, 30, 1, True) if swaps else (1, 0, 31, True)]


def test_a_swapped_prompt_that_is_not_finite_is_not_cached():
    """Its numbers come back from the host as unknown as they went: found by a walk (preempted twice while its prompt was
    computed in chunks, a chunk of which was not finite)."""
    scheduler = make(
        max_tokens=8, host=HostPool(10), prefix_cache=PrefixCache(16, "lru"), policy=SchedulingPolicy(preemption="swap")
    )
    submit(scheduler, 1, prompt_len=30, max_tokens=5)
    for _ in range(2):
        step(scheduler)
        scheduler.preempt(1)
        assert 1 in scheduler.cache.swapped and scheduler.cache.prefix.num_nodes == 0
    while scheduler.requests.get(1):
        batch = scheduler.schedule()
        scheduler.commit(batch, [(-1, None)] * batch.num_samples)
    assert scheduler.counters.failed == 1 and scheduler.cache.prefix.num_nodes == 0
