"""A tenant beside another's flood, on a machine whose steps take as long as their rows and prompt tokens."""

import pytest
from test_scheduler import greedy, make

from zse.scheduler.options import RequestOptions, SchedulingPolicy


def machine(num_decode, num_prompt):
    """Seconds, about those of a 135M model on two cores."""
    return 0.004 + 0.0015 * num_decode + 0.001 * num_prompt


def latencies(flood, max_rows=16, weight=1.0, **policy):
    """Of tenant b, which sends a request each second, for 20 of them; and how many tokens the flood got a second."""
    scheduler = make(
        num_pages=700,
        max_rows=max_rows,
        max_tokens=256,
        max_context=1024,
        max_waiting=2000,
        policy=SchedulingPolicy(**{"mixed_ratio": 3.0, "tenant_weights": {"b": weight}} | policy),
    )
    now, done, sent, flood_tokens = 0.0, {}, {}, 0
    # What b was like before the flood is known: the engine has run for a while.
    for warm_up in range(3):
        scheduler.submit(-1 - warm_up, [1] * 64, greedy(16), seed=0, now=now, options=RequestOptions(tenant="b"))
        while batch := scheduler.schedule(now):
            seconds = machine(batch.num_decode, batch.num_tokens - batch.num_decode)
            now += seconds
            scheduler.commit(batch, [(1, None)] * batch.num_samples, seconds)
    for id in range(flood):
        scheduler.submit(1000 + id, [1] * 64, greedy(100), seed=0, now=now, options=RequestOptions(tenant="a"))
    start = now + (5.0 if flood else 0.0)  # the first chunks of the flood are over
    while len(done) < 20:
        if len(sent) < 20 and now >= start + len(sent):
            sent[len(sent)] = now
            scheduler.submit(len(sent) - 1, [1] * 64, greedy(30), seed=0, now=now, options=RequestOptions(tenant="b"))
        batch = scheduler.schedule(now)
        if batch is None:
            now += 0.001
            continue
        seconds = machine(batch.num_decode, batch.num_tokens - batch.num_decode)
        now += seconds
        for output in scheduler.commit(batch, [(1, None)] * batch.num_samples, seconds):
            flood_tokens += output.id >= 1000
            if output.finish and output.id < 1000:
                done[output.id] = now - sent[output.id]
    return sorted(done.values()), flood_tokens / (now - start)


@pytest.mark.parametrize("max_rows", [8, 64])
def test_a_flood_of_one_tenant_leaves_the_others_latency_within_twice_its_own(max_rows):
    alone, _ = latencies(0, max_rows)
    beside, tokens = latencies(1000, max_rows)
    unfair, all_tokens = latencies(1000, max_rows, fair_share=False)
    # Of many rows one step may be as long as all of b's: the one that runs when it comes cannot be undone.
    step = 3 * machine(max_rows, 0) if max_rows > 8 else 0.0
    assert beside[-1] <= 2 * alone[-1] + step, f"{beside[-1] / alone[-1]:.2f}"
    assert unfair[0] > 4 * alone[-1]
    assert tokens > 0.4 * all_tokens  # the flood goes on


def test_a_smaller_weight_waits_longer():
    alone, _ = latencies(0)
    light, _ = latencies(1000, weight=0.25)
    equal, _ = latencies(1000)
    assert alone[-1] < equal[-1] < light[-1] <= 5 * 1.2 * alone[-1]


def test_one_tenant_alone_is_never_held_back():
    scheduler = make(policy=SchedulingPolicy(mixed_ratio=3.0))
    for id in range(6):
        scheduler.submit(id, [1] * 8, greedy(20), seed=0, options=RequestOptions(tenant="a"))
    while batch := scheduler.schedule():
        assert not scheduler.pace.debts and len(batch.entries) == len(scheduler.running)
        scheduler.commit(batch, [(1, None)] * batch.num_samples, 1.0)
