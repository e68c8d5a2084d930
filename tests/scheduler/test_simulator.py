"""Random walks over the scheduler; see simulator.py for what must hold. ZSE_TEST_SEEDS=10000 is the long run."""

import os

import pytest
from simulator import Simulation

from zse.cache.manager import CacheManager
from zse.cache.pages import PageAllocator
from zse.cache.prefix import PrefixCache
from zse.cache.states import StateSlots
from zse.scheduler import lifecycle
from zse.scheduler.lifecycle import Lifecycle
from zse.scheduler.queue import FairQueue
from zse.scheduler.scheduler import Scheduler

SEEDS = int(os.environ.get("ZSE_TEST_SEEDS", "500"))
PARTS, OPERATIONS = 20, 1000 if SEEDS > 500 else 500
FIRST = 4  # parts that `make test` walks


def walk(seed: int, operations: int = OPERATIONS, **layout: bool) -> Simulation:
    """Every 16th walk is checked after every operation, the others after every 32nd: that is most of the time."""
    simulation = Simulation(seed, checks_every=32 if seed % 16 else 1, **layout)
    try:
        simulation.run(operations)
    except Exception as error:
        raise AssertionError(f"simulation seed {seed}: {type(error).__name__}: {error}") from error
    return simulation


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.exhaustive] * (part >= FIRST)) for part in range(PARTS)]
)
def test_invariants_hold_on_random_walks(part):
    for seed in range(part, SEEDS, PARTS):
        walk(seed)


