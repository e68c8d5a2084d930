"""Chunks of prompts beside replies, sized by measured times: against machines whose times are known."""

import random
from array import array
from types import SimpleNamespace

import pytest
from test_scheduler import greedy, make

from zse.scheduler.batch import StepBudget
from zse.scheduler.options import SchedulingPolicy


def walk(machine, ratio=3.0, rows=4, prompt=4096, context_cost=0.0, noise=0.0):
    """Times of steps beside replies while a prompt is computed, over the decode step's; the prompt's time over its time
    alone in chunks of 256."""
    rng = random.Random(3)
    scheduler = make(
        num_pages=1000, max_tokens=256, max_context=8192, max_rows=8, policy=SchedulingPolicy(mixed_ratio=ratio)
    )
    for id in range(rows):
        scheduler.submit(id, [1] * 8, greedy(4000), seed=id)

    def step():
        batch = scheduler.schedule()
        num_prompt = batch.num_tokens - batch.num_decode
        done = max((entry.start for entry in batch.entries[batch.num_decode :]), default=0)
        seconds = machine(batch.num_decode, num_prompt) + context_cost * num_prompt * done
        scheduler.commit(batch, [(1, None)] * batch.num_samples, seconds * (1 + noise * rng.random()))
        return seconds

    for _ in range(50):
        idle = step()
    scheduler.submit(9, [2] * prompt, greedy(9), seed=9)
    times = []
    while scheduler.requests.get(9) is None or scheduler.requests.get(9).computed_len < prompt:
        times.append(step())
    chunks = range(0, prompt, 256)
    alone = sum(machine(0, 256) + context_cost * 256 * start for start in chunks)
    return sorted(times)[int(0.99 * len(times))] / idle, sum(times) / alone


DEFAULT = 77  # prompt tokens of a step beside four replies, before times are measured


def beside_replies(default):
    return StepBudget(max_tokens=256, mixed_tokens=4 + default, max_rows=8, ratio=3.0)


def observe(budget, num_decode, num_prompt, seconds, num_drafts=0):
    """A step that decoded so many rows, with so many drafts, beside so many prompt tokens took `seconds`."""
    lines = num_decode + num_drafts
    budget.observe(
        SimpleNamespace(num_decode=lines, num_rows=num_decode, num_tokens=lines + num_prompt, num_samples=lines),
        seconds,
    )


def linear(num_decode, num_prompt):
    return 0.004 + 0.001 * num_decode + 0.001 * num_prompt


def with_jump(num_decode, num_prompt):
    return linear(num_decode, num_prompt) + 0.004 * (num_prompt > 0)


@pytest.mark.parametrize(
    ("machine", "context_cost", "noise"),
    [(linear, 0.0, 0.0), (with_jump, 0.0, 0.0), (linear, 5e-7, 0.0), (linear, 0.0, 0.2)],
)
def test_replies_and_the_prompt_share_the_machine_as_the_ratio_says(machine, context_cost, noise):
    slowest, longer = walk(machine, context_cost=context_cost, noise=noise)
    assert slowest < 3.4
    if machine is linear:
        assert longer < 1.7
    slower, sooner = walk(machine, ratio=6.0, context_cost=context_cost, noise=noise)
    assert slower > slowest and sooner < longer


def test_nobody_decodes_full_chunks():
    scheduler = make(max_tokens=64, num_pages=100, policy=SchedulingPolicy(mixed_ratio=3.0))
    observe(scheduler.budget, 2, 0, 0.001)
    observe(scheduler.budget, 2, 8, 0.1)
    scheduler.submit(1, [1] * 150, greedy(2), seed=0)
    for count in (64, 64, 22):
        batch = scheduler.schedule()
        assert batch.num_tokens == count
        scheduler.commit(batch, [(1, None)] * batch.num_samples)
    scheduler.submit(2, [1] * 150, greedy(2), seed=0)
    # Dear beside a reply: the least that prompts get.
    assert scheduler.schedule().num_tokens == 1 + 1


