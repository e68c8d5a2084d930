"""Requests that are held before their first token: their prompts run, and nobody else waits for them."""

from array import array

import pytest
from test_scheduler import greedy, make, shape, step

from zse.cache.groups import PageGeometry
from zse.cache.prefix import PrefixCache
from zse.scheduler.options import PlacedImage, RequestOptions, SchedulingPolicy
from zse.scheduler.queue import LEAST_SHARED

EAGER = SchedulingPolicy(reserve_output=False, fair_share=False)


def hold(scheduler, id, prompt, max_tokens=3, **more):
    request = scheduler.submit(id, prompt, greedy(max_tokens), seed=id, **more)
    request.stepwise = True
    scheduler.hold(id)
    return request


def resume(scheduler, id):
    scheduler.resume(id, scheduler.requests[id].tokens[-1])


def make_way(scheduler, *ids):
    scheduler.life.make_way(ids)
    assert scheduler.check_integrity() == []


def test_its_prompt_runs_up_to_the_last_token():
    scheduler = make(max_tokens=8)
    hold(scheduler, 1, [1] * 12)
    assert step(scheduler) == ([(1, 0, 8, 0)], []) and step(scheduler) == ([(1, 8, 3, 0)], [])
    assert scheduler.schedule() is None and scheduler.decoding() == [], "it has no drafts either"
    resume(scheduler, 1)
    ran, (output,) = step(scheduler)
    assert ran == [(1, 11, 1, 1)] and output.tokens == [1]
    assert step(scheduler)[0] == [(1, 12, 1, 1)]


def test_one_that_is_resumed_meanwhile_runs_as_any_other():
    scheduler = make(max_tokens=8)
    hold(scheduler, 1, [1] * 12)
    step(scheduler)
    resume(scheduler, 1)
    ran, (output,) = step(scheduler)
    assert ran == [(1, 8, 4, 1)] and output.tokens == [1]


def test_a_prompt_of_one_token_and_one_that_is_cached():
    scheduler = make(prefix_cache=PrefixCache(16))
    scheduler.submit(1, [4] * 33, greedy(1), seed=0)
    while scheduler.requests:
        step(scheduler)
    hold(scheduler, 2, [5])
    hold(scheduler, 3, [4] * 33)
    assert scheduler.schedule() is None and [request.computed_len for request in scheduler.running] == [0, 32]
    resume(scheduler, 2)
    resume(scheduler, 3)
    assert step(scheduler)[0] == [(2, 0, 1, 1), (3, 32, 1, 1)]


def test_it_gives_its_row_to_who_waits_and_comes_back():
    scheduler = make(max_rows=1)
    hold(scheduler, 1, [1] * 20)
    step(scheduler)
    scheduler.submit(2, [2] * 5, greedy(2), seed=0)
    make_way(scheduler, 1)
    assert scheduler.running, "a row that nobody was refused stays"
    assert scheduler.schedule() is None
    make_way(scheduler, 1)
    assert not scheduler.running
    assert step(scheduler)[0] == [(2, 0, 5, 1)] and step(scheduler)[0] == [(2, 5, 1, 1)]
    make_way(scheduler, 1)
    assert scheduler.schedule() is None, "without a row it waits until it is resumed"
    resume(scheduler, 1)
    assert step(scheduler)[0] == [(1, 0, 20, 1)]


def test_a_batch_in_flight_keeps_its_row():
    scheduler = make(max_rows=1)
    request = hold(scheduler, 1, [1] * 20)
    batch = scheduler.schedule()
    scheduler.submit(2, [2] * 5, greedy(2), seed=0)
    assert scheduler.schedule() is None
    make_way(scheduler, 1)
    assert request.row == 0
    scheduler.commit(batch, [])
    make_way(scheduler, 1)
    assert request.row == -1 and step(scheduler)[0] == [(2, 0, 5, 1)]


def test_one_that_finds_no_pages_blocks_nobody_behind_it():
    scheduler = make(num_pages=6, policy=EAGER)
    scheduler.submit(1, [1] * 60, greedy(2), seed=0)
    step(scheduler)
    hold(scheduler, 2, [2] * 60)
    assert step(scheduler)[0] == [(1, 32, 28, 1)]
    scheduler.submit(3, [3] * 10, greedy(2), seed=0)
    assert (3, 0, 7, 0) in step(scheduler)[0]


def test_its_pages_go_before_those_of_others():
    """A reply lacks a page: the youngest would give its own."""
    scheduler = make(num_pages=6, policy=EAGER)
    scheduler.submit(1, [1] * 15, greedy(20), seed=0)
    hold(scheduler, 2, [2] * 17)
    step(scheduler)
    scheduler.submit(3, [3] * 2, greedy(20), seed=0)
    step(scheduler)
    assert len(scheduler.running) == 3
    while not scheduler.counters.preemptions:
        step(scheduler)
    assert {request.id for request in scheduler.running} == {1, 3}


def test_who_begins_alike_waits_only_if_it_is_held_too():
    scheduler = make(num_pages=64, max_tokens=200, prefix_cache=PrefixCache(64))
    prompt = [5] * (LEAST_SHARED + 40)
    for id in (1, 2):
        hold(scheduler, id, prompt)
    assert step(scheduler)[0] == [(1, 0, len(prompt) - 1, 0)]
    assert scheduler.schedule() is None, "the second choice of a request waits for the first"
    scheduler.submit(3, prompt, greedy(2), seed=0)
    ran, (output,) = step(scheduler)
    assert ran == [(3, 0, len(prompt), 1)] and output.id == 3
    for id in (1, 2):
        resume(scheduler, id)
    assert (1, len(prompt) - 1, 1, 1) in step(scheduler)[0]


def test_cancelled_it_leaves_nothing():
    scheduler = make()
    hold(scheduler, 1, [1] * 40)
    batch = scheduler.schedule()
    assert scheduler.num_computed(1) == 32 and scheduler.cancel(1)
    assert scheduler.commit(batch, []) == [] and scheduler.cache.allocator.num_free == 16
    assert scheduler.check_integrity() == [] and not scheduler.requests


def test_windows_of_those_that_are_held_stay():
    """Where nothing can run somebody who lacks pages of a window loses its own; who is held lacks none."""
    geometry = PageGeometry(2, 16, 8)
    scheduler = make(num_pages=32, geometry=geometry)
    request = hold(scheduler, 1, [1] * 20)
    step(scheduler)
    assert scheduler.schedule() is None and request.row >= 0 and scheduler.counters.preemptions == 0
    resume(scheduler, 1)
    assert step(scheduler)[0] == [(1, 19, 1, 1)]


@pytest.mark.parametrize("end, runs", [(19, 19), (20, 4)])
def test_an_image_at_the_end_of_the_prompt(end, runs):
    """One that a step computes whole: if it has the last token, it waits with that."""
    image = PlacedImage(4, end - 4, b"", array("I", [9] * (end - 4)).tobytes(), whole=True)
    scheduler = make()
    hold(scheduler, 1, [1] * 20, options=RequestOptions(images=(image,)))
    batch = scheduler.schedule()
    assert shape(batch) == [(1, 0, runs, 0)]
    scheduler.commit(batch, [])
    assert scheduler.schedule() is None
    resume(scheduler, 1)
    assert step(scheduler)[0] == [(1, runs, 20 - runs, 1)]