@pytest.mark.parametrize("part", range(3))
def test_invariants_hold_with_groups_of_layers(part):
    totals: dict[str, float] = {}
    for seed in range(part, max(60, SEEDS // 8), 3):
        for name, value in walk(seed, 250, grouped=True).scheduler.snapshot().items():
            totals[name] = totals.get(name, 0) + value
    for name in ("trimmed_pages", "prefix_hits", "prefix_copied_pages", "prefix_evicted_pages", "preemptions", "forks"):
        assert totals[name] > 10, name


@pytest.mark.each()
@pytest.mark.parametrize("micro_batches, feeds", [(2, False), (3, True), (2, True), (3, False)])
def test_invariants_hold_with_micro_batches(micro_batches, feeds):
    """Of a pipeline."""
    ahead, totals = 0, {}
    for seed in range(max(40, SEEDS // 16)):
        simulation = walk(seed, 250, micro_batches=micro_batches, feeds=feeds, grouped=seed % 4 == 3)
        ahead += simulation.num_ahead
        for name, value in simulation.scheduler.snapshot().items():
            totals[name] = totals.get(name, 0) + value
    for name in ("finished", "preemptions", "swapped_in_pages", "prefix_hits", "accepted_tokens", "forks"):
        assert totals[name] > 10, name
    assert ahead > 1000


@pytest.mark.parametrize("layout", [{}, {"grouped": True}, {"states": True}, {"micro_batches": 2}])
def test_invariants_hold_with_requests_that_are_held(layout):
    """Before their first token. Others end while they are held."""
    totals: dict[str, float] = {"held": 0, "ready": 0}
    for seed in range(max(40, SEEDS // 16)):
        simulation = walk(seed, 250, holds=True, **layout)
        totals["held"] += simulation.num_held
        totals["ready"] += simulation.num_ready
        for name, value in simulation.scheduler.snapshot().items():
            totals[name] = totals.get(name, 0) + value
    for name in ("finished", "preemptions", "cancelled", "forks", "held", "ready"):
        assert totals[name] > 10, name


@pytest.mark.parametrize("part", range(3))
def test_invariants_hold_with_states(part):
    totals: dict[str, float] = {"kept": 0}
    for seed in range(part, max(135, SEEDS // 8), 3):
        simulation = walk(seed, 250, states=True, contiguous=seed % 8 == 7)
        totals["kept"] += simulation.device.num_kept
        for name, value in simulation.scheduler.snapshot().items():
            totals[name] = totals.get(name, 0) + value
    for name in (
        "prefix_hits",
        "preemptions",
        "forks",
        "swapped_in_pages",
        "state_hits",
        "state_taken",
        "state_evicted",
        "accepted_tokens",
        "kept",
    ):
        assert totals[name] > 5, name


def test_invariants_hold_with_a_run_of_pages_for_each_request():
    totals: dict[str, float] = {}
    for seed in range(max(40, SEEDS // 16)):
        for name, value in walk(seed, 250, contiguous=True).scheduler.snapshot().items():
            totals[name] = totals.get(name, 0) + value
    for name in ("finished", "preemptions", "swapped_in_pages", "forks"):
        assert totals[name] > 10, name


def test_little_is_recomputed_in_a_storm_of_preemptions():
    num_pinned = 0
    for seed in range(max(50, SEEDS // 8)):
        num_pinned += walk(seed, 500, grouped=seed % 5 == 0, storm=True).num_pinned
        if num_pinned > 50 and seed >= 30:  # the first are walked for what a walk checks
            break
    assert num_pinned > 50  # before their third preemption


# What a walk is worth its time for: it preempts, refuses, cancels in flight and fails rows.
SEEN = (
    "ahead",
    "preempted",
    "finished",
    "cancelled",
    "failed",
    "refused",
    "preemptions",
    "late_results",
    "ignored_cancels",
    "recomputed_tokens",
    "queue_wait_s",
    "prefix_hits",
    "prefix_hit_tokens",
    "prefix_evicted_pages",
    "prefix_copied_pages",
    "prefix_onloaded_pages",
    "forks",
    "swapped_out_pages",
    "swapped_in_pages",
    "drafted_tokens",
    "accepted_tokens",
    "timed_out",
    "deadlines_met",
    "deadlines_missed",
)


def test_walks_reach_every_state():
    """As soon as they have: test_invariants_hold_on_random_walks() has more of them."""
    totals = dict.fromkeys(SEEN, 0.0)
    for seed in range(80):
        simulation = walk(seed, 500)
        totals["ahead"] += simulation.num_ahead
        totals["preempted"] += simulation.num_preempted
        for name, value in simulation.scheduler.snapshot().items():
            totals[name] = totals.get(name, 0) + value
        if all(totals[name] > 20 for name in SEEN):
            break
    assert not [name for name in SEEN if totals[name] <= 20], totals


def test_the_same_seed_gives_the_same_trace():
    first, second = walk(5), walk(5)
    assert first.trace == second.trace and first.trace


# Bugs that a walk must find: what it is, and the patch.


def _leaked_page(patch):
    detach = CacheManager.detach
    patch.setattr(CacheManager, "detach", lambda self, sequence: detach(self, sequence)[1:])


def _double_free(patch):
    release = PageAllocator.release
    patch.setattr(PageAllocator, "release", lambda self, pages: [release(self, list(pages)) for _ in range(2)])


def _forgotten_row(patch):
    end = Lifecycle.end

    def forgets(self, request):
        end(self, request)
        del self.free_rows[:1]

    patch.setattr(Lifecycle, "end", forgets)


def _wrong_share(patch):
    match = PrefixCache.match
    patch.setattr(PrefixCache, "match", lambda self, salt, data, **how: match(self, ("a", ""), data, **how))


def _shared_page_is_written(patch):
    patch.setattr(CacheManager, "take_transfers", lambda self: [])


def _pages_in_flight_are_given_away(patch):
    end = Lifecycle.end

    def at_once(self, request):
        end(self, request)
        if request in self.retired:
            row, pages, slot = self.retired[request]
            self.cache.allocator.release(pages)
            self.retired[request] = row, [], slot

    patch.setattr(Lifecycle, "end", at_once)


def _rows_in_flight_are_given_away(patch):
    end = Lifecycle.end

    def at_once(self, request):
        row = request.row
        end(self, request)
        if request in self.retired:
            self.free_rows.append(row)

    patch.setattr(Lifecycle, "end", at_once)


def _lost_finish(patch):
    commit = Scheduler.commit
    patch.setattr(
        Scheduler,
        "commit",
        lambda self, batch, sampled, seconds: [
            output for output in commit(self, batch, sampled, seconds) if output.finish != "stop"
        ],
    )


def _two_ends(patch):
    commit = Scheduler.commit
    patch.setattr(
        Scheduler,
        "commit",
        lambda self, batch, sampled, seconds: [
            output for output in commit(self, batch, sampled, seconds) for _ in range(2 if output.finish else 1)
        ],
    )


def _numbers_that_are_not_finite_are_cached(patch):
    fail = Scheduler._fail

    def trusts(self, request):
        request.committed_len = request.computed_len
        return fail(self, request)

    patch.setattr(Scheduler, "_fail", trusts)
    patch.setattr(CacheManager, "distrust", lambda self, sequence: None)
    patch.setattr(Simulation, "nan_chance", 0.3)


def _deadlines_are_forgotten(patch):
    patch.setattr(Scheduler, "expire", lambda self, now: [])


def _running_requests_time_out(patch):
    expire = Scheduler.expire

    def forgets_that_they_ran(self, now):
        for request in self.running:
            request.residency = 0
        return expire(self, now)

    patch.setattr(Scheduler, "expire", forgets_that_they_ran)


def _preempted_for_ever(patch):
    patch.setattr(lifecycle, "MAX_PREEMPTIONS", 1 << 30)
    patch.setattr(Simulation, "cancel", Simulation.preempt)
    patch.setattr(Simulation, "fork", Simulation.preempt)
    patch.setattr(lifecycle, "choose_victim", lambda requests: requests[-1] if requests else None)


def _recomputed_for_ever(patch):
    patch.setattr(lifecycle, "MAX_RECOMPUTED", 10.0)
    patch.setattr(Simulation, "always_storms", True)


def _a_state_in_flight_is_given_away(patch):
    def at_once(self, sequence):
        slot = detach(self, sequence)
        self.give(slot)
        return -1

    detach = StateSlots.detach
    patch.setattr(StateSlots, "detach", at_once)
    patch.setattr(StateSlots, "keep_live", lambda *arguments: None)


def _a_state_is_kept_behind_too_few_tokens(patch):
    keep = StateSlots.keep
    patch.setattr(StateSlots, "keep", lambda self, sequence, length: keep(self, sequence, max(1, length - 1)))


def _a_state_behind_another_token_is_taken(patch):
    settle = StateSlots.settle
    patch.setattr(StateSlots, "settle", lambda self, sequence, accepted=0: settle(self, sequence, max(0, accepted - 1)))


def _a_state_that_a_run_wrote_over_goes_on(patch):
    preempt = lifecycle.Lifecycle.preempt
    patch.setattr(
        lifecycle.Lifecycle, "preempt", lambda self, request, is_lost=False: None if is_lost else preempt(self, request)
    )
    patch.setattr(Simulation, "nan_chance", 0.3)


def _a_state_outlives_its_page(patch):
    patch.setattr(StateSlots, "drop", lambda self, node: None)


def _the_queue_is_not_bounded(patch):
    check = Scheduler.check_room
    patch.setattr(Scheduler, "check_room", lambda self, id, others, waiting: check(self, id, others, min(waiting, 2)))


def _a_tenant_never_comes(patch):
    head = FairQueue.head

    def skips(self, *arguments):
        request = head(self, *arguments)
        return None if request is not None and request.options.tenant == "b" else request

    patch.setattr(FairQueue, "head", skips)


def _one_token_too_many(patch):
    submit = Scheduler.submit

    def keeps_on(self, *arguments, **options):
        request = submit(self, *arguments, **options)
        request.stop_ids = frozenset()
        return request

    patch.setattr(Scheduler, "submit", keeps_on)


@pytest.mark.parametrize(
    "bug",
    [
        _leaked_page,
        _double_free,
        _forgotten_row,
        _wrong_share,
        _a_state_in_flight_is_given_away,
        _a_state_is_kept_behind_too_few_tokens,
        _a_state_behind_another_token_is_taken,
        _a_state_that_a_run_wrote_over_goes_on,
        _a_state_outlives_its_page,
        _shared_page_is_written,
        _pages_in_flight_are_given_away,
        _rows_in_flight_are_given_away,
        _lost_finish,
        _two_ends,
        _numbers_that_are_not_finite_are_cached,
        _deadlines_are_forgotten,
        _running_requests_time_out,
        _preempted_for_ever,
        _recomputed_for_ever,
        _the_queue_is_not_bounded,
        _a_tenant_never_comes,
        _one_token_too_many,
    ],
    ids=lambda bug: bug.__name__[1:],
)
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="simulation seed"):
        for seed in range(100):
            walk(seed, 300, states="_a_state" in bug.__name__)