def test_one_late_step_changes_little():
    budget = beside_replies(DEFAULT)
    for _ in range(30):
        observe(budget, 4, 0, 0.010)
    for _ in range(10):
        observe(budget, 4, 20, 0.030)
    assert budget.prefill(4) == 20
    observe(budget, 4, 0, 1.0)
    assert 20 <= budget.prefill(4) <= 30
    observe(budget, 4, 20, 1.0)
    assert budget.prefill(4) >= 8


def test_replies_wait_as_for_their_slow_steps():
    """Steps with drafts, and every fifth step that something held up, are what the bound is a multiple of."""
    even, drafting, uneven = (beside_replies(DEFAULT) for _ in range(3))
    for number in range(300):
        observe(even, 4, 0, 0.010)
        observe(drafting, 4, 0, 0.010 if number < 20 else 0.030, num_drafts=0 if number < 20 else 20)
        observe(uneven, 4, 0, 0.010 if number % 5 else 0.020)
    for budget in (even, drafting, uneven):
        for _ in range(10):
            observe(budget, 4, 20, 0.030)
    assert even.prefill(4) == 20
    assert 78 <= drafting.prefill(4) <= 80
    assert 25 <= uneven.prefill(4) <= 40


def test_what_is_not_measured_yet_is_the_default():
    budget = beside_replies(DEFAULT)
    assert budget.prefill(4) == DEFAULT
    observe(budget, 4, 0, 0.010)
    assert budget.prefill(4) == DEFAULT
    observe(budget, 0, 100, 0.100)  # a prompt alone: a first guess at what a token costs
    assert budget.prefill(4) == 20
    assert budget.prefill(100) == 80  # of 100 rows a step is likely to take four times what it takes of 4


def test_prompts_come_before_drafts():
    scheduler = make(
        num_pages=1000,
        max_tokens=256,
        max_context=8192,
        max_rows=8,
        max_drafts=8,
        policy=SchedulingPolicy(mixed_ratio=3.0),
    )
    for id in range(4):
        scheduler.submit(id, [1] * 8, greedy(4000), seed=id)
    sizes = []
    for number in range(120):
        if number == 60:
            assert not scheduler.builder.has_prompts()
            scheduler.submit(9, [2] * 4096, greedy(9), seed=9)
            assert scheduler.builder.has_prompts()
        batch = scheduler.schedule()
        scheduler.commit(
            batch, [(1, None)] * batch.num_samples, linear(batch.num_decode, batch.num_tokens - batch.num_decode)
        )
        sizes.append(batch.num_tokens)
    assert scheduler.builder.has_prompts()
    assert set(sizes[80:]) <= {19, 20}  # 3 x 8 ms: 16 prompt tokens fit


def test_steps_with_drafts_are_what_replies_waited_for():
    """They say nothing of what prompt tokens cost, and are of as many rows as they have requests."""
    scheduler = make(
        num_pages=1000,
        max_tokens=256,
        max_context=8192,
        max_rows=8,
        max_drafts=24,
        policy=SchedulingPolicy(mixed_ratio=3.0),
    )
    requests = [scheduler.submit(id, [1] * 8, greedy(4000), seed=id) for id in range(4)]
    sizes = []
    for number in range(260):
        if 20 < number < 200:
            for request in requests:
                request.drafts = array("i", [2] * 4)  # none is accepted: the model says 1
        if number == 200:
            scheduler.submit(9, [2] * 4096, greedy(9), seed=9)
        batch = scheduler.schedule()
        scheduler.commit(
            batch, [(1, None)] * batch.num_samples, linear(batch.num_decode, batch.num_tokens - batch.num_decode)
        )
        sizes.append(batch.num_tokens)
    assert sizes[100] == 20 and scheduler.budget.token_s == pytest.approx(0.001, rel=0.02)
    # 3 x 24 ms, of which the replies without drafts take 8 and a prompt token one.
    assert set(sizes[-40:]) <= {67, 68}
