"""A tenant's cached pages beside another that floods: the flood takes its own share of the cache, not theirs.

The scheduler and the cache manager are the real ones, the machine is a formula (test_light_tenant.py). A light tenant asks about its
documents in turn, a question a second or once the last is answered; the figure is the share of its prompt tokens that were in the cache."""

import random

import pytest
from test_light_tenant import FIXED_S, ROW_S, TOKEN_S

from zse.cache.prefix import PrefixCache
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions, SchedulingPolicy
from zse.scheduler.scheduler import Scheduler

PAGES, PAGE = 1024, 16
DOCUMENTS, DOCUMENT = 8, 24 * PAGE  # 192 pages and 16 of questions: less than a share of four
VISITS = 60
SEED = 5


class Flooded:
    """hit_rate(): of tenant b, beside `clients` of each of `floods` other tenants that send random prompts of at most `most` tokens."""

    def __init__(self, clients: int, floods: int = 1, most: int = 512, max_rows: int = 64):
        self.scheduler = Scheduler(
            num_pages=PAGES,
            max_rows=max_rows,
            max_tokens=512,
            max_context=4096,
            vocab_size=1000,
            max_waiting=2000,
            prefix_cache=PrefixCache(PAGES),
            policy=SchedulingPolicy(mixed_ratio=3.0),
        )
        self.draw, self.now, self.next_id, self.most = random.Random(SEED), 0.0, 0, most
        self.documents = [[self.draw.randrange(1000) for _ in range(DOCUMENT)] for _ in range(DOCUMENTS)]
        self.tenant_of: dict[int, str] = {}
        self.asked = self.found = self.visits = self.flood_tokens = 0
        for number in range(floods):
            for _ in range(clients):
                self.flood(f"flood {number}")

    def submit(self, tenant: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        options = RequestOptions(tenant=tenant)
        self.scheduler.submit(self.next_id, prompt, params, seed=0, now=self.now, options=options)
        self.tenant_of[self.next_id] = tenant
        self.next_id += 1

    def flood(self, tenant: str) -> None:
        length = self.draw.randint(32, self.most)
        self.submit(tenant, [self.draw.randrange(1000) for _ in range(length)], self.draw.randint(32, 128))

    def visit(self) -> None:
        document = self.documents[self.visits % DOCUMENTS]
        self.submit("b", document + [self.draw.randrange(1000) for _ in range(20)], 16)
        self.visits += 1

    def run(self) -> "Flooded":
        scheduler, next_visit = self.scheduler, 2.0
        while self.visits < VISITS or "b" in self.tenant_of.values():
            if self.now >= next_visit and self.visits < VISITS and "b" not in self.tenant_of.values():
                self.visit()
                next_visit = self.now + 1.0
            batch = scheduler.schedule(self.now)
            if batch is None:
                self.now += 0.0005
                continue
            prompts = batch.num_tokens - batch.num_decode
            taken = FIXED_S + ROW_S * batch.num_decode + TOKEN_S * prompts
            self.now += taken
            if self.visits > DOCUMENTS:
                for entry in batch.entries:
                    request = entry.request
                    self.flood_tokens += entry.count * (request.options.tenant != "b")
                    if request.options.tenant == "b" and request.first_len == entry.start:  # its first chunk
                        self.asked += request.prompt_len
                        self.found += request.cached_len
            for output in scheduler.commit(batch, [(1, None)] * batch.num_samples, taken):
                if output.finish and (tenant := self.tenant_of.pop(output.id)) != "b":
                    self.flood(tenant)
        assert scheduler.check_integrity() == []
        return self

    @property
    def hit_rate(self) -> float:
        return self.found / self.asked


@pytest.mark.parametrize(
    ("clients", "floods", "most"), [(4, 1, 512), (64, 1, 512), (64, 1, 3000), (16, 3, 512), (40, 3, 1500)]
)
def test_a_flood_leaves_the_others_what_they_cached(clients, floods, most):
    alone, beside = Flooded(0).run(), Flooded(clients, floods, most).run()
    print(
        f"hit rate {alone.hit_rate:.3f} alone, {beside.hit_rate:.3f} beside; {beside.flood_tokens / beside.now:.0f} tokens/s"
    )
    assert alone.hit_rate > 0.9
    assert beside.hit_rate >= alone.hit_rate - 0.05


def test_a_tenant_that_runs_alone_has_the_whole_cache():
    """What nobody else has cached is kept from nobody: rows as without the quota."""
    free = Flooded(64, 1, 512)
    free.visit = lambda: setattr(free, "visits", free.visits + 1)
    most = 0
    schedule = free.scheduler.schedule

    def watched(now: float):
        nonlocal most
        most = max(most, len(free.scheduler.running))
        return schedule(now)

    free.scheduler.schedule = watched
    free.run()
    assert most >= 30


def test_prompts_of_a_tenant_with_many_rows_are_computed_beside_those_of_one_with_few():
    """By rows alone, a tenant that always has one prompt to compute kept another's from every step."""
    beside = Flooded(1, 3, 3000)
    for _ in range(24):
        beside.visit()
    beside.visits = VISITS
    beside.run()
    assert beside.now < 60
