"""What jobs beside the requests use counts as their tenants': in share_of_jobs, in pages and in time."""

import pytest
from test_scheduler import greedy, make, step

from zse.cache.pages import BLOCK as PAGE
from zse.scheduler.options import RequestOptions, SchedulingPolicy


class Job:
    """As engine/jobs.py has them."""

    def __init__(self, tenant="", arrival=0, weight=None):
        self.options, self.arrival = RequestOptions(tenant=tenant, weight=weight), arrival


def submit(scheduler, id, tenant, prompt_len=4, max_tokens=2):
    return scheduler.submit(
        id, [id % 40 + 1] * prompt_len, greedy(max_tokens), seed=0, options=RequestOptions(tenant=tenant)
    )


def first_rows(scheduler, count):
    """Ids of the requests in the order in which they get a row."""
    order = []
    while len(order) < count:
        order += [id for id, *_ in step(scheduler)[0] if id not in order]
    return order[:count]


def test_a_tenants_jobs_count_against_its_requests():
    scheduler = make(max_rows=1)
    queue, job = scheduler.queue, Job("a")
    queue.enter_job(job)
    queue.start_job(job, 5000)
    for id in range(20):
        submit(scheduler, id, "a" if id < 10 else "b")
    assert first_rows(scheduler, 10) == list(range(10, 20))
    queue.end_job(job, unused=5000)  # cancelled before it ran
    while scheduler.requests.get(19):
        step(scheduler)
    assert first_rows(scheduler, 1) == [0] and queue.tenants["a"].jobs == 0


@pytest.mark.parametrize(("fair_share", "first"), [(True, True), (False, False)])
def test_a_flood_of_requests_does_not_keep_pages_from_another_tenants_job(fair_share, first):
    scheduler = make(num_pages=4, max_tokens=64, policy=SchedulingPolicy(fair_share=fair_share))
    for id in range(30):
        submit(scheduler, id, "a", prompt_len=2 * PAGE, max_tokens=8)
    scheduler.limits.check_job([1] * 3 * PAGE)
    job = Job("b", scheduler.num_arrivals)
    scheduler.queue.enter_job(job)
    for _ in range(60):
        step(scheduler)
        pages = scheduler.life.admit_job(3, job)
        if pages is not None:
            break
    assert (pages is not None) is first
    assert scheduler.queue.num_waiting > 15


def test_a_flood_of_jobs_does_not_keep_pages_from_another_tenants_requests():
    scheduler = make(num_pages=4, max_tokens=64)
    job = Job("a")
    scheduler.queue.enter_job(job)
    pages = scheduler.life.admit_job(3, job)
    scheduler.queue.start_job(job, 3 * PAGE)
    late = Job("a")
    scheduler.queue.enter_job(late)
    submit(scheduler, 1, "b", prompt_len=2 * PAGE)
    assert scheduler.schedule() is None
    assert scheduler.life.admit_job(1, late) is None  # it came first, but its tenant has had its share
    scheduler.life.release_job(job, pages)
    assert step(scheduler)[0][0][0] == 1 and scheduler.check_integrity() == []


def times(tenants, steps, step_s, chunk_s):
    """Seconds of steps and of chunks, with jobs of tenant "a" (and more with weights) all the time."""
    scheduler = make(max_rows=len(tenants))
    for id, (tenant, weight) in enumerate(tenants):
        scheduler.submit(id, [1], greedy(60), seed=0, options=RequestOptions(tenant=tenant, weight=weight))
    job, share_of_jobs = Job("a"), scheduler.job_share
    scheduler.queue.enter_job(job)
    step(scheduler)
    ran = chunks = longest = gap = 0.0
    for _ in range(steps):
        share_of_jobs.observe_step(step_s)
        ran += step_s
        if share_of_jobs.may_run():
            share_of_jobs.observe_chunk(chunk_s)
            chunks += chunk_s
            gap = 0.0
        gap += step_s
        longest = max(longest, gap)
    return chunks / (ran + chunks), longest


@pytest.mark.parametrize(
    ("tenants", "chunk_s", "share"),
    [
        ([("b", None)], 0.08, 1 / 2),
        ([("b", None)], 0.002, 1 / 6),
        ([("b", 3.0)], 0.08, 1 / 4),
        ([("a", None)], 0.08, 8 / 9),
        ([("b", None), ("c", None)], 0.05, 1 / 3),
        ([("a", None), ("b", None)], 0.05, 1 / 4),
    ],
)
def test_beside_other_tenants_requests_jobs_have_their_share_of_the_time(tenants, chunk_s, share):
    """A step takes 10 ms, and at most one chunk follows it."""
    found, gap = times(tenants, 1000, 0.01, chunk_s)
    assert found == pytest.approx(share, rel=0.03)
    assert gap <= chunk_s * (1 / share - 1) + 0.021  # and are not held back for longer


def test_jobs_run_where_no_step_can():
    scheduler = make()
    submit(scheduler, 1, "b")
    scheduler.queue.enter_job(Job("a"))
    share_of_jobs = scheduler.job_share
    share_of_jobs.observe_step(0.01)
    share_of_jobs.observe_chunk(10.0)
    share_of_jobs.observe_step(0.01)
    assert not share_of_jobs.may_run() and share_of_jobs.may_run()
